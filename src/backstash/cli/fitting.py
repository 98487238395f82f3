"""The command ``fit``: the largest batch or text on a card that is not here, with the time of its steps."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from backstash.cli.endings import exits
from backstash.cli.options import Arguments, IsModule, NoProgress, Script, file_for
from backstash.cli.planning import Allow, check_options, words
from backstash.cli.waiting import waiting
from backstash.forecast.cards import CARDS, card_named
from backstash.forecast.fitting import Fit, Fits
from backstash.forecast.program import SIZE, traced_script
from backstash.forecast.sizes import SizedSteps
from backstash.integrations.launcher import require_script
from backstash.planning.model.budget import REORDERED, families
from backstash.stash.tables import amount, table


def complete_card(incomplete: str) -> list[tuple[str, str]]:
    """The cards whose names begin like the last of a list with commas, each with its maker's name, for a shell."""
    head, comma, last = incomplete.rpartition(",")
    return [(f"{head}{comma}{card.name}", card.words) for card in CARDS.values() if card.name.startswith(last)]


def fit(
    script: Script,
    device: Annotated[
        str,
        typer.Option(
            metavar="CARDS", help=f"Cards, with commas between: {', '.join(CARDS)}.", autocompletion=complete_card
        ),
    ],
    args: Arguments = None,
    is_module: IsModule = False,
    unit: Annotated[int, typer.Option(min=1, help="What a size is a multiple of, such as 256 for tokens.")] = 1,
    allow: Allow = "lossless,recompute",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.", show_default=False)] = None,
    quiet: NoProgress = False,
) -> None:
    """Say what fits on a card that is not here: the largest size of a script's batch or text, and the time of a step.

    The script runs on the CPU, without numbers and without their memory. {size} among its arguments stands for the
    size, as in `backstash fit --device h100-80gb train.py --batch {size}`. Without it, the size that the script has is
    tried. Options that stand in front of the script are the script's own behind it, and so is all behind --.
    """
    out = file_for("--out", out)
    check_options(None, allow)
    with exits():
        cards = [card_named(name) for name in words(device)]
        if not cards:
            raise typer.BadParameter("no card is named", param_hint="--device")
        reordered = [word for word in words(allow) if word == REORDERED]
        if needing_numbers := reordered or sorted({"bounded"}.intersection(families(words(allow)))):
            raise typer.BadParameter(
                f"{needing_numbers[0]} changes gradients, which is measured on numbers, and nothing is computed here: "
                f"leave it out, and plan with it on the card",
                param_hint="--allow",
            )
        require_script(script, is_module)
        with waiting(quiet) as say:
            say(f"the first steps of {script}")
            steps = traced_script(script, args or (), is_module=is_module, unit=unit)
            say("what fits")
            fits = {card.name: Fits(steps, card, words(allow)) for card in cards}
            found = {name: each.all() for name, each in fits.items()}
    document = {
        name: {"room": fits[name].room, "unit": unit, "ways": [asdict(each) for each in ways]}
        for name, ways in found.items()
    }
    if out is not None:
        out.write_text(json.dumps(document, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(document, indent=1))
        return
    for name, ways in found.items():
        typer.echo("\n".join(_page(fits[name], ways, unit)))
    typer.echo("\n".join(_unknown(steps)))


def _page(fits: Fits, ways: list[Fit], unit: int) -> list[str]:
    card = fits.card
    rows = []
    for each in ways:
        size = f"{each.units * unit:,}" if fits.steps.has_size else "yes"
        seconds = f"{1000 * each.seconds:,.0f} ms"
        if each.units:
            speed = (f"{each.units * unit / each.seconds:,.1f}",) if fits.steps.has_size else ()
        else:
            size, seconds, speed = "none" if fits.steps.has_size else "no", "", ("",) if fits.steps.has_size else ()
        rows.append((each.way, size, amount(each.peak_nbytes), seconds, *speed))
    head = ("", "largest size", "peak", "step", "per second") if fits.steps.has_size else ("", "fits", "peak", "step")
    first = f"{card.name}, {card.words}: {amount(card.memory_nbytes)}, of which {amount(fits.room)} may be used"
    return [first, *table(head, rows, right=range(1, len(head))), ""]


def _unknown(steps: SizedSteps) -> list[str]:
    lines = [
        "Predicted, not measured. Peaks are those of tensors, with parameters, gradients and the optimizer's state;",
        "what libraries take for themselves while they compute is not known, nor what codecs such as zvc would save.",
        "Times are those of a step that reads no numbers back, at shares of the card's peaks that an H100 reached.",
    ]
    guessed = steps.traces[0].guessed
    if guessed:
        lines.append(
            f"The script asks for {guessed} numbers of tensors, which have none: each is taken as 1, masks as true."
        )
    if steps.traces[0].uncut:
        lines.append(f"Its blocks do not run in torch.utils.checkpoint: {steps.traces[0].uncut}")
    if steps.traces[0].unplanned:
        lines.append(f"What a plan would do is not known: {steps.traces[0].unplanned}")
    if steps.traces[0].computed:
        lines.append(f"It was run with its numbers on this machine. Without them it fails: {steps.traces[0].computed}")
    if not steps.has_size:
        lines.append(f"Put {SIZE} in the place of the script's batch or length to learn how large it may be.")
    return lines

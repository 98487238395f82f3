"""The command ``demo``: how large a training can become in the memory that there is, in its own units."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from backstash.cli.endings import exits
from backstash.cli.options import NoProgress, parse_size
from backstash.cli.waiting import INTERRUPTED_NOTE, waiting
from backstash.demos.demonstrations import DEMONSTRATIONS
from backstash.demos.picture import save_picture, text_picture
from backstash.demos.reaching import Largest, reach
from backstash.errors import UnknownNameError
from backstash.integrations.launcher import INTERRUPTED


def demo(
    name: Annotated[
        str, typer.Argument(help="; ".join(f"{each.name}: {each.title}" for each in DEMONSTRATIONS.values()) + ".")
    ],
    memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="BYTES",
            help="Memory that a step may take above weights and gradients, such as 1GiB. Each has its own.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write NAME.json and NAME.png to this folder.", file_okay=False)
    ] = None,
    quiet: NoProgress = False,
) -> None:
    """Show how many images, tokens, voxels, layers or time steps fit into some memory: plain, and with backstash.

    It trains a small network of random weights, for some minutes on a CPU, needs no data, and counts every byte of each
    step. Ctrl-C shows what was found by then.
    """
    with exits():
        if name not in DEMONSTRATIONS:
            known = ", ".join(DEMONSTRATIONS)
            raise UnknownNameError(f"the demonstration {name!r} was asked for, but there are {known}.")
        demonstration = DEMONSTRATIONS[name]
        if memory == 0:
            raise typer.BadParameter("every step takes some memory: give more, such as 64MiB", param_hint="--memory")
        nbytes = demonstration.nbytes if memory is None else memory
        found: list[Largest] = []
        interrupted = False
        with waiting(quiet) as told:
            try:
                for row in reach(demonstration, nbytes, told):
                    found.append(row)
            except KeyboardInterrupt:
                interrupted = True
    if found:
        typer.echo(text_picture(demonstration, nbytes, found))
    if out is not None and found:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"name": name, "nbytes": nbytes, "ways": [asdict(row) for row in found]}, indent=1)
        (out / f"{name}.json").write_text(text + "\n")
        try:
            save_picture(demonstration, nbytes, found, out / f"{name}.png")
        except ModuleNotFoundError as missing:
            if missing.name != "matplotlib":
                raise
            typer.echo("backstash: no picture, because matplotlib is not installed. Run: pip install 'backstash[plot]'")
        else:
            typer.echo(f"wrote {out / name}.json, .png")
    if interrupted:
        ways = f"{len(found)} of {len(demonstration.ways)} ways"
        typer.echo(f"backstash: {INTERRUPTED_NOTE}: {ways}", err=True)
        raise typer.Exit(INTERRUPTED)

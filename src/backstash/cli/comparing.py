"""The command ``compare``: a script under several policies, side by side."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from backstash import policies as registry
from backstash.cli.endings import exits
from backstash.cli.options import (
    AllocatorName,
    Arguments,
    IsModule,
    MinNbytes,
    Quiet,
    Script,
    complete_policies,
)
from backstash.cli.tables import end, progress, show
from backstash.integrations import allocator as allocators
from backstash.report.compare import Program, runs_of
from backstash.report.compare import compare as run_comparison
from backstash.report.watch import PLAIN


def compare(
    script: Script,
    args: Arguments = None,
    is_module: IsModule = False,
    policies: Annotated[
        str,
        typer.Option(
            envvar="BACKSTASH_POLICIES",
            help="Names, comma-separated; plain: no Session; all: plain and every policy.",
            autocompletion=complete_policies,
        ),
    ] = "plain,lossless",
    repeats: Annotated[
        int, typer.Option(min=1, envvar="BACKSTASH_REPEATS", help="Runs of each policy, taking turns.")
    ] = 1,
    min_nbytes: MinNbytes = None,
    allocator: AllocatorName = "auto",
    out: Annotated[Path, typer.Option(envvar="BACKSTASH_OUT", help="Folder of the results.", file_okay=False)] = Path(
        "backstash-compare"
    ),
    quiet: Quiet = False,
) -> None:
    """Run a training script, unchanged, under several policies, each in a fresh process, and show them side by side.

    Writes comparison.json, comparison.png and comparison.svg. After the script, long options
    that compare knows are its own; everything else is passed to the script, and so is all that follows --.
    """
    try:
        from backstash.report import plot
    except ModuleNotFoundError as missing:
        if missing.name != "matplotlib":
            raise
        typer.echo(
            "backstash: compare draws a chart, but matplotlib is not installed. Run: pip install 'backstash[cli,plot]'",
            err=True,
        )
        raise typer.Exit(1) from None
    names = names_of(policies)
    if not names:
        raise typer.BadParameter("no policy is named", param_hint="--policies")
    program = Program(script, tuple(args or ()), is_module, min_nbytes)
    with exits():
        chosen = allocators.choose_allocator(allocator)
        if chosen is not None and not quiet:
            typer.echo(f"backstash: measuring under {chosen.name} ({chosen.path}), plain under the system's as well")
        with progress(len(runs_of(names, chosen)) * repeats, quiet) as update:
            comparison = run_comparison(program, names, repeats, chosen, update)
    if not quiet:
        show(comparison)
        if comparison.shortage:
            typer.echo(comparison.shortage)
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out) as unfinished:  # no file is ever half written under its name
        folder = Path(unfinished)
        folder.joinpath("comparison.json").write_text(comparison.to_json() + "\n")
        plot.save(comparison, folder / "comparison.png", folder / "comparison.svg")
        for file in sorted(folder.iterdir()):
            os.replace(file, out / file.name)
    if not quiet:
        typer.echo(f"wrote {out / 'comparison'}.json, .png, .svg")
    end(comparison)


def names_of(text: str) -> list[str]:
    """The names in a list with commas, where ``all`` stands for plain and every policy. Each is there once."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [PLAIN, *(one.name for one in registry.descriptions())]
    return list(dict.fromkeys(name for one in names for name in (known if one == "all" else [one])))

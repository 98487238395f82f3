"""The command ``choose``: tries policies on a script and recommends."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer

from backstash import policies as registry
from backstash.cli.endings import exits
from backstash.cli.options import AllocatorName, Arguments, IsModule, MinNbytes, OnlyAdvice, Script
from backstash.cli.tables import end, progress, show
from backstash.integrations import allocator as allocators
from backstash.report.choose import recommend
from backstash.report.compare import TIMED, Program, compare, runs_of
from backstash.report.watch import PLAIN


def choose(
    script: Script,
    args: Arguments = None,
    is_module: IsModule = False,
    steps: Annotated[
        int, typer.Option(min=1, envvar="BACKSTASH_STEPS", help="Steps that are timed under each policy.")
    ] = TIMED,
    exact: Annotated[
        bool, typer.Option("--exact", envvar="BACKSTASH_EXACT", help="Only try policies that change no gradient.")
    ] = False,
    min_nbytes: MinNbytes = None,
    allocator: AllocatorName = "auto",
    quiet: OnlyAdvice = False,
) -> None:
    """Try the policies on a few steps of a training script, and recommend one.

    The script is started once for each policy, and ended after one step that warms up, one whose memory is counted, and
    --steps that are timed. After the script, long options that choose knows are its own; everything else is passed to
    the script, and so is all that follows --.
    """
    names = [PLAIN, *(one.name for one in registry.descriptions() if one.is_candidate and (one.is_exact or not exact))]
    program = Program(script, tuple(args or ()), is_module, min_nbytes, steps)
    with exits():
        chosen = allocators.choose_allocator(allocator)
        with progress(len(runs_of(names, chosen)), quiet) as update:
            comparison = compare(program, names, 1, chosen, update, is_tolerant=True, in_doubt=True)
        found = recommend(comparison)
    if not quiet:
        show(comparison)
        for label, message in comparison.failures:
            typer.echo(f"{label} could not be measured: {message.splitlines()[0]}")
        typer.echo("")
    if comparison.shortage:
        typer.echo(f"{textwrap.fill(comparison.shortage, 118)}\n")
    for line in found:
        typer.echo(textwrap.fill(line, 118, subsequent_indent="  "))
    end(comparison)

"""The command ``verify``: whether backward reads the bits that forward had, in an unchanged script."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from backstash.cli.endings import exits
from backstash.cli.options import Arguments, IsModule, Quiet, Script, file_for
from backstash.cli.waiting import INTERRUPTED_NOTE, waiting
from backstash.integrations.launcher import INTERRUPTED
from backstash.report.compare import Program
from backstash.report.verified import verify_script
from backstash.verifying.verdict import Verification, verification_page


def verify_command(
    script: Script,
    args: Arguments = None,
    is_module: IsModule = False,
    steps: Annotated[int, typer.Option(min=1, envvar="BACKSTASH_STEPS", help="Training steps that are watched.")] = 2,
    seed: Annotated[int, typer.Option(envvar="BACKSTASH_SEED", help="Seed of all default generators.")] = 0,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Relative error up to which hooks may round what they store.")
    ] = 0.0,
    fix: Annotated[bool, typer.Option("--fix", help="Also say what to change, one line for each cause.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Also write the result to this file: .json, .html, or text.", show_default=False)
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Check that backward reads the bits that forward had, under any checkpoint, offloader or compiler.

    The script is started as it is, and with every saver switched off, and ended after some steps. If anything differs,
    each is started once more, to say where, how far and why. The exit code is 1 if something differs that is not meant.
    After the script, long options that verify knows are its own; everything else is passed to the script.
    """
    out = file_for("--out", out)
    program = Program(script, tuple(args or ()), is_module)

    with exits(), waiting(quiet) as say:

        def told(name: str, line: str | None) -> None:
            if line is None and not quiet:
                typer.echo(f"backstash: {program.command}, {name}", err=True)
            say(name if line is None else f"{name}: {line:.60}")

        found = verify_script(program, steps, seed, tolerance, told)
    if out is not None:
        out.write_text(_as_file(found, out.suffix))
    if as_json:
        typer.echo(found.to_json())
    elif not quiet:
        typer.echo("\n".join(found.lines(fix)))
        if found.fixes() and not fix:
            typer.echo("\nbackstash verify --fix says what to change")
    if found.is_interrupted:
        typer.echo(f"backstash: {INTERRUPTED_NOTE}, without a closer look", err=True)
    raise typer.Exit(INTERRUPTED if found.is_interrupted else found.exit_code)


def _as_file(found: Verification, suffix: str) -> str:
    if suffix == ".json":
        return found.to_json() + "\n"
    return verification_page(found) if suffix == ".html" else "\n".join(found.lines(fix=True)) + "\n"

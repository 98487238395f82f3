"""The command line as a whole: its groups of commands, one file each, and what holds for all of them."""

from __future__ import annotations

from typing import Annotated

import typer

from backstash.cli import (
    benching,
    choosing,
    comparing,
    demonstrating,
    fitting,
    listing,
    planning,
    running,
    settings,
    verifying,
)
from backstash.cli.endings import exits
from backstash.cli.options import ScriptCommand
from backstash.version import __version__

app = typer.Typer(
    name="backstash",
    help="Train bigger networks in the memory you have: saved tensors, stored smaller.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_OWN_FIRST = {"allow_interspersed_args": False}  # what follows the script is the script's

app.command(context_settings=_OWN_FIRST)(running.run)
app.command(context_settings=_OWN_FIRST)(planning.profile)
app.command(context_settings=_OWN_FIRST)(planning.plan)
app.command(context_settings=_OWN_FIRST)(planning.estimate)
app.command(cls=ScriptCommand)(fitting.fit)
app.command("verify", cls=ScriptCommand)(verifying.verify_command)
app.command(cls=ScriptCommand)(comparing.compare)
app.command(cls=ScriptCommand)(choosing.choose)
app.command()(demonstrating.demo)
app.command()(listing.policies)
app.command()(listing.doctor)
# Outside a clone of the repository it could only say that there is none.
app.command(context_settings=_OWN_FIRST, hidden=benching.clone_with("run") is None)(benching.bench)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"backstash {__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train bigger networks in the memory you have: saved tensors, stored smaller.

    An option that is not given is taken from the environment (BACKSTASH_POLICY for --policy, and so on), else from the
    table [tool.backstash] of the nearest pyproject.toml, else it has its default.
    """
    with exits():
        commands = context.command.commands  # type: ignore[attr-defined]  # of a group
        context.default_map = settings.defaults(commands)

"""The commands ``policies`` and ``doctor``: what there is, and whether it works here."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from backstash import policies as registry
from backstash.report import doctor as doctoring


def policies(
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """List the policies: whether the gradients stay exact, what each does, and when to use it."""
    listed = registry.descriptions()
    if as_json:
        typer.echo(json.dumps([{name: getattr(one, name) for name in _FIELDS} for one in listed], indent=1))
        return
    table = Table("name", "gradients", "what it does", "when to use it", box=box.SIMPLE_HEAD, show_lines=True)
    for one in listed:
        table.add_row(one.name, one.gradients, one.does, one.use_when)
    terminal = Console()
    (terminal if terminal.is_terminal else Console(width=WIDTH)).print(table)


WIDTH = 118
"""Characters of a line where there is no terminal."""

_FIELDS = ("name", "is_exact", "gradients", "does", "use_when")


def doctor() -> None:
    """Tell which kernels serve this machine, and check every codec. Exit code 1: something is wrong."""
    wrong = 0
    for finding in doctoring.examine():
        typer.echo(f"{'ok   ' if finding.ok else 'WRONG'} {finding.subject}: {finding.text}")
        wrong += not finding.ok
    typer.echo("everything works" if not wrong else f"{wrong} of these are wrong")
    raise typer.Exit(1 if wrong else 0)

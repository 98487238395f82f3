"""How ``backstash compare`` shows its progress and its result in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Column, Table

from backstash.report.compare import Comparison, Progress, Row
from backstash.stash.ledger import mib


@contextmanager
def progress(total: int) -> Iterator[Progress]:
    """Shows a bar on stderr with the last line that the script has printed. Yields the function that updates both."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[line]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, line="")
        started = 0

        def update(policy: str, repeat: int, line: str | None) -> None:
            nonlocal started
            started += line is None  # a run that begins has no line yet
            bar.update(task, description=f"{policy}, run {repeat + 1}", completed=started - 1, line=line or "")

        yield update


def show(comparison: Comparison) -> None:
    """Prints the results of all policies side by side, and the machine that they were measured on."""
    rows = comparison.rows()
    base = next(row for row in rows if row.policy == comparison.baseline)
    lines: list[tuple[str, Callable[[Row], str]]] = [
        ("counted peak", lambda row: _amount(row.peak_nbytes, base.peak_nbytes)),
        ("resident peak", lambda row: _amount(row.resident_nbytes, base.resident_nbytes)),
        ("stash", _stash),
        ("step time", lambda row: _time(row.step_seconds, base.step_seconds)),
        ("final loss", lambda row: "-" if row.final_loss is None else repr(row.final_loss)),
        (f"bits equal to {base.policy}", lambda row: "" if row is base else _equal(row)),
    ]
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for row in rows:
        table.add_column(row.policy, justify="right")
    for label, cell in lines:
        table.add_row(label, *(cell(row) for row in rows))
    terminal = Console()
    # Without a terminal, Rich guesses a width of 80 and would cut the table to it.
    console = terminal if terminal.is_terminal else Console(width=30 + 40 * len(rows))
    typer.echo(f"\n{' '.join([comparison.script, *comparison.args])}\n{comparison.made_on}")
    console.print(table)
    unequal = [row for row in rows if row.losses_equal is False or not row.weights_equal]
    if unequal and len(comparison.of(base.policy)) == 1:
        typer.echo("Not all bits are equal. Whether the script repeats itself at all is told by --repeats 2.")


def _amount(nbytes: int | None, base: int | None) -> str:
    return "-" if nbytes is None else mib(nbytes) + _relative(nbytes, base)


def _stash(row: Row) -> str:
    if row.stash_nbytes is None or row.saved_nbytes is None:
        return "-"
    if row.stash_nbytes == row.saved_nbytes:
        return mib(row.stash_nbytes)
    return f"{mib(row.stash_nbytes)} (ratio {row.saved_nbytes / row.stash_nbytes:.2f})" if row.stash_nbytes else "0"


def _time(seconds: float | None, base: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f} ms" + _relative(seconds, base)


def _relative(value: float, base: float | None) -> str:
    return "" if not base or value == base else f" ({value / base:.2f}x)"


def _equal(row: Row) -> str:
    if row.losses_equal is None:
        return "weights" if row.weights_equal else "no"
    both = ("losses" * row.losses_equal, "weights" * row.weights_equal)
    return " and ".join(filter(None, both)) or "no"

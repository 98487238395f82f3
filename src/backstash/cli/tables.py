"""The progress and the results of ``compare`` and ``choose`` in a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Column, Table
from rich.text import Text

from backstash.cli.waiting import INTERRUPTED_NOTE, is_shown
from backstash.integrations.launcher import INTERRUPTED
from backstash.report.compare import Comparison, Progress, Row
from backstash.stash.tables import amount

WIDTH = 160
"""Characters of a line where there is no terminal."""


class TimeLeft(ProgressColumn):
    """The time that the runs still take, if each takes as long as those that are over did on average."""

    def render(self, task: Task) -> Text:
        """``"about 40 s left"``; nothing before the first run is over."""
        times: Sequence[float] = task.fields["times"]
        if not times or task.finished:
            return Text("")
        average = sum(times) / len(times)
        running = time.monotonic() - task.fields["begun"]
        left = max(average - running, 0.0) + average * ((task.total or 0) - task.completed - 1)
        return Text(f"about {left:.0f} s left" if left < 100 else f"about {left / 60:.0f} min left")


@contextmanager
def progress(total: int, quiet: bool = False) -> Iterator[Progress]:
    """Shows a bar on stderr with the last line that the script has printed. Yields the function that updates both."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeLeft(),
        TextColumn("{task.fields[line]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True, disable=not is_shown(quiet)) as bar:
        times: list[float] = []
        begun = time.monotonic()
        task = bar.add_task("", total=total, line="", times=times, begun=begun)
        started = 0

        def update(label: str, repeat: int, line: str | None) -> None:
            nonlocal started, begun
            if line is None:  # a run that begins has no line yet
                now = time.monotonic()
                if started:
                    times.append(now - begun)
                started, begun = started + 1, now
            name = f"{label}, run {repeat + 1}"
            bar.update(task, description=name, completed=started - 1, line=line or "", begun=begun)

        yield update


def show(comparison: Comparison) -> None:
    """Prints the results of all policies side by side, and the machine that they were measured on."""
    rows = comparison.rows()
    base = next(row for row in rows if row.label == comparison.baseline)
    lines: list[tuple[str, Callable[[Row], str]]] = [
        ("counted peak", lambda row: _amount(row.peak_nbytes, base.peak_nbytes)),
        ("resident peak", lambda row: _amount(row.resident_nbytes, base.resident_nbytes)),
        ("activations", _activations),
        ("step time", lambda row: _time(row.step_seconds, base.step_seconds)),
        ("final loss", lambda row: "-" if row.final_loss is None else f"{row.final_loss:.6g}"),
        (f"bits equal to {base.label}", lambda row: "" if row is base else _equal(row)),
    ]
    if not all(row.is_exact for row in rows):
        lines.append(("gradient error", lambda row: _share(row.gradient_error, row)))
        lines.append(("largest loss drift", lambda row: _share(row.loss_drift, row)))
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=WIDTH)
    typer.echo(f"\n{' '.join([comparison.script, *comparison.args])}\n{comparison.made_on}")
    if console.width < 24 + 26 * len(rows):
        table = Table("", *(label for label, _ in lines), box=box.SIMPLE_HEAD)
        for row in rows:
            table.add_row(row.label, *(cell(row) for _, cell in lines))
    else:
        table = Table("", *(Column(row.label, justify="right") for row in rows), box=box.SIMPLE_HEAD)
        for label, cell in lines:
            table.add_row(label, *(cell(row) for row in rows))
    console.print(table)
    for row in rows:
        if headline := comparison.headline(row):
            typer.echo(f"{row.label}: {headline}")
    unequal = [row for row in rows if row.is_exact and (row.losses_equal is False or not row.weights_equal)]
    if unequal and len(comparison.of(base.label)) == 1:
        told = "`backstash compare --repeats 2` tells whether the script repeats itself at all."
        typer.echo(f"Not all bits are equal. {told}")


def end(comparison: Comparison) -> None:
    """Says that Ctrl-C has ended a comparison, and exits as a shell expects it; does nothing after a whole one."""
    if comparison.is_interrupted:
        typer.echo(f"backstash: {INTERRUPTED_NOTE}: {len(comparison.runs)} runs", err=True)
        raise typer.Exit(INTERRUPTED)


def _amount(nbytes: int | None, base: int | None) -> str:
    return "-" if nbytes is None else amount(nbytes) + _relative(nbytes, base)


def _activations(row: Row) -> str:
    if row.stash_nbytes is None or row.saved_nbytes is None or row.device_nbytes is None:
        return "-"
    moved = row.stash_nbytes - row.device_nbytes
    text = amount(row.device_nbytes)
    if moved:
        text += f" and {amount(moved)} moved"
    elif row.stash_nbytes != row.saved_nbytes and row.stash_nbytes:
        text += f" (ratio {row.saved_nbytes / row.stash_nbytes:.2f})"
    return text


def _time(seconds: float | None, base: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f} ms" + _relative(seconds, base)


def _relative(value: float, base: float | None) -> str:
    return "" if not base or value == base else f" ({value / base:.2f}x)"


def _share(share: float | None, row: Row) -> str:
    if row.is_exact:
        return "" if not share else f"{share:.2g}"
    return "-" if share is None else f"{share:.2g}"


def _equal(row: Row) -> str:
    if row.losses_equal is None:
        return "yes (weights)" if row.weights_equal else "no"
    return {(True, True): "yes", (True, False): "losses only", (False, True): "weights only"}.get(
        (row.losses_equal, row.weights_equal), "no"
    )

"""Shows what a long command is doing, and for how long, on a line of stderr that goes away. Silent in CI and pipes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from backstash.telling import heard_by

INTERRUPTED_NOTE = "interrupted; this is what was found by then"


def is_shown(quiet: bool = False) -> bool:
    """Whether somebody looks on: stderr is a terminal that can move its cursor, and this is no CI."""
    return not (quiet or os.environ.get("CI") or os.environ.get("TERM") == "dumb") and Console(stderr=True).is_terminal


@contextmanager
def waiting(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Shows what is being done: a bar where it is known how much there is, with the time that is left, else a clock.

    What the script prints meanwhile stays above the line.

    Yields:
        A function that says what is being done, in words. What planning tells (telling.py) is shown behind it.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}", markup=False),
    )
    console = Console(stderr=True)
    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # what goes to a file is left alone
    shown = Progress(
        *columns, console=console, transient=True, disable=not is_shown(quiet), redirect_stdout=is_terminal
    )
    began, heading, doing = time.monotonic(), "", ""

    def update(task: TaskID, what: str, done: int, total: int | None) -> None:
        nonlocal began, doing
        if what != doing:
            began, doing = time.monotonic(), what
        of_it = f" {done:,}" + (f" of {total:,}" if total else "") if done or total else ""
        text = ": ".join(filter(None, (heading, f"{what}{of_it}")))
        left = (time.monotonic() - began) / done * (total - done) if total and done else 0.0
        shown.update(
            task, description=text, completed=done, total=total, left=f"about {left:.0f} s left" if left else ""
        )

    with shown:
        task = shown.add_task("", total=None, left="")

        def say(text: str) -> None:
            nonlocal heading
            heading = text
            update(task, "", 0, None)

        with heard_by(lambda what, done, total: update(task, what, done, total)):
            yield say

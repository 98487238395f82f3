"""Interleaved rounds under a deadline, their medians and quartiles, and plain-text tables."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

UNTIL_SETTLED = 8
"""Steps of a Session before those that count. It writes a pass down once four were equal, and then runs it."""


@dataclass(frozen=True)
class Summary:
    """Median and quartiles of some values, in the values' own unit.

    Attributes:
        median, q1, q3: quartiles, interpolated between values where they fall between two.
        low: the smallest value.
        count: number of values.
    """

    median: float
    q1: float
    q3: float
    low: float
    count: int


def summarise(values: Sequence[float]) -> Summary:
    """The summary of at least one value."""
    if len(values) == 1:
        return Summary(values[0], values[0], values[0], values[0], 1)
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Summary(median, q1, q3, min(values), len(values))


@dataclass(frozen=True)
class Deadline:
    """A moment on ``time.monotonic``'s clock.

    Attributes:
        ends_at: the moment, in seconds.
    """

    ends_at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The moment ``seconds`` from now."""
        return cls(time.monotonic() + seconds)

    def left(self) -> float:
        """Seconds until then; negative when it has passed."""
        return self.ends_at - time.monotonic()

    def part(self, share: float) -> Deadline:
        """The moment when that share of what is left has passed."""
        return Deadline.after(max(0.0, self.left()) * share)


@dataclass(frozen=True)
class Effort:
    """How many rounds to run.

    Attributes:
        rounds: the most rounds.
        deadline: no round is begun that would end after it, going by the longest so far; the first always runs.
            None: every round runs.
    """

    rounds: int
    deadline: Deadline | None = None


def interleave(tasks: Mapping[str, Callable[[], T]], effort: Effort) -> dict[str, list[T]]:
    """Run every task once per round, each round in another order.

    Each round begins one task further on; when each has been first once, the order is turned around, so that no task
    always follows the same one.

    Args:
        tasks: what to run, by name.
        effort: how often.

    Returns:
        What the tasks returned, by name, in the order of rounds.
    """
    results: dict[str, list[T]] = {name: [] for name in tasks}
    names, longest = list(tasks), 0.0
    for number in range(effort.rounds):
        if number and effort.deadline is not None and effort.deadline.left() < longest:
            break
        started = time.monotonic()
        cycle, first = divmod(number, len(names))
        order = names[first:] + names[:first]
        for name in reversed(order) if cycle % 2 else order:
            results[name].append(tasks[name]())
        longest = max(longest, time.monotonic() - started)
    return results


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A plain-text table: the first column flush left, the others flush right."""
    cells = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(parts).rstrip()

    return "\n".join([line(cells[0]), line(["-" * width for width in widths]), *map(line, cells[1:])])


def spread(summary: Summary | None, scale: float = 1.0, digits: int = 2) -> str:
    """``"1.50 [1.48 1.55]"``: median and quartiles, times ``scale``; empty for None."""
    if summary is None:
        return ""
    median, q1, q3 = (f"{value * scale:.{digits}f}" for value in (summary.median, summary.q1, summary.q3))
    return f"{median} [{q1} {q3}]"


def mib(nbytes: int | None) -> str:
    """Bytes in MiB, ``"12.3"``; ``"-"`` where they are not known."""
    return "-" if nbytes is None else f"{nbytes / 2**20:.1f}"

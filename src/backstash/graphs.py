"""The graph of an accelerator that a step is being captured into, and the numbers that its replays tell the host.

Note: [captured steps]
    A captured step is launched later, as often as the program asks for, and the host runs none of its code again. So
    while a step is captured the host may not ask the device for anything: it cannot wait, query an event, pin memory,
    or read the state of a generator. Who would do so elsewhere asks :func:`capture` first, and does without: values are
    encoded as the steps before the capture have taught, nothing is looked at or proven, no proof is repeated, and what
    draws random numbers is not made again.

    What else would be an error now may happen in any replay: a draft that lacks room, a value that a codec has to
    refuse, a sample with other bits. Each of these is a few integers on the device. The graph keeps the least and the
    largest that any replay has had, and copies them to pinned memory at its end. The host reads that memory when the
    step is called next, and never waits for it. The integers are such that a number which means an error is either too
    small or too large, so the two extremes have it if any replay had.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from backstash.errors import GraphError

MOST = 1 << 15
"""How many integers the replays of one graph can tell. A value of a drafting codec has one to four."""

_LEAST, _LARGEST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max

Judge = Callable[[list[int]], Exception | None]
"""Returns the error that some integers of one replay mean, or None."""


class _Expected(NamedTuple):
    begin: int
    end: int
    judge: Judge


class Capture:
    """What the replays of one graph tell. It is made before the capture, and its memory lives as long as the graph.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._numbers: list[Tensor] = []
        self._expected: list[_Expected] = []
        self._count = 0
        told = torch.tensor([[_LARGEST], [_LEAST]]).expand(2, MOST)
        self._extremes = told.to(device)
        self._told = told.clone().pin_memory()
        self._seen = told[:, :0]
        self._at_end: dict[Hashable, Callable[[], None]] = {}

    def before_end(self, owner: Hashable, join: Callable[[], None]) -> None:
        """Has ``join`` called once at the end of the step, for streams of an ``owner`` that were forked in it."""
        self._at_end[owner] = join

    def expect(self, numbers: Tensor, judge: Judge) -> None:
        """Has each replay tell some integers.

        Args:
            numbers: of the device, bools or integers, [n].
            judge: says what they mean. It is given those of one replay, or of the least and the largest of all replays.

        Raises:
            GraphError: there are too many, or they are no integers.
        """
        count = numbers.numel()
        if numbers.dtype.is_floating_point or self._count + count > MOST:
            raise GraphError(
                f"a graph was to tell {count} numbers of {numbers.dtype} beside {self._count} others, but it tells up "
                f"to {MOST} integers. Capture a smaller step, or use a policy with other codecs."
            )
        self._numbers.append(numbers.reshape(-1).to(torch.int64))
        self._expected.append(_Expected(self._count, self._count + count, judge))
        self._count += count

    def end(self) -> None:
        """The step is over: has the graph collect and copy what its replays tell. Called while it is captured."""
        for join in self._at_end.values():
            join()
        if not self._numbers:
            return
        now, self._numbers = torch.cat(self._numbers), []
        least, largest = self._extremes[:, : self._count]
        torch.minimum(least, now, out=least)
        torch.maximum(largest, now, out=largest)
        for row, extremes in zip(self._told, (least, largest), strict=True):
            row[: self._count].copy_(extremes, non_blocking=True)
        self._seen = self._told[:, : self._count].clone()

    def check(self) -> None:
        """Looks at what has arrived of the replays until now. The host does not wait.

        Raises:
            BackstashError: something went wrong in a replay. Its message names the value.
        """
        told = self._told[:, : self._count]
        if torch.equal(told, self._seen):
            return
        self._seen = told.clone()
        for row in self._seen.tolist():
            for begin, end, judge in self._expected:
                numbers = row[begin:end]
                if _LARGEST in numbers or _LEAST in numbers:  # not there yet
                    continue
                error = judge(numbers)
                if error is not None:
                    raise error


_capture: Capture | None = None


def capture() -> Capture | None:
    """Returns what a graph that is being captured will tell; None while none is. The same for all threads."""
    return _capture


def begin_capture(captured: Capture) -> None:
    """A graph is being captured from now on."""
    global _capture
    _capture = captured


def end_capture() -> None:
    """None is any more."""
    global _capture
    _capture = None

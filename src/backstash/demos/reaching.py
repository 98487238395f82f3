"""Finds how large a training can become within a given memory, in the units in which its user thinks.

Nothing is extrapolated: the size that is reported was trained at, and its peak was counted. What plans are predicted to
reach only says at which sizes to look. A step's peak is counted above the weights, their gradients and the optimizer's
state, which no way of training here makes smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from tempfile import gettempdir
from typing import cast

import torch
from torch import Tensor

from backstash.bits import equal_bits
from backstash.demos.demonstrations import Demonstration, Training, Way
from backstash.errors import BudgetError
from backstash.planning.measure.profiling import profile
from backstash.planning.model.plan import Plan
from backstash.planning.search.largest import MOST_SIZES, size_at
from backstash.planning.search.planner import Planner
from backstash.policies.offloading import offload
from backstash.report.meter import Measurement, measure
from backstash.session import Session
from backstash.stash.buffers import release_buffers
from backstash.stores import DiskStore

NEAR = 0.97
"""Share of the memory from which on a size is the largest: none is looked for that would take the rest."""

_STAGED = 8 << 20
"""Bytes of memory in which a store collects what it writes to a disk. torch does not count them; a step's peak does."""

Told = Callable[[str], None]
"""A function that is called with what is being done, such as ``"a plan: 24 images"``."""


@dataclass(frozen=True)
class Largest:
    """How far one way of training comes within the memory.

    Attributes:
        label: the way, as people say it.
        size: the largest size that fits, in the demonstration's unit; 0 if not even the first does.
        peak_nbytes: the counted peak of a step of that size.
        seconds: of such a step, one measurement.
        work: what a step of that size computes, in units: the size to the power with which its peak grows.
        is_equal: whether the gradients of a step of the first size have the bits of plain PyTorch's. The plan of that
            step is the one with the least peak.
    """

    label: str
    size: int
    peak_nbytes: int
    seconds: float
    work: int
    is_equal: bool


def reach(demonstration: Demonstration, nbytes: int | None = None, told: Told = lambda text: None) -> Iterator[Largest]:
    """Yields how far each way of training comes, in the demonstration's order, as soon as it is known.

    Args:
        demonstration: what is trained.
        nbytes: the memory that a step may take; None for the demonstration's own.
        told: is called before each size.
    """
    limit = demonstration.nbytes if nbytes is None else nbytes
    expected: dict[Training, list[Tensor]] = {}
    best = 0
    for way in demonstration.ways:
        told(f"{way.label}: {demonstration.start:,} {demonstration.unit}")
        first = _Trial(demonstration, way, demonstration.start)
        lowest = first.lowest()
        gradients = first.gradients(lowest)
        pairs = zip(expected.setdefault(way.training, gradients), gradients, strict=True)
        is_equal = all(equal_bits(*pair) for pair in pairs)
        search = _Search(demonstration, way, limit, told, {demonstration.start: first.measured(lowest)})
        del first
        asked = limit, demonstration.start, demonstration.grain, demonstration.power
        size = largest_counted(search.predicted, search.counted, *asked, best, demonstration.most)
        best = max(best, size)
        measured = search.measured[size or demonstration.start]
        work = size**demonstration.power
        yield Largest(way.label, size, measured.peak_nbytes, measured.seconds, work, is_equal)


def largest_counted(
    predicted: Callable[[int], int],
    counted: Callable[[int], int],
    limit: int,
    start: int,
    grain: int,
    power: int,
    second: int = 0,
    largest: int | None = None,
) -> int:
    """Returns the largest size whose peak was counted and is at most ``limit`` bytes, or 0 if that of ``start`` is not.

    Peaks are taken to grow with the size to the power ``power``, which only says which sizes to ask for. The search
    ends at a size that takes NEAR of the memory, at one whose next does not fit, at ``largest``, or after MOST_SIZES.

    Args:
        predicted: returns the bytes that a size is predicted to take.
        counted: returns those that it takes.
        limit: bytes.
        start: the smallest size; all others are ``start`` and a multiple of ``grain``.
        grain: the steps between sizes.
        power: 1 for batches and tokens, 3 for the edge of a volume.
        second: the size to ask for after the first; 0 for one whose peak is about twice as large.
        largest: the largest size to ask for, ``start`` and a multiple of ``grain``; None for no limit.

    Example:
        >>> asked = []
        >>> nbytes = lambda size: asked.append(size) or 10 + 3 * size
        >>> largest_counted(nbytes, nbytes, limit=90, start=2, grain=4, power=1), asked
        (26, [2, 6, 26, 26])
    """
    known = {start: counted(start)}
    sure, most = {start}, MOST_SIZES
    while any(nbytes <= limit for nbytes in known.values()):
        low = max(size for size in known if known[size] <= limit)
        high = min((size for size in known if known[size] > limit), default=None)
        is_last = len(known) >= most or known[low] >= NEAR * limit or (high is not None and high - low <= grain)
        is_last = is_last or low == largest
        if is_last and low in sure:
            return low
        if is_last:
            known[low] = counted(low)
            sure.add(low)
            most += known[low] > limit
            continue
        size = size_at(known, limit, power) if len(known) > 1 else second or round(start * 2 ** (1 / power))
        size = min(size, 8 * low if high is None else high - grain, size if largest is None else largest)
        size = max(low + grain, start + (size - start) // grain * grain)
        known[size] = predicted(size)
    return 0


class _Trial:
    """A model of one size, and a way to train it. Gradients are there before, as the optimizer keeps them."""

    def __init__(self, demonstration: Demonstration, way: Way, size: int) -> None:
        torch.manual_seed(0)
        self.model, self.step = demonstration.build(way, size)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        self.saver = way.saver
        self.planner = Planner(profile(self.step, self.model)) if way.saver == "plan" else None
        self.disk = DiskStore(gettempdir(), in_flight=_STAGED, reuse=0) if way.saver == "disk" else None

    def gradients(self, plan: Plan | None) -> list[Tensor]:
        """Those of all parameters after a step that begins with seeded generators."""
        step = self._whole(plan)
        torch.manual_seed(1)
        step()
        return [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]

    def lowest(self) -> Plan | None:
        """The plan with the least peak; None for the other ways to train."""
        if self.planner is None:
            return None
        try:
            return self.planner.plan(1)
        except BudgetError as error:
            return cast(Plan, error.plan)

    def measured(self, plan: Plan | None) -> Measurement:
        """A counted step, after as many as a Session needs to know the model."""
        release_buffers()
        found = measure(self._whole(plan), repeats=1, warmup=3 if self.saver == "lossless" else 1, device="cpu")
        return found if self.disk is None else replace(found, peak_nbytes=found.peak_nbytes + _STAGED)

    def _whole(self, plan: Plan | None) -> Callable[[], object]:
        if self.disk is not None:
            session = Session(offload(store="disk", ahead=1), model=self.model, stores={"disk": self.disk})
        elif self.saver == "lossless" or plan is not None:
            session = Session(plan or "lossless", model=self.model)
        else:
            return self.step

        def whole() -> None:
            with session:
                self.step()

        return whole


@dataclass
class _Search:
    """What is known of the sizes of one way of training.

    Attributes:
        demonstration, way, limit, told: as for :func:`reach`.
        measured: the steps that were counted, by size.
        trial: that of the size which was asked for last.
    """

    demonstration: Demonstration
    way: Way
    limit: int
    told: Told
    measured: dict[int, Measurement]
    trial: tuple[int, _Trial] | None = None

    def predicted(self, size: int) -> int:
        """The bytes of a step of that size: those of the lowest plan in its model, or what was counted."""
        self.told(f"{self.way.label}: {size:,} {self.demonstration.unit}")
        self.trial = None  # before the next is made
        trial = _Trial(self.demonstration, self.way, size)
        self.trial = size, trial
        return self.counted(size) if trial.planner is None else trial.planner.solutions[0].peak_nbytes

    def counted(self, size: int) -> int:
        """The bytes of a step of that size, counted; of a plan that does not fit, what the lowest takes."""
        if size in self.measured:
            return self.measured[size].peak_nbytes
        if self.trial is None or self.trial[0] != size:
            self.predicted(size)
        assert self.trial is not None
        trial, plan = self.trial[1], None
        if trial.planner is not None:
            try:
                plan = trial.planner.plan(self.limit)
            except BudgetError as error:
                return error.smallest_nbytes
        self.measured[size] = trial.measured(plan)
        return self.measured[size].peak_nbytes

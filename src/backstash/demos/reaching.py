"""Finds how large a training can become within a given memory, in the units in which its user thinks.

Nothing is extrapolated: the size that is reported was trained at, and its peak was counted. A step's peak is counted
above the weights, their gradients and the optimizer's state, which no way of training here makes smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from backstash.bits import equal_bits
from backstash.demos.demonstrations import Demonstration, Training, Way
from backstash.errors import BudgetError
from backstash.planning.measure.profiling import profile
from backstash.planning.search.planner import Planner
from backstash.report.meter import measure
from backstash.session import Session
from backstash.stash.buffers import release_buffers

MOST_SIZES = 6
"""Sizes that are tried of one way of training."""

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
        is_equal: whether the gradients of a step of the first size have the bits of plain PyTorch's.
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
        trials: dict[int, _Trial] = {}

        def least(size: int, way: Way = way, trials: dict[int, _Trial] = trials) -> int:
            told(f"{way.label}: {size:,} {demonstration.unit}")
            trials[size] = trial = _try(demonstration, way, size, limit)
            return trial.least_nbytes

        size = largest(least, limit, demonstration.start, demonstration.grain, demonstration.power, best)
        best = max(best, size)
        first = trials[demonstration.start]
        gradients = expected.setdefault(way.training, first.gradients)
        is_equal = all(equal_bits(*pair) for pair in zip(gradients, first.gradients, strict=True))
        found = trials[size] if size else first
        work = size**demonstration.power
        yield Largest(way.label, size, found.peak_nbytes, found.seconds, work, is_equal)


def largest(least: Callable[[int], int], limit: int, start: int, grain: int, power: int, second: int = 0) -> int:
    """Returns the largest size whose least peak is at most ``limit`` bytes, or 0 if that of ``start`` is not.

    Peaks are taken to grow with the size to the power ``power``, which only says which sizes to ask for: the size that
    is returned was asked for, and so was the next one, unless there were MOST_SIZES.

    Args:
        least: returns the bytes of a size.
        limit: bytes.
        start: the smallest size; all others are ``start`` and a multiple of ``grain``.
        grain: the steps between sizes.
        power: 1 for batches and tokens, 3 for the edge of a volume.
        second: the size to ask for after the first; 0 for one whose peak is about twice as large.

    Example:
        >>> asked = []
        >>> largest(lambda size: asked.append(size) or 10 + 3 * size, limit=100, start=2, grain=2, power=1), asked
        (30, [2, 4, 30, 32])
    """
    known = {start: least(start)}
    if known[start] > limit:
        return 0
    while len(known) < MOST_SIZES:
        low = max(size for size in known if known[size] <= limit)
        high = min((size for size in known if known[size] > limit), default=None)
        if high is not None and high - low <= grain:
            break
        size = _guess(known, limit, power) if len(known) > 1 else second or round(start * 2 ** (1 / power))
        size = min(size, 8 * low if high is None else high - grain)
        size = max(low + grain, start + (size - start) // grain * grain)
        known[size] = least(size)
    return max(size for size in known if known[size] <= limit)


def _guess(known: dict[int, int], limit: int, power: int) -> int:
    """The size at which the line through the two known points nearest to the limit meets it."""
    first, second = sorted(known, key=lambda size: abs(known[size] - limit))[:2]
    rise = (known[second] - known[first]) / (second**power - first**power)
    if rise <= 0:
        return 2 * max(known)
    return int(max(0.0, first**power + (limit - known[first]) / rise) ** (1 / power))


@dataclass(frozen=True)
class _Trial:
    """A step of one size.

    Attributes:
        least_nbytes: the least peak that it may have in this way of training.
        peak_nbytes, seconds: what was counted and timed of the step within the limit, or of any if none fits.
        gradients: of all parameters, after the first step.
    """

    least_nbytes: int
    peak_nbytes: int
    seconds: float
    gradients: list[Tensor]


def _try(demonstration: Demonstration, way: Way, size: int, limit: int) -> _Trial:
    torch.manual_seed(0)
    model, step = demonstration.build(way, size)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)  # counted before the step, as the optimizer keeps it
    least: int | None = None
    session: Session | None = None
    if way.saver == "plan":
        planner = Planner(profile(step, model))
        try:
            planner.plan(1)
        except BudgetError as error:
            least = error.smallest_nbytes
        session = Session(planner.plan(max(limit, least or limit)), model=model)
    elif way.saver == "lossless":
        session = Session("lossless", model=model)

    def whole() -> None:
        if session is None:
            step()
        else:
            with session:
                step()

    gradients = _gradients(model, whole)
    release_buffers()
    measured = measure(whole, repeats=1, warmup=0 if session is None else 2, device="cpu")
    return _Trial(least or measured.peak_nbytes, measured.peak_nbytes, measured.seconds, gradients)


def _gradients(model: nn.Module, step: Callable[[], object]) -> list[Tensor]:
    """The gradients of a first step that begins with seeded generators."""
    torch.manual_seed(1)
    step()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

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
from backstash.planning.search.largest import largest
from backstash.planning.search.planner import Planner
from backstash.report.meter import measure
from backstash.session import Session
from backstash.stash.buffers import release_buffers

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

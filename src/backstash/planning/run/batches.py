"""The largest batch that fits into a budget under some plan, and that plan."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from backstash import accelerator
from backstash.arguments import check_count, check_step
from backstash.errors import BudgetError, PlanError
from backstash.planning.measure.profiling import profile
from backstash.planning.model.budget import bytes_in, check_device, parse_budget
from backstash.planning.model.plan import Plan
from backstash.planning.run.retry import is_out_of_memory
from backstash.planning.search.largest import largest
from backstash.planning.search.planner import Planner
from backstash.saved import MIN_NBYTES
from backstash.stash.buffers import release_buffers
from backstash.telling import note_progress

MOST_TRIED = 12
"""Batches that are profiled at most."""


@dataclass(frozen=True)
class BatchFit:
    """The largest batch within a budget.

    Attributes:
        size: the number of examples.
        plan: the fastest plan for a step of that size within the budget. ``bs.Session(fit.plan, model=model)`` runs it.
        plain_size: the largest of the batches that were tried whose plain step fits; 0 if none does.
        tried: by the size of each batch that was tried, the smallest budget in bytes for which there is a plan;
            infinity where even the profile of a step ran out of memory.
    """

    size: int
    plan: Plan
    plain_size: int
    tried: dict[int, float]

    def __str__(self) -> str:
        return f"{self.size} examples: {self.plan!r}"


def fit_batch(
    make_step: Callable[[int], Callable[[], object]],
    budget: int | str,
    model: nn.Module | None = None,
    *,
    start: int = 1,
    grain: int = 1,
    most: int | None = None,
    allow: str | Sequence[str] = ("lossless", "recompute"),
    error_limit: float | None = None,
    min_nbytes: int = MIN_NBYTES,
    device: str | None = None,
) -> BatchFit:
    """Finds the largest batch whose step fits into a budget, and returns it with its plan.

    Each batch that is tried is profiled and planned for, and its steps are undone (see :func:`backstash.profile`). The
    next one is where the line through the last two peaks meets the budget, so that few are tried. The batch that is
    returned was tried; so was the next larger one, which does not fit, unless there were MOST_TRIED.

    A profile takes the memory of the plain step. A batch whose plain step does not fit into the machine counts as one
    that does not fit.

    Args:
        make_step: returns the step for a number of examples, such as ``lambda n: partial(step, x[:n], y[:n])``.
        budget: bytes that a step may take above what is held before it, or a text such as ``"2GiB"``.
        model: the model, as for :func:`backstash.profile`.
        start: the smallest batch.
        grain: every batch is ``start`` and a multiple of it.
        most: the largest batch that there is.
        allow, error_limit: as for :func:`backstash.plan`.
        min_nbytes: as for :func:`backstash.profile`.
        device: type of the device whose memory counts; by default the accelerator where there is one.

    Raises:
        BudgetError: not even ``start`` examples fit.
        PlanError: an argument means nothing.
        TypeError: an argument is of another type.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
        >>> make_step = lambda n: lambda: model(torch.ones(n, 64)).sum().backward()
        >>> found = fit_batch(make_step, "300KiB", model, most=32, min_nbytes=0)
        >>> found.size >= found.plain_size > 0
        True
    """
    check_device(device, "fit_batch was asked for")
    for number, name in ((start, "start"), (grain, "grain"), *(() if most is None else ((most, "most"),))):
        if type(number) is int and number < 1:
            raise PlanError(f"fit_batch was asked for {name}={number}, but a batch has examples. Pass 1 or more.")
        check_count(number, name, "examples", "fit_batch")
    if most is not None and most < start:
        raise PlanError(f"fit_batch was asked for batches from {start} to {most}, but there are none. Raise most=.")
    if isinstance(budget, str) and bytes_in(budget, 1) is not None and bytes_in(budget, 1) != bytes_in(budget, 2):
        raise PlanError(
            f"fit_batch was asked for {budget!r}, but that is a share of a peak that grows with the batch. Pass a "
            f"number of bytes, or a text such as '2GiB'."
        )
    nbytes = parse_budget(budget, 1 << 30)
    kind = device or accelerator.kind() or "cpu"
    planners: dict[int, Planner] = {}
    plain_size = 0
    tried: dict[int, float] = {}
    failures: dict[int, BudgetError] = {}

    def least(size: int) -> float:
        nonlocal plain_size
        note_progress(f"trying {size} examples", len(tried) + 1)
        try:
            step = _step_of(make_step, size)
            planner = Planner(profile(step, model, allow=allow, min_nbytes=min_nbytes, device=kind), allow, error_limit)
            planner.plan(nbytes)
            if planner.profile.plain_peak_nbytes <= nbytes:
                plain_size = max(plain_size, size)
        except BudgetError as error:
            tried[size], failures[size] = float(error.smallest_nbytes), error
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            error.__traceback__ = None  # which holds what the step has made
            tried[size] = math.inf
            release_buffers()
            gc.collect()
        else:
            tried[size] = float(min(planner.solutions[0].peak_nbytes, nbytes))
            planners.clear()  # the plan of a smaller batch is not asked for any more
            planners[size] = planner
        return tried[size]

    size = largest(least, nbytes, start, grain, 1, most=most, most_sizes=MOST_TRIED)
    if not size:
        if start in failures:
            raise failures[start]
        raise PlanError(
            f"fit_batch was asked for batches within {nbytes} bytes, but the plain step of {start} examples, which a "
            f"profile runs, does not fit into the machine. Begin with fewer."
        )
    plan = planners[size].plan(nbytes)
    return BatchFit(size, plan, plain_size, dict(sorted(tried.items())))


def _step_of(make_step: Callable[[int], Callable[[], object]], size: int) -> Callable[[], object]:
    """Returns the step for a batch of that size."""
    asked = f"fit_batch was asked for steps by make_step={make_step!r:.80}"
    do = "Pass a function that takes a number of examples and returns a step."
    if not callable(make_step) or isinstance(make_step, nn.Module):
        raise TypeError(f"{asked}, but that makes none. {do}")
    try:
        step = make_step(size)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # from inside of it
        raise TypeError(f"{asked}, but it cannot be called with a number: {error}. {do}") from None
    check_step(step, "fit_batch")
    return step

"""The largest batch within a budget, as a multiple of the present one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backstash.planning.plan import Planner
from backstash.planning.problem import StepProfile


@dataclass(frozen=True, slots=True)
class Growth:
    """How many times as large a batch may be.

    Attributes:
        plain: in plain PyTorch.
        planned: with the plan that has the lowest peak of all.
        seconds: time of a step under that plan over that of a plain step, on batches of the same size.
    """

    plain: float
    planned: float
    seconds: float


def growth(
    profile: StepProfile,
    budget_nbytes: int,
    allow: str | Sequence[str] = ("lossless", "recompute"),
    error_limit: float | None = None,
) -> Growth:
    """Estimates how many times as large the batch of a profiled step may be within a budget.

    Every byte that the step takes above what is held before it is taken to grow with the batch. What does not, such as
    the gradient of a weight before it is added up, makes the estimate too small and never too large.

    Args:
        profile: the step.
        budget_nbytes: the budget, in bytes above what is held before the step.
        allow, error_limit: what a plan may do, as for :func:`backstash.planning.plan.plan`.
    """
    lowest = Planner(profile, allow, error_limit).solutions[0]
    plain = budget_nbytes / max(1, profile.plain_peak_nbytes)
    seconds = lowest.seconds / profile.seconds if profile.seconds else 1.0
    return Growth(plain, max(plain, budget_nbytes / max(1, lowest.peak_nbytes)), seconds)

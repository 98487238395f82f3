"""Keeps a running program within a budget: its first steps are profiled, then planned for, and the plan is watched.

Nobody hands over a step here. The program trains in its own loop, and a step is what lies between two backward passes;
if several models take turns, as many of these as there are before the first value comes back. What happens:

1. Two steps are kept as they are. What is proven on first use is proven, and the time of a plain step is taken.
2. One step is surveyed (survey.py), which takes about twice as long. From then on there is a plan.
3. One step under the plan proves its recipes, and one is counted. If its peak is above the budget, the next plan leaves
   more room, and so on.
4. All other steps run under the plan.

Note: [between steps]
    A backward pass is a torch function for the Session's observer, so the Session cannot be replaced when a backward
    pass ends. It is replaced when a module is called next.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from backstash.errors import BudgetError
from backstash.planning.budget import parse_budget
from backstash.planning.events import memory_profiler, note, roots_of
from backstash.planning.plan import Plan, Planner
from backstash.planning.problem import StepProfile
from backstash.planning.profiling import profile_of
from backstash.planning.survey import Births, KeepForSurvey, Survey
from backstash.planning.timeline import Timeline
from backstash.session import Session
from backstash.stash.ledger import Report
from backstash.torch_internals import in_backward

TIMED_STEPS = 100
"""How many steps under a plan are timed at most."""

MOST_PLANS = 5
"""How many plans are tried until one keeps the budget."""


@dataclass(frozen=True)
class Within:
    """What became of a budget.

    Attributes:
        budget_nbytes: the budget; 0 as long as no step was planned.
        plain_nbytes: the counted peak of a plain step.
        planned_nbytes: the peak that the plan predicts.
        reached_nbytes: the counted peak of a step under the plan.
        plain_seconds: time of a plain step.
        seconds: median time of a step under the plan; 0.0 if none was timed.
        plans: how many plans were made.
        plan: the last one.
    """

    budget_nbytes: int = 0
    plain_nbytes: int = 0
    planned_nbytes: int = 0
    reached_nbytes: int = 0
    plain_seconds: float = 0.0
    seconds: float = 0.0
    plans: int = 0
    plan: Plan | None = None


class ProfiledRun:
    """Inside the ``with``, a step of this thread's training is profiled, once it is known what a step is.

    Args:
        min_nbytes: smaller tensors are kept; 16 KiB by default.
        device: the type of the device whose memory counts; by default ``"cuda"`` where there is one.

    Attributes:
        profile: the profile of a step; None as long as there is none.
    """

    def __init__(self, min_nbytes: int | None = None, device: str | None = None) -> None:
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.profile: StepProfile | None = None
        self._session = Session(KeepForSurvey(cycles=1), min_nbytes=min_nbytes)
        self._next: Plan | None = None
        self._end_cycle: Callable[[], None] = self._end_of_first
        self._seen = _Keys()
        self._cycles = self._period = 0  # backward passes so far, and in a step
        self._begun = 0.0
        self._times: list[float] = []
        self._recorded: Any = None
        self._watching = ExitStack()
        self._is_inside = False

    def __enter__(self) -> Self:
        self._hook = nn.modules.module.register_module_forward_pre_hook(self._before_module)
        self._backward = torch.autograd.backward
        torch.autograd.backward = self._noting(self._backward)
        self._watch(self._seen)
        self._session.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.autograd.backward = self._backward
        self._hook.remove()
        self._stop_recording()
        self._watching.close()
        self._session.__exit__(kind, error, trace)

    def report(self) -> Report:
        """The report of the Session in force."""
        return self._session.report()

    def profiled(self, profile: StepProfile) -> None:
        """Is called with the profile at the end of a backward pass."""
        raise SystemExit(0)

    # -- what is seen of the program -----------------------------------------------------------------------------

    def _noting(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._is_inside or in_backward():  # torch calls this once more under a Session, and so does a checkpoint
                original(tensors, *args, **kwargs)
                return
            self._is_inside = True
            try:
                original(tensors, *args, **kwargs)
            finally:
                self._is_inside = False
            self._cycles += 1
            self._end_cycle()

        return backward

    def _before_module(self, module: nn.Module, args: Any) -> None:
        """Note: [between steps]."""
        if self._next is None or not torch.is_grad_enabled() or in_backward():
            return
        plan, self._next = self._next, None
        self._watching.close()
        self._session.__exit__(None, None, None)
        self._session = Session(plan)
        self._session.__enter__()

    def _watch(self, watcher: Births) -> None:
        self._watching = ExitStack()
        self._watching.enter_context(self._session.watched_by(watcher))

    # -- steps ---------------------------------------------------------------------------------------------------

    def _end_of_first(self) -> None:
        """A backward pass has ended, and it is not known yet how many of them make a step."""
        now = time.perf_counter()
        self._times.append(now - self._begun if self._begun else 0.0)
        self._begun = now
        if self._cycles == 1:
            self._seen.first, self._seen.keys = self._seen.keys, set()
        elif self._seen.first & self._seen.keys:
            self._period = self._cycles - 1
            survey = Survey()
            self._count(functools.partial(self._end_of_survey, survey), survey)

    def _end_of_survey(self, survey: Survey) -> None:
        timeline = Timeline(self._stop_recording(), self.device)
        kept = max(position.most_nbytes for position in timeline.positions)
        seconds = sum(self._times[-self._period :])
        self.profile = profile_of(timeline, survey, kept, seconds, [], self.device)
        self.profiled(self.profile)

    def _count(self, then: Callable[[], None], watcher: Births) -> None:
        """Records a step (Note: [where a step begins]) with that watcher, and goes on with ``then``."""
        self._recorded = memory_profiler()
        self._recorded.__enter__()
        self._cycles = 0

        def end_of_recorded() -> None:
            if self._cycles == self._period:
                note("step")
                self._watching.close()
                self._watch(watcher)
            elif self._cycles == 2 * self._period:
                self._cycles = 0
                then()

        self._end_cycle = end_of_recorded

    def _stop_recording(self) -> list[Any]:
        recorded, self._recorded = self._recorded, None
        if recorded is None:
            return []
        recorded.__exit__(None, None, None)
        return roots_of(recorded)


class BudgetedRun(ProfiledRun):
    """Inside the ``with``, this thread's training stays within a budget as soon as a step was profiled.

    Args:
        budget, allow, max_error: as for :func:`backstash.planning.plan.plan`.
        min_nbytes, device: as for ProfiledRun.

    Attributes:
        found: what became of the budget so far.

    Raises:
        BudgetError: from a backward pass, if no plan fits.
        PlanError: likewise, if the budget means nothing.
    """

    def __init__(
        self,
        budget: int | str,
        allow: Sequence[str] = ("lossless", "recompute"),
        *,
        max_error: float | None = 0.01,
        min_nbytes: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__(min_nbytes, device)
        parse_budget(budget, 1 << 30)  # what means nothing is an error now, and not in the middle of the training
        self.budget, self.allow, self.max_error = budget, allow, max_error
        self.found = Within()
        self._planner: Planner | None = None
        self._margin = 0

    def profiled(self, profile: StepProfile) -> None:
        """Makes a plan, which is in force from the next step on."""
        self.found = replace(self.found, plain_nbytes=profile.plain_peak_nbytes, plain_seconds=profile.seconds)
        self._planner = Planner(profile, self.allow, self.max_error)  # one search serves all plans
        self._make_plan(self._planner)

    def _make_plan(self, planner: Planner) -> None:
        budget = parse_budget(self.budget, planner.profile.plain_peak_nbytes)
        plan = planner.plan(max(1, budget - self._margin))
        self.found = replace(
            self.found,
            budget_nbytes=budget,
            planned_nbytes=plan.peak_nbytes,
            plans=self.found.plans + 1,
            plan=plan,
        )
        self._next = plan
        self._end_cycle = self._end_of_proofs
        self._cycles = 0

    def _end_of_proofs(self) -> None:
        """The first step under a plan proves recipes; a later one is counted."""
        if self._cycles == self._period:
            self._count(self._end_of_counted, Births())

    def _end_of_counted(self) -> None:
        reached = max(position.most_nbytes for position in Timeline(self._stop_recording(), self.device).positions)
        self.found = replace(self.found, reached_nbytes=reached)
        over = reached - self.found.budget_nbytes
        if over > 0 and self.found.plans < MOST_PLANS and self._planner is not None:
            self._margin += over + (over >> 3)
            try:
                self._make_plan(self._planner)
                return
            except BudgetError:  # with room left for safety nothing fits, so the plan that there is stays
                pass
        self._watching.close()
        self._times = []
        self._end_cycle = self._end_of_timed
        self._cycles, self._begun = 0, time.perf_counter()

    def _end_of_timed(self) -> None:
        if self._cycles % self._period == 0 and len(self._times) < TIMED_STEPS:
            now = time.perf_counter()
            self._times.append(now - self._begun)
            self._begun = now
            self.found = replace(self.found, seconds=median(self._times))


class _Keys(Births):
    """Notes the keys of the values of a backward pass."""

    def __init__(self) -> None:
        self.first: set[str] = set()
        self.keys: set[str] = set()

    def decided(self, value: Any, whole: Tensor, find_recipe: Any) -> None:
        """Notes a key."""
        self.keys.add(value.key)

    def read(self, tensor: Tensor, is_stored: bool, key: str) -> None:
        """Notes nothing."""

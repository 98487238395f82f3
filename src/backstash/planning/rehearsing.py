"""Tries solutions in steps of their own: the peaks that they reach, the errors of their gradients, and their times.

Note: [rehearsed plans]
    The model adds up what lies in one position as if it were there at the same moment, and knows nothing of what
    kernels allocate in a different way when their input is remade. So a plan of a profile that was taken just now is
    tried in a step of its own. The peak that this step reaches is the plan's predicted one. If it is above the budget,
    a smaller solution is tried; if it is below, perhaps a faster one fits. Then the step is timed, in turns with plain
    steps, and the time that it takes is the plan's predicted one. The error of its gradients is measured as well. If it
    is above the limit, a plan within a lower limit is looked for. What the policy lossless does is tried and timed as
    well, because no plan of the same bytes should be slower. A program that trains in its own loop is asked for no
    steps, so its plans keep to what is predicted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from backstash.planning.exact import Solution
from backstash.planning.problem import StepProfile
from backstash.planning.timings import Timings

if TYPE_CHECKING:
    from backstash.planning.plan import Plan

ROUNDING = 4 << 10
"""Bytes that are added to a rehearsed peak, because steps differ by some small tensors, such as copies of indices."""

VARIATION = 0.002
"""Share of encoded bytes that is added as well: dropout makes more zeros in one step than in another."""

REHEARSALS = 4
"""How many solutions are tried in a step at most, for one budget."""


class Rehearsing(ABC):
    """Remembers what solutions of one profile have reached in steps (Note: [rehearsed plans]).

    Args:
        profile: the step.
        error_limit: the largest error that gradients may have.
    """

    def __init__(self, profile: StepProfile, error_limit: float) -> None:
        self.profile = profile
        self.error_limit = error_limit
        kept = (0,) * len(profile.values)
        self._everything = Solution(kept, profile.plain_peak_nbytes, profile.seconds, 0.0)
        self._rehearsed: dict[Solution, int] = {}
        self._measured: dict[Solution, float] = {}
        self._timings = Timings(profile)
        self._usual: Solution | None = None  # what the policy lossless does

    @property
    @abstractmethod
    def solutions(self) -> tuple[Solution, ...]:
        """The best ways to hold the values, in the order of their peaks. The last one keeps everything."""

    @abstractmethod
    def _plan(self, budget: int, found: Solution) -> Plan:
        """Returns the plan that does what a solution says."""

    def _error(self, found: Solution) -> float:
        """Returns the predicted error of the gradients, or the measured one if that is possible and it is larger."""
        if found.error and self.profile.off_by is not None and found not in self._measured:
            measured = self.profile.off_by(self._plan(found.peak_nbytes, found))  # type: ignore[call-arg]  # no method
            self._measured[found] = 0.0 if measured is None else measured
        return max(found.error, self._measured.get(found, 0.0))

    def _rehearse(self, budget: int, first: Solution | None) -> Solution | None:
        """The fastest solution that was seen to keep the budget, if any: ``first``, or the lowest, is tried first."""
        distinct = {*self.solutions[:-1], *(() if first is None else (first,))}  # the last one is the plain step
        candidates = sorted(distinct, key=lambda found: found.peak_nbytes)
        trial = candidates[0] if first is None and candidates else first
        for _ in range(REHEARSALS):
            if trial is None or trial in self._rehearsed:
                break
            off = self._reached(trial) - trial.peak_nbytes  # others will be off by as much
            fitting = [found for found in candidates if found.peak_nbytes + off <= budget]
            trial = fitting[-1] if fitting else candidates[0]
        if self._usual is not None and self._usual.peak_nbytes <= budget:
            self._reached(self._usual)
        if not any(reached <= budget for reached in self._rehearsed.values()):
            self._lowest()  # solutions are off by different amounts, so perhaps one of the lowest fits
        seen = self._rehearsed.items()
        kept = [each for each, at in seen if at <= budget and self._measured.get(each, 0.0) <= self.error_limit]
        return self._timings.fastest(kept, lambda found: self._plan(found.peak_nbytes, found), self._usual)

    def _lowest(self) -> Solution:
        """The solution with the least peak: the least that was seen, where plans can be tried in a step."""
        if self.profile.rehearse is None:
            return self.solutions[0]
        seen = min((*self.solutions[:-1][:REHEARSALS], *self._rehearsed), key=self._reached, default=self._everything)
        return seen if self._rehearsed.get(seen, 0) < self._everything.peak_nbytes else self._everything

    def _reached(self, found: Solution) -> int:
        assert self.profile.rehearse is not None
        if found not in self._rehearsed:
            tried = self._plan(found.peak_nbytes, found)
            encoded = sum(decision.held_nbytes for decision in tried.decisions if decision.kind == "encode")
            margin = ROUNDING + int(VARIATION * encoded)
            self._rehearsed[found] = margin + max(self.profile.rehearse(tried))  # type: ignore[call-arg]  # no method
        return self._rehearsed[found]

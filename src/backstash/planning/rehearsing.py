"""Tries solutions in steps of their own: the peaks that they reach, the errors of their gradients, and their times.

Note: [rehearsed plans]
    The model adds up what lies in one position as if it were there at the same moment, and knows nothing of what
    kernels allocate in a different way when their input is remade. So a plan of a profile that was taken just now is
    tried in a step of its own. The peak that this step reaches is the plan's predicted one. If it is above the budget,
    a smaller solution is tried; if it is below, perhaps a faster one fits. What is reserved for other numbers is added
    to what a step reaches (Note: [reserve] in problem.py). Then the step is timed, in turns with plain steps, and the
    time that it takes is the plan's predicted one. The error of its gradients is measured as well. If it
    is above the limit, a plan within a lower limit is looked for. What the policy lossless does is tried and timed as
    well, because no plan of the same bytes should be slower. A program that trains in its own loop is asked for no
    steps, so its plans keep to what is predicted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from backstash.planning.exact import Solution, exact
from backstash.planning.peak import Bytes, PeakModel
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
        model: the step with the choices that are allowed.
        error_limit: the largest error that gradients may have.
    """

    def __init__(self, profile: StepProfile, model: PeakModel, error_limit: float) -> None:
        self.profile = profile
        self._model = model
        self.error_limit = error_limit
        self._limit = error_limit  # for the search, which may have to aim lower
        kept = (0,) * len(profile.values)
        self._everything = Solution(kept, profile.plain_peak_nbytes, profile.seconds, 0.0)
        self._rehearsed: dict[Solution, int] = {}
        self._reserves: dict[Solution, int] = {}  # bytes of these peaks
        self._alive: dict[Solution, Bytes] = {}  # bytes that were alive at each position, with what is reserved
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

    def _choose(self, nbytes: int, solver: str) -> Solution | None:
        """Returns the fastest solution within a budget, rehearsed if that is possible; None if there is none."""
        chosen = next((found for found in reversed(self.solutions) if found.peak_nbytes <= nbytes), None)
        if solver == "exact":
            best = exact(self._model, nbytes, self._limit)
            chosen = best if best is not None and (chosen is None or best.seconds < chosen.seconds) else chosen
        if self.profile.rehearse is not None:
            chosen = self._rehearse(nbytes, chosen)
        return chosen

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

    def _predicted(self, found: Solution, budget: int | None = None) -> int:
        """Returns the peak that is predicted: what was rehearsed, else what the model says.

        Args:
            found: the solution.
            budget: that of a plan. If the plain step fits, the plan says no more than the budget.
        """
        if found == self._everything and self.profile.rehearse is not None:
            most = found.peak_nbytes + ROUNDING  # these steps differ by some small tensors as well
            return most if budget is None else min(budget, most)
        return self._rehearsed.get(found, found.peak_nbytes)

    def _live(self, found: Solution) -> Bytes:
        """Returns the bytes that are predicted to be alive at each position, of which the most are the peak."""
        live = self._alive.get(found)
        if live is None:
            modelled = self._model.evaluate(found.choices).live
            live = modelled + max(0, self._predicted(found) - int(modelled.max()))
        return live

    def _reserve(self, found: Solution) -> int:
        """Returns how many bytes of the predicted peak are there for numbers that encode worse."""
        if found not in self._reserves:
            live = self._model.evaluate(found.choices).live
            self._reserves[found] = int(live.max() - (live - self._model.reserved(found.choices)).max())
        return self._reserves[found]

    def _reached(self, found: Solution) -> int:
        assert self.profile.rehearse is not None
        if found not in self._rehearsed:
            tried = self._plan(found.peak_nbytes, found)
            encoded = sum(decision.held_nbytes for decision in tried.decisions if decision.kind == "encode")
            margin = ROUNDING + int(VARIATION * encoded)
            reached = np.array(self.profile.rehearse(tried), np.int64)  # type: ignore[call-arg]  # no method
            reserved = self._model.reserved(found.choices)
            is_alike = len(reached) == len(reserved)  # else a function has run in this step that did not in the other
            live = reached + (reserved if is_alike else reserved.max())
            most = int(live.max())
            if is_alike:
                self._alive[found] = live + margin
            self._reserves[found] = most - int(reached.max())
            self._rehearsed[found] = margin + most
        return self._rehearsed[found]

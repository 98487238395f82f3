"""Plans: the fastest way to hold a step's values within a budget of memory, as data and as a policy."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from backstash import codecs
from backstash.codecs.base import label
from backstash.errors import BudgetError, PlanError
from backstash.planning.acting import EXACT, LOSSLESS, action_of
from backstash.planning.budget import check_error, parse_budget, restrict
from backstash.planning.decision import Decision
from backstash.planning.exact import Solution, exact
from backstash.planning.explain import diff, explain, html, size, summary
from backstash.planning.greedy import frontier
from backstash.planning.peak import PeakModel, own_seconds
from backstash.planning.problem import StepProfile
from backstash.planning.sealed import plain, restore, seal, unseal
from backstash.planning.timings import Timings
from backstash.policies import Action, Keep, Policy
from backstash.saved import Need, SavedTensor

ROUNDING = 4 << 10
"""Bytes that are added to a rehearsed peak, because steps differ by some small tensors, such as copies of indices."""

VARIATION = 0.002
"""Share of encoded bytes that is added as well: dropout makes more zeros in one step than in another."""

REHEARSALS = 4
"""How many solutions are tried in a step at most, for one budget."""

SMALLEST = 16 << 10
"""Smaller tensors are kept, unless the plan does something with tensors that are smaller."""


@dataclass(frozen=True, repr=False)
class Plan(Policy):
    """What to do with each value of a step so that its peak stays within a budget. ``bs.Session(plan)`` does it.

    Plans are made by :func:`plan`. A value that the plan does not know, because its key or its tensor is another, is
    treated by the policy ``lossless``, and kept if the plan is empty. Gradients are right in any case, but the
    predicted peak is not that of such a step: there is a warning, and ``unknown`` has the keys.

    Attributes:
        budget: bytes that the counted peak of a step may have above what is held before the step.
        peak_nbytes: the peak that is predicted, never below the real one; ``plain_peak_nbytes`` if the plan is empty.
        seconds: the time of a step that is predicted.
        plain_peak_nbytes, plain_seconds: peak and time of the plain step.
        allow: what was allowed.
        max_error: the largest sum of errors that was allowed; None for any.
        decisions: what is done with each value.
        frontier: peak and time of the best plans at all budgets, in the order of their peaks. An empty plan, for which
            nothing had to be searched, has its own alone.
        profile_fingerprint: that of the profile.
        device: type of the device whose memory is planned.
        others: as in StepProfile: keys that a plan is asked about and that are none of its values.
        cycles: as in StepProfile.
    """

    budget: int
    peak_nbytes: int
    seconds: float
    plain_peak_nbytes: int
    plain_seconds: float
    allow: tuple[str, ...]
    max_error: float | None
    decisions: tuple[Decision, ...]
    frontier: tuple[tuple[int, float], ...]
    profile_fingerprint: str
    device: str
    others: tuple[str, ...] = ()
    cycles: int = 1
    _by_key: dict[str, Decision] = field(init=False, compare=False)
    _others: frozenset[str] = field(init=False, compare=False)
    _met: set[str] = field(init=False, compare=False, default_factory=set)
    _unknown: dict[str, None] = field(init=False, compare=False, default_factory=dict)  # in the order of their meeting

    is_fixed = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_key", {decision.key: decision for decision in self.decisions})
        object.__setattr__(self, "_others", frozenset(self.others))
        known = {*codecs.names(), *(label(codec) for codec in EXACT)}
        for decision in self.decisions:
            if decision.kind == "encode" and decision.choice not in known:
                raise PlanError(
                    f"a Plan was asked to encode {decision.key!r} by {decision.choice!r}, but there is no such codec. "
                    f"Register it before the plan is made or read, or make the plan without it."
                )

    @cached_property
    def is_empty(self) -> bool:
        """Whether everything is kept, because the plain step fits. A Session with such a plan has nothing to do."""
        return all(decision.kind == "keep" for decision in self.decisions)

    @property
    def recomputes(self) -> bool:  # type: ignore[override]  # read-only here
        """Whether a value may be remade; by the policy for unknown values as well."""
        return not self.is_empty

    @property
    def remakes_anything(self) -> bool:  # type: ignore[override]  # read-only here
        """Whether the plan has a value remade."""
        return any(decision.kind == "recompute" for decision in self.decisions)

    @property
    def min_nbytes(self) -> int:  # type: ignore[override]  # read-only here
        """16 KiB, or less if the plan does something with smaller tensors."""
        return min([SMALLEST, *(decision.nbytes for decision in self.decisions if decision.kind != "keep")])

    @property
    def error(self) -> float:
        """Sum of the predicted relative errors of the choices, which bounds that of all gradients together."""
        return sum(decision.error for decision in self.decisions)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that the plan says."""
        return hashlib.sha256(json.dumps(plain(self), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def unknown(self) -> tuple[str, ...]:
        """Keys of values that a Session has met so far and that the plan does not know."""
        return tuple(self._unknown)

    def notice(self) -> str:
        """Returns how the steps so far did not match the plan; empty if they did."""
        if not self._unknown:
            return ""
        asked = f"the plan {self.fingerprint} of {len(self.decisions)} values was asked for the values of a step"
        if not self._met and self._by_key.keys().isdisjoint(self._unknown):
            return (
                f"{asked}, but knows none of them (the first is {next(iter(self._unknown))!r}): it was made for "
                f"another model. They are treated by the policy lossless, so gradients are right and the budget is "
                f"not kept. Take a profile of this model's step and make a plan of it."
            )
        return (
            f"{asked}, but {len(self._unknown)} of them are not those of its profile (the first is "
            f"{next(iter(self._unknown))!r}): shapes or branches are others. They are treated by the policy lossless, "
            f"so gradients are right and the budget may not be kept. Pass replan='auto' to the Session."
        )

    def decide(self, saved: SavedTensor) -> Action:
        """Returns what the plan says of the value, or what the policy for unknown values says."""
        decision = self._by_key.get(saved.key)
        if decision is not None and decision.spec == str(saved.spec):
            self._met.add(saved.key)
            return action_of(decision, saved, self.is_empty)
        if self.is_empty:
            return Keep("the plan is empty, because the plain step fits")
        if saved.need is not Need.SHAPE and saved.key not in self._others:  # a plan lets go of what is a shape
            if not self._unknown:
                warnings.warn(
                    f"the plan {self.fingerprint} was asked for {saved.key!r} ({saved.spec}), but knows no such value. "
                    f"It is treated by the policy lossless, as are others like it (plan.unknown): gradients are right, "
                    f"the budget may not be kept. Session(plan, replan='auto') plans for such a step.",
                    stacklevel=2,
                )
            self._unknown.setdefault(saved.key)
        return LOSSLESS.decide(saved)

    def replanning(self, **options: Any) -> Any:
        """Returns what keeps this plan's budget, beginning with this plan."""
        from backstash.planning.budgeted import Budgeted

        return Budgeted(self.budget, self.allow, max_error=self.max_error, plan=self, device=self.device, **options)

    def action_for(self, saved: SavedTensor) -> Action:
        """Returns what the plan says of the value with this key, whatever its shape."""
        decision = self._by_key.get(saved.key)
        if decision is not None:
            return action_of(decision, saved, self.is_empty)
        return Keep("the plan is empty, because the plain step fits") if self.is_empty else LOSSLESS.decide(saved)

    def united(self, other: Plan) -> Plan:
        """Returns this plan, with what another one says of the values that this one does not know."""
        more = tuple(decision for decision in other.decisions if decision.key not in self._by_key)
        return replace(self, decisions=(*self.decisions, *more), others=tuple({*self.others, *other.others}))

    def has_room_for(self, key: str) -> bool:
        """Returns whether the plan's peak lies elsewhere than where the value is read."""
        decision = self._by_key.get(key)
        return decision is not None and decision.has_room

    def explain(self) -> str:
        """Returns a table of what is done with each value and why, with bytes and time, and the totals of modules."""
        return explain(self)

    def diff(self, other: Plan) -> str:
        """Returns a table of what another plan does otherwise; empty if it does the same with each value."""
        return diff(self, other)

    def to_json(self) -> str:
        """Returns the plan as a JSON document with a checksum."""
        return seal("Plan", plain(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Returns the plan that :meth:`to_json` has written.

        Raises:
            PlanError: the text is no such document, or it was edited or damaged.
        """
        return restore(cls, unseal("Plan", text), "Plan")

    def __repr__(self) -> str:
        return f"Plan({self.fingerprint}, {summary(self)})"

    def _repr_html_(self) -> str:
        return html(self)


class Planner:
    """Makes plans of one profile for many budgets: the frontier is searched once.

    Args:
        profile, allow, max_error: as for :func:`plan`.

    Note: [rehearsed plans]
        The model adds up what lies in one position as if it were there at the same moment, and knows nothing of what
        kernels allocate in a different way when their input is remade. So a plan of a profile that was taken just now
        is tried in a step of its own. The peak that this step reaches is the plan's predicted one. If it is above the
        budget, a smaller solution is tried; if it is below, perhaps a faster one fits. Then the step is timed, in turns
        with plain steps, and the time that it takes is the plan's predicted one.
    """

    def __init__(
        self,
        profile: StepProfile,
        allow: str | Sequence[str] = ("lossless", "recompute"),
        max_error: float | None = 0.01,
    ) -> None:
        if not isinstance(profile, StepProfile):
            raise PlanError(
                f"a plan was asked for of {profile!r:.80}, but that is no StepProfile. Pass what "
                f"backstash.profile(step) has returned, or StepProfile.from_json(text)."
            )
        check_error(max_error)
        self.profile = profile
        self.allow = (allow,) if isinstance(allow, str) else tuple(allow)
        self.max_error = max_error
        self._allowed = restrict(profile, allow)
        self._model = PeakModel(self._allowed)
        kept = (0,) * len(profile.values)
        self._everything = Solution(kept, profile.plain_peak_nbytes, profile.seconds, 0.0)
        self._rehearsed: dict[Solution, int] = {}
        self._timings = Timings(profile)

    @cached_property
    def solutions(self) -> tuple[Solution, ...]:
        """The best ways to hold the values, in the order of their peaks.

        The last one keeps everything. Its peak is that of the plain step, which was measured.
        """
        last = self._everything
        found = frontier(self._model, self.max_error)
        return (*(each for each in found if any(each.choices) and each.peak_nbytes < last.peak_nbytes), last)

    def plan(self, budget: int | str, solver: Literal["greedy", "exact"] = "greedy") -> Plan:
        """Returns the plan for a budget. See :func:`plan`."""
        nbytes = parse_budget(budget, self.profile.plain_peak_nbytes)
        if solver not in ("greedy", "exact"):
            raise PlanError(
                f"a plan was asked for by the solver {solver!r}, but there are 'greedy' and 'exact'. Pass one of them."
            )
        if self._everything.peak_nbytes <= nbytes:
            return self._plan(nbytes, self._everything)
        chosen = next((found for found in reversed(self.solutions) if found.peak_nbytes <= nbytes), None)
        if solver == "exact":
            best = exact(self._model, nbytes, self.max_error)
            chosen = best if best is not None and (chosen is None or best.seconds < chosen.seconds) else chosen
        if self.profile.rehearse is not None:
            chosen = self._rehearse(nbytes, chosen)
        if chosen is not None:
            return self._plan(nbytes, chosen)
        lowest = self._lowest()
        least = self._rehearsed.get(lowest, lowest.peak_nbytes)
        smallest = self._plan(least, lowest)
        floor = int(self._model.base.max())
        held = f"; {size(floor)} of it is there whatever is done with saved tensors" if nbytes < floor else ""
        raise BudgetError(
            f"a plan was asked for within {size(nbytes)} ({nbytes} bytes) above what is held before the step, allowing "
            f"{', '.join(self.allow) or 'nothing'}, but the smallest budget that fits is {least} bytes "
            f"({size(least)}){held}. A step then takes {1000 * lowest.seconds:.0f} ms instead of "
            f"{1000 * self.profile.seconds:.0f} ms. Pass that budget, allow more, or train on smaller batches.",
            least,
            lowest.seconds,
            smallest,
        )

    def at_most(self, nbytes: int) -> Plan:
        """Returns the fastest plan that is predicted to stay within so many bytes, or else that of the least peak."""
        found = next((found for found in reversed(self.solutions) if found.peak_nbytes <= nbytes), self.solutions[0])
        return self._plan(max(nbytes, found.peak_nbytes), found)

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
        if not any(reached <= budget for reached in self._rehearsed.values()):
            self._lowest()  # solutions are off by different amounts, so perhaps one of the lowest fits
        kept = [found for found, reached in self._rehearsed.items() if reached <= budget]
        return self._timings.fastest(kept, lambda found: self._plan(found.peak_nbytes, found))

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

    def _plan(self, budget: int, found: Solution) -> Plan:
        decisions = []
        roomy = self._model.has_room(found.choices, found.peak_nbytes)
        for value, index, has_room in zip(self._allowed.values, found.choices, roomy, strict=True):
            choice = value.choices[index]
            facts = value.key, value.module, value.op, value.spec, value.nbytes, choice.name, choice.kind
            seconds = own_seconds(choice, len(value.reads))
            decisions.append(Decision(*facts, choice.held_nbytes, seconds, choice.error, choice.reason, has_room))
        seconds = self._timings.predict(budget, found)
        return Plan(
            budget,
            self._rehearsed.get(found, found.peak_nbytes),
            seconds,
            self.profile.plain_peak_nbytes,
            self.profile.seconds,
            self.allow,
            self.max_error,
            tuple(decisions),
            self._timings.frontier(found, seconds, self.solutions if any(found.choices) else (found,)),
            self.profile.fingerprint(),
            self.profile.device,
            self.profile.others,
            self.profile.cycles,
        )


def plan(
    profile: StepProfile,
    budget: int | str,
    allow: str | Sequence[str] = ("lossless", "recompute"),
    *,
    max_error: float | None = 0.01,
    solver: Literal["greedy", "exact"] = "greedy",
) -> Plan:
    """Returns the fastest plan whose peak stays within a budget.

    A larger budget never gets a slower plan. If the plain step fits, the plan is empty. If the profile was taken in
    this process, the step runs a few times more under plans, and is undone (Note: [rehearsed plans]).

    Args:
        profile: the step, as ``backstash.profile(step)`` returns it.
        budget: how many bytes the counted peak may have above what is held before the step, or a text such as
            ``"2GiB"``, ``"512 MiB"`` or ``"60%"``, which is of the plain step's peak.
        allow: what may be done with values: ``"lossless"`` (all exact codecs), ``"recompute"``, ``"offload"``,
            ``"bounded"`` (codecs with an error), and names of codecs.
        max_error: the largest sum of the predicted errors of all values, relative to the gradients; None for any. A
            sum, because it is a bound even if all errors point in the same direction.
        solver: ``"greedy"`` needs nothing but NumPy. ``"exact"`` looks for the best plan there is for this budget,
            which takes minutes for some hundred values, and needs ``backstash[planner]``.

    Raises:
        BudgetError: no plan fits. The error names the smallest budget, and has the plan for it.
        PlanError: an argument means nothing.
    """
    return Planner(profile, allow, max_error).plan(budget, solver)

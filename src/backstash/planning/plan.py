"""Plans: the fastest way to hold a step's values within a budget of memory, as data and as a policy."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from backstash.codecs.base import drafting
from backstash.errors import BudgetError, PlanError
from backstash.planning.acting import LOSSLESS, action_of, fetches_of, serves_decision
from backstash.planning.budget import limit_of_errors, parse_budget, restrict, with_choices
from backstash.planning.decision import Decision
from backstash.planning.exact import Solution, solution
from backstash.planning.explain import diff, explain, html, plan_summary, size
from backstash.planning.greedy import Frontier
from backstash.planning.link import open_store
from backstash.planning.peak import PeakModel, own_seconds
from backstash.planning.problem import Choice, StepProfile
from backstash.planning.proven import with_proofs, without_proofs
from backstash.planning.rehearsing import Rehearsing
from backstash.planning.rounding import codec_named, word_has_error
from backstash.planning.sealed import plain, restore, seal, shown, unseal
from backstash.planning.spare import spare_ways
from backstash.planning.usual import like_lossless
from backstash.policies import Action, Keep, Policy
from backstash.saved import Need, SavedTensor

TIGHTENINGS = 3
"""How many times the limit on errors is lowered at most, if the measured error of a plan is above it."""

DRAFTS = 32
"""At most this part of a budget, one in so many, is left free so that the host need not wait for an accelerator."""

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
        error_limit: the largest error that was allowed; 0.0 for exact gradients.
        error: the predicted error of all gradients together, relative to their length: the root of the sum of the
            squares of the values' errors, or what was measured in a rehearsal if that is more. 0.0 if the plan is
            exact.
        decisions: what is done with each value.
        frontier: peak and time of the best plans at all budgets, in the order of their peaks. An empty plan, for which
            nothing had to be searched, has its own alone.
        profile_fingerprint: that of the profile.
        device: type of the device whose memory is planned.
        others: as in StepProfile: keys that a plan is asked about and that are none of its values.
        cycles: as in StepProfile.
        store, directory: as in StepProfile: where values are moved to.
        reserve_nbytes: how many bytes of ``peak_nbytes`` are there for numbers that encode worse than the profiled ones
            (Note: [reserve] in problem.py). A step with the profiled numbers takes so much less.
    """

    budget: int
    peak_nbytes: int
    seconds: float
    plain_peak_nbytes: int
    plain_seconds: float
    allow: tuple[str, ...]
    error_limit: float
    error: float
    decisions: tuple[Decision, ...]
    frontier: tuple[tuple[int, float], ...]
    profile_fingerprint: str
    device: str
    others: tuple[str, ...] = ()
    cycles: int = 1
    store: str = "host"
    directory: str = ""
    reserve_nbytes: int = 0
    _by_key: dict[str, Decision] = field(init=False, compare=False)
    _others: frozenset[str] = field(init=False, compare=False)
    _met: set[str] = field(init=False, compare=False, default_factory=set)
    _unknown: dict[str, None] = field(init=False, compare=False, default_factory=dict)  # in the order of their meeting

    is_fixed = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_key", {decision.key: decision for decision in self.decisions})
        object.__setattr__(self, "_others", frozenset(self.others))
        for decision in self.decisions:
            if decision.kind == "encode" and codec_named(decision.choice) is None:
                raise PlanError(
                    f"a Plan was asked to encode {decision.key!r} by {shown(decision.choice)}, but there is no such "
                    f"codec. Register it before the plan is made or read, or make the plan without it."
                )
        flaw = self._flaw()
        if flaw is not None:
            raise PlanError(
                f"a Plan was asked for of {len(self.decisions)} values, but {flaw}. Make it with backstash.plan(), or "
                f"read what Plan.to_json() has written, unchanged."
            )

    def _flaw(self) -> str | None:
        """Returns what is wrong with the plan, or None."""
        if len(self._by_key) < len(self.decisions):
            return "two of them have the same key"
        if (
            self.budget <= 0
            or min(self.peak_nbytes, self.plain_peak_nbytes, self.reserve_nbytes) < 0
            or self.cycles < 1
        ):
            return "a number of bytes or of forward passes is below what there can be"
        if not all(0.0 <= number < math.inf for number in (self.seconds, self.plain_seconds, self.error)):
            return "a time or its error is negative or not finite"
        flaws = ((decision.key, decision.flaw()) for decision in self.decisions)
        if found := next((f"that of {key!r} does not fit: {flaw}" for key, flaw in flaws if flaw), None):
            return found
        rounded = [each for each in self.decisions if each.kind == "encode" and word_has_error(each.choice)]
        return f"it is exact, and rounds {rounded[0].key!r}" if rounded and not self.error_limit > 0 else None

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

    @cached_property
    def fetches(self) -> dict[str, tuple[str, ...]] | None:  # type: ignore[override]  # read-only here
        """By the key of a value, the keys of the moved values that are asked for when it is read first."""
        return fetches_of(self.decisions)

    @property
    def stores(self) -> dict[str, Callable[[], Any]] | None:  # type: ignore[override]  # read-only here
        """What opens the store that values are moved to, if any are and no Session has it anyway."""
        if self.fetches is None or self.store == "host":
            return None
        return {self.store: lambda: open_store(self.store, self.directory)}

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
            f"{next(iter(self._unknown))!r}): shapes or branches are others. What the plan says of their names is done "
            f"where it can be, else what the policy lossless says, so gradients are right and the budget may not be "
            f"kept. Pass replan='auto' to the Session."
        )

    def decide(self, saved: SavedTensor) -> Action:
        """Returns what the plan says of the value, also of another shape if that serves, or what lossless says."""
        decision = self._by_key.get(saved.key)
        if decision is not None and decision.spec == str(saved.spec):
            self._met.add(saved.key)
            return action_of(decision, saved, self.store, self.is_empty)
        if self.is_empty:
            return Keep("the plan is empty, because the plain step fits")
        if saved.need is not Need.SHAPE and saved.key not in self._others:  # a plan lets go of what is a shape
            if not self._unknown:
                warnings.warn(
                    f"the plan {self.fingerprint} was asked for {saved.key!r} ({saved.spec}), but knows no such value. "
                    f"What the plan says of its name is done if it can be, else what the policy lossless says, as with "
                    f"others like it (plan.unknown): gradients are right, the budget may not be kept. Session(plan, "
                    f"replan='auto') plans for such a step.",
                    stacklevel=2,
                )
            self._unknown.setdefault(saved.key)
        if decision is not None and saved.need is not Need.SHAPE and serves_decision(decision, saved):
            return action_of(decision, saved, self.store, False)
        return LOSSLESS.decide(saved)

    def replanning(self, **options: Any) -> Any:
        """Returns what keeps this plan's budget, beginning with this plan."""
        from backstash.planning.budgeted import Budgeted

        known: dict[str, Any] = {"plan": self, "device": self.device, "offload_to": self.directory or None}
        return Budgeted(self.budget, self.allow, error_limit=self.error_limit or None, **known, **options)

    def guarded(self, budget: int | str | None = None, spill: str | None = None) -> Policy:
        """Returns a policy that does what the plan says, and holds values in less when a step holds more than planned.

        The numbers of another step may encode worse than those of the profiled one. ``Session(plan.guarded())`` sees
        that, and costs what ``Session(plan)`` does in steps that are as planned (Note: [quiet guard] in guard.py). Its
        report says what was planned, predicted and reached.

        Args:
            budget: the most bytes that a step may take above what is held before it, or a text as for :func:`plan`;
                by default the plan's own budget.
            spill: name of a store of the Session for what can be held in no other way. By default the host on a GPU,
                and elsewhere the disk to which the plan moves values, if it moves any.

        Raises:
            PlanError: the budget means nothing, or the plan is predicted to exceed it.
        """
        from backstash.planning.guard import guard

        return guard(self, budget, spill)

    def action_for(self, saved: SavedTensor) -> Action:
        """Returns what the plan says of the value with this key, whatever its shape."""
        decision = self._by_key.get(saved.key)
        if decision is not None:
            return action_of(decision, saved, self.store, self.is_empty)
        return Keep("the plan is empty, because the plain step fits") if self.is_empty else LOSSLESS.decide(saved)

    def united(self, other: Plan) -> Plan:
        """Returns this plan, with what another one says of the values that this one does not know."""
        more = tuple(decision for decision in other.decisions if decision.key not in self._by_key)
        error = math.hypot(self.error, *(decision.error for decision in more))
        others = tuple({*self.others, *other.others})
        return replace(self, decisions=(*self.decisions, *more), others=others, error=error)

    def has_room_for(self, key: str) -> bool:
        """Returns whether the plan's peak lies elsewhere than where the value is read."""
        decision = self._by_key.get(key)
        return decision is not None and decision.has_room

    def in_flight_for(self, key: str) -> int:
        """Returns how many bytes of values may be held beside their planes where the value with that key is born."""
        decision = self._by_key.get(key)
        return 0 if decision is None else decision.in_flight_nbytes

    def explain(self) -> str:
        """Returns a table of what is done with each value and why, with bytes and time, and the totals of modules."""
        return explain(self)

    def diff(self, other: Plan) -> str:
        """Returns a table of what another plan does otherwise; empty if it does the same with each value."""
        if not isinstance(other, Plan):
            raise PlanError(
                f"a plan was asked how it differs from {other!r:.80}, but that is no Plan. Pass what backstash.plan() "
                f"has returned."
            )
        return diff(self, other)

    def to_json(self) -> str:
        """Returns the plan as a JSON document with a checksum, with what this process has proven of its recipes."""
        return seal("Plan", with_proofs(plain(self)))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Returns the plan that :meth:`to_json` has written.

        Raises:
            PlanError: the text is no such document, or it was edited or damaged.
        """
        return restore(cls, without_proofs(unseal("Plan", text)), "Plan")

    def __repr__(self) -> str:
        return f"Plan({self.fingerprint}, {plan_summary(self)})"

    def _repr_html_(self) -> str:
        return html(self)


def _is_drafted(choice: Choice) -> bool:
    """Whether a value may be encoded on an accelerator before the host knows that its planes are whole."""
    codec = codec_named(choice.name) if choice.kind == "encode" else None
    return codec is not None and drafting(codec) is not None


class Planner(Rehearsing):
    """Makes plans of one profile for many budgets: the frontier is searched once.

    Args:
        profile, allow, error_limit: as for :func:`plan`.
    """

    def __init__(
        self,
        profile: StepProfile,
        allow: str | Sequence[str] = ("lossless", "recompute"),
        error_limit: float | None = None,
    ) -> None:
        if not isinstance(profile, StepProfile):
            raise PlanError(
                f"a plan was asked for of {profile!r:.80}, but that is no StepProfile. Pass what "
                f"backstash.profile(step) has returned, or StepProfile.from_json(text)."
            )
        self.error_limit = limit_of_errors(error_limit, allow)
        self.allow = (allow,) if isinstance(allow, str) else tuple(allow)
        self.profile = profile = with_choices(profile, self.allow)
        self._allowed = restrict(profile, allow)
        super().__init__(profile, PeakModel(self._allowed), self.error_limit)
        self._frontier: Frontier | None = None
        self._searching: Iterator[None] = iter(())
        self._solutions: tuple[Solution, ...] = ()
        usual = like_lossless(self._allowed)
        self._usual = solution(self._model, usual) if any(usual) else None

    @property
    def solutions(self) -> tuple[Solution, ...]:
        """The best ways to hold the values, in the order of their peaks; whatever is left of the search is done first.

        The last one keeps everything. Its peak is that of the plain step, which was measured.
        """
        for _ in self.search():
            pass
        return self._solutions

    @property
    def is_searched(self) -> bool:
        """Whether the search for the best solutions is over."""
        return bool(self._solutions)

    def search(self) -> Iterator[None]:
        """Searches for the best solutions a little at a time. All who iterate share one search."""
        if self._frontier is None:
            self._frontier = Frontier(self._model, self._limit)
            self._searching = self._frontier.search()
        if not self.is_searched:
            for _ in self._searching:  # no "yield from", which would end the search with who left it
                yield
            self._solutions = self._below_plain(self._frontier.solutions())

    def _search_anew(self) -> None:
        self._frontier, self._solutions = None, ()

    def _below_plain(self, found: Sequence[Solution]) -> tuple[Solution, ...]:
        last = self._everything
        return (*(each for each in found if any(each.choices) and each.peak_nbytes < last.peak_nbytes), last)

    def has_found(self, nbytes: int) -> bool:
        """Whether a solution within so many bytes is known already."""
        lowest = None if self._frontier is None else self._frontier.lowest_nbytes
        return self._everything.peak_nbytes <= nbytes or (lowest is not None and lowest <= nbytes)

    def plan_so_far(self, nbytes: int) -> Plan:
        """Returns the fastest plan of those that were found so far within so many bytes, of which there is one.

        What it predicts is right, but nothing faster was searched for.
        """
        if self._everything.peak_nbytes <= nbytes or self._frontier is None:
            return self._plan(nbytes, self._everything)
        known = self._below_plain(self._frontier.solutions())
        found = next(found for found in reversed(known) if found.peak_nbytes <= nbytes)
        return self._with_drafts(self._plan(nbytes, found, known), found)

    def plan(self, budget: int | str, solver: Literal["greedy", "exact"] = "greedy") -> Plan:
        """Returns the plan for a budget. See :func:`plan`."""
        nbytes = parse_budget(budget, self.profile.plain_peak_nbytes)
        if solver not in ("greedy", "exact"):
            raise PlanError(
                f"a plan was asked for by the solver {solver!r}, but there are 'greedy' and 'exact'. Pass one of them."
            )
        if self._everything.peak_nbytes <= nbytes:
            return self._plan(nbytes, self._everything)
        chosen = self._choose(nbytes, solver)
        for _ in range(TIGHTENINGS):
            if chosen is None or self._error(chosen) <= self.error_limit:
                break
            self._limit *= 0.9 * chosen.error / self._error(chosen)
            self._search_anew()
            chosen = self._choose(nbytes, solver)
        if chosen is not None and self._error(chosen) <= self.error_limit:
            chosen = self._roomier(nbytes, chosen, solver)
            return self._with_drafts(self._plan(nbytes, chosen), chosen)
        lowest = self._lowest()
        least = min(self._predicted(lowest), self.profile.plain_peak_nbytes)  # for which the plan is to keep everything
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
        return self._with_drafts(self._plan(max(nbytes, found.peak_nbytes), found), found)

    def _with_drafts(self, plan: Plan, found: Solution) -> Plan:
        """Returns a plan that says for how many bytes of drafts there is room (Note: [drafts] in stash/drafts.py).

        It is predicted to take as much more as the largest draft needs for which there is none, within the budget.
        """
        drafted = self._drafted_nbytes(found)
        if not any(drafted):
            return plan
        peak_nbytes = max(plan.peak_nbytes, min(plan.budget, plan.peak_nbytes + self._lacking(found)))
        room = self._model.in_flight(self._live(found), peak_nbytes)
        decisions = (replace(each, in_flight_nbytes=more) for each, more in zip(plan.decisions, room, strict=True))
        return replace(plan, decisions=tuple(decisions), peak_nbytes=peak_nbytes)

    def _roomier(self, nbytes: int, chosen: Solution, solver: str) -> Solution:
        """Returns a solution that has room for its drafts, if that takes no more than a small share of the budget."""
        lacking = min(self._lacking(chosen), nbytes // DRAFTS)
        if self._predicted(chosen) + lacking <= nbytes:
            return chosen
        roomier = self._choose(nbytes - lacking, solver)
        return chosen if roomier is None or self._error(roomier) > self.error_limit else roomier

    def _lacking(self, found: Solution) -> int:
        """Returns how many bytes the largest draft of a solution takes for which there is no room below its peak."""
        room = self._model.in_flight(self._live(found), self._predicted(found))
        return max(0, *(nbytes - more for nbytes, more in zip(self._drafted_nbytes(found), room, strict=True)))

    def _drafted_nbytes(self, found: Solution) -> list[int]:
        """Returns the bytes of the values that may be drafted, 0 for others."""
        if self.profile.device == "cpu":
            return [0] * len(found.choices)
        chosen = zip(self._allowed.values, found.choices, strict=True)
        return [value.nbytes if _is_drafted(value.choices[index]) else 0 for value, index in chosen]

    def _plan(self, budget: int, found: Solution, known: tuple[Solution, ...] = ()) -> Plan:
        decisions, first = [], {value.reads[0]: value.key for value in reversed(self.profile.values)}
        roomy = self._model.has_room(found.choices, found.peak_nbytes)
        spare = spare_ways(self._model, found.choices, self._predicted(found))
        order = {self._allowed.values[at].key: number for number, at in enumerate(spare, 1)}
        for value, index, has_room in zip(self._allowed.values, found.choices, roomy, strict=True):
            choice = value.choices[index]
            facts = value.key, value.module, value.op, value.spec, value.nbytes, choice.name, choice.kind
            costs = choice.held_nbytes, own_seconds(choice, len(value.reads)), choice.error, choice.reason
            asked = tuple(first[at] for at in choice.fetches if at not in value.reads)
            decisions.append(Decision(*facts, *costs, has_room, asked, choice.reserve_nbytes, order.get(value.key, 0)))
        seconds = self._timings.predict(budget, found)
        return Plan(
            budget,
            self._predicted(found, budget),
            seconds,
            self.profile.plain_peak_nbytes,
            self.profile.seconds,
            self.allow,
            self.error_limit,
            max(found.error, self._measured.get(found, 0.0)),
            tuple(decisions),
            self._timings.frontier(found, seconds, (known or self.solutions) if any(found.choices) else (found,)),
            self.profile.fingerprint(),
            self.profile.device,
            self.profile.others,
            self.profile.cycles,
            self.profile.store,
            self.profile.directory,
            self._reserve(found),
        )


def plan(
    profile: StepProfile,
    budget: int | str,
    allow: str | Sequence[str] = ("lossless", "recompute"),
    *,
    error_limit: float | None = None,
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
        error_limit: how far all gradients together may be off, as a share of their length, where a codec with an error
            is allowed; 0.01 by default. Without one, gradients are exact.
        solver: ``"greedy"`` needs nothing but NumPy. ``"exact"`` looks for the best plan there is for this budget,
            which takes minutes for some hundred values, and needs ``backstash[planner]``.

    Raises:
        BudgetError: no plan fits. The error names the smallest budget, and has the plan for it.
        PlanError: an argument means nothing.
    """
    return Planner(profile, allow, error_limit).plan(budget, solver)

"""The fastest plan within a budget: found by a search, and tried in steps of its own where that can be done.

Note: [rehearsed plans]
    The model adds up what lies in one position as if it were there at the same moment, and knows nothing of what
    kernels allocate in a different way when their input is remade. So a plan of a profile that was taken just now is
    tried in a step of its own. The peak that this step reaches is the plan's predicted one. If it is above the budget,
    a smaller solution is tried; if it is below, perhaps a faster one fits. What is reserved for other numbers is added
    to what a step reaches (Note: [reserve] in problem.py). Then the step is timed, as training settles down to it, and
    the time that it takes is the plan's predicted one. The error of its gradients is measured as well. If it is above
    the limit, a plan within a lower limit is looked for. Where a plan takes longer than a plain step, what the policy
    lossless does is tried and timed as well, because no plan of the same bytes should be slower: unless the model says
    that it takes longer than the plan, by more than noise, and longer than the plan was timed with. A program that
    trains in its own loop is asked for no steps, so its plans keep to what is predicted.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from backstash.arguments import are_words
from backstash.codecs.base import drafting
from backstash.errors import BudgetError, PlanError, RewriteError
from backstash.planning.model.budget import REORDERED, limit_of_errors, parse_budget, restrict, with_choices
from backstash.planning.model.decision import Decision
from backstash.planning.model.explain import size
from backstash.planning.model.peak import Bytes, PeakModel, own_seconds
from backstash.planning.model.plan import Plan
from backstash.planning.model.problem import Choice, StepProfile
from backstash.planning.model.rounding import codec_named
from backstash.planning.search.exact import Solution, exact, solution
from backstash.planning.search.greedy import Frontier, best
from backstash.planning.search.spare import spare_ways
from backstash.planning.search.timings import NOISE, Timings, like_lossless
from backstash.rewrites.chunked_loss import CHUNK_NBYTES
from backstash.stash.sample import ELEMENTS
from backstash.telling import note_progress

TIGHTENINGS = 3
"""How many times the limit on errors is lowered at most, if the measured error of a plan is above it."""

DRAFTS = 32
"""At most this part of a budget, one in so many, is left free so that the host need not wait for an accelerator."""

ROUNDING = 4 << 10
"""Bytes that are added to a rehearsed peak, because steps differ by some small tensors, such as copies of indices."""

SAMPLE_NBYTES = 8 * ELEMENTS
"""The most bytes of the sample that a value leaves behind which is going to be remade (stash/sample.py)."""

VARIATION = 0.002
"""Share of encoded bytes that is added as well: dropout makes more zeros in one step than in another."""

REHEARSALS = 4
"""How many solutions are tried in a step at most, for one budget."""


WORTH = 0.005
"""By what share of a plain step another solution must be faster to be tried when one that keeps the budget is known."""

WORTH_NBYTES = 0.005
"""By what share of the plain step's peak one must be lower that keeps all values, and only lets go of tensors of which
backward reads the shape alone."""

CHUNKS = 16
"""Logits of a loss in chunks take at most this part of a budget at a time, one in so many."""


class Planner:
    """Makes plans of one profile for many budgets: the frontier is searched once.

    It remembers what solutions have reached in steps of their own (Note: [rehearsed plans]).

    Args:
        profile, allow, error_limit: as for :func:`plan`.
        others: planners of other shapes of the same program. What they have found is tried here before any search.
    """

    def __init__(
        self,
        profile: StepProfile,
        allow: str | Sequence[str] = ("lossless", "recompute"),
        error_limit: float | None = None,
        others: Sequence[Planner] = (),
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
        self._model = PeakModel(self._allowed)
        self._limit = self.error_limit  # for the search, which may have to aim lower
        self._frontier: Frontier | None = None
        self._searching: Iterator[None] = iter(())
        self._solutions: tuple[Solution, ...] = ()
        kept = (0,) * len(profile.values)
        self._everything = Solution(kept, profile.plain_peak_nbytes, profile.seconds, 0.0)
        usual = like_lossless(self._allowed)
        self._usual = solution(self._model, usual) if any(usual) else None  # what the policy lossless does
        self._rehearsed: dict[Solution, int] = {}
        self._reserves: dict[Solution, int] = {}  # bytes of these peaks
        self._alive: dict[Solution, Bytes] = {}  # bytes that were alive at each position, with what is reserved
        self._measured: dict[Solution, float] = {}
        self._timings = Timings(profile)
        self._of_others = self._translated(others)

    def _translated(self, others: Sequence[Planner]) -> list[Solution]:
        """What other planners have found so far, as solutions of this step: what it does not know is kept."""
        index = [{choice.name: at for at, choice in enumerate(value.choices)} for value in self._allowed.values]
        found: dict[tuple[int, ...], None] = {}
        for other in others:
            keys = [value.key for value in other._allowed.values]
            for each in other.known_solutions:
                choices = zip(other._allowed.values, each.choices, strict=True)
                names = dict(zip(keys, (value.choices[at].name for value, at in choices), strict=True))
                here = zip(self._allowed.values, index, strict=True)
                found[tuple(known.get(names.get(value.key, "keep"), 0) for value, known in here)] = None
        sound = [each for each in found if any(each) and not self._model.remakes_what_has_an_error(each)]
        solved = [solution(self._model, each) for each in sound]
        return [each for each in solved if not self._limit or each.error <= self._limit]

    @property
    def known_solutions(self) -> tuple[Solution, ...]:
        """The best ways to hold the values that are known so far, in the order of their peaks."""
        if self._solutions:
            return self._solutions
        found = [] if self._frontier is None else self._frontier.solutions()
        return self._below_plain(best([*found, *self._of_others]))

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

    @property
    def floor_nbytes(self) -> int:
        """How many bytes of a step's peak are there whatever is done with values: no more than a plain step has."""
        return min(int(self._model.base.max()), self.profile.plain_peak_nbytes)

    def _floor_is_of(self) -> str:
        """What runs where most is there whatever is done with values, in words."""
        position = self.profile.positions[int(self._model.base.argmax())]
        module = f" of {position.module}" if position.module else ""
        what, where = ("gradients", "backward") if position.is_backward else ("results", "forward")
        return f"{what} and what operations take, most while {position.name}{module} runs in the {where} pass"

    def search(self) -> Iterator[None]:
        """Searches for the best solutions a little at a time. All who iterate share one search."""
        if self._frontier is None:
            self._frontier = Frontier(self._model, self._limit)
            self._searching = self._frontier.search()
        if not self.is_searched:
            for tried, _ in enumerate(self._searching):  # no "yield from", which would end the search with who left it
                note_progress("searching for plans", tried)
                yield
            self._solutions = self._below_plain(best([*self._frontier.solutions(), *self._of_others]))

    def _search_anew(self) -> None:
        self._frontier, self._solutions = None, ()

    def _below_plain(self, found: Sequence[Solution]) -> tuple[Solution, ...]:
        last = self._everything
        shapes_nbytes = int((1 - WORTH_NBYTES) * last.peak_nbytes)
        lower = (each for each in found if each.peak_nbytes < last.peak_nbytes)
        return (*(each for each in lower if any(each.choices) or each.peak_nbytes <= shapes_nbytes), last)

    def has_found(self, nbytes: int) -> bool:
        """Whether a solution within so many bytes is known already."""
        lowest = None if self._frontier is None else self._frontier.lowest_nbytes
        is_known = any(each.peak_nbytes <= nbytes for each in (self._everything, *self._of_others))
        return is_known or (lowest is not None and lowest <= nbytes)

    def plan_so_far(self, nbytes: int) -> Plan:
        """Returns the fastest plan of those found so far within so many bytes, or else that of the least peak.

        What it predicts is right, but nothing faster or smaller was searched for.
        """
        if self._everything.peak_nbytes <= nbytes:
            return self._plan(nbytes, self._everything)
        known = self.known_solutions
        found = next((found for found in reversed(known) if found.peak_nbytes <= nbytes), known[0])
        return self._with_drafts(self._plan(max(nbytes, found.peak_nbytes), found, known), found)

    def first_plan(self, nbytes: int, may_keep_all: bool = True) -> tuple[Plan, int]:
        """Returns the fastest known plan whose first step stays within so many bytes too, and the peak of that step.

        The first step of a shape proves calls, which takes memory (PeakModel.first_nbytes). If no such plan is known,
        it is the one whose first step takes the least, of those that fit from the second step on.
        """
        known = [*reversed(self.known_solutions[:-1])]
        if may_keep_all or not known:
            known.insert(0, self._everything)
        firsts = [self._first_nbytes(each) for each in known]
        fitting = [at for at, each in enumerate(known) if self._predicted(each) <= nbytes] or [len(known) - 1]
        best = next((at for at in fitting if firsts[at] <= nbytes), min(fitting, key=firsts.__getitem__))
        found = known[best]
        plan = self._plan(max(nbytes, self._predicted(found)), found, self.known_solutions)
        decisions = tuple(
            each if each.kind == "recompute" else replace(each, spare=0, calls=()) for each in plan.decisions
        )  # of what a guard would have remade nothing is proven yet
        return self._with_drafts(replace(plan, decisions=decisions), found), firsts[best]

    @property
    def least_first_nbytes(self) -> int:
        """The least peak of a first step under any plan that is known."""
        return min(map(self._first_nbytes, self.known_solutions))

    def _first_nbytes(self, found: Solution) -> int:
        if found == self._everything:
            return ROUNDING + self._predicted(found)
        samples = self._model.count_remade(found.choices) * SAMPLE_NBYTES  # each later step holds them too
        return ROUNDING + samples + self._model.first_nbytes(found.choices)

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
        floor = min(self.floor_nbytes, least)  # which may have been seen to take less
        held, do = "", "allow more, or train on smaller batches"
        if nbytes < floor:
            held = f"; {size(floor)} of it is there whatever is done with saved tensors: {self._floor_is_of()}"
            do = "or train on smaller batches, or a smaller model: to allow more does not help"
        raise BudgetError(
            f"a plan was asked for within {size(nbytes)} ({nbytes} bytes) above what is held before the step, allowing "
            f"{', '.join(self.allow) or 'nothing'}, but the smallest budget that fits is {least} bytes "
            f"({size(least)}){held}. A step then takes {1000 * lowest.seconds:.0f} ms instead of "
            f"{1000 * self.profile.seconds:.0f} ms. Pass that budget, {do}.",
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
        more = max(0, min(self._lacking(found), plan.budget - plan.peak_nbytes))
        peak_nbytes = plan.peak_nbytes + more
        room = self._model.in_flight(self._live(found), peak_nbytes)
        decisions = tuple(
            replace(each, in_flight_nbytes=nbytes) for each, nbytes in zip(plan.decisions, room, strict=True)
        )
        return replace(plan, decisions=decisions, peak_nbytes=peak_nbytes, in_flight_nbytes=more)

    def _roomier(self, nbytes: int, chosen: Solution, solver: str) -> Solution:
        """Returns a solution that has room for its drafts, if that takes no more than a small share of the budget."""
        lacking = min(self._lacking(chosen), nbytes // DRAFTS)
        if self._predicted(chosen) + lacking <= nbytes:
            return chosen
        roomier = self._choose(nbytes - lacking, solver)
        return chosen if roomier is None or self._error(roomier) > self.error_limit else roomier

    def _lacking(self, found: Solution) -> int:
        """Returns how many bytes the largest draft of a solution takes for which there is no room below its peak."""
        drafted = self._drafted_nbytes(found)
        if not any(drafted):
            return 0
        room = self._model.in_flight(self._live(found), self._predicted(found))
        return max(0, *(nbytes - more for nbytes, more in zip(drafted, room, strict=True)))

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
            remade = next((each.calls for each in value.choices if each.kind == "recompute"), ())
            spared = order.get(value.key, 0)
            calls = remade if spared or choice.kind == "recompute" else ()
            counts = choice.reserve_nbytes, spared
            decisions.append(Decision(*facts, *costs, has_room, asked, *counts, calls=calls))
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
            self._timings.frontier(found, seconds, (found,) if found == self._everything else known or self.solutions),
            self.profile.fingerprint(),
            self.profile.device,
            self.profile.others,
            self.profile.cycles,
            self.profile.store,
            self.profile.directory,
            self._reserve(found),
            min_nbytes=self.profile.min_nbytes,
        )

    # -- steps of their own --------------------------------------------------------------------------------------------

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
            solved = exact(self._model, nbytes, self._limit)
            chosen = solved if solved is not None and (chosen is None or solved.seconds < chosen.seconds) else chosen
        if self.profile.rehearse is not None:
            with (self.profile.together or nullcontext)():  # type: ignore[misc]  # no method
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
            other = fitting[-1] if fitting else candidates[0]
            if self._reached(trial) <= budget and trial.seconds - other.seconds < WORTH * self.profile.seconds:
                break
            trial = other
        fastest, usual = self._fastest_seen(budget), self._usual
        most = float("inf")
        if fastest is not None:
            adds, plain = self._timings.adds(fastest), self.profile.seconds
            if adds <= NOISE:
                return fastest  # which nothing beats by more than noise
            most = max(plain * (1.0 + adds), fastest.seconds + NOISE * plain)
        if usual is not None and usual.peak_nbytes <= budget and usual.seconds < most:
            self._reached(usual)
        if not any(reached <= budget for reached in self._rehearsed.values()):
            self._lowest()  # solutions are off by different amounts, so perhaps one of the lowest fits
        return self._fastest_seen(budget)

    def _fastest_seen(self, budget: int) -> Solution | None:
        """The fastest of the solutions that were seen to keep the budget, if any."""
        seen = self._rehearsed.items()
        kept = [each for each, at in seen if at <= budget and self._measured.get(each, 0.0) <= self.error_limit]
        return self._timings.fastest(kept, lambda found: self._plan(found.peak_nbytes, found), self._usual)

    def _lowest(self) -> Solution:
        """The solution with the least peak: the least that was seen, where plans can be tried in a step."""
        if self.profile.rehearse is None:
            return self.solutions[0]
        usual = () if self._usual is None else (self._usual,)
        tried = *self.solutions[:-1][:REHEARSALS], *usual, *self._rehearsed
        seen = min(tried, key=self._reached, default=self._everything)
        return seen if self._rehearsed.get(seen, 0) < self._everything.peak_nbytes else self._everything

    def _predicted(self, found: Solution, budget: int | None = None) -> int:
        """Returns the peak that is predicted: what was rehearsed, else what the model says."""
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
            note_progress("trying plans in steps", len(self._rehearsed) + 1)
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


def _is_drafted(choice: Choice) -> bool:
    """Whether a value may be encoded on an accelerator before the host knows that its planes are whole."""
    codec = codec_named(choice.name) if choice.kind == "encode" else None
    return codec is not None and drafting(codec) is not None


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
            ``"bounded"`` (codecs with an error), and names of codecs. ``"reordered"`` also allows that the loss of a
            language model's head is computed in chunks, which is proven on the step: sums in another order, so that
            gradients have other last bits (see rewrites/chunked_loss.py). If the proof fails, a warning says why, and
            the plan does without.
        error_limit: how far all gradients together may be off, as a share of their length, where a codec with an error
            is allowed; 0.01 by default. Without one, gradients are exact.
        solver: ``"greedy"`` needs nothing but NumPy. ``"exact"`` looks for the best plan there is for this budget,
            which takes minutes for some hundred values, and needs ``backstash[planner]``.

    Raises:
        BudgetError: no plan fits. The error names the smallest budget, and has the plan for it.
        PlanError: an argument means nothing.
        RewriteError: ``"reordered"`` is allowed, but its proof fails, and no plan without it fits.
    """
    if are_words(allow) and REORDERED in ((allow,) if isinstance(allow, str) else allow):
        others = [word for word in ((allow,) if isinstance(allow, str) else allow) if word != REORDERED]
        return _reordered(profile, budget, others, error_limit, solver)
    return Planner(profile, allow, error_limit).plan(budget, solver)


def _reordered(
    profile: StepProfile, budget: int | str, allow: Sequence[str], error_limit: float | None, solver: Any
) -> Plan:
    """Returns the fastest plan within a budget with sums in their order, or with those of a loss in another one."""
    nbytes = parse_budget(budget, profile.plain_peak_nbytes)
    try:
        plain = Planner(profile, allow, error_limit).plan(nbytes, solver)
        failure = None
    except BudgetError as error:
        plain, failure = None, error
    if plain is not None and plain.is_empty:
        return plain
    reorders = profile.reorders  # type: ignore[misc]  # no method
    if reorders is None:
        raise PlanError(
            f"a plan was asked for with {REORDERED!r}, but the profile comes from a file, so that nobody can prove on "
            f"its step that a loss in another order is the same. Take it with bs.profile(step), or leave that out."
        )
    chunk_nbytes = max(1, min(CHUNK_NBYTES, nbytes // CHUNKS))
    try:
        head, other = reorders(chunk_nbytes)  # type: ignore[call-arg]
    except RewriteError as error:
        if plain is None:
            raise error from failure
        warnings.warn(
            f"a plan was asked for with {REORDERED!r}, but a loss in another order is not allowed for this step: "
            f"{error} This plan does without it.",
            stacklevel=3,
        )
        return plain
    try:
        found = Planner(other, allow, error_limit).plan(nbytes, solver)
    except BudgetError as error:
        lower = error if failure is None or error.smallest_nbytes < failure.smallest_nbytes else failure
        if plain is None:
            raise lower from None
        return plain
    if plain is not None and plain.seconds <= found.seconds:
        return plain
    return replace(
        found,
        reordered=head,
        chunk_nbytes=chunk_nbytes,
        plain_peak_nbytes=profile.plain_peak_nbytes,
        plain_seconds=profile.seconds,
    )


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

    Every byte that the step takes is taken to grow with the batch. What does not, such as the gradient of a weight
    before it is added up, makes the estimate of a larger batch too small. What the step frees that was held before it,
    as a loop does that begins with ``zero_grad()``, is freed once, however large the batch is.

    Args:
        budget_nbytes: the budget, in bytes above what is held before the step.
    """
    lowest = Planner(profile, allow, error_limit).solutions[0]
    freed = max(0, -min(profile.base_nbytes, default=0))

    def times(peak_nbytes: int) -> float:
        grown = (budget_nbytes + freed) / max(1, peak_nbytes + freed)
        return min(budget_nbytes / max(1, peak_nbytes), grown)  # the first if the batch has to be smaller

    plain = times(profile.plain_peak_nbytes)
    seconds = lowest.seconds / profile.seconds if profile.seconds else 1.0
    return Growth(plain, max(plain, times(lowest.peak_nbytes)), seconds)

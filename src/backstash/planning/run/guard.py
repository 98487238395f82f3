"""Watches what a step holds, and holds less of the rest when more is held than was planned.

Note: [guard]
    A plan knows how many bytes each of its values is going to hold. The numbers of another step may encode worse, and a
    branch that was not profiled saves values of its own. So the guard adds up what is held above the plan. As soon as
    that is more than the budget leaves free, each value that comes after is moved away, where there is a place for it.
    From the next step on, values are made again instead of kept, those first of which the plan says that this causes no
    peak elsewhere (Note: [spare ways] in spare.py). A plan has a reserve for such numbers (Note: [reserve] in
    problem.py), and the last quarter of it is not waited for. On a GPU the allocator is asked as well, so
    that workspaces and gradients which have grown count too. What comes last in a forward pass has nothing after it
    that could make room; the next step has, because its plan leaves as much free.

Note: [quiet guard]
    A step that is as planned should cost what it costs without a guard. So the guard has a revision: a Session asks it
    once in each place of the model, and tells it of a value again only if that takes other bytes than before. What is
    held above the plan is the sum over all values of what was told of them last, so it is known before a forward pass
    begins. When it becomes too much, the revision changes, and every value that comes is asked about again. What is
    held in less stays so, until after some steps there is room to hold it as planned beside all others.
    Where an allocator is asked, or a step has values that the plan does not know, there is no revision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from backstash.codecs import Raw
from backstash.errors import PlanError
from backstash.planning.model.budget import parse_budget
from backstash.planning.model.explain import size
from backstash.planning.model.plan import Plan
from backstash.policies import Action, Keep, Policy, Recompute, Stash, get
from backstash.policies.actions import Outcome
from backstash.policies.base import Wrapper
from backstash.saved import Need, SavedTensor, first_life_of

LOOK_AGAIN = 64
"""After how many steps what was held in less than planned is held as planned again, if there is room for it."""


def guard(plan: Plan, budget: int | str | None = None, spill: str | None = None) -> Policy:
    """Returns a Guard in front of a plan, or the plan itself if it keeps everything and fits: see Plan.guarded."""
    if spill is not None and not isinstance(spill, str):
        raise PlanError(
            f"a guard was asked for with spill={spill!r:.80}, but that is no name. Pass that of one of the Session's "
            f"stores, or leave it out."
        )
    nbytes = plan.budget if budget is None else parse_budget(budget, plan.plain_peak_nbytes)
    if plan.peak_nbytes > nbytes:
        raise PlanError(
            f"a guard was asked for that keeps a step within {size(nbytes)}, but the plan is predicted to take "
            f"{size(plan.peak_nbytes)}. Make a plan for that budget."
        )
    return in_front_of(plan, nbytes, spill)


def in_front_of(plan: Plan, nbytes: int, spill: str | None = None) -> Guard | Plan:
    """Returns a Guard that keeps a step within so many bytes if that can be done, or a plan that keeps everything."""
    if plan.is_empty:
        return plan
    if spill is None:
        spill = "host" if plan.device != "cpu" else plan.store if plan.stores else None
    return Guard(plan, nbytes, spill, None if plan.device == "cpu" else torch.accelerator.memory_allocated)


READY = 0.75
"""Share of a plan's reserve that may be used up before values are held in less: some steps grow more than others."""


class Guard(Wrapper):
    """A policy in front of a plan, which holds less than planned when it has to.

    Args:
        spill: name of a store for what can be held in no other way; None where there is none.
        allocated: returns the bytes that are allocated on the device; None where nobody counts them.

    Attributes:
        excess: bytes that are held above what the plan says, by what was told of each value last.
        most_excess: the most of them at the end of any forward pass.
        escalated: how many times a value was decided to be held in less than planned.
    """

    observes_changes = True

    def __init__(
        self, plan: Plan, budget_nbytes: int, spill: str | None = None, allocated: Callable[[], int] | None = None
    ) -> None:
        self.plan = plan
        self.excess = self.most_excess = self.escalated = 0
        self._budget_nbytes = budget_nbytes
        self._room = max(0, budget_nbytes - plan.peak_nbytes) + int(READY * plan.reserve_nbytes)
        self._allocated_room = self._room + plan.in_flight_nbytes  # an allocator counts drafts as well
        self._spill = spill
        self._allocated = allocated
        self._planned = {decision.key: decision.held_nbytes for decision in plan.decisions}
        spare = sorted((decision for decision in plan.decisions if decision.spare), key=lambda each: each.spare)
        self._spare = {decision.key: decision.held_nbytes for decision in spare}  # in the order of their turns
        self._remade: list[str] = []  # those that are made again, the first ones
        self._others = frozenset(plan.others)
        # Keys of values that go to another store, by the plan or where they cannot be made again.
        self._moved = {decision.key for decision in plan.decisions if decision.kind == "offload"}
        self._known: dict[str, tuple[SavedTensor, Action]] = {}
        self._above: dict[str, int] = {}  # by key: bytes above the plan, as told last
        self._in_less: set[str] = set()  # keys of values that are held in less than planned
        self._revision: object | None = object() if allocated is None else None
        self._is_over = False  # whether more is held than the budget leaves free
        self._has_unknown = False  # values in this step that the plan does not know
        self._steps = 0
        self._at_start = 0
        self._usual: dict[str, int] = {}  # by key: bytes allocated since the step began, in the first step
        self._is_first = True
        self._stored: Policy = get("lossless_stored")

    def __repr__(self) -> str:
        return f"Guard({self.plan!r})"

    @property
    def inner(self) -> Policy:
        """The plan."""
        return self.plan

    @property
    def is_fixed(self) -> bool:  # type: ignore[override]  # read-only here
        """False: what is done depends on what is held."""
        return False

    @property
    def revision(self) -> object | None:  # type: ignore[override]  # read-only here
        """Changes when values have to be asked about again (Note: [quiet guard])."""
        return self._revision

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]  # read-only here
        """What was planned, predicted and reached."""
        most = max(self.most_excess, self.excess)
        held = "at most that was reached, because no step held more than planned"
        if most > 0:
            held = f"at most {size(self.plan.peak_nbytes + most)} reached, {size(most)} of it above the plan"
        less = f"; {self.escalated} values were held in less than planned" if self.escalated else ""
        strange = self.plan.notice()
        budget = f"budget {size(self._budget_nbytes)}, predicted peak {size(self.plan.peak_nbytes)}: {held}{less}"
        return (budget, strange) if strange else (budget,)

    @property
    def remakes_anything(self) -> bool:  # type: ignore[override]  # read-only here
        """Whether a value may be made again, by the plan or instead of what it says."""
        return self.plan.remakes_anything or "recompute" in self.plan.allow

    @property
    def room(self) -> int:
        """Bytes that a step may hold above what was planned."""
        return self._room

    def begin_step(self) -> None:
        """A step begins, of which is known what the last one has told."""
        self.most_excess = max(self.most_excess, self.excess)
        self._steps += 1
        if self.excess > self._room:
            self._remake_more()
        elif self._remade and self._steps % LOOK_AGAIN == 0:
            self._hold_as_planned()
        if self._in_less and self._steps % LOOK_AGAIN == 0:
            self._in_less.clear()
            self._forget()
        elif self._has_unknown or self._revision is None:
            self._forget()  # each step is told anew
        self._is_first = self._is_first and not self._usual
        if self._allocated is not None:
            self._at_start = self._allocated()

    def decide(self, saved: SavedTensor) -> Action:
        """Returns what the plan says, or less."""
        known = self._known.get(saved.key)
        if known is None or known[0] is not saved:
            self._known[saved.key] = known = saved, self.plan.decide(saved)
        if saved.need is Need.SHAPE:
            return known[1]
        is_over = self.excess > self._room or self._allocated_excess(saved.key) > self._allocated_room
        if saved.key in self._remade and isinstance(known[1], Keep):
            stored = self._stored.decide(saved)
            return Recompute(stored if isinstance(stored, (Keep, Stash)) else Keep(), any_producer=True)
        if is_over or saved.key in self._in_less:
            return self._leaner(saved, known[1])
        return known[1]

    def decide_together(self, saved: SavedTensor, readers: Sequence[SavedTensor]) -> Action:
        """The same."""
        return self.decide(saved)

    def in_flight_for(self, key: str) -> int:
        """Returns what the plan says, if as much is left of the room that there is for all that was not planned."""
        return min(self.plan.in_flight_for(key), max(0, self._allocated_room - self.excess))

    def observe(self, outcome: Outcome) -> None:
        """Adds up what is held above the plan."""
        key = outcome.saved.key
        if key in self._others:
            return
        is_moved = key in self._moved and outcome.codec is not None
        planned = self._planned.get(key)
        if planned is None:
            planned = self._planned.get(first_life_of(key))
        self._has_unknown |= planned is None
        above = (0 if is_moved else outcome.nbytes) - (planned or 0)
        self.excess += above - self._above.get(key, 0)
        self._above[key] = above
        was_over, self._is_over = self._is_over, self.excess > self._room
        if self._is_over and not was_over and self._revision is not None:
            self._revision = object()

    def _remake_more(self) -> None:
        """Has more values made again, as many as are needed for the others to fit."""
        excess = self.excess
        for key, nbytes in list(self._spare.items())[len(self._remade) :]:
            if excess <= self._room:
                break
            self._remade.append(key)
            self.escalated += 1
            excess -= nbytes
            self._revision = None if self._revision is None else object()

    def _hold_as_planned(self) -> None:
        """Has values held as planned again, the last ones first, as many as there is room for."""
        excess = self.excess
        while self._remade and excess + self._spare[self._remade[-1]] <= self._room:
            excess += self._spare[self._remade.pop()]
            self._revision = None if self._revision is None else object()

    def _forget(self) -> None:
        """Has every value asked about and told anew."""
        self.excess, self._is_over, self._has_unknown = 0, False, False
        self._above.clear()
        if self._revision is not None:
            self._revision = object()

    def _allocated_excess(self, key: str) -> int:
        if self._allocated is None:
            return 0
        now = self._allocated() - self._at_start
        if self._is_first:
            self._usual[key] = now
        return now - self._usual.get(key, now)

    def _leaner(self, saved: SavedTensor, action: Action) -> Action:
        """The same value in less."""
        if isinstance(action, Recompute) or (isinstance(action, Stash) and action.store != "device"):
            return action
        if self._spill is None and saved.key in self._planned:
            return action
        self.escalated += 1
        if self._revision is not None:
            self._in_less.add(saved.key)
        stored = action if isinstance(action, Stash) else self._stored.decide(saved)
        otherwise = stored if isinstance(stored, (Keep, Stash)) else Keep()
        if self._spill is not None:
            codecs = otherwise.codecs if isinstance(otherwise, Stash) else ()
            otherwise = Stash((*codecs, Raw()), self._spill)
            self._moved.add(saved.key)
        return otherwise

"""Watches what a step holds, and holds less of the rest when more is held than was planned.

Note: [guard]
    A plan knows how many bytes each of its values is going to hold. The numbers of another step may encode worse, and a
    branch that was not profiled saves values of its own. So the guard adds up what is held above the plan. As soon as
    that is more than the budget leaves free, each value that comes after is held in less: made again where that is
    possible, else encoded, else moved away where there is a place for it. On a GPU the allocator is asked as well, so
    that workspaces and gradients which have grown count too. What comes last in a forward pass has nothing after it
    that could make room; the next step has, because its plan leaves as much free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from backstash.codecs import Raw
from backstash.planning.plan import Plan
from backstash.policies import Action, Keep, Policy, Recompute, Stash, get
from backstash.policies.actions import Outcome
from backstash.policies.base import Wrapper
from backstash.saved import Need, SavedTensor


class Guard(Wrapper):
    """A policy in front of a plan, which holds less than planned when it has to.

    Args:
        plan: the plan.
        budget_nbytes: the most bytes that a step may take.
        spill: name of a store for what can be held in no other way; None where there is none.
        allocated: returns the bytes that are allocated on the device; None where nobody counts them.

    Attributes:
        excess: bytes that are held now above what the plan says.
        most_excess: the most of them at the end of any forward pass.
        escalated: how many values were held in less than planned so far.
    """

    def __init__(
        self, plan: Plan, budget_nbytes: int, spill: str | None = None, allocated: Callable[[], int] | None = None
    ) -> None:
        self.plan = plan
        self.excess = self.most_excess = self.escalated = 0
        self._room = max(0, budget_nbytes - plan.peak_nbytes)
        self._spill = spill
        self._allocated = allocated
        self._planned = {decision.key: decision.held_nbytes for decision in plan.decisions}
        self._others = frozenset(plan.others)
        # Keys of values that go to another store, by the plan or where they cannot be made again.
        self._moved = {decision.key for decision in plan.decisions if decision.kind == "offload"}
        self._known: dict[str, tuple[SavedTensor, Action]] = {}
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
    def remakes_anything(self) -> bool:  # type: ignore[override]  # read-only here
        """Whether a value may be made again, by the plan or instead of what it says."""
        return self.plan.remakes_anything or "recompute" in self.plan.allow

    @property
    def room(self) -> int:
        """Bytes that a step may hold above what was planned."""
        return self._room

    def begin_step(self) -> None:
        """Nothing is held yet."""
        self.most_excess = max(self.most_excess, self.excess)
        self.excess = 0
        self._is_first = self._is_first and not self._usual
        if self._allocated is not None:
            self._at_start = self._allocated()

    def decide(self, saved: SavedTensor) -> Action:
        """Returns what the plan says, or less."""
        known = self._known.get(saved.key)
        if known is None or known[0] is not saved:
            self._known[saved.key] = known = saved, self.plan.decide(saved)
        if max(self.excess, self._allocated_excess(saved.key)) <= self._room or saved.need is Need.SHAPE:
            return known[1]
        return self._leaner(saved, known[1])

    def decide_together(self, saved: SavedTensor, readers: Sequence[SavedTensor]) -> Action:
        """The same."""
        return self.decide(saved)

    def observe(self, outcome: Outcome) -> None:
        """Adds up what is held above the plan."""
        key = outcome.saved.key
        if key in self._others:
            return
        is_moved = key in self._moved and outcome.codec is not None
        self.excess += (0 if is_moved else outcome.nbytes) - self._planned.get(key, 0)

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
        self.escalated += 1
        stored = action if isinstance(action, Stash) else self._stored.decide(saved)
        otherwise = stored if isinstance(stored, (Keep, Stash)) else Keep()
        if self._spill is not None:
            codecs = otherwise.codecs if isinstance(otherwise, Stash) else ()
            otherwise = Stash((*codecs, Raw()), self._spill)
            self._moved.add(saved.key)
        if "recompute" in self.plan.allow:
            return Recompute(otherwise, any_producer=True)
        return otherwise

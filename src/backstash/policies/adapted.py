"""Policies that are no Policy: objects with the members of one, as a user's own classes have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from backstash.policies.actions import Action, Outcome
from backstash.policies.base import Policy, Rewriting, Sources
from backstash.saved import SavedTensor


@dataclass(frozen=True, repr=False)
class Adapted(Policy):
    """An object that has ``decide()`` and ``observe()``, with the defaults of Policy for the members that it lacks.

    Its repr is that of the object, and it looks the object's members up at each use. A member that is None counts as
    lacking.

    Args:
        policy: the object.
    """

    policy: Any

    def __repr__(self) -> str:
        return repr(self.policy)

    def _own(self, name: str, default: Any) -> Any:
        member = getattr(self.policy, name, None)
        return default if member is None else member

    @property
    def is_fixed(self) -> bool:  # type: ignore[override]  # read-only here
        """The object's, or the default."""
        return bool(self._own("is_fixed", Policy.is_fixed))

    @property
    def revision(self) -> object | None:  # type: ignore[override]  # read-only here
        """The object's, or the default."""
        found: object | None = self._own("revision", Policy.revision)
        return found

    @property
    def observes_changes(self) -> bool:  # type: ignore[override]  # read-only here
        """The object's, or the default."""
        return bool(self._own("observes_changes", Policy.observes_changes))

    @property
    def watches_again(self) -> bool:  # type: ignore[override]  # read-only here
        """The object's, or the default."""
        return bool(self._own("watches_again", Policy.watches_again))

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]  # read-only here
        """The object's, or the default."""
        found: tuple[str, ...] = self._own("notes", Policy.notes)
        return found

    @property
    def recomputes(self) -> bool:  # type: ignore[override]  # read-only here
        """The object's, or the default."""
        return bool(self._own("recomputes", Policy.recomputes))

    @property
    def remakes_anything(self) -> bool:  # type: ignore[override]  # read-only here
        """The object's, or the default."""
        return bool(self._own("remakes_anything", Policy.remakes_anything))

    @property
    def min_nbytes(self) -> int | None:  # type: ignore[override]  # read-only here
        """The object's, or the default."""
        size: int | None = self._own("min_nbytes", Policy.min_nbytes)
        return size

    @property
    def ahead(self) -> int | None:  # type: ignore[override]  # read-only here
        """The object's, or the default."""
        ahead: int | None = self._own("ahead", Policy.ahead)
        return ahead

    @property
    def cycles(self) -> int | None:  # type: ignore[override]  # read-only here
        """The object's, or the default."""
        cycles: int | None = self._own("cycles", Policy.cycles)
        return cycles

    @property
    def fetches(self) -> Mapping[str, tuple[str, ...]] | None:  # type: ignore[override]  # read-only here
        """The object's, or the default."""
        fetches: Mapping[str, tuple[str, ...]] | None = self._own("fetches", Policy.fetches)
        return fetches

    @property
    def stays(self) -> Mapping[str, frozenset[int]] | None:  # type: ignore[override]  # read-only here
        """The object's, or the default."""
        stays: Mapping[str, frozenset[int]] | None = self._own("stays", Policy.stays)
        return stays

    @property
    def move_timer(self) -> Any:  # type: ignore[override]  # read-only here
        """The object's, or the default."""
        return self._own("move_timer", Policy.move_timer)

    @property
    def stores(self) -> Mapping[str, Callable[[], Any]] | None:  # type: ignore[override]  # read-only here
        """The object's, or the default."""
        stores: Mapping[str, Callable[[], Any]] | None = self._own("stores", Policy.stores)
        return stores

    @property
    def repeated_calls(self) -> frozenset[str] | None:  # type: ignore[override]  # read-only here
        """The object's, or the default."""
        calls: frozenset[str] | None = self._own("repeated_calls", Policy.repeated_calls)
        return calls

    @property
    def rewriting(self) -> Rewriting | None:  # type: ignore[override]  # read-only here
        """The object's, or the default."""
        found: Rewriting | None = self._own("rewriting", Policy.rewriting)
        return found

    def decide(self, saved: SavedTensor) -> Action:
        """The object's."""
        action: Action = self.policy.decide(saved)
        return action

    def decide_together(self, saved: SavedTensor, readers: Sequence[SavedTensor]) -> Action:
        """The object's, or the default."""
        action: Action = self._own("decide_together", super().decide_together)(saved, readers)
        return action

    def may_bound(self, readers: Sequence[SavedTensor]) -> bool:
        """The object's, or the default."""
        may_bound: bool = self._own("may_bound", super().may_bound)(readers)
        return may_bound

    def has_room_for(self, key: str) -> bool:
        """The object's, or the default."""
        has_room: bool = self._own("has_room_for", super().has_room_for)(key)
        return has_room

    def in_flight_for(self, key: str) -> int | None:
        """The object's, or the default."""
        nbytes: int | None = self._own("in_flight_for", super().in_flight_for)(key)
        return nbytes

    def observe(self, outcome: Outcome) -> None:
        """The object's."""
        self.policy.observe(outcome)

    def begin_step(self) -> None:
        """The object's, or the default."""
        self._own("begin_step", super().begin_step)()

    def watch(self, saved: SavedTensor, node: Any, x: Tensor) -> None:
        """The object's, or the default."""
        self._own("watch", super().watch)(saved, node, x)

    def trace(self, saved: SavedTensor, readers: Sequence[SavedTensor], sources: Sources) -> None:
        """The object's, or the default."""
        self._own("trace", super().trace)(saved, readers, sources)


def is_policy(policy: Any) -> bool:
    """Whether the object inherits from Policy, or at least has ``decide()`` and ``observe()``. A class is no policy."""
    if isinstance(policy, type):
        return False
    return isinstance(policy, Policy) or all(callable(getattr(policy, name, None)) for name in ("decide", "observe"))


def adapt(policy: Any) -> Policy:
    """Returns the policy itself if it inherits from Policy, or else an :class:`Adapted` around it.

    A policy is adapted once, where the package takes it in: by policies.get, which a Session calls, and by Rules.

    Raises:
        TypeError: the object is no policy (see :func:`is_policy`).
    """
    if not is_policy(policy):
        raise TypeError(
            f"a policy was asked for, got {policy!r}, which has no decide() and observe(). Pass an object of a class "
            f"that inherits from backstash.Policy, or one with these methods."
        )
    return policy if isinstance(policy, Policy) else Adapted(policy)

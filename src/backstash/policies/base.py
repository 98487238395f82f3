"""The contract of a policy, which decides about saved tensors, and policies in front of others.

More names are for a policy that watches nodes: ``op_of(node)`` is the op of an autograd node, as ``SavedTensor.op``
says it, and in ``with no_torch_function():`` no Session sees the torch functions that the policy calls.
``hide_from_dynamo`` keeps torch.compile away from hooks that a policy puts on nodes. The functions that begin with
``check`` refuse arguments of other types.
"""

# ruff: noqa: B027  (the empty methods of Policy are defaults that do nothing, not forgotten abstract methods)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from backstash.arguments import check_count, check_number, check_switch, check_word
from backstash.formulas import op_of
from backstash.policies.actions import MAX_DEPTH, Action, Keep, Outcome, Recompute, Slice, Stash
from backstash.saved import MIN_NBYTES, SavedTensor
from backstash.torch_internals import hide_from_dynamo, no_torch_function

LOSSES = frozenset({"LogSoftmax", "NllLoss", "NllLoss2D"})
"""The autograd nodes of losses, which some policies leave alone."""

STEADY = "steady"
"""The revision of a policy that never says something else of the same readers."""

__all__ = [
    "LOSSES",
    "MAX_DEPTH",
    "STEADY",
    "Action",
    "Keep",
    "Outcome",
    "Policy",
    "Recompute",
    "Rewriting",
    "Slice",
    "Sources",
    "Stash",
    "Wrapper",
    "check_count",
    "check_number",
    "check_switch",
    "check_word",
    "hide_from_dynamo",
    "no_torch_function",
    "op_of",
]

Sources = Callable[[], dict[str, Tensor] | None]
"""The argument of that name of :meth:`Policy.trace`."""

Rewriting = Callable[[nn.Module | None], Callable[[], AbstractContextManager[object]]]
"""As :attr:`Policy.rewriting` has it."""


class Policy(ABC):
    """Decides what is done with each saved tensor.

    Inherit from this class and define :meth:`decide`; every other member has a default. A Session reads ``recomputes``
    and ``ahead`` when it is created. In each step it calls :meth:`begin_step` first, :meth:`watch` for each tensor that
    one of torch's own autograd nodes saves, and then, for each value that it stores, :meth:`trace`,
    :meth:`decide_together` and :meth:`observe`, in this order.

    A policy that chooses error bounds from what it sees of gradients, as ``papers/comet`` does, defines four members
    more: ``revision``, :meth:`trace`, :meth:`may_bound` and :meth:`watch`. Others leave them as they are.

    An object that does not inherit from this class, but has ``decide()`` and ``observe()``, serves as well (see
    :func:`backstash.policies.adapted.adapt`). A policy that holds another policy has to forward every member to it:
    inherit from :class:`Wrapper`.

    Attributes:
        is_fixed: whether :meth:`decide` depends on the facts of the tensor alone, whatever else the policy is told.
            A Session then asks it once for each place in the model, and need not call the methods that
            tell it something. A subclass that overrides a method is not fixed, unless it says so itself.
        revision: an object that stays the same for as long as a policy that is not fixed gives the same readers the
            same action; :meth:`trace` and :meth:`observe` need not be called meanwhile. None: the policy may answer
            otherwise at any time. :data:`STEADY`: it never does.
        observes_changes: whether a policy with a revision is told, by :meth:`observe`, of each value that takes other
            bytes than the last time under that revision.
        watches_again: whether a policy with a revision is told, by :meth:`watch`, of what nodes save in every pass
            under that revision, and not in the first passes only.
        notes: what a reader of a report should know of the step.
        recomputes: whether an action may be Recompute. If it is False, the Session saves itself the work of noting how
            values are computed.
        remakes_anything: whether an action may be Recompute(any_producer=True), for which the Session notes costly
            calls as well, and proves each kind of call by repeating it once.
        min_nbytes: tensors smaller than this are kept, if the Session is not told otherwise; None to have the first
            step decide, for a policy to which time counts more than bytes that are few (see capture/learned.py).
        ahead: how many values may come back from a store before backward reads them; None for as many as there is room
            for (see stash/prefetch.py).
        cycles: None, or whether keys tell several calls of a module in one step apart (Note: [calls apart] in
            capture/names.py): the number of forward and backward passes of a step, or 0 where it is not known and each
            ``with`` is a step. Paths then start from the module that is called outermost.
        fetches: for a policy that knows when values are to come back from a store: by the key of a value, the keys of
            those that are asked for when backward reads it first. None to learn the order in the first step.
        stays: for such a policy: by the key of a moved value, the numbers of its reads, from 0 on, after which it stays
            on the device for the next one. What does not stay is brought back again.
        move_timer: is told of what is moved and read in a step (see stash.prefetch.MoveTimer); None for nobody. It is
            asked for when a step begins, as ``fetches`` and ``stays`` are.
        stores: functions that open a store, by the store's name. A Session calls them, unless it is given a store of
            that name.
        repeated_calls: names of the calls by which values are made again (see CallPlace): no others are noted and
            proven. None for whichever the first steps show to be needed.
        rewriting: None, or a function of the model that a Session was given, if any. It returns what begins a rewrite
            of the model; a Session does that when it is entered, and leaves the rewrite when it is left.

    Example:
        >>> class KeepConvolutions(Policy):
        ...     def decide(self, saved):
        ...         return Keep() if saved.op == "Convolution" else Stash("zvc")
    """

    is_fixed: bool = False
    revision: object | None = None
    observes_changes: bool = False
    watches_again: bool = True
    notes: tuple[str, ...] = ()
    recomputes: bool = True
    remakes_anything: bool = False
    min_nbytes: int | None = MIN_NBYTES
    ahead: int | None = None
    cycles: int | None = None
    fetches: Mapping[str, tuple[str, ...]] | None = None
    stays: Mapping[str, frozenset[int]] | None = None
    move_timer: Any = None
    stores: Mapping[str, Callable[[], Any]] | None = None
    repeated_calls: frozenset[str] | None = None
    rewriting: Rewriting | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        methods = {name for name, member in vars(Policy).items() if callable(member) and not name.startswith("_")}
        if "is_fixed" not in vars(cls) and methods & set(vars(cls)):
            cls.is_fixed = False  # inherited from a class whose methods this class overrides

    @abstractmethod
    def decide(self, saved: SavedTensor) -> Action:
        """Returns the action for one stored value.

        A Session may also call this to learn what the policy would do; no outcome follows then.

        Args:
            saved: the strongest use of the value (see docs/understand/architecture.md).
        """

    def decide_together(self, saved: SavedTensor, readers: Sequence[SavedTensor]) -> Action:
        """Returns the action for one stored value, for a policy to which all readers of the value matter.

        Args:
            saved: the strongest use of the value.
            readers: all uses of the value, ``saved`` included.

        Returns:
            By default what :meth:`decide` returns.
        """
        return self.decide(saved)

    def may_bound(self, readers: Sequence[SavedTensor]) -> bool:
        """Whether :meth:`decide_together` may name an error bound for such a value in a later step; no by default.

        A compiled graph asks it once, because it has to have the place for a bound from the first step on.

        Args:
            readers: all uses of the value.
        """
        return False

    def has_room_for(self, key: str) -> bool:
        """Whether the readers of the value with that key may hold it until they are done; no by default.

        They free it earlier otherwise, which takes time, and gains nothing if the step's peak lies elsewhere.
        """
        return False

    def in_flight_for(self, key: str) -> int | None:
        """How many bytes of values an accelerator may hold beside their planes from where that value is decided on.

        They are held until the host knows that the planes are whole (Note: [drafts] in stash/drafts.py). A policy that
        has counted what a step holds says how much more there may be, up to where the next value is decided on.

        Args:
            key: of the value.

        Returns:
            Bytes, or None for as many as are usual: the default.
        """
        return None

    def observe(self, outcome: Outcome) -> None:
        """Is told what became of a value. Does nothing by default."""

    def begin_step(self) -> None:
        """Is called before a forward pass saves its first tensor. Does nothing by default."""

    def watch(self, saved: SavedTensor, node: Any, x: Tensor) -> None:
        """Is called when one of torch's own autograd nodes has saved a tensor. Does nothing by default.

        Args:
            saved: the tensor's facts.
            node: the autograd node, before its backward. In a compiled graph an object stands for it, whose class has
                the name of the op; it has ``parameter``, the layer's weight, ``_saved_stride`` and its like for a
                convolution, and ``register_hook()``.
            x: the tensor, detached. Only a copy of it may be held after the call.
        """

    def trace(self, saved: SavedTensor, readers: Sequence[SavedTensor], sources: Sources) -> None:
        """Is called before a value is decided on. Does nothing by default.

        Args:
            saved, readers: as for :meth:`decide_together`.
            sources: a function that tells from which held values the value could be remade. It returns, by the key with
                which each of these was decided on, the factor by which an error in it is multiplied on the way, one
                number for each channel, ``[channels]`` (see stash.gains); or None if that is not known.
        """


class Wrapper(Policy):
    """A policy in front of another policy, to which it forwards every member of the contract.

    Inherit from this class and override only the members that the wrapper changes.
    """

    @property
    @abstractmethod
    def inner(self) -> Policy:
        """The policy that every member is forwarded to."""

    @property
    def is_fixed(self) -> bool:  # type: ignore[override]  # read-only here
        """As ``inner``."""
        return self.inner.is_fixed

    @property
    def revision(self) -> object | None:  # type: ignore[override]  # read-only here
        """As ``inner``."""
        return self.inner.revision

    @property
    def observes_changes(self) -> bool:  # type: ignore[override]  # read-only here
        """As ``inner``."""
        return self.inner.observes_changes

    @property
    def watches_again(self) -> bool:  # type: ignore[override]  # read-only here
        """As ``inner``."""
        return self.inner.watches_again

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]  # read-only here
        """As ``inner``."""
        return self.inner.notes

    @property
    def recomputes(self) -> bool:  # type: ignore[override]  # read-only here
        """As ``inner``."""
        return self.inner.recomputes

    @property
    def remakes_anything(self) -> bool:  # type: ignore[override]  # read-only here
        """As ``inner``."""
        return self.inner.remakes_anything

    @property
    def min_nbytes(self) -> int | None:  # type: ignore[override]  # read-only here
        """As ``inner``."""
        return self.inner.min_nbytes

    @property
    def ahead(self) -> int | None:  # type: ignore[override]  # read-only here
        """As ``inner``."""
        return self.inner.ahead

    @property
    def cycles(self) -> int | None:  # type: ignore[override]  # read-only here
        """As ``inner``."""
        return self.inner.cycles

    @property
    def fetches(self) -> Mapping[str, tuple[str, ...]] | None:  # type: ignore[override]  # read-only here
        """As ``inner``."""
        return self.inner.fetches

    @property
    def stays(self) -> Mapping[str, frozenset[int]] | None:  # type: ignore[override]  # read-only here
        """As ``inner``."""
        return self.inner.stays

    @property
    def move_timer(self) -> Any:  # type: ignore[override]  # read-only here
        """As ``inner``."""
        return self.inner.move_timer

    @property
    def stores(self) -> Mapping[str, Callable[[], Any]] | None:  # type: ignore[override]  # read-only here
        """As ``inner``."""
        return self.inner.stores

    @property
    def repeated_calls(self) -> frozenset[str] | None:  # type: ignore[override]  # read-only here
        """As ``inner``."""
        return self.inner.repeated_calls

    @property
    def rewriting(self) -> Rewriting | None:  # type: ignore[override]  # read-only here
        """As ``inner``."""
        return self.inner.rewriting

    def decide(self, saved: SavedTensor) -> Action:
        """As ``inner``."""
        return self.inner.decide(saved)

    def decide_together(self, saved: SavedTensor, readers: Sequence[SavedTensor]) -> Action:
        """As ``inner``."""
        return self.inner.decide_together(saved, readers)

    def may_bound(self, readers: Sequence[SavedTensor]) -> bool:
        """As ``inner``."""
        return self.inner.may_bound(readers)

    def has_room_for(self, key: str) -> bool:
        """As ``inner``."""
        return self.inner.has_room_for(key)

    def in_flight_for(self, key: str) -> int | None:
        """As ``inner``."""
        return self.inner.in_flight_for(key)

    def observe(self, outcome: Outcome) -> None:
        """As ``inner``."""
        self.inner.observe(outcome)

    def begin_step(self) -> None:
        """As ``inner``."""
        self.inner.begin_step()

    def watch(self, saved: SavedTensor, node: Any, x: Tensor) -> None:
        """As ``inner``."""
        self.inner.watch(saved, node, x)

    def trace(self, saved: SavedTensor, readers: Sequence[SavedTensor], sources: Sources) -> None:
        """As ``inner``."""
        self.inner.trace(saved, readers, sources)


def knows_room(policy: Policy) -> bool:
    """Returns whether a policy, or one that it forwards to, knows where there is room in a step, as a plan does."""
    while isinstance(policy, Wrapper):
        policy = policy.inner
    own = getattr(policy, "policy", policy)  # of an Adapted, the object's own
    for name in ("has_room_for", "in_flight_for"):
        found = getattr(own, name, None)
        if found is not None and getattr(found, "__func__", found) is not getattr(Policy, name):
            return True
    return False


def is_watching(policy: Policy) -> bool:
    """Returns whether a policy, or one that it forwards to, does anything when it is told of a saved tensor."""
    while isinstance(policy, Wrapper) and type(policy).watch is Wrapper.watch:
        policy = policy.inner
    return not policy.is_fixed and type(policy).watch is not Policy.watch

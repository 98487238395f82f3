"""The seams of a Session: what can be plugged into it, what that is told and asked, and the core without it.

The package plugs in its own when it is imported: ``remake`` makes values again (:class:`Producer`), ``redeem`` has
backward kernels that read planes (:class:`Readers`), and ``replay`` runs steps that repeat themselves. A Session takes
what is here when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from backstash.saved import TensorSpec

if TYPE_CHECKING:
    from backstash.capture.names import Names
    from backstash.capture.side_effects import SideEffect
    from backstash.policies.base import Policy, Recompute
    from backstash.remake.recipes import Recipe
    from backstash.stash.accounts import Step
    from backstash.stash.encode import Encoder
    from backstash.stash.live import Live
    from backstash.stash.parameters import ParameterStorages
    from backstash.stash.pending import Pending
    from backstash.stash.value import Remade, Saved, Value


class Tape(Protocol):
    """Is told by the forward pass how tensors were made, and what may change them."""

    def begin_function(self, saved: int) -> None:
        """A torch function is about to run that no other one has called; so many tensors were saved in the step."""

    def counts(self, function: Any, label: str, number: int) -> bool:
        """Whether a call that is about to run has to be noted.

        Args:
            function: what is called.
            label: of the call of the module that runs.
            number: how many calls of the function there were before, in this call of the module.
        """

    def saves(self, saved: Saved, number: int) -> None:
        """A function that counts has saved a tensor, the one with that number in the step."""

    def made(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, random_state: Tensor | None
    ) -> None:
        """A function that counts has returned something; the generator had that state before."""

    def cast_inside(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, saves: list[Saved]
    ) -> Sequence[tuple[Saved, Tensor]]:
        """A function under autocast has saved tensors: returns those that are conversions, and of which arguments."""

    def made_by_operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation of a backward pass with a graph has returned something, and counts."""

    def before_side_effect(
        self, effect: SideEffect, args: tuple[Any, ...], kwargs: dict[str, Any], encoder: Encoder
    ) -> None:
        """A function is about to change its arguments, or to hand their memory on to who changes it unseen.

        What is made from that memory is stored before, by the encoder.
        """

    def take(self, value: Value, dense: Tensor) -> None:
        """A value was saved, which is the content of a storage."""

    def move(self, value: Value, whole: Tensor) -> None:
        """A value that was stored is in the storage of ``whole`` from now on."""

    def owns(self, cdata: int) -> None:
        """Nobody but autograd holds the storage at that address any more, so nobody can change it."""

    def begin_step(self) -> None:
        """A forward pass begins after a backward pass."""

    def begin_backward(self) -> None:
        """A backward pass begins, and nothing more is asked of what died in the forward pass."""

    def end_pass(self) -> None:
        """A forward pass is over."""

    def store_all(self, encoder: Encoder) -> None:
        """Nobody watches from now on what the program does to memory from which values are made: store these."""

    def clear(self) -> None:
        """The Session is left: forget everything."""


class Producer(Protocol):
    """Knows how values were made, and makes them again."""

    @property
    def tape(self) -> Tape:
        """What the forward pass tells."""

    def begin_step(self, step: Step, number: int) -> None:
        """The accounts of the step that begins, and its number."""

    def forget(self, value: Value, strongest: Saved, whole: Tensor, action: Recompute) -> Remade | str:
        """Returns the state of a value that is about to be forgotten; or the reason why it cannot be made again.

        Args:
            value: nobody but autograd holds it.
            strongest: of its saved tensors the one that needs most of it.
            whole: all of it, dense.
            action: what the policy allows.
        """

    def find(self, value: Value, strongest: Saved) -> Recipe | str:
        """How a value could be made again, whatever that costs; or the reason why it cannot be. Nothing is done."""

    def sources(self, value: Value, strongest: Saved) -> dict[str, Tensor] | None:
        """From which stored values a value could be made, and by how much errors of theirs are multiplied."""

    def is_stored_exactly(self, value: Value, nbytes: int) -> bool:
        """Whether a value that is about to be stored with an error is stored as it is, in ``nbytes``, for others."""

    def stored(self, value: Value, strongest: Saved, nbytes: int) -> None:
        """A value was stored with an error in so many bytes."""

    @property
    def remake(self) -> Callable[[Value, bool], Tensor]:
        """What makes the whole of a value that was forgotten; it is told whether something else begins from that."""


ProducerFactory = Callable[["Policy", "Names", "Live", "Pending", "ParameterStorages", bool], Producer]
"""Makes the producer of a Session, of its policy, names, totals, pending values and parameters, and whether all bits of
what is made are compared (``check="full"``)."""


class NoProducer:
    """Makes nothing again, and listens to nothing."""

    def __init__(self, *session: Any) -> None:
        self.tape = self

    def _ignore(self, *args: Any) -> None:
        """Nothing is known of calls, so nothing depends on them."""

    begin_function = saves = made = made_by_operation = before_side_effect = take = move = owns = _ignore
    begin_step = begin_backward = end_pass = store_all = clear = stored = _ignore

    def counts(self, function: Any, label: str, number: int) -> bool:
        """No call counts."""
        return False

    def cast_inside(self, *call: Any) -> Sequence[tuple[Saved, Tensor]]:
        """Nothing is noted."""
        return ()

    def forget(self, value: Value, strongest: Saved, whole: Tensor, action: Recompute) -> Remade | str:
        """As Producer.forget."""
        return "nothing here makes values again"

    def find(self, value: Value, strongest: Saved) -> Recipe | str:
        """As Producer.find."""
        return "nothing here makes values again"

    def sources(self, value: Value, strongest: Saved) -> dict[str, Tensor] | None:
        """As Producer.sources."""
        return None

    def is_stored_exactly(self, value: Value, nbytes: int) -> bool:
        """As Producer.is_stored_exactly."""
        return False

    @staticmethod
    def remake(value: Value, ahead: bool) -> Tensor:
        """Never called: no value was forgotten."""
        raise NotImplementedError(f"{value.key} was to be made again, but nothing here makes values again.")


@dataclass(frozen=True, slots=True)
class Readers:
    """What knows of backward kernels that read planes, or free what they have read early.

    A *claim* stands for a saved tensor until such a kernel takes it.

    Attributes:
        prepare: called before the first Session.
        can_claim: whether what an op saves under a role, with that layout, may ever be claimed.
        frees_early: whether its kernel frees a value of so many bytes earlier than ATen's, also if it is kept.
        claim: a claim for a saved tensor that is being unpacked; None where the tensor itself is as good.
        claim_input: the same for a linear layer's small input, which is held as it is; else that input.
        claim_weight: the same for a linear layer's weight.
        claim_type: the class of claims.
        linear_nodes: the names of the nodes of linear layers.
    """

    prepare: Callable[[], None]
    can_claim: Callable[[str, str, TensorSpec], bool]
    frees_early: Callable[[str, str, TensorSpec, int], bool]
    claim: Callable[[Saved], Tensor | None]
    claim_input: Callable[[Tensor], Tensor]
    claim_weight: Callable[[Tensor], Tensor]
    claim_type: type | None
    linear_nodes: tuple[str, ...]


NO_READERS = Readers(
    prepare=lambda: None,
    can_claim=lambda op, role, spec: False,
    frees_early=lambda op, role, spec, nbytes: False,
    claim=lambda saved: None,
    claim_input=lambda x: x,
    claim_weight=lambda x: x,
    claim_type=None,
    linear_nodes=(),
)
"""Every saved tensor is unpacked as the tensor that it was."""

Replays = Callable[[Any, Any, Callable[[Tensor], Any], Callable[[Any], Tensor]], Any]
"""Returns what replays a Session's passes, or why nothing does; is given the Session, its Forward, and how it packs and
reads."""

producer: ProducerFactory = NoProducer
readers: Readers = NO_READERS
replays: Replays | None = None

"""backstash itself: a Session around the forward pass, and its codecs on their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from backstash import Codec, Encoded, Policy, Session
from backstash.rewrites import chunked_loss
from backstash.stash.ledger import Report
from bench.cases import Workload
from bench.peers.base import Forward, StepPeer


@dataclass(frozen=True)
class Stashing:
    """A Session with a policy.

    Attributes:
        policy: a policy's name, or a policy.
        exact: whether its gradients must have the bits of plain's.
    """

    policy: str | Policy
    exact: bool = True

    @property
    def name(self) -> str:
        """The policy's name."""
        return self.policy if isinstance(self.policy, str) else type(self.policy).__name__.lower()

    def start(self, workload: Workload) -> StashedForward:
        """One Session for all steps."""
        return StashedForward(workload, Session(self.policy, model=workload.model))


@dataclass(frozen=True, eq=False)
class StashedForward:
    """backstash at work."""

    workload: Workload
    session: Session

    def loss(self) -> Tensor:
        """The forward pass."""
        with self.session:
            return self.workload.loss()

    def report(self) -> Report:
        """The accounts of the last step."""
        return self.session.report()


@dataclass(frozen=True)
class StashedCheckpointing(Stashing):
    """A checkpoint around each segment, inside a Session. Not exact, as checkpoint itself is not always."""

    exact: bool = False

    @property
    def name(self) -> str:
        """The policy's name and that there are checkpoints."""
        return f"{super().name}+checkpoint"

    def start(self, workload: Workload) -> StashedForward:
        """One Session for all steps."""
        return super().start(replace(workload, loss=workload.checkpointed_loss))


@dataclass(frozen=True)
class Chunked:
    """Another candidate with the head and the loss of a language model in chunks. Not exact: another order of sums.

    Attributes:
        of: the candidate.
    """

    of: StepPeer
    exact: bool = False

    @property
    def name(self) -> str:
        """The candidate's, and that the loss is in chunks."""
        return f"{self.of.name}+chunked"

    def start(self, workload: Workload) -> Forward:
        """The rewrite is undone after each forward pass, so that other candidates do not see it."""

        def chunked(loss: Callable[[], Tensor]) -> Tensor:
            with chunked_loss(workload.model):
                return loss()

        whole, parts = partial(chunked, workload.loss), partial(chunked, workload.checkpointed_loss)
        return self.of.start(replace(workload, loss=whole, checkpointed_loss=parts))


@dataclass(frozen=True)
class Own:
    """One of backstash's codecs."""

    codec: Codec
    own: bool = True

    @property
    def name(self) -> str:
        """The codec's id."""
        return self.codec.id

    def encode(self, x: Tensor) -> Encoded:
        """As a Session would."""
        return self.codec.encode(x)

    def nbytes(self, encoded: Encoded) -> int:
        """Bytes of its planes."""
        return encoded.nbytes

    def decode(self, encoded: Encoded, out: Tensor) -> None:
        """As a Session would."""
        self.codec.decode(encoded, out)

"""backstash itself: a Session around the forward pass, and its codecs on their own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from backstash import Codec, Encoded, Policy, Session
from backstash.ledger import Report
from benchmarks.cases import Workload


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

"""Peers of two kinds: one runs training steps, the other encodes tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from backstash.stash.ledger import Report
from bench.cases import Workload


@dataclass(frozen=True)
class Absent:
    """A peer that cannot run here.

    Attributes:
        name: its name.
        reason: why not, for people.
    """

    name: str
    reason: str


class Forward(Protocol):
    """A peer at work on one workload."""

    def loss(self) -> Tensor:
        """Run the forward pass; backward is called on what it returns."""

    def report(self) -> Report | None:
        """Backstash's accounts of the last step, or of one more forward pass; None for peers that have none."""


class StepPeer(Protocol):
    """One way to train.

    Attributes:
        name: its name in the tables.
        exact: whether a gradient that differs from plain's by a bit is an error, not an observation.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def exact(self) -> bool: ...  # noqa: D102

    def start(self, workload: Workload) -> Forward:
        """Make it ready for the steps of one workload."""


class CodecPeer(Protocol):
    """One way to encode tensors.

    Attributes:
        name: its name in the tables.
        own: whether it is one of backstash's codecs.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def own(self) -> bool: ...  # noqa: D102

    def encode(self, x: Tensor) -> Any:
        """Encode ``x``, dense."""

    def nbytes(self, encoded: Any) -> int:
        """Bytes of what `encode` returned."""

    def decode(self, encoded: Any, out: Tensor) -> None:
        """Fill ``out``, laid out like what was encoded."""

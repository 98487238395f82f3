"""Plain PyTorch: autograd keeps what it saves."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from backstash.stash.ledger import Report
from bench.cases import Workload
from bench.peers.counting import count_saved


@dataclass(frozen=True)
class Plain:
    """Nothing around the forward pass."""

    name: str = "plain"
    exact: bool = True

    def start(self, workload: Workload) -> PlainForward:
        """Ready at once."""
        return PlainForward(workload)


@dataclass(frozen=True, eq=False)
class PlainForward:
    """Plain PyTorch at work."""

    workload: Workload

    def loss(self) -> Tensor:
        """The forward pass."""
        return self.workload.loss()

    def report(self) -> Report:
        """What the forward pass leaves saved."""
        return count_saved(self.workload.model, self.workload.loss)

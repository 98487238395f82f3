"""torch.utils.checkpoint, non-reentrant: keeps the input of each segment and runs its forward again in backward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from backstash.stash.ledger import Report
from bench.cases import Workload
from bench.peers.counting import count_saved


@dataclass(frozen=True)
class Checkpointing:
    """A checkpoint around each segment that the case names."""

    name: str = "checkpoint"
    exact: bool = False

    def start(self, workload: Workload) -> CheckpointedForward:
        """Ready at once."""
        return CheckpointedForward(workload)


@dataclass(frozen=True, eq=False)
class CheckpointedForward:
    """Checkpointing at work."""

    workload: Workload

    def loss(self) -> Tensor:
        """The forward pass."""
        return self.workload.checkpointed_loss()

    def report(self) -> Report:
        """What the forward pass leaves saved: the segments' inputs, and what is outside segments."""
        return count_saved(self.workload.model, self.workload.checkpointed_loss)

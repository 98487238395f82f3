"""torch.autograd.graph.save_on_cpu: keeps what is saved in pinned host memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import save_on_cpu

from bench.cases import Workload


@dataclass(frozen=True)
class SaveOnCpu:
    """Everything that autograd saves goes to the host and back; for CUDA."""

    name: str = "save_on_cpu"
    exact: bool = False

    def start(self, workload: Workload) -> OffloadedForward:
        """Ready at once."""
        return OffloadedForward(workload)


@dataclass(frozen=True, eq=False)
class OffloadedForward:
    """Offloading at work."""

    workload: Workload

    def loss(self) -> Tensor:
        """The forward pass."""
        with save_on_cpu(pin_memory=True):
            return self.workload.loss()

    def report(self) -> None:
        """No accounts: nothing is left on the device."""

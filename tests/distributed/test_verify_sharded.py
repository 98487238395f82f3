"""``verify`` of sharded models with checkpoints: every rank compares its own values, and all make the same runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import WORLD, run_together
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import backstash as bs


class Checkpointed(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.5)) for _ in range(2)])
        self.head = nn.Linear(16, 1)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, **self.options)
        return self.head(x)


def _verified(kind: str, preserves: bool) -> tuple[str, str, int, list[str]]:
    torch.manual_seed(0)
    model: nn.Module = Checkpointed(preserve_rng_state=preserves)
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    x = torch.randn(4, 16) + torch.distributed.get_rank()
    found = bs.verify(lambda: model(x).square().mean().backward())
    cause = found.first.cause.kind if found.first is not None else ""
    return found.verdict, cause, len(found.watched.regions), [each.name for each in found.errors]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_sharded_models_with_checkpoints(kind: str, tmp_path: Path) -> None:
    for rank in run_together(tmp_path, _verified, kind, True):
        assert rank[:3] == ("equal", "", 2)


@pytest.mark.slow
def test_a_fault_is_found_on_every_rank(tmp_path: Path) -> None:
    for verdict, cause, _, names in run_together(tmp_path, _verified, "fsdp2", False):
        assert (verdict, cause) == ("differs", "generator")
        assert "layers.0.0.weight" in names

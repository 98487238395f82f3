from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradients.gradient_checks import bits
from processes import (
    EXACT,
    INNER,
    LOSSY,
    ROWS,
    WIDTH,
    WORLD,
    Block,
    assert_holds_nothing,
    assert_no_weight_encoded,
    assert_no_weight_stored,
    assert_same_bits,
    batch,
    forward_of,
    loss_of,
    matrices,
    network,
    run_together,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from backstash import Session
from backstash.errors import SavedTensorModifiedError


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD,))


def _columns_and_rows(mesh: DeviceMesh) -> nn.Module:
    model = network()
    for block in model[:2]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def _sequence(mesh: DeviceMesh) -> nn.Module:
    """The rows of the batch are sharded between the linear layers, so that the norms read DTensors."""
    model = network()
    for block in model[:2]:
        plan: dict[str, Any] = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
        parallelize_module(block, mesh, plan)
    return model


def _whole_dtensors(mesh: DeviceMesh) -> nn.Module:
    """Everything between the linear layers of a block is a DTensor: relu's mask is saved of one."""
    model = network()
    for block in model[:2]:
        plan: dict[str, Any] = {
            "up": ColwiseParallel(use_local_output=False),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    return model


_PLANS: dict[str, Callable[[DeviceMesh], nn.Module]] = {
    "columns and rows": _columns_and_rows,
    "sequence": _sequence,
    "whole dtensors": _whole_dtensors,
}


def _tensor_parallel(plan: str) -> dict[str, float]:
    mesh = _mesh()

    def make() -> tuple[nn.Module, Callable[[int], Tensor]]:
        model = _PLANS[plan](mesh)
        if plan == "sequence":
            return model, lambda step: loss_of(model(batch(step)[mesh.get_local_rank() :: WORLD].contiguous()))
        return model, forward_of(model, 0)

    weights = matrices(make()[0])
    ratios = {}
    for policy in EXACT:
        report = assert_same_bits(make, policy)
        assert_no_weight_stored(report, weights)
        ratios[policy] = report.ratio
    assert ratios["lossless"] > 1.3, ratios
    assert_no_weight_encoded(make, weights)
    return ratios


@pytest.mark.parametrize("plan", list(_PLANS))
def test_tensor_parallel_saves_dtensors(tmp_path: Path, plan: str) -> None:
    run_together(tmp_path, _tensor_parallel, plan)

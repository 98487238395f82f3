"""A budget is kept where one model is divided among ranks: by columns and rows of its weights, or by its layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.processes import WORLD, batch, local, loss_of, network, run_together
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from backstash import Budgeted
from backstash.bits import equal_bits
from backstash.planning.run import course

BLOCKS, MICRO_BATCHES, STEPS = 8, 4, 40
ROWS = 32
"""So many times as many rows as in the other tests: the stash is more than what ranks send each other."""

Step = Callable[[Tensor], list[Tensor]]
"""Runs forward and backward on a batch, and returns losses."""


def _tensor_parallel() -> tuple[nn.Module, Step]:
    model = network(BLOCKS)
    for block in model[:BLOCKS]:
        plan: dict[str, Any] = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        parallelize_module(block, init_device_mesh("cpu", (WORLD,)), plan)

    def step(x: Tensor) -> list[Tensor]:
        loss = loss_of(model(x))
        loss.backward()
        return [loss.detach()]

    return model, step


def _pipeline(schedule: Any) -> tuple[nn.Module, Step]:
    rank, model = dist.get_rank(), network(BLOCKS)
    part = (model[: BLOCKS // 2], model[BLOCKS // 2 :])[rank]
    stage = PipelineStage(part, rank, WORLD, torch.device("cpu"))
    run = schedule(stage, MICRO_BATCHES, loss_fn=lambda output, target: loss_of(output - target))

    def step(x: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        target = torch.zeros(()).expand(len(x), 1) if rank == WORLD - 1 else None
        run.step(*((x,) if rank == 0 else ()), target=target, losses=losses)
        return [loss.detach().clone() for loss in losses]

    return part, step


PARALLEL: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
    "columns and rows": _tensor_parallel,
    "gpipe": lambda: _pipeline(ScheduleGPipe),
    "1f1b": lambda: _pipeline(Schedule1F1B),
}


def _train(name: str, budget: Budgeted | None) -> list[Tensor]:
    model, step = PARALLEL[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses: list[Tensor] = []
    for number in range(STEPS):
        with budget or nullcontext():
            losses += step(batch(number).repeat(ROWS, 1))
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(local(parameter) for parameter in model.parameters())]


def _within(name: str, agree: bool) -> dict[str, Any]:
    course.LEAST = math.inf  # whatever there is to compute is computed between two steps
    budget = Budgeted("85%", min_nbytes=0, agree=agree)
    expected, found = _train(name, None), _train(name, budget)
    return {
        "equal": all(equal_bits(*pair) for pair in zip(expected, found, strict=True)),
        "passes": budget.period,
        "unknown": None if budget.found.plan is None else budget.found.plan.unknown,
        "kept": 0 < budget.found.reached_nbytes <= budget.found.budget_nbytes,
        "said": str(budget.found),
    }


@pytest.mark.slow
@pytest.mark.parametrize("agree", [False, True])
@pytest.mark.parametrize(
    ("name", "passes"), [("columns and rows", (1, 1)), ("gpipe", (MICRO_BATCHES,) * 2), ("1f1b", (MICRO_BATCHES, 1))]
)
def test_ranks_that_divide_a_model_keep_a_budget(
    tmp_path: Path, name: str, passes: tuple[int, int], agree: bool
) -> None:
    found = run_together(tmp_path, _within, name, agree)
    assert all(each["equal"] and each["kept"] and each["unknown"] == () for each in found), found
    assert tuple(each["passes"] for each in found) == passes, found

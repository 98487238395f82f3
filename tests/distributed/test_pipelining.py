from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradients.gradient_checks import bits
from processes import (
    EXACT,
    LOSSY,
    STEPS,
    WORLD,
    Block,
    assert_holds_nothing,
    assert_no_weight_stored,
    batch,
    local,
    loss_of,
    matrices,
    network,
    run_together,
)
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleavedZeroBubble

from backstash import Session

MICRO_BATCHES = 4


def _stage_modules() -> list[nn.Module]:
    """The part of the network that each stage runs."""
    model = network()
    return [model[0], nn.Sequential(model[1], model[2])]


def _one_stage(schedule: Any) -> tuple[list[nn.Module], Any]:
    rank = dist.get_rank()
    module = _stage_modules()[rank]
    stage = PipelineStage(module, rank, WORLD, torch.device("cpu"))
    return [module], schedule(stage, MICRO_BATCHES, loss_fn=_loss)


def _two_stages(schedule: Any) -> tuple[list[nn.Module], Any]:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    modules: list[nn.Module] = [Block(), Block()]
    stages = [
        PipelineStage(module, rank + WORLD * index, 2 * WORLD, torch.device("cpu"))
        for index, module in enumerate(modules)
    ]
    return modules, schedule(stages, MICRO_BATCHES, loss_fn=_loss)


_SCHEDULES: dict[str, Callable[[], tuple[list[nn.Module], Any]]] = {
    "gpipe": lambda: _one_stage(ScheduleGPipe),
    "1f1b": lambda: _one_stage(Schedule1F1B),
    "input and weight gradients apart": lambda: _two_stages(ScheduleInterleavedZeroBubble),
}


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return loss_of(output - target)


def _train(schedule_name: str, session: Session | None) -> Iterator[Tensor]:
    modules, schedule = _SCHEDULES[schedule_name]()
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(STEPS):
        losses: list[Tensor] = []
        arguments = (batch(step),) if dist.get_rank() == 0 else ()
        target = torch.zeros(()).expand(36, 1) if dist.get_rank() == WORLD - 1 else None
        with session or nullcontext():
            schedule.step(*arguments, target=target, losses=losses)
        yield from (loss.detach().clone() for loss in losses)
        yield from (local(p.grad) for p in parameters if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()


def _pipeline(schedule_name: str) -> None:
    expected = list(_train(schedule_name, None))
    weights = matrices(network())
    for policy in (*EXACT, *LOSSY):
        session = Session(policy, min_nbytes=256)
        found = list(_train(schedule_name, session))
        assert len(found) == len(expected) > STEPS
        if policy in EXACT:
            assert all(torch.equal(bits(one), bits(other)) for one, other in zip(expected, found, strict=True))
        assert_no_weight_stored(session.report(), weights)
        assert_holds_nothing(session)


@pytest.mark.parametrize("schedule", list(_SCHEDULES))
def test_pipelining_unpacks_what_another_micro_batch_has_saved_in_between(tmp_path: Path, schedule: str) -> None:
    run_together(tmp_path, _pipeline, schedule)

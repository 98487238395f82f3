"""The first step of a plan that was read from a file keeps the budget, although nothing is proven in its process."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from backstash.bits import equal_bits
from backstash.errors import BudgetError, PlanError
from backstash.planning.measure.profiling import profile
from backstash.planning.measure.record import record
from backstash.planning.model import plan as plans
from backstash.planning.model.plan import Plan
from backstash.planning.model.sealed import seal
from backstash.planning.search.planner import Planner
from backstash.proofs import proofs


def convolutions() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return model, torch.randn(4, 3, 48, 48)


def transformer() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return layer, torch.randn(8, 64, 32)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers, self.head = nn.Linear(16, 32), nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.layers(torch.tanh(self.words(x)))[0])
        return torch.nn.functional.gelu(result)


def recurrent() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Recurrent(), torch.randn(8, 64, 16)


NETWORKS = [convolutions, transformer, recurrent]


@cache
def text_of_smallest(make: Any) -> str:
    model, x = make()
    step_again(model, x)  # gradients are there
    found = profile(lambda: step_again(model, x), model, min_nbytes=1024)
    with pytest.raises(BudgetError) as refused:
        Planner(found).plan(1)
    assert isinstance(refused.value.plan, Plan)
    return refused.value.plan.to_json()


def step_again(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("make", NETWORKS)
def test_the_first_step_keeps_the_budget(make: Any, guarded: bool) -> None:
    text = text_of_smallest(make)
    plain, x = make()
    step_again(plain, x)
    step_again(plain, x)
    proofs.forget()
    plan = Plan.from_json(text)
    assert any(decision.kind == "recompute" for decision in plan.decisions)
    model, x = make()
    step_again(model, x)  # gradients are there
    session = bs.Session(plan.guarded() if guarded else plan, model=model, min_nbytes=1024)
    reached = record(lambda: step_again(model, x), session, warmup=0).peak_nbytes
    assert reached <= plan.budget
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None and equal_bits(mine.grad, other.grad)


def test_proofs_of_another_environment_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of_smallest(recurrent)
    proofs.forget()
    monkeypatch.setattr(plans, "environment", lambda: "another")
    Plan.from_json(text)
    assert proofs.travelling() == {}


@pytest.mark.parametrize("damaged", [None, {"answers": 3}, {"environment": "", "answers": {"True": "abc"}}])
def test_damaged_proofs_are_refused(damaged: Any) -> None:
    content = json.loads(text_of_smallest(recurrent))["content"] | {"proofs": damaged}
    with pytest.raises(PlanError, match="asked for with its proofs, but got"):
        Plan.from_json(seal("Plan", content))

"""Plans for programs whose arguments change with the steps, so that backward reads more of a value than it did."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstash as bs
from backstash.planning.run.budgeted import Budgeted
from backstash.planning.search.planner import Planner
from backstash.testing import equal_bits

BOUNDED: dict[str, Callable[[Tensor, float], Tensor]] = {
    "clamp": lambda x, bound: x.clamp(-bound, bound),
    "clamp_min": lambda x, bound: x.clamp_min(bound - 1),
    "hardtanh": lambda x, bound: F.hardtanh(x, -bound, bound),
    "threshold": lambda x, bound: F.threshold(x, bound, 0.0),
    "hardshrink": lambda x, bound: F.hardshrink(x, bound),
    "softshrink": lambda x, bound: F.softshrink(x, bound),
    "a clamp by tensors": lambda x, bound: (
        x.clamp(-1.0, 1.0) if bound == 1.0 else x.clamp(torch.tensor(-bound), torch.tensor(bound))
    ),
    "leaky_relu": F.leaky_relu,
}
BOUNDS = (1.0, 0.9, 0.5, 0.1)
"""The second and the last are no numbers of float32, so that a bit does not tell on which side of them a value is."""


class Bounded(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bounded = BOUNDED[name]
        self.layers = nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)])
        self.x = torch.randn(64, 16)

    def step(self, bound: float, session: Any) -> list[Tensor]:
        self.zero_grad()
        with session:
            y = self.bounded(self.layers[0](self.x), bound)
            loss = self.layers[2](self.bounded(self.layers[1](y), bound)).square().mean()
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in self.parameters() if parameter.grad is not None)]


def plan_of(model: Bounded) -> bs.Plan:
    """The plan of the smallest budget that fits."""
    return Planner(bs.profile(lambda: model.step(1.0, nullcontext()), model, min_nbytes=0)).at_most(0)


@pytest.mark.filterwarnings("ignore:the plan")
@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize("name", BOUNDED)
def test_a_bound_that_changes_after_the_profile(name: str, is_guarded: bool) -> None:
    model = Bounded(name)
    plan = plan_of(model)
    session = bs.Session(plan.guarded(plan.peak_nbytes) if is_guarded else plan, model=model, min_nbytes=0)
    for bound in (*BOUNDS, *BOUNDS):
        plain = model.step(bound, nullcontext())
        assert all(map(equal_bits, model.step(bound, session), plain)), bound


def test_it_is_said_that_a_value_is_read_otherwise() -> None:
    """And not that there was none like it."""
    model = Bounded("clamp")
    session = bs.Session(plan_of(model), model=model, min_nbytes=0)
    with pytest.warns(UserWarning, match="but backward reads more of it than in the profiled step, or compares it"):
        model.step(0.9, session)


@pytest.mark.filterwarnings("ignore:the plan")
def test_a_bound_that_is_annealed_within_a_budget() -> None:
    model = Bounded("clamp")
    budget = Budgeted(int(bs.measure(lambda: model.step(1.0, nullcontext())).peak_nbytes * 0.9), min_nbytes=0)
    bound = 1.0
    for step in range(60):
        bound *= 0.99 if step > 40 else 1.0
        plain = model.step(bound, nullcontext())
        assert all(map(equal_bits, model.step(bound, budget), plain)), step
    assert budget.found.plan is not None

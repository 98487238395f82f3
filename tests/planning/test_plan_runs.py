"""A real step under plans: the same bits, the predicted peak, and what happens when the step is another one."""

from __future__ import annotations

import pytest
import torch
from step_problems import gradients_of
from torch import Tensor, nn

import backstash as bs
from backstash.planning.measure.profiling import profile
from backstash.planning.search.planner import Planner

KIB = 1 << 10


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))


def test_plans_of_a_real_step_give_the_same_bits_within_their_budgets() -> None:
    model, x = network(), torch.randn(4, 3, 48, 48)
    plain = gradients_of(model, x)
    planner = Planner(profile(lambda: model(x).square().sum().backward(), model))
    low, high = planner.solutions[0].peak_nbytes, planner.profile.plain_peak_nbytes
    for budget in ((3 * low + high) // 4, high):
        plan = planner.plan(budget)
        session = bs.Session(plan, model=model)
        for _ in range(2):
            assert all(
                torch.equal(mine, other) for mine, other in zip(gradients_of(model, x, session), plain, strict=True)
            )
        assert plan.notice() == ""
        reached = bs.measure(lambda session=session: step_again(model, x, session)).peak_nbytes
        assert reached <= 1.005 * plan.budget + 256 * KIB


def step_again(model: nn.Module, x: Tensor, session: bs.Session) -> None:
    """A step whose gradients are there already, as in the profile."""
    with session:
        loss = model(x).square().sum()
    loss.backward()


def test_another_batch_is_treated_with_a_warning_and_right_gradients() -> None:
    model, x, larger = network(), torch.randn(2, 3, 48, 48), torch.randn(3, 3, 48, 48)
    plain = gradients_of(model, larger)
    planner = Planner(profile(lambda: model(x).square().sum().backward(), model))
    plan = planner.plan("90%")
    with pytest.warns(UserWarning, match="but knows no such value"):
        mine = gradients_of(model, larger, bs.Session(plan, model=model))
    assert all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))
    assert "shapes or branches are others, or what is read of them" in plan.notice() and plan.unknown

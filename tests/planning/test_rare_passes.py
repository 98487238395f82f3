"""Budgets of loops whose passes are of several kinds, some of which are rare, or each of a size of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash import Budgeted
from backstash.errors import BatchTooLargeError

WIDTH = 256


@pytest.fixture
def energy() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(64, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))
    return nn.Sequential(*layers)


def sampled(model: nn.Module, steps: int, rows: int, around: Callable[[], Any] | None = None) -> Tensor:
    """Follows the gradient with respect to the input."""
    x = torch.randn(rows, 64)
    for _ in range(steps):
        x = x.detach().requires_grad_()
        if around is None:
            loss = model(x).sum()
        else:
            with around():
                loss = model(x).sum()
        (grad,) = torch.autograd.grad(loss, x)
        x = x - 0.5 * grad
    return x.detach()


def test_a_share_is_one_of_the_whole_step_although_it_begins_like_a_smaller_one(energy: nn.Sequential) -> None:
    """A pass that samples cannot be held in this share of its own peak, but the whole step can in a share of its."""
    budget = Budgeted("75%", min_nbytes=1024)
    for _ in range(40):
        with budget:
            x = sampled(energy, 4, 64)
            loss = energy(torch.randn(64, 64)).mean() - energy(x).mean() + energy(x).square().mean()
        loss.backward()
    found = budget.found
    assert budget.period == 5 and found.plan is not None
    assert 0 < found.reached_nbytes <= found.budget_nbytes < found.plain_nbytes


def test_a_shape_that_comes_once_in_many_passes_is_counted(energy: nn.Sequential) -> None:
    budget, found = Budgeted("90%", min_nbytes=1024), []

    def train() -> None:
        for _ in range(40):
            sampled(energy, 10, 64, lambda: budget)
            with budget:
                loss = energy(torch.randn(256, 64)).mean()
            loss.backward()
            found.append(budget.found)

    with pytest.warns(UserWarning, match="the one that takes the least has reached"):
        train()
    assert found[-1].reached_nbytes > found[-1].budget_nbytes
    assert "plain 0" not in str(found[-1]) and "above the budget" in str(found[-1])


def test_a_budget_that_is_too_small_is_refused_although_no_two_sizes_are_equal(energy: nn.Sequential) -> None:
    budget = Budgeted("10%", min_nbytes=1024)
    with pytest.raises(BatchTooLargeError, match="the smallest budget that fits"):
        for number in range(120):
            with budget:
                loss = energy(torch.randn(1000 + number, 64)).square().mean()
            loss.backward()


def test_it_is_said_what_is_done_as_long_as_there_is_no_plan(energy: nn.Sequential) -> None:
    budget = Budgeted("90%", min_nbytes=1024)
    for _ in range(3):
        with budget:
            loss = energy(torch.randn(64, 64)).square().mean()
        loss.backward()
    assert str(budget.found).startswith("no plan yet after 3 forward passes: ")


class Momentum(nn.Module):
    """A second encoder that follows the first one, whose weights it reads by ``.data`` inside of the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (
            nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """How much both agree."""
        found = self.query(x).flatten(1)
        with torch.no_grad():
            for one, other in zip(self.query.parameters(), self.key.parameters(), strict=True):
                other.data = other.data * 0.9 + one.data * 0.1
            expected = self.key(x.flip(-1)).flatten(1)
        return F.cosine_similarity(found, expected).mean()


def test_values_are_planned_as_what_they_become_where_the_program_could_change_their_weights() -> None:
    torch.manual_seed(0)
    model = Momentum()
    with pytest.raises(BatchTooLargeError) as refused:
        run(model, Budgeted("50%", min_nbytes=1024))
    budget = Budgeted(refused.value.smallest_nbytes, min_nbytes=1024)
    run(model, budget)
    assert 0 < budget.found.reached_nbytes <= budget.found.budget_nbytes
    assert budget.found.escalated == 0, str(budget.found)


def run(model: nn.Module, budget: Budgeted) -> None:
    for _ in range(30):
        with budget:
            loss = model(torch.randn(16, 3, 24, 24))
        loss.backward()


def test_what_the_first_steps_alone_have_saved_is_unknown_to_the_plan() -> None:
    """Else a plan would take for harmless what comes again later, and was not in the step that was measured."""
    torch.manual_seed(0)
    layers, extra = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12))), nn.Linear(64, 64)
    budget = Budgeted("97%", min_nbytes=0)
    for number in range(20):
        with budget:
            y = layers(torch.randn(64, 64))
            loss = (torch.tanh(extra(y)) if number == 1 else y).square().mean()
        loss.backward()
    plan = budget.found.plan
    assert plan is not None and plan.unknown == ()
    assert not [key for key in (*plan.others, *(each.key for each in plan.decisions)) if "Tanh" in key]

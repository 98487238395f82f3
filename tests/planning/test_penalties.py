"""Steps with gradients of gradients, among others without, have a plan that knows each value in all of its lives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backstash import Budgeted

STEPS = 150

pytestmark = pytest.mark.usefixtures("compiles_nothing")


class Adversarial:
    """A critic whose gradients are penalised, and a generator."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 16, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(16, 16, 3, padding=1), nn.LeakyReLU(0.2)]
        self.critic = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 64, 1))
        self.generator = nn.Sequential(nn.Linear(16, 192), nn.Tanh(), nn.Unflatten(1, (3, 8, 8)))

    def criticise(self, update: Callable[[Tensor, nn.Module], None]) -> None:
        """A step of the critic."""
        x, fake, share = torch.randn(8, 3, 8, 8), self.generator(torch.randn(8, 16)).detach(), torch.rand(8, 1, 1, 1)
        between = (share * x + (1 - share) * fake).requires_grad_()
        (gradient,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = ((gradient.flatten(1).norm(dim=1) - 1) ** 2).mean()
        update(self.critic(fake).mean() - self.critic(x).mean() + 10 * penalty, self.critic)

    def generate(self, update: Callable[[Tensor, nn.Module], None]) -> None:
        """A step of the generator."""
        update(-self.critic(self.generator(torch.randn(8, 16))).mean(), self.generator)
        self.critic.zero_grad()


def _train(session: Any, critics: int) -> list[Tensor]:
    both, losses = Adversarial(), []

    def update(loss: Tensor, model: nn.Module) -> None:
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-3 * parameter.grad
        model.zero_grad()

    with session:
        for _ in range(STEPS):
            for _ in range(critics):
                both.criticise(update)
            both.generate(update)
    return losses


@pytest.mark.filterwarnings("ignore:the plan")  # which is made anew, as long as the order of the passes is not known
@pytest.mark.parametrize("critics", [1, 2])
@pytest.mark.parametrize("budget", ["95%", "85%"])
def test_a_critic_with_a_penalty_is_planned_for(budget: str, critics: int) -> None:
    session = Budgeted(budget, min_nbytes=1024)
    assert all(x.equal(y) for x, y in zip(_train(nullcontext(), critics), _train(session, critics), strict=True))
    found = session.found
    assert session.is_quiet and session.period == critics + 1
    assert found.plan is not None and not found.plan.is_empty
    assert not found.plan.unknown
    assert 0 < found.reached_nbytes <= found.budget_nbytes

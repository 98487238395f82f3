"""Models whose modules have the same names, where the graph of one is dropped before the other one runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from backstash.bits import equal_bits

WIDTH, ROWS, STEPS = 32, 64, 30


def _models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.GELU())
    inner = [layer for _ in range(4) for layer in (nn.Linear(2 * WIDTH, 2 * WIDTH), nn.GELU())]
    critic = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), *inner)
    return generator, critic


def _train(session: bs.Budgeted | None) -> list[Tensor]:
    generator, critic = _models()
    weights = [*generator.parameters(), *critic.parameters()]
    optimizer = torch.optim.SGD(weights, 0.01)
    found = []

    def step() -> None:
        of_critic = critic(generator(torch.randn(ROWS, WIDTH)).detach()).square().mean()
        (of_critic + critic(torch.randn(ROWS, WIDTH)).mean()).backward()
        critic(generator(torch.randn(ROWS, WIDTH))).mean().backward()

    torch.manual_seed(1)
    for _ in range(STEPS):
        if session is None:
            step()
        else:
            with session:
                step()
        found += [weight.grad.clone() for weight in weights if weight.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(weight.detach() for weight in weights)]


@pytest.mark.parametrize("budget", ["97%", "80%", "70%"])
def test_a_plan_tells_the_values_of_two_models_apart(budget: str) -> None:
    expected = _train(None)
    session = bs.Budgeted(budget, min_nbytes=0)
    found = _train(session)
    session.close()
    assert all(equal_bits(*pair) for pair in zip(expected, found, strict=True))
    assert session.found.plan is not None, session.found
    assert session.found.plan.unknown == ()
    assert session.found.reached_nbytes <= session.found.budget_nbytes, session.found

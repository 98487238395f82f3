"""Models whose modules have the same names, where the graph of one is dropped before the other one runs."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from backstash import Session
from backstash.bits import equal_bits
from backstash.planning.measure.survey import KeepForSurvey, Survey

WIDTH, ROWS, STEPS = 32, 64, 30


class Normed(nn.Sequential):
    """A linear layer and its norm: what follows is remade from the norm's input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Linear(inputs, outputs), nn.LayerNorm(outputs))


def _models(hidden: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH), nn.GELU())
    inner = [layer for _ in range(4) for layer in (nn.Linear(2 * WIDTH, 2 * WIDTH), nn.GELU())]
    critic = nn.Sequential(Normed(WIDTH, 2 * WIDTH), nn.GELU(), *inner)
    return generator, critic


def _train(session: bs.Budgeted | None, hidden: int) -> list[Tensor]:
    generator, critic = _models(hidden)
    weights = [*generator.parameters(), *critic.parameters()]
    optimizer = torch.optim.SGD(weights, 0.01)
    found = []

    def step() -> None:
        of_critic = critic(generator(torch.randn(ROWS, WIDTH)).detach()).square().mean()
        (of_critic + critic(torch.randn(ROWS, WIDTH)).mean()).backward()
        critic(generator(torch.randn(ROWS, WIDTH))).mean().backward()

    torch.manual_seed(1)
    for _ in range(STEPS):
        with session or nullcontext():
            step()
        found += [weight.grad.clone() for weight in weights if weight.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(weight.detach() for weight in weights)]


@pytest.mark.parametrize("hidden", [4 * WIDTH, 2 * WIDTH], ids=["other sizes", "the same size"])
@pytest.mark.parametrize("budget", ["97%", "80%", "70%"])
def test_a_plan_tells_the_values_of_two_models_apart(budget: str, hidden: int) -> None:
    expected = _train(None, hidden)
    session = bs.Budgeted(budget, min_nbytes=0)
    found = _train(session, hidden)
    session.close()
    assert all(equal_bits(*pair) for pair in zip(expected, found, strict=True))
    assert session.found.plan is not None, session.found
    assert session.found.plan.unknown == ()
    assert session.found.reached_nbytes <= session.found.budget_nbytes, session.found


def test_what_is_surveyed_of_a_name_is_the_value_that_is_read() -> None:
    generator, critic = _models(2 * WIDTH)
    survey, session = Survey(("recompute",)), Session(KeepForSurvey(1), min_nbytes=0)
    with session, session.watched_by(survey):
        generator(torch.randn(ROWS, WIDTH)).detach()
        loss = critic(torch.randn(ROWS, WIDTH)).sum()
    loss.backward()
    assert survey.found["1/Gelu#0:self"].reason.startswith("layer_norm")

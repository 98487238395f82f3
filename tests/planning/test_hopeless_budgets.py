"""Budgets below what steps of any shape take are refused as soon as that is known, whatever shapes come next."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash import Budgeted
from backstash.errors import BatchTooLargeError
from backstash.planning.run import course

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Tokens(nn.Module):
    """Layers over tokens, as many as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for layer in self.layers:
            h = h + F.gelu(layer(h))
        out: Tensor = self.head(h)
        return out


def passes_until_refused(budget: int | str, length: Callable[[int], int], most: int = 100) -> int:
    """How many backward passes have begun, or ``most`` where the budget is not refused."""
    torch.manual_seed(0)
    model, session = Tokens(), Budgeted(budget, min_nbytes=256)
    session.is_hurried = True
    try:
        for number in range(most):
            with session:
                loss = model(torch.zeros(8, length(number), dtype=torch.int64)).square().mean()
            try:
                loss.backward()
            except BatchTooLargeError:
                return number
            model.zero_grad()
        return most
    finally:
        session.close()


@pytest.mark.parametrize("kind", ["in turn", "at random", "of many lengths"])
def test_no_further_step_is_awaited(kind: str, compiles_nothing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "PLAIN_STEPS", 2)
    drawn = Random(0)
    lengths = {
        "in turn": lambda number: (48, 64, 96)[number % 3],
        "at random": lambda number: drawn.choice((48, 64, 96)),
        "of many lengths": lambda number: drawn.randint(32, 128),
    }
    surveyed: list[int] = []
    survey = course.Course._survey

    def counted(self: course.Course) -> course.Waiting:
        surveyed.append(1)
        yield from survey(self)

    monkeypatch.setattr(course.Course, "_survey", counted)
    assert passes_until_refused(1024, lengths[kind]) <= 12
    assert len(surveyed) == 1


def test_a_budget_that_later_shapes_fit_is_not_refused_for_a_larger_first_one(
    compiles_nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course, "PLAIN_STEPS", 2)
    assert passes_until_refused("400 KiB", lambda number: 256 if number == 0 else 32 + number % 2) == 100

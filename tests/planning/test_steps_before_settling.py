"""Each step of a plan takes what was rehearsed: the first ones, those that settle, and the one that is written down."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from backstash.capture import learned
from backstash.errors import BudgetError
from backstash.planning.model.problem import StepProfile
from backstash.report.meter import CountedPeak
from tests.replay.twins import STEPS

ROWS = 31 * 20


class Rows(nn.Module):
    """A few large layers, and behind them many whose tensors are too small to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(6)])
        self.small = nn.Sequential(
            *[nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.Tanh()) for _ in range(24)]
        )

    def forward(self, x: Tensor) -> Tensor:
        """Rows [ROWS, 128] to a number."""
        return self.small(self.large(x).view(-1, 31, 128).mean(0)).square().mean()  # type: ignore[no-any-return]


class Images(nn.Module):
    """Convolutions whose weights are small enough to be copied where a recipe reads them."""

    def __init__(self) -> None:
        super().__init__()
        sides = [3, 16, 16, 16, 16, 8]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU())
            for a, b in itertools.pairwise(sides)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Images [4, 3, 32, 32] to a number."""
        for layer in self.layers:
            x = layer(x) + x.mean(1, keepdim=True)
        return x.square().mean()


PROGRAMS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "rows": (Rows, (ROWS, 128)),
    "images": (Images, (4, 3, 32, 32)),
}


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> tuple[nn.Module, Callable[[nn.Module], None]]:
    """A model, and a step of it."""
    kind, shape = PROGRAMS[request.param]
    torch.manual_seed(0)
    model, x = kind(), torch.randn(shape)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model, lambda model: model(x).backward()


def peaks(model: nn.Module, step: Callable[[nn.Module], None], session: bs.Session) -> Iterator[int]:
    """What each step takes at its peak."""
    for _ in range(2 * STEPS):
        with CountedPeak() as counted, session:
            step(model)
        yield counted.peak_nbytes


def refused(model: nn.Module, step: Callable[[nn.Module], None]) -> tuple[StepProfile, BudgetError]:
    """A profile, and why no plan of it takes a byte alone: what names the least that fits."""
    profile = bs.profile(lambda: step(model), model)
    with pytest.raises(BudgetError) as error:
        bs.plan(profile, 1)
    return profile, error.value


def test_each_step_keeps_the_smallest_budget(program: tuple[nn.Module, Callable[[nn.Module], None]]) -> None:
    model, step = program
    profile, error = refused(model, step)
    smallest = error.smallest_nbytes
    assert smallest is not None
    plan = bs.plan(profile, smallest)  # the figure that was named is one that fits
    session = bs.Session(plan, model=copy.deepcopy(model))
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.grad = torch.zeros_like(parameter)
    taken = list(peaks(other, step, session))
    assert session._is_replayed and max(taken) <= smallest, [f"{each / smallest - 1:+.1%}" for each in taken]


def test_a_plan_is_rehearsed_as_a_training_begins(program: tuple[nn.Module, Callable[[nn.Module], None]]) -> None:
    model, step = program
    profile, error = refused(model, step)
    plan = error.plan
    assert profile.rehearse is not None and plan is not None
    found = [max(profile.rehearse(plan)) for _ in range(4)]
    assert len(set(found)) == 1
    learned._by_module.pop(model, None)
    assert max(profile.rehearse(plan)) == found[0]

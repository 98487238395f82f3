"""Modules that run before training, steps of several passes, and critics that run several times: a budget is kept."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor, nn

from backstash.errors import BudgetError
from backstash.planning.measure.profiling import profile
from backstash.planning.run.budgeted import Budgeted
from backstash.planning.search.planner import plan
from tests.fuzz.budgets import PROGRAMS, WIDTH, adversarial, assert_keeps, failure, loop, nothing, rows, tower

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_budget_is_refused_and_each_is_kept(name: str) -> None:
    program, period = PROGRAMS[name]
    share = (90, 95, 100, 110)[list(PROGRAMS).index(name) % 4]
    assert_keeps(program, share, period, 16)


@pytest.mark.slow
@pytest.mark.parametrize("critics", [5, 12])
def test_any_number_of_critics(critics: int) -> None:
    assert_keeps(adversarial(critics, nothing), 80, critics + 1, 14)


@pytest.mark.slow
def test_passes_in_no_order_are_warned_of_and_kept_apart() -> None:
    def program() -> tuple[Any, list[nn.Parameter]]:
        draw = random.Random(0)
        models: list[nn.Module] = [tower(1), nn.Sequential(tower(), nn.Tanh(), nn.Linear(WIDTH, 1), nn.Softplus())]

        def passes() -> Iterator[tuple[Tensor, int]]:
            number = draw.randrange(2)
            yield models[number](rows()).square().mean(), number

        return loop(models, passes)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = assert_keeps(program, 95, None, 260)
    assert any("no order that repeats itself" in str(each.message) for each in caught)
    assert "no order that repeats itself" in str(run.found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 8, 21])
def test_random_loops(seed: int) -> None:
    assert failure(seed) == ""


def test_the_smallest_budget_is_never_more_than_the_plain_peak() -> None:
    for width in (8, 16, 64):
        model, x = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)), rows(width)
        found = profile(lambda model=model, x=x: model(x).square().mean().backward(), model)  # type: ignore[misc]
        with pytest.raises(BudgetError) as raised:
            plan(found, 1024)
        assert raised.value.smallest_nbytes <= found.plain_peak_nbytes
        again = plan(found, raised.value.smallest_nbytes)
        assert again.peak_nbytes <= raised.value.smallest_nbytes
        assert Budgeted(raised.value.smallest_nbytes) is not None

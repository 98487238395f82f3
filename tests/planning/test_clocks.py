"""Profiles and plans by clocks that tick as a clock may, be it odd: their numbers are always in their ranges."""

from __future__ import annotations

import random
import types
from collections.abc import Callable

import pytest
import torch
from torch import nn

import backstash as bs
from backstash.errors import MeasureError, PlanError
from backstash.planning.measure import link, profiling, survey

TICKS: dict[str, Callable[[random.Random], float]] = {
    "equal": lambda draw: 1e-3,
    "nanoseconds": lambda draw: 1e-9,
    "centuries": lambda draw: 1e10,
    "of every size": lambda draw: 10.0 ** draw.uniform(-9, 9),
    "pauses": lambda draw: 5.0 if draw.random() < 0.03 else 1e-5,
}
"""By how much a clock is later each time it is looked at."""

ALLOW = ("lossless", "recompute", "offload")


class Clock:
    """Stands in for the module ``time``."""

    def __init__(self, tick: Callable[[random.Random], float], seed: int) -> None:
        self._now, self._tick, self._draw = 0.0, tick, random.Random(seed)

    def perf_counter(self) -> float:
        """Returns the time."""
        self._now += self._tick(self._draw)
        return self._now

    process_time = perf_counter


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[random.Random], float], int], None]:
    """Returns what has profiles be timed by another clock."""

    def set_it(tick: Callable[[random.Random], float], seed: int) -> None:
        clock = Clock(tick, seed)
        stand_in = types.SimpleNamespace(perf_counter=clock.perf_counter, process_time=clock.process_time)
        for module in (profiling, survey, link):
            monkeypatch.setattr(module, "time", stand_in)
        link._measured.cache_clear()

    return set_it


@pytest.fixture(autouse=True)
def _measured_anew() -> object:
    """What was measured of a link by such a clock is forgotten."""
    yield
    link._measured.cache_clear()


def training() -> tuple[nn.Module, Callable[[], None]]:
    """Returns a small model and its step."""
    torch.manual_seed(0)
    layers = (nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid())
    model = nn.Sequential(*layers, nn.Linear(64, 1))
    x = torch.randn(256, 64)
    return model, lambda: model(x).square().sum().backward()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", list(TICKS))
def test_numbers_are_in_their_ranges(set_clock: Callable[..., None], name: str, seed: int) -> None:
    model, step = training()
    step()
    set_clock(TICKS[name], seed)
    profile = bs.profile(step, model, allow=ALLOW, min_nbytes=0)
    assert profile.seconds > 0
    for budget in ("95%", "100%"):
        plan = bs.plan(profile, budget, ALLOW)
        assert plan.plain_seconds <= plan.seconds < float("inf")
        assert bs.Plan.from_json(plan.to_json()) == plan


def test_a_clock_that_stands_still_is_named(set_clock: Callable[..., None]) -> None:
    model, step = training()
    step()
    set_clock(lambda draw: 0.0, 0)
    with pytest.raises(PlanError, match="clock stands still"):
        bs.profile(step, model, allow=ALLOW, min_nbytes=0)
    with pytest.raises(MeasureError, match="stands still"):
        bs.profile(step, model, min_nbytes=0)

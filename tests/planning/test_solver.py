"""The solvers: the exact one against brute force, the greedy one against the exact one, and what always holds."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_problems import drawn_profile

import backstash as bs
from backstash.errors import BudgetError, PlanError
from backstash.planning.model.budget import restrict
from backstash.planning.model.peak import PeakModel
from backstash.planning.model.problem import Choice, StepProfile
from backstash.planning.search import greedy
from backstash.planning.search.exact import Solution, brute_force, exact
from backstash.planning.search.greedy import frontier
from backstash.planning.search.planner import Planner
from bench.profiles import mobilenet, random_network, resnet, transformer, unet
from tests import networks

EXACT = ("lossless", "recompute")


def lowest_peak(model: PeakModel) -> int:
    combinations = product(*(range(count) for count in model.choice_counts.tolist()))
    allowed = (choices for choices in combinations if not model.remakes_what_has_an_error(choices))
    return min(model.evaluate(choices).peak_nbytes for choices in allowed)


def fastest(found: list[Solution], budget: int) -> Solution | None:
    return min((each for each in found if each.peak_nbytes <= budget), key=lambda each: each.seconds, default=None)


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 50))])
def test_the_exact_solver_finds_what_brute_force_finds(seed: int) -> None:
    pytest.importorskip("scipy")
    model, draw = PeakModel(drawn_profile(seed, 5)), random.Random(seed)
    low = lowest_peak(model)
    least = exact(model, None)
    assert least is not None and least.peak_nbytes == low
    kept = model.evaluate([0] * len(model.nbytes)).peak_nbytes
    for error_limit in (None, 0.0, 0.15):
        budget = draw.randint(low - 3, max(kept, low))
        expected, found = fastest(brute_force(model, error_limit), budget), exact(model, budget, error_limit)
        assert (expected is None) == (found is None)
        if expected is not None and found is not None:
            assert found.seconds == pytest.approx(expected.seconds)
            assert found.peak_nbytes <= budget and (error_limit is None or found.error <= error_limit + 1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), budgets=st.lists(st.integers(1, 700), min_size=2, max_size=6))
def test_a_larger_budget_is_never_slower_and_no_budget_is_exceeded(seed: int, budgets: list[int]) -> None:
    model = PeakModel(drawn_profile(seed))
    found = frontier(model)
    chosen = [fastest(found, budget) for budget in sorted(budgets)]
    for budget, each in zip(sorted(budgets), chosen, strict=True):
        if each is not None:
            said = model.evaluate(each.choices)
            assert said.peak_nbytes == each.peak_nbytes <= budget and said.seconds == pytest.approx(each.seconds)
    assert all(b is not None and b.seconds <= a.seconds for a, b in pairwise(chosen) if a is not None)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 700), error_limit=st.sampled_from([None, 0.0, 0.1]))
def test_nothing_is_better_than_the_frontier_on_small_problems(
    seed: int, budget: int, error_limit: float | None
) -> None:
    model = PeakModel(drawn_profile(seed, 5))
    best, found = fastest(brute_force(model, error_limit), budget), fastest(frontier(model, error_limit), budget)
    assert (best is None) == (found is None)
    assert best is None or (found is not None and found.seconds == pytest.approx(best.seconds))


@pytest.mark.parametrize("seed", range(6))
def test_the_search_itself_finds_what_brute_force_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems are solved by trying everything; here they are searched as large ones are."""
    monkeypatch.setattr(greedy, "SMALL", 1)
    model = PeakModel(drawn_profile(seed, 5))
    found = frontier(model)
    low = lowest_peak(model)
    kept = model.evaluate([0] * len(model.nbytes)).peak_nbytes
    for budget in (low, (low + kept) // 2, (low + 3 * kept) // 4):
        best, mine = fastest(brute_force(model), budget), fastest(found, budget)
        assert best is not None and mine is not None
        assert mine.seconds <= best.seconds + 0.02 * model.base_seconds


def test_brute_force_refuses_what_it_cannot_do() -> None:
    with pytest.raises(PlanError, match=r"brute force was asked for .* combinations, .* Use exact\(\)"):
        brute_force(PeakModel(resnet((1, 1, 1, 1), 16, 2, 64)))


def test_the_exact_solver_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(PlanError, match=r"needs scipy, which is not installed. Install backstash\[planner\]"):
        exact(PeakModel(drawn_profile(1)), 100)


def compare(profile: StepProfile, shares: tuple[float, ...]) -> None:
    """The greedy solver is within 2 % of a step of the exact one, and its peaks are real.

    Close to the least peak there are few solutions, far apart. There it is within 3 %, which U-Nets need.
    """
    model = PeakModel(restrict(profile, EXACT))
    found = frontier(model)
    kept, low = found[-1].peak_nbytes, found[0].peak_nbytes
    assert all(a.peak_nbytes < b.peak_nbytes and a.seconds > b.seconds for a, b in pairwise(found))
    for share in shares:
        budget = int(low + share * (kept - low))
        mine, best = fastest(found, budget), exact(model, budget, gap=1e-3, time_limit=120)
        assert mine is not None and best is not None
        assert model.evaluate(mine.choices).peak_nbytes <= budget
        assert mine.seconds <= best.seconds + (0.02 if share >= 0.1 else 0.03) * model.base_seconds


def test_the_greedy_solver_is_close_to_the_exact_one() -> None:
    pytest.importorskip("scipy")
    compare(transformer(1, 64, 32, words=256), (0.7, 0.2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "profile",
    [resnet((1, 1, 1, 0), 32, 2), transformer(3, 256, 128), unet(2, 16, 2), mobilenet(3, 16, 2)],
    ids=["resnet", "transformer", "unet", "mobilenet"],
)
def test_the_greedy_solver_is_close_to_the_exact_one_on_networks(profile: StepProfile) -> None:
    pytest.importorskip("scipy")
    compare(profile, (0.8, 0.5, 0.2, 0.05))


def test_a_step_without_values_has_one_plan() -> None:
    profile = drawn_profile(0)
    (only,) = frontier(PeakModel(StepProfile(profile.positions, profile.base_nbytes, (), 0)))
    assert (only.choices, only.peak_nbytes) == ((), max(profile.base_nbytes))


def test_the_frontier_is_that_of_the_allowed_choices() -> None:
    profile = random_network(1)
    only = frontier(PeakModel(restrict(profile, ())))
    assert len(only) == 1 and only[0].peak_nbytes == profile.plain_peak_nbytes
    assert not np.any(only[0].choices)


@pytest.mark.slow
def test_ten_thousand_values_are_searched() -> None:
    """How long that takes is measured by bench/planner.py. Here the work is bounded, and the plans are right."""
    profile = restrict(transformer(840, 64, 32), EXACT)
    model = PeakModel(profile)
    assert len(profile.values) > 10_000
    found = frontier(model)
    assert found[0].peak_nbytes < 0.3 * profile.plain_peak_nbytes
    for each in found[:: len(found) // 5]:
        assert model.evaluate(each.choices).peak_nbytes == each.peak_nbytes


def test_the_exact_solver_does_not_pass_a_feasible_answer_off_as_the_best() -> None:
    pytest.importorskip("scipy")
    model = PeakModel(restrict(mobilenet(3, 16, 2), EXACT))
    with pytest.raises(PlanError, match="Allow it more time, or use the greedy solver"):
        exact(model, None, time_limit=1e-3)


@pytest.mark.slow
def test_the_lowest_peak_is_reached_and_is_no_matter_of_how_long_things_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greedy, "EFFORT", greedy.EFFORT // 2)
    torch.manual_seed(0)
    model, images, draw = networks.resnet_cifar(20), torch.randn(36, 3, 32, 32), random.Random(0)
    whole = bs.profile(lambda: model(images).sum().backward(), model)
    profile = restrict(whole, EXACT)
    planner = Planner(whole, EXACT)
    with pytest.raises(BudgetError) as refused:
        planner.plan(1)
    assert refused.value.smallest_nbytes <= 1.02 * planner.solutions[0].peak_nbytes

    def timed_anew(choice: Choice) -> Choice:
        return replace(choice, seconds=choice.seconds * draw.uniform(0.5, 2.0))

    def lowest() -> int:
        values = (replace(v, choices=tuple(map(timed_anew, v.choices))) for v in profile.values)
        return frontier(PeakModel(replace(profile, values=tuple(values))))[0].peak_nbytes

    peaks = [lowest() for _ in range(3)]
    assert max(peaks) <= 1.01 * min(peaks), peaks


@pytest.mark.parametrize("layers", [1, 2])
def test_a_small_step_takes_few_turns(layers: int) -> None:
    """Each turn takes a while in Python, and a step of a few milliseconds waits for all of them."""
    assert sum(1 for _ in greedy.Frontier(PeakModel(transformer(layers))).search()) < 10_000

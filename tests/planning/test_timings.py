"""The predicted time of a plan: as it was timed, and never more than that of a plan for a smaller budget."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from step_problems import drawn_profile
from torch import Tensor, nn, randn

from backstash.planning.measure import profiling
from backstash.planning.measure.profiling import profile
from backstash.planning.model.budget import restrict
from backstash.planning.model.peak import evaluate
from backstash.planning.model.plan import Plan
from backstash.planning.model.problem import Choice, PlannedValue, Position, StepProfile
from backstash.planning.search import greedy
from backstash.planning.search.planner import Planner
from backstash.planning.search.timings import NOISE, like_lossless
from bench.profiles import mobilenet, random_network, resnet, transformer, unet

FACTORS = {90: 1.05, 80: 1.2, 70: 1.1, 60: 1.3}
"""How long steps within shares of plain's peak are said to take; the second and third are out of order."""


def rehearsed(factors: list[float], usual: float = 9.0) -> tuple[StepProfile, list[Plan]]:
    """A step whose peaks are as predicted, and whose plans take these times one after the other; and those plans.

    What the policy lossless does takes the time ``usual`` and is not among the plans.
    """
    found = resnet((2,))
    asked: list[Plan] = []
    same = [value.choices[index].name for value, index in zip(found.values, like_lossless(found), strict=True)]

    def reached(plan: Plan) -> tuple[int, ...]:
        kinds = {decision.key: decision.choice for decision in plan.decisions}
        chosen = [[c.name for c in value.choices].index(kinds[value.key]) for value in found.values]
        return (evaluate(found, chosen).peak_nbytes,)

    def clock(plan: Plan) -> float:
        if [decision.choice for decision in plan.decisions] == same:
            return usual
        asked.append(plan)
        return factors[len(asked) - 1]

    object.__setattr__(found, "rehearse", reached)
    object.__setattr__(found, "clock", clock)
    return found, asked


def test_a_plan_says_the_time_that_its_steps_took() -> None:
    found, asked = rehearsed([1.25])
    planner = Planner(found)
    plan = planner.plan("70%")
    assert plan.seconds == pytest.approx(1.25 * found.seconds)
    assert [each.decisions for each in asked] == [plan.decisions]
    assert planner.plan("70%") == plan  # and it is not timed again
    assert len(asked) == 1
    assert any(seconds == plan.seconds for _, seconds in plan.frontier)
    assert all(a[1] > b[1] for a, b in pairwise(plan.frontier))


@pytest.mark.slow
@pytest.mark.parametrize("order", [(90, 80, 70, 60), (60, 70, 80, 90), (80, 60, 90, 70)])
def test_no_plan_for_a_larger_budget_is_said_to_be_slower(order: tuple[int, ...]) -> None:
    found, _ = rehearsed([FACTORS[share] for share in order])
    planner = Planner(found)
    plans = {share: planner.plan(f"{share}%") for share in order}
    assert all(plans[a].seconds <= plans[b].seconds for a, b in pairwise(sorted(plans, reverse=True)))
    assert all(plan.seconds > found.seconds for plan in plans.values())


@pytest.mark.slow
def test_what_lossless_does_is_taken_where_its_step_is_faster_by_more_than_noise() -> None:
    for factor in (1.3, 1.19, 1.1):
        found, asked = rehearsed([1.2], factor)
        usual = like_lossless(found)
        plan = Planner(found).plan(int(1.01 * evaluate(found, usual).peak_nbytes))
        is_usual = plan.decisions != asked[0].decisions
        assert is_usual is (factor * (1.0 + NOISE) < 1.2)
        assert plan.seconds == pytest.approx((factor if is_usual else 1.2) * found.seconds)
        assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(plan.frontier))
        assert (evaluate(found, usual).peak_nbytes, plan.seconds) in plan.frontier or not is_usual


@pytest.mark.parametrize(("factor", "is_tried"), [(1.0, False), (1.1, True)])
def test_what_lossless_does_is_tried_where_a_plan_adds_to_a_step(factor: float, is_tried: bool) -> None:
    found, asked = rehearsed([factor])
    tried: list[Plan] = []
    reach = found.rehearse
    assert reach is not None

    def reached(plan: Plan) -> tuple[int, ...]:
        tried.append(plan)
        return reach(plan)  # type: ignore[call-arg]  # no method

    object.__setattr__(found, "rehearse", reached)
    usual_nbytes = evaluate(found, like_lossless(found)).peak_nbytes
    plan = Planner(found).plan(max(usual_nbytes, int(0.98 * found.plain_peak_nbytes)))
    assert [each.decisions for each in asked] == [plan.decisions]
    assert len(tried) == 1 + is_tried


def test_what_lossless_does_takes_bits_cheap_calls_and_exact_codecs() -> None:
    keep, bits, zvc = Choice.keep(8), Choice("bitmask", "encode", 1), Choice("zvc", "encode", 4)
    cheap, costly = (Choice("recompute", "recompute", 0, reason=reason) for reason in ("relu(batch_norm)", "conv2d"))
    rounded = Choice("fewbit", "encode", 1, error=0.1)
    offered = [(keep, zvc, cheap), (keep, costly, zvc), (keep, cheap, bits), (keep, costly), (keep, rounded), (keep,)]
    values = [PlannedValue(str(n), "", "Relu", "", 8, 0, (1,), each) for n, each in enumerate(offered)]
    positions = Position("relu", "", False, 1.0), Position("ReluBackward0", "", True, 1.0)
    assert like_lossless(StepProfile(positions, (8, 8), tuple(values), 64)) == (2, 2, 2, 0, 0, 0)


def test_a_step_that_seems_to_be_faster_than_plain_is_noise() -> None:
    found, _ = rehearsed([0.9])
    assert Planner(found).plan("70%").seconds > found.seconds


def test_what_a_session_adds_counts_for_every_plan_that_does_something() -> None:
    draw = drawn_profile(3)
    heavier = replace(draw, session_seconds=0.5)
    kept = [0] * len(draw.values)
    assert evaluate(heavier, kept).seconds == evaluate(draw, kept).seconds + 0.5
    assert Planner(heavier).plan(draw.plain_peak_nbytes).seconds == draw.seconds  # the empty plan


def test_a_profile_has_the_times_of_real_steps() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64))
    x = randn(64, 64)

    def step() -> Tensor:
        loss: Tensor = model(x).square().sum()
        loss.backward()
        return loss

    found = profile(step, model, min_nbytes=0)
    assert found.session_seconds > 0.0
    assert StepProfile.from_json(found.to_json()) == found
    assert found.clock is not None
    before = [parameter.grad for parameter in model.parameters()]
    assert found.clock(Planner(replace(found)).plan("90%")) > 0.0
    assert [parameter.grad for parameter in model.parameters()] == before == [None] * 6


def test_each_step_is_timed_behind_one_of_its_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[str] = []

    class Context:
        inside = False

        def __enter__(self) -> None:
            self.inside = True

        def __exit__(self, *error: object) -> None:
            self.inside = False

    context: Any = Context()
    clock = iter(range(1000))
    monkeypatch.setattr(profiling, "_now", lambda: next(clock))
    monkeypatch.setattr(profiling, "SECONDS", 0.0)
    found = profiling._in_turns(lambda: kinds.append("own" if context.inside else "plain"), lambda: None, context)
    assert kinds == ["own", *(["plain", "plain", "own", "own"] * profiling.FEWEST)]
    assert found == (1, 1)


@pytest.mark.parametrize("name", ["resnet", "transformer", "unet", "mobilenet", "drawn"])
def test_no_plan_is_predicted_to_be_slower_than_lossless_or_than_one_of_a_smaller_budget(name: str) -> None:
    networks: dict[str, list[StepProfile]] = {
        "resnet": [resnet([1, 1], width=16, batch=4, image=32)],
        "transformer": [transformer(2)],
        "unet": [unet(2, width=16, image=64)],
        "mobilenet": [mobilenet(2)],
        "drawn": [drawn_profile(seed) for seed in range(40)],
    }
    for found in networks[name]:
        planner, usual = Planner(found), evaluate(found, like_lossless(found))
        low, plain = planner.solutions[0].peak_nbytes, found.plain_peak_nbytes
        before = math.inf
        for share in range(21):
            budget = max(1, low + share * (plain - low) // 20)
            seconds = planner.at_most(budget).seconds
            assert seconds <= before
            assert seconds <= usual.seconds or usual.peak_nbytes > budget
            before = seconds
        assert before == found.seconds


@pytest.mark.parametrize("name", ["unet", "random"])
def test_no_other_choice_of_one_value_is_predicted_to_be_faster_within_the_budget(name: str) -> None:
    found = unet(2, width=16, image=64) if name == "unet" else random_network(0)
    allowed = restrict(found, ("lossless", "recompute"))
    solutions = Planner(allowed).solutions
    low, plain = solutions[0].peak_nbytes, found.plain_peak_nbytes
    for budget in (low + share * (plain - low) // 12 for share in range(12)):
        chosen = next(each for each in reversed(solutions) if each.peak_nbytes <= budget)
        for at, value in enumerate(allowed.values):
            for index, choice in enumerate(value.choices):
                changed = (*chosen.choices[:at], index, *chosen.choices[at + 1 :])
                if index == chosen.choices[at] or not any(changed):
                    continue
                other = evaluate(allowed, changed)
                is_faster = other.seconds < chosen.seconds - greedy.FINE * found.seconds
                assert not is_faster or other.peak_nbytes > budget, (budget, value.key, choice.name)

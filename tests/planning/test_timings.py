"""What a plan says of its time: what was timed, and never more than a plan for a smaller budget."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from step_problems import drawn_profile
from torch import Tensor, nn, randn

from backstash.planning.peak import evaluate
from backstash.planning.plan import Plan, Planner
from backstash.planning.problem import StepProfile
from backstash.planning.profiling import profile
from benchmarks.profiles import resnet

FACTORS = {90: 1.05, 80: 1.2, 70: 1.1, 60: 1.3}
"""How long steps within shares of plain's peak are said to take; the second and third are out of order."""


def rehearsed(factors: list[float]) -> tuple[StepProfile, list[Plan]]:
    """A step whose peaks are as predicted, and whose plans take these times one after the other; and those plans."""
    found = resnet((2,))
    asked: list[Plan] = []

    def reached(plan: Plan) -> tuple[int, ...]:
        kinds = {decision.key: decision.choice for decision in plan.decisions}
        chosen = [[c.name for c in value.choices].index(kinds[value.key]) for value in found.values]
        return (evaluate(found, chosen).peak_nbytes,)

    def clock(plan: Plan) -> float:
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


@pytest.mark.parametrize("order", [(90, 80, 70, 60), (60, 70, 80, 90), (80, 60, 90, 70)])
def test_no_plan_for_a_larger_budget_is_said_to_be_slower(order: tuple[int, ...]) -> None:
    found, _ = rehearsed([FACTORS[share] for share in order])
    planner = Planner(found)
    plans = {share: planner.plan(f"{share}%") for share in order}
    assert all(plans[a].seconds <= plans[b].seconds for a, b in pairwise(sorted(plans, reverse=True)))
    assert all(plan.seconds > found.seconds for plan in plans.values())


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

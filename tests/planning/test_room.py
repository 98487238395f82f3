"""A plan whose peak lies elsewhere lets backward's kernels keep what they have read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from step_problems import drawn_profile
from torch import nn

import backstash as bs
from backstash.planning.measure.profiling import profile
from backstash.planning.model.peak import PeakModel
from backstash.planning.search.planner import Planner
from backstash.redeem import claims


@pytest.mark.parametrize("seed", range(20))
def test_drafts_that_are_held_until_the_next_value_is_born_stay_below_the_limit(seed: int) -> None:
    step = drawn_profile(seed)
    model = PeakModel(step)
    live = model.evaluate([0] * len(step.values)).live
    births = sorted({value.born for value in step.values})
    for limit in (int(live.max()) - 50, int(live.max()), int(live.max()) + 1000):
        for value, room in zip(step.values, model.in_flight(live, limit), strict=True):
            after = [birth for birth in births if birth > value.born]
            held_at = live[value.born + 1 : after[0] + 1 if after else None]
            assert room == max(0, limit - max(held_at))


@pytest.mark.parametrize("seed", range(20))
def test_what_has_room_fits_beside_all_else_that_is_read_with_it(seed: int) -> None:
    step = drawn_profile(seed)
    model = PeakModel(step)
    kept = [0] * len(step.values)
    live = model.evaluate(kept).live
    for limit in (int(live.max()), int(live.max()) + 60, int(live.max()) + 1000):
        for value, has_room in zip(step.values, model.has_room(kept, limit), strict=True):
            beside = [2 * sum(other.nbytes for other in step.values if read in other.reads) for read in value.reads]
            assert has_room == all(live[r] + more <= limit for r, more in zip(value.reads, beside, strict=True))


@pytest.mark.slow
def test_nothing_is_claimed_where_the_plan_has_room_and_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(6))
    )
    x = torch.randn(8, 8, 64, 64)
    planner = Planner(profile(lambda: model(x).square().sum().backward(), model))
    plan = planner.plan((planner.solutions[0].peak_nbytes + planner.profile.plain_peak_nbytes) // 2)
    claimed: list[object] = []
    original = claims.claim

    def noted(*args: object) -> object:
        claimed.append(args)
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(claims, "claim", noted)
    counts, gradients = [], []
    for has_room in (True, False):
        decisions = tuple(replace(decision, has_room=has_room) for decision in plan.decisions)
        session = bs.Session(replace(plan, decisions=decisions), model=model)
        model.zero_grad()
        with session:
            loss = model(x).square().sum()
        loss.backward()
        counts.append(len(claimed))
        claimed.clear()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    model.zero_grad()
    model(x).square().sum().backward()
    plain = [parameter.grad for parameter in model.parameters()]
    assert counts[0] < counts[1]
    for found in gradients:
        assert all(a is not None and torch.equal(a, b) for a, b in zip(plain, found, strict=True))

"""What a guard does when more is held than planned, and a Session that plans anew where steps do not match its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from backstash.planning.guard import Guard
from backstash.stores.disk import DiskStore

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Gated(nn.Module):
    """Blocks whose relus return more and more numbers that are not zero, so that they encode worse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(6))
        self.shift = -2.0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x) + self.shift)
        return x.square().mean()


def step(model: nn.Module) -> None:
    torch.manual_seed(1)
    model(torch.randn(8, 8, 16, 16) * 4).backward()


def planned(budget: str = "90%", allow: tuple[str, ...] = ("lossless",)) -> tuple[Gated, bs.Plan]:
    model = Gated()
    profile = bs.profile(lambda: step(model), model, min_nbytes=1024)
    return model, bs.plan(profile, budget, allow=allow)


def gradients(model: nn.Module, policy: Any, **options: Any) -> tuple[list[Tensor], Any]:
    session = bs.Session(policy, model=model, min_nbytes=1024, **options)
    found = []
    for _ in range(3):
        model.zero_grad()
        with session:
            torch.manual_seed(1)
            loss = model(torch.randn(8, 8, 16, 16) * 4)
        loss.backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found, session.report()


def test_a_step_as_planned_is_left_alone() -> None:
    model, plan = planned()
    guard = Guard(plan, plan.budget)
    expected, alone = gradients(model, plan)
    found, report = gradients(model, guard)
    assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))
    assert guard.escalated == 0
    assert report.stash_nbytes == alone.stash_nbytes


def test_values_that_encode_worse_than_planned_make_the_rest_smaller(tmp_path: Path) -> None:
    model, plan = planned()
    model.shift = 1.0  # hardly anything is zero now
    expected, _ = gradients(model, "keep")
    _, unguarded = gradients(model, plan)
    guard = Guard(plan, plan.budget, spill="spill")
    with DiskStore(tmp_path) as store:
        found, report = gradients(model, guard, stores={"spill": store})
    assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))
    assert guard.escalated > 0
    assert report.device_nbytes < unguarded.device_nbytes


def test_where_remaking_is_allowed_values_are_made_again() -> None:
    model, plan = planned(allow=("lossless", "recompute"))
    guard = Guard(plan, plan.peak_nbytes)
    guard._room = -1  # as if too much were held from the start
    expected, _ = gradients(model, "keep")
    found, report = gradients(model, guard)
    assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))
    assert any(row.codec == "recompute" for row in report.rows)


def test_what_the_allocator_says_counts_as_well() -> None:
    model, plan = planned()
    allocated = [0]
    guard = Guard(plan, plan.budget, allocated=lambda: allocated[0])
    first, _ = gradients(model, guard)
    assert guard.escalated == 0
    calls = iter(range(10**6))
    guard._allocated = lambda: next(calls) << 20  # it grows by a mebibyte from value to value
    second, _ = gradients(model, guard)
    assert guard.escalated > 0
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


# -- Session(plan, replan="auto") ------------------------------------------------------------------------------------


def trained(policy: Any, sizes: list[int], **options: Any) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(64, 1))
    session = bs.Session(policy(model) if callable(policy) else policy, min_nbytes=1024, **options)
    for rows in sizes:
        with session:
            loss = model(torch.randn(rows, 64)).square().mean()
        loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], session.report()


def test_a_session_plans_anew_for_another_shape() -> None:
    def plan_of(model: nn.Module) -> bs.Plan:
        x = torch.zeros(128, 64)
        profile = bs.profile(lambda: model(x).square().mean().backward(), model, min_nbytes=1024)
        return bs.plan(profile, "80%")

    sizes = [128] * 30 + [96] * 12
    expected, _ = trained("keep", sizes)
    found, report = trained(plan_of, sizes, replan="auto")
    assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))
    assert report.steps == len(sizes)
    assert "2 shapes of input" in report.notes[-1] and "reached" in report.notes[-1]


def test_to_plan_anew_takes_a_plan() -> None:
    with pytest.raises(ValueError, match=r"replan='auto' and the policy Lossless.*with a Plan"):
        bs.Session("lossless", replan="auto")
    with pytest.raises(ValueError, match="replan='always'"):
        bs.Session("lossless", replan="always")  # type: ignore[arg-type]

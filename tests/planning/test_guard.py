"""Guards where more is held than planned, and a Session that plans anew where steps do not match its plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from backstash.errors import PlanError
from backstash.planning.run.guard import LOOK_AGAIN, Guard
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
    found, reports = rounds(model, policy, 3, **options)
    return found, reports[-1]


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


def with_spare_values(plan: bs.Plan) -> bs.Plan:
    """A plan that encodes its first value and keeps all others, which may be remade in their order."""
    kept = [
        replace(each, kind="keep", choice="keep", held_nbytes=each.nbytes, reserve_nbytes=0, spare=number)
        for number, each in enumerate(plan.decisions)
    ]
    first = replace(kept[0], kind="encode", choice="zvc", held_nbytes=kept[0].nbytes // 8)
    return replace(plan, decisions=(first, *kept[1:]), reserve_nbytes=0)


def test_where_the_plan_allows_it_values_are_remade() -> None:
    model, made = planned(allow=("lossless", "recompute"))
    plan = with_spare_values(made)
    guard = Guard(plan, plan.peak_nbytes)
    guard._room = -1  # as if too much were held from the start
    expected, _ = gradients(model, "keep")
    found, report = gradients(model, guard)
    assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))
    assert any(row.codec == "recompute" for row in report.rows)


def test_what_the_allocator_says_counts_as_well(tmp_path: Path) -> None:
    model, plan = planned()
    allocated = [0]
    guard = Guard(plan, plan.budget, spill="spill", allocated=lambda: allocated[0])
    with DiskStore(tmp_path) as store:
        first, _ = gradients(model, guard, stores={"spill": store})
        assert guard.escalated == 0
        calls = iter(range(10**6))
        guard._allocated = lambda: next(calls) << 20  # it grows by a mebibyte from value to value
        second, _ = gradients(model, guard, stores={"spill": store})
    assert guard.escalated > 0
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_no_more_values_are_remade_than_needed_and_they_are_kept_again_when_there_is_room() -> None:
    model, found = planned(allow=("lossless", "recompute"))
    plan = with_spare_values(found)
    spare = [each.key for each in sorted(plan.decisions, key=lambda each: each.spare) if each.spare]
    guard = Guard(plan, plan.peak_nbytes + (1 << 30))
    gradients(model, guard)
    assert not guard._remade
    guard._room = guard.excess - 1
    guard.begin_step()
    assert guard._remade == spare[:1] and "1 values were held in less than planned" in guard.notes[0]
    guard._room = guard.excess
    guard._hold_as_planned()
    assert guard._remade == spare[:1]  # it would not fit
    guard._room = guard.excess + 2 * plan.decisions[0].nbytes
    guard._hold_as_planned()
    assert not guard._remade


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


# -- Session(plan.guarded()) -----------------------------------------------------------------------------------------


class Asked(Guard):
    """Counts how often it is asked, and told what became of a value."""

    asked = told = 0

    def decide_together(self, saved: Any, readers: Any) -> Any:
        self.asked += 1
        return super().decide_together(saved, readers)

    def observe(self, outcome: Any) -> None:
        self.told += 1
        super().observe(outcome)


def rounds(model: nn.Module, policy: Any, steps: int, **options: Any) -> tuple[list[Tensor], list[Any]]:
    """Gradients and reports of some steps under one Session."""
    session, found, reports = bs.Session(policy, model=model, min_nbytes=1024, **options), [], []
    for _ in range(steps):
        model.zero_grad()
        with session:
            torch.manual_seed(1)
            loss = model(torch.randn(8, 8, 16, 16) * 4)
        loss.backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        reports.append(session.report())
    return found, reports


def test_a_guard_is_asked_once_as_long_as_steps_are_as_planned() -> None:
    model, plan = planned()
    guard = Asked(plan, plan.budget)
    expected, _ = rounds(model, plan, 2)
    first, _ = rounds(model, guard, 2)
    asked, told = guard.asked, guard.told
    assert asked > 0 and told > 0
    rounds(model, guard, 8)
    assert (guard.asked, guard.told, guard.escalated) == (asked, told, 0)
    assert all(torch.equal(x, y) for x, y in zip(expected, first, strict=True))


def test_what_is_held_in_less_stays_so_without_further_questions(tmp_path: Path) -> None:
    model, plan = planned()
    model.shift = 1.0
    expected, _ = rounds(model, "keep", 8)
    unguarded = rounds(model, plan, 1)[1][-1]
    guard = Asked(plan, plan.budget, spill="spill")
    with DiskStore(tmp_path) as store:
        found, reports = rounds(model, guard, 8, stores={"spill": store})
        asked, escalated = guard.asked, guard.escalated
        rounds(model, guard, 3, stores={"spill": store})
    assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))
    assert (guard.asked, guard.escalated) == (asked, escalated)
    assert escalated > 0 and reports[-1].device_nbytes < unguarded.device_nbytes
    assert len({report.device_nbytes for report in reports[2:]}) == 1


def test_values_are_held_as_planned_again_when_that_fits(tmp_path: Path) -> None:
    model, plan = planned()
    guard = Asked(plan, plan.budget, spill="spill")
    planned_nbytes = rounds(model, plan, 1)[1][-1].device_nbytes
    with DiskStore(tmp_path) as store:
        model.shift = 1.0
        rounds(model, guard, 4, stores={"spill": store})
        assert guard.escalated > 0
        model.shift = -2.0
        _, reports = rounds(model, guard, LOOK_AGAIN + 2, stores={"spill": store})
    assert reports[-1].device_nbytes == planned_nbytes


def test_the_report_says_what_was_planned_predicted_and_reached() -> None:
    model, plan = planned()
    _, reports = rounds(model, plan.guarded(), 3)
    assert any(note.startswith("budget") and "no step held more than planned" in note for note in reports[-1].notes)
    model.shift = 1.0
    _, reports = rounds(model, plan.guarded(), 3)
    assert any("above the plan" in note for note in reports[-1].notes)


def test_a_guard_of_a_budget_that_its_plan_exceeds_is_refused() -> None:
    _, plan = planned()
    with pytest.raises(PlanError, match=r"a guard was asked for .* predicted to take .* Make a plan"):
        plan.guarded(plan.peak_nbytes - 1)
    with pytest.raises(PlanError):
        plan.guarded("6 gigs")


def test_a_plan_that_keeps_everything_needs_no_guard() -> None:
    _, plan = planned("100%")
    assert plan.is_empty and plan.guarded() is plan

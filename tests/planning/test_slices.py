"""A course's computing between steps is divided into slices, and what it says of plain's time is plain's."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from simulated_clock import Clock
from step_problems import drawn_profile
from torch import nn

from backstash.planning.measure.profiling import profile
from backstash.planning.measure.survey import KeepForSurvey, Stopwatch, Survey
from backstash.planning.model.peak import PeakModel
from backstash.planning.model.plan import Plan
from backstash.planning.model.problem import StepProfile
from backstash.planning.run import course
from backstash.planning.run.budgeted import Budgeted
from backstash.planning.run.unhooked import Unhooked
from backstash.planning.search.greedy import Frontier, frontier
from backstash.planning.search.planner import Planner
from backstash.stash.value import Value
from tests.fuzz import interrupts

TICK = 0.001
"""How much later it is each time that the clock is asked."""


class Ticking(Clock):
    """A clock by which all that is computed between two looks at it takes a tick."""

    tick = TICK

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class Cells(nn.Module):
    """A cell in a Python loop."""

    def __init__(self, cells: int = 12) -> None:
        super().__init__()
        self.cells = cells
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for _ in range(self.cells):
            h = torch.tanh(self.a(x) + self.b(h))
        return h


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, compiles_nothing: None) -> Clock:
    found = Ticking()
    monkeypatch.setattr(course, "clock", found)
    monkeypatch.setattr(course, "PLAIN_STEPS", 3)
    monkeypatch.setattr(course, "MOST_TRIED", 64)
    monkeypatch.setattr(course, "LEAST", 20 * TICK)
    return found


class Loop:
    """A training loop in which plain steps take a second, or so many, and all others twice as long."""

    def __init__(self, session: Budgeted, clock: Clock, seconds: float = 1.0) -> None:
        self.model, self.x = Cells(), torch.randn(16, 32)
        self.session, self.clock, self.seconds = session, clock, seconds

    def step(self) -> float:
        """Runs a step, and returns by how much more the clock has moved than that."""
        with self.session:
            loss = self.model(self.x).square().mean()
            seconds = self.seconds if isinstance(self.session._session, Unhooked) else 2.0 * self.seconds
        began = self.clock.now
        self.clock.sleep(seconds)
        loss.backward()
        return self.clock.now - began - seconds


@pytest.mark.slow
def test_no_step_waits_for_the_search(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "SHARE", 0.1)
    monkeypatch.setattr(course, "SHARE_OF_PLAIN", 0.1)
    monkeypatch.setattr(course, "PATIENT", 10_000)  # or slices grow as long as there is no plan
    loop = Loop(Budgeted("80%", min_nbytes=256), clock)
    waited, plans = [], []
    for _ in range(400):
        waited.append(loop.step())
        plans.append(loop.session._session.policy)
    assert max(waited) <= 0.1 * 1.0 + 20 * TICK + 20 * TICK  # a slice, and the looks at the clock beside it
    found = loop.session.found
    assert found.plan is not None and found.plan.unknown == ()
    assert 0 < found.reached_nbytes <= found.budget_nbytes < found.plain_nbytes
    assert 0 < found.measured_seconds < sum(waited) and 8 < found.measured_passes < 400
    assert found.plain_seconds == pytest.approx(1.0, abs=10 * TICK)
    assert found.seconds == pytest.approx(2.0, abs=20 * TICK)
    assert "step 2.0" in str(found) or "step 1.9" in str(found)
    loop.session.close()


def test_what_keeps_a_budget_takes_no_time_of_plain_steps(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(Budgeted("80%", min_nbytes=256), clock)
    begin = Budgeted._begin

    def slowly(*args: Any) -> None:
        clock.sleep(1.0)
        begin(*args)

    monkeypatch.setattr(Budgeted, "_begin", slowly)
    while not loop.session.found.plain_seconds:
        loop.step()
    assert loop.session.found.plain_seconds == pytest.approx(1.0, abs=10 * TICK)
    loop.session.close()


@pytest.mark.parametrize(("seconds", "expected"), [(0.1, 6), (0.001, 8), (1.0, 3)])
def test_short_plain_steps_are_timed_more_often_in_a_row(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: float, expected: int
) -> None:
    """Of short steps, the first ones take longer than others."""
    monkeypatch.setattr(course, "PLAIN_SECONDS", expected * seconds - seconds / 2 if expected < 8 else 1.0)
    monkeypatch.setattr(Ticking, "tick", 0.0)
    loop = Loop(Budgeted("80%", min_nbytes=256), clock, seconds)
    kinds = []
    for _ in range(24):
        loop.step()
        kinds.append(isinstance(loop.session._session, Unhooked))
    first = kinds.index(True)
    assert kinds[first:].index(False) == expected
    loop.session.close()


@pytest.mark.slow
def test_a_plan_of_slices_is_the_one_that_is_found_at_once(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    profiles: list[StepProfile] = []
    made = course.profile_of

    def kept(*args: Any, **kwargs: Any) -> StepProfile:
        profiles.append(made(*args, **kwargs))
        return profiles[-1]

    monkeypatch.setattr(course, "profile_of", kept)
    monkeypatch.setattr(course, "WORTH", 0.0)
    loop = Loop(Budgeted("85%", min_nbytes=256), clock)
    while not (loop.session.last is not None and loop.session.last.is_done):
        loop.step()
    loop.session.close()
    (only,) = profiles
    budget = loop.session.nbytes_of(only.plain_peak_nbytes)
    bucket = next(iter(loop.session.buckets))
    assert bucket.planner is not None and bucket.planner.is_searched
    expected: Plan = Planner(StepProfile.from_json(bucket.planner.profile.to_json())).plan(budget - bucket.margin)
    assert bucket.plan is not None
    assert (bucket.plan.seconds, bucket.plan.peak_nbytes) == (expected.seconds, expected.peak_nbytes)


def test_plain_steps_have_no_hooks(clock: Clock) -> None:
    loop = Loop(Budgeted("80%", min_nbytes=256), clock)
    hooks = []
    for number in range(8):
        loop.model.register_forward_hook(
            lambda *_, at=number: hooks.append((at, len(nn.modules.module._global_forward_pre_hooks)))
        )
        with loop.session:
            loss = loop.model(loop.x).square().mean()
        loss.backward()
        loop.model._forward_hooks.clear()
    assert [at for at, hooked in hooks if not hooked][:3] == [2, 3, 4]
    loop.session.close()
    assert not nn.modules.module._global_forward_pre_hooks


@pytest.mark.slow
def test_a_loop_inside_of_one_with_goes_on_after_plain_steps(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "LEAST", 500 * TICK)

    def trained(session: Budgeted | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Cells()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def steps() -> None:
            for _ in range(40):
                optimizer.zero_grad()
                model(torch.randn(16, 32)).square().mean().backward()
                optimizer.step()

        if session is None:
            steps()
        else:
            with session:
                steps()
            session.close()
        return [weight.detach() for weight in model.parameters()]

    session = Budgeted("80%", min_nbytes=256)
    found = trained(session)
    assert all(torch.equal(x, y) for x, y in zip(trained(None), found, strict=True))
    assert session.found.plan is not None and 0 < session.found.reached_nbytes <= session.found.budget_nbytes


def test_values_that_are_alike_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the cell runs, the same is timed."""
    counts = []
    timed = Stopwatch.shortest

    def counted(self: Stopwatch, run: Any, whole: torch.Tensor) -> float:
        counts[-1] += 1
        return timed(self, run, whole)

    monkeypatch.setattr(Stopwatch, "shortest", counted)
    profiles = []
    for cells in (6, 24):
        counts.append(0)
        model, x = Cells(cells), torch.randn(16, 32)
        profiles.append(profile(lambda m=model, y=x: m(y).square().mean().backward(), model, min_nbytes=256))
    assert counts[0] == counts[1] <= 6
    remade = [[c for v in found.values for c in v.choices if c.kind == "recompute"] for found in profiles]
    assert len(remade[1]) >= len(remade[0]) + 17
    assert len({choice.seconds for choice in remade[1]}) <= 4


def test_the_recorded_step_tries_no_codec_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps before it have tried all of them, so its record is short and it waits for nothing."""
    tried: dict[str, int] = {}
    try_codecs = Survey._try_codecs

    def noted(survey: Survey, value: Value, *others: Any) -> None:
        tried[value.key] = tried.get(value.key, 0) + 1
        try_codecs(survey, value, *others)

    monkeypatch.setattr(Survey, "_try_codecs", noted)
    monkeypatch.setattr(course, "MOST_TRIED", 64)
    session, model, x = Budgeted("80%", min_nbytes=256), Cells(), torch.randn(16, 32)
    while session.found.plan is None:
        with session:
            loss = model(x).square().mean()
        loss.backward()
    assert len(tried) == 12 and set(tried.values()) == {1}, tried
    session.close()


@pytest.mark.parametrize("seed", range(4))
def test_the_search_finds_the_same_however_it_is_divided(seed: int) -> None:
    model = PeakModel(drawn_profile(seed, 16))
    divided, other = Frontier(model), Frontier(model)
    for _ in divided.search():
        divided.solutions()
        next(other.search(), None)  # another search beside it
    assert divided.solutions() == frontier(model)


def test_who_leaves_a_search_leaves_it_to_others() -> None:
    planner, expected = Planner(drawn_profile(1, 16)), Planner(drawn_profile(1, 16))
    budget = planner.profile.plain_peak_nbytes - 1
    leaving = planner.search()
    while not planner.has_found(budget) and not planner.is_searched:
        next(leaving, None)
    if planner.has_found(budget):
        assert planner.plan_so_far(budget).peak_nbytes <= budget
    leaving.close()
    assert planner.solutions == expected.solutions


def test_the_surveyed_step_finds_what_the_first_ones_have_taught(clock: Clock) -> None:
    """Else it would take as long as the first step of a model."""
    session = Budgeted("80%", min_nbytes=256)
    loop, found = Loop(session, clock), []
    for _ in range(12):
        loop.step()
        if isinstance(session.policy, KeepForSurvey):
            report = session._session.report()
            found.append((report.named, report.recognised))
    assert found[0][0] and not found[0][1]
    assert len(found) > 4 and all(named == recognised for named, recognised in found[1:])


def test_no_full_collection_falls_into_the_first_steps() -> None:
    """A collection of all that a process has imported takes longer than many small steps."""
    script = """
import gc, torch, backstash as bs
model = torch.nn.Sequential(*(layer for _ in range(12) for layer in (torch.nn.Linear(32, 32), torch.nn.Tanh())))
budget = bs.Budgeted("80%", min_nbytes=256)
before = gc.get_stats()[2]["collections"]
for _ in range(14):
    with budget:
        loss = model(torch.randn(16, 32)).square().mean()
    loss.backward()
print(gc.get_stats()[2]["collections"] - before)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "0"


def test_what_a_program_copies_between_steps_is_in_no_step() -> None:
    loop = interrupts.Budget()
    for number in range(interrupts.STEPS_OF_BUDGETS):
        copies = [x.detach().clone() for x in loop.weights]  # before those of the step before are freed
        loop.step(number)
        loop.update()
    found = loop.session.found
    loop.leave()
    assert 0 < found.reached_nbytes <= found.budget_nbytes and not found.trouble
    assert sum(copy.nbytes for copy in copies) > found.budget_nbytes - found.reached_nbytes


def test_recipes_are_proven_in_the_step_in_which_the_profiler_warms_up() -> None:
    """So the second step under a plan is counted already."""
    session, model = Budgeted("95%", min_nbytes=256), Cells()
    under_plan = 0
    while not session.found.reached_nbytes:
        with session:
            loss = model(torch.randn(16, 32)).square().mean()
        under_plan += session.found.plan is not None
        loss.backward()
        assert under_plan < 8, str(session.found)
    session.close()
    assert under_plan == 2

"""Profiles and plans of long steps run few of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn, randn

from backstash.planning.measure import profiling
from backstash.planning.measure.profiling import profile
from backstash.planning.search.planner import Planner
from backstash.session import Session


def counted(monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[[], None], nn.Module, list[float]]:
    """A step in which each run takes as long as a list says, its model, and that list."""
    model, x, times = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)), nn.GELU()), randn(64, 32), [1.0]
    run = profiling._Runs.run

    def timed(runs: profiling._Runs, session: object = None) -> None:
        run(runs, session)  # type: ignore[arg-type]
        runs.seconds = times.pop(0) if len(times) > 1 else times[0]

    def step() -> None:
        loss: Tensor = model(x).square().sum()
        loss.backward()

    monkeypatch.setattr(profiling._Runs, "run", timed)
    return step, model, times


def settled_sessions(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """A list of the Sessions that are asked to settle soon."""
    found: list[Session] = []
    settle = Session.settle_soon

    def noted(session: Session) -> None:
        found.append(session)
        settle(session)

    monkeypatch.setattr(Session, "settle_soon", noted)
    return found


@pytest.fixture
def program() -> tuple[nn.Module, Callable[[], None]]:
    """A network with statistics and dropout, and a step of it."""
    layers = [layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1))]
    model, x = nn.Sequential(*layers), randn(512, 64)

    def step() -> None:
        loss: Tensor = model(x).square().sum()
        loss.backward()

    return model, step


def test_a_profile_of_a_long_step_runs_it_four_times(monkeypatch: pytest.MonkeyPatch) -> None:
    step, model, times = counted(monkeypatch)
    times[:] = [9.0, 2.0, 9.0, 2.5, 77.0]  # a first one, a plain one, one that is surveyed, one with everything kept
    found = profile(step, model, min_nbytes=0)
    assert found.seconds == pytest.approx(2.0) and found.session_seconds == pytest.approx(0.5)
    assert times == [77.0]


def test_a_long_step_under_a_plan_is_timed_as_training_settles_down_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    step, model, times = counted(monkeypatch)
    found = profile(step, model, min_nbytes=0)
    assert found.clock is not None and found.rehearse is not None
    plan = Planner(replace(found)).plan("90%")  # a copy has no ways to run the step
    settled = settled_sessions(monkeypatch)
    times[:] = [9.0, 9.0, 1.08, 9.0, 0.9, 77.0]  # rehearsed; then one step under the plan, and two plain ones
    found.rehearse(plan)  # type: ignore[call-arg]  # no method
    assert found.clock(plan) == pytest.approx(1.08 / 0.9) and times == [77.0]
    times[:] = [9.0, 0.99, 77.0]  # plain steps were timed before, and are the latest ones: two steps under the plan
    assert found.clock(plan) == pytest.approx(1.1) and times == [77.0]
    times[:] = [9.0, 9.0, 1.35, 77.0]  # a plan that was not rehearsed: a first step, and then two
    assert found.clock(Planner(replace(found)).plan("80%")) == pytest.approx(1.5) and times == [77.0]
    assert len(settled) == 3 and settled[0] is settled[1] is not settled[2]


def test_the_step_behind_a_rehearsal_runs_programs(
    monkeypatch: pytest.MonkeyPatch, compiles_nothing: None, program: tuple[nn.Module, Callable[[], None]]
) -> None:
    model, step = program
    monkeypatch.setattr(profiling, "LONG", 0.0)
    monkeypatch.setattr(profiling, "ENOUGH", 1e-9)
    found = profile(step, model, min_nbytes=0)
    plan = Planner(replace(found)).plan("80%")
    replayed: list[bool] = []
    run = profiling._Runs.run

    def noted(runs: profiling._Runs, session: Session | None = None) -> None:
        run(runs, session)
        if session is not None:
            replayed.append(session._is_replayed)

    monkeypatch.setattr(profiling._Runs, "run", noted)
    assert found.clock is not None and found.rehearse is not None
    found.rehearse(plan)  # type: ignore[call-arg]  # no method
    found.clock(plan)
    assert replayed == [False, False, True]


def test_shorter_steps_are_timed_more_than_once(monkeypatch: pytest.MonkeyPatch) -> None:
    step, model, times = counted(monkeypatch)
    found = profile(step, model, min_nbytes=0)
    plan = Planner(replace(found)).plan("90%")
    assert found.clock is not None and found.rehearse is not None
    times[:] = [9.0, 9.0, 0.5, 0.4, 9.0, 0.3, 0.3, 0.2, 77.0]  # two steps under the plan, and three plain ones
    found.rehearse(plan)  # type: ignore[call-arg]  # no method
    assert found.clock(plan) == pytest.approx(0.4 / 0.2) and times == [77.0]


def test_trials_together_leave_everything_as_it_was_and_reach_what_each_reaches(
    program: tuple[nn.Module, Callable[[], None]],
) -> None:
    model, step = program
    found = profile(step, model, min_nbytes=0)
    plans = [Planner(replace(found)).plan(budget) for budget in ("90%", "80%")]
    assert found.rehearse is not None and found.together is not None
    alone = [found.rehearse(plan) for plan in plans]  # type: ignore[call-arg]  # no method
    before = {name: x.clone() for name, x in model.state_dict().items()}
    state = torch.get_rng_state()
    with found.together():  # type: ignore[misc]  # no method
        assert [found.rehearse(plan) for plan in plans] == alone  # type: ignore[call-arg]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state) and all(x.grad is None for x in model.parameters())
    assert [found.rehearse(plan) for plan in plans] == alone  # type: ignore[call-arg]


@pytest.mark.parametrize("together", [False, True])
def test_a_step_that_fails_in_trials_leaves_everything_as_it_was(
    together: bool, program: tuple[nn.Module, Callable[[], None]]
) -> None:
    model, step = program
    fails = [False]

    def failing() -> None:
        step()
        if fails[0]:
            raise RuntimeError("the loss is not finite")

    found = profile(failing, model, min_nbytes=0)
    plan = Planner(replace(found)).plan("80%")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    assert found.rehearse is not None and found.together is not None
    fails[0] = True
    with pytest.raises(RuntimeError, match="not finite"), found.together() if together else nullcontext():  # type: ignore[misc]
        found.rehearse(plan)  # type: ignore[call-arg]
    fails[0] = False
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(x.grad is None for x in model.parameters())
    assert max(found.rehearse(plan)) < found.plain_peak_nbytes  # type: ignore[call-arg]

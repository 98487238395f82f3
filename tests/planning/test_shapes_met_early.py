"""Shapes that are met before there is a plan for any of them run within the budget once there is one."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash import Budgeted
from backstash.planning.measure.survey import KeepForSurvey
from backstash.planning.run import course
from backstash.planning.run.buckets import MOST_COURSES, Bucket
from backstash.report.meter import CountedPeak

LENGTHS = [64, 48, 32, 40, 56, 64, 24]


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + F.dropout(self.narrow(F.gelu(self.wide(self.norm(x)))), 0.1)
        return found


class Loop:
    """A training whose sequences have one of some lengths, in turn."""

    def __init__(self, session: Any) -> None:
        torch.manual_seed(0)
        self.session = session
        self.model = nn.Sequential(nn.Embedding(100, 32), *(Block() for _ in range(4)), nn.Linear(32, 100))
        self.losses: list[Tensor] = []

    def step(self, length: int) -> None:
        """A step with sequences of that length."""
        x = torch.randint(0, 100, (8, length), generator=torch.Generator().manual_seed(length))
        with self.session:
            loss = F.cross_entropy(self.model(x).flatten(0, 1), x.flatten())
        loss.backward()
        self.losses.append(loss.detach())
        with torch.no_grad():
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter -= 0.01 * parameter.grad
                parameter.grad.zero_()

    def peak(self, length: int) -> int:
        """The counted peak of a step."""
        with CountedPeak() as counted:
            self.step(length)
        return counted.peak_nbytes


@pytest.mark.parametrize("rounds", [2, 4, 8])
@pytest.mark.parametrize("lengths", [LENGTHS, sorted(LENGTHS), sorted(LENGTHS, reverse=True)], ids=str)
def test_each_of_them_is_within_the_budget(lengths: list[int], rounds: int) -> None:
    plain = Loop(nullcontext())
    for length in lengths * rounds:
        plain.step(length)
    budget = int(0.75 * plain.peak(64))
    session = Budgeted(budget, min_nbytes=1024)
    loop, kept = Loop(session), 0
    for length in lengths * rounds:
        loop.step(length)
        assert session.last is not None
        kept += session.has_planned and isinstance(session.policy, KeepForSurvey)
    assert session.has_planned
    assert all(x.equal(y) for x, y in zip(plain.losses, loop.losses, strict=False))
    session.close()  # so that nothing is surveyed while it is counted
    assert all(loop.peak(length) <= budget for length in lengths)
    assert kept <= 3 * len(set(lengths))  # steps that are measured


def test_shapes_that_fit_without_a_plan_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []
    run = course.Course.run

    def noted(self: course.Course) -> Any:
        measured.append(self._bucket.signature)
        return run(self)

    monkeypatch.setattr(course.Course, "run", noted)
    plain = Loop(nullcontext())
    session = Budgeted(4 * plain.peak(64), min_nbytes=256)
    loop, lengths = Loop(session), list(range(16, 65, 4))
    drawn, unwatched = random.Random(0), 0
    for _ in range(45 * len(lengths)):
        loop.step(drawn.choice(lengths))
        if session._course is not None and session.last is not None and session.last.is_predicted:
            unwatched += session._session._live.watcher is None
    assert unwatched
    assert len(session.buckets) == len(lengths)
    assert session.is_quiet and sum(bucket.is_done for bucket in session.buckets) >= len(lengths) - 3
    assert len(measured) <= 3 * len(lengths), measured
    session.close()


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("share", [0.5, 0.7])
def test_steps_that_each_have_another_length(share: float, seed: int) -> None:
    """A plan comes soon, and from then on few passes take more than it says."""
    drawn = random.Random(seed)
    lengths = [drawn.randint(16, 64) for _ in range(200)]
    session = Budgeted(int(share * Loop(nullcontext()).peak(64)), min_nbytes=256)
    loop, kept, first = Loop(session), 0, 0
    for number, length in enumerate(lengths):
        is_planned = session.has_planned
        loop.step(length)
        first = first if session.has_planned else number + 1
        is_large = length > share * 64  # a plain step takes more than the budget
        kept += is_large and is_planned and isinstance(session.policy, KeepForSurvey)
    assert session.report().steps == len(lengths)
    assert first <= 40
    assert kept <= 3  # the second shape and the third
    assert sum(bucket.is_done for bucket in session.buckets) >= 0.8 * len(session.buckets)
    session.close()
    budget = session.found.budget_nbytes
    for length in sorted({*lengths[-12:]}):
        loop.step(length)  # which may be the first one since it was forgotten
        assert loop.peak(length) <= budget


def test_a_share_is_one_of_a_step_that_is_as_large_as_those_before() -> None:
    drawn = random.Random(3)
    session = Budgeted("60%", min_nbytes=256)
    loop = Loop(session)
    for _ in range(60):
        loop.step(drawn.randint(16, 64))
    largest = session.buckets.largest()
    assert session.has_planned and largest is not None and largest.signature[0][0][1] >= 40
    session.close()


def test_no_shape_is_begun_to_be_measured_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where lengths take turns, and none comes back in time."""
    begun: Counter[Any] = Counter()
    run = course.Course.run

    def noted(self: course.Course) -> Any:
        begun[self._bucket.signature] += 1
        return run(self)

    monkeypatch.setattr(course.Course, "run", noted)
    monkeypatch.setattr(course, "PATIENCE", 0)
    monkeypatch.setattr(course, "MOST_PATIENT", 0)
    session = Budgeted(4 * Loop(nullcontext()).peak(64), min_nbytes=256)
    loop = Loop(session)
    for length in [64, 32, 48, 24] * 40:
        loop.step(length)
    assert session.has_planned
    assert max(begun.values()) <= 2 * MOST_COURSES, begun
    session.close()


def test_a_network_that_is_trained_from_later_on_makes_steps_longer() -> None:
    """As a generator, whose critic comes first: it is no other shape of what is known."""
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 1))
    generator = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 64))
    session = Budgeted("300%", min_nbytes=1024)

    def step(model: nn.Module, x: Tensor) -> None:
        with session:
            loss = critic(model(x)).square().mean()
        loss.backward()

    for _ in range(40):
        step(nn.Identity(), torch.randn(64, 64))
    for _ in range(40):
        for _ in range(5):
            step(nn.Identity(), torch.randn(64, 64))
        step(generator, torch.randn(128, 32))
    assert session.period == 6
    session.close()


def test_plain_steps_of_other_shapes_tell_the_time_in_proportion() -> None:
    session = Budgeted("60%")
    small, large = (session.buckets.of((((4, length), "int64"),)) for length in (20, 60))
    measured = course.Course(session, large)
    measured._estimate = 9.0
    assert measured._seconds == 9.0
    measured._plain += [(small, 1.0)] * 3
    assert measured._seconds == pytest.approx(3.0)
    measured._plain += [(large, 60.0)]  # which has compiled something, or warmed something up
    assert measured._seconds == measured._plain_seconds == pytest.approx(3.0)
    measured._plain[-1] = large, 2.0
    assert measured._seconds == measured._plain_seconds == 2.0
    measured._plain[-1:] = [(large, 60.0)] * 2
    assert measured._seconds == 60.0
    session.close()


def test_a_second_shape_takes_the_share_of_recorded_time_that_the_first_one_had(
    monkeypatch: pytest.MonkeyPatch, compiles_nothing: None
) -> None:
    monkeypatch.setattr(course, "PLAIN_STEPS", 2)
    session = Budgeted("60%", min_nbytes=256)
    loop = Loop(session)
    for _ in range(60):
        loop.step(64)
    assert session.has_planned and session.buckets.recorded_share != 1.0
    session.buckets.recorded_share = share = 1e-4  # as if the profiler took most of the time
    for _ in range(30):
        loop.step(63)  # too near to be profiled for the sake of others
    first, second = (each.profile.seconds for each in session.buckets.planners)
    assert max(first, second) > 20 * min(first, second)
    assert session.buckets.recorded_share == share
    session.close()


def test_a_course_for_others_lends_its_session_to_the_recorded_step_alone() -> None:
    """And says nothing of the others' policies; what it has recorded is read, whatever comes meanwhile."""
    session = Budgeted("60%")
    session.has_planned, session.helps = True, lambda bucket: True  # type: ignore[method-assign]
    bucket = session.buckets.of((((4, 20), "int64"),))
    measured = course.Course(session, bucket, is_for_others=True)
    measured._keeping = lent = session.session_with(session.keeping(1))
    assert measured.measures(bucket) and not measured.directs(bucket)
    assert measured.session_for(bucket) is None
    measured._is_recording = True
    assert measured.session_for(bucket) is lent
    session.helps = lambda bucket: False  # type: ignore[method-assign]
    other = session.buckets.of((((4, 60), "int64"),))
    measured._has_recorded = True
    assert not any(measured.is_over(other) for _ in range(2 * course.MOST_PATIENT))
    measured._has_recorded = False
    assert measured.is_over(other)
    session.close()


def test_a_prediction_that_a_larger_shape_refutes_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Budgeted("70%", min_nbytes=256)
    session.is_hurried = True
    loop = Loop(session)
    for length in [64] * 30 + [24, 32, 40, 48] * 10:
        loop.step(length)
    signature = (((8, 28), "int64"),)
    found = session.buckets.predicted(signature, 256, None)
    assert found is not None and session.buckets._family is not None
    profile, most = found.profile, max(each.profile.plain_peak_nbytes for each in session.buckets.planners)
    monkeypatch.setattr(
        session.buckets._family[1], "profile", lambda *_: replace(profile, plain_peak_nbytes=most), raising=False
    )
    assert session.buckets.predicted(signature, 256, None) is None
    session.close()


def test_steps_of_other_shapes_are_not_awaited_for_long() -> None:
    session = Budgeted("60%")
    own, other = (session.buckets.of((((4, length), "int64"),)) for length in (20, 60))
    measured = course.Course(session, own)
    for last, expected in ((own, 64), (other, course.FEW + 1)):
        session.last = last
        assert sum(1 for _ in measured._steps_of_its_own(64, lambda: False)) == expected
    session.close()


def planned() -> tuple[Budgeted, Loop, Bucket]:
    """A loop whose first shape has a plan; others have not been awaited for as long as that is said to have taken."""
    session = Budgeted("50%", min_nbytes=256)
    session.is_hurried = True
    loop = Loop(session)
    for _ in range(12):
        loop.step(64)
    largest = session.buckets.largest()
    assert largest is not None
    largest.found = replace(largest.found, measured_passes=1000)
    return session, loop, largest


def test_shapes_help_whose_plain_steps_keep_the_budget() -> None:
    """Or, where none does, the smallest of those that come again."""
    session, _, largest = planned()
    large, small = (session.buckets.of((((8, length), "int64"),)) for length in (48, 24))
    assert session.has_planned and not session.buckets.may_follow
    assert session.helps(small) and not session.helps(large)
    large.met = 3
    assert session.helps(large)
    large.met = 0
    largest.found = replace(largest.found, measured_passes=1)
    assert session.helps(large)
    session._nbytes, small.met, large.met = 1, 3, 3  # as if none kept the budget
    assert session.helps(small) and not session.helps(large)
    small.offers = MOST_COURSES  # it was begun in vain
    assert session.helps(large)
    session.close()


def test_a_step_that_is_profiled_for_others_is_estimated_with_what_is_tried_in_it() -> None:
    """And where it is profiled although that is above the budget, because none comes that fits, it is told."""
    session, loop, largest = planned()
    assert largest.planner is not None
    tried = largest.planner.profile.trial_nbytes / largest.plain_nbytes
    assert tried > 0.05
    assert session.helps(session.buckets.of((((8, int(64 * 0.5 / (1 + 1.1 * tried))), "int64"),)))
    assert not session.helps(session.buckets.of((((8, int(64 * 0.5 / (1 + 0.8 * tried))), "int64"),)))
    told = []
    for _ in range(20):
        loop.step(48)
        told.append(session.found.trouble)
    assert any("with everything kept, which may take" in each for each in told) and not told[-1]
    assert session.found.plan is not None
    session.close()


def test_the_smallest_shapes_are_profiled_where_others_take_more_than_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[str] = []
    profile_of = course.Course._profile_of

    def noted(self: course.Course, *args: Any) -> Any:
        measured.append(self._bucket.inputs)
        return profile_of(self, *args)

    monkeypatch.setattr(course.Course, "_profile_of", noted)
    session = Budgeted("50%", min_nbytes=256)
    loop = Loop(session)
    for length in [64, 48, 40, 32, 24] * 16:
        loop.step(length)
    assert measured == [f"int64 [8, {length}]" for length in (64, 24, 32)]
    assert sum(bucket.is_predicted for bucket in session.buckets) == 2
    session.close()

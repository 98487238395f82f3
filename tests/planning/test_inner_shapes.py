"""Steps whose inputs have one shape, and whose values inside have others in each step, as those of experts have."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backstash import Budgeted, Session
from backstash.planning.measure.survey import KeepForSurvey, KindMeasurements, Survey
from backstash.report.meter import CountedPeak

pytestmark = pytest.mark.filterwarnings("ignore:the plan .* was asked for")


class Experts(nn.Module):
    """Two experts, of which the first one gets so many of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 32), nn.Dropout(0.1)) for _ in range(2)
        )
        self.first, self.more = 128, 0

    def forward(self, x: Tensor) -> Tensor:
        """Those of both."""
        x = torch.cat([x, x[: self.more]])
        one, other = self.experts
        return torch.cat([one(x[: self.first]), other(x[self.first :])]).tanh()


class Loop:
    """A training with them."""

    def __init__(self, session: Any) -> None:
        torch.manual_seed(0)
        self.session = session
        self.model = nn.Sequential(nn.Linear(16, 32), Experts(), Experts(), nn.Linear(32, 4))
        self.batch: Tensor | None = torch.randn(256, 16)  # held, so that it is no part of a step; None for others
        self.kept = 0  # steps in which everything was kept, since there was a plan

    def step(self, first: int, more: int = 0) -> None:
        """A step in which each first expert gets so many tokens, and both of the first layer so many more."""
        for layer in self.model:
            if isinstance(layer, Experts):
                layer.first, layer.more = first, more if layer is self.model[1] else 0
        had_plan = isinstance(self.session, Budgeted) and self.session.has_planned
        with self.session:
            loss = self.model(torch.randn(256, 16) if self.batch is None else self.batch).square().mean()
        loss.backward()
        self.model.zero_grad(set_to_none=False)
        self.kept += had_plan and isinstance(self.session.policy, KeepForSurvey)

    def peak(self, first: int, more: int = 0) -> int:
        """The counted peak of such a step."""
        with CountedPeak() as counted:
            self.step(first, more)
        return counted.peak_nbytes

    def steps(self, number: int, more: int = 0) -> None:
        """So many steps, in each of which experts get other numbers of tokens."""
        for each in range(number):
            self.step(100 + 11 * each % 56, more)


def begun(share: float) -> tuple[Loop, int]:
    """A loop with a plan for so much of what a plain step takes, and that budget."""
    plain = Loop(nullcontext())
    plain.step(128)
    budget = int(share * plain.peak(128))
    loop = Loop(Budgeted(budget, min_nbytes=1024))
    loop.steps(30)
    found = loop.session.found
    assert 0 < found.reached_nbytes <= budget and found.plan is not None and not found.plan.is_empty
    return loop, budget


def test_no_step_is_surveyed_for_values_of_other_shapes(compiles_nothing: None) -> None:
    loop, budget = begun(0.7)
    loop.steps(50)
    assert [bucket.surveys for bucket in loop.session.buckets] == [1] and loop.kept == 0
    assert not loop.session.found.trouble
    loop.session.close()  # so that no other profiler counts
    assert max(loop.peak(100 + 11 * each % 56) for each in range(20)) <= 1.05 * budget


def test_a_step_is_counted_whose_values_have_grown(compiles_nothing: None) -> None:
    """And as its plan takes too much then, there is a leaner one, without a step that keeps everything."""
    loop, budget = begun(0.9)
    loop.steps(60, more=64)
    assert [bucket.surveys for bucket in loop.session.buckets] == [1] and loop.kept == 0
    loop.session.close()
    assert max(loop.peak(100 + 11 * each % 56, more=64) for each in range(20)) <= 1.05 * budget


def test_choices_are_tried_until_no_step_has_a_new_name() -> None:
    """One value in each step, and no value in the shapes of all steps."""
    measured, surveys = KindMeasurements(), []
    loop = Loop(Session(KeepForSurvey(1), min_nbytes=1024, stop_if_useless=False))
    loop.batch = None
    for number in range(60):
        surveys.append(Survey(measured=measured, seconds=1e-9))
        with loop.session.watched_by(surveys[-1]):
            loop.step(64 + number)
        if surveys[-1].is_complete:
            break
    names = {key for key, *_ in measured.values}
    assert surveys[-1].is_complete and len(surveys) <= 2 * len(names) + 1
    assert {key.split("/")[0] for key in names} >= {"0", "1.experts.0.1", "2.experts.1.1"}

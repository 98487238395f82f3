"""Values that may be remade as well: no position takes more than before, however many of them are."""

from __future__ import annotations

import numpy as np
import pytest
from step_problems import drawn_profile

from backstash.planning.model.peak import PeakModel
from backstash.planning.search.planner import Planner
from backstash.planning.search.spare import spare_ways


@pytest.mark.parametrize("seed", range(60))
def test_the_first_spare_values_cause_no_peak_however_many_are_remade(seed: int) -> None:
    model = PeakModel(drawn_profile(seed))
    values = model.profile.values
    choices = [seed % len(value.choices) for value in values]
    if model.remakes_what_has_an_error(choices):
        choices = [0] * len(values)
    before = model.evaluate(choices)
    for peak_nbytes in (0, before.peak_nbytes, 2 * before.peak_nbytes):
        now = list(choices)
        for at in spare_ways(model, choices, peak_nbytes):
            assert values[at].choices[now[at]].kind == "keep"
            now[at] = next(n for n, choice in enumerate(values[at].choices) if choice.kind == "recompute")
            assert (model.evaluate(now).live <= np.maximum(before.live, peak_nbytes)).all()
            assert not model.remakes_what_has_an_error(now)


def test_a_plan_numbers_its_spare_values_in_their_order() -> None:
    numbered = 0
    for seed in range(20):
        planner = Planner(drawn_profile(seed))
        for solution in planner.solutions:
            decisions = planner.at_most(solution.peak_nbytes).decisions
            spare = sorted(decision.spare for decision in decisions if decision.spare)
            assert spare == list(range(1, len(spare) + 1))
            assert all(decision.kind == "keep" for decision in decisions if decision.spare)
            numbered += len(spare)
    assert numbered

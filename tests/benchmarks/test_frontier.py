"""The benchmark of the frontier, on a small network."""

from __future__ import annotations

import pytest

from benchmarks import frontier
from benchmarks.cases import Case
from benchmarks.rounds import Deadline, Effort


@pytest.mark.slow
def test_plans_keep_their_budgets() -> None:
    found = frontier.measure(Case("vgg_small", "vgg_small", 4, 32), Effort(1, Deadline.after(60)))
    by_name = {row.candidate: row for row in found.rows}
    assert {"plain", "checkpoint", "save_on_cpu", "lossless", "plan, 90%"} <= set(by_name)
    for row in found.rows:
        if row.budget_nbytes is not None and row.candidate != "plan, smallest budget":
            assert row.peak_nbytes <= row.budget_nbytes
    assert "plan, 90%" in frontier.show([found])


def test_the_blocks_of_a_network_are_its_repeated_modules() -> None:
    from benchmarks.networks import build

    assert len(frontier.blocks_of(build("resnet18", num_classes=10))) == 8

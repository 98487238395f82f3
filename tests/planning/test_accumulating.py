"""Loops that accumulate gradients over passes of different sizes: what is planned for is the pass that was surveyed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backstash.planning import course
from backstash.planning.budgeted import Budgeted
from backstash.planning.problem import StepProfile
from backstash.planning.profiling import profile_of
from backstash.planning.survey import Survey
from backstash.planning.timeline import Timeline

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(3):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers)


def trained(session: Any, sizes: Sequence[int], steps: int) -> list[Tensor]:
    """The gradients of all steps, each of which adds up those of batches of these sizes."""
    model, found = network(), list[Tensor]()
    for _ in range(steps):
        model.zero_grad()
        for size in sizes:
            with session:
                loss = model(torch.randn(size, 3, 16, 16)).square().mean() / len(sizes)
            loss.backward()
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return found


@pytest.mark.parametrize("sizes", [(8, 8, 4), (4, 8, 8), (4, 8), (8, 4, 4, 8)], ids=str)
def test_a_profile_is_of_the_pass_that_was_surveyed(sizes: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    profiled: list[int] = []

    def noted(line: Timeline, survey: Survey, *others: Any) -> StepProfile:
        assert line.born.keys() == survey.found.keys()
        assert list(line.trials) == list(range(survey.trials))
        together = sum(found.nbytes for found in survey.found.values())
        assert together <= max(position.most_nbytes for position in line.positions) < 2 * together
        profiled.append(together)
        return profile_of(line, survey, *others)

    monkeypatch.setattr(course, "profile_of", noted)
    session = Budgeted("70%")
    found = trained(session, sizes, 30)
    expected = trained(nullcontext(), sizes, 30)
    assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))
    assert len(profiled) == len(set(profiled)) == session.found.shapes == 2
    assert not session.found.trouble

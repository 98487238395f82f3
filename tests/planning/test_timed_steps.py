"""Times of steps are told of settled ones, beside plain ones of the same shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from backstash import Budgeted
from backstash.planning.run import course


class Network(nn.Module):
    """Layers with dropouts, whose values a plan makes again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows to a number."""
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.1)
        return x.square().mean()


def step(session: Budgeted, model: nn.Module, length: int) -> None:
    x = torch.randn(length, 32, generator=torch.Generator().manual_seed(length))
    with session:
        loss = model(x)
    loss.backward()
    model.zero_grad()


@pytest.fixture(autouse=True)
def plain_steps_are_timed(monkeypatch: pytest.MonkeyPatch, compiles_nothing: None) -> None:
    """As in any program."""
    monkeypatch.setattr(course, "PLAIN_STEPS", 2)


@pytest.mark.parametrize("share", ["70%", "100%"])
@pytest.mark.parametrize("lengths", [(512,), (512, 256)], ids=str)
def test_steps_have_settled_when_they_are_timed_last(
    share: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, session = Network(), Budgeted(share, min_nbytes=1024)
    timed: dict[int, list[bool]] = {}
    usual = course.usual

    def noted(times: Any) -> float:
        bucket, inner = session.last, session._session
        if bucket is not None and bucket.plan is not None and bucket.session is inner:
            if len(times) == 1:
                timed[id(bucket)] = []
            timed.setdefault(id(bucket), []).append(inner._is_replayed or inner._forward.is_idle)
        return usual(times)

    monkeypatch.setattr(course, "usual", noted)
    for _ in range(120 // len(lengths)):
        for length in lengths:
            step(session, model, length)
    assert timed and all(all(settled[2:]) and len(settled) > 3 for settled in timed.values()), timed
    session.close()


def test_nothing_is_said_of_shapes_of_which_no_plain_step_was_timed() -> None:
    model, session = Network(), Budgeted("70%", min_nbytes=1024)
    lengths = (512, 448, 384, 320, 256, 192)
    for _ in range(40):
        for length in lengths:
            step(session, model, length)
    found = [bucket.found for bucket in session.buckets]
    assert any("times plain's" in str(each) for each in found)
    predicted = [each for each in found if not each.plain_seconds]
    assert predicted and not any("times plain's" in str(each) for each in predicted)
    session.close()


@pytest.mark.parametrize("compiles", [False, True])
def test_steps_are_not_compared_with_plain_ones_that_have_kept_their_hooks(
    compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course, "may_compile", lambda: compiles)
    model, session = Network(), Budgeted("70%", min_nbytes=1024)
    for _ in range(60):
        step(session, model, 512)
    assert session.found.plan is not None and session.found.seconds > 0.0
    assert ("times plain's" in str(session.found)) == (not compiles)
    session.close()

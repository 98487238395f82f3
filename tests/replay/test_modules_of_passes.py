"""Modules of a settled pass are told late: what is saved after it was given back has the keys that it always has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backstash import Session
from backstash.policies import lossless
from backstash.stash import seams
from tests.replay.twins import STEPS


class Inner(nn.Module):
    """Two tangents, and an exponential between them if it is asked for."""

    has_more = False

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        x = x.tanh()
        if self.has_more:
            x = x.exp()
        return x.tanh()


class Outer(nn.Module):
    """Calls one module twice, between operations of its own; a backward pass may begin inside of it."""

    has_more = runs_backward = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(64, 64), Inner()

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        x = self.first(x).tanh()
        x = self.inner(x)
        if self.runs_backward:
            x.sum().backward(retain_graph=True)
            x = x.detach().requires_grad_()
        self.inner.has_more = self.has_more
        try:
            x = self.inner(x).tanh()
        finally:
            self.inner.has_more = False
        return x.exp().square().sum()


def opened_for(model: Outer, tells_calls_apart: bool, replays: bool, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A Session whose keys may tell calls of a module apart, as a plan's do, and that may replay passes."""
    policy: Any = lossless()
    if tells_calls_apart:
        object.__setattr__(policy, "cycles", 1)
    with monkeypatch.context() as changed:
        if not replays:
            changed.setattr(seams, "replays", None)
        return Session(policy, model=model, min_nbytes=0, stop_if_useless=False)


def keys(model: Outer, opened: Session, replays: bool, change: str) -> list[Any]:
    """Settles, changes the model, and steps on: the keys of the last two steps, and the gradients."""

    def step() -> list[str]:
        model.zero_grad()
        with opened:
            loss = model(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))
        loss.backward()
        return [row.key for row in opened.report().rows]

    for _ in range(STEPS):
        step()
    assert opened._is_replayed is replays
    setattr(model, change, True)
    return [step(), step(), [parameter.grad for parameter in model.parameters()]]


@pytest.mark.parametrize("change", ["has_more", "runs_backward"])
@pytest.mark.parametrize("tells_calls_apart", [False, True])
def test_what_is_saved_after_a_pass_was_given_back_has_its_own_key(
    change: str, tells_calls_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for replays in (True, False):
        torch.manual_seed(0)
        model = Outer()
        found.append(keys(model, opened_for(model, tells_calls_apart, replays, monkeypatch), replays, change))
    (broken, after, gradients), (expected, expected_after, expected_gradients) = found
    assert broken and broken == expected[-len(broken) :]
    assert after == expected_after
    assert all(a.equal(b) for a, b in zip(gradients, expected_gradients, strict=True))


@pytest.mark.parametrize("tells_calls_apart", [False, True])
def test_what_a_second_pass_of_a_step_saves_has_its_own_key(
    tells_calls_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for replays in (True, False):
        model = Outer()
        opened = opened_for(model, tells_calls_apart, replays, monkeypatch)
        for step in range(STEPS + 1):
            losses = []
            for _ in range(1 + (step == STEPS)):
                with opened:
                    losses.append(model(torch.randn(64, 64)))
            assert opened._is_replayed is (replays and step >= STEPS - 1)
            torch.stack(losses).sum().backward()
        found.append([row.key for row in opened.report().rows])
    assert any("@2" in key for key in found[1]) is tells_calls_apart
    assert found[0] == found[1]

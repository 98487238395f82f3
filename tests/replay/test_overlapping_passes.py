"""Backward passes of what a settled pass has left, behind forward passes that go the long way: as in pipelines."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from backstash import Session
from backstash.capture import learned
from backstash.policies import KeepAll, Policy

MIN_NBYTES = 1024
STEPS = 2 * learned.EQUAL_PASSES + 8


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def _batch(rows: int) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))


def _one_forward_one_backward(model: nn.Module, other: Tensor) -> list[Tensor]:
    x = _batch(16)
    first, second = model(x).sum(), model(x).mean()
    first.backward()
    third = model(other).square().mean()
    second.backward()
    fourth = model(x).square().sum()
    third.backward()
    fourth.backward()
    return [loss.detach() for loss in (first, second, third, fourth)]


@pytest.mark.parametrize("rows", [(16,), (17, 18, 19, 20, 21, 22, 23)], ids=["one size", "other sizes"])
@pytest.mark.parametrize("policy", ["lossless", KeepAll()], ids=str)
def test_each_backward_pass_ends_a_forward_pass(policy: str | Policy, rows: tuple[int, ...]) -> None:
    plain, model = _model(), _model()
    session = Session(policy, model=model, min_nbytes=MIN_NBYTES, stop_if_useless=False)
    begun = []
    for step in range(STEPS):
        other = _batch(rows[step % len(rows)])
        plain.zero_grad(), model.zero_grad()
        expected = _one_forward_one_backward(plain, other)
        with session:
            found = _one_forward_one_backward(model, other)
        begun.append(session.report().steps)
        assert all(a.equal(b) for a, b in zip(expected, found, strict=True))
        assert all(a.grad.equal(b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    assert begun == [3 * (step + 1) for step in range(STEPS)], session.report().programs()

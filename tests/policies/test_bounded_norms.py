"""Batch norms' inputs within bounds, and convolutions' inputs that are remade from them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comet_networks import Residual, normalised, sgd, train
from torch import Tensor, nn

from backstash import Session
from backstash.papers.comet import comet
from backstash.papers.comet.layers import overlapping, pattern, share_of


def test_a_batch_norm_has_the_predicted_error() -> None:
    model = normalised()
    optimizer = sgd(model)
    policy = comet("conv+norm", every=5, codec="sz", optimizer=optimizer, samples=4)
    _, session = train(model, optimizer, policy, 80)
    norms = {"1/NativeBatchNorm#0:input", "4/NativeBatchNorm#0:input"}
    assert norms < set(policy.bounds)
    rows = {row.key: row.codec.split("+")[0] for row in session.report().rows}
    assert {rows[key] for key in norms} == {"sz"}
    assert rows["3/Convolution#0:input"] == "recompute within"
    measured = [record for record in policy.history if record.key in norms and record.measured]
    ratios = [record.measured / record.predicted for record in measured]  # type: ignore[operator]
    assert len(ratios) > 10
    assert 0.8 < sorted(ratios)[len(ratios) // 2] < 1.2


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["szp", "sz"])
def test_a_convolution_with_a_remade_input_has_the_predicted_error(codec: str) -> None:
    plain, _ = train(model := Residual(), sgd(model), "keep", 60)
    model = Residual()
    optimizer = sgd(model)
    policy = comet("conv+norm", every=5, codec=codec, optimizer=optimizer, samples=4)
    losses, session = train(model, optimizer, policy, 60)
    assert sum(losses[-20:]) == pytest.approx(sum(plain[-20:]), abs=1.0)
    inputs = {f"convs.{number}/Convolution#0:input" for number in range(4)}
    rows = {row.key: row.codec for row in session.report().rows}
    assert {rows[key] for key in inputs} == {"recompute within"}
    assert set(policy.allotment.within) == inputs
    norms = {key: bound for key, bound in policy.allotment.bounds.items() if "BatchNorm" in key}
    assert all(bound <= policy.bounds[key] for key, bound in norms.items())
    assert any(bound < policy.bounds[key] for key, bound in norms.items())
    measured = [record for record in policy.history if record.key in inputs and record.measured and record.predicted]
    ratios = sorted(record.measured / record.predicted for record in measured)  # type: ignore[operator]
    assert len(ratios) > 8
    assert 0.8 < ratios[len(ratios) // 2] < 1.2
    wanted = sorted(record.measured / record.target for record in measured)  # type: ignore[operator]
    assert wanted[len(wanted) // 2] < 1.3


def test_results_of_exact_batch_norms_are_remade_exactly() -> None:
    model = Residual()
    policy = comet("conv", every=4, codec="sz")
    _, session = train(model, sgd(model), policy, 16)
    rows = {row.key: row.codec for row in session.report().rows}
    assert {rows[f"convs.{number}/Convolution#0:input"] for number in range(4)} == {"recompute"}
    assert policy.allotment.within == {}


def test_without_recomputation_nothing_is_remade() -> None:
    model = Residual()
    policy = comet("conv+norm", every=4, codec="sz", recompute=False)
    _, session = train(model, sgd(model), policy, 16)
    assert policy.bounds
    assert {row.codec.split("+")[0] for row in session.report().rows if "convs" in row.key} == {"signed sz"}
    assert policy.allotment.within == {}


def test_a_batch_norms_input_gradient_is_off_by_no_more_than_the_share() -> None:
    torch.manual_seed(0)
    norm, x = nn.BatchNorm2d(8), torch.randn(16, 8, 12, 12) * 3 + 1
    policy = comet("norm", sigma=0.02, every=1, samples=0, recompute=False)
    session = Session(policy, model=norm, min_nbytes=0)
    target = torch.randn_like(x)

    def gradient(manager: Any) -> Tensor:
        leaf = x.clone().requires_grad_()
        with manager:
            loss = (norm(leaf * 1.0) - leaf.detach().sign() - target).square().sum()
        loss.backward()
        assert leaf.grad is not None
        return leaf.grad

    expected = gradient(nullcontext())
    errors = [float((gradient(session) - expected).norm() / expected.norm()) for _ in range(4)]
    assert errors[0] == 0.0
    assert all(0.0 < error < 0.022 for error in errors[1:])


def test_a_batch_norm_that_uses_running_statistics_is_exact() -> None:
    model = normalised().eval()
    policy = comet("norm", every=1)
    train(model, sgd(model), policy, 6)
    assert policy.bounds == {}


def test_a_sum_has_the_errors_of_the_sum_before_only_where_both_are_not_zero() -> None:
    x = torch.tensor([[1.0, 0.0, 2.0, 3.0]]).expand(4, 4)
    y = torch.tensor([[1.0, 5.0, 0.0, 0.0]]).expand(4, 4)

    def overlap(source: Tensor, read: Tensor) -> float:
        counts = overlapping(source, read)
        return 1.0 if counts is None else share_of(*map(int, counts))

    assert overlap(pattern(x), pattern(x)) == 1.0
    assert overlap(pattern(y), pattern(x)) == pytest.approx(1 / 3)
    assert overlap(pattern(y[:, :3]), pattern(x)) == 1.0  # other positions
    assert overlap(pattern(y), pattern(torch.zeros(4, 4))) == 1.0
    assert pattern(torch.ones(100, 1000, 33, 33)).numel() <= 8 * 64 * 4 * 4
    assert pattern(torch.ones(0, 4)).numel() == 0


def test_a_long_chain_of_sums_has_the_predicted_error() -> None:
    """Each sum's errors are those of all batch norms before it, where no relu on the way has cut them off."""
    model = Chain(blocks := 6)
    optimizer = sgd(model)
    policy = comet("conv+norm", every=4, codec="sz", optimizer=optimizer, samples=100)
    train(model, optimizer, policy, 21)
    last = {f"convs.{number}/Convolution#0:input" for number in range(3, blocks)}
    assert all(len(policy.allotment.within[key]) > 3 for key in last)
    measured = [record for record in policy.history if record.key in last and record.measured and record.predicted]
    ratios = sorted(record.measured / record.predicted for record in measured)  # type: ignore[operator]
    assert len(ratios) >= 9
    assert 0.9 < ratios[len(ratios) // 2] < 1.1


class Chain(nn.Module):
    """Sums that a relu follows, one behind the other."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.Linear(16, 10)
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(blocks + 1))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.stem(x)))
        for conv, norm in zip(self.convs, self.norms[1:], strict=True):
            x = F.relu(norm(conv(x)) + x)
        logits: Tensor = self.head(x.mean([2, 3]))
        return logits

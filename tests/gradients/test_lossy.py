"""Policies with an error: what stays exact under them, and how far off the gradient is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash import Session, policies
from backstash.codecs import FewBit, Minifloat
from backstash.policies.base import Keep, Stash
from backstash.saved import Need, SavedTensor


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width in (3, 16, 16):
        layers += [nn.Conv2d(width, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 64, 10))


def gradients(model: nn.Module, x: Tensor, session: Session | None) -> list[Tensor]:
    model.zero_grad()
    with session or nullcontext():
        loss = F.cross_entropy(model(x), torch.arange(len(x)) % 10)
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def relative_error(got: list[Tensor], expected: list[Tensor]) -> float:
    difference = torch.cat([(a - b).flatten().double() for a, b in zip(got, expected, strict=True)])
    return float(difference.norm() / torch.cat([b.flatten().double() for b in expected]).norm())


@pytest.mark.parametrize(("format", "largest"), [("fp16", 2e-3), ("fp10", 5e-2), ("fp8", 0.1), ("float8_e4m3fn", 0.1)])
def test_gist_is_off_by_no_more_than_its_format(format: str, largest: float) -> None:
    model, x = convolutions(), torch.randn(8, 3, 16, 16)
    expected = gradients(model, x, None)
    session = Session(policies.gist(format), min_nbytes=64)
    error = relative_error(gradients(model, x, session), expected)
    assert 0 < error < largest
    assert session.report().ratio > {"fp16": 4, "fp10": 5}.get(format, 6)


def test_gist_lossless_is_exact() -> None:
    model, x = convolutions(), torch.randn(8, 3, 16, 16)
    expected = gradients(model, x, None)
    assert relative_error(gradients(model, x, Session("gist_lossless", min_nbytes=64)), expected) == 0


@pytest.mark.parametrize(("bits", "largest"), [(8, 2e-2), (4, 0.3), (2, 1.0)])
def test_quantized_is_off_by_no_more_than_its_steps(bits: int, largest: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    x = torch.randn(128, 64)
    expected = gradients(model, x, None)
    session = Session(policies.quantized(bits), min_nbytes=64)
    assert 0 < relative_error(gradients(model, x, session), expected) < largest
    assert any(row.codec == f"blockquant{bits}" for row in session.report().rows)


def test_quantized_lets_a_relu_decide_as_it_did() -> None:
    x, weight = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    with Session("quantized", min_nbytes=64) as session:
        loss = (torch.relu(x * 1.0) @ weight).sum()
    of_x, of_weight = torch.autograd.grad(loss, [x, weight])
    assert torch.equal(of_x != 0, x > 0)
    assert not torch.equal(of_weight, torch.relu(x.detach()).T @ torch.ones(64, 64))
    assert any(row.codec == "signed blockquant2" for row in session.report().rows)


def test_quantized_leaves_what_is_compared_with_another_number_exact() -> None:
    x, weight = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    with Session("quantized", min_nbytes=64) as session:
        y = torch.nn.functional.threshold_(x * 1.0, 0.5, 0.5)
        loss = (y @ weight).sum()
    (of_weight,) = torch.autograd.grad(loss, [weight])
    assert torch.equal(of_weight, x.detach().clamp(min=0.5).T @ torch.ones(64, 64))
    assert not any("blockquant" in row.codec for row in session.report().rows)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(64), nn.GroupNorm(32, 64), nn.LayerNorm([64, 8, 8])])
def test_quantized_leaves_the_statistics_of_normalisations_exact(norm: nn.Module) -> None:
    """A scale is one number for thousands of elements: between two others it would turn their gradients around."""
    torch.manual_seed(0)
    x = torch.randn(32, 64, 8, 8, requires_grad=True)
    with Session("quantized", min_nbytes=0) as session:
        loss = (norm(x * 1.0) * torch.randn(32, 64, 8, 8)).sum()
    loss.backward()
    codecs = {row.key.rsplit(":", 1)[1]: row.codec for row in session.report().rows if "Norm#" in row.key}
    assert codecs.pop("input") == "blockquant2"
    assert set(codecs) >= {"result1", "result2"}
    assert not [codec for codec in codecs.values() if "blockquant" in codec]


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 1e6])
def test_a_relu_lets_the_same_gradients_through(scale: float) -> None:
    """What would round to zero stays above it, so the relu that reads the reduced value decides as it did."""
    x = (torch.randn(64, 64) * scale).requires_grad_()
    weight = torch.randn(64, 64, requires_grad=True)
    with Session("gist_fp8", min_nbytes=64) as session:
        loss = (torch.relu(x) @ weight).sum()
    (grad,) = torch.autograd.grad(loss, [x])
    assert any("+fp8" in row.codec for row in session.report().rows)
    assert torch.equal(grad != 0, x > 0)


def test_a_clipped_relu_is_not_served_by_reduced_values() -> None:
    """Where it clips, 6, is no number that the format keeps sides of."""
    x = (torch.randn(64, 64) * 6).requires_grad_()
    weight = torch.randn(64, 64, requires_grad=True)
    with Session("gist_fp8", min_nbytes=64) as session:
        y = x * 1.0
        loss = F.relu6(y).sum() + (y @ weight).sum()
        del y
    (grad,) = torch.autograd.grad(loss, [x])
    assert not any("fp8" in row.codec for row in session.report().rows if "Hardtanh" in f"{row.key}{row.shared_by}")
    assert torch.equal((grad - weight.sum(1)).round(), ((x > 0) & (x < 6)).float())


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (F.gelu, "gelu"),
        (lambda x: F.gelu(x, approximate="tanh"), "gelu_tanh"),
        (F.silu, "silu"),
        (F.softplus, "softplus"),
    ],
)
def test_a_derivative_takes_a_few_bits(function: Callable[[Tensor], Tensor], name: str) -> None:
    x = torch.randn(128, 128, requires_grad=True)
    with Session(policies.gist("fp8", fewbit=3), min_nbytes=64) as session:
        loss = function(x * 1.0).sum()
    (grad,) = torch.autograd.grad(loss, [x])
    (expected,) = torch.autograd.grad(function(x).sum(), [x])
    row = next(row for row in session.report().rows if row.codec == f"{name}3")
    assert row.stash_nbytes == 128 * 128 * 3 // 8
    assert float((grad - expected).square().mean().sqrt()) < 1.2 * FewBit(name, 3).derivative_error.rms


def test_a_derivative_is_not_enough_for_another_reader() -> None:
    x, weight = torch.randn(128, 128, requires_grad=True), torch.randn(128, 128, requires_grad=True)
    with Session(policies.gist("fp8", fewbit=2), min_nbytes=64) as session:
        y = x * 1.0
        loss = (F.gelu(y) + y @ weight).sum()
        del y
    loss.backward()
    shared = next(row for row in session.report().rows if row.shared_by)
    assert shared.codec == "fp8"


class OnlyCodec:
    """A user's policy: one codec for every value."""

    def __init__(self, codec: Minifloat) -> None:
        self.codec = codec

    def decide(self, saved: SavedTensor) -> Keep | Stash:
        return Stash(self.codec) if saved.need is Need.VALUE else Keep()

    def observe(self, outcome: object) -> None: ...


def test_what_a_lossy_codec_may_not_serve_is_kept_and_said() -> None:
    x, weight = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    with Session(OnlyCodec(Minifloat("fp8")), min_nbytes=64) as session:
        loss = (torch.relu(x * 1.0) @ weight).sum()
    loss.backward()
    row = next(row for row in session.report().rows if row.shared_by)
    assert row.codec == "kept"
    assert row.reason == "fp8: backward of Relu reads on which side of a threshold it is"


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_other_dtypes_stay_exact(dtype: torch.dtype) -> None:
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    index = torch.randint(64, (64, 64))
    with Session("gist_fp8", min_nbytes=64) as session:
        loss = (x.exp() if dtype is torch.float64 else x.gather(0, index)).sum()
    (grad,) = torch.autograd.grad(loss, [x])
    assert not any("fp8" in row.codec for row in session.report().rows)
    (expected,) = torch.autograd.grad((x.exp() if dtype is torch.float64 else x.gather(0, index)).sum(), [x])
    assert torch.equal(grad, expected)

"""The error model predicts the error that real codecs cause."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from backstash.codecs import Sz, Szp
from backstash.papers.comet.bound import bound_for, channel_norms, comet_bound, coverage, predicted_sigma

BOUND = 2.0**-7


def uniform(x: Tensor) -> Tensor:
    """Adds the errors of the model: uniform within the bound, for elements that are not zero."""
    return x + torch.where(x != 0, torch.empty_like(x).uniform_(-BOUND, BOUND), 0.0)


def through(codec: Sz | Szp) -> Callable[[Tensor], Tensor]:
    return lambda x: codec.decode(codec.encode(x))


NOISES = {"uniform": uniform, "szp": through(Szp(BOUND)), "sz": through(Sz(BOUND, min_saving=0.0))}

GEOMETRIES: dict[str, dict[str, Any]] = {
    "3x3": {"input": (8, 16, 14, 14), "weight": (24, 16, 3, 3), "padding": (1, 1)},
    "unpadded": {"input": (8, 16, 14, 14), "weight": (24, 16, 3, 3)},
    "mostly padding": {"input": (64, 16, 4, 4), "weight": (24, 16, 5, 5), "padding": (2, 2)},
    "strided": {"input": (8, 16, 15, 15), "weight": (24, 16, 3, 3), "stride": (2, 2), "padding": (1, 1)},
    "1x1 strided": {"input": (8, 48, 16, 16), "weight": (32, 48, 1, 1), "stride": (2, 2)},
    "grouped": {"input": (8, 16, 12, 12), "weight": (32, 4, 3, 3), "padding": (1, 1), "groups": 4},
    "depthwise": {"input": (8, 64, 12, 12), "weight": (64, 1, 3, 3), "padding": (1, 1), "groups": 64},
    "dilated": {"input": (8, 16, 14, 14), "weight": (24, 16, 3, 3), "padding": (2, 2), "dilation": (2, 2)},
    "oblong": {"input": (8, 16, 20, 9), "weight": (24, 16, 5, 1), "stride": (1, 2), "padding": (2, 0)},
    "1-d": {"input": (16, 16, 60), "weight": (24, 16, 3), "stride": (1,), "padding": (1,), "dilation": (1,)},
    "transposed": {"input": (8, 24, 9, 9), "weight": (24, 16, 3, 3), "stride": (2, 2), "transposed": True},
}


def weight_gradient(grad: Tensor, x: Tensor, case: dict[str, Any]) -> Tensor:
    dims = len(case["input"]) - 2
    stride, dilation = case.get("stride", (1,) * dims), case.get("dilation", (1,) * dims)
    padding, transposed = case.get("padding", (0,) * dims), case.get("transposed", False)
    geometry = (stride, padding, dilation, transposed, (0,) * dims, case.get("groups", 1))
    weight = torch.zeros(case["weight"])
    return torch.ops.aten.convolution_backward(grad, x, weight, None, *geometry, [False, True, False])[1]


@pytest.mark.cases(10)
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_convolution_has_the_predicted_error(name: str, sparse: bool, noise: str) -> None:
    torch.manual_seed(0)
    case = GEOMETRIES[name]
    dims = len(case["input"]) - 2
    stride, dilation = case.get("stride", (1,) * dims), case.get("dilation", (1,) * dims)
    padding, transposed, groups = case.get("padding", (0,) * dims), case.get("transposed", False), case.get("groups", 1)
    x = torch.randn(case["input"])
    x = x.relu() if sparse else x
    weight = torch.zeros(case["weight"])
    y = torch.ops.aten.convolution(x, weight, None, stride, padding, dilation, transposed, (0,) * dims, groups)
    loudness = torch.linspace(0.5, 3.0, y.shape[1]).reshape(-1, *[1] * dims)
    grad = torch.randn(y.shape) * loudness
    error = weight_gradient(grad, NOISES[noise](x) - x, case)

    share = float((x != 0).float().mean()) * coverage(
        x.shape[2:], y.shape[2:], weight.shape[2:], stride, padding, dilation, transposed
    )
    sigma = predicted_sigma(BOUND, channel_norms(grad), share)
    assert float(error.square().mean().sqrt()) == pytest.approx(float(sigma.square().mean().sqrt()), rel=0.1)
    by_channel = error.transpose(0, 1) if transposed else error
    loud = len(sigma) // 2  # the louder half and the quieter half, each by itself
    for half in (slice(None, loud), slice(loud, None)):
        measured = float(by_channel[half].square().mean().sqrt())
        assert measured == pytest.approx(float(sigma[half].square().mean().sqrt()), rel=0.12)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("shape", [(256, 48), (4, 64, 48)])
def test_a_linear_layer_has_the_predicted_error(shape: tuple[int, ...], noise: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).relu()
    grad = torch.randn(*shape[:-1], 40)
    error = grad.flatten(0, -2).T @ (NOISES[noise](x) - x).flatten(0, -2)
    sigma = predicted_sigma(BOUND, channel_norms(grad, -1), float((x != 0).float().mean()))
    assert float(error.square().mean().sqrt()) == pytest.approx(float(sigma.square().mean().sqrt()), rel=0.1)


def test_the_bound_is_the_predictions_inverse() -> None:
    norms = torch.rand(16) + 0.1
    rms, each = (predicted_sigma(bound_for(0.02, norms, 0.4, how), norms, 0.4) for how in ("rms", "each"))
    assert float(rms.square().mean().sqrt()) == pytest.approx(0.02)
    assert float(each.max()) == pytest.approx(0.02)


def test_no_gradient_takes_any_bound() -> None:
    assert bound_for(0.1, torch.zeros(4)) == math.inf
    assert bound_for(0.1, torch.ones(4), share=0.0) == math.inf
    assert bound_for(0.1, torch.zeros(0)) == math.inf


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, math.inf])
def test_a_sigma_that_is_not_above_zero_is_refused(sigma: float) -> None:
    with pytest.raises(ValueError, match=r"bound_for was asked for sigma=.* finite number above zero"):
        bound_for(sigma, torch.ones(2))


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("channels", ["rms", "each"])
def test_norms_that_are_not_finite_are_refused(number: float, channels: Any) -> None:
    with pytest.raises(ValueError, match=r"needs finite ones"):
        bound_for(0.1, torch.tensor([1.0, number]), channels=channels)


def test_other_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a share is from 0 to 1"):
        bound_for(0.1, torch.ones(2), share=1.5)
    with pytest.raises(ValueError, match=r"there are 'rms' and 'each'"):
        bound_for(0.1, torch.ones(2), channels="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"predicted_sigma was asked for bound=-1"):
        predicted_sigma(-1.0, torch.ones(2))


def test_comets_equation() -> None:
    assert comet_bound(0.01, loss_gradient=0.5, batch=16, nonzero=0.25) == pytest.approx(0.01 / (0.32 * 0.5 * 2.0))
    with pytest.raises(ValueError, match=r"comet_bound was asked for sigma=0"):
        comet_bound(0.0, 0.5, 16, 0.25)


def test_comets_equation_depends_on_the_images_size_and_the_gradients_kind() -> None:
    """The ratio of the right bound to COMET's is not constant, so COMET's equation is not used."""
    torch.manual_seed(0)
    off = []
    for size in (8, 32):
        grad = torch.randn(16, 8, size, size)
        largest = float(grad.flatten(1).abs().amax(1).mean())
        off.append(bound_for(0.1, channel_norms(grad)) / comet_bound(0.1, largest, 16, 1.0))
    assert off[0] > 2.5 * off[1]

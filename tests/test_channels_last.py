"""Convolutions' weights go into channels last if a step computes the same then, and come back."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import pytest
import torch
from rewrite_checks import Net, conv, step_of
from torch import Tensor, nn

from backstash import Session
from backstash.errors import RewriteError
from backstash.rewrites import channels_last
from backstash.rewrites.differences import largest_distance
from backstash.testing import equal_bits
from tests import networks

Layouts = dict[str, tuple[tuple[int, ...], Tensor, Tensor | None]]


def layouts(model: nn.Module) -> Layouts:
    """Strides, numbers and gradients of every parameter."""
    return {path: (x.stride(), x.detach().clone(), x.grad) for path, x in model.named_parameters()}


def unchanged(model: nn.Module, before: Layouts) -> bool:
    return all(
        x.stride() == before[path][0] and equal_bits(x, before[path][1]) and x.grad is before[path][2]
        for path, x in model.named_parameters()
    )


@pytest.mark.parametrize("policy", [None, "lossless"])
def test_a_network_is_changed_and_restored(policy: str | None) -> None:
    torch.manual_seed(0)
    model = networks.resnet_cifar(8)
    step = step_of(model, 2, 3, 16, 16)
    before, parameters = layouts(model), list(model.parameters())
    with channels_last(model, step, session=None if policy is None else Session(policy, min_nbytes=0)) as rewrite:
        assert len(rewrite.changed) >= 7 and rewrite.steps == 4
        assert 0.0 <= rewrite.distance < 3e-4
        assert model(torch.randn(2, 3, 16, 16)).shape == (2, 10)
        assert "convolutions in channels last" in str(rewrite)
        for path in rewrite.changed:
            weight = model.get_submodule(path).get_parameter("weight")
            assert weight.is_contiguous(memory_format=torch.channels_last)
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    assert unchanged(model, before)
    rewrite.undo()
    assert unchanged(model, before)


def test_the_whole_network_computes_in_channels_last() -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), conv(), nn.MaxPool2d(2), conv())
    seen: list[bool] = []
    with channels_last(model, step_of(model)):
        for layer in model:
            layer.register_forward_hook(
                lambda _, __, y: seen.append(y.is_contiguous(memory_format=torch.channels_last))
            )
        model(torch.randn(2, 4, 8, 8))
    assert seen == [True] * 6


def test_what_was_trained_meanwhile_stays() -> None:
    model = nn.Sequential(conv(), nn.ReLU(), conv())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with channels_last(model, step := step_of(model)):
        for _ in range(2):
            optimizer.zero_grad()
            step()
            optimizer.step()
        trained = [x.detach().clone() for x in model.parameters()]
    assert all(equal_bits(now, then) for now, then in zip(model.parameters(), trained, strict=True))
    assert all(x.is_contiguous() and x.grad is not None and x.grad.is_contiguous() for x in model.parameters())


def in_memory_order(net: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = net.get_submodule("first")(x)
    return torch.as_strided(y, (y.shape[0], y[0].numel()), (y[0].numel(), 1)).cumsum(1)


def viewed(net: nn.Module, x: Tensor) -> Tensor:
    return net.get_submodule("first")(x).view(x.shape[0], -1)


@pytest.mark.parametrize(
    ("function", "reason"),
    [(in_memory_order, "0.00035 is allowed for rounding.*keep the layout"), (viewed, "RuntimeError.*Use reshape")],
)
def test_a_model_that_reads_memory_in_order_is_refused(
    function: Callable[[nn.Module, Tensor], Tensor], reason: str
) -> None:
    model = Net(function, first=conv())
    model.get_parameter("first.weight").grad = torch.ones(4, 4, 3, 3)
    before = layouts(model)
    with pytest.raises(RewriteError, match=f"channels_last was asked to change the layout of Net.*{reason}"):
        channels_last(model, step_of(model))
    assert unchanged(model, before)


def test_a_step_that_differs_each_time_is_refused() -> None:
    model, calls = nn.Sequential(conv()), []

    def step() -> Tensor:
        calls.append(1)
        loss = model(torch.full((2, 4, 8, 8), float(len(calls)))).sum()
        loss.backward()
        return loss.detach()

    with pytest.raises(RewriteError, match="channels_last was asked to compare steps of Sequential, but two plain"):
        channels_last(model, step)
    assert model[0].weight.is_contiguous()


def test_a_model_without_convolutions_has_nothing_to_change() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(4, 4, 1))  # one tap has the same layout in both
    with pytest.raises(RewriteError, match="no convolution among its 3 modules"):
        channels_last(model, step_of(model, 2, 4))


@pytest.mark.parametrize("tolerance", [-1.0, math.nan, math.inf])
def test_a_tolerance_is_a_number(tolerance: float) -> None:
    with pytest.raises(ValueError, match="channels_last was asked for tolerance="):
        channels_last(nn.Sequential(conv()), lambda: None, tolerance=tolerance)


def test_a_tolerance_may_ask_for_equal_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["backstash.rewrites.channels_last"]
    model = nn.Sequential(conv(), conv())
    before, step = layouts(model), step_of(model)
    monkeypatch.setattr(module, "largest_distance", lambda plain, other: (0.0, ""))
    with channels_last(model, step, tolerance=0.0) as rewrite:
        assert "their bits are equal" in str(rewrite)
    monkeypatch.setattr(module, "largest_distance", lambda plain, other: (1e-9, "the gradient of 0.weight"))
    with pytest.raises(RewriteError, match="the gradient of 0.weight is 1e-09 of its length away then, where 0 is"):
        channels_last(model, step, tolerance=0.0)
    assert unchanged(model, before)


def test_a_gradient_that_is_there_keeps_its_place_and_its_numbers() -> None:
    model = nn.Sequential(conv())
    weight = model[0].weight
    gradient = weight.grad = torch.randn_like(weight)
    numbers = gradient.clone()
    with channels_last(model, step_of(model)):
        assert weight.grad is gradient and gradient.stride() == weight.stride()
        assert equal_bits(gradient, numbers)
    assert weight.grad is gradient and gradient.is_contiguous() and equal_bits(gradient, numbers)


@pytest.mark.parametrize(
    ("plain", "other", "distance"),
    [
        (torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]), 0.1),
        (torch.tensor([3.0, 4.0]), torch.tensor([3.0, math.nan]), math.inf),
        (torch.tensor([math.nan]), torch.tensor([math.nan]), 0.0),
        (torch.tensor([3]), torch.tensor([4]), math.inf),
        (torch.tensor([3.0]), None, math.inf),
        (None, None, 0.0),
        (torch.zeros(2), torch.zeros(2), 0.0),
    ],
)
def test_the_distance_of_numbers(plain: Tensor | None, other: Tensor | None, distance: float) -> None:
    assert largest_distance({"loss": plain}, {"loss": other})[0] == pytest.approx(distance)


def test_a_gradient_that_is_rounding_alone_is_no_distance() -> None:
    plain: dict[str, Tensor | None] = {
        "the gradient of weight": torch.ones(10000),
        "the gradient of bias": torch.tensor([1e-9]),
    }
    other = plain | {"the gradient of bias": torch.tensor([-1e-9])}
    assert largest_distance(plain, other)[0] < 1e-6
    assert largest_distance(plain, {})[0] == math.inf


def test_volumes_are_changed_too() -> None:
    model = nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU(), nn.ConvTranspose3d(4, 2, 3))
    with channels_last(model, step_of(model, 2, 2, 6, 6, 6)) as rewrite:
        assert rewrite.changed == ("0", "2")
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert model[0].weight.is_contiguous()

"""The allowed error does not depend on what becomes of gradients between backward and the optimizer's step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comet_networks import batches, network, sgd
from torch import Tensor, nn

from backstash import Session
from backstash.papers.comet import Comet, comet

STEPS = 14


def learned(
    change: Callable[[nn.Module, torch.optim.SGD], None] = lambda model, optimizer: None,
    rate: float = 0.05,
    loss_scale: float = 1.0,
    wrapped: bool = False,
) -> dict[str, float]:
    """Returns the bounds after a short training whose gradients are changed before the optimizer's step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    policy = comet(every=4, optimizer=Around(optimizer) if wrapped else optimizer, samples=0)  # type: ignore[arg-type]
    session = Session(policy, model=model, min_nbytes=0)
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        with session:
            loss = F.cross_entropy(model(x), y) * loss_scale
        loss.backward()
        change(model, optimizer)
        optimizer.step()
    return policy.bounds


class Around:
    """An optimizer around another one, as frameworks have it, which has no hooks of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.state = optimizer, optimizer.state


def multiply(factor: float) -> Callable[[nn.Module, torch.optim.SGD], None]:
    def change(model: nn.Module, optimizer: torch.optim.SGD) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= factor

    return change


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("factor", [1 / 128, 32.0])
def test_gradients_that_are_multiplied_leave_the_bounds_alone(factor: float, wrapped: bool) -> None:
    assert learned(multiply(factor), 0.05 / factor, wrapped=wrapped) == pytest.approx(learned(), rel=0.01)


def test_clipping_every_step_leaves_the_bounds_alone() -> None:
    """The smallest norm of these steps is above 0.01, so all gradients are clipped to one norm, at any loss scale."""

    def clip(model: nn.Module, optimizer: torch.optim.SGD) -> None:
        assert float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)) > 0.01

    assert learned(clip, 5.0, loss_scale=64.0) == pytest.approx(learned(clip, 5.0), rel=0.01)


def test_a_loss_scale_leaves_the_bounds_alone() -> None:
    assert learned(multiply(1 / 1024), loss_scale=1024.0) == pytest.approx(learned(), rel=0.01)


def test_passes_that_are_added_up_share_the_error() -> None:
    """Two equal passes double the gradient and the momentum, but not what one pass computes. The bounds stay."""

    def bounds(passes: int) -> dict[str, float]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05 / passes, momentum=0.9)
        policy = comet(every=1, optimizer=optimizer, samples=0)
        session = Session(policy, model=model, min_nbytes=0)
        for x, y in batches(6):
            optimizer.zero_grad()
            for _ in range(passes):
                with session:
                    loss = F.cross_entropy(model(x), y)
                loss.backward()
            optimizer.step()
        with session:  # the last step's readings
            model(x)
        return policy.bounds

    once, twice = bounds(1), bounds(2)
    assert once.keys() == twice.keys()
    assert all(twice[key] == pytest.approx(once[key], rel=0.05) for key in once)


@pytest.mark.parametrize("every", [3, 4, 5, 8])
def test_a_collection_among_passes_that_are_added_up_waits_for_the_optimizer(every: int) -> None:
    """Whichever of the passes collects: what becomes of a loss scale is seen at the step behind it."""

    def bounds(loss_scale: float) -> dict[str, float]:
        torch.manual_seed(0)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        policy = comet(every=every, optimizer=optimizer, samples=0)
        session = Session(policy, model=model, min_nbytes=0)
        for number, (x, y) in enumerate(batches(48)):
            with session:
                loss = F.cross_entropy(model(x), y) * loss_scale / 4
            loss.backward()
            if number % 4 == 3:
                multiply(1 / loss_scale)(model, optimizer)
                optimizer.step()
                optimizer.zero_grad()
        return policy.bounds

    plain, scaled = bounds(1.0), bounds(1024.0)
    assert plain and plain.keys() == scaled.keys()
    assert all(scaled[key] == pytest.approx(plain[key], rel=0.01) for key in plain)


def test_the_hook_dies_with_the_policy() -> None:
    model = network()
    optimizer = sgd(model)
    policy: Comet | None = comet(optimizer=optimizer)
    assert hooks(optimizer) == 1
    del policy
    gc.collect()
    assert hooks(optimizer) == 0


def hooks(optimizer: Any) -> int:
    return len(optimizer._optimizer_step_pre_hooks)


def test_a_gradient_that_is_gone_leaves_the_scale_alone() -> None:
    model = network()
    optimizer = sgd(model)
    policy = comet(every=2, optimizer=optimizer)
    session = Session(policy, model=model, min_nbytes=0)
    for x, y in batches(6):
        with session:
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.zero_grad()
        optimizer.step()
    assert policy.bounds and all(bound > 0 for bound in policy.bounds.values())


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Of a critic, for real and false images."""


def off(make: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer], losses: list[Loss]) -> tuple[float, float]:
    """How far COMET puts a weight gradient off at sigma 1 %: as a share of the momentum's magnitude, and of its own.

    Args:
        make: the optimizer.
        losses: one for each backward pass of a step.
    """
    torch.manual_seed(0)
    layers = [layer for size in (3, 16) for layer in (nn.Conv2d(size, 16, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1))
    weight = model.get_parameter("2.weight")
    optimizer = make(model.parameters())
    session = Session(comet("conv", every=8, optimizer=optimizer), model=model, min_nbytes=1024)
    found = []
    for step in range(34):
        images = [torch.randn(64, 3, 16, 16) + 2 for _ in range(2)]
        grads = []
        for inside in (nullcontext(), session):
            optimizer.zero_grad()
            for loss in losses:
                with inside:
                    total = loss(model, *images)
                total.backward()
            assert weight.grad is not None
            grads.append(weight.grad.clone())
        optimizer.step()
        if step >= 30:
            error = (grads[1] - grads[0]).square().mean().sqrt()
            momentum = optimizer.state[weight].get("momentum_buffer", grads[0])
            found.append((float(error / momentum.abs().mean()), float(error / grads[0].abs().mean())))
    return max(share for share, _ in found), max(share for _, share in found)


@pytest.mark.parametrize(
    "losses",
    [
        [lambda model, real, false: model(real).mean() - model(false).mean()],
        [lambda model, real, false: model(real).mean(), lambda model, real, false: -model(false).mean()],
    ],
    ids=["two calls", "two passes"],
)
def test_gradients_that_cancel_each_other_out_have_the_wanted_error(losses: list[Loss]) -> None:
    """A critic's gradients of real and false images are almost alike; their errors are not."""
    of_momentum, _ = off(lambda weights: torch.optim.SGD(weights, 1e-3, momentum=0.5), losses)
    assert of_momentum < 0.03


class OfUpdates(torch.optim.SGD):
    """Its momentum is a mean of updates, not of gradients, as that of transformers' Adafactor."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Moves each weight by the signs of its gradient's elements."""
        for weight in self.param_groups[0]["params"]:
            state, update = self.state[weight], weight.grad.sign() * self.param_groups[0]["lr"]
            mean = state["mean"] = update if "mean" not in state else state["mean"].lerp(update, 0.1)
            weight.data.sub_(mean)
            state["exp_avg"] = self.kept(mean)

    def kept(self, mean: Tensor) -> Tensor:
        """What it has of the mean."""
        return mean


class Projected(OfUpdates):
    """Has the mean in fewer dimensions, as GaLore."""

    def kept(self, mean: Tensor) -> Tensor:
        """Sums over the first dimension."""
        return mean.sum(0)


class Coded(OfUpdates):
    """Has codes of the mean, of a byte each."""

    def kept(self, mean: Tensor) -> Tensor:
        """Signs."""
        return mean.sign().to(torch.int8)


@pytest.mark.parametrize(
    "make",
    [
        lambda weights: torch.optim.RMSprop(weights, 1e-4, momentum=0.9),
        lambda weights: OfUpdates(weights, 1e-4),
        lambda weights: Projected(weights, 1e-4),
        lambda weights: Coded(weights, 1e-4),
    ],
    ids=["RMSprop", "updates", "projected", "coded"],
)
def test_a_momentum_that_is_not_made_of_gradients_is_none(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    _, of_gradient = off(make, [lambda model, real, false: model(real)[:, 0] @ torch.linspace(-1.0, 1.0, 64)])
    assert 0.001 < of_gradient < 0.03


@pytest.mark.parametrize(
    "make",
    [
        lambda weights: torch.optim.SGD(weights, 1e-3, momentum=0.9, dampening=0.5, weight_decay=0.1),
        lambda weights: torch.optim.SGD(weights, 1e-3, momentum=0.9, nesterov=True, maximize=True),
        lambda weights: torch.optim.Adam(weights, 1e-3, weight_decay=0.1),
        lambda weights: torch.optim.AdamW(weights, 1e-3, amsgrad=True),
        lambda weights: torch.optim.NAdam(weights, 1e-3),
        lambda weights: torch.optim.Adamax(weights, 1e-3),
    ],
    ids=["SGD", "Nesterov", "Adam", "AdamW", "NAdam", "Adamax"],
)
def test_a_momentum_that_is_made_of_gradients_is_one(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = network()
    optimizer = make(model.parameters())
    policy = comet(every=4, optimizer=optimizer, samples=0)
    session = Session(policy, model=model, min_nbytes=0)
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Conv2d)]
    for x, y in batches(4):
        optimizer.zero_grad()
        with session:
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert [float(mean) for weight in weights if (mean := policy._momentum.mean_of(weight)) is not None] == [
        pytest.approx(float(momentum_in(optimizer, weight).abs().mean())) for weight in weights
    ]


def momentum_in(optimizer: torch.optim.Optimizer, weight: Tensor) -> Tensor:
    """As the optimizer has it."""
    state = optimizer.state[weight]
    found: Tensor = state["momentum_buffer"] if "momentum_buffer" in state else state["exp_avg"]
    return found

"""The allowed error does not depend on what becomes of gradients between backward and the optimizer's step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comet_networks import batches, network, sgd
from torch import nn

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

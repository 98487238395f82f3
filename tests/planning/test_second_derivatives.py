"""Budgets for steps that differentiate their backward passes: equations with second derivatives, forces, penalties."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from tests.networks.blocks import Attention

WIDTH, POINTS = 64, 256


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "sine": Sine,
    "gelu": nn.GELU,
}


def derivative(of: Tensor, by: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(of.sum(), by, create_graph=True)
    return found


def heat(model: nn.Module, x: Tensor) -> None:
    """u_t = u_xx."""
    slope = derivative(model(x), x)
    curve = derivative(slope[:, 0], x)
    (slope[:, 1] - curve[:, 0]).square().mean().backward()


def laplace(model: nn.Module, x: Tensor) -> None:
    """u_xx + u_yy = 0, with a second pass of the model for the boundary after the derivatives."""
    slope = derivative(model(x), x)
    residual = derivative(slope[:, 0], x)[:, 0] + derivative(slope[:, 1], x)[:, 1]
    boundary = model(x.detach()[: POINTS // 8])
    (residual.square().mean() + boundary.square().mean()).backward()


def burgers(model: nn.Module, x: Tensor) -> None:
    """u_t + u u_x = u_xx / 100, with a product of a value and a derivative."""
    u = model(x)
    slope = derivative(u, x)
    curve = derivative(slope[:, 0], x)[:, 0]
    (slope[:, 1] + u[:, 0] * slope[:, 0] - curve / 100).square().mean().backward()


STEPS = {"heat": heat, "laplace": laplace, "burgers": burgers}


def network(activation: str) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = (layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), ACTIVATIONS[activation]()))
    return nn.Sequential(nn.Linear(2, WIDTH), ACTIVATIONS[activation](), *hidden, nn.Linear(WIDTH, 1))


@pytest.mark.slow
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", STEPS)
def test_three_quarters_of_plain_are_enough(name: str, activation: str) -> None:
    model = network(activation)
    x = torch.randn(POINTS, 2, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def step() -> None:
        STEPS[name](model, x)

    def gradients() -> list[Tensor | None]:
        return [None if each.grad is None else each.grad.clone() for each in (x, *model.parameters())]

    def tidy() -> None:
        model.zero_grad(set_to_none=False)
        if x.grad is not None:
            x.grad.zero_()

    step()
    expected = gradients()
    tidy()
    profile = bs.profile(step, model)
    plan = bs.plan(profile, "75%")
    session = bs.Session(plan, model=model)

    def under() -> None:
        with session:
            step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a plan that does not know a value
        for _ in range(2):
            tidy()
            under()
            found = gradients()
            for one, other in zip(expected, found, strict=True):
                assert (one is None and other is None) or torch.equal(one, other)  # type: ignore[arg-type]
    tidy()
    assert not plan.unknown
    assert bs.measure(under, repeats=1).peak_nbytes <= 0.76 * profile.plain_peak_nbytes


def test_statistics_that_are_decided_on_again_are_known(recwarn: pytest.WarningsRecorder) -> None:
    """A call held them while everything was kept; under a plan they are values, and again in the second backward."""
    torch.manual_seed(3)
    model = nn.Sequential(Attention(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def train(session: bs.Budgeted | None) -> list[Tensor]:
        for number in range(20):
            x = torch.randn(POINTS, WIDTH, generator=torch.Generator().manual_seed(number)).requires_grad_()
            with session or nullcontext():
                y = model(x)
                loss = y.square().mean() + derivative(y, x).square().mean()
            model.zero_grad()
            loss.backward()
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]

    session = bs.Budgeted("97%", min_nbytes=0)
    assert all(torch.equal(one, other) for one, other in zip(train(None), train(session), strict=True))
    session.close()
    assert session.found.plan is not None and session.found.plan.unknown == ()
    assert not [each for each in recwarn if "knows no such value" in str(each.message)]


@pytest.mark.parametrize("policy", ["empty", "kept", "remade"])
def test_what_a_backward_pass_saves_has_the_names_of_the_profile_under_each_plan(policy: str) -> None:
    """Else a plan that makes nothing again would take its values for unknown ones, and its passes for others."""
    model = network("tanh")
    x = torch.randn(POINTS, 2, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def step() -> None:
        heat(model, x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        profile = bs.profile(step, model, min_nbytes=0)
        plan = bs.plan(profile, "100%" if policy == "empty" else "80%")
        if policy == "kept":
            kept = [replace(each, choice="keep", kind="keep") for each in plan.decisions]
            plan = replace(plan, decisions=(*kept[:-1], replace(kept[-1], choice="zvc", kind="encode")))
        session = bs.Session(plan, model=model, min_nbytes=0)
        for _ in range(2):
            with session:
                step()
    keys = {row.key for row in session.report().rows if not row.key.startswith("(")}
    assert keys and not [key for key in keys if "?" in key]
    assert plan.unknown == ()

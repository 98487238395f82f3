"""Passes settle whatever they begin with: a weight, a function, or a module that is another object in each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstash as bs
from backstash.bits import equal_bits

STEPS = 40

Forward = Callable[[Tensor], Tensor]
Make = Callable[[nn.ParameterList, nn.Module], Iterator[Forward]]


class Wrapper(nn.Module):
    """What a solver wraps a model in for each call."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        """Whatever the model makes of it."""
        found: Tensor = self.of(x)
        return found


class Doubled(torch.autograd.Function):
    """Saves its input outside of any torch function."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        """Twice the square."""
        ctx.save_for_backward(x)
        return 2 * x * x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """Its gradient."""
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return 4 * x * gradient


def _blocks() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.1)) for _ in range(3)))


def functional(weights: nn.ParameterList, model: nn.Module) -> Iterator[Forward]:
    """No module is ever called."""

    def forward(h: Tensor) -> Tensor:
        for weight in weights:
            h = F.dropout(F.relu(h @ weight), 0.1)
        return h

    yield forward


def scaled(weights: nn.ParameterList, model: nn.Module) -> Iterator[Forward]:
    """A weight is used before the model is called."""
    yield lambda h: model(h * weights[0][0])


def prompted(weights: nn.ParameterList, model: nn.Module) -> Iterator[Forward]:
    """So it is, in a function that saves nothing of it."""
    yield lambda h: model(torch.cat([weights[0].tanh(), h]))


def wrapped(weights: nn.ParameterList, model: nn.Module) -> Iterator[Forward]:
    """The outermost module is new in each step."""
    yield lambda h: Wrapper(model)(h)


def powered(weights: nn.ParameterList, model: nn.Module) -> Iterator[Forward]:
    """A learned exponent."""
    yield lambda h: model(h).clamp(min=1e-3).pow(weights[0][0, 0].abs() + 1).mean(1, keepdim=True)


def in_turn(weights: nn.ParameterList, model: nn.Module) -> Iterator[Forward]:
    """Some passes begin with a weight, and others with the model."""
    yield lambda h: model(h * weights[0][0])
    yield lambda h: model(h) * weights[0][0]


def custom(weights: nn.ParameterList, model: nn.Module) -> Iterator[Forward]:
    """A function of the program's own comes first."""
    yield lambda h: model(Doubled.apply(weights[0][:16] + h))


def train(make: Make, session: AbstractContextManager[object], is_whole: bool) -> list[Tensor]:
    """Trains a few steps, with the backward pass inside of the Session or behind it, and some that come to nothing."""
    torch.manual_seed(0)
    weights, model = nn.ParameterList(torch.randn(32, 32) for _ in range(3)), _blocks()
    forwards, found = list(make(weights, model)), []
    parameters = [*weights, *model.parameters()]
    optimizer = torch.optim.SGD(parameters, 1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        with session:
            if step in (9, 13):  # nothing at all, or no more than an evaluation
                with torch.set_grad_enabled(step == 9):
                    found.append(model(torch.randn(4, 32)).detach() if step == 13 else torch.zeros(()))
                continue
            loss = forwards[step % len(forwards)](torch.randn(16, 32)).square().mean()
            if is_whole:
                loss.backward()
        if not is_whole:
            loss.backward()
        found += [loss.detach(), *(each.grad.clone() for each in parameters if each.grad is not None)]
        optimizer.step()
    return [*found, *(each.detach() for each in parameters), torch.get_rng_state()]


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("make", [functional, scaled, prompted, wrapped, powered, in_turn, custom])
def test_whatever_a_pass_begins_with(make: Make, is_whole: bool) -> None:
    expected = train(make, nullcontext(), is_whole)
    session = bs.Session("lossless", min_nbytes=0, stop_if_useless=False)
    runs = count()

    class Counting(nullcontext[None]):
        def __enter__(self) -> None:
            session.__enter__()

        def __exit__(self, *error: object) -> None:
            if session._is_replayed:
                next(runs)
            session.__exit__(*error)  # type: ignore[arg-type]

    got = train(make, Counting(), is_whole)
    assert len(expected) == len(got)
    assert all(equal_bits(a, b) for a, b in zip(expected, got, strict=True))
    assert next(runs) >= STEPS // 4

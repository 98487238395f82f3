"""Settled passes with functions of the program's own, which save outside of all calls that a mode hears of."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash import Session
from backstash.capture import learned
from backstash.replay import replaying
from tests.gradients.gradient_checks import Everything, Remake

STEPS = learned.EQUAL_PASSES + 8


class Sines(torch.autograd.Function):
    """Saves what it reads and what it has made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        y = torch.sin(x)
        ctx.save_for_backward(x, y)
        return torch.sin(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return gradient * torch.cos(y) * torch.cos(x)


class Clipped(torch.autograd.Function):
    """Saves a mask, whole numbers, and something that is mostly zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        y = x.clamp(min=0.5)
        ctx.save_for_backward(x > 0.5, (x * 8).to(torch.int64), torch.where(x > 2, x, 0), y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        mask, steps, rest, y = ctx.saved_tensors
        return gradient * mask + steps * 1e-3 + rest + y * 1e-3


def _sines(layer: nn.Module, x: Tensor) -> Tensor:
    for _ in range(4):
        x = Sines.apply(layer(x))
    return x


def _in_a_row(layer: nn.Module, x: Tensor) -> Tensor:
    for _ in range(4):
        x = Sines.apply(x)
    return layer(x)


def _clipped(layer: nn.Module, x: Tensor) -> Tensor:
    return Clipped.apply(layer(Clipped.apply(layer(x)).relu()))


def _mixed(layer: nn.Module, x: Tensor) -> Tensor:
    return Sines.apply(F.dropout(F.relu(Clipped.apply(layer(x)))))


@pytest.mark.parametrize("way", [_sines, _in_a_row, _clipped, _mixed])
@pytest.mark.parametrize("policy", ["lossless", Everything(), Remake()], ids=["lossless", "everything", "remade"])
@pytest.mark.parametrize("is_around", [False, True])
def test_functions_that_save(way: Any, policy: Any, is_around: bool) -> None:
    def trains(whole: Any, each: Any) -> list[Tensor]:
        torch.manual_seed(0)
        layer, found = nn.Linear(64, 64), []
        with whole:
            for number in range(STEPS):
                x = torch.randn(64, 64) * (3 if number == STEPS - 3 else 1)
                with each:
                    loss = way(layer, F.dropout(F.relu(layer(x)))).square().sum()
                loss.backward()
                found += [loss.detach(), *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]
                layer.zero_grad()
        return found

    expected = trains(nullcontext(), nullcontext())
    session = Session(policy, min_nbytes=256, stop_if_useless=False)
    found = trains(*((session, nullcontext()) if is_around else (nullcontext(), session)))
    assert all(x.equal(y) for x, y in zip(expected, found, strict=True))


def test_an_interrupt_while_a_value_is_given_to_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever had the tensor has it still, so backward of what was computed before gives the right gradients."""
    torch.manual_seed(0)
    layer, interrupted = nn.Linear(64, 64), False
    session = Session("lossless", min_nbytes=256, stop_if_useless=False)
    take_back = replaying.Replaying._take_back

    def interrupt(self: Any, members: Any, *given: Any) -> None:
        nonlocal interrupted
        if members and not interrupted:
            interrupted = True
            raise KeyboardInterrupt
        take_back(self, members, *given)

    monkeypatch.setattr(replaying.Replaying, "_take_back", interrupt)
    for step in range(4 * STEPS):
        x = torch.randn(64, 64)
        torch.manual_seed(step)
        try:
            with session:
                made = [F.dropout(F.relu(layer(x)))]
                for _ in range(4):
                    made.append(Sines.apply(layer(made[-1])))
                loss = made[-1].square().sum()
            loss.backward()
            layer.zero_grad()
        except KeyboardInterrupt:
            break
    made[-1].square().sum().backward()
    found = [p.grad for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    torch.manual_seed(step)
    y = F.dropout(F.relu(layer(x)))
    for _ in made[1:]:
        y = Sines.apply(layer(y))
    y.square().sum().backward()
    expected = [p.grad for p in layer.parameters() if p.grad is not None]
    assert all(a.equal(b) for a, b in zip(expected, found, strict=True))
    assert interrupted

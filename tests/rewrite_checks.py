"""Shared by the tests of in-place activations: small networks, training steps and the comparison of outcomes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from backstash import Session
from backstash.rewrites import inplace
from backstash.testing import equal_bits

Step = Callable[[], Tensor]


class Net(nn.Module):
    """A network of named layers, and a function that computes its output from the layers and the input."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._function(self, x)


def conv(channels: int = 4) -> nn.Conv2d:
    return nn.Conv2d(channels, channels, 3, padding=1)


def step_of(model: nn.Module, *shape: int) -> Step:
    """Returns a training step on a batch that the program holds."""
    batch = torch.randn(*shape or (2, 4, 8, 8))

    def step() -> Tensor:
        loss = model(batch).float().square().mean()
        loss.backward()
        return loss.detach()

    return step


def out_of_place(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
    return model


def outcome(model: nn.Module, step: Step, session: Session | None = None) -> dict[str, Tensor]:
    """Returns loss, gradients and buffers of a step, and leaves the model unchanged."""
    before = {name: x.clone() for name, x in model.state_dict().items()}
    gradients = [(x, x.grad) for x in model.parameters()]
    model.zero_grad()
    with torch.random.fork_rng(devices=[]):
        with session or nullcontext():
            result = {"loss": step()}
    result |= {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    result |= {f"buffer {name}": x.clone() for name, x in model.named_buffers()}
    model.load_state_dict(before)
    for parameter, gradient in gradients:
        parameter.grad = gradient
    return result


def check(model: nn.Module, step: Step, session: Session | None = None) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns what is switched and refused; checks that switching changes no bit and undoing restores all."""
    flags = {path: module.inplace for path, module in model.named_modules() if hasattr(module, "inplace")}
    plain = outcome(model, step, session)
    with inplace(model, step, session=session) as rewrite:
        now = {path: module.inplace for path, module in model.named_modules() if hasattr(module, "inplace")}
        assert {path for path in now if now[path] and not flags[path]} == set(rewrite.switched)
        assert not {*rewrite.switched} & {*rewrite.refused}
        switched = outcome(model, step, session)
    assert plain.keys() == switched.keys()
    assert all(equal_bits(plain[name], switched[name]) for name in plain)
    assert flags == {path: module.inplace for path, module in model.named_modules() if hasattr(module, "inplace")}
    return rewrite.switched, rewrite.refused


def backward(x: Tensor) -> Tensor:
    loss = x.sum()
    loss.backward()
    return loss.detach()

"""Steps of compiled models, and comparisons of their gradients with those of compiled plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from backstash import compile_backend
from backstash.compile import CompileBackend

Forward = Callable[[nn.Module], Tensor]
"""Returns a loss, given a (compiled) model."""


def gradients(model: nn.Module, forward: Forward, compiled: Any = None) -> list[Tensor | None]:
    """The gradients of one step from a seeded generator, and last the loss."""
    torch.manual_seed(3)
    model.zero_grad()
    loss = forward(model if compiled is None else compiled)
    loss.backward()  # type: ignore[no-untyped-call]
    found = [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
    return [*found, loss.detach()]


def differences(model: nn.Module, first: list[Tensor | None], second: list[Tensor | None]) -> list[str]:
    """Names of the gradients whose bits differ."""
    names = [*(name for name, _ in model.named_parameters()), "loss"]
    return [
        name
        for name, one, other in zip(names, first, second, strict=False)  # the loss may be left out of both
        if (one is None) != (other is None) or (one is not None and other is not None and not torch.equal(one, other))
    ]


def compare(
    model: nn.Module,
    forward: Forward,
    policy: Any = "lossless",
    *,
    steps: int = 1,
    min_nbytes: int = 0,
    backend: str = "aot_eager",
    budget: int | None = None,
    **settings: Any,
) -> CompileBackend:
    """Checks that a treated model's gradients have the bits of the same model's compiled without treatment.

    Args:
        model: the model.
        forward: a step's loss.
        policy, min_nbytes, budget: as for compile_backend.
        steps: how many steps are compared.
        backend: the inner backend.
        settings: further arguments of torch.compile.

    Returns:
        The backend, for its report.
    """
    settings.setdefault("fullgraph", True)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch._dynamo.reset()
    plain = torch.compile(model, backend=backend, **settings)
    expected = [gradients(model, forward, plain) for _ in range(steps)]
    model.load_state_dict(state)
    torch._dynamo.reset()
    ours = compile_backend(policy, backend, budget=budget, min_nbytes=min_nbytes)
    treated = torch.compile(model, backend=ours, **settings)
    for step in range(steps):
        assert differences(model, expected[step], gradients(model, forward, treated)) == [], f"step {step}"
    torch._dynamo.reset()
    return ours


class Bottleneck(nn.Module):
    """A residual block whose last convolution widens what it reads."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        narrow = channels // 4
        self.layers = nn.Sequential(
            nn.Conv2d(channels, narrow, 1, bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(),
            nn.Conv2d(narrow, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.layers(x) + x)

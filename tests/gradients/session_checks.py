"""Policies, a network, and questions about what a Session leaves behind, for tests of whole Sessions."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gradient_checks import Everything, differences
from torch import Tensor, nn

from backstash import Policy, Session
from backstash.policies.base import Action, Outcome
from backstash.saved import SavedTensor

POLICIES: dict[str, str | Policy] = {"lossless": "lossless", "everything": Everything()}
by_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def holds_nothing(session: Session) -> bool:
    """Whether the Session holds no saved tensor and no byte, after a collection of garbage."""
    gc.collect()
    usage = session.stores["device"].usage()
    return usage.nbytes == usage.count == session._live.saved == session._live.nbytes == 0


def run_step(
    forward: Callable[[], Tensor],
    session: Session | None,
    inside: bool = False,
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> None:
    """A forward pass in the Session, if there is one, and its backward pass in it as well or after it."""
    with session or nullcontext():
        loss = forward()
        if inside:
            backward(loss)
    if not inside:
        backward(loss)


def assert_same(run: Callable[[Session | None], list[Tensor | None]], session: Session) -> None:
    """Compares what a program gives without a Session and with one, which then holds nothing."""
    found = differences(run(None), run(session))
    assert not found, found
    assert holds_nothing(session)


def hooks_installed() -> list[Any]:
    """All hooks and modes, of the process and of this thread, of the kinds that a Session installs."""
    module = nn.modules.module
    return [
        *module._global_forward_pre_hooks.values(),
        *module._global_forward_hooks.values(),
        *module._global_forward_hooks_always_called,
        *(torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())),
        *filter(None, [torch._C._autograd._top_saved_tensors_default_hooks(True)]),
    ]


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(32, 5),
    )


def images(n: int = 4) -> Tensor:
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(4))


def gradients_of(module: nn.Module) -> list[Tensor | None]:
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in module.parameters()]


def codecs_used(session: Session) -> set[str]:
    return {row.codec for row in session.report().rows}


@dataclass(frozen=True)
class Always:
    """A policy that decides on the same action for every saved tensor."""

    action: Action

    def decide(self, saved: SavedTensor) -> Action:
        return self.action

    def observe(self, outcome: Outcome) -> None:
        pass

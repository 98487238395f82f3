"""Shared by the tests of integrations: bits of a training, what is installed, and a model that notes open Sessions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from backstash.bits import equal_bits
from backstash.capture import modules
from backstash.torch_internals import saved_tensor_hooks

FEATURES, CLASSES, ROWS = 24, 5, 64


def installed() -> list[Any]:
    """Whatever a Session installs and is still there: saved-tensor hooks, modes, module hooks, the open Session."""
    module = nn.modules.module
    return [
        *([saved_tensor_hooks(True)] if saved_tensor_hooks(True) else []),
        *_get_current_function_mode_stack(),
        *module._global_forward_pre_hooks.values(),
        *module._global_forward_hooks.values(),
        *(["an open Session"] if modules.is_active() else []),
    ]


def parameters_of(model: nn.Module) -> list[Tensor]:
    """Copies of all parameters and buffers."""
    return [tensor.detach().clone() for tensor in [*model.parameters(), *model.buffers()]]


def assert_equal_bits(expected: Iterable[Tensor], found: Iterable[Tensor]) -> None:
    """Compares tensors bit for bit."""
    pairs = list(zip(expected, found, strict=True))
    assert pairs
    assert all(equal_bits(one, other) for one, other in pairs)


class Noting(nn.Module):
    """A network with a relu, dropout and batch norm, which notes whether a Session is open whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 96)
        self.norm = nn.BatchNorm1d(96)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(96, CLASSES)
        self.was_open: list[bool] = []
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Maps [N, FEATURES] to [N, CLASSES]; raises ``self.error`` where that is set."""
        self.was_open.append(modules.is_active())
        hidden = self.drop(torch.relu(self.norm(self.up(x))))
        if self.error is not None:
            raise self.error
        result: Tensor = self.down(hidden)
        return result


def network() -> Noting:
    """A network that always begins with the same weights."""
    torch.manual_seed(1)
    return Noting()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Some batches [ROWS, FEATURES] with labels [ROWS], always the same."""
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(ROWS, FEATURES, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator))
        for _ in range(count)
    ]

"""Layers that torch computes by one fused function, where no gradient is asked for, have plain's bits in a Session."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

from backstash import Session
from backstash.testing import equal_bits
from backstash.torch_internals import count_function_modes, current_function_mode


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x, x, x, need_weights=False)[0]
        return found


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)


TEACHERS: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: nn.TransformerEncoder(layer(), 2),
    "encoder without nested tensors": lambda: nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False),
    "layer": layer,
    "attention": Attention,
    "among others": lambda: nn.Sequential(nn.Linear(32, 32), layer(), nn.GELU(), nn.TransformerEncoder(layer(), 1)),
}


def frozen(model: nn.Module) -> AbstractContextManager[Any]:
    model.requires_grad_(False)
    return nullcontext()


QUIET: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "no_grad": lambda model: torch.no_grad(),
    "inference_mode": lambda model: torch.inference_mode(),
    "frozen": frozen,
}


def step(
    teacher: nn.Module,
    student: nn.Module,
    quiet: Callable[[nn.Module], AbstractContextManager[Any]],
    context: AbstractContextManager[Any],
) -> list[Tensor]:
    torch.manual_seed(1)
    student.zero_grad()
    x = torch.randn(4, 10, 32)
    with context:
        with quiet(teacher):
            target = teacher(x)
        loss = (student(x) - target).square().sum()
    loss.backward()
    return [target, loss, *(parameter.grad.clone() for parameter in student.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("policy", ["keep", "lossless"])
@pytest.mark.parametrize("quiet", QUIET)
@pytest.mark.parametrize("teacher", TEACHERS)
def test_a_teacher(teacher: str, quiet: str, policy: str) -> None:
    torch.manual_seed(0)
    model = TEACHERS[teacher]().eval()
    student = copy.deepcopy(model).train().requires_grad_()
    for part in student.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    session = Session(policy, min_nbytes=0)
    for _ in range(3):
        expected = step(model, student, QUIET[quiet], nullcontext())
        found = step(model, student, QUIET[quiet], session)
        assert all(equal_bits(one, other) for one, other in zip(found, expected, strict=True))


def test_the_observer_is_away_in_there_alone() -> None:
    seen = []

    class Noting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(count_function_modes())
            return x

    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation=Noting()).eval()
    model.norm1, x = nn.Sequential(model.norm1, Noting()), torch.randn(2, 3, 32)  # no fused function takes that
    with Session("lossless", min_nbytes=0):
        mode = current_function_mode()
        with torch.no_grad():
            model(x)
        assert seen and not any(seen)
        assert current_function_mode() is mode
        seen.clear()
        model(x)  # with gradients
        assert all(seen)
        model.requires_grad_(False)
        seen.clear()
        model(x.requires_grad_())
        assert all(seen)
        seen.clear()
        with torch.no_grad(), BaseTorchFunctionMode():  # under a mode of the program, torch would not fuse anyway
            model(x)
        assert all(count == 2 for count in seen)
        assert current_function_mode() is mode


def test_the_observer_is_back_after_an_error() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError

    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation=Failing()).eval()
    with Session("lossless", min_nbytes=0):
        mode = current_function_mode()
        for _ in range(2):
            with torch.no_grad(), pytest.raises(ArithmeticError):
                model(torch.randn(2, 3, 32))
            assert current_function_mode() is mode
    assert count_function_modes() == 0

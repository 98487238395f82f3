"""Nodes that save lists of tensors, such as the indices of an advanced index: each has its own shape and place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from gradient_checks import Everything
from torch import Tensor

import backstash as bs
from backstash.errors import BudgetError

STEPS = 8
"""So many that a Session replays what it has seen."""

Step = Callable[[Tensor], Tensor]


def _numbers(*shape: int, most: int = 30) -> Tensor:
    return torch.randint(most, shape)


def rows_and_columns(x: Tensor) -> Tensor:
    return x[_numbers(96, 1), _numbers(1, 40)]


def three(x: Tensor) -> Tensor:
    return x.view(30, 30, 2)[_numbers(50, 1, 1), _numbers(1, 30, 1), _numbers(2, most=2)]


def views_of_one(x: Tensor) -> Tensor:
    numbers = _numbers(400)
    return x[numbers[3:99].view(96, 1), numbers[150:190].view(1, 40)]


def with_a_slice(x: Tensor) -> Tensor:
    return x.view(30, 2, 30)[_numbers(64, 1), :, _numbers(1, 8)]


def a_mask_and_numbers(x: Tensor) -> Tensor:
    mask = torch.zeros(30, dtype=torch.bool)
    mask[:20] = True
    return x.view(30, 60)[mask, _numbers(20, most=60)]


def other_dtypes(x: Tensor) -> Tensor:
    return x[_numbers(96, 1).int(), _numbers(1, 40).long()]


def put(x: Tensor) -> Tensor:
    zeros = torch.zeros(30, 60)
    return zeros.index_put((_numbers(30, 1), _numbers(1, 60, most=60)), x.view(30, 60), accumulate=True)


STEPS_OF = (rows_and_columns, three, views_of_one, with_a_slice, a_mask_and_numbers, other_dtypes, put)


def gradients(step: Step, context: Any) -> Iterator[Tensor]:
    x = torch.randn(30, 60, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for number in range(STEPS):
        torch.manual_seed(number)
        x.grad = None
        with context:
            y = step(x * 2)
            loss = (y * y).sum()
        loss.backward()
        assert x.grad is not None
        yield x.grad.clone()


@pytest.mark.parametrize("policy", ["keep", "lossless", "lossless_stored", "cdma", "offload", "everything"])
@pytest.mark.parametrize("step", STEPS_OF, ids=lambda step: step.__name__)
def test_each_of_a_list_is_what_it_was(step: Step, policy: str) -> None:
    session = bs.Session(Everything() if policy == "everything" else policy, min_nbytes=0)
    for own, plain in zip(gradients(step, session), gradients(step, nullcontext()), strict=True):
        assert torch.equal(own, plain)


@pytest.mark.parametrize("step", STEPS_OF, ids=lambda step: step.__name__)
def test_under_a_plan(step: Step) -> None:
    x = torch.randn(30, 60, requires_grad=True)

    def run() -> None:
        y = step(x * 2)
        (y * y).sum().backward()

    profile = bs.profile(run, allow=("lossless", "offload"), min_nbytes=0)
    try:
        plan = bs.plan(profile, "80%", ("lossless", "offload"))
    except BudgetError as error:
        plan = cast(bs.Plan, error.plan)
    for own, plain in zip(gradients(step, bs.Session(plan, min_nbytes=0)), gradients(step, nullcontext()), strict=True):
        assert torch.equal(own, plain)

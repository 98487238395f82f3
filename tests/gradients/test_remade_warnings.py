"""A function that warns has warned when the program called it: to make its result again raises no error of that."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash import Session
from tests.gradients.gradient_checks import Remake

STEPS = 8
"""After some of which passes are replayed."""


def _warns(x: Tensor) -> Tensor:
    return F.dropout3d(x, 0.3)  # of two dimensions


@pytest.mark.parametrize("is_around", [False, True])
@pytest.mark.parametrize("policy", ["lossless", Remake()], ids=["lossless", "remade"])
def test_backward_where_warnings_are_errors(policy: Any, is_around: bool) -> None:
    def trains(
        whole: AbstractContextManager[object], step: Callable[[], AbstractContextManager[object]]
    ) -> list[Tensor]:
        torch.manual_seed(0)
        network = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
        found = []
        with whole:
            for _ in range(STEPS):
                with step(), warnings.catch_warnings(action="ignore"):
                    loss = network[1](_warns(network[0](torch.randn(8, 64)).relu()) * 2).square().mean()
                with warnings.catch_warnings(action="error"):
                    loss.backward()
                found += [loss.detach(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]
                network.zero_grad()
        return found

    expected = trains(nullcontext(), nullcontext)
    session = Session(policy, min_nbytes=256, stop_if_useless=False)
    found = trains(session, nullcontext) if is_around else trains(nullcontext(), lambda: session)
    assert all(x.equal(y) for x, y in zip(expected, found, strict=True))


def test_the_program_hears_of_it() -> None:
    with Session("lossless", min_nbytes=256, stop_if_useless=False), pytest.warns(UserWarning, match="dropout3d"):
        _warns(torch.randn(8, 64, requires_grad=True).relu())

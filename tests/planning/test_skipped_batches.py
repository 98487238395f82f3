"""Loops that skip batches: a skipped pass is none of the step that follows, though its loss may still be alive."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from backstash.bits import equal_bits
from backstash.replay import replaying
from backstash.torch_internals import profiler_runs

STEPS = 150

Enter = Callable[[], AbstractContextManager[object]]


def _forward(model: nn.Module, batches: Tensor, enter: Enter, parts: int, raises: bool) -> Tensor:
    losses = []
    for batch in batches[:parts]:
        with enter():
            losses.append(model(batch).square().mean())
            if raises:
                raise ArithmeticError(losses)  # with which it is alive
    return torch.stack(losses).sum()


def _train(how: str, rate: float, session: bs.Session | bs.Budgeted | None) -> tuple[list[Tensor], int, int]:
    """Trains; returns the weights, and how many passes were differentiated and how many of them ran a script."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.ReLU())), nn.Linear(32, 1))
    batches, drawn = torch.randn(2, 1024, 32), random.Random(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    passes = settled = 0
    alive: Any = None  # what was skipped, as long as the next pass runs
    for _ in range(STEPS):
        is_bad = drawn.random() < rate
        optimizer.zero_grad()
        try:
            parts = 2 if how == "in two parts" else 1
            loss = _forward(model, batches, lambda: session or nullcontext(), parts, is_bad and how == "raised")
        except ArithmeticError as error:
            alive = error
            continue
        alive = loss if is_bad else None
        if alive is not None:
            continue
        passes += 1
        settled += isinstance(session, bs.Session) and session._is_replayed
        loss.backward()
        optimizer.step()
    del alive
    return [parameter.detach() for parameter in model.parameters()], passes, settled


@pytest.mark.skipif(replaying.native is None, reason="nothing is replayed: run 'python setup.py build_native'")
@pytest.mark.cases(100)
@pytest.mark.parametrize("rate", [0.1, 0.3])
@pytest.mark.parametrize("how", ["raised", "skipped"])
def test_passes_behind_a_skipped_one_settle(how: str, rate: float, compiles_nothing: None) -> None:
    session = bs.Session("lossless", min_nbytes=0, stop_if_useless=False)
    weights, passes, settled = _train(how, rate, session)
    assert all(map(equal_bits, weights, _train(how, rate, None)[0]))
    assert settled >= passes - 8


@pytest.mark.cases(100)
@pytest.mark.parametrize(
    ("how", "rate"), [("raised", 0.1), ("raised", 0.3), ("skipped", 0.1), ("skipped", 0.3), ("in two parts", 0.1)]
)
def test_a_plan_knows_the_passes_behind_a_skipped_one(how: str, rate: float, compiles_nothing: None) -> None:
    budgeted = bs.Budgeted("85%", min_nbytes=0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            weights, _, _ = _train(how, rate, budgeted)
        found = budgeted.found
        assert found.plan is not None and not found.plan.unknown
        assert found.reached_nbytes <= found.budget_nbytes
        assert found.reached_nbytes > 0
    finally:
        budgeted.close()
    assert all(map(equal_bits, weights, _train(how, rate, None)[0]))


class Failing(torch.autograd.Function):
    """Hands a value on, and raises in the pass that it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails_in: str) -> Tensor:
        ctx.fails_in = fails_in
        if fails_in == "forward":
            raise ArithmeticError("a bad batch")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.fails_in == "backward":
            raise ArithmeticError("a bad batch")
        return gradient, None


def _train_through(
    fails_in: str, every: int, budgeted: bs.Budgeted | None, passes: int = 1
) -> tuple[list[Tensor], int]:
    """Trains where every so many-th step raises; returns the weights, and in which step there was a plan first."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(32, 32), nn.ReLU())), nn.Linear(32, 1))
    second = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 1))
    optimizer, batch = torch.optim.SGD([*model.parameters(), *second.parameters()], lr=1e-2), torch.randn(1024, 32)
    models, planned = (model, second)[:passes], 0
    for number in range(1, 61):
        fails = fails_in if number % every == 0 else ""
        try:
            for each in models:
                with budgeted or nullcontext():
                    x = Failing.apply(each[0](batch), fails if each is models[-1] else "")
                    loss = each[1:](x).square().mean()
                loss.backward()
            optimizer.step()
        except ArithmeticError:
            assert not profiler_runs()
        optimizer.zero_grad()
        if budgeted is not None and budgeted.found.plan is not None and not planned:
            planned = number
    return [parameter.detach() for parameter in (*model.parameters(), *second.parameters())], planned


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_what_is_known_before_a_step_raises_stays_known(fails_in: str, passes: int, compiles_nothing: None) -> None:
    budgeted = bs.Budgeted("90%", min_nbytes=0)
    budgeted.is_hurried = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights, planned = _train_through(fails_in, 4, budgeted, passes)
    budgeted.close()
    assert all(map(equal_bits, weights, _train_through(fails_in, 4, None, passes)[0]))
    assert 0 < planned < 20
    assert 0 < budgeted.found.reached_nbytes <= budgeted.found.budget_nbytes


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_it_is_told_that_each_step_raises(fails_in: str) -> None:
    budgeted = bs.Budgeted("90%", min_nbytes=0)
    _train_through(fails_in, 1, budgeted)
    told = str(budgeted.found)
    assert told.startswith("no plan yet after 60 forward passes: ") and "each of its steps has raised" in told
    budgeted.close()
    told = str(budgeted.found)
    assert told.startswith("training ended before a step could be planned; each of its steps has raised")


def test_it_is_told_how_many_steps_raise() -> None:
    budgeted = bs.Budgeted("90%", min_nbytes=0)
    _train_through("forward", 2, budgeted)
    assert "; 30 of its steps have raised, while a plan takes some in a row that do not" in str(budgeted.found)
    budgeted.close()

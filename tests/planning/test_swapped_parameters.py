"""Parameters may be swapped for others between steps, which torch refuses to do while there is a weak reference."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backstash.planning.run.budgeted import Budgeted
from backstash.session import Session

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SESSIONS: dict[str, Callable[[], Any]] = {
    "lossless": lambda: Session("lossless", min_nbytes=0),
    "layrub": lambda: Session("layrub", min_nbytes=0),
    "checked": lambda: Session("quantized", min_nbytes=0, check=1, check_limit=1e30),
    "budgeted": lambda: Budgeted("100%", min_nbytes=0),
    "budgeted with errors": lambda: Budgeted("100%", ("lossless", "recompute", "bounded"), min_nbytes=0),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    convolutions = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1))
    return nn.Sequential(convolutions, nn.Flatten(), nn.Linear(512, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8))


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("name", SESSIONS)
@pytest.mark.parametrize("calls", [False, True], ids=["entered", "called"])
def test_parameters_are_swapped_between_steps(name: str, calls: bool, swapping: None) -> None:
    model, session = network(), SESSIONS[name]()
    for _ in range(9):
        x = torch.randn(16, 3, 8, 8)
        if calls and isinstance(session, Budgeted):
            loss = session.step(model, x).square().sum()
        else:
            with session:
                loss = model(x).square().sum()
        loss.backward()
        del loss
        held = [each for each in (x, *model.parameters(), *model.buffers()) if weakref.getweakrefs(each)]
        assert not held
        model.zero_grad()
        model.to(torch.float64).to(torch.float32)
        model.load_state_dict(network().state_dict())


def test_gradients_are_seen_after_a_swap(swapping: None) -> None:
    model, session = network(), Budgeted("100%", min_nbytes=0)
    for number in range(6):
        if number % 2 == 0:
            model.zero_grad()
            model.to(torch.float64).to(torch.float32)
        with session:
            loss = model(torch.randn(16, 3, 8, 8)).square().sum()
        loss.backward()
        assert session.adds_up == (number % 2 == 1)


def test_a_session_within_a_budget_holds_no_model() -> None:
    model, session = network(), Budgeted("70%", min_nbytes=0)
    with session:
        loss = model(torch.randn(16, 3, 8, 8)).square().sum()
    loss.backward()
    weight: weakref.ref[Tensor] = weakref.ref(next(model.parameters()))
    del loss, model
    gc.collect()
    assert weight() is None

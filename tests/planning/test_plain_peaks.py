"""Shares of a budget are shares of what plain steps take, and a budget below that is never taken for one that fits."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstash as bs
from backstash import Budgeted
from backstash.bits import equal_bits
from backstash.errors import BudgetError
from backstash.planning.run.within import Within
from backstash.report.meter import CountedPeak

Loss = Callable[[], Tensor]

pytestmark = pytest.mark.usefixtures("compiles_nothing")


class Cells(nn.Module):
    """A recurrent language model, cell by cell."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(200, 64), nn.LSTMCell(64, 64), nn.Linear(64, 200)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(x.shape[0], 64)
        found = []
        for step in range(x.shape[1]):
            h, c = self.cell(self.embedding(x[:, step]), (h, c))
            found.append(h)
        logits: Tensor = self.head(torch.stack(found, 1)).flatten(0, 1)
        return logits


def cells() -> tuple[nn.Module, Loss]:
    model, x = Cells(), torch.randint(200, (16, 25))
    return model, lambda: F.cross_entropy(model(x[:, :-1]), x[:, 1:].flatten())


def pictures() -> tuple[nn.Module, Loss]:
    def block(inside: int, outside: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU())

    layers = [block(3, 8), block(8, 16), nn.Dropout(0.2), nn.MaxPool2d(2), block(16, 16), nn.AdaptiveAvgPool2d(1)]
    model, x, y = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 10)), torch.randn(8, 3, 16, 16), torch.arange(8)
    return model, lambda: F.cross_entropy(model(x), y)


class Recurrent(nn.Module):
    """A gated recurrent unit, of which nothing can be made smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.GRU(32, 64, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.unit(x)[0].square().mean()
        return found


def recurrent() -> tuple[nn.Module, Loss]:
    model, x = Recurrent(), torch.randn(8, 12, 32)
    return model, lambda: model(x)


NETWORKS = [cells, pictures, recurrent]


def peaks_of(make: Callable[[], tuple[nn.Module, Loss]], budget: int | str | None) -> tuple[int, Budgeted | None]:
    """The peak of a step when everything is settled, with gradients that are there already."""
    torch.manual_seed(0)
    model, loss_of = make()
    session = None if budget is None else Budgeted(budget, min_nbytes=1024)

    def step() -> None:
        with session or nullcontext():
            loss = loss_of()
        loss.backward()
        del loss
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.01 * parameter.grad
                parameter.grad.zero_()

    for _ in range(20):
        step()
    for _ in range(100):
        if session is None or session.is_quiet:
            break
        step()
    for _ in range(12):  # until what there is nothing to do for is idle
        step()
    with CountedPeak() as counted:
        step()
    return counted.peak_nbytes, session


@pytest.mark.cases(6)
@pytest.mark.parametrize("share", [0.99, 0.95, 0.92])
@pytest.mark.parametrize("make", NETWORKS)
def test_a_budget_below_the_plain_peak_is_kept_or_refused(
    make: Callable[[], tuple[nn.Module, Loss]], share: float
) -> None:
    plain, _ = peaks_of(make, None)
    budget = int(share * plain)
    try:
        peak, session = peaks_of(make, budget)
    except BudgetError:
        assert make is recurrent
        return
    assert session is not None and session.found.plan is not None
    assert peak <= budget
    assert session.found.plain_nbytes == pytest.approx(plain, rel=0.01)


@pytest.mark.parametrize("make", NETWORKS)
def test_the_plain_peak_fits(make: Callable[[], tuple[nn.Module, Loss]]) -> None:
    plain, _ = peaks_of(make, None)
    peak, session = peaks_of(make, int(1.01 * plain))
    assert session is not None and session.found.plan is not None
    assert session.found.plan.is_empty
    assert session.found.reached_nbytes == pytest.approx(plain, rel=0.01)
    assert peak <= 1.01 * plain


def test_a_share_is_one_of_the_plain_peak() -> None:
    plain, _ = peaks_of(pictures, None)
    _, session = peaks_of(pictures, "90%")
    assert session is not None
    assert session.found.budget_nbytes == pytest.approx(0.9 * plain, rel=0.01)


@pytest.mark.parametrize("min_nbytes", [0, 1 << 10, 16 << 10, 64 << 10])
def test_a_session_keeps_what_the_profile_has_kept(min_nbytes: int) -> None:
    """Weights that are smaller are copied where calls read them, and values that are smaller are not planned."""
    torch.manual_seed(0)
    blocks = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.GELU())]
    model, x = nn.Sequential(*blocks, nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 4)), torch.randn(128, 32)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    step()
    profile = bs.profile(step, model, min_nbytes=min_nbytes)
    with pytest.raises(BudgetError) as refused:
        bs.plan(profile, 1)
    found = bs.plan(profile, refused.value.smallest_nbytes)
    assert found.min_nbytes == min_nbytes
    session = bs.Session(bs.Plan.from_json(found.to_json()))
    assert session.min_nbytes == min_nbytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            with CountedPeak() as counted, session:
                step()
            assert counted.peak_nbytes <= found.peak_nbytes


@pytest.mark.parametrize("share", [0.95, 0.9])
def test_a_step_that_was_profiled_leaves_its_inputs_to_the_program(share: float) -> None:
    """Else the plain step behind it frees them, and is taken for one that needs so much less."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 32), nn.GELU(), nn.Linear(32, 5))
    labels = torch.arange(16) % 5

    def step() -> weakref.ref[torch.UntypedStorage]:
        x = torch.randn(16, 3, 8, 8)
        F.cross_entropy(model(x), labels).backward()
        model.zero_grad()
        return weakref.ref(x.untyped_storage())

    with Budgeted(f"{share:.0%}", min_nbytes=1024) as session:
        held = [number for number in range(16) if step()() is not None]
    session.close()
    assert held == []


def _figures(between: str, budget: int | str) -> tuple[list[Tensor], Within]:
    """Trains a network in a loop that runs operations between its steps; returns the weights and what became of it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 1))
    optimizer, norm = torch.optim.SGD(model.parameters(), 0.01), nn.LayerNorm(64, elementwise_affine=False)
    kept: deque[Any] = deque(maxlen=2)
    session = Budgeted(budget or 1 << 30, min_nbytes=0)
    session.is_hurried = True
    for _ in range(20):
        x = torch.randn(512, 64)
        if between == "batches normalised ahead":
            kept.append(norm(x))
            x = kept[0]
        optimizer.zero_grad()
        with session if budget else nullcontext():
            loss = model(x).square().mean()
        loss.backward()
        if between == "kept gradients":
            kept.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        optimizer.step()
    session.close()
    return [parameter.detach() for parameter in model.parameters()], session.found


@pytest.mark.parametrize("between", ["kept gradients", "batches normalised ahead"])
def test_operations_between_the_steps_are_no_part_of_them(between: str) -> None:
    """Autograd records them, and what was freed between them and the forward pass had been counted."""
    _, alone = _figures("", "100%")
    weights, found = _figures(between, alone.plain_nbytes)
    assert found.plain_nbytes == pytest.approx(alone.plain_nbytes, rel=0.001)
    assert found.plan is not None and found.plan.is_empty
    assert 0 < found.reached_nbytes <= found.budget_nbytes
    assert all(map(equal_bits, weights, _figures(between, "")[0]))

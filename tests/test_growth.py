"""The work of a Session for one tensor does not grow with the number of tensors that the program keeps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backstash import Session
from backstash.stash import pending


def checks_per_tensor(number: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """How often the Session asks for the holders of a pending storage, per output, if the program keeps all outputs."""
    checks = 0
    original = pending.storage_use_count

    def count(cdata: int) -> int:
        nonlocal checks
        checks += 1
        return original(cdata)

    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    with monkeypatch.context() as patch:
        patch.setattr(pending, "storage_use_count", count)
        with Session(min_nbytes=0):
            kept = [layer(x).tanh() for _ in range(number)]
            total = kept[0].sum()
            for y in kept[1:]:
                total = total + y[0, 0]
    total.backward()
    assert checks > 0
    return checks / number


def test_checks_grow_no_faster_than_the_tensors_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = checks_per_tensor(100, monkeypatch), checks_per_tensor(800, monkeypatch)
    assert many < 60
    assert many < few + 30  # a few more for each doubling


@pytest.mark.parametrize("reader", [lambda x: x.tanh(), lambda x: x.relu(), lambda x: x.cos()])
def test_decodes_do_not_grow_with_the_readers_of_one_storage(reader: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recurrent network reads the time steps of one tensor, and decodes the tensor a fixed number of times."""

    def run(session: Session | None) -> tuple[Tensor, int]:
        torch.manual_seed(0)
        layer, x = nn.Linear(8, 8), torch.randn(4, 60, 8, requires_grad=True)

        def forward() -> Tensor:
            h = reader((x * 2.0).relu())  # type: ignore[operator]
            outputs = [layer(h[:, step]).sum() for step in range(h.shape[1])]
            del h
            return torch.stack(outputs).sum()

        with session or nullcontext():
            loss = forward()
        loss.backward()
        decodes = 0 if session is None else sum(row.decodes for row in session.report().rows)
        assert x.grad is not None
        return x.grad, decodes

    expected, _ = run(None)
    for policy in ("lossless", "lossless_stored"):
        got, decodes = run(Session(policy, min_nbytes=0))
        assert torch.equal(expected, got)
        assert decodes <= 12


class Chain(nn.Module):
    """Runs layers one after the other; the program keeps all that they return, or nothing of it."""

    def __init__(self, number: int, keeps: bool) -> None:
        super().__init__()
        self.number, self.keeps = number, keeps
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for number in range(self.number):
            x = (torch.relu, torch.tanh)[number % 2](self.layer(x))
            if self.keeps:
                kept.append(x)
        return torch.stack(kept).sum() if kept else x.sum()


def calls_of(run: Callable[[], object]) -> int:
    """How many functions are called, of Python and of C; the time that they take is nobody's business here."""
    number = 0

    def count(frame: Any, event: str, argument: object) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return number


def calls_per_layer(number: int, keeps: bool, policy: str) -> float:
    """Function calls of a step under a Session that has seen two steps like it, above plain PyTorch's, per layer."""
    model, x = Chain(number, keeps), torch.randn(2, 4)
    session = Session(policy, min_nbytes=0)

    def plain() -> None:
        model(x).backward()

    def under_session() -> None:
        with session:
            loss = model(x)
        loss.backward()

    for _ in range(2):
        under_session()
    return (calls_of(under_session) - calls_of(plain)) / number


@pytest.mark.parametrize("policy", ["keep", "lossless_stored", "lossless"])
@pytest.mark.parametrize("keeps", [False, True])
def test_work_per_saved_tensor_does_not_grow_with_their_number(keeps: bool, policy: str) -> None:
    few, many = (calls_per_layer(number, keeps, policy) for number in (50, 400))
    assert 0 < many < 1.1 * few + 10  # a few more for each doubling, where the program keeps everything


@pytest.mark.slow
def test_work_per_saved_tensor_is_the_same_at_twenty_thousand() -> None:
    few, many = (calls_per_layer(number, True, "lossless") for number in (500, 6700))  # three are saved of each layer
    assert 0 < many < 1.1 * few + 10

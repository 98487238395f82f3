"""Large gradients that are added in slices: ``.grad`` and everything else that sees a gradient have the right bits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import differences
from torch import Tensor, nn

from backstash import Session
from backstash.proofs import Proofs
from backstash.redeem import accumulation
from backstash.report.meter import CountedPeak


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulation, "LARGE", 1 << 12)
    monkeypatch.setattr(accumulation, "CHUNK", 1 << 12)
    monkeypatch.setattr(accumulation, "ROWS", 8)


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows in a slice, for each gradient that was added in slices."""
    seen: list[int] = []
    original = accumulation._Product.add_to

    def add_to(self: Any, out: Tensor) -> None:
        seen.append(self.step)
        original(self, out)

    monkeypatch.setattr(accumulation._Product, "add_to", add_to)
    return seen


class Twice(nn.Module):
    """A network that uses one weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(x).relu())  # type: ignore[no-any-return]


class Tied(nn.Module):
    """A network whose head has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 48)

    def forward(self, x: Tensor) -> Tensor:
        words = (x.flatten()[:4].abs() * 20).long() % 64
        return F.linear(self.embedding(words).relu(), self.embedding.weight)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 40, bias=False), nn.ReLU(), nn.Linear(40, 3))


def square() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64, bias=False))


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "plain": (plain, 2),
    "square": (square, 2),
    "twice": (Twice, 0),
    "tied": (Tied, 0),
}


def batch(rows: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1), dtype=dtype)


def make(name: str, dtype: torch.dtype = torch.float32, start: float | None = 0.0) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name][0]().to(dtype)
    for parameter in model.parameters():
        parameter.grad = None if start is None else torch.full_like(parameter, start)
    return model


def backward(model: nn.Module, x: Tensor, times: int = 1) -> list[Tensor | None]:
    for _ in range(times):
        model(x).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("start", [0.0, -0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_bits(name: str, dtype: torch.dtype, start: float, slices: list[int]) -> None:
    x = batch(dtype=dtype)
    expected = backward(make(name, dtype, start), x, times=3)
    model = make(name, dtype, start)
    slices.clear()
    with Session(min_nbytes=0):
        got = backward(model, x, times=3)
    assert not differences(expected, got)
    # Not always all of them: of some shapes the library makes other bits in slices.
    assert len(slices) in {3 * count for count in range(min(1, MODELS[name][1]), MODELS[name][1] + 1)}


def test_nothing_is_put_off_without_a_gradient_to_add_to(slices: list[int]) -> None:
    expected = backward(make("plain", start=None), batch())
    model = make("plain", start=None)
    slices.clear()
    with Session(min_nbytes=0):
        assert not differences(expected, backward(model, batch()))
    assert not slices


@pytest.mark.parametrize(
    "way", ["grad", "inputs", "hook", "post hook", "anomaly", "retain", "create_graph", "autocast"]
)
@pytest.mark.filterwarnings("ignore:Anomaly", "ignore:Using backward")
def test_who_sees_a_gradient_sees_all_of_it(way: str) -> None:
    def run(session: Any) -> list[Tensor | None]:
        model, x = make("plain", start=0.25), batch()
        first = next(model.parameters())
        kept: list[Tensor] = []
        with session:
            if way == "hook":
                first.register_hook(lambda grad: kept.append(grad.clone()))
            if way == "post hook":
                first.register_post_accumulate_grad_hook(lambda leaf: kept.append(leaf.grad.clone()))  # type: ignore[union-attr]
            with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
                loss = model(x).float().square().sum()
            if way == "grad":
                kept += torch.autograd.grad(loss, list(model.parameters()))
            elif way == "inputs":
                loss.backward(inputs=[first])
            elif way == "anomaly":
                with torch.autograd.detect_anomaly():
                    loss.backward()
            elif way == "retain":
                loss.backward(retain_graph=True)
                loss.backward()
            else:
                loss.backward(create_graph=way == "create_graph")
        return [*kept, *[None if one.grad is None else one.grad.detach() for one in model.parameters()]]

    assert not differences(run(torch.enable_grad()), run(Session(min_nbytes=0)))


def test_where_slices_differ_the_whole_is_made(monkeypatch: pytest.MonkeyPatch, slices: list[int]) -> None:
    monkeypatch.setattr(accumulation, "proofs", Proofs())
    monkeypatch.setattr(
        accumulation._Product, "rows", lambda self, begin: self.whole()[begin : begin + self.step] + 1e-3
    )
    expected = backward(make("plain"), batch())
    model = make("plain")
    with Session(min_nbytes=0):
        assert not differences(expected, backward(model, batch()))
    assert not slices


def test_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False))
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    x = torch.randn(8, 1024)

    def step() -> None:
        model(x).sum().backward()

    with Session() as session:
        step()
    peaks = []
    gc.collect()
    for one in (torch.enable_grad(), session):
        with one, CountedPeak() as counter:
            step()
        peaks.append(counter.peak_nbytes)
    assert peaks[0] > 4 << 20
    assert peaks[1] < 1 << 20

"""Planes that backward kernels read without decoding them, on an accelerator: the bits, the launches, no wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstash as bs
from backstash import policies
from backstash.redeem import table
from tests.device import fake
from tests.device.networks import same_bits

IMAGES = (4, 8, 64, 64)
"""Of 512 KiB, so that a claim may pay."""


@pytest.fixture(autouse=True)
def _claims_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "CHEAP_CLAIM", 1 << 16)


class _Layer(nn.Module):
    """A function between two convolutions, whose result nobody but autograd holds."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)) * 1.0).square().sum()


def _dropout(x: Tensor) -> Tensor:
    return torch.native_dropout(x, 0.3, train=True)[0]  # as CUDA's dropout is


LAYERS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "relu": (F.relu, "mask_select"),
    "relu6": (F.relu6, "mask_select"),
    "threshold": (lambda x: F.threshold(x * 1.0, 0.25, -1.0), "mask_select"),
    "leaky_relu": (F.leaky_relu, "scale_by_codes"),
    "dropout": (_dropout, "scale_by_codes"),
    "max_pool": (lambda x: F.max_pool2d(x, 3, 2, 1), "window_scatter"),
    "max_pool of pairs": (lambda x: F.max_pool2d(x, 2), "window_scatter"),
}


def _gradients(model: nn.Module, x: Tensor, session: Any) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    if session is None:
        model(x).backward()
    else:
        with session:
            loss = model(x)
        loss.backward()
    return [parameter.grad.cpu().contiguous() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("layer", list(LAYERS))
def test_planes_are_read_where_they_are(layer: str, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    function, kernel = LAYERS[layer]
    model = _Layer(function).to("fake").to(memory_format=layout)
    x = torch.randn(IMAGES).to("fake").contiguous(memory_format=layout)
    session = bs.Session(policies.lossless(recompute=False), model=model, min_nbytes=0, stop_if_useless=False)
    expected = _gradients(model, x, None)
    for step in range(8):
        with fake.counting() as counts:
            found = _gradients(model, x, session)
        assert same_bits(found, expected), step
    assert counts.waits == len(expected), counts.lines("waits")  # gradients that go to the CPU
    assert counts.names["operations", kernel] == 1


def test_codes_of_few_bits_are_read_where_they_are() -> None:
    torch.manual_seed(0)
    model = _Layer(F.gelu).to("fake")
    x = torch.randn(IMAGES).to("fake")

    def with_claims(pay: bool) -> list[Tensor]:
        table.CHEAP_CLAIM = 1 << 16 if pay else 1 << 40
        session = bs.Session(policies.quantized(bits=4), model=model, min_nbytes=0, stop_if_useless=False)
        for _ in range(3):
            with fake.counting() as counts:
                found = _gradients(model, x, session)
        assert counts.names["operations", "scale_by_codes"] == pay
        return found

    assert same_bits(with_claims(True), with_claims(False))


@pytest.mark.parametrize("layer", list(LAYERS))
def test_late_operations_change_no_bit(layer: str) -> None:
    torch.manual_seed(0)
    model = _Layer(LAYERS[layer][0]).to("fake")
    x = torch.randn(IMAGES).to("fake")
    session = bs.Session(policies.lossless(recompute=False), model=model, min_nbytes=0, stop_if_useless=False)
    expected = _gradients(model, x, None)
    for _ in range(3):
        _gradients(model, x, session)
    for seed in range(4):
        with fake.late(seed):
            assert same_bits(_gradients(model, x, session), expected)


def test_a_captured_step_reads_planes_whatever_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "CHEAP_CLAIM", 1 << 40)
    torch.manual_seed(0)
    model = _Layer(F.relu).to("fake")
    x = torch.randn(IMAGES).to("fake")
    session = bs.Session(policies.lossless(recompute=False), model=model, min_nbytes=0, stop_if_useless=False)
    expected = _gradients(model, x, None)

    def step(x: Tensor) -> None:
        model.zero_grad()
        model(x).backward()

    fast = bs.graphed(step, session, learning=4)
    found = []
    for _ in range(7):
        with fake.counting() as counts:
            fast(x)
        found.append(counts.names["operations", "mask_select"])
    assert (fast.graphs, fast.replays, sum(found), found[4]) == (1, 3, 1, 1)  # once, in the capture
    assert same_bits([parameter.grad.cpu() for parameter in model.parameters()], expected)  # type: ignore[union-attr]

"""A layer that is compiled on its own gives the same bits inside a Session, and is not compiled again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import differences
from torch import Tensor, nn

from backstash import Session


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(F.gelu(self.linear(x)))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled() -> dict[str, int]:
    from torch._dynamo.utils import counters

    return dict(counters["stats"])


def model_of(kind: str, backend: str) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [
        nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) if kind == "torch's own" else Block()
        for _ in range(3)
    ]
    model = nn.Sequential(*layers)
    for layer in model:
        if kind == "function":
            layer.forward = torch.compile(layer.forward, backend=backend)  # type: ignore[method-assign]
        else:
            layer.compile(backend=backend)
    return model


def step(model: nn.Module, context: Any) -> list[Tensor]:
    model.zero_grad()
    with context:
        loss = model(torch.linspace(-2, 2, 32 * 64).view(32, 64)).square().sum()
    loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        pytest.param(kind, backend, marks=[pytest.mark.slow] if backend == "inductor" and kind == "function" else [])
        for backend in ("aot_eager", "inductor")
        for kind in ("block", "torch's own", "function")
    ],
)
def test_a_layer_compiled_on_its_own_gives_the_same_bits(kind: str, backend: str) -> None:
    model = model_of(kind, backend)
    expected = step(model, nullcontext())
    plain = compiled()
    for policy in ("keep", "lossless"):
        assert not differences(expected, step(model, Session(policy, min_nbytes=0)))
    once = compiled()
    assert (once == {}) == (plain == {})  # torch compiles no layers of its own before 2.14, and neither does a Session
    assert plain or kind == "torch's own"
    session = Session("lossless", min_nbytes=0)
    for context in (session, session, Session("keep"), Session("lossless", min_nbytes=0)):
        assert not differences(expected, step(model, context))
    assert compiled() == once

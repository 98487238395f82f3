"""Small networks of every family are trained bit-equal on a GPU, under exact policies and under a budget.

The same comparison runs on the CPU, so that it is tested where there is no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import pytest
import torch
from gradient_checks import Everything, differences
from torch import Tensor, nn

import backstash as bs
from backstash import Session
from backstash.errors import BudgetError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of kernels that are not deterministic

STEPS = 4
"""So many that a Session replays what it has seen."""

CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]
WHERE = [
    ("cpu", None),
    ("cpu", torch.bfloat16),
    *(pytest.param(("cuda", dtype), marks=CUDA) for dtype in (None, torch.bfloat16, torch.float16)),
]
"""Devices, and the types to which autocast casts there; None for no autocast."""

Where = tuple[str, torch.dtype | None]

POLICIES = ("keep", "lossless", "lossless_stored", "everything", "cdma", "offload")

Step = Callable[[AbstractContextManager[object]], list[Tensor | None]]
"""Runs a forward pass within a context and a backward pass; returns all gradients."""


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where torch has a kernel that computes the same twice, it is used."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"))
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class Residual(nn.Module):
    """Convolutions, batch norms and a sum, with the functions whose masks are stored."""

    def __init__(self, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norms = nn.ModuleList((nn.BatchNorm2d(16), nn.BatchNorm2d(16)))
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.activation(self.norms[0](self.one(x)))
        return self.activation(self.norms[1](self.two(inner)) + x)


class Recurrent(nn.Module):
    """A bidirectional GRU of two layers, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(16, 32, 2, batch_first=True, dropout=0.2, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0]


def convolutions(activation: Callable[[], nn.Module], layout: torch.memory_format) -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        Residual(activation),
        nn.MaxPool2d(2),
        nn.Dropout(0.1),
        Residual(activation),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 64, 32),
    )
    model.to(memory_format=layout)  # type: ignore[call-overload]
    return model, torch.randn(8, 3, 32, 32).to(memory_format=layout)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "relu": lambda: convolutions(nn.ReLU, torch.contiguous_format),
    "relu channels last": lambda: convolutions(nn.ReLU, torch.channels_last),
    "hardtanh": lambda: convolutions(nn.Hardtanh, torch.contiguous_format),
    "hardswish": lambda: convolutions(nn.Hardswish, torch.contiguous_format),
    "gelu": lambda: convolutions(nn.GELU, torch.contiguous_format),
    "silu": lambda: convolutions(nn.SiLU, torch.contiguous_format),
    "recurrent": lambda: (Recurrent(), torch.randn(16, 24, 16)),
    "attention": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2),
        torch.randn(8, 32, 64),
    ),
    "attention before norms": lambda: (
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True, activation="gelu"),
            2,
            enable_nested_tensor=False,
        ),
        torch.randn(8, 32, 64),
    ),
}


def training(name: str, where: Where) -> tuple[nn.Module, Step]:
    """A network on a device with its step, the same at every call."""
    device, autocast_to = where
    torch.manual_seed(31)
    model, data = NETWORKS[name]()
    model, data = model.to(device), data.to(device)

    def step(context: AbstractContextManager[object]) -> list[Tensor | None]:
        torch.manual_seed(32)
        model.zero_grad()
        with context, nullcontext() if autocast_to is None else torch.autocast(device, autocast_to):
            loss = model(data).float().square().mean()
        loss.backward()
        return [None if p.grad is None else p.grad.cpu() for p in model.parameters()]

    return model, step


def check(name: str, where: Where, context: AbstractContextManager[object]) -> None:
    """Compares the gradients of every step, but for those that plain PyTorch itself computes differently."""
    _, plain = training(name, where)
    expected = [plain(nullcontext()) for _ in range(STEPS)]
    _, treated = training(name, where)
    for number, gradients in enumerate(expected):
        found = differences(gradients, treated(context))
        if found:
            unstable = {
                text.partition(":")[0] for _ in range(8) for text in differences(gradients, plain(nullcontext()))
            }
            found = [text for text in found if text.partition(":")[0] not in unstable]
        assert not found, f"{name}, step {number}"


@pytest.mark.parametrize("where", WHERE, ids=str)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NETWORKS)
def test_policy(name: str, policy: str, where: Where) -> None:
    check(name, where, Session(Everything() if policy == "everything" else policy, min_nbytes=0))


@pytest.mark.parametrize("where", WHERE, ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_budget(name: str, where: Where) -> None:
    """Of 80 % of plain's peak, or of the smallest peak where that is larger."""
    model, step = training(name, where)
    profile = bs.profile(lambda: step(nullcontext()), model, device=where[0])
    try:
        plan = bs.plan(profile, budget="80%")
    except BudgetError as error:
        plan = cast(bs.Plan, error.plan)
    check(name, where, Session(plan))

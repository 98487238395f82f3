"""The estimates in C++ are those of the reference, whatever is saved of whatever graph."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backstash import compile_backend, policies
from backstash.compile.budget import splitting
from backstash.compile.budget.joint import Joint
from backstash.compile.budget.lifetimes import Lifetimes
from backstash.ops.cpu import library
from tests.compile.compiled_steps import Bottleneck

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not library.available(), reason="there are no native kernels"),
]


class Depthwise(nn.Module):
    """Depthwise convolutions, activations that compilers compute twice, and a pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.SiLU(),
            nn.Conv2d(32, 32, 3, padding=1, groups=32),
            nn.BatchNorm2d(32),
            nn.Hardswish(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 1),
            nn.GELU(),
            nn.Dropout(0.1),
        )
        self.last = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.layers(x).mean((2, 3)))
        return out


class Recurrent(nn.Module):
    """The same weights again and again, and a loss of probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.Linear(128, 64), nn.Linear(64, 300)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 64)
        for step in range(5):
            gate = torch.sigmoid(self.cell(torch.cat([x[:, step], state], 1)))
            state = torch.where(gate > 0.5, gate * state, torch.tanh(state + x[:, step]).relu())
        return nn.functional.cross_entropy(self.last(state), torch.arange(len(x)) % 300)


def programs() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation="gelu")
    return {
        "bottlenecks": (nn.Sequential(*(Bottleneck(64) for _ in range(3))), torch.randn(4, 64, 16, 16)),
        "depthwise": (Depthwise(), torch.randn(8, 3, 32, 32)),
        "attention": (nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(8, 32, 64)),
        "recurrent": (Recurrent(), torch.randn(16, 5, 64)),
    }


def graphs(model: nn.Module, x: Tensor, policy: Any, fuses: bool, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each graph that a search is given, with what may be done."""
    found: list[Any] = []
    search = splitting._searched

    def noted(joint: Joint, starts: Any, options: Any, nbytes: int) -> Any:
        found.append((joint, options))
        return search(joint, starts, options, nbytes)

    monkeypatch.setattr(splitting, "_searched", noted)
    torch._dynamo.reset()
    ours = compile_backend(policy, budget=1000, min_nbytes=0)
    ours.treatment.fuses = fuses
    torch.compile(model, backend=ours, fullgraph=True)(x).square().mean().backward()
    return found


@pytest.mark.parametrize("program", ["bottlenecks", "depthwise", "attention", "recurrent"])
@pytest.mark.parametrize("fuses", [True, False])
@pytest.mark.parametrize("policy", ["lossless", policies.quantized(4)], ids=["lossless", "quantized"])
def test_estimates_are_the_references(program: str, fuses: bool, policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = programs()[program]
    drawn = random.Random(0)
    for joint, options in graphs(model, x, policy, fuses, monkeypatch):
        for saves_copies in (True, False):
            joint.saves_copies = saves_copies
            some = [number for number in range(len(joint.nodes)) if joint.nbytes[number]]
            for turn in range(60):
                # What the policy rounds, and anything else in any form: a search never asks for that.
                rounded = dict(options.rounded) if turn % 2 else {n: joint.nbytes[n] // 8 + 4 for n in some}
                tests = dict(options.tests) if turn % 2 else {n: drawn.choice(some) for n in some if n % 7 == turn % 7}
                native, reference = (Lifetimes(joint, rounded, tests) for _ in range(2))
                assert native._native is not None
                reference._native = None
                share = drawn.random()
                saved = {number: joint.nbytes[number] for number in some if drawn.random() < share}
                for number in [number for number in saved if drawn.random() < 0.4]:
                    saved[number] = rounded.get(number, max(1, joint.nbytes[number] // 3))
                one, other = native.estimate(saved), reference.estimate(saved)
                assert one.forward.tolist() == other.forward.tolist()
                assert one.backward.tolist() == other.backward.tolist()
                assert (list(one.saved.items()), one.again) == (list(other.saved.items()), other.again)
                assert one.seconds == other.seconds

"""Each step takes what its like take, from the first one on, and never more than plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash import Session, codecs, policies
from backstash import session as sessions
from backstash.report.meter import CountedPeak

Program = Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]

STEPS = 10
SLACK = 32 << 10
OF_MASKS = 0.025
"""Masks that are beside what was decoded, and what a first step proves, as a share of plain's peak of a block."""


@pytest.fixture(autouse=True)
def _has_compiled_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "has_compiled", lambda: False)


def head() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A loss whose kernel may free the logits early, and nothing else that can be made smaller."""
    x, y = torch.randn(256, 64), torch.randint(0, 8000, (256,))
    return nn.Linear(64, 8000), lambda model: F.cross_entropy(model(x), y)


def penalty() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A sum of squares of weights, each of which is small enough to be copied where a recipe reads it."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(12)])
    x = torch.randn(256, 256)

    def loss(model: nn.Module) -> Tensor:
        return model(x).square().mean() + 1e-4 * sum(w.pow(2).sum() for w in model.parameters())

    return model, loss


def scaled() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Weights that are scaled before they are used."""
    weights = nn.ParameterList([torch.randn(256, 256) * 0.05 for _ in range(12)])
    x = torch.randn(256, 256)

    def loss(model: nn.Module) -> Tensor:
        y = x
        for weight in weights:
            y = F.relu(y @ (weight * 0.9 + 0.01)) + y
        return y.square().mean()

    return weights, loss


class Block(nn.Module):
    """Two layers around a function of hidden features, which has as many as the rest of the step together."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(32, 512), nn.Linear(32, 512), nn.Linear(512, 32)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.function(self.first(x), self.gate(x)))
        return y


def block(function: Callable[[Tensor, Tensor], Tensor]) -> Program:
    """What backward reads whole of it is all that the step saves, or nearly so."""

    def program() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
        x = torch.randn(1024, 32)
        return Block(function), lambda model: model(x).square().mean()

    return program


def masked(a: Tensor, gate: Tensor) -> Tensor:
    """Weights below a diagonal."""
    return (a - 1e9 * torch.ones_like(a).triu(1)).exp() * gate


class InOne(torch.autograd.Function):
    """Layers with a relu behind each, in one node, which reads all that it has saved before it computes anything."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        hidden = [x]
        for weight in weights:
            hidden.append(F.relu(hidden[-1] @ weight))
        ctx.save_for_backward(*hidden, *weights)
        return hidden[-1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved, (grad,) = ctx.saved_tensors, grads
        hidden, weights = saved[: len(saved) // 2 + 1], saved[len(saved) // 2 + 1 :]
        found = []
        for above, below, weight in zip(hidden[:0:-1], hidden[-2::-1], weights[::-1], strict=True):
            grad = grad * (above > 0)
            found.append(below.mT @ grad)
            grad = grad @ weight.mT
        return grad, *found[::-1]


def in_one() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A network whose values are read by one node, as those of a model that is compiled as a whole."""
    weights = nn.ParameterList([torch.randn(256, 256) * 0.08 for _ in range(6)])
    x = torch.randn(1024, 256, requires_grad=True)
    return weights, lambda weights: InOne.apply(x, *weights).square().mean()  # type: ignore[misc]


BLOCKS: dict[str, Program] = {
    "gated": block(lambda a, gate: F.relu(a) * gate),
    "squared": block(lambda a, gate: F.relu(a) ** 2 + gate.mean()),
    "twice": block(lambda a, gate: (lambda h: h * h)(F.relu(a))),
    "masked": block(masked),
    "tanh": block(lambda a, gate: a.tanh()),
    "two gates": block(lambda a, gate: F.relu(a) * F.relu(gate)),
}
PROGRAMS: dict[str, Program] = {"head": head, "penalty": penalty, "scaled": scaled, "in one": in_one, **BLOCKS}


def peaks(program: str, context: Any) -> list[int]:
    torch.manual_seed(0)
    model, loss = PROGRAMS[program]()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    found = []
    for _ in range(STEPS):
        with CountedPeak() as counted, context:
            loss(model).backward()
        found.append(counted.peak_nbytes)
    return found


DENSE = policies.lossless(dense=True)


@pytest.mark.parametrize(
    ("program", "policy"),
    [
        *itertools.product(PROGRAMS, ["lossless", "gist_lossless", "lossless_stored"]),
        *itertools.product(["head", "penalty", "in one", "squared", "twice", "tanh"], [DENSE]),
    ],
    ids=str,
)
def test_no_step_takes_more_than_plain(program: str, policy: Any) -> None:
    plain, found = peaks(program, nullcontext()), peaks(program, Session(policy))
    most = max(plain) * (1 + (OF_MASKS if program in BLOCKS else 0)) + SLACK
    assert max(found) <= most, [each - max(plain) for each in found]


def test_what_a_kernel_frees_early_keeps_a_session_awake() -> None:
    plain, found = peaks("head", nullcontext()), peaks("head", Session("lossless"))
    assert max(found) <= 0.75 * max(plain)


def test_keep_rests_nevertheless() -> None:
    session = Session("keep")
    peaks("head", session)
    assert session._forward.is_idle


@pytest.mark.parametrize("numel", [2, 5, (1 << 16) + 3, (1 << 20) + 1])
def test_signs_are_mended_in_little_memory(numel: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    x[::3] = 0
    codec = codecs.Signed(codecs.BlockQuant(4))
    with CountedPeak() as encoding:
        encoded = codec.encode(x)
    with CountedPeak() as decoding:
        decoded = codec.decode(encoded)
    assert decoded.sign().equal(x.sign())
    least = x[x != 0].abs().min()
    assert decoded[x != 0].abs().min() >= least
    most = 2.5 * x.nbytes + 4 * (1 << 18)  # for the parts that are worked on
    assert decoding.peak_nbytes <= most and encoding.peak_nbytes <= most

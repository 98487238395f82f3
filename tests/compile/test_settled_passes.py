"""Steps with compiled parts settle, have plain PyTorch's bits, and compile nothing more than plain PyTorch does."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backstash import Session
from backstash.replay import replaying
from backstash.torch_internals import compile_counters

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(replaying.native is None, reason="nothing is replayed without the interpreter"),
]

STEPS = 16


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.inner(x)))


class Broken(nn.Module):
    """Dynamo compiles it in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.first(x))
        torch._dynamo.graph_break()
        return self.second(y).relu() * x  # type: ignore[no-any-return]


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.silu(self.inner(self.norm(x))), 0.2, self.training)


class Checkpointed(nn.Module):
    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def compiled(part: Callable[..., Tensor], choose: random.Random) -> Callable[..., Tensor]:
    return torch.compile(part, backend=choose.choice(["eager", "aot_eager"]), dynamic=choose.choice([None, False]))


def trained(seed: int, is_treated: bool) -> tuple[list[Tensor], int, bool]:
    """Trains a random network, of which parts are compiled.

    Returns:
        All losses, outputs and gradients; how many frames were compiled; and whether steps have settled.
    """
    torch._dynamo.reset()
    torch.manual_seed(seed)
    choose, before = random.Random(seed), sum(compile_counters()["frames"].values())
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(choose.randint(2, 4)):
        part: nn.Module = choose.choice((Residual, Broken, Dropped))()
        way = choose.random()
        layers.append(part if way > 0.6 else Checkpointed(compiled(part, choose)) if way > 0.4 else part)
        if way <= 0.4:
            part.compile(backend="aot_eager")
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    loss_of = compiled(F.cross_entropy, choose) if choose.random() < 0.4 else F.cross_entropy
    is_rounded, evaluates = choose.random() < 0.3, choose.random() < 0.3
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    session = Session("lossless", model=model, min_nbytes=0, stop_if_useless=False) if is_treated else None
    found, has_settled = [], False
    for step in range(STEPS):
        x, y = torch.randn(4, 3, 10, 10), torch.randint(5, (4,))
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_rounded), session or nullcontext():
            loss = loss_of(model(x), y)
        loss.backward()
        grads = [weight.grad for weight in model.parameters()]
        found += [loss.detach().clone(), *(grad.clone() for grad in grads if grad is not None)]
        has_settled |= session is not None and session._is_replayed
        optimizer.step()
        if evaluates and step % 4 == 3:
            model.eval()
            with torch.no_grad():
                found.append(model(x))
            model.train()
    return found, sum(compile_counters()["frames"].values()) - before, has_settled


@pytest.mark.parametrize("seed", range(40))
def test_compiled_parts_of_settled_steps(seed: int) -> None:
    expected, plainly, _ = trained(seed, False)
    found, treated, has_settled = trained(seed, True)
    assert all(map(torch.equal, expected, found))
    assert treated <= plainly
    assert has_settled


def test_a_compiled_update_lets_steps_settle() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    update = torch.compile(optimizer.step, backend="eager")
    session = Session("lossless", model=model, min_nbytes=0, stop_if_useless=False)
    for _ in range(10):
        optimizer.zero_grad()
        with session:
            loss = model(torch.randn(64, 16)).square().mean()
        loss.backward()
        update()
    assert session._is_replayed

"""Parts of what a call has made: functions of them are made again with their bits, in settled passes too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstash as bs
from backstash.planning.search.planner import Planner
from tests.gradients.gradient_checks import Remake

STEPS = 24
PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda h: h,
    "first": lambda h: h[:32],
    "last": lambda h: h[32:],
    "middle": lambda h: h[16:48],
    "chunk": lambda h: h.chunk(2)[1],
    "select": lambda h: h.view(2, 32, 64)[1],
    "unbind": lambda h: h.view(4, 16, 64).unbind()[2],
    "narrow": lambda h: h.narrow(0, 8, 40),
    "columns": lambda h: h[:, 16:],
    "transposed": lambda h: h.t()[32:],
    "flat": lambda h: h.view(-1)[64:].view(63, 64),
}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "leaky_relu": F.leaky_relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "add": lambda x: x + 0.5,
    "mul": lambda x: x * 1.5,
    "add another": lambda x: x + x.detach().flip(0),
}


class Parted(nn.Module):
    """Layers of which functions read a part."""

    def __init__(self, part: Callable[[Tensor], Tensor], function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])
        self.part, self.function = part, function

    def forward(self, x: Tensor) -> Tensor:
        """Rows [64, 64] to a number."""
        total = x.new_zeros(())
        for layer in self.layers:
            total = total + (self.function(self.part(layer(x))).square() * 1.25).exp().clamp(max=3.0).sum()
        return total


def assert_same(plain: nn.Module, ours: nn.Module, session: bs.Session) -> None:
    """Trains both for some steps on the same rows, and compares the gradients of each step."""
    for step in range(STEPS):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
        plain(x).backward()
        with session:
            loss = ours(x)
        loss.backward()
        for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None and one.grad.equal(other.grad), step
        for model in (plain, ours):
            model.zero_grad()


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
def test_a_function_of_a_part_is_made_again(
    part: Callable[[Tensor], Tensor], function: Callable[[Tensor], Tensor]
) -> None:
    plain, ours = Parted(part, function), Parted(part, function)
    assert_same(plain, ours, bs.Session(Remake(), model=ours, min_nbytes=0))


def test_a_plan_makes_functions_of_parts_again() -> None:
    plain, ours = (Parted(PARTS["last"], F.relu) for _ in range(2))
    x = torch.randn(64, 64)
    least = Planner(bs.profile(lambda: ours(x).backward(), ours, min_nbytes=0)).at_most(0)
    assert any(decision.kind == "recompute" for decision in least.decisions)
    assert_same(plain, ours, bs.Session(least, model=ours, min_nbytes=0))

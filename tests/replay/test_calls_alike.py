"""A settled pass tells calls of one function apart, also where it need not note each of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from backstash import Session
from backstash.capture import learned
from backstash.planning.search.planner import Planner

STEPS = learned.EQUAL_PASSES + 3
MIN_NBYTES = 1024

Function = Callable[[Tensor], Tensor]

FUNCTIONS: dict[str, Function] = {
    "neg": torch.neg,
    "add": lambda x: x + 1.0,
    "cat": lambda x: torch.cat([torch.tensor([]), x]),  # as a cache of keys and values begins
    "flip": lambda x: x.flip(-1),
    "contiguous": lambda x: x.t().contiguous(),
}


class Alike(nn.Module):
    """Some results of a function that nothing is made again from, and one of which something is.

    Args:
        function: the function.
        order: of its calls; those of the number 2 are saved.
    """

    def __init__(self, function: Function, order: tuple[int, ...]) -> None:
        super().__init__()
        self.function, self.order, self.temperature = function, order, 1.0
        self.layers = nn.ModuleList(nn.Linear(16, 32) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        features = [layer(x).tanh() for layer in self.layers]
        made = [(number, self.function(features[number])) for number in self.order]
        used = sum((y * self.scale * self.temperature).square().mean() for number, y in made if number == 2)
        return used + sum(y.mean() for number, y in made if number != 2)  # which saves the shape alone


def _train(model: Any, session: Any, steps: int = STEPS, seen: Callable[[], None] = lambda: None) -> list[Tensor]:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(steps):
        model.zero_grad()
        with session:
            loss = model(x)
        loss.backward()
        seen()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


def _planned(model: nn.Module) -> Session:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    profile = bs.profile(lambda: model(x).backward(), model, min_nbytes=MIN_NBYTES)
    model.zero_grad()
    return Session(Planner(profile).at_most(0), model=model, min_nbytes=MIN_NBYTES, stop_if_useless=False)


def _lossless(model: nn.Module) -> Session:
    return Session("lossless", model=model, min_nbytes=MIN_NBYTES, stop_if_useless=False)


@pytest.mark.parametrize("make_session", [_lossless, _planned])
@pytest.mark.parametrize("order", [(0, 2), (0, 1, 2), (0, 2, 1), (2, 0), (0, 2, 1, 2), (1, 0, 2, 0)], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_value_is_made_from_its_own_call(
    function: str, order: tuple[int, ...], make_session: Callable[[nn.Module], Session]
) -> None:
    torch.manual_seed(0)
    plain = Alike(FUNCTIONS[function], order)
    other = copy.deepcopy(plain)
    session = make_session(other)
    peaks: dict[bool, int] = {}

    def look() -> None:
        peaks[session._is_replayed] = session._live.peak_nbytes

    wanted, found = _train(plain, nullcontext()), _train(other, session, seen=look)
    assert all(x.equal(y) for x, y in zip(wanted, found, strict=True))
    assert session._is_replayed, session._replaying.told(session._names.learned.passes)
    assert not any(taken is False for taken in session._replaying._native.counts())
    assert peaks[True] <= peaks[False]


def test_what_a_plan_makes_again_is_not_kept_in_silence() -> None:
    torch.manual_seed(0)
    plain = Alike(torch.neg, (2,))
    other = copy.deepcopy(plain)
    session = _planned(other)
    assert _train(plain, nullcontext())[-1].equal(_train(other, session)[-1])
    assert session._is_replayed
    seen: list[tuple[bool, int]] = []
    for number in range(1, 8):  # it changes in each step, so no script makes the value again
        plain.temperature = other.temperature = 1.0 + number / 8
        found = _train(other, session, 1, lambda: seen.append((session._is_replayed, session.report().stash_nbytes)))
        assert all(x.equal(y) for x, y in zip(_train(plain, nullcontext(), 1), found, strict=True))
    assert [is_replayed for is_replayed, _ in seen].count(True) == 1
    assert seen[0][1] > seen[-1][1]

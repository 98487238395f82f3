"""Stored values are freed as their graph is: nothing waits for the collector of cycles that Python has."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from backstash import Session, policies
from backstash.codecs.base import Encoded
from backstash.papers.comet import comet
from backstash.policies import Policy
from backstash.stash.value import Value


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Block(nn.Module):
    """Images through norms and a residual sum, then rows through a layer norm, a gelu and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.inner, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 3, h, w] to [n, 4]."""
        x = functional.relu(self.first(self.stem(x)))
        x = functional.max_pool2d(functional.relu(x + self.second(self.inner(x))), 2)
        rows = self.norm(x.flatten(2).transpose(1, 2))
        rows = functional.dropout(functional.gelu(self.wide(rows)), 0.1)
        return self.narrow(rows).mean(1)  # type: ignore[no-any-return]


def held() -> tuple[int, int]:
    """How many values there are, and how many that are stored."""
    kinds = [type(each) for each in gc.get_objects()]
    return kinds.count(Value), kinds.count(Encoded)


@pytest.mark.parametrize("name", [*policies.names(), "comet"])
def test_nothing_of_a_step_outlives_it(name: str) -> None:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(4, 3, 16, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    policy: str | Policy = comet("conv+norm", every=4, optimizer=optimizer, samples=4) if name == "comet" else name
    session = Session(policy, model=model, min_nbytes=0, stop_if_useless=False)
    before = held()
    for _ in range(12):
        optimizer.zero_grad()
        with session:
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        del loss
        assert held() == before

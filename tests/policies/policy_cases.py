"""Saved tensors that policies are asked about, and a policy that remembers the questions."""

from __future__ import annotations

import torch

from backstash.policies import Keep, Outcome
from backstash.saved import Mask, Need, PoolWindow, SavedTensor, TensorSpec, Test

WINDOW = PoolWindow((4, 4), (2, 2), (2, 2), (0, 0), (1, 1))
MASK = Mask(Test.NOT_LE)


def saved(
    need: Need = Need.VALUE,
    dtype: torch.dtype = torch.float32,
    key: str = "features.0/Relu#0:result",
    mask: Mask | None = None,
    window: PoolWindow | None = None,
) -> SavedTensor:
    spec = TensorSpec.of(torch.empty(2, 3, dtype=dtype))
    return SavedTensor(key, "Relu", "result", "features.0", spec, need, mask, window)


class Asked:
    """Keeps every tensor, and remembers what it was asked and told. It does not inherit from Policy."""

    def __init__(self) -> None:
        self.asked: list[SavedTensor] = []
        self.told: list[Outcome] = []

    def decide(self, saved: SavedTensor) -> Keep:
        self.asked.append(saved)
        return Keep("asked")

    def observe(self, outcome: Outcome) -> None:
        self.told.append(outcome)

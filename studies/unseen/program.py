"""Training programs for the judgement of plans: a model, and a function that runs forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Program:
    """A training program.

    Attributes:
        model: everything that it trains.
        step: runs forward and backward, and whatever else belongs to a step of it.
    """

    model: nn.Module
    step: Callable[[], object]


def supervised(model: nn.Module, loss: Callable[[], Tensor]) -> Program:
    """Returns the usual program: one loss, one backward pass."""
    return Program(model.train(), lambda: loss().backward())

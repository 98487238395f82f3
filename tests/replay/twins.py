"""Two models that train in the same way, one of them under a Session whose passes become known."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import backstash as bs
from backstash import Session
from backstash.capture import learned
from backstash.policies import Keep, Policy
from backstash.testing import equal_bits

STEPS = learned.EQUAL_PASSES + 3
"""Steps after which a pass is known."""

MIN_NBYTES = 4096


class Twin:
    """A model that trains plain, and a copy of it that trains under a Session: their gradients are compared."""

    def __init__(self, model: nn.Module, policy: Any = "lossless", **options: Any) -> None:
        self.plain, self.other = model, copy_of(model)
        options = {"min_nbytes": MIN_NBYTES, "stop_if_useless": False, **options}
        self.session = Session(policy, model=self.other, **options)

    @property
    def passes(self) -> learned.Passes:
        passes: learned.Passes = self.session._names.learned.passes
        return passes

    def change(self, change: Callable[[Any], object]) -> None:
        """Does the same to both."""
        change(self.plain)
        change(self.other)

    def step(self, x: Tensor, backward: Callable[[Tensor], object] = Tensor.backward) -> None:
        """A step of both, after which they have the same gradients and buffers."""
        found = []
        for model, entered in ((self.plain, False), (self.other, True)):
            model.zero_grad()
            torch.manual_seed(3)
            if entered:
                with self.session:
                    loss = model(x)
            else:
                loss = model(x)
            backward(loss)
            found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()])
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.01 * parameter.grad
        assert len(found[0]) == len(found[1])
        assert all(equal_bits(x, y) for x, y in zip(*found, strict=True))

    def settle(self, x: Tensor) -> None:
        """Steps until passes are replayed."""
        for _ in range(STEPS):
            self.step(x)
        assert self.session._is_replayed, self.passes.refusal


def copy_of(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def costly(otherwise: Any = None) -> Policy:
    """Everything is made again, by costly calls too."""
    recompute = bs.policies.Recompute(otherwise or Keep(), any_producer=True)
    return bs.policies.Rules((("*", recompute),), otherwise=bs.policies.get("lossless"))

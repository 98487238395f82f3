"""Plans of steps with torch's checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import backstash as bs
from backstash.errors import BudgetError
from backstash.report.meter import CountedPeak

pytestmark = pytest.mark.usefixtures("compiles_nothing")

CHANNELS = 32


class Residual(nn.Module):
    """Convolutions around blocks of which each runs in a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()

        def block() -> nn.Module:
            return nn.Sequential(nn.GroupNorm(8, CHANNELS), nn.SiLU(), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1))

        self.first, self.last = nn.Conv2d(3, CHANNELS, 3, padding=1), nn.Conv2d(CHANNELS, 3, 3, padding=1)
        self.inner, self.reentrant = nn.ModuleList(block() for _ in range(3)), reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.inner:
            h = h + checkpoint(block, h, use_reentrant=self.reentrant)
        result: Tensor = self.last(functional.silu(h))
        return result


def planned(model: nn.Module, loss: Callable[[], Tensor], share: float) -> bs.Plan:
    """A plan for a part of the way from the smallest budget to the plain peak."""
    profile = bs.profile(lambda: loss().backward(), model)
    with pytest.raises(BudgetError) as refused:
        bs.plan(profile, 1)
    least = refused.value.smallest_nbytes
    return bs.plan(profile, int(least + share * (profile.plain_peak_nbytes - least)))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_budgets_are_kept_when_steps_have_settled_too(share: float, reentrant: bool) -> None:
    torch.manual_seed(0)
    model, x = Residual(reentrant), torch.randn(4, 3, 32, 32)

    def loss() -> Tensor:
        found: Tensor = model(x).square().mean()
        return found

    if reentrant:
        with pytest.warns(UserWarning, match=r"while backward runs.*call backward\(\) inside of it"):
            found = planned(model, loss, share)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = planned(model, loss, share)
    session = bs.Session(found, model=model)
    loss().backward()  # gradients are there before a planned step
    for _ in range(8):
        with CountedPeak() as counted, session if reentrant else nullcontext():
            with session if not reentrant else nullcontext():
                outcome = loss()
            outcome.backward()
            del outcome
        assert counted.peak_nbytes <= found.peak_nbytes

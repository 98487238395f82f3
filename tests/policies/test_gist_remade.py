"""Gist's rules with and without remaking: what is exact, and which is smaller."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from backstash import Need, Policy, Session
from backstash.policies import Gist
from backstash.policies.base import Recompute, Stash
from backstash.saved import SavedTensor, TensorSpec


def block() -> nn.Module:
    """A transformer's feed-forward layer, whose norm and gelu can be remade."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def step(policy: str | Policy | None) -> tuple[list[Tensor], int]:
    """The gradients of a step, and the bytes that were stored for it."""
    model, x = block(), torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    if policy is None:
        model(x).square().sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], 0
    with Session(policy, min_nbytes=64) as session:
        model(x).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], (
        session.report().stash_nbytes
    )


def test_gist_stores_no_more_than_lossless_and_no_bit_differs() -> None:
    expected, _ = step(None)
    found = {name: step(name) for name in ("lossless", "gist_lossless", "gist_paper")}
    for gradients, _ in found.values():
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert found["gist_lossless"][1] <= found["lossless"][1] < found["gist_paper"][1]


@pytest.mark.parametrize("format", [None, "fp16", "fp8"])
def test_the_variant_of_the_paper_remakes_nothing(format: str | None) -> None:
    x = torch.zeros(8, 8)
    saved = SavedTensor("a/Gelu#0:self", "Gelu", "self", "a", TensorSpec.of(x), Need.VALUE)
    assert isinstance(Gist(format).decide(saved), Recompute)
    assert isinstance(Gist(format, recompute=False).decide(saved), Stash)
    assert Gist(format).decide(saved).otherwise == Gist(format, recompute=False).decide(saved)  # type: ignore[union-attr]
    assert (Gist(format).recomputes, Gist(format, recompute=False).recomputes) == (True, False)

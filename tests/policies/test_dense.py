"""The policy lossless with dense values in fewer bits: the same gradients, and fewer bytes than without."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstash as bs
from backstash.bits import equal_bits


class Block(nn.Module):
    """A gated layer, of whose saved tensors none has zeros and some can only be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.gate = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _step(policy: bs.Policy | None, dtype: torch.dtype) -> tuple[list[Tensor], bs.Session | None]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3))).to(dtype)
    batch = torch.randn(8, 64, 64, dtype=dtype)
    session = None if policy is None else bs.Session(policy, model=model, min_nbytes=0)
    for _ in range(3):
        model.zero_grad()
        with session or nullcontext():
            loss = model(batch).square().mean()
        loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], session


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 1.2), (torch.float32, 1.08)])
def test_dense_values_take_fewer_bytes_and_gradients_have_the_same_bits(
    dtype: torch.dtype, least: float, recompute: bool
) -> None:
    plain, _ = _step(None, dtype)
    found = {}
    for dense in (False, True):
        gradients, session = _step(bs.policies.lossless(recompute=recompute, dense=dense), dtype)
        assert all(equal_bits(mine, other) for mine, other in zip(gradients, plain, strict=True))
        assert session is not None
        found[dense] = session.report()
    assert found[True].stash_nbytes * least < found[False].stash_nbytes
    assert not any(row.codec == "exponents" for row in found[False].rows)
    assert any(row.codec == "exponents" for row in found[True].rows)


def test_half_precision_is_kept() -> None:
    _, session = _step(bs.policies.lossless(recompute=False, dense=True), torch.float16)
    assert session is not None
    assert not any(row.codec == "exponents" for row in session.report().rows)


class Norm(nn.Module):
    """A norm that computes in float32, as those of Llamas do: it saves its input as float32."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def test_copies_in_float32_of_bfloat16_numbers_are_stored_as_these() -> None:
    def step(session: bs.Session | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), Norm(), nn.Linear(64, 64), Norm(), nn.Linear(64, 64)).bfloat16()
        with nullcontext() if session is None else session:
            loss = model(torch.randn(512, 64).bfloat16()).square().mean()
        loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    session = bs.Session(bs.policies.lossless(recompute=False, dense=True), min_nbytes=0)
    plain = step(None)
    for _ in range(2):
        assert all(equal_bits(mine, other) for mine, other in zip(step(session), plain, strict=True))
    rows = [row for row in session.report().rows if "Pow" in row.key and row.saved_nbytes == 4 * 512 * 64]
    assert len(rows) == 2 and all(row.codec == "upcast exponents" for row in rows)
    assert all(row.saved_nbytes > 2.6 * row.stash_nbytes for row in rows)


def test_dense_values_are_moved_with_shorter_exponents() -> None:
    plain, _ = _step(None, torch.bfloat16)
    moved = {}
    for dense in (False, True):
        gradients, session = _step(bs.policies.offload(recompute=False, dense=dense), torch.bfloat16)
        assert all(equal_bits(mine, other) for mine, other in zip(gradients, plain, strict=True))
        assert session is not None
        moved[dense] = session.report().moved_nbytes
    assert 0 < 1.2 * moved[True] < moved[False]

"""Integers in as few bits as their range needs."""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.ops import bytes_for, kernel, pack_fields, unpack_fields


def _packed(x: Tensor, bits: int, base: int) -> Tensor:
    return x.new_empty(bytes_for(x.numel(), bits), dtype=torch.uint8)


@kernel("(Tensor x, int bits, int base) -> Tensor", _packed)
def narrow_encode(x: Tensor, bits: int, base: int) -> Tensor:
    """Packs ``x - base``, which must fit, of integers (or bool) [n] in ``bits`` bits each: see :func:`pack_fields`."""
    return pack_fields(x.long() - base, bits)


@kernel("(Tensor packed, int bits, int base, Tensor(a!) out) -> ()")
def narrow_decode(packed: Tensor, bits: int, base: int, out: Tensor) -> None:
    """Fills ``out`` [n] of an integer dtype or bool with ``field + base``."""
    out.copy_(unpack_fields(packed, bits, out.numel()) + base)

"""Integers in as few bits as their range needs."""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.ops.layout import bytes_for
from backstash.ops.reference.bits import pack, unpack
from backstash.ops.table import kernel


def _packed(x: Tensor, bits: int, base: int) -> Tensor:
    return x.new_empty(bytes_for(x.numel(), bits), dtype=torch.uint8)


@kernel("(Tensor x, int bits, int base) -> Tensor", _packed)
def narrow_encode(x: Tensor, bits: int, base: int) -> Tensor:
    """Packs ``x - base`` of integers (or bool) [n] in ``bits`` bits each (see :func:`pack`). ``x - base`` must fit."""
    return pack(x.long() - base, bits)


@kernel("(Tensor packed, int bits, int base, Tensor(a!) out) -> ()")
def narrow_decode(packed: Tensor, bits: int, base: int, out: Tensor) -> None:
    """Fills ``out`` [n] of an integer dtype or bool with ``field + base``."""
    out.copy_(unpack(packed, bits, out.numel()) + base)

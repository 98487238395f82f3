"""The upper halves of float32 numbers, and whether the lower ones are zero: see codecs.upcast for the layout."""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.ops import kernel


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.numel(), dtype=torch.bfloat16), x.new_empty(1, dtype=torch.int64)


@kernel("(Tensor x) -> (Tensor, Tensor)", _halves)
def upcast_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the bfloat16 numbers that float32 numbers [n] were, and how many of these have other bits besides.

    Returns:
        bfloat16 [n], the upper 16 bits of each element, whatever they mean; int64 [1], the number of elements whose
        lower 16 bits are not all zero. With none, ``x`` is the first result as float32, bit for bit.
    """
    words = x.view(torch.int32)
    upper = (words >> 16).to(torch.int16).view(torch.bfloat16)
    return upper, torch.count_nonzero(words & 0xFFFF).reshape(1)

"""The upper halves of float32 numbers in C++."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backstash.ops.cpu import library
from backstash.ops.cpu.planes import new_plane, threads_for

_lib: Any = library.functions(
    bs_upcast_encode="l(plpi)",
)


def upcast_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`backstash.codecs.upcast.reference.upcast_encode`."""
    upper = new_plane(x.numel(), torch.bfloat16)
    others = _lib.bs_upcast_encode(x.data_ptr(), x.numel(), upper.data_ptr(), threads_for(x.nbytes))
    return upper, torch.full((1,), others, dtype=torch.int64, device="cpu")

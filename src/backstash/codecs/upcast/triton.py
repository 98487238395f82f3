"""The upper halves of float32 numbers, on CUDA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.ops import bits_of
from backstash.ops.triton.elements import block_offsets
from backstash.ops.triton.launching import launch_elements


@triton.jit
def upcast_encode_kernel(x_ptr, upper_ptr, others_ptr, numel, BLOCK: tl.constexpr):
    """Stores upper halves; adds to ``others`` the number of elements whose lower half is not zero."""
    offs = block_offsets(BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < numel, other=0)
    tl.store(upper_ptr + offs, (x >> 16).to(tl.int16), mask=offs < numel)
    total = tl.sum(((x & 0xFFFF) != 0).to(tl.int32), axis=0)
    tl.atomic_add(others_ptr, total.to(tl.int64), mask=total > 0, sem="relaxed")


def upcast_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`backstash.codecs.upcast.reference.upcast_encode`. Never waits for the device."""
    upper = x.new_empty(x.numel(), dtype=torch.bfloat16)
    others = x.new_zeros(1, dtype=torch.int64)
    launch_elements(upcast_encode_kernel, x.numel(), bits_of(x), bits_of(upper), others, x.numel())
    return upper, others

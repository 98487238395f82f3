"""One bit per element, on CUDA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.ops import bits_of, bytes_for
from backstash.ops.triton.elements import block_offsets, elements_of, to_bytes, to_flags, widened
from backstash.ops.triton.launching import check_plane, launch_bytes, number_bits
from backstash.saved import Test

NONZERO = tl.constexpr(Test.NONZERO.code)

NOT_LE = tl.constexpr(Test.NOT_LE.code)

GT = tl.constexpr(Test.GT.code)

INSIDE = tl.constexpr(Test.INSIDE.code)

NOT_OUTSIDE = tl.constexpr(Test.NOT_OUTSIDE.code)

CLOSED = tl.constexpr(Test.CLOSED.code)


@triton.jit
def bound_for(x, bits):
    """Returns a bound for ``x`` from its bits: a Python float would arrive as float32, too coarse for float64."""
    if x.dtype == tl.float64:
        value = bits.to(tl.int64).to(tl.float64, bitcast=True)
    else:
        value = bits.to(tl.int32).to(tl.float32, bitcast=True)
    return value


@triton.jit
def bitmask_encode_kernel(
    x_ptr, mask_ptr, numel, lo_bits: tl.int64, hi_bits: tl.int64, TEST: tl.constexpr, BLOCK_BYTES: tl.constexpr
):
    """Stores the outcome of ``TEST`` in a bit per element. For NONZERO ``x_ptr`` points to integers, else to floats.

    Every comparison is ordered (false with NaN) and the negations stand outside, as in ``reference.passes``.
    """
    offs_bytes = block_offsets(BLOCK_BYTES)
    offs_x = elements_of(offs_bytes)
    mask = offs_x < numel
    x = tl.load(x_ptr + offs_x, mask=mask, other=0)
    if TEST == NONZERO:
        flags = x != 0
    else:
        x = widened(x)
        low = bound_for(x, lo_bits)
        high = bound_for(x, hi_bits)
        if TEST == NOT_LE:
            flags = ~(x <= low)
        elif TEST == GT:
            flags = x > low
        elif TEST == INSIDE:
            flags = (low < x) & (x < high)
        elif TEST == NOT_OUTSIDE:
            flags = ~((x <= low) | (x >= high))
        else:
            tl.static_assert(TEST == CLOSED, "a test that this kernel does not know")
            flags = (low <= x) & (x <= high)
    tl.store(mask_ptr + offs_bytes, to_bytes(flags & mask), mask=offs_bytes * 8 < numel)


@triton.jit
def bitmask_decode_kernel(
    mask_ptr, out_ptr, numel, set_bits: tl.int64, clear_bits: tl.int64, BLOCK_BYTES: tl.constexpr
):
    """Stores one of two bit patterns per bit. ``out_ptr`` points to integers."""
    offs_bytes = block_offsets(BLOCK_BYTES)
    offs_out = elements_of(offs_bytes)
    flags = to_flags(tl.load(mask_ptr + offs_bytes, mask=offs_bytes * 8 < numel, other=0))
    if_set = set_bits.to(out_ptr.dtype.element_ty)
    if_clear = clear_bits.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs_out, tl.where(flags, if_set, if_clear), mask=offs_out < numel)


@triton.jit
def binary_encode_kernel(x_ptr, pair_ptr, mask_ptr, strangers_ptr, numel, BLOCK_BYTES: tl.constexpr):
    """Stores ``x != pair[0]`` in a bit per element; adds to ``strangers`` how many equal neither of the pair."""
    offs_bytes = block_offsets(BLOCK_BYTES)
    offs_x = elements_of(offs_bytes)
    mask = offs_x < numel
    x = tl.load(x_ptr + offs_x, mask=mask, other=0)
    flags = (x != tl.load(pair_ptr)) & mask
    tl.store(mask_ptr + offs_bytes, to_bytes(flags), mask=offs_bytes * 8 < numel)
    strangers = tl.sum((flags & (x != tl.load(pair_ptr + 1))).to(tl.int32))
    # Masked, so that the usual tensor, which has none, costs no atomic at all.
    tl.atomic_add(strangers_ptr, strangers.to(tl.int64), mask=strangers > 0, sem="relaxed")


@triton.jit
def binary_decode_kernel(mask_ptr, pair_ptr, out_ptr, numel, BLOCK_BYTES: tl.constexpr):
    """Stores ``pair[bit]`` per element. ``pair_ptr`` and ``out_ptr`` point to integers."""
    offs_bytes = block_offsets(BLOCK_BYTES)
    offs_out = elements_of(offs_bytes)
    flags = to_flags(tl.load(mask_ptr + offs_bytes, mask=offs_bytes * 8 < numel, other=0))
    tl.store(out_ptr + offs_out, tl.where(flags, tl.load(pair_ptr + 1), tl.load(pair_ptr)), mask=offs_out < numel)


@triton.jit
def mask_select_kernel(x_ptr, mask_ptr, out_ptr, numel, BLOCK_BYTES: tl.constexpr):
    """Stores each element whose bit is set, and zero for the others. ``x_ptr`` and ``out_ptr`` point to integers."""
    offs_bytes = block_offsets(BLOCK_BYTES)
    offs_x = elements_of(offs_bytes)
    flags = to_flags(tl.load(mask_ptr + offs_bytes, mask=offs_bytes * 8 < numel, other=0))
    x = tl.load(x_ptr + offs_x, mask=offs_x < numel, other=0)
    tl.store(out_ptr + offs_x, tl.where(flags, x, 0), mask=offs_x < numel)


def bitmask_encode(x: Tensor, test: int, lo: float, hi: float) -> Tensor:
    mask = x.new_empty(bytes_for(x.numel(), 1), dtype=torch.uint8)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    nonzero = test == Test.NONZERO.code
    bounds = (0, 0) if nonzero else (number_bits(lo, x.dtype, wide), number_bits(hi, x.dtype, wide))
    source = bits_of(x) if nonzero else x
    launch_bytes(bitmask_encode_kernel, mask, source, mask, x.numel(), *bounds, TEST=test)
    return mask


def bitmask_decode(mask: Tensor, out: Tensor, if_set: float, if_clear: float) -> None:
    check_plane("bitmask_decode", "mask", mask, bytes_for(out.numel(), 1), out)
    numbers = number_bits(if_set, out.dtype), number_bits(if_clear, out.dtype)
    launch_bytes(bitmask_decode_kernel, mask, mask, bits_of(out), out.numel(), *numbers)


def binary_encode(x: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
    mask = x.new_empty(bytes_for(x.numel(), 1), dtype=torch.uint8)
    strangers = x.new_zeros(1, dtype=torch.int64)
    launch_bytes(binary_encode_kernel, mask, bits_of(x), bits_of(pair), mask, strangers, x.numel())
    return mask, strangers


def binary_decode(mask: Tensor, pair: Tensor, out: Tensor) -> None:
    check_plane("binary_decode", "mask", mask, bytes_for(out.numel(), 1), out)
    check_plane("binary_decode", "pair", pair, 2, out)
    launch_bytes(binary_decode_kernel, mask, mask, bits_of(pair), bits_of(out), out.numel())


def mask_select(x: Tensor, mask: Tensor, out: Tensor) -> None:
    check_plane("mask_select", "mask", mask, bytes_for(x.numel(), 1), x)
    launch_bytes(mask_select_kernel, mask, bits_of(x), mask, bits_of(out), x.numel())

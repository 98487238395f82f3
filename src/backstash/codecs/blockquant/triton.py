"""Integers of few bits between each group's extremes, on CUDA."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.ops import ZVC_CHUNK, bits_of, bytes_for, groups
from backstash.ops.triton.elements import element_bits, rounded_bits, row_tile, single_bits
from backstash.ops.triton.launching import ZVC_WARPS, blocks_of, check_plane, launch


@triton.jit
def mixed(word):
    """Permutes the integers of 32 bits so that no pattern is left, uint32."""
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def blockquant_encode_kernel(
    x_ptr,
    codes_ptr,
    ranges_ptr,
    refused_ptr,
    numel,
    nbytes,
    seed: tl.int64,
    STOCHASTIC: tl.constexpr,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Stores codes and extremes of groups; adds to ``refused`` the elements and ranges that are not finite."""
    WIDE: tl.constexpr = x_ptr.dtype.element_ty == tl.int32
    LEVELS: tl.constexpr = (1 << BITS) - 1
    offs_groups, offs_x = row_tile(ROWS, GROUP)
    there = offs_x < numel
    word = single_bits(tl.load(x_ptr + offs_x, mask=there, other=0), HALF)
    finite = (word & 0x7FFFFFFF) < 0x7F800000
    x = word.to(tl.float32, bitcast=True)
    low = tl.min(tl.where(there & finite, x, float("inf")), axis=1)
    high = tl.max(tl.where(there & finite, x, float("-inf")), axis=1)
    some = low <= high
    low = tl.where(some, low, 0.0) + 0.0  # -0.0 becomes 0.0
    high = tl.where(some, high, 0.0) + 0.0
    span = high - low
    endless = tl.abs(span) == float("inf")
    refused = tl.sum((there & ~finite).to(tl.int32)) + tl.sum(endless.to(tl.int32))
    tl.atomic_add(refused_ptr, refused.to(tl.int64), mask=refused > 0, sem="relaxed")

    low_bits, high_bits = low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
    mask = offs_groups * GROUP < numel
    tl.store(ranges_ptr + offs_groups * 2, element_bits(low_bits, WIDE, HALF), mask=mask)
    tl.store(ranges_ptr + offs_groups * 2 + 1, element_bits(high_bits, WIDE, HALF), mask=mask)

    divisor = tl.where(span > 0.0, span, 1.0)
    steps = tl.div_rn(x - low[:, None], tl.broadcast_to(divisor[:, None], [ROWS, GROUP])) * (LEVELS * 1.0)
    if STOCHASTIC:
        first = mixed(low_bits.to(tl.uint32, bitcast=True) ^ seed.to(tl.uint32))
        second = mixed(first ^ high_bits.to(tl.uint32, bitcast=True)) + (offs_groups * GROUP >> 32).to(tl.uint32)
        number = offs_x.to(tl.uint32) ^ first[:, None]
        number = (number ^ (number >> 16)) * 0x7FEB352D
        number = ((number ^ (number >> 15)) ^ second[:, None]) * 0x846CA68B
        number = number ^ (number >> 16)
        steps += (number >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)
    else:
        steps += 0.5
    steps = tl.where(there & finite & ~endless[:, None], tl.minimum(steps, LEVELS * 1.0), 0.0)

    FIELDS: tl.constexpr = 8 // BITS
    fields = tl.reshape(steps.to(tl.int32), [ROWS * GROUP // FIELDS, FIELDS])
    packed = tl.sum(fields << (BITS * tl.arange(0, FIELDS)[None, :]), axis=1).to(tl.uint8)
    offs_bytes = tl.program_id(0).to(tl.int64) * (ROWS * GROUP // FIELDS) + tl.arange(0, ROWS * GROUP // FIELDS)
    tl.store(codes_ptr + offs_bytes, packed, mask=offs_bytes < nbytes)


@triton.jit
def blockquant_decode_kernel(
    codes_ptr,
    ranges_ptr,
    out_ptr,
    numel,
    UNIT: tl.constexpr,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Inverts :func:`blockquant_encode_kernel`."""
    WIDE: tl.constexpr = out_ptr.dtype.element_ty == tl.int32
    offs_groups, offs_out = row_tile(ROWS, GROUP)
    mask = offs_groups * GROUP < numel
    low = single_bits(tl.load(ranges_ptr + offs_groups * 2, mask=mask, other=0), HALF).to(tl.float32, bitcast=True)
    high = single_bits(tl.load(ranges_ptr + offs_groups * 2 + 1, mask=mask, other=0), HALF).to(tl.float32, bitcast=True)
    there = offs_out < numel
    codes = tl.load(codes_ptr + offs_out * BITS // 8, mask=there, other=0).to(tl.int32)
    codes = (codes >> (offs_out * BITS % 8).to(tl.int32)) & ((1 << BITS) - 1)
    value = (codes.to(tl.float32) * UNIT) * (high - low)[:, None] + low[:, None]
    tl.store(out_ptr + offs_out, rounded_bits(value.to(tl.int32, bitcast=True), WIDE, HALF), mask=there)


def blockquant_encode(
    x: Tensor, bits: int, group_size: int, stochastic: bool, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    codes = x.new_empty(bytes_for(x.numel(), bits), dtype=torch.uint8)
    ranges = x.new_empty(2 * groups(x.numel(), group_size))
    refused = x.new_zeros(1, dtype=torch.int64)
    arguments = bits_of(x), codes, bits_of(ranges), refused, x.numel(), codes.numel(), seed
    _launch_groups(blockquant_encode_kernel, x, bits, group_size, *arguments, STOCHASTIC=stochastic)
    return codes, ranges, refused


def blockquant_decode(codes: Tensor, ranges: Tensor, bits: int, group_size: int, out: Tensor) -> None:
    check_plane("blockquant_decode", "codes", codes, bytes_for(out.numel(), bits), out)
    check_plane("blockquant_decode", "ranges", ranges, 2 * groups(out.numel(), group_size), out)
    arguments = codes, bits_of(ranges), bits_of(out), out.numel()
    _launch_groups(blockquant_decode_kernel, out, bits, group_size, *arguments, UNIT=1 / (2**bits - 1))


def _launch_groups(kernel: Any, dense: Tensor, bits: int, group_size: int, *args: Any, **constants: Any) -> None:
    rows = ZVC_CHUNK // group_size
    launch(
        kernel,
        blocks_of(groups(dense.numel(), group_size), rows),
        *args,
        HALF=dense.dtype == torch.float16,
        BITS=bits,
        ROWS=rows,
        GROUP=group_size,
        num_warps=ZVC_WARPS,
        **constants,
    )

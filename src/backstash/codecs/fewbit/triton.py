"""A few bits per element, on CUDA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.ops import bits_of, bytes_for
from backstash.ops.triton.elements import block_offsets, field_at, load_fields, share_of_byte, widened
from backstash.ops.triton.launching import (
    bytes_per_field,
    check_plane,
    fields_per_byte,
    launch_bytes,
    launch_elements,
    number_bits,
)


@triton.jit
def fewbit_encode_kernel(
    x_ptr,
    packed_ptr,
    nonfinite_ptr,
    numel,
    nbytes,
    thresholds,
    COUNT: tl.constexpr,
    BITS: tl.constexpr,
    FIELDS_PER_BYTE: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    """Counts which of ``COUNT`` thresholds each element exceeds, in ``BITS`` bits. Infinities and NaN exceed none.

    Adds to ``nonfinite`` how many these are.
    """
    offs_bytes = block_offsets(BLOCK_BYTES)
    packed = tl.zeros_like(offs_bytes)
    nonfinite = tl.zeros([BLOCK_BYTES], tl.int32)
    for i in tl.static_range(FIELDS_PER_BYTE):
        offs_x, shift = field_at(offs_bytes, i, BITS)
        mask = (offs_x < numel) & (shift < 8)
        x = widened(tl.load(x_ptr + offs_x, mask=mask, other=0))
        finite = tl.abs(x) < float("inf")
        code = tl.zeros([BLOCK_BYTES], tl.int64)
        for j in tl.static_range(COUNT):
            code += (x > thresholds[j]).to(tl.int64)
        packed |= share_of_byte(code, shift, mask & finite, BITS)
        # A field is counted where it begins, since it may have bits in two bytes.
        nonfinite += (~finite & mask & (shift >= 0)).to(tl.int32)
    tl.store(packed_ptr + offs_bytes, packed.to(tl.uint8), mask=offs_bytes < nbytes)
    total = tl.sum(nonfinite)
    tl.atomic_add(nonfinite_ptr, total.to(tl.int64), mask=total > 0, sem="relaxed")


@triton.jit
def fewbit_decode_kernel(
    packed_ptr,
    out_ptr,
    numel,
    nbytes,
    values,
    BITS: tl.constexpr,
    BYTES_PER_FIELD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores ``values[field]`` per element. ``out_ptr`` points to integers, and ``values`` are the values' bits."""
    offs_out = block_offsets(BLOCK)
    code = load_fields(packed_ptr, offs_out, nbytes, BITS, BYTES_PER_FIELD)
    value = tl.zeros([BLOCK], tl.int64)
    for j in tl.static_range(1 << BITS):
        value = tl.where(code == j, values[j], value)
    tl.store(out_ptr + offs_out, value.to(out_ptr.dtype.element_ty), mask=offs_out < numel)


def fewbit_encode(x: Tensor, thresholds: list[float], bits: int) -> tuple[Tensor, Tensor]:
    packed = x.new_empty(bytes_for(x.numel(), bits), dtype=torch.uint8)
    nonfinite = x.new_zeros(1, dtype=torch.int64)
    arguments = x, packed, nonfinite, x.numel(), packed.numel(), tuple(map(float, thresholds))
    constants = {"COUNT": len(thresholds), "BITS": bits, "FIELDS_PER_BYTE": fields_per_byte(bits)}
    launch_bytes(fewbit_encode_kernel, packed, *arguments, **constants)
    return packed, nonfinite


def fewbit_decode(packed: Tensor, values: list[float], bits: int, out: Tensor) -> None:
    check_plane("fewbit_decode", "packed", packed, bytes_for(out.numel(), bits), out)
    numbers = tuple(number_bits(value, out.dtype) for value in values)
    arguments, nbytes = (packed, bits_of(out), out.numel(), packed.numel(), numbers), bytes_per_field(bits)
    launch_elements(fewbit_decode_kernel, out.numel(), *arguments, BITS=bits, BYTES_PER_FIELD=nbytes)


@triton.jit
def scale_by_codes_kernel(
    x_ptr,
    packed_ptr,
    table_ptr,
    out_ptr,
    numel,
    nbytes,
    BITS: tl.constexpr,
    BYTES_PER_FIELD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores each element times the number that its code stands for."""
    offs_out = block_offsets(BLOCK)
    mask = offs_out < numel
    code = load_fields(packed_ptr, offs_out, nbytes, BITS, BYTES_PER_FIELD)
    x = tl.load(x_ptr + offs_out, mask=mask, other=0)
    tl.store(out_ptr + offs_out, x * tl.load(table_ptr + code, mask=mask, other=0), mask=mask)


def scale_by_codes(x: Tensor, packed: Tensor, table: Tensor, out: Tensor) -> None:
    bits = table.numel().bit_length() - 1
    check_plane("scale_by_codes", "table", table, 2 ** min(max(bits, 1), 4), x)
    check_plane("scale_by_codes", "packed", packed, bytes_for(x.numel(), bits), x)
    arguments, nbytes = (x, packed, table, out, x.numel(), packed.numel()), bytes_per_field(bits)
    launch_elements(scale_by_codes_kernel, x.numel(), *arguments, BITS=bits, BYTES_PER_FIELD=nbytes)

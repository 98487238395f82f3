"""Integers in few bits, on CUDA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.ops import bytes_for
from backstash.ops.triton.elements import block_offsets, field_at, load_fields, share_of_byte
from backstash.ops.triton.launching import bytes_per_field, check_plane, fields_per_byte, launch_bytes, launch_elements


@triton.jit
def narrow_encode_kernel(
    x_ptr,
    packed_ptr,
    numel,
    nbytes,
    base,
    BITS: tl.constexpr,
    FIELDS_PER_BYTE: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    """Packs ``x - base`` in ``BITS`` bits each. A program writes whole bytes, so that no two write the same byte."""
    offs_bytes = block_offsets(BLOCK_BYTES)
    packed = tl.zeros_like(offs_bytes)
    for i in tl.static_range(FIELDS_PER_BYTE):
        offs_x, shift = field_at(offs_bytes, i, BITS)
        mask = (offs_x < numel) & (shift < 8)
        x = tl.load(x_ptr + offs_x, mask=mask, other=0).to(tl.int64)
        packed |= share_of_byte(x - base, shift, mask, BITS)
    tl.store(packed_ptr + offs_bytes, packed.to(tl.uint8), mask=offs_bytes < nbytes)


@triton.jit
def narrow_decode_kernel(
    packed_ptr, out_ptr, numel, nbytes, base, BITS: tl.constexpr, BYTES_PER_FIELD: tl.constexpr, BLOCK: tl.constexpr
):
    """Stores ``field + base`` per element."""
    offs_out = block_offsets(BLOCK)
    value = load_fields(packed_ptr, offs_out, nbytes, BITS, BYTES_PER_FIELD) + base
    tl.store(out_ptr + offs_out, value.to(out_ptr.dtype.element_ty), mask=offs_out < numel)


def narrow_encode(x: Tensor, bits: int, base: int) -> Tensor:
    packed = x.new_empty(bytes_for(x.numel(), bits), dtype=torch.uint8)
    arguments, fields = (x, packed, x.numel(), packed.numel(), base), fields_per_byte(bits)
    launch_bytes(narrow_encode_kernel, packed, *arguments, BITS=bits, FIELDS_PER_BYTE=fields)
    return packed


def narrow_decode(packed: Tensor, bits: int, base: int, out: Tensor) -> None:
    check_plane("narrow_decode", "packed", packed, bytes_for(out.numel(), bits), out)
    arguments, nbytes = (packed, out, out.numel(), packed.numel(), base), bytes_per_field(bits)
    launch_elements(narrow_decode_kernel, out.numel(), *arguments, BITS=bits, BYTES_PER_FIELD=nbytes)

"""Positions in pooling windows, on CUDA."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.codecs.narrow.windows.reference import window_bits
from backstash.ops import bytes_for
from backstash.ops.triton.elements import block_offsets, field_at, load_fields, share_of_byte
from backstash.ops.triton.launching import bytes_per_field, check_plane, fields_per_byte, launch_bytes, launch_elements


@triton.jit
def window_encode_kernel(
    indices_ptr,
    packed_ptr,
    strays_ptr,
    numel,
    nbytes,
    inner,
    input_numel,
    input_size,
    output_size,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    DILATION: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE: tl.constexpr,
    BITS: tl.constexpr,
    FIELDS_PER_BYTE: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    """Stores max-pool indices as row-major positions in their windows; adds to ``strays`` those in no position.

    The divisions dominate, and a 32-bit one takes a fraction of a 64-bit one: ``WIDE`` asks for 64 bits, which only
    tensors that need them get. ``KERNEL`` and its like are constants since a network has few of them, sizes are not.
    """
    offs_bytes = block_offsets(BLOCK_BYTES)
    packed = tl.zeros_like(offs_bytes)
    strays = tl.zeros([BLOCK_BYTES], tl.int32)
    for i in tl.static_range(FIELDS_PER_BYTE):
        offs_index, shift = field_at(offs_bytes, i, BITS)
        mask = (offs_index < numel) & (shift < 8)
        index = tl.load(indices_ptr + offs_index, mask=mask, other=0).to(tl.int64)
        stray = (index < 0) | (index >= input_numel)
        rest = tl.where(stray, 0, index).to(tl.int64 if WIDE else tl.int32)
        position = offs_index.to(tl.int64 if WIDE else tl.int32) // inner
        code = tl.zeros_like(rest)
        weight = 1
        for d in tl.static_range(DIMS - 1, -1, -1):
            distance = rest % input_size[d] - ((position % output_size[d]) * STRIDE[d] - PADDING[d])
            rest = rest // input_size[d]
            position = position // output_size[d]
            offset = distance // DILATION[d]
            # The sign is asked for first: // rounds towards zero here, so -1 // 2 would pass for position 0.
            stray |= (distance < 0) | (distance % DILATION[d] != 0) | (offset >= KERNEL[d])
            code += offset * weight
            weight = weight * KERNEL[d]
        packed |= share_of_byte(tl.where(stray, 0, code).to(tl.int64), shift, mask, BITS)
        # A field is counted where it begins, since it may have bits in two bytes.
        strays += (stray & mask & (shift >= 0)).to(tl.int32)
    tl.store(packed_ptr + offs_bytes, packed.to(tl.uint8), mask=offs_bytes < nbytes)
    total = tl.sum(strays)
    tl.atomic_add(strays_ptr, total.to(tl.int64), mask=total > 0, sem="relaxed")


@triton.jit
def window_decode_kernel(
    packed_ptr,
    out_ptr,
    numel,
    nbytes,
    inner,
    input_size,
    output_size,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    DILATION: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE: tl.constexpr,
    BITS: tl.constexpr,
    BYTES_PER_FIELD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Inverts :func:`window_encode_kernel`."""
    offs_out = block_offsets(BLOCK)
    code = load_fields(packed_ptr, offs_out, nbytes, BITS, BYTES_PER_FIELD).to(tl.int64 if WIDE else tl.int32)
    position = offs_out.to(tl.int64 if WIDE else tl.int32) // inner
    index = tl.zeros_like(code)
    scale = tl.full([], 1, tl.int64 if WIDE else tl.int32)
    for d in tl.static_range(DIMS - 1, -1, -1):
        origin = (position % output_size[d]) * STRIDE[d] - PADDING[d]
        index += (origin + (code % KERNEL[d]) * DILATION[d]) * scale
        position = position // output_size[d]
        code = code // KERNEL[d]
        scale = scale * input_size[d]
    tl.store(out_ptr + offs_out, index.to(out_ptr.dtype.element_ty), mask=offs_out < numel)


@triton.jit
def window_scatter_kernel(
    packed_ptr,
    grad_ptr,
    out_ptr,
    numel,
    nbytes,
    inner,
    input_size,
    output_size,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    DILATION: tl.constexpr,
    POSITIONS: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE: tl.constexpr,
    BITS: tl.constexpr,
    BYTES_PER_FIELD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds up, for each element of the input, the gradients of the windows whose code says that it was the largest.

    An element is at one position of each window that it lies in, and a window that begins later has it at an earlier
    position. So from the last position to the first the windows come in memory order, which is the reference's.
    """
    offs_out = block_offsets(BLOCK)
    element = offs_out.to(tl.int64 if WIDE else tl.int32)
    channel = element % inner
    total = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
    for number in range(POSITIONS):
        code = POSITIONS - 1 - number
        left = code
        rest = element // inner
        inside = offs_out < numel
        window = tl.zeros_like(element)
        scale = tl.full([], 1, tl.int64 if WIDE else tl.int32)
        for d in tl.static_range(DIMS - 1, -1, -1):
            reach = rest % input_size[d] + PADDING[d] - (left % KERNEL[d]) * DILATION[d]
            place = reach // STRIDE[d]
            # The sign is asked for first: // rounds towards zero here.
            inside &= (reach >= 0) & (reach % STRIDE[d] == 0) & (place < output_size[d])
            window += place * scale
            rest = rest // input_size[d]
            left = left // KERNEL[d]
            scale = scale * output_size[d]
        offs_grad = tl.where(inside, (rest * scale + window) * inner + channel, 0).to(tl.int64)
        inside &= load_fields(packed_ptr, offs_grad, nbytes, BITS, BYTES_PER_FIELD) == code
        total = tl.where(inside, total + tl.load(grad_ptr + offs_grad, mask=inside, other=0), total)
    tl.store(out_ptr + offs_out, total, mask=offs_out < numel)


def _window_constants(
    numel: int, input_size: list[int], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> dict[str, Any]:
    return {
        "KERNEL": tuple(kernel),
        "STRIDE": tuple(stride),
        "PADDING": tuple(padding),
        "DILATION": tuple(dilation),
        "DIMS": len(kernel),
        # Half of int32's range, so that padding and the last, partial block fit as well.
        "WIDE": max(numel, math.prod(input_size)) >= 2**30,
        "BITS": window_bits(kernel),
    }


def window_encode(
    indices: Tensor,
    inner: int,
    input_size: list[int],
    output_size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> tuple[Tensor, Tensor]:
    bits = window_bits(kernel)
    packed = indices.new_empty(bytes_for(indices.numel(), bits), dtype=torch.uint8)
    strays = indices.new_zeros(1, dtype=torch.int64)
    numbers = indices.numel(), packed.numel(), inner, math.prod(input_size), tuple(input_size), tuple(output_size)
    constants = _window_constants(indices.numel(), input_size, kernel, stride, padding, dilation)
    constants["FIELDS_PER_BYTE"] = fields_per_byte(bits)
    launch_bytes(window_encode_kernel, packed, indices, packed, strays, *numbers, **constants)
    return packed, strays


def window_decode(
    packed: Tensor,
    inner: int,
    input_size: list[int],
    output_size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    out: Tensor,
) -> None:
    bits = window_bits(kernel)
    check_plane("window_decode", "packed", packed, bytes_for(out.numel(), bits), out)
    numbers = out.numel(), packed.numel(), inner, tuple(input_size), tuple(output_size)
    constants = _window_constants(out.numel(), input_size, kernel, stride, padding, dilation)
    constants["BYTES_PER_FIELD"] = bytes_per_field(bits)
    launch_elements(window_decode_kernel, out.numel(), packed, out, *numbers, **constants)


def window_scatter(
    packed: Tensor,
    inner: int,
    input_size: list[int],
    output_size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    grad: Tensor,
    out: Tensor,
) -> None:
    """See :func:`backstash.codecs.narrow.windows.reference.window_scatter`.

    Each element adds up its own windows, so the bits do not depend on the order in which programs run.
    """
    bits = window_bits(kernel)
    check_plane("window_scatter", "packed", packed, bytes_for(grad.numel(), bits), out)
    numbers = out.numel(), packed.numel(), inner, tuple(input_size), tuple(output_size)
    constants = _window_constants(max(grad.numel(), out.numel()), input_size, kernel, stride, padding, dilation)
    constants |= {"POSITIONS": math.prod(kernel), "BYTES_PER_FIELD": bytes_per_field(bits)}
    launch_elements(window_scatter_kernel, out.numel(), packed, grad, out, *numbers, **constants)

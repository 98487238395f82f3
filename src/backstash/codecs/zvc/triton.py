"""ZVC, on CUDA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.codecs.minifloat.formats import FORMATS
from backstash.codecs.minifloat.triton import (
    format_constants,
    load_code,
    minifloat_code,
    minifloat_finish,
    minifloat_magnitude,
)
from backstash.errors import DamagedPlanesError
from backstash.ops import ZVC_CHUNK, bits_of, bytes_for, zvc_chunks
from backstash.ops.triton.elements import block_offsets, element_bits, elements_of, single_bits, to_bytes, to_flags
from backstash.ops.triton.launching import ZVC_WARPS, check_plane, launch, launch_chunks


@triton.jit
def zvc_mask_kernel(x_ptr, mask_ptr, counts_ptr, numel, CHUNK_BYTES: tl.constexpr):
    """First pass of ZVC, a program per chunk: stores its mask bytes, and the number of its non-zero elements."""
    offs_bytes = block_offsets(CHUNK_BYTES)
    offs_x = elements_of(offs_bytes)
    flags = tl.load(x_ptr + offs_x, mask=offs_x < numel, other=0) != 0
    tl.store(mask_ptr + offs_bytes, to_bytes(flags), mask=offs_bytes * 8 < numel)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(flags.to(tl.int32)).to(tl.int64))


@triton.jit
def zvc_compact_kernel(x_ptr, offsets_ptr, values_ptr, numel, room, CHUNK: tl.constexpr):
    """Second pass of ZVC, a program per chunk: stores its non-zero elements, from its offset on, as far as ``room``."""
    offs_x = block_offsets(CHUNK)
    x = tl.load(x_ptr + offs_x, mask=offs_x < numel, other=0)
    flags = (x != 0).to(tl.int32)
    offs_values = tl.load(offsets_ptr + tl.program_id(0)) + tl.cumsum(flags, axis=0) - flags
    tl.store(values_ptr + offs_values, x, mask=(flags != 0) & (offs_values < room))


@triton.jit
def zvc_decode_kernel(mask_ptr, offsets_ptr, values_ptr, out_ptr, numel, stored, CHUNK: tl.constexpr):
    """Stores a chunk's elements from its mask bytes and its values, and zero where the planes lack a value."""
    offs_bytes = block_offsets(CHUNK // 8)
    mask_bytes = tl.load(mask_ptr + offs_bytes, mask=offs_bytes * 8 < numel, other=0)
    flags = tl.reshape(to_flags(mask_bytes).to(tl.int32), [CHUNK])
    offs_values = tl.load(offsets_ptr + tl.program_id(0)) + tl.cumsum(flags, axis=0) - flags
    there = (flags != 0) & (offs_values >= 0) & (offs_values < stored)
    values = tl.load(values_ptr + offs_values, mask=there, other=0)
    offs_out = block_offsets(CHUNK)
    tl.store(out_ptr + offs_out, values, mask=offs_out < numel)


def zvc_masked(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Runs ZVC's first pass. Returns mask, offsets, and int64 [1], the number of values, all on the device."""
    chunks = zvc_chunks(x.numel())
    mask = x.new_empty(bytes_for(x.numel(), 1), dtype=torch.uint8)
    counts = x.new_empty(chunks, dtype=torch.int64)
    kernel = zvc_mask_kernel
    launch(kernel, chunks, bits_of(x), mask, counts, x.numel(), CHUNK_BYTES=ZVC_CHUNK // 8, num_warps=ZVC_WARPS)
    ends = counts.cumsum(0)
    return mask, ends - counts, ends[-1:] if chunks else x.new_zeros(1, dtype=torch.int64)


def _zvc_compact(x: Tensor, offsets: Tensor, values: Tensor) -> None:
    """Runs ZVC's second pass: fills ``values`` with the elements that have any bit set, as far as it has room."""
    arguments = bits_of(x), offsets, bits_of(values), x.numel(), values.numel()
    launch_chunks(zvc_compact_kernel, x.numel(), *arguments)


def zvc_encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`backstash.codecs.zvc.reference.zvc_encode`.

    **Waits for the device**, once, after the first of two passes: the size of the values plane depends on the data and
    the host allocates it. In return nothing but the planes themselves is allocated (and 8 bytes per chunk, twice).
    :func:`zvc_encode_within` does not wait.
    """
    mask, offsets, count = zvc_masked(x)
    values = x.new_empty(int(count.item()))
    _zvc_compact(x, offsets, values)
    return mask, offsets, values


def zvc_encode_within(x: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`backstash.codecs.zvc.reference.zvc_encode_within`. Never waits for the device."""
    mask, offsets, count = zvc_masked(x)
    values = x.new_empty(room)
    _zvc_compact(x, offsets, values)
    return mask, offsets, values, count


def zvc_decode(mask: Tensor, offsets: Tensor, values: Tensor, out: Tensor) -> None:
    """See :func:`backstash.codecs.zvc.reference.zvc_decode`.

    Raises:
        DamagedPlanesError: a plane has the wrong size, or there are more values than elements. That the mask's bits,
            the offsets and the values agree is not checked, which would wait for the device: an element whose value
            the planes do not have becomes zero.
    """
    check_plane("zvc_decode", "mask", mask, bytes_for(out.numel(), 1), out)
    check_plane("zvc_decode", "offsets", offsets, zvc_chunks(out.numel()), out)
    if values.numel() > out.numel():
        raise DamagedPlanesError(
            f"zvc_decode asked for at most {out.numel()} values, got {values.numel()}. The stash was overwritten or "
            f"belongs to another tensor; compute the step again."
        )
    arguments = mask, offsets, bits_of(values), bits_of(out), out.numel(), values.numel()
    launch_chunks(zvc_decode_kernel, out.numel(), *arguments)


@triton.jit
def zvc_minifloat_compact_kernel(
    x_ptr,
    offsets_ptr,
    values_ptr,
    numel,
    room,
    HALF: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    SUBNORMALS: tl.constexpr,
    FIELDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """As ``zvc_compact_kernel``, but stores codes. Codes that share a word are stored over zeros."""
    offs_x = block_offsets(CHUNK)
    x = tl.load(x_ptr + offs_x, mask=offs_x < numel, other=0)
    flags = (x != 0).to(tl.int32)
    offs_values = tl.load(offsets_ptr + tl.program_id(0)) + tl.cumsum(flags, axis=0) - flags
    code = minifloat_code(single_bits(x, HALF), True, MANTISSA, BIAS, BITS, TOP, SUBNORMALS)
    mask = (flags != 0) & (offs_values < room)
    if FIELDS == 1:
        tl.store(values_ptr + offs_values, code.to(values_ptr.dtype.element_ty), mask=mask)
    else:
        # Two programs may have codes of one word; whichever comes first, the bits are the same.
        field = code << (offs_values % FIELDS * BITS).to(tl.int32)
        tl.atomic_or(values_ptr + offs_values // FIELDS, field, mask=mask, sem="relaxed")


@triton.jit
def zvc_minifloat_decode_kernel(
    mask_ptr,
    offsets_ptr,
    values_ptr,
    out_ptr,
    numel,
    words,
    HALF: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    SUBNORMALS: tl.constexpr,
    FIELDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """As ``zvc_decode_kernel``, but reads codes."""
    offs_bytes = block_offsets(CHUNK // 8)
    mask_bytes = tl.load(mask_ptr + offs_bytes, mask=offs_bytes * 8 < numel, other=0)
    flags = tl.reshape(to_flags(mask_bytes).to(tl.int32), [CHUNK])
    offs_values = tl.load(offsets_ptr + tl.program_id(0)) + tl.cumsum(flags, axis=0) - flags
    there = (flags != 0) & (offs_values >= 0) & (offs_values // FIELDS < words)
    code = load_code(values_ptr, offs_values, there, BITS, FIELDS)
    word = minifloat_finish(code, minifloat_magnitude(code, MANTISSA, BIAS, BITS, SUBNORMALS), BITS, TOP)
    offs_out = block_offsets(CHUNK)
    values = element_bits(tl.where(there, word, 0), out_ptr.dtype.element_ty == tl.int32, HALF)
    tl.store(out_ptr + offs_out, values, mask=offs_out < numel)


def zvc_minifloat_compact(x: Tensor, format: str, offsets: Tensor, values: Tensor, room: int) -> None:
    """Fills ``values`` with codes of the first ``room`` elements that have any bit set. It has zeros if FIELDS > 1."""
    arguments = bits_of(x), offsets, values, x.numel(), room
    constants = format_constants(FORMATS[format], x.dtype)
    launch_chunks(zvc_minifloat_compact_kernel, x.numel(), *arguments, **constants)


def zvc_minifloat_encode(x: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`backstash.codecs.zvc.reference.zvc_minifloat_encode`.

    **Waits for the device**, once, as :func:`zvc_encode` does.
    """
    form = FORMATS[format]
    mask, offsets, count = zvc_masked(x)
    stored = int(count.item())
    values = x.new_zeros(form.words(stored), dtype=form.dtype)
    zvc_minifloat_compact(x, format, offsets, values, stored)
    return mask, offsets, values


def zvc_minifloat_encode_within(x: Tensor, format: str, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`backstash.codecs.zvc.reference.zvc_minifloat_encode_within`. Never waits for the device."""
    mask, offsets, count = zvc_masked(x)
    values = x.new_zeros(FORMATS[format].words(room), dtype=FORMATS[format].dtype)
    zvc_minifloat_compact(x, format, offsets, values, room)
    return mask, offsets, values, count


def zvc_minifloat_decode(mask: Tensor, offsets: Tensor, values: Tensor, format: str, out: Tensor) -> None:
    """See :func:`backstash.codecs.zvc.reference.zvc_minifloat_decode`.

    Raises:
        DamagedPlanesError: a plane has the wrong size, or there are more values than elements; see
            :func:`zvc_decode` for what is not checked.
    """
    form = FORMATS[format]
    check_plane("zvc_minifloat_decode", "mask", mask, bytes_for(out.numel(), 1), out)
    check_plane("zvc_minifloat_decode", "offsets", offsets, zvc_chunks(out.numel()), out)
    if values.numel() > form.words(out.numel()):
        raise DamagedPlanesError(
            f"zvc_minifloat_decode asked for at most {out.numel()} values in {form.words(out.numel())} words, got "
            f"{values.numel()} words. The stash was overwritten or belongs to another tensor; compute the step again."
        )
    arguments = mask, offsets, values, bits_of(out), out.numel(), values.numel()
    launch_chunks(zvc_minifloat_decode_kernel, out.numel(), *arguments, **format_constants(form, out.dtype))

"""Error-bounded values at a width per block, on CUDA."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.codecs.szp.reference import SZP_BLOCK
from backstash.errors import DamagedPlanesError
from backstash.ops import ZVC_CHUNK, bits_of, bytes_for, zvc_chunks
from backstash.ops.triton.elements import block_offsets, element_bits, elements_of, single_bits, to_bytes, to_flags
from backstash.ops.triton.launching import BLOCK, blocks_of, check_plane, launch, launch_chunks

SLOT = ZVC_CHUNK + ZVC_CHUNK // SZP_BLOCK // 4
"""Words that a chunk takes at most."""


@triton.jit
def szp_range_kernel(x_ptr, keys_ptr, numel, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Finds the smallest and the largest finite element, as integers of the same order."""
    offs_x = block_offsets(BLOCK)
    word = single_bits(tl.load(x_ptr + offs_x, mask=offs_x < numel, other=0), HALF)
    finite = (offs_x < numel) & ((word & 0x7FFFFFFF) < 0x7F800000)
    key = tl.where(word < 0, word ^ 0x7FFFFFFF, word)
    tl.atomic_min(keys_ptr, tl.min(tl.where(finite, key, 0x7F800000)), sem="relaxed")
    tl.atomic_max(keys_ptr + 1, tl.max(tl.where(finite, key, -0x7F800001)), sem="relaxed")


@triton.jit
def szp_encode_kernel(
    x_ptr,
    grid_ptr,
    mask_ptr,
    sizes_ptr,
    staging_ptr,
    numel,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores a chunk's mask bytes, its words in a slot of the staging buffer, and in ``sizes`` the number of words.

    The values are brought together in that slot, before the words take their place.
    """
    WIDE: tl.constexpr = BITS == 32
    ROWS: tl.constexpr = CHUNK // BLOCK
    offs_bytes = block_offsets(CHUNK // 8)
    offs_x = elements_of(offs_bytes)
    flags = (single_bits(tl.load(x_ptr + offs_x, mask=offs_x < numel, other=0), HALF) & 0x7FFFFFFF) != 0
    tl.store(mask_ptr + offs_bytes, to_bytes(flags), mask=offs_bytes * 8 < numel)

    slot_ptr = staging_ptr + tl.program_id(0).to(tl.int64) * (CHUNK + ROWS // 4)
    offs_x = block_offsets(CHUNK)
    x = tl.load(x_ptr + offs_x, mask=offs_x < numel, other=0)
    flags = ((single_bits(x, HALF) & 0x7FFFFFFF) != 0).to(tl.int32)
    tl.store(slot_ptr + tl.cumsum(flags, axis=0) - flags, x.to(tl.int32), mask=flags != 0)
    count = tl.sum(flags)
    tl.debug_barrier()  # what one thread stored another one loads
    lanes = tl.arange(0, BLOCK)[None, :]
    offs_values = tl.arange(0, ROWS)[:, None] * BLOCK + lanes
    there = offs_values < count
    value = tl.load(slot_ptr + offs_values, mask=there, other=0)
    tl.debug_barrier()  # all is loaded before words are stored

    inverse, step, limit = tl.load(grid_ptr), tl.load(grid_ptr + 1), tl.load(grid_ptr + 2)
    word = single_bits(value if WIDE else value.to(tl.int16), HALF)
    magnitude = (word & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    rounded = magnitude * inverse + 8388608.0  # 2**23: the processor rounds to nearest, ties to even
    code = rounded - 8388608.0
    decoded = tl.where(code == 0.0, step * 0.25, code * step)
    good = (rounded < 16777216.0) & (tl.abs(decoded - magnitude) <= limit) & (decoded > 0.0)
    if not WIDE:
        bits = decoded.to(tl.int32, bitcast=True)
        good = good & (single_bits(element_bits(bits, False, HALF), HALF) == bits)
    fields = tl.where(there, rounded.to(tl.int32, bitcast=True) & 0x7FFFFF, 0)
    negative = tl.where(there, (word >> 31) & 1, 0)

    widest = tl.max(fields, axis=1).to(tl.float32).to(tl.int32, bitcast=True)
    planes = tl.maximum((widest >> 23) - 126, 0)  # from the exponent: a code is exact in float32
    signed = tl.max(negative, axis=1)
    raw = (tl.max((there & ~good).to(tl.int32), axis=1) != 0) | (planes + signed >= BITS)
    planes = tl.where(raw, BITS, planes)
    signed = tl.where(raw, 0, signed)
    fields = tl.where(raw[:, None], value, fields)

    header = ((count + BLOCK - 1) // BLOCK + 3) // 4
    sizes = planes + signed
    first = header + tl.cumsum(sizes, axis=0) - sizes
    bytes_of_words = tl.reshape(planes | (signed << 6), [ROWS // 4, 4]) << (8 * tl.arange(0, 4)[None, :])
    offs_header = tl.arange(0, ROWS // 4)
    tl.store(slot_ptr + offs_header, tl.sum(bytes_of_words, axis=1).to(tl.int32), mask=offs_header < header)
    for bit in range(0, tl.max(planes)):
        plane = tl.sum(((fields >> bit) & 1) << lanes, axis=1).to(tl.int32)
        tl.store(slot_ptr + first + bit, plane, mask=bit < planes)
    tl.store(slot_ptr + first + planes, tl.sum(negative << lanes, axis=1).to(tl.int32), mask=signed != 0)
    tl.store(sizes_ptr + tl.program_id(0), (header + tl.sum(sizes)).to(tl.int64))


@triton.jit
def szp_compact_kernel(staging_ptr, offsets_ptr, sizes_ptr, words_ptr, room, SLOT: tl.constexpr, BLOCK: tl.constexpr):
    """Moves a chunk's words from its slot to their place, as far as there is ``room``."""
    chunk = tl.program_id(0).to(tl.int64)
    first, size = tl.load(offsets_ptr + chunk), tl.load(sizes_ptr + chunk).to(tl.int32)
    for begin in range(0, size, BLOCK):
        offs_words = begin + tl.arange(0, BLOCK)
        words = tl.load(staging_ptr + chunk * SLOT + offs_words, mask=offs_words < size)
        tl.store(words_ptr + first + offs_words, words, mask=(offs_words < size) & (first + offs_words < room))


@triton.jit
def szp_decode_kernel(
    mask_ptr,
    offsets_ptr,
    words_ptr,
    step_ptr,
    out_ptr,
    numel,
    stored,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores a chunk's elements from its mask bytes, widths and words. Words that the plane lacks count as zero."""
    WIDE: tl.constexpr = BITS == 32
    ROWS: tl.constexpr = CHUNK // BLOCK
    offs_bytes = block_offsets(CHUNK // 8)
    mask_bytes = tl.load(mask_ptr + offs_bytes, mask=offs_bytes * 8 < numel, other=0)
    flags = tl.reshape(to_flags(mask_bytes).to(tl.int32), [CHUNK])
    rank = tl.cumsum(flags, axis=0) - flags
    blocks = (tl.sum(flags) + BLOCK - 1) // BLOCK

    begin = tl.load(offsets_ptr + tl.program_id(0))
    rows = tl.arange(0, ROWS)
    offs_header = begin + rows // 4
    there = (rows < blocks) & (offs_header >= 0) & (offs_header < stored)
    width = (tl.load(words_ptr + offs_header, mask=there, other=0) >> (rows % 4 * 8)) & 0xFF
    planes = tl.minimum(width & 63, BITS)
    sizes = planes + ((width >> 6) & 1)
    row = rank // BLOCK
    first = begin + (blocks + 3) // 4 + tl.gather(tl.cumsum(sizes, axis=0) - sizes, row, axis=0)
    planes_here = tl.gather(planes, row, axis=0)
    signed = tl.gather((width >> 6) & 1, row, axis=0)

    lane = rank % BLOCK
    field = tl.zeros([CHUNK], tl.int32)
    for bit in range(0, tl.max(planes)):
        offs_words = first + bit
        stands = (flags != 0) & (bit < planes_here) & (offs_words >= 0) & (offs_words < stored)
        field |= ((tl.load(words_ptr + offs_words, mask=stands, other=0) >> lane) & 1) << bit
    offs_signs = first + planes_here
    is_signed = (flags != 0) & (signed != 0) & (offs_signs >= 0) & (offs_signs < stored)
    negative = (tl.load(words_ptr + offs_signs, mask=is_signed, other=0) >> lane) & 1

    step = tl.load(step_ptr)
    magnitude = tl.where(field == 0, step * 0.25, field.to(tl.float32) * step).to(tl.int32, bitcast=True)
    value = element_bits(magnitude | (negative << 31), WIDE, HALF)
    value = tl.where(planes_here == BITS, field.to(value.dtype), value)
    offs_out = block_offsets(CHUNK)
    tl.store(out_ptr + offs_out, tl.where(flags != 0, value, 0).to(out_ptr.dtype.element_ty), mask=offs_out < numel)


def szp_range(x: Tensor) -> Tensor:
    keys = torch.stack([x.new_full((), 0x7F800000, dtype=torch.int32), x.new_full((), -0x7F800001, dtype=torch.int32)])
    arguments, half = (bits_of(x), keys, x.numel()), x.dtype == torch.float16
    launch(szp_range_kernel, blocks_of(x.numel(), ZVC_CHUNK), *arguments, HALF=half, BLOCK=ZVC_CHUNK)
    found = torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys).view(torch.float32)
    return torch.where(keys[0] <= keys[1], found, 0.0) + 0.0


def szp_encode_staged(x: Tensor, grid: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`szp_encode`, but never waits: a chunk's words stay in a slot that is large enough for any chunk.

    Returns:
        mask, and offsets as :func:`szp_encode` has them; staging int32 [chunks, SLOT]; sizes int64 [chunks], of which
        the sum is how many words :func:`szp_compact` makes.
    """
    chunks = zvc_chunks(x.numel())
    mask = x.new_empty(bytes_for(x.numel(), 1), dtype=torch.uint8)
    sizes = x.new_empty(chunks, dtype=torch.int64)
    staging = x.new_empty((chunks, SLOT), dtype=torch.int32)
    arguments = bits_of(x), grid, mask, sizes, staging, x.numel()
    launch_chunks(szp_encode_kernel, x.numel(), *arguments, **_constants(x))
    return mask, sizes.cumsum(0) - sizes, staging, sizes


def szp_compact(staging: Tensor, offsets: Tensor, sizes: Tensor, words: Tensor) -> None:
    """Fills ``words`` with what :func:`szp_encode_staged` left in the slots, as far as it has room."""
    kernel = szp_compact_kernel
    launch(kernel, sizes.numel(), staging, offsets, sizes, words, words.numel(), SLOT=SLOT, BLOCK=BLOCK)


def szp_encode(x: Tensor, grid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`backstash.codecs.szp.reference.szp_encode`.

    One pass over ``x``. **Waits for the device**, once, after it: the size of the words plane depends on the data.
    Until then a buffer of SLOT words per chunk is allocated as well.
    """
    mask, offsets, staging, sizes = szp_encode_staged(x, grid)
    words = x.new_empty(int(sizes.sum().item()), dtype=torch.int32)
    szp_compact(staging, offsets, sizes, words)
    return mask, offsets, words


def szp_encode_within(x: Tensor, grid: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`backstash.codecs.szp.reference.szp_encode_within`. Never waits for the device.

    A buffer of SLOT words per chunk is allocated as well, until all is queued.
    """
    mask, offsets, staging, sizes = szp_encode_staged(x, grid)
    words = x.new_empty(room, dtype=torch.int32)
    szp_compact(staging, offsets, sizes, words)
    return mask, offsets, words, sizes.sum(0, keepdim=True)


def szp_decode(mask: Tensor, offsets: Tensor, words: Tensor, step: Tensor, out: Tensor) -> None:
    """See :func:`backstash.codecs.szp.reference.szp_decode`.

    Raises:
        DamagedPlanesError: a plane has the wrong size, or there are more words than fit the chunks. That the mask's
            bits, the offsets, the widths and the words agree is not checked, which would wait for the device: no access
            leaves its plane.
    """
    chunks = zvc_chunks(out.numel())
    check_plane("szp_decode", "mask", mask, bytes_for(out.numel(), 1), out)
    check_plane("szp_decode", "offsets", offsets, chunks, out)
    check_plane("szp_decode", "step", step, 1, out)
    if words.numel() > chunks * SLOT:
        raise DamagedPlanesError(
            f"szp_decode asked for at most {chunks * SLOT} words, got {words.numel()}. The stash was overwritten or "
            f"belongs to another tensor; compute the step again."
        )
    arguments = mask, offsets, words, step, bits_of(out), out.numel(), words.numel()
    launch_chunks(szp_decode_kernel, out.numel(), *arguments, **_constants(out))


def _constants(x: Tensor) -> dict[str, Any]:
    return {"HALF": x.dtype == torch.float16, "BITS": 8 * x.element_size(), "BLOCK": SZP_BLOCK}

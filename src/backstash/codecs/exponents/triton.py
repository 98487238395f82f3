"""Exponents as codes into windows, on CUDA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.codecs.exponents.reference import EXPONENTS_BLOCK, EXPONENTS_LANES, check_exponents, exponents_blocks
from backstash.ops import ZVC_CHUNK, bits_of, bytes_for, zvc_chunks
from backstash.ops.triton.elements import block_offsets, load_fields
from backstash.ops.triton.launching import bytes_per_field, launch, launch_chunks


@triton.jit
def upper_bits(x, WIDE: tl.constexpr):
    """Returns the 16 bits, int32, that have an element's sign, its exponent and the upper bits of its fraction."""
    upper = x.to(tl.int32)
    if WIDE:
        upper = upper >> 16
    return upper & 0xFFFF


@triton.jit
def inside(exponent, base, BITS: tl.constexpr):
    """Whether exponents are in the window that begins after ``base``."""
    return (exponent > base) & (exponent <= base + (1 << BITS) - 2)


@triton.jit
def base_of(top, BITS: tl.constexpr):
    """Returns what the window begins after that ends on ``top``, or as near to it as windows are."""
    return tl.minimum(tl.maximum(top - ((1 << BITS) - 2), 0), 257 - (1 << BITS))


@triton.jit
def better(exponents, top, most, base, BITS: tl.constexpr):
    """Returns the most elements in a window and its base, when one more window is looked at."""
    other = base_of(top, BITS)
    count = tl.sum(tl.sum(inside(exponents, other, BITS).to(tl.int32), axis=1), axis=0)
    return tl.maximum(count, most), tl.where(count > most, other, base)


@triton.jit
def exponents_code_kernel(
    x_ptr,
    lower_ptr,
    upper_ptr,
    codes_ptr,
    bases_ptr,
    counts_ptr,
    numel,
    nbytes,
    BITS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """First pass, a program per block: stores all of it but its escapes, and the number of these."""
    # Rows of eight elements, whose codes fill BITS bytes.
    rows = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    offs = rows[:, None] * 8 + tl.arange(0, 8)[None, :]
    there = offs < numel
    x = tl.load(x_ptr + offs, mask=there, other=0)
    upper = upper_bits(x, WIDE)
    if WIDE:
        tl.store(lower_ptr + offs, x.to(tl.int16), mask=there)
    tl.store(upper_ptr + offs, ((upper & 0x7F) | ((upper >> 8) & 0x80)).to(tl.uint8), mask=there)

    exponents = (upper >> 7) & 0xFF
    lanes = tl.max(tl.reshape(exponents, [BLOCK // LANES, LANES]), axis=0)
    low = tl.min(tl.where(lanes == 0, 255, lanes), axis=0)
    most, base = better(exponents, tl.max(lanes, axis=0), -1, 0, BITS)
    most, base = better(exponents, low + 2, most, base, BITS)
    most, base = better(exponents, low + 1, most, base, BITS)
    most, base = better(exponents, low, most, base, BITS)
    tl.store(bases_ptr + tl.program_id(0), base.to(tl.uint8))

    code = tl.where(inside(exponents, base, BITS), exponents - base, (1 << BITS) - 1)
    code = tl.where(exponents == 0, 0, code).to(tl.int64)
    words = tl.sum(code << (BITS * tl.arange(0, 8))[None, :], axis=1)
    offs_bytes = rows[:, None] * BITS + tl.arange(0, 4)[None, :]
    packed = (words[:, None] >> (8 * tl.arange(0, 4))[None, :]) & 0xFF
    mask = (tl.arange(0, 4)[None, :] < BITS) & (offs_bytes < nbytes)
    tl.store(codes_ptr + offs_bytes, packed.to(tl.uint8), mask=mask)
    some = tl.sum(tl.sum((exponents != 0).to(tl.int32), axis=1), axis=0)
    tl.store(counts_ptr + tl.program_id(0), (some - most).to(tl.int64))


@triton.jit
def exponents_escapes_kernel(
    x_ptr, bases_ptr, starts_ptr, escapes_ptr, numel, room, BITS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """Second pass, a program per block: stores its escapes, from where they start, as far as there is ``room``."""
    offs = block_offsets(BLOCK)
    exponents = (upper_bits(tl.load(x_ptr + offs, mask=offs < numel, other=0), WIDE) >> 7) & 0xFF
    base = tl.load(bases_ptr + tl.program_id(0)).to(tl.int32)
    flags = ((exponents != 0) & (inside(exponents, base, BITS) == 0)).to(tl.int32)
    places = tl.load(starts_ptr + tl.program_id(0)) + tl.cumsum(flags, axis=0) - flags
    tl.store(escapes_ptr + places, exponents.to(tl.uint8), mask=(flags != 0) & (places < room))


@triton.jit
def exponents_decode_kernel(
    fractions_ptr,
    codes_ptr,
    bases_ptr,
    offsets_ptr,
    escapes_ptr,
    out_ptr,
    numel,
    nbytes,
    stored,
    BITS: tl.constexpr,
    BYTES_PER_FIELD: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Stores a chunk's elements; the exponent of one whose escape the planes lack is zero."""
    offs = block_offsets(CHUNK)
    there = offs < numel
    code = load_fields(codes_ptr, offs, nbytes, BITS, BYTES_PER_FIELD).to(tl.int32)
    flags = (code == (1 << BITS) - 1).to(tl.int32)
    places = tl.load(offsets_ptr + tl.program_id(0)) + tl.cumsum(flags, axis=0) - flags
    mask = there & (flags != 0) & (places >= 0) & (places < stored)
    escape = tl.load(escapes_ptr + places, mask=mask, other=0).to(tl.int32)
    base = tl.load(bases_ptr + offs // BLOCK, mask=there, other=0).to(tl.int32)
    exponent = tl.where(flags != 0, escape, (base + code) & 0xFF)
    exponent = tl.where(code == 0, 0, exponent)
    upper_ptr = fractions_ptr
    if WIDE:
        upper_ptr += 2 * tl.cast(numel, tl.int64)
    fraction = tl.load(upper_ptr + offs, mask=there, other=0).to(tl.int32)
    word = ((fraction & 0x80) << 8) | (exponent << 7) | (fraction & 0x7F)
    if WIDE:
        # Byte by byte: a plane that comes from a store need not be aligned to 16 bits.
        low = tl.load(fractions_ptr + 2 * offs, mask=there, other=0).to(tl.int32)
        high = tl.load(fractions_ptr + 2 * offs + 1, mask=there, other=0).to(tl.int32)
        word = (word << 16) | (high << 8) | low
    tl.store(out_ptr + offs, word.to(out_ptr.dtype.element_ty), mask=there)


def _coded(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Runs the first pass. Returns the planes but the one of escapes, and for each block where these end."""
    n, wide, blocks = x.numel(), x.element_size() == 4, exponents_blocks(x.numel())
    fractions = x.new_empty((x.element_size() - 1) * n, dtype=torch.uint8)
    codes = x.new_empty(bytes_for(n, bits), dtype=torch.uint8)
    bases = x.new_empty(blocks, dtype=torch.uint8)
    counts = x.new_empty(blocks, dtype=torch.int64)
    lower, upper = (fractions[: 2 * n].view(torch.int16), fractions[2 * n :]) if wide else (fractions, fractions)
    arguments = bits_of(x), lower, upper, codes, bases, counts, n, codes.numel()
    constants = {"BITS": bits, "WIDE": wide, "BLOCK": EXPONENTS_BLOCK, "LANES": EXPONENTS_LANES}
    launch(exponents_code_kernel, blocks, *arguments, **constants)
    ends = counts.cumsum(0)
    return fractions, codes, bases, ends - counts, ends


def _escapes(x: Tensor, bits: int, bases: Tensor, starts: Tensor, room: int) -> Tensor:
    """Runs the second pass. Returns the first ``room`` escapes."""
    escapes = x.new_empty(room, dtype=torch.uint8)
    arguments, wide = (bits_of(x), bases, starts, escapes, x.numel(), room), x.element_size() == 4
    launch(exponents_escapes_kernel, bases.numel(), *arguments, BITS=bits, WIDE=wide, BLOCK=EXPONENTS_BLOCK)
    return escapes


def _offsets(x: Tensor, starts: Tensor) -> Tensor:
    """Where the escapes of each chunk begin, in memory of its own."""
    offsets = x.new_empty(zvc_chunks(x.numel()), dtype=torch.int64)
    return offsets.copy_(starts[:: ZVC_CHUNK // EXPONENTS_BLOCK])


def exponents_encode(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`backstash.codecs.exponents.reference.exponents_encode`.

    **Waits for the device**, once, after the first of two passes: the size of the plane of escapes depends on the data
    and the host allocates it. :func:`exponents_encode_within` does not wait.
    """
    fractions, codes, bases, starts, ends = _coded(x, bits)
    stored = int(ends[-1].item()) if ends.numel() else 0
    return fractions, codes, bases, _offsets(x, starts), _escapes(x, bits, bases, starts, stored)


def exponents_encode_within(x: Tensor, bits: int, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`backstash.codecs.exponents.reference.exponents_encode_within`. Never waits for the device."""
    fractions, codes, bases, starts, ends = _coded(x, bits)
    count = ends[-1:].clone() if ends.numel() else x.new_zeros(1, dtype=torch.int64)
    return fractions, codes, bases, _offsets(x, starts), _escapes(x, bits, bases, starts, room), count


def exponents_decode(
    fractions: Tensor, codes: Tensor, bases: Tensor, offsets: Tensor, escapes: Tensor, bits: int, out: Tensor
) -> None:
    """See :func:`backstash.codecs.exponents.reference.exponents_decode`.

    Raises:
        DamagedPlanesError: a plane is not of the size that ``out`` needs. That the codes, the offsets and the escapes
            agree is not checked, which would wait for the device: an element whose escape the planes do not have has
            an exponent of zero.
    """
    check_exponents(fractions, codes, bases, offsets, bits, out)
    wide = out.element_size() == 4
    planes = fractions, codes, bases, offsets, escapes
    sizes = out.numel(), codes.numel(), escapes.numel()
    constants = {"BITS": bits, "BYTES_PER_FIELD": bytes_per_field(bits), "WIDE": wide, "BLOCK": EXPONENTS_BLOCK}
    launch_chunks(exponents_decode_kernel, out.numel(), *planes, bits_of(out), *sizes, **constants)

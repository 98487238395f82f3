"""Device code that all families share: a program's elements, their bits, fields of few bits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_offsets(BLOCK: tl.constexpr):
    """Returns this program's items of a plane that is cut into blocks of ``BLOCK``, int64 [BLOCK]."""
    return tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def elements_of(offs_bytes):
    """Returns the elements whose bits share a mask byte: int64 [BLOCK_BYTES] to int64 [BLOCK_BYTES, 8].

    Rows are adjacent in memory, so the tile loads and stores in whole vectors.
    """
    return offs_bytes[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def to_bytes(flags):
    """Packs bool [BLOCK_BYTES, 8] into uint8 [BLOCK_BYTES], column ``i`` in bit ``i``."""
    return tl.sum(flags.to(tl.int32) << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8)


@triton.jit
def to_flags(bytes_of_mask):
    """Inverts :func:`to_bytes`: uint8 [BLOCK_BYTES] to bool [BLOCK_BYTES, 8]."""
    return ((bytes_of_mask.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]) & 1) != 0


@triton.jit
def row_tile(ROWS: tl.constexpr, ROW: tl.constexpr):
    """Returns this program's rows of CSR, int64 [ROWS], and their elements, int64 [ROWS, ROW]."""
    offs_rows = block_offsets(ROWS)
    return offs_rows, offs_rows[:, None] * ROW + tl.arange(0, ROW)[None, :]


@triton.jit
def single_bits(x, HALF: tl.constexpr):
    """Returns the bits, int32, of the float32 that equals an element of 32 or 16 bits. ``HALF``: it is a float16."""
    if x.dtype == tl.int32:
        word = x
    elif HALF:
        rest = x.to(tl.int32) & 0x7FFF
        normal = (rest << 13) + (112 << 23) + tl.where(rest >= 0x7C00, 112 << 23, 0)
        small = (rest.to(tl.float32) * (1.0 / 16777216.0)).to(tl.int32, bitcast=True)
        word = tl.where(rest < 0x400, small, normal) | ((x.to(tl.int32) >> 15) << 31)
    else:
        word = x.to(tl.int32) << 16
    return word


@triton.jit
def element_bits(word, WIDE: tl.constexpr, HALF: tl.constexpr):
    """Inverts :func:`single_bits` for exact numbers, infinities and the quiet NaN. ``WIDE``: elements are float32."""
    if WIDE:
        x = word
    elif HALF:
        rest = word & 0x7FFFFFFF
        normal = tl.where(rest >= 0x7F800000, 0x7C00, (rest - (112 << 23)) >> 13)
        normal = tl.where(rest > 0x7F800000, 0x7E00, normal)
        small = (tl.minimum(rest, 0x38800000).to(tl.float32, bitcast=True) * 16777216.0).to(tl.int32)
        x = (tl.where(rest < 0x38800000, small, normal) | ((word >> 16) & 0x8000)).to(tl.int16)
    else:
        x = (word >> 16).to(tl.int16)
    return x


@triton.jit
def rounded_bits(word, WIDE: tl.constexpr, HALF: tl.constexpr):
    """Rounds the bits of a float32 that is not NaN, int32, to the nearest element, ties to even."""
    if WIDE:
        x = word
    elif HALF:
        rest = word & 0x7FFFFFFF
        normal = tl.minimum((rest + 0xFFF + ((rest >> 13) & 1) - (112 << 23)) >> 13, 0x7C00)
        # The last bit of 0.5 is the smallest subnormal.
        small = (rest.to(tl.float32, bitcast=True) + 0.5).to(tl.int32, bitcast=True) - 0x3F000000
        x = (tl.where(rest < 0x38800000, small, normal) | ((word >> 16) & 0x8000)).to(tl.int16)
    else:
        x = ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).to(tl.int16)
    return x


@triton.jit
def widened(x):
    """Returns ``x`` as float64 or float32, exactly, so that a test is written once for four dtypes."""
    if x.dtype == tl.bfloat16:
        # A bfloat16 is the upper half of a float32. The interpreter's own conversion is wrong for subnormals.
        wide = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.float16:
        wide = x.to(tl.float32)
    else:
        wide = x
    return wide


@triton.jit
def field_at(offs_bytes, i, BITS: tl.constexpr):
    """The ``i``-th of the fields that have bits in a byte.

    Returns:
        Its number, int64 [BLOCK_BYTES], and how many bits above the byte's lowest bit it begins, int64
        [BLOCK_BYTES]: negative where it began in an earlier byte, 8 or more where it is in no part of this one.
    """
    field = offs_bytes * 8 // BITS + i
    return field, field * BITS - offs_bytes * 8


@triton.jit
def share_of_byte(value, shift, mask, BITS: tl.constexpr):
    """Moves the bits of a field, int64 [BLOCK_BYTES], to where they belong in the byte; zero outside ``mask``."""
    value = tl.where(mask, value & ((1 << BITS) - 1), 0)
    # Of the two shifts one is by zero: none is ever by a negative number, which has no meaning.
    return (value << tl.maximum(shift, 0)) >> tl.maximum(-shift, 0)


@triton.jit
def load_fields(packed_ptr, offs, nbytes, BITS: tl.constexpr, BYTES_PER_FIELD: tl.constexpr):
    """Loads the fields ``offs`` of a bit stream of ``nbytes`` bytes, int64 [BLOCK]."""
    offs_first = offs * BITS // 8
    stream = tl.zeros_like(offs)
    for i in tl.static_range(BYTES_PER_FIELD):
        byte = tl.load(packed_ptr + offs_first + i, mask=offs_first + i < nbytes, other=0)
        stream |= byte.to(tl.int64) << (8 * i)
    return (stream >> (offs * BITS % 8)) & ((1 << BITS) - 1)

"""Device code that kernels share: which elements a program has, and their bits. ``kernels`` has the conventions."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_offsets(BLOCK: tl.constexpr):
    """This program's items of a plane that is cut into blocks of ``BLOCK``, int64 [BLOCK]."""
    return tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def elements_of(offs_bytes):
    """The elements whose bits share a mask byte: int64 [BLOCK_BYTES] to int64 [BLOCK_BYTES, 8].

    Rows are adjacent in memory, so the tile loads and stores in whole vectors.
    """
    return offs_bytes[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def to_bytes(flags):
    """Bool [BLOCK_BYTES, 8] to uint8 [BLOCK_BYTES], column ``i`` in bit ``i``."""
    return tl.sum(flags.to(tl.int32) << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8)


@triton.jit
def to_flags(bytes_of_mask):
    """Uint8 [BLOCK_BYTES] to bool [BLOCK_BYTES, 8]: the inverse of :func:`to_bytes`."""
    return ((bytes_of_mask.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]) & 1) != 0


@triton.jit
def row_tile(ROWS: tl.constexpr, ROW: tl.constexpr):
    """This program's rows of CSR, int64 [ROWS], and the elements of these, int64 [ROWS, ROW]."""
    offs_rows = block_offsets(ROWS)
    return offs_rows, offs_rows[:, None] * ROW + tl.arange(0, ROW)[None, :]


@triton.jit
def single_bits(x, HALF: tl.constexpr):
    """The bits of the float32 that equals an element, int32, from its own; ``HALF``: 16 of them are a float16's."""
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
    """The inverse of :func:`single_bits`, for what is exact, and the quiet NaN; ``WIDE``: the element is a float32."""
    if WIDE:
        x = word
    elif HALF:
        rest = word & 0x7FFFFFFF
        normal = tl.where(rest >= 0x7F800000, 0x7E00, (rest - (112 << 23)) >> 13)
        small = (tl.minimum(rest, 0x38800000).to(tl.float32, bitcast=True) * 16777216.0).to(tl.int32)
        x = (tl.where(rest < 0x38800000, small, normal) | ((word >> 16) & 0x8000)).to(tl.int16)
    else:
        x = (word >> 16).to(tl.int16)
    return x


@triton.jit
def rounded_bits(word, WIDE: tl.constexpr, HALF: tl.constexpr):
    """The bits of any float32 but NaN, int32, to the nearest element, ties to even."""
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

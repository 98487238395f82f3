"""The device code. Importing this module imports Triton, so only the launchers in ``__init__`` do, when first used.

Three conventions hold throughout. Elements are loaded as integers wherever their bits are meant: the launchers pass
integer views. Addresses are int64, so that tensors of more than 2**31 elements work. And no pointer is followed before
its index is compared with the size of its plane, whatever the planes say: a damaged stash decodes to wrong numbers,
never to an access out of bounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from backstash.ops.triton.blockquant_kernels import blockquant_decode_kernel as blockquant_decode_kernel
from backstash.ops.triton.blockquant_kernels import blockquant_encode_kernel as blockquant_encode_kernel
from backstash.ops.triton.elements import (
    block_offsets,
    element_bits,
    elements_of,
    row_tile,
    single_bits,
    to_bytes,
    to_flags,
)
from backstash.ops.triton.sz_kernels import sz_check_kernel as sz_check_kernel
from backstash.ops.triton.sz_kernels import sz_collect_kernel as sz_collect_kernel
from backstash.ops.triton.sz_kernels import sz_decode_kernel as sz_decode_kernel
from backstash.ops.triton.sz_kernels import sz_dequantise_kernel as sz_dequantise_kernel
from backstash.ops.triton.sz_kernels import sz_encode_kernel as sz_encode_kernel
from backstash.ops.triton.sz_kernels import sz_entries_kernel as sz_entries_kernel
from backstash.ops.triton.sz_kernels import sz_outliers_kernel as sz_outliers_kernel
from backstash.ops.triton.sz_kernels import sz_quantise_kernel as sz_quantise_kernel
from backstash.ops.triton.sz_kernels import sz_slots_kernel as sz_slots_kernel
from backstash.ops.triton.sz_kernels import sz_sum_kernel as sz_sum_kernel
from backstash.ops.triton.sz_kernels import sz_survey_kernel as sz_survey_kernel
from backstash.ops.triton.szp_kernels import szp_compact_kernel as szp_compact_kernel
from backstash.ops.triton.szp_kernels import szp_decode_kernel as szp_decode_kernel
from backstash.ops.triton.szp_kernels import szp_encode_kernel as szp_encode_kernel
from backstash.ops.triton.szp_kernels import szp_range_kernel as szp_range_kernel
from backstash.saved import Test

NONZERO = tl.constexpr(Test.NONZERO.code)
NOT_LE = tl.constexpr(Test.NOT_LE.code)
GT = tl.constexpr(Test.GT.code)
INSIDE = tl.constexpr(Test.INSIDE.code)
NOT_OUTSIDE = tl.constexpr(Test.NOT_OUTSIDE.code)
CLOSED = tl.constexpr(Test.CLOSED.code)


@triton.jit
def widened(x):
    """``x`` as float64 or float32, exactly, so that every test is written once for four dtypes."""
    if x.dtype == tl.bfloat16:
        # A bfloat16 is the upper half of a float32. The interpreter's own conversion is wrong for subnormals.
        wide = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.float16:
        wide = x.to(tl.float32)
    else:
        wide = x
    return wide


@triton.jit
def bound_for(x, bits):
    """A bound to compare ``x`` with, from its bits: a Python float would arrive as float32, too coarse for float64."""
    if x.dtype == tl.float64:
        value = bits.to(tl.int64).to(tl.float64, bitcast=True)
    else:
        value = bits.to(tl.int32).to(tl.float32, bitcast=True)
    return value


@triton.jit
def bitmask_encode_kernel(
    x_ptr, mask_ptr, numel, lo_bits: tl.int64, hi_bits: tl.int64, TEST: tl.constexpr, BLOCK_BYTES: tl.constexpr
):
    """One bit per element, the outcome of ``TEST``. For NONZERO ``x_ptr`` points to integers, else to floats.

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
    """One of two bit patterns per bit. ``out_ptr`` points to integers."""
    offs_bytes = block_offsets(BLOCK_BYTES)
    offs_out = elements_of(offs_bytes)
    flags = to_flags(tl.load(mask_ptr + offs_bytes, mask=offs_bytes * 8 < numel, other=0))
    if_set = set_bits.to(out_ptr.dtype.element_ty)
    if_clear = clear_bits.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs_out, tl.where(flags, if_set, if_clear), mask=offs_out < numel)


@triton.jit
def binary_encode_kernel(x_ptr, pair_ptr, mask_ptr, strangers_ptr, numel, BLOCK_BYTES: tl.constexpr):
    """One bit per element, ``x != pair[0]``; adds to ``strangers`` how many elements equal neither of the pair."""
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
    """``pair[bit]`` per element. ``pair_ptr`` and ``out_ptr`` point to integers."""
    offs_bytes = block_offsets(BLOCK_BYTES)
    offs_out = elements_of(offs_bytes)
    flags = to_flags(tl.load(mask_ptr + offs_bytes, mask=offs_bytes * 8 < numel, other=0))
    tl.store(out_ptr + offs_out, tl.where(flags, tl.load(pair_ptr + 1), tl.load(pair_ptr)), mask=offs_out < numel)


@triton.jit
def zvc_mask_kernel(x_ptr, mask_ptr, counts_ptr, numel, CHUNK_BYTES: tl.constexpr):
    """First pass of ZVC, a program per chunk: its mask bytes, and how many of its elements have any bit set."""
    offs_bytes = block_offsets(CHUNK_BYTES)
    offs_x = elements_of(offs_bytes)
    flags = tl.load(x_ptr + offs_x, mask=offs_x < numel, other=0) != 0
    tl.store(mask_ptr + offs_bytes, to_bytes(flags), mask=offs_bytes * 8 < numel)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(flags.to(tl.int32)).to(tl.int64))


@triton.jit
def zvc_compact_kernel(x_ptr, offsets_ptr, values_ptr, numel, CHUNK: tl.constexpr):
    """Second pass of ZVC, a program per chunk: its elements that have any bit set, from its offset on."""
    offs_x = block_offsets(CHUNK)
    x = tl.load(x_ptr + offs_x, mask=offs_x < numel, other=0)
    flags = (x != 0).to(tl.int32)
    rank = tl.cumsum(flags, axis=0) - flags
    tl.store(values_ptr + tl.load(offsets_ptr + tl.program_id(0)) + rank, x, mask=flags != 0)


@triton.jit
def zvc_decode_kernel(mask_ptr, offsets_ptr, values_ptr, out_ptr, numel, stored, CHUNK: tl.constexpr):
    """The elements of a chunk from its mask bytes and its values; zero where the planes announce a missing value."""
    offs_bytes = block_offsets(CHUNK // 8)
    mask_bytes = tl.load(mask_ptr + offs_bytes, mask=offs_bytes * 8 < numel, other=0)
    flags = tl.reshape(to_flags(mask_bytes).to(tl.int32), [CHUNK])
    offs_values = tl.load(offsets_ptr + tl.program_id(0)) + tl.cumsum(flags, axis=0) - flags
    there = (flags != 0) & (offs_values >= 0) & (offs_values < stored)
    values = tl.load(values_ptr + offs_values, mask=there, other=0)
    offs_out = block_offsets(CHUNK)
    tl.store(out_ptr + offs_out, values, mask=offs_out < numel)


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
    """The bits of a field, int64 [BLOCK_BYTES], moved to where they belong in the byte; zero outside ``mask``."""
    value = tl.where(mask, value & ((1 << BITS) - 1), 0)
    # Of the two shifts one is by zero: none is ever by a negative number, which has no meaning.
    return (value << tl.maximum(shift, 0)) >> tl.maximum(-shift, 0)


@triton.jit
def load_fields(packed_ptr, offs, nbytes, BITS: tl.constexpr, BYTES_PER_FIELD: tl.constexpr):
    """Fields ``offs`` of a bit stream of ``nbytes`` bytes, int64 [BLOCK]."""
    offs_first = offs * BITS // 8
    stream = tl.zeros_like(offs)
    for i in tl.static_range(BYTES_PER_FIELD):
        byte = tl.load(packed_ptr + offs_first + i, mask=offs_first + i < nbytes, other=0)
        stream |= byte.to(tl.int64) << (8 * i)
    return (stream >> (offs * BITS % 8)) & ((1 << BITS) - 1)


@triton.jit
def csr_count_kernel(x_ptr, counts_ptr, numel, ROWS: tl.constexpr, ROW: tl.constexpr):
    """First pass of CSR: how many elements of each row have any bit set."""
    offs_rows, offs_x = row_tile(ROWS, ROW)
    flags = tl.load(x_ptr + offs_x, mask=offs_x < numel, other=0) != 0
    tl.store(counts_ptr + offs_rows, tl.sum(flags.to(tl.int32), axis=1), mask=offs_rows * ROW < numel)


@triton.jit
def csr_compact_kernel(x_ptr, rows_ptr, columns_ptr, values_ptr, numel, ROWS: tl.constexpr, ROW: tl.constexpr):
    """Second pass of CSR: the elements that have any bit set and their columns, from the row's pointer on."""
    offs_rows, offs_x = row_tile(ROWS, ROW)
    x = tl.load(x_ptr + offs_x, mask=offs_x < numel, other=0)
    flags = (x != 0).to(tl.int32)
    first = tl.load(rows_ptr + offs_rows, mask=offs_rows * ROW < numel, other=0).to(tl.int64)
    offs_values = first[:, None] + tl.cumsum(flags, axis=1) - flags
    columns = tl.broadcast_to(tl.arange(0, ROW)[None, :], [ROWS, ROW]).to(tl.uint8)
    tl.store(columns_ptr + offs_values, columns, mask=flags != 0)
    tl.store(values_ptr + offs_values, x, mask=flags != 0)


@triton.jit
def csr_decode_kernel(columns_ptr, rows_ptr, values_ptr, out_ptr, numel, stored, ROWS: tl.constexpr, ROW: tl.constexpr):
    """Zeros, and over these the values of each row where its columns say; values that the planes lack stay zero."""
    offs_rows, offs_out = row_tile(ROWS, ROW)
    tl.store(out_ptr + offs_out, tl.zeros([ROWS, ROW], out_ptr.dtype.element_ty), mask=offs_out < numel)
    tl.debug_barrier()  # another thread of this program may have written the zero that this one's value replaces
    there = offs_rows * ROW < numel
    first = tl.load(rows_ptr + offs_rows, mask=there, other=0).to(tl.int64)
    last = tl.load(rows_ptr + offs_rows + 1, mask=there, other=0).to(tl.int64)
    offs_values = first[:, None] + tl.arange(0, ROW)[None, :]
    mask = (offs_values < last[:, None]) & (offs_values >= 0) & (offs_values < stored)
    columns = tl.load(columns_ptr + offs_values, mask=mask, other=0).to(tl.int64)
    offs_out = offs_rows[:, None] * ROW + columns
    mask &= offs_out < numel
    tl.store(out_ptr + offs_out, tl.load(values_ptr + offs_values, mask=mask, other=0), mask=mask)


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
    """How many of ``COUNT`` thresholds each element exceeds, in ``BITS`` bits; infinities and NaN exceed none.

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
    """``values[field]`` per element. ``out_ptr`` points to integers, and ``values`` are such: bits of the values."""
    offs_out = block_offsets(BLOCK)
    code = load_fields(packed_ptr, offs_out, nbytes, BITS, BYTES_PER_FIELD)
    value = tl.zeros([BLOCK], tl.int64)
    for j in tl.static_range(1 << BITS):
        value = tl.where(code == j, values[j], value)
    tl.store(out_ptr + offs_out, value.to(out_ptr.dtype.element_ty), mask=offs_out < numel)


@triton.jit
def minifloat_code(
    word,
    NONZERO_STAYS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    SUBNORMALS: tl.constexpr,
):
    """Bits of float32 to a code, int32; see ``reference.minifloat_encode``."""
    DROP: tl.constexpr = 23 - MANTISSA
    LEAST: tl.constexpr = 1 if SUBNORMALS else 1 << MANTISSA
    magnitude = word & 0x7FFFFFFF
    rest = tl.minimum(magnitude, 0x7F800000)  # what is added next does not make it negative
    code = ((rest + ((1 << (DROP - 1)) - 1) + ((rest >> DROP) & 1)) >> DROP) - ((127 - BIAS) << MANTISSA)
    if SUBNORMALS and BIAS != 127:
        # The processor rounds, where a float32's last bit is as much as the smallest subnormal.
        AT: tl.constexpr = (151 - BIAS - MANTISSA) << 23
        at = tl.full(rest.shape, AT, tl.int32).to(tl.float32, bitcast=True)
        small = (rest.to(tl.float32, bitcast=True) + at).to(tl.int32, bitcast=True) - AT
        code = tl.where(rest < ((128 - BIAS) << 23), small, code)
    if NONZERO_STAYS:
        code = tl.where(code < LEAST, tl.where(rest != 0, LEAST, 0), code)
    else:
        code = tl.where(code < LEAST, 0, code)
    code = tl.where(magnitude > 0x7F800000, (1 << (BITS - 1)) - 1, tl.minimum(code, TOP))
    return code | (((word >> 31) & 1) << (BITS - 1))


@triton.jit
def minifloat_magnitude(
    code,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    SUBNORMALS: tl.constexpr,
):
    """The magnitude of a code, bits of float32, int32; of NaN's, some number."""
    rest = code & ((1 << (BITS - 1)) - 1)
    word = (rest << (23 - MANTISSA)) + ((127 - BIAS) << 23)
    if BIAS != 127:
        if SUBNORMALS:
            STEP: tl.constexpr = (128 - BIAS - MANTISSA) << 23
            step = tl.full(rest.shape, STEP, tl.int32).to(tl.float32, bitcast=True)
            small = (rest.to(tl.float32) * step).to(tl.int32, bitcast=True)
        else:
            small = tl.zeros_like(rest)
        word = tl.where(rest < (1 << MANTISSA), small, word)
    return word


@triton.jit
def minifloat_finish(code, word, BITS: tl.constexpr, TOP: tl.constexpr):
    """A magnitude with what it lacks: the sign, and what is NaN."""
    nan = (code & ((1 << (BITS - 1)) - 1)) > TOP
    return tl.where(nan, 0x7FC00000, word) | (((code >> (BITS - 1)) & 1) << 31)


@triton.jit
def load_code(codes_ptr, offs, mask, BITS: tl.constexpr, FIELDS: tl.constexpr):
    """The codes of elements ``offs``, int32."""
    word = tl.load(codes_ptr + offs // FIELDS, mask=mask, other=0).to(tl.int32)
    return (word >> (offs % FIELDS * BITS).to(tl.int32)) & ((1 << BITS) - 1)


@triton.jit
def minifloat_encode_kernel(
    x_ptr,
    codes_ptr,
    numel,
    words,
    HALF: tl.constexpr,
    NONZERO_STAYS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    SUBNORMALS: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Codes, ``FIELDS`` in an element of the plane. ``x_ptr`` points to integers."""
    offs_words = block_offsets(BLOCK)
    packed = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(FIELDS):
        offs_x = offs_words * FIELDS + i
        word = single_bits(tl.load(x_ptr + offs_x, mask=offs_x < numel, other=0), HALF)
        packed |= minifloat_code(word, NONZERO_STAYS, MANTISSA, BIAS, BITS, TOP, SUBNORMALS) << (BITS * i)
    tl.store(codes_ptr + offs_words, packed.to(codes_ptr.dtype.element_ty), mask=offs_words < words)


@triton.jit
def minifloat_decode_kernel(
    codes_ptr,
    out_ptr,
    numel,
    HALF: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    SUBNORMALS: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The inverse of :func:`minifloat_encode_kernel`. ``out_ptr`` points to integers."""
    offs_out = block_offsets(BLOCK)
    code = load_code(codes_ptr, offs_out, offs_out < numel, BITS, FIELDS)
    word = minifloat_finish(code, minifloat_magnitude(code, MANTISSA, BIAS, BITS, SUBNORMALS), BITS, TOP)
    tl.store(out_ptr + offs_out, element_bits(word, out_ptr.dtype.element_ty == tl.int32, HALF), mask=offs_out < numel)


@triton.jit
def minifloat_scaled_encode_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    numel,
    HALF: tl.constexpr,
    CEILING: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Codes of what is divided by its group's scale, and the scales. ``x_ptr`` and ``scales_ptr`` point to integers."""
    offs_groups, offs_x = row_tile(ROWS, GROUP)
    mask = offs_x < numel
    word = single_bits(tl.load(x_ptr + offs_x, mask=mask, other=0), HALF)
    magnitude = word & 0x7FFFFFFF
    nan = magnitude > 0x7F800000
    magnitude = tl.minimum(tl.where(nan, 0, magnitude), CEILING)
    # The exponent, one more where the fraction is above that of the format's largest number.
    FRACTION: tl.constexpr = (TOP & ((1 << MANTISSA) - 1)) << (23 - MANTISSA)
    exponent = ((tl.max(magnitude, axis=1) + (0x7FFFFF - FRACTION)) >> 23) - ((TOP >> MANTISSA) - BIAS)
    exponent = tl.maximum(exponent, 1)
    reciprocal = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = (magnitude.to(tl.float32, bitcast=True) * reciprocal[:, None]).to(tl.int32, bitcast=True)
    scaled = tl.where(nan, 0x7FC00000, scaled) | (word & -(2**31))
    codes = minifloat_code(scaled, False, MANTISSA, BIAS, BITS, TOP, True)
    tl.store(codes_ptr + offs_x, codes.to(codes_ptr.dtype.element_ty), mask=mask)
    tl.store(scales_ptr + offs_groups, exponent << 23, mask=offs_groups * GROUP < numel)


@triton.jit
def minifloat_scaled_decode_kernel(
    codes_ptr,
    scales_ptr,
    out_ptr,
    numel,
    HALF: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The inverse of :func:`minifloat_scaled_encode_kernel`. ``out_ptr`` points to integers."""
    offs_groups, offs_out = row_tile(ROWS, GROUP)
    mask = offs_out < numel
    code = load_code(codes_ptr, offs_out, mask, BITS, 1)
    scale = tl.load(scales_ptr + offs_groups, mask=offs_groups * GROUP < numel, other=0)
    scale = scale.to(tl.float32, bitcast=True)
    word = tl.where((code & ((1 << (BITS - 1)) - 1)) > TOP, 0, minifloat_magnitude(code, MANTISSA, BIAS, BITS, True))
    word = (word.to(tl.float32, bitcast=True) * scale[:, None]).to(tl.int32, bitcast=True)
    word = minifloat_finish(code, word, BITS, TOP)
    tl.store(out_ptr + offs_out, element_bits(word, out_ptr.dtype.element_ty == tl.int32, HALF), mask=mask)


@triton.jit
def zvc_minifloat_compact_kernel(
    x_ptr,
    offsets_ptr,
    values_ptr,
    numel,
    HALF: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    SUBNORMALS: tl.constexpr,
    FIELDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """:func:`zvc_compact_kernel` that stores codes; where several share a word, over zeros."""
    offs_x = block_offsets(CHUNK)
    x = tl.load(x_ptr + offs_x, mask=offs_x < numel, other=0)
    flags = (x != 0).to(tl.int32)
    offs_values = tl.load(offsets_ptr + tl.program_id(0)) + tl.cumsum(flags, axis=0) - flags
    code = minifloat_code(single_bits(x, HALF), True, MANTISSA, BIAS, BITS, TOP, SUBNORMALS)
    if FIELDS == 1:
        tl.store(values_ptr + offs_values, code.to(values_ptr.dtype.element_ty), mask=flags != 0)
    else:
        # Two programs may have codes of one word; whichever comes first, the bits are the same.
        field = code << (offs_values % FIELDS * BITS).to(tl.int32)
        tl.atomic_or(values_ptr + offs_values // FIELDS, field, mask=flags != 0, sem="relaxed")


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
    """:func:`zvc_decode_kernel` that reads codes."""
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
    """``x - base`` in ``BITS`` bits each. A program makes whole bytes, so that no two programs write the same one."""
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
    """``field + base`` per element."""
    offs_out = block_offsets(BLOCK)
    value = load_fields(packed_ptr, offs_out, nbytes, BITS, BYTES_PER_FIELD) + base
    tl.store(out_ptr + offs_out, value.to(out_ptr.dtype.element_ty), mask=offs_out < numel)


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
    """Max-pool indices as row-major positions in their windows; adds to ``strays`` how many are in no position.

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
    """The inverse of :func:`window_encode_kernel`."""
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

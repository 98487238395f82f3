"""The device code. Importing this module imports Triton, so only the launchers in ``__init__`` do, when first used.

Three conventions hold throughout. Elements are loaded as integers wherever their bits are meant: the launchers pass
integer views. Addresses are int64, so that tensors of more than 2**31 elements work. And no pointer is followed before
its index is compared with the size of its plane, whatever the planes say: a damaged stash decodes to wrong numbers,
never to an access out of bounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from backstash.saved import Test

NONZERO = tl.constexpr(Test.NONZERO.code)
NOT_LE = tl.constexpr(Test.NOT_LE.code)
GT = tl.constexpr(Test.GT.code)
INSIDE = tl.constexpr(Test.INSIDE.code)
NOT_OUTSIDE = tl.constexpr(Test.NOT_OUTSIDE.code)
CLOSED = tl.constexpr(Test.CLOSED.code)


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

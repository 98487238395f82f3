"""The device code that encodes sz; ``decoding`` decodes it, and the package launches both.

A chunk has 32 range coders, and a warp has 32 threads: one warp codes a chunk, step by step, and all chunks at once.
What does not depend on the step before - quantising, predicting, the sums that undo it - has kernels of its own, with a
program for a piece of a chunk. Numbers that are float64 on the host stay float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from backstash.codecs.sz import coding as sz
from backstash.codecs.sz.reference import CHECK_SEED, signed
from backstash.ops.triton.elements import rounded_bits, single_bits

LANES = tl.constexpr(sz.LANES)
STATES = tl.constexpr(2 * sz.LANES)  # words
LEAST = tl.constexpr(sz.LEAST)
PRECISION = tl.constexpr(sz.PRECISION)
SLOTS = tl.constexpr(1 << sz.PRECISION)
SYMBOLS = tl.constexpr(sz.SYMBOLS)
BITS = tl.constexpr(sz.SYMBOLS.bit_length() - 1)  # of a symbol
WIDTH_SHIFT = tl.constexpr(sz.WIDTH_SHIFT)
FREQUENCY = tl.constexpr((1 << sz.WIDTH_SHIFT) - 1)
STATE_BITS = tl.constexpr((sz.LEAST << 16).bit_length() - 1)  # of the largest state
LIMIT = tl.constexpr(float(sz.LIMIT))
WINDOW = tl.constexpr(sz.WINDOW)
BINS = tl.constexpr(sz.BINS)
SEED = tl.constexpr(signed(CHECK_SEED))
INTEGER = tl.constexpr(1.5 * 2**52)  # added to a float64 below 2**51: the processor rounds it to nearest, ties to even


@triton.jit
def decoded_bits(code, step, offset, WIDE: tl.constexpr, HALF: tl.constexpr):
    """Returns the bits of the element that a code, int32, stands for."""
    single = ((code.to(tl.float64) + offset) * step).to(tl.float32)
    return rounded_bits(single.to(tl.int32, bitcast=True), WIDE, HALF)


@triton.jit
def quantised(x_ptr, offs_x, there, inverse, step, bound, offset, HALF: tl.constexpr):
    """Returns codes of elements, 0 for outliers and where there is no element; and which elements are outliers."""
    WIDE: tl.constexpr = x_ptr.dtype.element_ty == tl.int32
    word = single_bits(tl.load(x_ptr + offs_x, mask=there, other=0), HALF)
    value = word.to(tl.float32, bitcast=True).to(tl.float64)
    scaled = value * inverse - offset
    code = tl.where(tl.abs(scaled) < LIMIT, scaled, 0.0)
    code = ((code + INTEGER) - INTEGER).to(tl.int32)
    made = single_bits(decoded_bits(code, step, offset, WIDE, HALF), HALF).to(tl.float32, bitcast=True).to(tl.float64)
    good = tl.abs(value - made) <= bound  # false with NaN, and of two infinities
    return tl.where(there & good, code, 0), there & ~good


@triton.jit
def corner(x_ptr, offs_x, there, left, inverse, step, bound, offset, PREDICTED: tl.constexpr, HALF: tl.constexpr):
    """Returns codes; the same less their left neighbours' if PREDICTED, where ``left``; and which are outliers."""
    code, outlier = quantised(x_ptr, offs_x, there, inverse, step, bound, offset, HALF)
    less = code
    if PREDICTED:
        before, _ = quantised(x_ptr, offs_x - 1, there & left, inverse, step, bound, offset, HALF)
        less = code - before
    return code, less, outlier


@triton.jit
def sz_quantise_kernel(
    x_ptr,
    codes_ptr,
    outliers_ptr,
    numel,
    row,
    plane,
    tile,
    chunk,
    pieces,
    inverse: tl.float64,
    step: tl.float64,
    bound: tl.float64,
    offset: tl.float64,
    AXES: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores the residuals of a piece of a chunk after prediction; adds its outliers to ``outliers`` of the chunk.

    Neighbours are quantised again, up to seven of each element, so that there is one pass, and no codes but the result.
    """
    which = tl.program_id(0) // pieces
    place = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    offs_x = which.to(tl.int64) * chunk + place
    there = (place < chunk) & (offs_x < numel)
    left, up, before = place % row >= 1, place % plane >= row, place % tile >= plane
    _, code, outlier = corner(x_ptr, offs_x, there, left, inverse, step, bound, offset, AXES & 1, HALF)
    if AXES & 2:
        _, other, _ = corner(x_ptr, offs_x - row, there & up, left, inverse, step, bound, offset, AXES & 1, HALF)
        code -= other
    if AXES & 4:
        offs_x -= plane
        there &= before
        _, other, _ = corner(x_ptr, offs_x, there, left, inverse, step, bound, offset, AXES & 1, HALF)
        code -= other
        if AXES & 2:
            _, other, _ = corner(x_ptr, offs_x - row, there & up, left, inverse, step, bound, offset, AXES & 1, HALF)
            code += other
        offs_x += plane
    tl.store(codes_ptr + offs_x, code, mask=(place < chunk) & (offs_x < numel))
    count = tl.sum(outlier.to(tl.int32))
    tl.atomic_add(outliers_ptr + which, count, mask=count > 0, sem="relaxed")


@triton.jit
def tally(counts_ptr, code, there, low):
    """Adds the symbols of ``code`` to the counts; the two frequent symbols are added once per piece."""
    index = (code >> low) + WINDOW // 2
    inside = (index >= 0) & (index < WINDOW)
    zeros = tl.sum((there & (code == 0)).to(tl.int64))
    escapes = tl.sum((there & (code != 0) & ~inside).to(tl.int64))
    tl.atomic_add(counts_ptr, zeros, mask=zeros > 0, sem="relaxed")
    tl.atomic_add(counts_ptr + 1, escapes, mask=escapes > 0, sem="relaxed")
    ones = (index * 0 + 1).to(tl.int64)
    tl.atomic_add(counts_ptr + 2 + index, ones, mask=there & (code != 0) & inside, sem="relaxed")


@triton.jit
def run_start(numel, SURVEYED: tl.constexpr, RUN: tl.constexpr):
    """Returns where this program's run of a survey begins: see codecs/sz/coding.starts."""
    if numel <= SURVEYED:
        start = tl.program_id(0).to(tl.int64) * RUN
    else:  # a product of 32 and 64 bits, without its lowest 32
        share = tl.program_id(0).to(tl.uint64) * 0x9E3779B9 & 0xFFFFFFFF
        starts = (numel - RUN + 1).to(tl.uint64)
        start = (share * (starts >> 32) + (share * (starts & 0xFFFFFFFF) >> 32)).to(tl.int64)
    return start


@triton.jit
def sz_survey_kernel(
    x_ptr,
    counts_ptr,
    numel,
    row,
    plane,
    tile,
    low,
    inverse: tl.float64,
    step: tl.float64,
    bound: tl.float64,
    offset: tl.float64,
    SURVEYED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the symbols of a run of elements to the counts, along each of AXES in codecs/sz/coding.py, in that order."""
    start = run_start(numel, SURVEYED, BLOCK)
    offs_x = start + tl.arange(0, BLOCK)
    there = offs_x < numel
    left, up, before = offs_x % row >= 1, offs_x % plane >= row, offs_x % tile >= plane
    up &= there
    before &= there
    own, less, outlier = corner(x_ptr, offs_x, there, left, inverse, step, bound, offset, True, HALF)
    own_up, less_up, _ = corner(x_ptr, offs_x - row, up, left, inverse, step, bound, offset, True, HALF)
    own_before, less_before, _ = corner(x_ptr, offs_x - plane, before, left, inverse, step, bound, offset, True, HALF)
    offs_both = offs_x - plane - row
    own_both, less_both, _ = corner(x_ptr, offs_both, up & before, left, inverse, step, bound, offset, True, HALF)
    tally(counts_ptr, own, there, low)
    tally(counts_ptr + BINS, less, there, low)
    tally(counts_ptr + 2 * BINS, less - less_up, there, low)
    tally(counts_ptr + 3 * BINS, less - less_up - less_before + less_both, there, low)
    tally(counts_ptr + 4 * BINS, own - own_up, there, low)
    tally(counts_ptr + 5 * BINS, own - own_up - own_before + own_both, there, low)
    ends = tl.arange(0, 8) * BINS + BINS - 1
    count = tl.sum(outlier.to(tl.int64))
    tl.atomic_add(counts_ptr + ends, tl.zeros([8], tl.int64) + count, mask=tl.arange(0, 8) < 6, sem="relaxed")


@triton.jit
def symbols_of(table_ptr, symbols, base):
    """Returns of each symbol its frequency, its width, where its slots and its codes end; and the table's checksum."""
    symbol = tl.arange(0, SYMBOLS)
    word = tl.load(table_ptr + symbol, mask=symbol < symbols, other=0).to(tl.int32)
    check = SEED + tl.sum((word & 0xFFFF).to(tl.int64) * (2 * symbol + 1))
    frequency, width = word & FREQUENCY, word >> WIDTH_SHIFT
    codes = tl.where((symbol >= 2) & (symbol < symbols) & (word >= 0), 1 << (width & 15), 0)
    return frequency, width, tl.cumsum(frequency, axis=0), base + tl.cumsum(codes, axis=0), check


@triton.jit
def sz_entries_kernel(table_ptr, entries_ptr, index_ptr, symbols, base):
    """Stores the entries that a coder needs: of the code 0, of an escape, and of each code in the window.

    An entry is frequency << 16 | width << 12 | begin of its slots; that of an escape where a symbol does not occur. The
    table's checksum goes to the index.
    """
    frequency, width, end, codes_end, check = symbols_of(table_ptr, symbols, base)
    tl.store(index_ptr, check)
    entry = (frequency << 16) | (width << 12) | (end - frequency)
    number = tl.arange(0, SYMBOLS)
    zero, escape = tl.sum(tl.where(number == 0, entry, 0)), tl.sum(tl.where(number == 1, entry, 0))
    tl.store(entries_ptr, tl.where(zero >> 16 == 0, escape, zero))
    tl.store(entries_ptr + 1, escape)
    code = tl.arange(0, WINDOW) - WINDOW // 2
    symbol = code * 0  # how many symbols' codes end before this one
    for bit in tl.static_range(1, BITS + 1):
        probe = symbol + (SYMBOLS >> bit)
        symbol = tl.where(tl.gather(codes_end, probe - 1, axis=0) <= code, probe, symbol)
    found = tl.gather(entry, symbol, axis=0)
    inside = (code >= base) & (code < tl.max(codes_end)) & (found >> 16 != 0)
    tl.store(entries_ptr + 2 + code + WINDOW // 2, tl.where(inside, found, escape))


@triton.jit
def entry_of(entries_ptr, code, low):
    """Returns the entry of each code."""
    index = (code >> low) + WINDOW // 2
    inside = (index >= 0) & (index < WINDOW)
    return tl.load(entries_ptr + tl.where(code == 0, 0, tl.where(inside, 2 + index, 1)))


@triton.jit
def sz_encode_kernel(
    codes_ptr,
    entries_ptr,
    outliers_ptr,
    staging_ptr,
    sizes_ptr,
    numel,
    chunk,
    slot,
    low,
    HAS_LOW: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Stores a chunk's words in its slot of the staging buffer, and ``sizes``: words, places, values; 0, 0, n if dense.

    It is dense where what is stored would not be smaller than its elements. A slot is as large as these: words past its
    end are counted and not written.
    """
    pid = tl.program_id(0).to(tl.int64)
    n = tl.minimum(chunk, numel - pid * chunk).to(tl.int32)
    codes_ptr += pid * chunk
    slot_ptr = staging_ptr + pid * slot
    steps = (n + LANES - 1) // LANES
    lanes = tl.arange(0, LANES)
    escape = tl.load(entries_ptr + 1)
    states = tl.full([LANES], LEAST, tl.uint32)
    count = tl.zeros([LANES], tl.int32) + STATES  # the same in all lanes

    # Two steps are on their way from memory, codes and then entries, while one is coded.
    at = (steps - 1) * LANES + lanes
    code = tl.load(codes_ptr + at, mask=at < n, other=0)
    entry = entry_of(entries_ptr, code, low)
    next_code = tl.load(codes_ptr + at - LANES, mask=at >= LANES, other=0)
    for _ in range(steps):
        after_code = tl.load(codes_ptr + at - 2 * LANES, mask=at >= 2 * LANES, other=0)
        next_entry = entry_of(entries_ptr, next_code, low)

        there = at < n
        escapes = there & (entry == escape)  # no other symbol's slots begin where its do
        marks = escapes.to(tl.int32)
        before_low = states
        if HAS_LOW:
            plain = there & (code != 0) & ~escapes
            full_low = plain & ((states >> (STATE_BITS - low)) != 0)
            states = tl.where(full_low, states >> 16, states)
            states = tl.where(plain, (states << low) | (code.to(tl.uint32) & ((1 << low) - 1)), states)
            marks |= full_low.to(tl.int32) << 8
        frequency = (entry >> 16).to(tl.uint32)
        width = ((entry >> 12) & 0xF).to(tl.uint32)
        room = frequency << (STATE_BITS - PRECISION)
        full = there & (states >= room >> width)
        marks |= full.to(tl.int32) << 16

        ranks = tl.cumsum(marks, axis=0) - marks
        total = tl.sum(marks)
        offs = count + 2 * (ranks & 0xFF)
        tl.store(slot_ptr + offs, code.to(tl.int16), mask=escapes & (offs < slot))
        tl.store(slot_ptr + offs + 1, (code >> 16).to(tl.int16), mask=escapes & (offs + 1 < slot))
        count += 2 * (total & 0xFF)
        if HAS_LOW:
            offs = count + (ranks >> 8 & 0xFF)
            tl.store(slot_ptr + offs, before_low.to(tl.int16), mask=full_low & (offs < slot))
            count += total >> 8 & 0xFF
        offs = count + (ranks >> 16)
        tl.store(slot_ptr + offs, states.to(tl.int16), mask=full & (offs < slot))
        count += total >> 16

        states = tl.where(full, states >> 16, states)
        quotient = states // frequency
        place = (code >> low).to(tl.uint32) & ((1 << width) - 1)  # buckets begin with multiples of their size
        rest = (states - quotient * frequency) + (entry & 0xFFF).to(tl.uint32)
        coded = (((quotient << width) + place) << PRECISION) + rest
        states = tl.where(there, coded, states)
        at -= LANES
        code, entry, next_code = next_code, next_entry, after_code

    tl.store(slot_ptr + 2 * lanes, states.to(tl.int16), mask=2 * lanes < slot)
    tl.store(slot_ptr + 2 * lanes + 1, (states >> 16).to(tl.int16), mask=2 * lanes + 1 < slot)
    words, outliers = tl.max(count), tl.load(outliers_ptr + pid)
    dense = 2 * words + outliers * (2 + WIDTH) >= n * WIDTH
    tl.store(sizes_ptr + 3 * pid, tl.where(dense, 0, words).to(tl.int64))
    tl.store(sizes_ptr + 3 * pid + 1, tl.where(dense, 0, outliers).to(tl.int64))
    tl.store(sizes_ptr + 3 * pid + 2, tl.where(dense, n, outliers).to(tl.int64))


@triton.jit
def span_of(index_ptr, pid, PLANE: tl.constexpr):
    """Returns where a chunk's part of the PLANE-th plane begins and ends, int64. It may lie outside the plane."""
    record = index_ptr + 1 + 4 * pid + PLANE
    return tl.load(record - 4, mask=pid > 0, other=0), tl.load(record)


@triton.jit
def sz_collect_kernel(
    x_ptr,
    staging_ptr,
    index_ptr,
    stream_ptr,
    places_ptr,
    values_ptr,
    numel,
    chunk,
    slot,
    stream_room,
    places_room,
    values_room,
    inverse: tl.float64,
    step: tl.float64,
    bound: tl.float64,
    offset: tl.float64,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores a chunk's words, places and values where the index says, as far as the planes have room."""
    pid = tl.program_id(0).to(tl.int64)
    n = tl.minimum(chunk, numel - pid * chunk).to(tl.int32)
    x_ptr += pid * chunk
    block = tl.arange(0, BLOCK)
    word, end = span_of(index_ptr, pid, 0)
    words = (end - word).to(tl.int32)
    for first in range(0, words, BLOCK):
        offs = first + block
        copied = tl.load(staging_ptr + pid * slot + offs, mask=offs < words)
        tl.store(stream_ptr + word + offs, copied, mask=(offs < words) & (word + offs < stream_room))
    place, places_end = span_of(index_ptr, pid, 1)
    value = span_of(index_ptr, pid, 2)[0]
    if words == 0:
        for first in range(0, n, BLOCK):
            offs = first + block
            there = (offs < n) & (value + offs < values_room)
            tl.store(values_ptr + value + offs, tl.load(x_ptr + offs, mask=offs < n), mask=there)
    elif places_end > place:
        for first in range(0, n, BLOCK):
            offs = first + block
            outlier = quantised(x_ptr, offs, offs < n, inverse, step, bound, offset, HALF)[1]
            flags = outlier.to(tl.int32)
            ranks = tl.cumsum(flags, axis=0) - flags
            tl.store(places_ptr + place + ranks, offs.to(tl.int16), mask=outlier & (place + ranks < places_room))
            there = outlier & (value + ranks < values_room)
            tl.store(values_ptr + value + ranks, tl.load(x_ptr + offs, mask=outlier), mask=there)
            place += tl.sum(flags)
            value += tl.sum(flags)

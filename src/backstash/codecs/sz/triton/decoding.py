"""The device code that checks and decodes sz; ``encoding`` has what both share."""

from __future__ import annotations

import triton
import triton.language as tl

from backstash.codecs.sz import coding as sz
from backstash.codecs.sz.reference import CHECK_PLACES, CHECK_VALUES, signed
from backstash.codecs.sz.triton.encoding import (
    BITS,
    LANES,
    LEAST,
    PRECISION,
    SEED,
    SLOTS,
    STATES,
    SYMBOLS,
    WINDOW,
    decoded_bits,
    span_of,
    symbols_of,
)

MAX_WIDTH = tl.constexpr(sz.MAX_WIDTH)
PLACES = tl.constexpr(signed(CHECK_PLACES))
VALUES = tl.constexpr(signed(CHECK_VALUES))


@triton.jit
def sz_slots_kernel(table_ptr, index_ptr, slots_ptr, damaged_ptr, symbols, base):
    """Stores for each slot what a decoder needs to know of its symbol, and whether the table is ``damaged``.

    From bit 0 on the frequency - 1, from 8 the slot's place among the symbol's, from 16 the width, 24: it is an escape,
    25: it is a bucket's, from 32 the first of its codes. Whatever the table says, there are SLOTS of these.
    """
    frequency, width, end, codes_end, check = symbols_of(table_ptr, symbols, base)
    symbol = tl.arange(0, SYMBOLS)
    narrow = (width >= 0) & (width <= (symbol >= 2).to(tl.int32) * MAX_WIDTH)
    escape = tl.sum(tl.where(symbol == 1, frequency, 0))
    in_window = (base >= -WINDOW // 2) & (tl.max(codes_end) <= WINDOW // 2)
    sound = (tl.min(narrow.to(tl.int32)) == 1) & (tl.sum(frequency) == SLOTS) & (escape > 0) & in_window
    sound &= check == tl.load(index_ptr)
    tl.store(damaged_ptr, tl.where(sound, 0, 1))
    slot = tl.arange(0, SLOTS)
    symbol = slot * 0  # how many symbols' slots end before this one
    for bit in tl.static_range(1, BITS + 1):
        probe = symbol + (SYMBOLS >> bit)
        symbol = tl.where(tl.gather(end, probe - 1, axis=0) <= slot, probe, symbol)
    frequency = tl.gather(frequency, symbol, axis=0)
    place = slot - (tl.gather(end, symbol, axis=0) - frequency)
    plain = symbol >= 2
    width = tl.gather(width, symbol, axis=0) & MAX_WIDTH
    start = tl.where(plain, tl.gather(codes_end, symbol, axis=0) - (1 << width), 0)
    flags = ((symbol == 1).to(tl.int32) << 24) | (plain.to(tl.int32) << 25)
    packed = ((frequency - 1) & 0xFF) | ((place & 0xFF) << 8) | (width << 16) | flags
    tl.store(slots_ptr + slot, packed.to(tl.int64) | (start.to(tl.int64) << 32))


@triton.jit
def weighed(words_ptr, count, BLOCK: tl.constexpr):
    """Returns ``reference.sz._sum``, and the largest of the words as unsigned numbers."""
    sums = tl.zeros([BLOCK], tl.int64)
    largest = tl.zeros([BLOCK], tl.int32)
    for first in range(0, count, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        word = tl.load(words_ptr + offs, mask=offs < count, other=0).to(tl.int32) & 0xFFFF
        sums += word.to(tl.int64) * (2 * offs + 1)
        largest = tl.maximum(largest, word)
    return tl.sum(sums), tl.max(largest)


@triton.jit
def sz_check_kernel(
    stream_ptr,
    places_ptr,
    values_ptr,
    index_ptr,
    damaged_ptr,
    words,
    outliers,
    stored,
    numel,
    chunk,
    VERIFY: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores a chunk's checksum in the index; if VERIFY, compares it instead, if its parts are inside the planes.

    ``values`` points to words, WIDTH of them for each of the ``stored``.
    """
    pid = tl.program_id(0).to(tl.int64)
    n = tl.minimum(chunk, numel - pid * chunk)
    word, word_end = span_of(index_ptr, pid, 0)
    place, place_end = span_of(index_ptr, pid, 1)
    value, value_end = span_of(index_ptr, pid, 2)
    some_words, some_places, some_values = word_end - word, place_end - place, value_end - value
    dense = (some_words == 0) & (some_places == 0) & (some_values == n)
    # A chunk that is not dense is smaller than its elements.
    coded = (some_words >= STATES) & (some_words < WIDTH * n) & (some_places == some_values) & (some_places <= n)
    sound = dense | coded
    sound &= (word >= 0) & (some_words >= 0) & (word_end <= words)
    sound &= (place >= 0) & (some_places >= 0) & (place_end <= outliers)
    sound &= (value >= 0) & (some_values >= 0) & (value_end <= stored)
    if VERIFY:  # else there may be room to spare
        ends = (word_end == words) & (place_end == outliers) & (value_end == stored)
        sound &= ends | (pid + 1 < tl.num_programs(0))
    # Of what is not sound nothing is read.
    in_stream, _ = weighed(stream_ptr + word, tl.where(sound, some_words, 0).to(tl.int32), BLOCK)
    in_places, furthest = weighed(places_ptr + place, tl.where(sound, some_places, 0).to(tl.int32), BLOCK)
    in_values, _ = weighed(values_ptr + value * WIDTH, tl.where(sound, some_values * WIDTH, 0).to(tl.int32), BLOCK)
    check = (pid + 2) * SEED + in_stream + in_places * PLACES + in_values * VALUES
    if VERIFY:
        sound &= (furthest < n) & (check == tl.load(index_ptr + 4 * pid + 4))
        tl.store(damaged_ptr, 1, mask=~sound)
    else:
        tl.store(index_ptr + 4 * pid + 4, check)


@triton.jit
def word_at(words_ptr, offs, count, wanted):
    """Loads a chunk's words at ``offs``, uint32; zero where there is none or where the states stand."""
    there = wanted & (offs >= STATES) & (offs < count)
    return tl.load(words_ptr + offs, mask=there, other=0).to(tl.uint32) & 0xFFFF


@triton.jit
def sz_decode_kernel(
    stream_ptr,
    index_ptr,
    slots_ptr,
    codes_ptr,
    damaged_ptr,
    numel,
    chunk,
    low,
    HAS_LOW: tl.constexpr,
):
    """Stores a chunk's codes from its words, unless it is dense; nothing once the planes are known to be damaged."""
    pid = tl.program_id(0).to(tl.int64)
    word, end = span_of(index_ptr, pid, 0)
    count = tl.where(tl.load(damaged_ptr) == 0, end - word, 0).to(tl.int32)
    n = tl.where(count == 0, 0, tl.minimum(chunk, numel - pid * chunk)).to(tl.int32)
    words_ptr = stream_ptr + word
    codes_ptr += pid * chunk
    lanes = tl.arange(0, LANES)
    some = count + lanes * 0 > 0
    states = tl.load(words_ptr + 2 * lanes, mask=some, other=0).to(tl.uint32) & 0xFFFF
    states |= (tl.load(words_ptr + 2 * lanes + 1, mask=some, other=0).to(tl.uint32) & 0xFFFF) << 16
    left = count + lanes * 0  # words, the same in all lanes; the last of them is the next one
    for first in range(0, n, LANES):
        there = first + lanes < n
        slot = tl.load(slots_ptr + (states & (SLOTS - 1)).to(tl.int32))
        frequency, place = ((slot & 0xFF) + 1).to(tl.uint32), (slot >> 8 & 0xFF).to(tl.uint32)
        width, above = (slot >> 16 & 0xF).to(tl.uint32), states >> PRECISION
        code = ((slot >> 32).to(tl.int32) + (above & ((1 << width) - 1)).to(tl.int32)) << low
        code = tl.where((slot >> 25 & 1) != 0, code, 0)
        escapes = there & ((slot >> 24 & 1) != 0)
        states = tl.where(there, frequency * (above >> width) + place, states)
        few = there & (states < LEAST)
        marks = few.to(tl.int32) | (escapes.to(tl.int32) << 8)
        ranks = tl.cumsum(marks, axis=0)
        total = tl.sum(marks)
        left -= total & 0xFF
        states = tl.where(few, (states << 16) | word_at(words_ptr, left + (ranks & 0xFF) - 1, count, few), states)
        if HAS_LOW:
            plain = there & ((slot >> 25 & 1) != 0)
            code |= tl.where(plain, states & ((1 << low) - 1), 0).to(tl.int32)
            states = tl.where(plain, states >> low, states)
            few = plain & (states < LEAST)
            low_marks = few.to(tl.int32)
            left -= tl.sum(low_marks)
            offs = left + tl.cumsum(low_marks, axis=0) - 1
            states = tl.where(few, (states << 16) | word_at(words_ptr, offs, count, few), states)
        left -= 2 * (total >> 8)
        offs = left + 2 * (ranks >> 8) - 2
        lower, upper = word_at(words_ptr, offs, count, escapes), word_at(words_ptr, offs + 1, count, escapes)
        code = tl.where(escapes, (lower | (upper << 16)).to(tl.int32, bitcast=True), code)
        tl.store(codes_ptr + first + lanes, code, mask=there)
    wrong = some & ((left != STATES) | (states != LEAST))
    tl.store(damaged_ptr + lanes * 0, lanes * 0 + 1, mask=wrong)


@triton.jit
def sz_sum_kernel(
    codes_ptr,
    damaged_ptr,
    numel,
    stride,
    block,
    lines,
    LINES: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Computes prefix sums, in place, of lines of elements ``stride`` apart, in blocks of ``block`` elements."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    begin = line // stride * block + line % stride
    end = tl.minimum(line // stride * block + block, numel)
    there = line < tl.where(tl.load(damaged_ptr) == 0, lines, 0)
    total = tl.zeros([LINES], tl.int32)
    for first in range(0, block // stride, COUNT):
        offs = begin[:, None] + (first + tl.arange(0, COUNT))[None, :].to(tl.int64) * stride
        mask = there[:, None] & (offs < end[:, None])
        code = tl.load(codes_ptr + offs, mask=mask, other=0)
        tl.store(codes_ptr + offs, total[:, None] + tl.cumsum(code, axis=1), mask=mask)
        total += tl.sum(code, axis=1)


@triton.jit
def sz_dequantise_kernel(
    codes_ptr,
    index_ptr,
    values_ptr,
    damaged_ptr,
    out_ptr,
    numel,
    chunk,
    pieces,
    step: tl.float64,
    offset: tl.float64,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores the elements of a piece of a chunk, from their codes, or as they are if the chunk is dense."""
    WIDE: tl.constexpr = out_ptr.dtype.element_ty == tl.int32
    which = tl.program_id(0).to(tl.int64) // pieces
    place = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    offs_out = which * chunk + place
    there = (place < chunk) & (offs_out < tl.where(tl.load(damaged_ptr) == 0, numel, 0))
    word, end = span_of(index_ptr, which, 0)
    value, _ = span_of(index_ptr, which, 2)
    if word == end:
        tl.store(out_ptr + offs_out, tl.load(values_ptr + value + place, mask=there), mask=there)
    else:
        code = tl.load(codes_ptr + offs_out, mask=there, other=0)
        tl.store(out_ptr + offs_out, decoded_bits(code, step, offset, WIDE, HALF), mask=there)


@triton.jit
def sz_outliers_kernel(
    index_ptr,
    places_ptr,
    values_ptr,
    damaged_ptr,
    out_ptr,
    numel,
    chunk,
    BLOCK: tl.constexpr,
):
    """Stores the outliers of a chunk in their places."""
    pid = tl.program_id(0).to(tl.int64)
    n = tl.minimum(chunk, numel - pid * chunk)
    place, end = span_of(index_ptr, pid, 1)
    value, _ = span_of(index_ptr, pid, 2)
    count = tl.where(tl.load(damaged_ptr) == 0, end - place, 0).to(tl.int32)
    for first in range(0, count, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        where = tl.load(places_ptr + place + offs, mask=offs < count, other=0).to(tl.int32) & 0xFFFF
        outlier = tl.load(values_ptr + value + offs, mask=offs < count)
        tl.store(out_ptr + pid * chunk + where, outlier, mask=(offs < count) & (where < n))

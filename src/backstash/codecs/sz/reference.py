"""The sz kernels in plain torch: prequantisation, Lorenzo prediction and interleaved range coding (rANS).

A chunk's part of the plane ``stream`` begins with the final states of its coders, two words each, the low word first.
The words that the coders gave up follow. Coders go through a chunk from its end to its beginning, so a decoder reads
these words from the last to the first.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from backstash.codecs.sz.coding import (
    AXES,
    BINS,
    LANES,
    LEAST,
    LIMIT,
    MAX_WIDTH,
    PRECISION,
    WIDTH_SHIFT,
    WINDOW,
    chunks,
    fits_in_table,
    starts,
)
from backstash.errors import DamagedPlanesError
from backstash.ops import ON_DEVICES, count_of, dynamic_size, kernel, with_room

_TOTAL = 1 << PRECISION
_WORD = 16
"""Bits of what a coder gives up at once."""
_STATES = 2 * LANES  # words
CHECK_SEED, CHECK_PLACES, CHECK_VALUES = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7
"""The factors of a chunk's number, of its places' sum and of its values' sum in its checksum."""


def _extremes(x: Tensor) -> Tensor:
    return x.new_empty(2, dtype=torch.float64)


def _counts(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(len(AXES) * BINS, dtype=torch.int64)


def _sized(x: Tensor, blocks: list[int], words: int, places: int, values: int) -> tuple[Tensor, ...]:
    return (
        x.new_empty(words, dtype=torch.int16),
        x.new_empty(1 + 4 * chunks(x.numel(), blocks[3]), dtype=torch.int64),
        x.new_empty(places, dtype=torch.int16),
        x.new_empty(values),
    )


def _planes(x: Tensor, *how: Any) -> tuple[Tensor, ...]:
    return _sized(x, how[4], dynamic_size(), dynamic_size(), dynamic_size())


def _planes_within(x: Tensor, *how: Any) -> tuple[Tensor, ...]:
    return *_sized(x, how[4], *how[5]), x.new_empty(3, dtype=torch.int64)


@kernel("(Tensor x) -> Tensor", _extremes)
def sz_range(x: Tensor) -> Tensor:
    """Returns the smallest and the largest finite element, float64 [2]; zeros if no element is finite."""
    finite = x[x.isfinite()].double()
    return torch.stack(finite.aminmax()) if finite.numel() else torch.zeros(2, dtype=torch.float64, device=x.device)


def quantise(x: Tensor, step: float, bound: float, offset: float) -> tuple[Tensor, Tensor]:
    """Returns ``x / step - offset`` rounded, int64 [n], 0 for outliers; and which elements are outliers, bool [n]."""
    scaled = x.double() * min(1.0 / step, sys.float_info.max) - offset
    codes = torch.where(scaled.abs() < LIMIT, scaled, 0.0).round().long()
    outliers = ~((x.double() - dequantise(codes, step, offset, x.dtype).double()).abs() <= bound)
    return codes.masked_fill(outliers, 0), outliers


def dequantise(codes: Tensor, step: float, offset: float, dtype: torch.dtype) -> Tensor:
    """Inverts :func:`quantise`. Results are rounded to float32 and then to ``dtype``."""
    return ((codes.double() + offset) * step).float().to(dtype)


def predicted(codes: Tensor, axes: int, blocks: list[int]) -> Tensor:
    """Subtracts from each integer its neighbour, along one axis after the other."""
    at = torch.arange(codes.numel(), device=codes.device)
    for axis, (stride, block) in enumerate(zip([1, *blocks], blocks[:3], strict=False)):
        if axes >> axis & 1 and codes.numel() > stride:
            before = torch.cat([codes.new_zeros(stride), codes[:-stride]])
            codes = codes - torch.where(at % block >= stride, before, 0)
    return codes


def restored(codes: Tensor, axes: int, blocks: list[int]) -> Tensor:
    """Inverts :func:`predicted`."""
    n = codes.numel()
    for axis, (stride, block) in enumerate(zip([1, *blocks], blocks[:3], strict=False)):
        if axes >> axis & 1 and n:
            padded = torch.cat([codes, codes.new_zeros(-n % block)])
            codes = padded.view(-1, block // stride, stride).cumsum(1).view(-1)[:n]
    return codes


@kernel("(Tensor x, float step, float bound, int low, int[] blocks, float offset=0.) -> Tensor", _counts)
def sz_survey(x: Tensor, step: float, bound: float, low: int, blocks: list[int], offset: float = 0.0) -> Tensor:
    """Counts each symbol of a sample, for each of AXES: int64 [len(AXES) * BINS] (see codecs/sz/coding.py)."""
    begins, run = starts(x.numel())
    at = (torch.tensor(begins, device=x.device)[:, None] + torch.arange(run, device=x.device)).view(-1)
    codes, outliers = quantise(x, step, bound, offset)
    counts = []
    for axes in AXES:
        code = predicted(codes, axes, blocks)[at]
        index = (code >> low) + WINDOW // 2
        symbol = torch.where((index >= 0) & (index < WINDOW), 2 + index, 1).masked_fill(code == 0, 0)
        counts.append(torch.bincount(symbol, minlength=BINS))
        counts[-1][-1] = outliers[at].sum()
    return torch.cat(counts)


def _sum(words: Tensor) -> Tensor:
    """Returns the sum of ``(2 * i + 1) * word[i]``, with unsigned words: a change of one bit changes it."""
    words = words.view(torch.int16).long() & 0xFFFF
    return (words * (2 * torch.arange(words.numel(), device=words.device) + 1)).sum()


def check(index: int, stream: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Returns the checksum of a chunk from its parts of the planes. The table counts as the stream of chunk -1."""
    apart = signed(CHECK_PLACES) * _sum(places) + signed(CHECK_VALUES) * _sum(values)
    return signed(CHECK_SEED * (index + 2)) + _sum(stream) + apart


def signed(value: int) -> int:
    """Returns the int64 that has the lowest 64 bits of ``value``."""
    return (value + 2**63) % 2**64 - 2**63


@kernel(
    "(Tensor x, Tensor table, float step, float bound, int[] model, int[] blocks, float offset=0.)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _planes,
)
def sz_encode(
    x: Tensor, table: Tensor, step: float, bound: float, model: list[int], blocks: list[int], offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantises, predicts and entropy-codes a tensor, with a bounded error.

    Args:
        x: [n].
        table: frequencies and widths of the symbols, int16 (see coding.py); a code whose symbol has frequency 0 becomes
            an escape.
        step: what the integers are multiplied with.
        bound: the largest error. An element that would have a larger error is an outlier, which is stored as it is.
        model: base and low, which say which symbol stands for which codes; and along which of the three axes neighbours
            are subtracted, as bits.
        blocks: elements of a row, a plane, a tile, a chunk.
        offset: what is added to the integers, in steps: 0.5, so that no element becomes zero, or 0.

    Returns:
        stream: int16, the chunks' words.
        index: int64 [1 + 4 * chunks]: the checksum of the table, and of each chunk the ends of its words, its places
            and its values in their planes, and its checksum.
        places: int16, where in their chunk outliers are, as unsigned numbers.
        values: those outliers, of the dtype of ``x``. A chunk that would not be smaller has no words and no places,
            and all its elements here.
    """
    base, low, axes = model
    n, chunk, nothing = x.numel(), blocks[3], x.new_empty(0)
    codes, outliers = quantise(x, step, bound, offset)
    codes = predicted(codes, axes, blocks)
    streams: list[Tensor] = []
    places: list[Tensor] = []
    values: list[Tensor] = []
    ends = [0, 0, 0]
    index = [check(-1, table, nothing, nothing)]
    coded = _coded(codes, table, base, low, chunk) if n else []
    for i, words in enumerate(coded):
        part = slice(i * chunk, min(n, (i + 1) * chunk))
        where = outliers[part].nonzero()[:, 0].to(torch.int16)
        kept = x[part][outliers[part]]
        if 2 * words.numel() + where.numel() * (2 + x.element_size()) >= x[part].numel() * x.element_size():
            words, where, kept = words[:0], where[:0], x[part].clone()
        for planes, plane in ((streams, words), (places, where), (values, kept)):
            planes.append(plane)
        ends = [end + plane.numel() for end, plane in zip(ends, (words, where, kept), strict=True)]
        index += [*(table.new_tensor(end, dtype=torch.int64) for end in ends), check(i, words, where, kept)]
    empty = table.new_empty(0, dtype=torch.int16)
    return torch.cat([empty, *streams]), torch.stack(index), torch.cat([empty, *places]), torch.cat([nothing, *values])


def _symbols(table: Tensor, base: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns each symbol's frequency, the first of its slots, its width, and the first of its codes (0: none)."""
    frequencies, widths = table.long() & ((1 << WIDTH_SHIFT) - 1), table.long() >> WIDTH_SHIFT
    sizes = (1 << widths[2:]) if table.numel() > 2 else widths[2:]
    starts = torch.cat([widths[:2] * 0, base + sizes.cumsum(0) - sizes])
    return frequencies, frequencies.cumsum(0) - frequencies, widths, starts


def _coded(codes: Tensor, table: Tensor, base: int, low: int, chunk: int) -> list[Tensor]:
    n, device = codes.numel(), codes.device
    frequencies, begins, widths, starts = _symbols(table, base)
    high = codes >> low
    end = base + int((1 << widths[2:]).sum())
    symbols = 1 + torch.searchsorted(starts[2:].contiguous(), high, right=True)
    symbols = torch.where((high >= base) & (high < end), symbols, 1).masked_fill(codes == 0, 0)
    symbols = torch.where(frequencies[symbols] == 0, 1, symbols)
    # [chunks, steps, LANES], with -1 where a chunk has no such element.
    count, steps = chunks(n, chunk), -(-min(n, chunk) // LANES)
    symbols, codes = (_laid_out(one, count, chunk, steps, missing) for one, missing in ((symbols, -1), (codes, 0)))
    states = torch.full((count, LANES), LEAST, device=device)
    words = torch.zeros(count, steps, 4 * LANES, dtype=torch.int64, device=device)
    given = torch.zeros(count, steps, 4 * LANES, dtype=torch.bool, device=device)
    for step in reversed(range(steps)):
        symbol, code = symbols[:, step], codes[:, step]
        # An escape's two words, then those that make room for the low bits, then those that make room for the symbol.
        words[:, step, : 2 * LANES] = torch.stack([code & 0xFFFF, code >> 16 & 0xFFFF], 2).flatten(1)
        given[:, step, : 2 * LANES] = (symbol == 1).repeat_interleave(2, 1)
        has_low = (symbol >= 2) & (low > 0)
        words[:, step, 2 * LANES : 3 * LANES] = states & 0xFFFF
        given[:, step, 2 * LANES : 3 * LANES] = full = has_low & (states >= LEAST << (_WORD - low))
        states = torch.where(full, states >> 16, states)
        states = torch.where(has_low, states << low | code & ((1 << low) - 1), states)
        some = torch.where(symbol < 0, 1, symbol)  # an escape's frequency is never 0
        frequency, begin, width = frequencies[some], begins[some], widths[some]
        # A symbol and the place in its bucket are coded at once, as one of many symbols of the same frequency.
        place = torch.where(symbol >= 2, (code >> low) - starts[some], 0)
        words[:, step, 3 * LANES :] = states & 0xFFFF
        room = frequency << (LEAST.bit_length() - 1 + _WORD - PRECISION - width)
        given[:, step, 3 * LANES :] = full = (symbol >= 0) & (states >= room)
        states = torch.where(full, states >> 16, states)
        coded = (states // frequency << (PRECISION + width)) + (place << PRECISION) + states % frequency + begin
        states = torch.where(symbol >= 0, coded, states)
    last = torch.stack([states & 0xFFFF, states >> 16], 2).flatten(1)
    return [
        torch.cat([last[i], words[i].flip(0)[given[i].flip(0)]]).to(torch.int16)  # in the order in which they are given
        for i in range(count)
    ]


def _laid_out(x: Tensor, count: int, chunk: int, steps: int, missing: int) -> Tensor:
    padded = x.new_full((count, steps * LANES), missing)
    for i in range(count):
        part = x[i * chunk : (i + 1) * chunk]
        padded[i, : part.numel()] = part
    return padded.view(count, steps, LANES)


@kernel(
    "(Tensor x, Tensor table, float step, float bound, int[] model, int[] blocks, int[] rooms, "
    "float offset=0.) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _planes_within,
    without=ON_DEVICES,
)
def sz_encode_within(
    x: Tensor,
    table: Tensor,
    step: float,
    bound: float,
    model: list[int],
    blocks: list[int],
    rooms: list[int],
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As :func:`sz_encode`, but planes of given sizes, for which no host waits.

    Args:
        rooms: elements that stream, places and values have room for. The other arguments are those of sz_encode.

    Returns:
        stream, index, places and values, undefined behind their last elements; int64 [3], how many elements stream,
        places and values need. If one needs more than it has, the planes mean nothing.
    """
    stream, index, places, values = sz_encode(x, table, step, bound, model, blocks, offset)
    sized = [with_room(plane, room) for plane, room in zip((stream, places, values), rooms, strict=True)]
    sizes = torch.cat([count_of(plane) for plane in (stream, places, values)])
    return sized[0], index, sized[1], sized[2], sizes


def sz_damage() -> str:
    """Returns the message for a stash whose planes disagree."""
    return (
        "sz_decode asked for planes whose ends, frequencies and checksums agree, got others. The stash was overwritten "
        "or cut short; compute the step again."
    )


@kernel(
    "(Tensor table, Tensor stream, Tensor index, Tensor places, Tensor values, float step, int[] model, "
    "int[] blocks, Tensor(a!) out, float offset=0.) -> ()"
)
def sz_decode(
    table: Tensor,
    stream: Tensor,
    index: Tensor,
    places: Tensor,
    values: Tensor,
    step: float,
    model: list[int],
    blocks: list[int],
    out: Tensor,
    offset: float = 0.0,
) -> None:
    """Fills ``out`` from the planes of :func:`sz_encode`.

    Raises:
        DamagedPlanesError: the planes do not fit together, or a checksum is another one.
    """
    base, low, axes = model
    n, chunk = out.numel(), blocks[3]
    count, nothing = chunks(n, chunk), values[:0]
    sized = _fits(table, base, low) and index.numel() == 1 + 4 * count
    if not sized or index[0] != check(-1, table, nothing, nothing):
        raise DamagedPlanesError(sz_damage())
    records = index[1:].view(count, 4).tolist()
    begin, streams = [0, 0, 0], []
    for i, (*end, expected) in enumerate(records):
        if any(not a <= b <= plane.numel() for a, b, plane in zip(begin, end, (stream, places, values), strict=True)):
            raise DamagedPlanesError(sz_damage())
        words, where, kept = (plane[a:b] for a, b, plane in zip(begin, end, (stream, places, values), strict=True))
        size = min(n, (i + 1) * chunk) - i * chunk
        dense = words.numel() == 0 and where.numel() == 0 and kept.numel() == size
        coded = words.numel() >= _STATES and where.numel() == kept.numel()
        inside = bool(((where.long() & 0xFFFF) < size).all())
        if not ((dense or coded) and inside and check(i, words, where, kept) == expected):
            raise DamagedPlanesError(sz_damage())
        begin = end
        streams.append(words)
    if begin != [stream.numel(), places.numel(), values.numel()]:
        raise DamagedPlanesError(sz_damage())
    if n == 0:
        return
    out.copy_(dequantise(_decoded(streams, table, base, low, axes, blocks, n), step, offset, out.dtype))
    begin = [0, 0, 0]
    for i, (*end, _) in enumerate(records):
        where, kept = places[begin[1] : end[1]].long() & 0xFFFF, values[begin[2] : end[2]]
        part = out[i * chunk : (i + 1) * chunk]
        if end[0] == begin[0]:
            part.copy_(kept)
        else:
            part[where] = kept
        begin = end


def _fits(table: Tensor, base: int, low: int) -> bool:
    if not fits_in_table(table.numel(), low) or bool((table < 0).any()):
        return False
    frequencies, _, widths, starts = _symbols(table, base)
    in_window = base >= -WINDOW // 2 and int(starts[-1] + (1 << widths[-1])) <= WINDOW // 2
    narrow = int(widths.max()) <= MAX_WIDTH and int(widths[:2].sum()) == 0
    return int(frequencies.sum()) == _TOTAL and int(frequencies[1]) > 0 and in_window and narrow


def _decoded(streams: list[Tensor], table: Tensor, base: int, low: int, axes: int, blocks: list[int], n: int) -> Tensor:
    """Returns the integers; those of chunks without words are 0."""
    count, chunk, device = len(streams), blocks[3], table.device
    frequencies, begins, widths, starts = _symbols(table, base)
    of_slot = torch.repeat_interleave(torch.arange(table.numel(), device=device), frequencies)
    steps = -(-min(n, chunk) // LANES)
    longest = max(words.numel() for words in streams)
    words = torch.zeros(count, max(longest, _STATES) + 1, dtype=torch.int64, device=device)
    for i, part in enumerate(streams):
        words[i, : part.numel()] = part.long() & 0xFFFF
    left = torch.tensor([part.numel() for part in streams], device=device)[:, None]
    coded = left >= _STATES
    sizes = torch.full((count, 1), chunk, device=device)
    sizes[-1] = n - (count - 1) * chunk
    pairs = words[:, :_STATES].view(count, LANES, 2)
    states = pairs[..., 0] | pairs[..., 1] << 16
    codes = torch.zeros(count, steps, LANES, dtype=torch.int64, device=device)
    lanes = torch.arange(LANES, device=device)

    def take(which: Tensor) -> Tensor:
        """Returns the next words, one per lane in ``which``. The last lane gets the last of these words."""
        nonlocal left
        left = left - which.sum(1, keepdim=True)
        return words.gather(1, (left + which.cumsum(1) - 1).clamp(0, words.shape[1] - 1))

    for step in range(steps):
        present = coded & (step * LANES + lanes < sizes)
        slot = states & (_TOTAL - 1)
        symbol = of_slot[slot]
        width = widths[symbol]
        code = starts[symbol] + (states >> PRECISION & ((1 << width) - 1)) << low
        made = frequencies[symbol] * (states >> (PRECISION + width)) + slot - begins[symbol]
        states = torch.where(present, made, states)
        few = present & (states < LEAST)
        states = torch.where(few, states << 16 | take(few), states)
        has_low = present & (symbol >= 2) & (low > 0)
        code = torch.where(symbol >= 2, code | states & ((1 << low) - 1), 0)
        states = torch.where(has_low, states >> low, states)
        few = has_low & (states < LEAST)
        states = torch.where(few, states << 16 | take(few), states)
        escaped = (present & (symbol == 1)).repeat_interleave(2, 1)
        raw = take(escaped).view(count, LANES, 2)
        value = raw[..., 0] | raw[..., 1] << 16
        code = torch.where(symbol == 1, torch.where(value >= 1 << 31, value - (1 << 32), value), code)
        codes[:, step] = torch.where(present, code, 0)
    if bool((coded & ((left != _STATES) | (states != LEAST))).any()):
        raise DamagedPlanesError(sz_damage())
    flat = codes.view(count, -1)[:, :chunk].reshape(-1)[:n]
    return restored(flat, axes, blocks)


def _flag(table: Tensor, *_: object) -> Tensor:
    return table.new_empty(1, dtype=torch.int32)


@kernel(
    "(Tensor table, Tensor stream, Tensor index, Tensor places, Tensor values, float step, int[] model, "
    "int[] blocks, Tensor(a!) out, float offset=0.) -> Tensor",
    _flag,
    without=ON_DEVICES,
)
def sz_decode_flagged(
    table: Tensor,
    stream: Tensor,
    index: Tensor,
    places: Tensor,
    values: Tensor,
    step: float,
    model: list[int],
    blocks: list[int],
    out: Tensor,
    offset: float = 0.0,
) -> Tensor:
    """As :func:`sz_decode`, but no host waits: returns int32 [1] where ``out`` is, not 0 if the planes are damaged."""
    try:
        sz_decode(table, stream, index, places, values, step, model, blocks, out, offset)
    except DamagedPlanesError:
        return out.new_ones(1, dtype=torch.int32)
    return out.new_zeros(1, dtype=torch.int32)

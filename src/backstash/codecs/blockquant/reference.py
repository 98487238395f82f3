"""Integers of few bits between the smallest and the largest element of each group: see codecs.blockquant."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from backstash.ops import IN_GRAPHS, bits_of, bytes_for, check_plane, groups, kernel, pack_fields, unpack_fields

_WORD = 0xFFFFFFFF


def _blockquant(x: Tensor, bits: int, group_size: int, stochastic: bool, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(bytes_for(x.numel(), bits), dtype=torch.uint8),
        x.new_empty(2 * groups(x.numel(), group_size)),
        x.new_empty(1, dtype=torch.int64),
    )


@kernel("(Tensor x, int bits, int group_size, bool stochastic, int seed) -> (Tensor, Tensor, Tensor)", _blockquant)
def blockquant_encode(
    x: Tensor, bits: int, group_size: int, stochastic: bool, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises each element to one of 2**bits levels between its group's extremes.

    All arithmetic is in float32, and every operation is rounded. Before the fraction of a level is cut off, a half is
    added, or a number from 0 up to 1. That number is a hash of the seed, the group's extremes and the element's index:
    the planes depend on nothing but ``x`` and the seed, and yet two steps of training are not rounded alike.

    Args:
        x: float32, bfloat16 or float16 [n].
        bits: 1, 2, 4 or 8.
        group_size: elements in a group, a power of two from 16 on.
        stochastic: whether to round up as often as an element is near to the next step; else to nearest.
        seed: of the hash, less than 2**32.

    Returns:
        codes uint8 [ceil(n * bits / 8)], see :func:`backstash.ops.bits.pack_fields`; ranges [2 * groups] of ``x``'s
        dtype, the smallest and the largest element of each group; and int64 [1], the number of elements that are not
        finite plus the number of groups whose range is not. If that is not zero, the planes are useless.
    """
    codes, low, high, refused = _quantised(x, bits, group_size, stochastic, seed)
    return pack_fields(codes, bits), torch.stack([low, high], 1).view(-1).to(x.dtype), refused.view(1)


def _quantised(
    x: Tensor, bits: int, group_size: int, stochastic: bool, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes int64 [n], each group's extremes in float32, and how many elements and ranges are not finite."""
    numel, count = x.numel(), groups(x.numel(), group_size)
    single = x.float()
    finite = single.isfinite()

    def extremes(fill: float) -> Tensor:
        padded = single.new_full((count * group_size,), fill)
        padded[:numel] = single.masked_fill(~finite, fill)
        return padded.view(-1, group_size)

    low = extremes(math.inf).amin(1).nan_to_num(posinf=0.0) + 0.0  # -0.0 becomes 0.0
    high = extremes(-math.inf).amax(1).nan_to_num(neginf=0.0) + 0.0
    span = high - low
    refused = (~finite).sum() + (~span.isfinite()).sum()

    def each(of_group: Tensor) -> Tensor:
        return of_group.repeat_interleave(group_size)[:numel]

    levels = 2**bits - 1
    steps = (single - each(low)) / each(torch.where(span > 0, span, 1.0)) * levels
    uniform = (_hash(low, high, each, numel, seed) >> 8).float() * 2.0**-24
    steps = steps + (uniform if stochastic else 0.5)
    return steps.nan_to_num(nan=0.0).floor().clamp(0, levels).long(), low, high, refused


@kernel("(Tensor codes, Tensor ranges, int bits, int group_size, Tensor(a!) out) -> ()")
def blockquant_decode(codes: Tensor, ranges: Tensor, bits: int, group_size: int, out: Tensor) -> None:
    """Fills ``out`` [n] from the planes of :func:`blockquant_encode`.

    Raises:
        DamagedPlanesError: a plane is not of the size that ``out`` needs.
    """
    numel = out.numel()
    check_plane("blockquant_decode", "codes", codes, bytes_for(numel, bits))
    check_plane("blockquant_decode", "ranges", ranges, 2 * groups(numel, group_size))
    low, high = (extreme.repeat_interleave(group_size)[:numel] for extreme in ranges.float().view(-1, 2).unbind(1))
    unit = torch.tensor(1 / (2**bits - 1), dtype=torch.float32, device=out.device)
    out.copy_((unpack_fields(codes, bits, numel).float() * unit) * (high - low) + low)


def _rows(
    x: Tensor, bits: int, group_size: int, stochastic: bool, seed: int, across: bool, channels: int, area: int
) -> tuple[Tensor, Tensor, Tensor]:
    count = groups(x.numel(), group_size)
    return x.new_empty(count * group_size * bits // 8, dtype=torch.uint8), x.new_empty(count), x.new_empty(count)


@kernel(
    "(Tensor x, int bits, int group_size, bool stochastic, int seed, bool across, int channels, int area)"
    " -> (Tensor, Tensor, Tensor)",
    _rows,
    without=IN_GRAPHS,
)
def blockquant_encode_rows(
    x: Tensor, bits: int, group_size: int, stochastic: bool, seed: int, across: bool, channels: int, area: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`blockquant_encode`, in planes from which a compiled graph decodes without looking into a byte twice.

    A group's codes are a row, with zeros behind the last element. Of the codes [groups, group_size] those that share a
    byte lie a field's size apart, along the groups (``across``) or along each group. A group that holds something that
    is not finite, or whose range is not, has NaN as both extremes, because a graph cannot refuse it.

    Args:
        x: float32, bfloat16 or float16 [n].
        bits, group_size, stochastic, seed: as there.
        across: whether fields are taken along the groups, whose number has to be a multiple of ``8 / bits`` then.
        channels, area: of images that lie in ``x`` by image, position and channel, and whose elements are encoded by
            image, channel and position; 0 where they are encoded as they lie there.

    Returns:
        codes uint8 [groups * group_size * bits / 8]; the smallest element of each group [groups], of ``x``'s dtype; and
        the largest.
    """
    if channels:
        x = x.view(-1, area, channels).transpose(1, 2).reshape(-1)
    numel, count = x.numel(), groups(x.numel(), group_size)
    codes, low, high, _ = _quantised(x, bits, group_size, stochastic, seed)
    whole = codes.new_zeros(count * group_size)
    whole[:numel] = codes
    padded = torch.nn.functional.pad(x.float(), (0, count * group_size - numel)).view(count, group_size)
    broken = ~(padded.isfinite().all(1) & (high - low).isfinite())
    rows = whole.view(count, group_size).masked_fill(broken[:, None], 0)
    dim, fields = 0 if across else 1, 8 // bits
    parts = rows.chunk(fields, dim) if count else [rows]
    packed = sum((part << field * bits for field, part in enumerate(parts[1:], 1)), parts[0])
    low, high = (plane.to(x.dtype).masked_fill(broken, math.nan) for plane in (low, high))
    return packed.to(torch.uint8).reshape(-1), low, high


@kernel(
    "(Tensor codes, Tensor low, Tensor high, int bits, int group_size, bool across, int channels, int area,"
    " Tensor(a!) out) -> ()",
    without=IN_GRAPHS,
)
def blockquant_decode_rows(
    codes: Tensor,
    low: Tensor,
    high: Tensor,
    bits: int,
    group_size: int,
    across: bool,
    channels: int,
    area: int,
    out: Tensor,
) -> None:
    """Fills ``out`` [n] from the planes of :func:`blockquant_encode_rows`.

    Args:
        bits, group_size, across: as they were encoded with.
        channels, area: of images that lie in ``out`` by image, position and channel; 0 where they lie there as they
            were encoded.

    Raises:
        DamagedPlanesError: a plane is not of the size that ``out`` needs.
    """
    numel, count = out.numel(), groups(out.numel(), group_size)
    check_rows(codes, low, high, bits, group_size, numel)
    fields, most = 8 // bits, 2**bits - 1
    packed = codes.view(-1, group_size if across else group_size // fields).long()
    parts = [packed >> field * bits & most for field in range(fields)]
    rows = torch.cat(parts, 0 if across else 1).view(count, group_size).float()
    unit = torch.tensor(1 / most, dtype=torch.float32, device=out.device)
    low, high = low.float().unsqueeze(1), high.float().unsqueeze(1)
    values = ((rows * unit) * (high - low) + low).view(-1)[:numel]
    out.copy_(values.view(-1, channels, area).transpose(1, 2).reshape(-1) if channels else values)


def check_rows(codes: Tensor, low: Tensor, high: Tensor, bits: int, group_size: int, numel: int) -> None:
    """Checks that the planes of rows are of the sizes that so many elements need.

    Raises:
        DamagedPlanesError: one is not.
    """
    count = groups(numel, group_size)
    check_plane("blockquant_decode_rows", "codes", codes, count * group_size * bits // 8)
    check_plane("blockquant_decode_rows", "low", low, count)
    check_plane("blockquant_decode_rows", "high", high, count)


def _hash(low: Tensor, high: Tensor, each: Callable[[Tensor], Tensor], numel: int, seed: int) -> Tensor:
    index = torch.arange(numel, device=low.device)
    first = _mixed(bits_of(low).long() & _WORD ^ seed)
    second = _mixed(first ^ bits_of(high).long() & _WORD)
    word = (index & _WORD) ^ each(first)
    word ^= word >> 16
    word = word * 0x7FEB352D & _WORD
    word ^= word >> 15
    word = (word ^ (each(second) + (index >> 32) & _WORD)) * 0x846CA68B & _WORD
    return word ^ word >> 16


def _mixed(word: Tensor) -> Tensor:
    """Permutes the integers of 32 bits so that no pattern is left."""
    word = (word ^ word >> 16) * 0x7FEB352D & _WORD
    word = (word ^ word >> 15) * 0x846CA68B & _WORD
    return word ^ word >> 16

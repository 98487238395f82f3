"""Error-bounded values at a width per block: see codecs.szp for the layout."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from backstash.errors import DamagedPlanesError
from backstash.ops import (
    ON_DEVICES,
    bits_of,
    bytes_for,
    count_of,
    disagreement,
    dynamic_size,
    kernel,
    pack_fields,
    per_chunk,
    unpack_fields,
    with_room,
    zvc_chunks,
)

szp_damage = partial(
    disagreement, "szp_decode", "the words that the mask, the offsets and the widths announce", "words"
)

SZP_BLOCK = 32
"""Values of an szp block. Every block has its own width, and one bit of each of its values fills a word."""

SIGNED = 64
"""This bit of a block's width says that a word of signs follows the words of the magnitudes."""

LARGEST = 2**23
"""Quantised magnitudes are below this, so that float32 rounds to them exactly."""


def _extremes(x: Tensor) -> Tensor:
    return x.new_empty(2, dtype=torch.float32)


def _planes(x: Tensor, grid: Tensor, words: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    mask, offsets = x.new_empty(bytes_for(x.numel(), 1), dtype=torch.uint8), zvc_chunks(x.numel())
    plane = x.new_empty(dynamic_size() if words is None else words, dtype=torch.int32)
    return mask, x.new_empty(offsets, dtype=torch.int64), plane


def _planes_within(x: Tensor, grid: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_planes(x, grid, room), x.new_empty(1, dtype=torch.int64)


@kernel("(Tensor x) -> Tensor", _extremes)
def szp_range(x: Tensor) -> Tensor:
    """Returns the smallest and the largest finite element, float32 [2]; zeros if no element is finite."""
    finite = x[x.isfinite()].float()
    if not finite.numel():
        return torch.zeros(2, dtype=torch.float32, device=x.device)
    return torch.stack([finite.min(), finite.max()]) + 0.0  # -0.0 becomes 0.0


@kernel("(Tensor x, Tensor grid) -> (Tensor, Tensor, Tensor)", _planes)
def szp_encode(x: Tensor, grid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Stores which elements are not zero, and these as multiples of a step, in blocks of SZP_BLOCK with a width each.

    A magnitude becomes the nearest multiple, ties to even. Where that is zero, a quarter of a step stands for it. If a
    decoded value would be further off than the limit, or no number of ``x``'s dtype, or zero, the block stores the bits
    of its elements instead; it does so, too, if nothing would be gained.

    Args:
        x: float32, bfloat16 or float16 [n].
        grid: float32 [3]: the inverse of the step, the step, the largest difference.

    Returns:
        mask uint8 [ceil(n / 8)], a bit per element; offsets int64 [ceil(n / ZVC_CHUNK)], where each chunk begins in
        words; words int32. See codecs.szp.
    """
    inverse, step, limit = grid.unbind()
    bits = 8 * x.element_size()
    flags = x != 0
    single = x[flags].float()
    magnitude = single.abs()
    code = (magnitude * inverse).round()
    decoded = torch.where(code == 0, step * 0.25, code * step)
    good = (code < LARGEST) & ((decoded - magnitude).abs() <= limit) & (decoded > 0)
    good &= decoded.to(x.dtype).float() == decoded

    counts = per_chunk(flags)
    blocks = -(-counts // SZP_BLOCK)  # of each chunk
    place = _places(counts, blocks)
    padding = torch.zeros(int(blocks.sum()) * SZP_BLOCK, dtype=torch.int64, device=x.device)

    def in_blocks(values: Tensor) -> Tensor:
        return padding.index_put((place,), values.long()).view(-1, SZP_BLOCK)

    codes = in_blocks(torch.where(good, code, 0.0))
    negative = in_blocks(single.signbit())
    bad = in_blocks(~good).any(1)
    planes = sum(((codes >> bit).any(1).long() for bit in range(23)), torch.zeros_like(bad, dtype=torch.int64))
    signed = negative.any(1).long()
    bad |= planes + signed >= bits
    planes, signed = torch.where(bad, bits, planes), torch.where(bad, 0, signed)
    raw = bits_of(x[flags]).long() & ((1 << bits) - 1)
    fields = torch.where(bad[:, None], in_blocks(raw), codes)

    columns = [_word(fields >> bit & 1) for bit in range(bits)] + [padding.new_zeros(bad.numel())]
    table = torch.stack(columns, 1)  # a row per block
    at = planes[:, None]
    table = table.scatter(1, at, torch.where(signed[:, None] != 0, _word(negative)[:, None], table.gather(1, at)))
    sizes = planes + signed
    body = table[torch.arange(bits + 1, device=x.device) < sizes[:, None]]

    chunk = torch.arange(counts.numel(), device=x.device).repeat_interleave(blocks)  # of each block
    headers = -(-blocks // 4)
    totals = headers.index_add(0, chunk, sizes)
    offsets = totals.cumsum(0) - totals
    words = torch.zeros(int(totals.sum()), dtype=torch.int32, device=x.device)
    is_header = torch.zeros_like(words, dtype=torch.bool)
    is_header[_starts(offsets, headers)] = True
    words[~is_header] = body.to(torch.int32)
    widths = torch.zeros(int(headers.sum()) * 4, dtype=torch.uint8, device=x.device)
    widths[_starts(4 * (headers.cumsum(0) - headers), blocks)] = (planes + SIGNED * signed).to(torch.uint8)
    words[is_header] = widths.view(torch.int32)
    return pack_fields(flags.long(), 1), offsets, words


@kernel("(Tensor x, Tensor grid, int room) -> (Tensor, Tensor, Tensor, Tensor)", _planes_within, without=ON_DEVICES)
def szp_encode_within(x: Tensor, grid: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`szp_encode`, but a plane with room for so many words, for which no host waits.

    Returns:
        mask and offsets; words [room], undefined behind the last word; int64 [1], how many words ``x`` takes. If these
        are more than ``room``, the plane lacks the last ones.
    """
    mask, offsets, words = szp_encode(x, grid)
    return mask, offsets, with_room(words, room), count_of(words)


@kernel("(Tensor mask, Tensor offsets, Tensor words, Tensor step, Tensor(a!) out) -> ()")
def szp_decode(mask: Tensor, offsets: Tensor, words: Tensor, step: Tensor, out: Tensor) -> None:
    """Fills ``out`` [n] from the planes of :func:`szp_encode` and the step, float32 [1].

    Raises:
        DamagedPlanesError: the mask's bits, the offsets, the widths and the number of words do not agree.
    """
    bits = 8 * out.element_size()
    if mask.numel() != bytes_for(out.numel(), 1) or offsets.numel() != zvc_chunks(out.numel()):
        raise DamagedPlanesError(szp_damage(words.numel()))
    flags = unpack_fields(mask, 1, out.numel()).bool()
    counts = per_chunk(flags)
    blocks = -(-counts // SZP_BLOCK)
    headers = -(-blocks // 4)
    ends = torch.cat([offsets[1:], offsets.new_tensor([words.numel()])])
    sound = (offsets >= 0) & (offsets + headers <= ends) & (ends <= words.numel())
    if not bool(sound.all()) or bool((offsets[:1] != 0).any()):
        raise DamagedPlanesError(szp_damage(words.numel()))
    widths = words[_starts(offsets, headers)].view(torch.uint8)
    width = widths[_starts(4 * (headers.cumsum(0) - headers), blocks)].long()
    planes, signed, raw = width & (SIGNED - 1), width // SIGNED, width == bits
    sizes = planes + signed
    known = raw | ((planes <= 23) & (signed <= 1) & (sizes < bits))
    chunk = torch.arange(counts.numel(), device=out.device).repeat_interleave(blocks)
    if not bool(known.all()) or not torch.equal(headers.index_add(0, chunk, sizes), ends - offsets):
        raise DamagedPlanesError(szp_damage(words.numel()))

    is_body = torch.ones_like(words, dtype=torch.bool)
    is_body[_starts(offsets, headers)] = False
    table = torch.zeros(width.numel(), bits + 1, dtype=torch.int64, device=out.device)
    table[torch.arange(bits + 1, device=out.device) < sizes[:, None]] = words[is_body].long()
    lanes = torch.arange(SZP_BLOCK, device=out.device)
    negative = (table.gather(1, planes[:, None]) >> lanes & 1) * signed[:, None]
    table = torch.where(torch.arange(bits + 1, device=out.device) < planes[:, None], table, 0)
    fields = sum(((table[:, bit, None] >> lanes & 1) << bit for bit in range(bits)), torch.zeros_like(negative))
    place = _places(counts, blocks)
    code, negative, raw = fields.view(-1)[place], negative.view(-1)[place], raw.repeat_interleave(SZP_BLOCK)[place]
    magnitude = torch.where(code == 0, step * 0.25, code.float() * step)
    values = torch.where(negative != 0, -magnitude, magnitude).to(out.dtype)
    integers = bits_of(out)
    integers.zero_()
    integers[flags] = torch.where(raw, code.to(integers.dtype), bits_of(values))


def _places(counts: Tensor, blocks: Tensor) -> Tensor:
    """Returns the place of each value if the values of every chunk are padded to whole blocks."""
    return _starts((blocks.cumsum(0) - blocks) * SZP_BLOCK, counts)


def _starts(firsts: Tensor, counts: Tensor) -> Tensor:
    """Returns ``counts[i]`` numbers from ``firsts[i]`` on, for each ``i`` in turn."""
    before = counts.cumsum(0) - counts
    return (firsts - before).repeat_interleave(counts) + torch.arange(int(counts.sum()), device=counts.device)


def _word(flags: Tensor) -> Tensor:
    """Returns the bits of each row as a word, the first bit lowest."""
    return (flags << torch.arange(SZP_BLOCK, device=flags.device)).sum(1)

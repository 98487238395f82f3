"""Floats whose exponents are codes into a window for each block: see codecs.exponents for the layout."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from backstash.errors import DamagedPlanesError
from backstash.ops import (
    bytes_for,
    disagreement,
    dynamic_size,
    gathered,
    kernel,
    pack_fields,
    per_chunk,
    unpack_fields,
    zvc_chunks,
)

exponents_damage = partial(
    disagreement, "exponents_decode", "the escapes that the codes and the offsets announce", "escapes"
)

EXPONENTS_BLOCK = 512
"""Elements whose exponents are coded in one window. A chunk of ZVC_CHUNK is a whole number of such blocks.

On what a Llama and a GPT-2 save, blocks of 128 are 0.4 % larger, because of their bases, and blocks of 1,024 less than
0.1 % smaller. An outlier is one of fewer neighbours in a small block.
"""

EXPONENTS_LANES = 32
"""Lanes of such a block: element ``i`` is in lane ``i % EXPONENTS_LANES``."""


def exponents_blocks(numel: int) -> int:
    """Returns the number of blocks of EXPONENTS_BLOCK of ``numel`` elements."""
    return (numel + EXPONENTS_BLOCK - 1) // EXPONENTS_BLOCK


def _planes(x: Tensor, bits: int, escapes: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        x.new_empty((x.element_size() - 1) * x.numel(), dtype=torch.uint8),
        x.new_empty(bytes_for(x.numel(), bits), dtype=torch.uint8),
        x.new_empty(exponents_blocks(x.numel()), dtype=torch.uint8),
        x.new_empty(zvc_chunks(x.numel()), dtype=torch.int64),
        x.new_empty(escapes, dtype=torch.uint8),
    )


def _encoded(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _planes(x, bits, dynamic_size())


def _encoded_within(x: Tensor, bits: int, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return *_planes(x, bits, room), x.new_empty(1, dtype=torch.int64)


def _windows(exponents: Tensor, bits: int) -> Tensor:
    """Returns what the window of each block begins after: int32 [blocks], of exponents int32 [blocks, size].

    A window had best end where the bulk of a block does. Outliers are above it, so the first candidate ends on the
    largest exponent, and the others near the smallest of the largest exponents of the block's lanes, of which outliers
    do not reach all: an element is in lane ``i % EXPONENTS_LANES``, and lanes of zeros do not count. The window that
    holds the most elements is taken; of several the first one.
    """
    width = 2**bits - 2
    lanes = exponents.view(-1, EXPONENTS_BLOCK // EXPONENTS_LANES, EXPONENTS_LANES).amax(1)
    low = torch.where(lanes == 0, 255, lanes).amin(1)
    most = torch.full_like(low, -1, dtype=torch.int64)
    chosen = torch.zeros_like(low)
    for top in (lanes.amax(1), low + 2, low + 1, low):
        base = (top - width).clamp(0, 255 - width)
        inside = ((exponents > base[:, None]) & (exponents <= base[:, None] + width)).sum(1)
        chosen = torch.where(inside > most, base, chosen)
        most = torch.maximum(inside, most)
    return chosen


def _coded(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the plane of fractions, the codes int32 [n], the plane of bases, and the exponents int32 [n]."""
    n, halves = x.numel(), x.view(torch.int16).view(-1, x.element_size() // 2)
    tops = halves[:, -1].int() & 0xFFFF  # of float32, too, these 16 bits have the sign and all of the exponent
    exponents = tops >> 7 & 0xFF
    fractions = (tops & 0x7F | tops >> 8 & 0x80).to(torch.uint8)
    lower = halves[:, :-1].contiguous().view(torch.uint8).view(-1)
    padded = exponents.new_zeros(exponents_blocks(n) * EXPONENTS_BLOCK)
    padded[:n] = exponents
    padded = padded.view(-1, EXPONENTS_BLOCK)
    bases = _windows(padded, bits)
    codes = (padded - bases[:, None]).view(-1)[:n]
    codes = torch.where((codes >= 1) & (codes <= 2**bits - 2), codes, 2**bits - 1)
    codes = torch.where(exponents == 0, 0, codes)
    return torch.cat([lower, fractions]), codes, bases.to(torch.uint8), exponents


@kernel("(Tensor x, int bits) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", _encoded)
def exponents_encode(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Stores exponents in so many bits each, if they are in the window of their block, and all other bits as they are.

    Args:
        x: bfloat16 or float32 [n].
        bits: of a code, 3 or 4.

    Returns:
        fractions uint8 [(itemsize - 1) * n]: of float32 first the lower 16 bits of each element, then of either dtype a
        byte per element, its sign and the upper 7 bits of the fraction; codes uint8 [ceil(n * bits / 8)], packed as a
        little-endian stream: 0 for the exponent 0, 1 to 2**bits - 2 for so much above the base, 2**bits - 1 for an
        exponent that is an escape; bases uint8 [ceil(n / EXPONENTS_BLOCK)]; offsets int64 [ceil(n / ZVC_CHUNK)], where
        each chunk's first escape stands; escapes uint8 [number of escapes].
    """
    fractions, codes, bases, exponents = _coded(x, bits)
    flags = codes == 2**bits - 1
    counts = per_chunk(flags)
    escapes = exponents[flags].to(torch.uint8)
    return fractions, pack_fields(codes.long(), bits), bases, counts.cumsum(0) - counts, escapes


@kernel(
    "(Tensor x, int bits, int room) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _encoded_within,
)
def exponents_encode_within(x: Tensor, bits: int, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As :func:`exponents_encode`, but a plane of escapes that has a given size, for which no host waits.

    Returns:
        fractions, codes, bases and offsets; escapes [room], undefined behind the last escape; int64 [1], how many
        escapes ``x`` has. If there are more than ``room``, the plane lacks the last ones.
    """
    fractions, codes, bases, exponents = _coded(x, bits)
    flags = codes == 2**bits - 1
    counts = per_chunk(flags)
    (escapes,) = gathered(flags, room, exponents.to(torch.uint8))
    planes = fractions, pack_fields(codes.long(), bits), bases, counts.cumsum(0) - counts, escapes
    return *planes, flags.sum(0, keepdim=True)


@kernel(
    "(Tensor fractions, Tensor codes, Tensor bases, Tensor offsets, Tensor escapes, int bits, Tensor(a!) out) -> ()",
)
def exponents_decode(
    fractions: Tensor, codes: Tensor, bases: Tensor, offsets: Tensor, escapes: Tensor, bits: int, out: Tensor
) -> None:
    """Fills ``out`` [n] from the planes of :func:`exponents_encode`.

    Raises:
        DamagedPlanesError: a plane is not of the size that ``out`` needs, or the codes, the offsets and the number of
            escapes do not agree.
    """
    n, lower = out.numel(), (out.element_size() - 2) * out.numel()
    check_exponents(fractions, codes, bases, offsets, bits, out)
    code = unpack_fields(codes, bits, n)
    flags = code == 2**bits - 1
    counts = per_chunk(flags)
    if int(counts.sum()) != escapes.numel() or not torch.equal(counts.cumsum(0) - counts, offsets):
        raise DamagedPlanesError(exponents_damage(escapes.numel()))
    base = bases.long().repeat_interleave(EXPONENTS_BLOCK)[:n]
    exponents = torch.where(code == 0, 0, base + code)
    exponents[flags] = escapes.long()
    fraction = fractions[lower:].long()
    tops = (fraction & 0x80) << 8 | (exponents & 0xFF) << 7 | fraction & 0x7F
    halves = out.view(torch.int16).view(-1, out.element_size() // 2)
    halves[:, -1] = tops.to(torch.int16)
    halves[:, :-1] = fractions[:lower].clone().view(torch.int16).view(n, out.element_size() // 2 - 1)


def check_exponents(fractions: Tensor, codes: Tensor, bases: Tensor, offsets: Tensor, bits: int, out: Tensor) -> None:
    """Checks that the planes whose sizes do not depend on the numbers are as large as ``out`` needs.

    Raises:
        DamagedPlanesError: one is not.
    """
    n = out.numel()
    wanted = (out.element_size() - 1) * n, bytes_for(n, bits), exponents_blocks(n), zvc_chunks(n)
    found = tuple(plane.numel() for plane in (fractions, codes, bases, offsets))
    if found != wanted:
        raise DamagedPlanesError(
            f"exponents_decode asked for fractions, codes, bases and offsets of {list(wanted)} elements, got "
            f"{list(found)}. The stash was overwritten or cut short; compute the step again."
        )

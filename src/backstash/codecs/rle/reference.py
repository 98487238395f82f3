"""Run lengths of zeros, in plain torch."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from backstash.errors import DamagedPlanesError
from backstash.ops import ZVC_CHUNK, bits_of, disagreement, dynamic_size, kernel, per_chunk, zvc_chunks

rle_damage = partial(disagreement, "rle_decode", "the values that the tokens and the starts announce", "values")

LONGEST = 255
"""The length of the longest run that a token stands for."""


_WITHOUT = {"triton": "the reference serves: nobody has asked for run lengths on a GPU"}


def _rle(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tokens, nonzeros = dynamic_size(), dynamic_size()
    return (
        x.new_empty(tokens, dtype=torch.uint8),
        x.new_empty(2 * zvc_chunks(x.numel()), dtype=torch.int64),
        x.new_empty(nonzeros),
    )


@kernel("(Tensor x) -> (Tensor, Tensor, Tensor)", _rle, without=_WITHOUT)
def rle_encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Stores the elements that have any bit set, in order, and the lengths of the runs of these and of zeros.

    Every chunk of ZVC_CHUNK elements has its own tokens: the lengths of its runs, alternately of zeros and of other
    elements, zeros first. A run longer than LONGEST takes several tokens with zeros between them: 300 is 255, 0, 45.

    Args:
        x: [n], 2, 4 or 8 bytes per element.

    Returns:
        tokens uint8; starts int64 [2 * chunks], the first token of each chunk and then the first value of each chunk;
        values [number of elements that have any bit set] of ``x``'s dtype.
    """
    n, flags = x.numel(), bits_of(x) != 0
    first = torch.arange(n, device=x.device) % ZVC_CHUNK == 0
    flips = first.clone()
    flips[1:] |= flags[1:] != flags[:-1]
    begins = flips.nonzero().view(-1)
    lengths = torch.cat([begins, begins.new_tensor([n])]).diff() if n else begins
    empty = (first & flags)[begins].long()  # the zeros that a chunk does not begin with
    pieces = (lengths + LONGEST - 1) // LONGEST
    counts = empty + 2 * pieces - 1
    at = counts.cumsum(0) - counts
    run = torch.arange(begins.numel(), device=x.device).repeat_interleave(pieces)
    piece = torch.arange(run.numel(), device=x.device) - (pieces.cumsum(0) - pieces)[run]
    tokens = torch.zeros(int(counts.sum()), dtype=torch.uint8, device=x.device)
    left = lengths[run] - LONGEST * piece
    tokens[(at + empty)[run] + 2 * piece] = left.clamp(max=LONGEST).to(torch.uint8)
    stored = per_chunk(flags)
    return tokens, torch.cat([at[first[begins]], stored.cumsum(0) - stored]), x[flags]


@kernel("(Tensor tokens, Tensor starts, Tensor values, Tensor(a!) out) -> ()", without=_WITHOUT)
def rle_decode(tokens: Tensor, starts: Tensor, values: Tensor, out: Tensor) -> None:
    """Fills ``out`` [n] from the planes of :func:`rle_encode`.

    Raises:
        DamagedPlanesError: the tokens, the starts and the number of values do not agree.
    """
    n, chunks = out.numel(), zvc_chunks(out.numel())
    if starts.numel() != 2 * chunks:
        raise DamagedPlanesError(rle_damage(values.numel()))
    counts = torch.cat([starts[:chunks], starts.new_tensor([tokens.numel()])]).diff()
    if (chunks and int(starts[0]) != 0) or bool((counts < 0).any()) or int(counts.sum()) != tokens.numel():
        raise DamagedPlanesError(rle_damage(values.numel()))
    chunk = torch.arange(chunks, device=out.device).repeat_interleave(counts)
    lengths = starts.new_zeros(chunks).index_add(0, chunk, tokens.long())
    if not torch.equal(lengths, per_chunk(torch.ones(n, dtype=torch.bool, device=out.device))):
        raise DamagedPlanesError(rle_damage(values.numel()))
    literal = (torch.arange(tokens.numel(), device=out.device) - starts[:chunks][chunk]) % 2 == 1
    flags = literal.repeat_interleave(tokens.long())
    stored = per_chunk(flags)
    if int(stored.sum()) != values.numel() or not torch.equal(stored.cumsum(0) - stored, starts[chunks:]):
        raise DamagedPlanesError(rle_damage(values.numel()))
    bits_of(out).zero_()
    bits_of(out)[flags] = bits_of(values)

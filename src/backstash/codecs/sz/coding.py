"""The layout that all implementations of the sz kernels share, and the model of a tensor's codes.

A value becomes an integer, a multiple of the step; neighbours' integers are subtracted from it; what is left, its
*code*, becomes one of these symbols, of which each has a frequency out of 256:

* 0: the code is 0;
* 1, escape: the code follows as it is, in 32 bits;
* 2 + j: the code without its ``low`` lowest bits is one of the ``2**width`` numbers of *bucket* ``j``. Which of them it
  is takes ``width`` bits; the low bits follow as they are.

The buckets lie side by side, the first one begins with ``base``. So codes that are rare, or about as frequent as their
neighbours, share a bucket: a table
of 32 symbols is looked up in registers, where one of 2,048 would have to be looked up in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CHUNK = 1 << 16
"""Elements of a chunk at most: a place in it fits 16 bits."""

LANES = 32
"""Coders that take turns in a chunk: element ``i`` of it is coded by coder ``i % LANES``."""

PRECISION = 8
"""The frequencies of all symbols add up to ``2**PRECISION``."""

LEAST = 1 << 15
"""A coder's state begins as this, and is never below it between two elements, nor ``2**16`` times as large."""

LIMIT = 1 << 23
"""Multiples of the step below this are codes: with half a step more, they fit a float32's digits."""

SYMBOLS = 32
"""The most symbols of a table."""

MAX_WIDTH = 7
"""The widest bucket has ``2**MAX_WIDTH`` codes: with PRECISION, as many bits as a coder can take at once."""

WIDTH_SHIFT = 9
"""A table's number is a symbol's frequency, and from this bit on its width."""

NEAR, FAR_WIDTH = 128, 3
"""Buckets of codes from ``-NEAR`` to ``NEAR - 1`` may have any width, those of other codes no smaller one."""

WINDOW = 2048
"""Number of codes, without low bits, that buckets may have and that a survey counts, from ``-WINDOW // 2`` on."""

BINS = 2 + WINDOW + 1
"""Counts of a survey: one per symbol, and how many elements are outliers."""

MAX_LOW = 12
"""The most low bits that are not modelled."""

AXES = (0, 1, 3, 7, 2, 6)
"""Along which axes neighbours are subtracted: bit 0 for the innermost dimension, bit 2 for the third one."""

SURVEYED, RUN = 1 << 15, 128
"""Elements of a survey at most, and elements of each of its runs. A smaller tensor is surveyed as a whole."""


def blocks(sizes: Sequence[int]) -> list[int]:
    """Returns the elements of a row, of a plane of rows, of a tile of planes, and of a chunk of tiles.

    Nothing is subtracted across a row's, a plane's or a tile's border, so that chunks are independent.

    Args:
        sizes: the tensor's dimensions other than 1, the innermost one in memory first.
    """
    row, height, depth = (*sizes, 1, 1, 1)[:3]
    row = max(1, min(row, CHUNK))
    plane = row * max(1, min(height, CHUNK // row))
    tile = plane * max(1, min(depth, CHUNK // plane))
    return [row, plane, tile, tile * (CHUNK // tile)]


def fits_in_table(symbols: int, low: int) -> bool:
    """Whether a table may have ``symbols`` symbols, and a code ``low`` low bits."""
    return 2 <= symbols <= SYMBOLS and 0 <= low <= MAX_LOW


def chunks(numel: int, chunk: int) -> int:
    """Returns the number of chunks of ``numel`` elements."""
    return -(-numel // chunk)


def starts(numel: int) -> tuple[list[int], int]:
    """Returns where the runs of a survey begin, and how many elements each run has.

    The beginnings are the multiples of the golden ratio, scaled: as even as can be, and in step with no dimension.
    """
    if numel <= SURVEYED:
        return [0], numel
    return [((j * 0x9E3779B9 & 0xFFFFFFFF) * (numel - RUN + 1)) >> 32 for j in range(SURVEYED // RUN)], RUN


@dataclass(frozen=True)
class CodeModel:
    """How codes are coded.

    Attributes:
        step: what integers are multiplied with.
        axes: one of AXES.
        low: number of lowest bits of a code that are not modelled.
        base: the first code of the first bucket, without these bits.
        table: of each symbol the frequency and the width (WIDTH_SHIFT), int16.
        bits: what the surveyed elements would take.
    """

    step: float
    axes: int
    low: int
    base: int
    table: npt.NDArray[np.int16]
    bits: float


_CHARGES: npt.NDArray[np.float64] = np.array([[4.0**k] for k in range(9)])
"""Bits that a bucket is charged, until there are few enough. With the last one all buckets are as wide as can be."""


def model(survey: npt.NDArray[np.int64], step: float, low: int, width: int) -> CodeModel:
    """Returns the model under which the surveyed elements take the fewest bits.

    Args:
        survey: the counts [len(AXES), BINS].
        step: what the survey was made with.
        low: likewise.
        width: bits of an element.
    """
    counts, outliers = survey[:, :-1].astype(np.float64), survey[:, -1]
    total = max(1.0, float(counts[0].sum()))
    # Of the window, only as much as has codes, in whole blocks of the widest buckets.
    met = np.flatnonzero(counts[:, 2:].any(0)) >> MAX_WIDTH << MAX_WIDTH
    begin, end = (int(met[0]), int(met[-1]) + (1 << MAX_WIDTH)) if len(met) else (0, 1 << MAX_WIDTH)
    counts = np.concatenate([counts[:, :2], counts[:, 2 + begin : 2 + end]], 1)
    far = np.abs(np.arange(begin, end) - (WINDOW // 2 - 0.5)) > NEAR
    # Beside the buckets: an escape takes 32 bits more, and the code 0 no bucket.
    others = _cost(counts[:, :2], total).sum(1) + 32 * counts[:, 1] + (16 + width) * outliers
    bits = _buckets(counts[:, 2:], far, total, np.zeros((len(counts), 1)))[0]
    best = int((bits + low * counts[:, 2:].sum(1) + others).argmin())
    row = counts[best, 2:]
    _, joined = _buckets(row[None], far, total, _CHARGES)
    sums = np.append(0.0, row.cumsum())
    for charged in range(len(_CHARGES)):
        begins, widths = _listed([level[charged] for level in joined])
        inside = sums[begins + (1 << widths)] - sums[begins]
        occurring = np.flatnonzero(inside)
        first, last = (int(occurring[0]), int(occurring[-1]) + 1) if len(occurring) else (0, 0)
        if 2 + last - first <= SYMBOLS:
            break
    few = np.concatenate([counts[best, :2], inside[first:last]])
    few[1] = max(few[1], total / 2**PRECISION / 16)  # a code that the survey has not met becomes an escape
    frequencies = _frequencies(few)
    widths = np.concatenate([[0, 0], widths[first:last]])
    taken = few * (widths - np.log2(np.maximum(frequencies, 1) / 2**PRECISION))
    exact = float(taken.sum() + 32 * counts[best, 1] + low * inside.sum() + (16 + width) * outliers[best])
    base = begin + int(begins[first]) - WINDOW // 2 if len(occurring) else 0
    table = (frequencies | widths << WIDTH_SHIFT).astype(np.int16)
    return CodeModel(step, AXES[best], low, base, table, exact)


def _cost(counts: npt.NDArray[np.float64], total: float) -> npt.NDArray[np.float64]:
    """Returns the bits that symbols take, each with the frequency that suits it but no smaller one than 1."""
    share, least = counts / total, 2.0**-PRECISION
    enough = np.maximum(share, least)
    taken = (enough - share) * (total / math.log(2))
    bits: npt.NDArray[np.float64] = np.where(counts > 0, taken - counts * np.log2(enough), 0.0)
    return bits


def _buckets(
    counts: npt.NDArray[np.float64], far: npt.NDArray[np.bool_], total: float, charge: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], list[npt.NDArray[np.bool_]]]:
    """Finds the buckets that take the fewest bits: of two neighbours, each level joins those that are better joined.

    Args:
        counts: of each code, [rows, codes]; of one row where only the charges differ.
        far: which codes may be in no bucket that is narrower than FAR_WIDTH.
        total: of all symbols.
        charge: bits that every bucket costs beside its elements, [rows, 1].

    Returns:
        The bits of each row; and, for each width from 1 on, which pairs of buckets of the width before are joined.
    """
    best = np.where(far & (counts > 0), np.inf, _cost(counts, total) + charge)
    joined: list[npt.NDArray[np.bool_]] = []
    for width in range(1, MAX_WIDTH + 1):
        counts = counts[:, ::2] + counts[:, 1::2]
        apart = best[:, ::2] + best[:, 1::2]
        together = _cost(counts, total) + width * counts + charge
        if width < FAR_WIDTH:
            far = far[::2]
            together = np.where(far & (counts > 0), np.inf, together)
        joined.append(together <= apart)
        best = np.minimum(together, apart)
    return best.sum(1), joined


def _listed(joined: list[npt.NDArray[np.bool_]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the beginnings, from 0 on, and the widths of buckets that are joined as :func:`_buckets` says."""
    widths = np.zeros(2 * len(joined[0]), dtype=np.int64)
    for width, pairs in enumerate(joined, 1):  # a later level joins whatever earlier levels have made
        widths[np.repeat(pairs, 1 << width)] = width
    at = np.arange(len(widths))
    begins = at[at & ((1 << widths) - 1) == 0]
    return begins, widths[begins]


def _frequencies(counts: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Returns frequencies in proportion to ``counts`` that add up to ``2**PRECISION``, at least 1 per count above 0."""
    shares = counts * (2**PRECISION / counts.sum())
    frequencies: npt.NDArray[np.int64] = np.floor(shares).astype(np.int64)
    remainders = shares - frequencies
    remainders[(frequencies == 0) & (counts > 0)] = -1.0
    frequencies[(frequencies == 0) & (counts > 0)] = 1
    missing = 2**PRECISION - int(frequencies.sum())
    if missing < 0:  # what the rarest were given is taken from the others in proportion
        spare = np.maximum(frequencies - 1, 0)
        frequencies -= spare * -missing // int(spare.sum())
        missing = 2**PRECISION - int(frequencies.sum())
        remainders = -frequencies.astype(np.float64)
    order = np.argsort(-remainders if missing > 0 else remainders, kind="stable")[: abs(missing)]
    frequencies[order] += 1 if missing > 0 else -1
    return frequencies


def single(step: float) -> float:
    """Returns the largest float32 up to ``step``, which is positive, but none below the smallest normal one."""
    nearest = np.float32(min(step, float(np.finfo(np.float32).max)))
    lower = np.nextafter(nearest, np.float32(0.0)) if float(nearest) > step else nearest
    return max(float(lower), float(np.finfo(np.float32).tiny))


def truncated(step: float, digits: int) -> float:
    """Returns the largest number up to ``step`` that has ``digits`` binary digits."""
    mantissa, exponent = math.frexp(step)
    return math.ldexp(math.floor(math.ldexp(mantissa, digits)), exponent - digits)

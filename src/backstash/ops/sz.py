"""What all implementations of the sz kernels agree on, and how a tensor's codes are modelled.

A value becomes an integer, a multiple of the step; neighbours' integers are subtracted from it; what is left, its
*code*, becomes one of these symbols, of which each has a frequency out of 4,096:

* 0: the code is 0;
* 1, escape: the code follows as it is, in 32 bits;
* 2 + j: the code without its ``low`` lowest bits is ``base + j``; those follow as they are.
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

PRECISION = 12
"""The frequencies of all symbols add up to ``2**PRECISION``."""

LEAST = 1 << 16
"""A coder's state begins as this, and is never below it between two elements."""

LIMIT = 1 << 27
"""Multiples of the step below this are codes; sums of eight of them fit 32 bits."""

WINDOW = 2048
"""Number of symbols from 2 on that a survey counts: the codes ``base + j`` from ``-WINDOW // 2`` on."""

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


def fits(symbols: int, low: int) -> bool:
    """Whether a table may have ``symbols`` symbols, and a code ``low`` low bits."""
    return 2 <= symbols <= 2 + WINDOW and 0 <= low <= MAX_LOW


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
class Model:
    """How codes are coded.

    Attributes:
        step: what integers are multiplied with.
        axes: one of AXES.
        low: number of lowest bits of a code that are not modelled.
        base: the code of symbol 2, without these bits.
        table: the symbols' frequencies, int16.
        bits: what the surveyed elements would take.
    """

    step: float
    axes: int
    low: int
    base: int
    table: npt.NDArray[np.int16]
    bits: float


def model(survey: npt.NDArray[np.int64], step: float, low: int, width: int) -> Model:
    """Returns the model under which the surveyed elements take the fewest bits.

    Args:
        survey: the counts [len(AXES), BINS].
        step: what the survey was made with.
        low: likewise.
        width: bits of an element.
    """
    occurring = np.flatnonzero(survey[:, 2:-1].any(0))
    begin, end = (int(occurring[0]), int(occurring[-1]) + 1) if len(occurring) else (0, 0)
    counts = np.concatenate([survey[:, :2], survey[:, 2 + begin : 2 + end]], axis=1).astype(np.float64)
    outliers = survey[:, -1]
    total = max(1.0, counts[0].sum())
    kept = counts[:, 2:] * 2**16 >= total  # a frequency of 1 out of 4,096 costs the others more than rarer escapes do
    escapes = counts[:, 1] + np.where(kept, 0.0, counts[:, 2:]).sum(1)
    counts[:, 2:] *= kept
    counts[:, 1] = np.maximum(1.0, escapes)
    bits = (counts * np.log2(total / np.maximum(counts, 1e-9))).sum(1) + 32 * escapes
    bits += low * counts[:, 2:].sum(1) + (16 + width) * outliers
    best = int(bits.argmin())
    window = np.flatnonzero(kept[best] & (counts[best, 2:] > 0))
    first, last = (int(window[0]), int(window[-1]) + 1) if len(window) else (0, 0)
    table = _frequencies(np.concatenate([counts[best, :2], counts[best, 2 + first : 2 + last]]))
    base = begin + first - WINDOW // 2 if len(window) else 0
    return Model(step, AXES[best], low, base, table, float(bits[best]))


def _frequencies(counts: npt.NDArray[np.float64]) -> npt.NDArray[np.int16]:
    """Returns frequencies in proportion to ``counts`` that add up to ``2**PRECISION``, at least 1 per count above 0."""
    shares = counts * (2**PRECISION / counts.sum())
    frequencies = np.floor(shares).astype(np.int64)
    remainders = shares - frequencies
    remainders[(frequencies == 0) & (counts > 0)] = -1.0
    frequencies[(frequencies == 0) & (counts > 0)] = 1
    missing = 2**PRECISION - int(frequencies.sum())
    if missing < 0:  # what the rarest were given is taken from the others in proportion
        spare = frequencies - 1
        spare[counts == 0] = 0
        frequencies -= spare * -missing // int(spare.sum())
        missing = 2**PRECISION - int(frequencies.sum())
        remainders = -frequencies.astype(np.float64)
    order = np.argsort(-remainders if missing > 0 else remainders, kind="stable")[: abs(missing)]
    frequencies[order] += 1 if missing > 0 else -1
    table: npt.NDArray[np.int16] = frequencies.astype(np.int16)
    return table


def entropy(table: npt.NDArray[np.int16]) -> float:
    """Returns the bits per symbol, if symbols are as frequent as ``table`` says."""
    shares = table[table > 0] / table.sum()
    return float(-(shares * np.log2(shares)).sum())


def truncated(step: float, digits: int) -> float:
    """Returns the largest number up to ``step`` that has ``digits`` binary digits."""
    mantissa, exponent = math.frexp(step)
    return math.ldexp(math.floor(math.ldexp(mantissa, digits)), exponent - digits)

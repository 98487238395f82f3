"""The largest size whose peak stays within a limit, found by secants, so that few sizes are tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

MOST_SIZES = 6
"""Sizes that are tried at most, unless the caller says otherwise."""


def largest(
    least: Callable[[int], float],
    limit: int,
    start: int,
    grain: int,
    power: int,
    second: int = 0,
    most: int | None = None,
    most_sizes: int = MOST_SIZES,
) -> int:
    """Returns the largest size whose least peak is at most ``limit`` bytes, or 0 if that of ``start`` is not.

    Peaks are taken to grow with the size to the power ``power``, which only says which sizes to ask for: the size that
    is returned was asked for, and so was the next one, unless there were ``most_sizes``.

    Args:
        least: returns the bytes of a size; infinity where even asking fails.
        limit: bytes.
        start: the smallest size; all others are ``start`` and a multiple of ``grain``.
        grain: the steps between sizes.
        power: 1 for batches and tokens, 3 for the edge of a volume.
        second: the size to ask for after the first; 0 for one whose peak is about twice as large.
        most: the largest size that there is; None for no end.
        most_sizes: how many sizes are asked for at most.

    Example:
        >>> asked = []
        >>> largest(lambda size: asked.append(size) or 10 + 3 * size, limit=100, start=2, grain=2, power=1), asked
        (30, [2, 4, 30, 32])
    """
    known = {start: least(start)}
    if known[start] > limit:
        return 0
    end = None if most is None else start + (most - start) // grain * grain
    while len(known) < most_sizes:
        low = max(size for size in known if known[size] <= limit)
        high = min((size for size in known if known[size] > limit), default=None)
        if low == end or (high is not None and high - low <= grain):
            break
        size = second or round(start * 2 ** (1 / power))
        if high is not None and known[high] == math.inf:
            size = (low + high) // 2
        elif len(known) > 1:
            size = size_at(known, limit, power)
        size = min(size, 8 * low if high is None else high - grain)
        size = max(low + grain, start + (size - start) // grain * grain)
        size = size if end is None else min(size, end)
        known[size] = least(size)
    return max(size for size in known if known[size] <= limit)


def size_at(known: Mapping[int, float], limit: int, power: int) -> int:
    """The size at which the line through the two known points nearest to the limit meets it."""
    first, second = sorted(known, key=lambda size: abs(known[size] - limit))[:2]
    rise = (known[second] - known[first]) / (second**power - first**power)
    if rise <= 0:
        return 2 * max(known)
    return int(max(0.0, first**power + (limit - known[first]) / rise) ** (1 / power))

"""The least memory into which the buffers of a step fit, and Gist's memory footprint ratio.

A static allocator knows every lifetime before the step begins, so buffers that are never alive together may share
memory. They share it in groups or by offsets. To find the least memory is NP-hard in either way, so both functions are
greedy. Tests compare them with all possible answers for few buffers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from typing import Literal, get_args

import numpy as np

from backstash.planning.model.trace import ROLES, Buffer, Role, Trace

Sharing = Literal["groups", "offsets", "dynamic", "none"]


def groups_in_turn(buffers: Sequence[Buffer]) -> tuple[tuple[int, ...], ...]:
    """Groups of buffers that use one block of memory in turn, as numbers of the buffers.

    The buffers are taken from the largest to the smallest. Each joins the first group that has no member alive at the
    same time, or opens a new group. The buffer that opens a group is its largest, so joining costs no memory.

    Source: CNTK's static allocator, as the Gist paper (Jain et al., ISCA 2018) describes it.

    Example:
        >>> a, b, c = (Buffer(n, "immediate", size, *life) for n, size, life in [
        ...     ("a", 8, (0, 2)), ("b", 9, (1, 3)), ("c", 4, (2, 4))])
        >>> groups_in_turn([a, b, c])
        ((1,), (0, 2))
    """
    opened: list[list[int]] = []
    taken: list[list[tuple[int, int]]] = []  # lifetimes in each group, sorted
    for number in _sorted(buffers, lambda buffer: buffer.nbytes):
        life = buffers[number].start, buffers[number].end
        for members, lives in zip(opened, taken, strict=True):
            place = bisect_left(lives, life)
            if (place == 0 or lives[place - 1][1] <= life[0]) and (place == len(lives) or life[1] <= lives[place][0]):
                members.append(number)
                lives.insert(place, life)
                break
        else:
            opened.append([number])
            taken.append([life])
    return tuple(tuple(members) for members in opened)


def offsets(buffers: Sequence[Buffer]) -> tuple[int, ...]:
    """The byte of one block of memory at which each buffer begins, such that buffers alive together do not overlap.

    Each buffer goes into the smallest gap between the buffers alive at the same time that is large enough, or above
    them. Three orders are tried: by size, by size times lifetime, and by lifetime. The smallest block is returned.

    Example:
        >>> a, b, c = (Buffer(n, "immediate", size, *life) for n, size, life in [
        ...     ("a", 8, (0, 2)), ("b", 9, (1, 3)), ("c", 4, (2, 4))])
        >>> offsets([a, b, c])
        (9, 0, 9)
    """
    live = _peak(buffers)
    best: tuple[int, ...] = ()
    least = math.inf
    orders: tuple[Callable[[Buffer], int], ...] = (
        lambda buffer: buffer.nbytes,
        lambda buffer: buffer.nbytes * (buffer.end - buffer.start),
        lambda buffer: buffer.end - buffer.start,
    )
    for order in orders:
        found = _best_fit(buffers, _sorted(buffers, order))
        size = _extent(buffers, found)
        if size < least:
            best, least = found, size
        if least <= live:  # no placement can take less
            break
    return best


def footprint(
    trace: Trace, sharing: Sharing = "groups", share_stashed: bool = True, roles: Collection[Role] = ROLES
) -> int:
    """How many bytes of memory a step takes.

    Args:
        sharing: ``"groups"``: see :func:`groups`, where each group is as large as its largest member; ``"offsets"``:
            see :func:`offsets`; ``"dynamic"``: the most bytes alive at once, which an allocator without waste needs
            that decides during the step; ``"none"``: every buffer has memory of its own.
        share_stashed: whether buffers of the role ``"stashed"`` share memory as well. If not, each has memory of its
            own for the whole step; this is the baseline with which the Gist paper investigates its encodings.
        roles: the roles of the buffers that count.

    Example:
        >>> y, dy = Buffer("y", "stashed", 100, 0, 4), Buffer("dy", "immediate", 60, 4, 5)
        >>> trace = Trace("plain", (y, dy), (), backward=2, end=5)
        >>> footprint(trace), footprint(trace, share_stashed=False)
        (100, 160)
    """
    if sharing not in get_args(Sharing):
        raise ValueError(
            f"footprint was asked for sharing={sharing!r}, which is no way to share. "
            f"Pass one of {', '.join(get_args(Sharing))}."
        )
    counted = [buffer for buffer in trace.buffers if buffer.role in roles]
    own = [] if share_stashed else [buffer for buffer in counted if buffer.role == "stashed"]
    shared = counted if share_stashed else [buffer for buffer in counted if buffer.role != "stashed"]
    return sum(buffer.nbytes for buffer in own) + _FOOTPRINTS[sharing](shared)


def memory_footprint_ratio(
    plain: Trace,
    encoded: Trace,
    sharing: Sharing = "groups",
    share_stashed: bool = True,
    roles: Collection[Role] = ROLES,
) -> float:
    """Gist's MFR: the footprint of the plain step over that of the encoded one, under the same allocator.

    Args:
        plain: the step without encodings.
        encoded: the same step with encodings. :meth:`Trace.by_definition` gives it the lifetimes of the paper.
        sharing, share_stashed, roles: as for :func:`footprint`, for both steps.

    Returns:
        The ratio, which is > 1 if encoding saves memory, inf if only the encoded step takes no memory, and 1.0 if
        neither step takes any.
    """
    before, after = (footprint(trace, sharing, share_stashed, roles) for trace in (plain, encoded))
    if after:
        return before / after
    return math.inf if before else 1.0


def _sorted(buffers: Sequence[Buffer], measure: Callable[[Buffer], int]) -> list[int]:
    """Numbers of the buffers, largest measure first; equal buffers in the order of their lifetimes."""
    return sorted(range(len(buffers)), key=lambda n: (-measure(buffers[n]), buffers[n].start, buffers[n].end, n))


def _best_fit(buffers: Sequence[Buffer], order: Sequence[int]) -> tuple[int, ...]:
    starts, ends, sizes, tops = (np.zeros(len(buffers), np.int64) for _ in range(4))
    places = [0] * len(buffers)
    for count, number in enumerate(order):
        buffer = buffers[number]
        beside = np.flatnonzero((starts[:count] < buffer.end) & (ends[:count] > buffer.start) & (sizes[:count] > 0))
        by_bottom = beside[np.argsort(tops[beside] - sizes[beside], kind="stable")]
        bottoms = tops[by_bottom] - sizes[by_bottom]
        floors = np.maximum.accumulate(np.concatenate(([0], tops[by_bottom])))  # the last one has no ceiling
        gaps = bottoms - floors[:-1]
        fitting = np.flatnonzero(gaps >= max(buffer.nbytes, 1))
        place = floors[fitting[np.argmin(gaps[fitting])]] if len(fitting) else floors[-1]
        places[number] = int(place)
        starts[count], ends[count], sizes[count] = buffer.start, buffer.end, buffer.nbytes
        tops[count] = place + buffer.nbytes
    return tuple(places)


def _extent(buffers: Sequence[Buffer], places: Sequence[int]) -> int:
    return max((place + buffer.nbytes for buffer, place in zip(buffers, places, strict=True)), default=0)


def _peak(buffers: Sequence[Buffer]) -> int:
    changes = sorted((time, nbytes) for b in buffers for time, nbytes in ((b.start, b.nbytes), (b.end, -b.nbytes)))
    alive = peak = 0
    for _, nbytes in changes:  # at equal times releases come first
        alive += nbytes
        peak = max(peak, alive)
    return peak


def _grouped(buffers: Sequence[Buffer]) -> int:
    return sum(buffers[members[0]].nbytes for members in groups_in_turn(buffers))


_FOOTPRINTS: dict[Sharing, Callable[[Sequence[Buffer]], int]] = {
    "groups": _grouped,
    "offsets": lambda buffers: _extent(buffers, offsets(buffers)),
    "dynamic": _peak,
    "none": lambda buffers: sum(buffer.nbytes for buffer in buffers),
}

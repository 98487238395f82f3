"""Chooses the values that a link moves without being waited for, and says when each of them is asked for.

Note: [what hides]
    A value that is moved has to leave before backward begins, which is when most is alive, and to come back after that
    and before it is read. So there are two queues: one whose transfers are released at births and all due when backward
    begins, and one whose transfers are all released then and due at first reads. Each is served in the order of its
    dates, for which it is known when nothing is late: in the first, what is born from any moment on takes no longer
    than what is left of the forward pass; in the second, what is read up to any moment takes no longer than backward
    has taken until then. Values are taken in the order of their first reads, the latest first: these have the most time
    in both queues, and leave room for the others in both. Each is taken if nothing is late then. What was chosen is
    run through the simulation of queues.py, which knows at which positions a value can be asked for.

Note: [as late as possible]
    What comes back early takes memory early. So the last value to be read begins its way back such that it just
    arrives, the one before it such that it is out of its way, and so on; each is asked for at the last position before
    that at which something can be asked for.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from backstash.planning.model.queues import Direction, Move, Passage, floor, simulate

SPARE = 0.1
"""A transfer is planned to take so much longer than it does, because no two steps take the same time."""

LATE = 1e-3
"""Waits of less than this share of a step count as none."""

WORTH = 0.03
"""What is moved without waits may slow a step down by this share: copies take turns with what is computed at memory."""

SHORT = 0.05
"""By what share less may be moved than was asked for, before values are moved that do not hide."""

NEAR = 0.02
"""A value that is read again within this share of a step stays until then."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A value that may be moved.

    Attributes:
        nbytes: bytes that would cross the link.
        born: the position at whose beginning it would go out.
        reads: the positions of backward at whose beginning it is read, ascending, at least one.
    """

    nbytes: int
    born: int
    reads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hidden:
    """Which values are moved, and what that takes.

    Attributes:
        chosen: the numbers of those that are moved, ascending.
        moves: how each of them is moved.
        passage: what that takes.
        floor: seconds below which no schedule of these moves can go (queues.floor).
    """

    chosen: tuple[int, ...]
    moves: tuple[Move, ...]
    passage: Passage
    floor: float

    @property
    def nbytes(self) -> int:
        """Bytes that go out."""
        return sum(move.nbytes for move in self.moves)


def hide(
    seconds: Sequence[float],
    candidates: Sequence[Candidate],
    out: Direction,
    back: Direction,
    first_backward: int,
    *,
    asks: Sequence[int] | None = None,
    nbytes: int | None = None,
    spare: float = SPARE,
    late: float = LATE,
    worth: float = WORTH,
    near: float = NEAR,
    in_flight: int | None = None,
) -> Hidden:
    """Chooses the values that a link moves without being waited for (Note: [what hides]).

    Args:
        seconds: what is computed in each position.
        asks: the positions of backward at which a value can be asked for; None for all.
        nbytes: how many bytes are moved at most, whether they hide or not, those that hide best first; None for as many
            as hide.
        spare: by what share transfers are planned to take longer.
        late, worth, near: as the constants of these names.
        in_flight: bytes that may be on their way out at once; None for any number.
    """
    until = [0.0, *accumulate(seconds)]
    slower = (_scaled(out, 1 + spare), _scaled(back, 1 + spare))
    order = sorted(range(len(candidates)), key=lambda i: (-candidates[i].reads[0], candidates[i].born, i))
    chosen = _without_lateness(until, candidates, order, *slower, first_backward, in_flight, nbytes)
    if nbytes is not None:
        chosen += _others(candidates, chosen, order, nbytes)
    if asks is None:
        asks = range(first_backward, len(seconds))
    while True:
        chosen.sort()
        taken = [candidates[number] for number in chosen]
        moves = schedule(until, taken, slower[1], first_backward, asks, near)
        passage = simulate(seconds, moves, out, back, first_backward, in_flight)
        is_late, is_slow = passage.waited > late * until[-1], passage.slowed > worth * until[-1]
        if nbytes is not None or not chosen or not (is_late or is_slow):
            break
        # The simulation knows more than the dates: leave out what is waited for longest, or else what is read first.
        worst = max(range(len(seconds)), key=lambda position: passage.waits[position])
        waited = [number for number in chosen if is_late and worst in candidates[number].reads]
        if not waited:
            is_out = is_late and worst <= first_backward
            waited = sorted(chosen, key=lambda n: (-candidates[n].born if is_out else candidates[n].reads[0], n))
        chosen.remove(waited[0])
    return Hidden(tuple(chosen), tuple(moves), passage, floor(seconds, moves, out, back, first_backward))


def _scaled(way: Direction, by: float) -> Direction:
    return Direction(way.latency * by, way.seconds_per_byte * by, way.slows)


def _others(candidates: Sequence[Candidate], hiding: list[int], order: Sequence[int], nbytes: int) -> list[int]:
    """Returns the values that are moved beside those that hide, if these are clearly less than so many bytes."""
    left, known = nbytes - sum(candidates[number].nbytes for number in hiding), set(hiding)
    chosen: list[int] = []
    for number in (number for number in order if number not in known):
        if left <= SHORT * nbytes:
            break
        if candidates[number].nbytes <= left:
            chosen.append(number)
            left -= candidates[number].nbytes
    return chosen


def _without_lateness(
    until: Sequence[float],
    candidates: Sequence[Candidate],
    order: Sequence[int],
    out: Direction,
    back: Direction,
    first_backward: int,
    in_flight: int | None,
    nbytes: int | None,
) -> list[int]:
    """Returns values, of so many bytes at most, of which none is late, and that are never too many on their way out."""
    begins = until[first_backward]
    born = sorted(range(len(candidates)), key=lambda i: candidates[i].born)
    read = sorted(range(len(candidates)), key=lambda i: candidates[i].reads[0])
    place_out, place_back = ({number: place for place, number in enumerate(each)} for each in (born, read))
    room_out = np.array([begins - until[candidates[number].born] for number in born])
    room_back = np.array([until[candidates[number].reads[0]] - begins - back.latency for number in read])
    sizes = np.zeros(len(born))  # of those that are chosen, in the order of births
    carried = np.array([until[candidates[number].born] for number in born]) / max(out.seconds_per_byte, 1e-30)
    chosen: list[int] = []
    left = math.inf if nbytes is None else nbytes
    for number in order:
        candidate = candidates[number]
        if candidate.nbytes > left:
            continue
        sent, fetched = out.busy(candidate.nbytes), back.busy(candidate.nbytes)
        # Births up to this one have to find room for it as well, and so have reads from this one on.
        before, after = place_out[number] + 1, place_back[number]
        if sent <= room_out[:before].min() and fetched <= room_back[after:].min():
            sizes[before - 1] = candidate.nbytes
            if in_flight is not None and _backlog(sizes, carried) > in_flight:
                sizes[before - 1] = 0
                continue
            room_out[:before] -= sent
            room_back[after:] -= fetched
            left -= candidate.nbytes
            chosen.append(number)
    return chosen


def _backlog(sizes: NDArray[np.float64], carried: NDArray[np.float64]) -> float:
    """Returns the most bytes that are on their way out at once."""
    born = np.cumsum(sizes)
    return float((born - carried - np.minimum.accumulate(born - sizes - carried)).max(initial=0.0))


def schedule(
    until: Sequence[float],
    candidates: Sequence[Candidate],
    back: Direction,
    first_backward: int,
    asks: Sequence[int],
    near: float = NEAR,
) -> list[Move]:
    """Returns when each value is asked for: as late as possible (Note: [as late as possible]).

    Args:
        until: the time at which each position begins, if nothing is waited for, and that at which the last one ends.
        candidates: all of them are moved.
        asks: the positions at which a value can be asked for, ascending.
        near: as the constant of that name; below 0 for no value to stay.
    """
    near *= until[-1]
    needs: list[tuple[int, int]] = []  # the position, the value
    for number, candidate in enumerate(candidates):
        last: int | None = None
        for position in candidate.reads:
            if last is None or near < 0 or until[position] - until[last] > max(near, 2 * back.busy(candidate.nbytes)):
                needs.append((position, number))
            last = position
    needs.sort()
    fetches: list[list[int]] = [[] for _ in candidates]
    reads: list[list[int]] = [[] for _ in candidates]
    free, moments = until[-1], [until[at] for at in asks]
    for position, number in reversed(needs):
        free = min(free, until[position] - back.latency) - back.busy(candidates[number].nbytes)
        at = asks[max(0, bisect_right(moments, free) - 1)] if asks else position
        fetches[number].insert(0, min(max(at, first_backward), position))
        reads[number].insert(0, position)
    return [
        Move(candidate.nbytes, candidate.born, tuple(asked), tuple(at))
        for candidate, asked, at in zip(candidates, fetches, reads, strict=True)
    ]


def stays_after(candidate: Candidate, move: Move) -> frozenset[int]:
    """Returns the numbers of the reads after which a moved value stays for the next one."""
    return frozenset(
        number for number in range(len(candidate.reads) - 1) if candidate.reads[number + 1] not in move.reads
    )

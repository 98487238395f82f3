"""The link to another memory as two queues, one for each direction, beside a step that computes.

The rules, which are those of the executor and of its stores.

* What is computed takes turns with nothing: only a wait makes a step longer.
* A value goes out when it is born, behind those that were born before it. A direction carries one value at a time.
* Until it has left, a value's own memory is taken. If more than ``in_flight`` bytes would be on their way out, the step
  waits for the oldest.
* Backward begins when everything has left: so what is moved is not on the device where most is alive.
* A value comes back after it was asked for, after it has arrived on the other side, and behind those that were asked
  for before it. Who reads it waits for it.
* While values cross beside what is computed, they slow it down by the share that is not hidden (Note: [hidden
  transfers] in measure/link.py).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Direction:
    """One direction of a link.

    Attributes:
        latency: seconds from the end of a transfer to its arrival.
        seconds_per_byte: that a transfer occupies it.
        slows: by what share of a transfer that runs beside it the step takes longer.
    """

    latency: float
    seconds_per_byte: float
    slows: float = 0.0

    def busy(self, nbytes: int) -> float:
        """Returns how long a transfer occupies it."""
        return nbytes * self.seconds_per_byte


@dataclass(frozen=True, slots=True)
class Move:
    """A value that is moved.

    Attributes:
        nbytes: bytes that cross the link, once out and once for each fetch.
        born: the position at whose beginning it goes out.
        fetches: the positions at whose beginning it is asked for, ascending.
        reads: for each of them the position at whose beginning it has to be there.
    """

    nbytes: int
    born: int
    fetches: tuple[int, ...]
    reads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Passage:
    """What moving takes.

    Attributes:
        waits: seconds that are waited for the link at the beginning of each position.
        slowed: seconds by which transfers slow down what is computed beside them.
        backlog_nbytes: the most bytes that are on their way out at once.
    """

    seconds: float
    waits: tuple[float, ...]
    slowed: float
    backlog_nbytes: int

    @property
    def waited(self) -> float:
        """Seconds that the step waits for the link."""
        return sum(self.waits)

    @property
    def added(self) -> float:
        """Seconds by which the step is longer than without moves."""
        return self.waited + self.slowed


def simulate(
    seconds: Sequence[float],
    moves: Sequence[Move],
    out: Direction,
    back: Direction,
    first_backward: int,
    in_flight: int | None = None,
) -> Passage:
    """Returns what a step takes whose values cross a link in this way.

    Args:
        seconds: what is computed in each position.
        moves: the values that are moved, those of one position in the order in which they go out.
        in_flight: bytes that may be on their way out at once; None for any number.

    Example:
        >>> way = Direction(0.0, 0.01)
        >>> simulate([1.0, 1.0, 1.0, 1.0], [Move(100, 0, (2,), (3,))], way, way, 2).waited
        0.0
        >>> simulate([1.0, 1.0, 1.0, 1.0], [Move(300, 0, (2,), (3,))], way, way, 2).waits
        (0.0, 0.0, 1.0, 2.0)
    """
    births, asked, read = (defaultdict[int, list[int]](list) for _ in range(3))
    for number, move in enumerate(moves):
        births[move.born].append(number)
        for at in move.fetches:
            asked[at].append(number)
        for at in move.reads:
            read[at].append(number)
    for numbers in asked.values():  # those of one position in the order in which they are read
        numbers.sort(key=lambda number: moves[number].reads[0])
    now = out_free = back_free = 0.0
    leaving: deque[tuple[float, int]] = deque()  # when each has left, its bytes
    backlog = most = 0
    there = [0.0] * len(moves)  # when each is on the other side
    coming: list[deque[float]] = [deque() for _ in moves]  # when each is back
    waits = [0.0] * len(seconds)
    for position, computed in enumerate(seconds):
        began = now
        if position == first_backward:
            now = max(now, out_free)
        for number in births.get(position, ()):
            nbytes = moves[number].nbytes
            while leaving and (leaving[0][0] <= now or (in_flight is not None and backlog + nbytes > in_flight)):
                now = max(now, leaving[0][0])
                backlog -= leaving.popleft()[1]
            out_free = max(now, out_free) + out.busy(nbytes)
            leaving.append((out_free, nbytes))
            backlog += nbytes
            most = max(most, backlog)
            there[number] = out_free + out.latency
        for number in asked.get(position, ()):
            back_free = max(now, back_free, there[number]) + back.busy(moves[number].nbytes)
            coming[number].append(back_free + back.latency)
        for number in read.get(position, ()):
            now = max(now, coming[number].popleft())
        waits[position] = now - began
        now += computed
    waited = sum(waits)
    busy_out = sum(out.busy(move.nbytes) for move in moves)
    busy_back = sum(back.busy(move.nbytes) * len(move.fetches) for move in moves)
    beside = max(0.0, busy_out + busy_back - waited)
    slows = (out.slows * busy_out + back.slows * busy_back) / (busy_out + busy_back) if moves and busy_out else 0.0
    return Passage(now + slows * beside, tuple(waits), slows * beside, most)


def floor(
    seconds: Sequence[float], moves: Sequence[Move], out: Direction, back: Direction, first_backward: int
) -> float:
    """Returns a time that no schedule of these moves can go below.

    Everything has left before backward begins, and comes back after that; a direction carries one value at a time. What
    is computed before the first value is born or after the last one is read hides nothing.
    """
    forward, backward = sum(seconds[:first_backward]), sum(seconds[first_backward:])
    if not moves:
        return forward + backward
    sent = sum(out.busy(move.nbytes) for move in moves) + sum(seconds[: min(move.born for move in moves)])
    fetched = sum(back.busy(move.nbytes) * len(move.fetches) for move in moves)
    last = max((move.reads[-1] for move in moves if move.reads), default=len(seconds))
    return max(forward, sent) + max(backward, fetched + back.latency + sum(seconds[last:]))

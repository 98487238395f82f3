"""A fast search for the best plans at every budget at once: the frontier of peak and time.

From a step in which all is kept, the peak is lowered level by level. At each level the change that frees most bytes for
a second is made, where bytes count as much as their position binds; then what has become needless is undone. After
that, stretches of the solutions on the way are drawn anew, and what becomes faster or smaller is kept. At last, each
solution uses up what is left below the next larger one.

Nothing here knows a budget: a plan for a budget is the fastest solution that fits, so a larger budget is never slower.
All random numbers are the same in each run, and effort is counted in work done, not in time. So the same profile always
gives the same frontier, however the search is spread over time.

Note: [price of an error]
    Where errors are limited, a choice with an error uses up a part of what all of them may have. A part of the limit
    counts as seconds then, or the first choices on the way would use it up for little. What is reported is never
    priced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np

from backstash.planning.model.peak import Bytes, PeakModel
from backstash.planning.search.exact import Solution, brute_force, solution
from backstash.planning.search.moves import range_max
from backstash.planning.search.native import moves_from_kept

SMALL = 2000
"""Problems of so few combinations are solved by trying all of them."""
DESCENT, IMPROVEMENT = 800_000, 800_000
"""How much is done at most to lower the peak, and then to improve what was found; about as many microseconds in C++."""
EFFORT = 8_000
"""How much is done to improve what was found, for each value."""
TURN = 60
"""What a turn of the improvement takes in Python: of a small step, far more than what it does in C++."""
LEAST = 60
"""A step of fewer values is searched as one of so many."""
SEVERAL, MANY = 400, 1000
"""Of more than SEVERAL values, more are changed at once. For more than MANY, as many times as much is done."""
STEPS = 60
"""In how many steps of equal size the peak is lowered at first."""
LEVELS = 32
"""Levels at which faster solutions are looked for; they are closer to each other where the peak is low."""
FINE = 0.0002
"""Neighbours on the frontier whose times differ by less than this share of the step need nothing drawn between them."""
FINEST = 0.00002
"""The same for what a single other choice makes faster."""
SOFTNESS = (0.003, 0.01, 0.03)
"""Tau of the smooth peak, as shares of the level (Note: [smooth peak] in moves.py)."""
PRICES = (0.3, 0.05, 0.01)
"""What the whole of an error limit counts as in turn, as shares of the step's time (Note: [price of an error])."""


@dataclass(frozen=True)
class Interim:
    """A solution on the way: peak, time, and the row of each value."""

    peak_nbytes: int
    seconds: float
    rows: Bytes


_T = TypeVar("_T", Solution, Interim)


def frontier(model: PeakModel, error_limit: float | None = None) -> list[Solution]:
    """Returns solutions in the order of their peaks, each slower than the next. The last one keeps everything.

    Args:
        model: the step.
        error_limit: the largest error of all choices together; None for any.
    """
    found = Frontier(model, error_limit)
    for _ in found.search():
        pass
    return found.solutions()


class Frontier:
    """The frontier of a step, which can be searched a little at a time."""

    def __init__(self, model: PeakModel, error_limit: float | None = None) -> None:
        self._model = model
        self._limit = error_limit
        self._climb: _Climb | None = None
        self._all: list[Solution] | None = None

    @property
    def lowest_nbytes(self) -> int | None:
        """The lowest peak that was found so far; None before the first step of the search."""
        return None if self._climb is None else min(found.peak_nbytes for found in self._climb.pool)

    def solutions(self) -> list[Solution]:
        """Returns what was found so far, as :func:`frontier` does."""
        if self._all is not None:
            return self._all
        pool = [] if self._climb is None else self._climb.pool
        return best([solution(self._model, found.rows - self._model.first[:-1]) for found in best(pool)])

    def search(self) -> Iterator[None]:
        """Searches. Whoever iterates may take as long as they like between two steps: what is found is the same."""
        model, limit = self._model, self._limit
        if np.log(model.choice_counts).sum() <= np.log(SMALL):
            self._all = best(brute_force(model, limit))
            return
        climb = self._climb = _Climb(model, limit)
        yield from climb.descend()
        for other in (_evened(model), _timeless(model)):
            beside = _Climb(other, limit)
            yield from beside.descend()
            yield from beside.lower_lowest()
            yield from climb.take_over(beside.pool)
        yield from climb.improve()
        yield from climb.use_up()
        self._all = self.solutions()


def best(pool: list[_T]) -> list[_T]:
    """Returns those that nothing else in the pool beats in peak and time, in the order of their peaks."""
    chosen: list[_T] = []
    for found in sorted(pool, key=lambda found: (found.peak_nbytes, found.seconds)):
        if not chosen or found.seconds < chosen[-1].seconds:
            chosen.append(found)
    return chosen


class _Climb:
    """The search, with all that it has found so far in ``pool``."""

    def __init__(self, model: PeakModel, error_limit: float | None) -> None:
        self.model = model
        self.limit = np.inf if error_limit is None else error_limit**2
        self.moves = moves_from_kept(model, self.limit)
        self.search = self.moves.search
        self.pool: list[Interim] = []
        self.turn = 0
        self.by_birth: list[int] = np.argsort(model.born, kind="stable").tolist()
        self.relatives: list[list[int]] = [[] for _ in self.by_birth]
        for row, parents in enumerate(model.parents):
            for parent in parents:
                self.relatives[int(model.value_of[row])].append(parent)
                self.relatives[parent].append(int(model.value_of[row]))
        self.remakes = model.first[:-1].copy()  # of each value the row by which it is remade, or kept if there is none
        for row in np.flatnonzero(model.remakes)[::-1].tolist():
            self.remakes[model.value_of[row]] = row
        self.random = np.random.default_rng(0)
        self._note()

    def descend(self) -> Iterator[None]:
        """Lowers the peak level by level, as far as it goes, once for each softness."""
        count = len(self.model.nbytes)
        soft = SOFTNESS if count <= SEVERAL else SOFTNESS[-1:]
        batch = max(1, count // (100 if count <= SEVERAL else 20))
        for number, share in enumerate(soft):
            self._set_price(PRICES[number % len(PRICES)])
            self.moves.work, self.moves.end = 0.0, DESCENT * self._times() / len(soft)
            self.moves.keep_all()
            top = level = int(self.search.live.max())
            step = top // STEPS
            while step > top // 2000 and self.moves.work < self.moves.end:
                before = self.search.rows.copy()
                if self._lower(level - step, share, batch):
                    level -= step
                    self.moves.relax(level)
                    self._note()
                else:
                    self.search.load(before)
                    step //= 2
                yield

    def take_over(self, pool: list[Interim]) -> Iterator[None]:
        """Adds solutions that were found with other times."""
        for found in pool:
            self.search.load(found.rows)
            self._note()
            yield

    def improve(self) -> Iterator[None]:
        """Draws stretches of the solutions anew: for a lower peak, for less time at each level, and between levels."""
        low = yield from self.lower_lowest()
        top = max(found.peak_nbytes for found in self.pool)
        effort = self._effort()
        for turn in range(2):
            begun = self.moves.work
            self.pool = best(self.pool)
            for number in range(LEVELS):
                self.moves.end = begun + (effort * (0.45, 0.9)[turn] - begun) * (number + 1) / LEVELS
                level = int(low + (top - low) * (number / LEVELS) ** 2)
                known = min(
                    (found for found in self.pool if found.peak_nbytes <= level), key=lambda found: found.seconds
                )
                while self.moves.work < self.moves.end:
                    self.search.load(known.rows)
                    known = self._faster(level, known)
                    yield
            self.moves.end = effort * (0.65, 1.0)[turn]
            yield from self._fill_gaps()

    def use_up(self) -> Iterator[None]:
        """Has solutions use the bytes that are left below the next larger one, the widest gap of times first."""
        work, end = 0.0, self._effort() * 0.25
        done: set[tuple[int, int]] = set()
        while work < end:
            self.pool = best(self.pool)
            gaps = [
                (slow.seconds - fast.seconds, number)
                for number, (slow, fast) in enumerate(pairwise(self.pool))
                if (slow.peak_nbytes, fast.peak_nbytes) not in done
            ]
            gap, number = max(gaps, default=(0.0, 0))
            if gap < self.model.base_seconds * FINEST:
                return
            slow, fast = self.pool[number : number + 2]
            done.add((slow.peak_nbytes, fast.peak_nbytes))
            self.search.load(slow.rows)
            work += 10.0 + 0.02 * (len(self.model.value_of) + len(self.search.live))
            for value, row in self._faster_rows(fast.peak_nbytes - 1):
                self.search.load(slow.rows)
                work += 20.0 + self.search.set(value, row)
                is_between = (
                    int(self.search.live.max()) < fast.peak_nbytes and self.search.seconds < slow.seconds - 1e-9
                )
                if is_between and self.search.keeps(self.limit):
                    self._note()
            yield

    def _faster_rows(self, level: int) -> list[tuple[int, int]]:
        """Returns each value and row by which the step may be faster, where its bytes alone stay within the level."""
        model, search = self.model, self.search
        old = search.rows[model.value_of]
        is_faster = (model.own_seconds < model.own_seconds[old]) | (model.decode_seconds < model.decode_seconds[old])
        slack = level - range_max(search.live, model.born, np.maximum(model.born, search.makes - 1))
        more = np.where(model.remakes, 0, model.held) - np.where(model.remakes[old], 0, model.held[old])
        found = np.flatnonzero(is_faster & (more <= slack[model.value_of]))
        return list(zip(model.value_of[found].tolist(), found.tolist(), strict=True))

    def lower_lowest(self) -> Generator[None, None, int]:
        """Draws stretches of the solution of the lowest peak anew for a lower one, and returns the lowest peak."""
        self.moves.work, self.moves.end = 0.0, self._effort() * 0.25
        lowest = min(self.pool, key=lambda found: found.peak_nbytes)
        trial = 0
        while self.moves.work < self.moves.end:
            self.search.load(lowest.rows)
            self._shake()
            share = SOFTNESS[trial % 3]
            while self._lower(lowest.peak_nbytes - 1, share, 1):
                lowest = self._note()
                yield
            trial += 1
            yield
        return lowest.peak_nbytes

    def _effort(self) -> float:
        return min(IMPROVEMENT, EFFORT * max(len(self.model.nbytes), LEAST)) * self._times()

    def _times(self) -> float:
        return max(1.0, len(self.model.nbytes) / MANY)

    def _set_price(self, share: float) -> None:
        has_limit = 0.0 < self.limit < np.inf and self.model.errors.any()
        self.moves.price = share * self.model.base_seconds / self.limit if has_limit else 0.0

    def _fill_gaps(self) -> Iterator[None]:
        """Looks for solutions between neighbours whose times are far apart, the widest gap first."""
        tries: Counter[tuple[int, int]] = Counter()
        while self.moves.work < self.moves.end:
            self.pool = best(self.pool)
            gaps = [
                ((slow.seconds - fast.seconds) / (1 + tries[slow.peak_nbytes, fast.peak_nbytes]), number)
                for number, (slow, fast) in enumerate(pairwise(self.pool))
            ]
            gap, number = max(gaps, default=(0.0, 0))
            if not gap or gap < self.model.base_seconds * FINE:
                return
            slow, fast = self.pool[number : number + 2]
            pair = slow.peak_nbytes, fast.peak_nbytes
            self.search.load((slow, fast)[tries[pair] % 2].rows)
            tries[pair] += 1
            self._faster(fast.peak_nbytes - 1, slow)
            yield

    def _faster(self, level: int, known: Interim) -> Interim:
        """Draws a stretch anew, and returns the solution if it fits into the level and is faster than a known one."""
        self._shake()
        self.turn += 1
        self._set_price(PRICES[self.turn % len(PRICES)])
        if self._lower(level, SOFTNESS[self.turn % 3], 1):
            self.moves.relax(level)
            if self.search.seconds < known.seconds - 1e-9:
                return self._note()
        return known

    def _note(self) -> Interim:
        found = Interim(int(self.search.live.max()), self.search.seconds, self.search.rows.copy())
        self.pool.append(found)
        return found

    def _lower(self, level: int, share: float, batch: int) -> bool:
        return self.moves.lower(level, max(1.0, share * level), batch)

    def _shake(self) -> None:
        """Changes the choices of a few values at random: of a stretch of births, or of relatives by recipe."""
        model, random = self.model, self.random
        kind = int(random.integers(0, 4))
        values = np.array(self._stretch() if random.random() < 0.6 else self._relatives())
        first, count = model.first[values], model.choice_counts[values]
        rows = first + (random.random(len(values)) * count).astype(np.int64)
        if kind == 0:
            rows = first
        elif kind == 1:
            rows = self.remakes[values]
        elif kind == 2:
            chosen = random.random(len(values)) < 0.5
            values, rows = values[chosen], rows[chosen]
        self.moves.work += TURN
        self.moves.set_all(values, rows)

    def _stretch(self) -> list[int]:
        """Draws values that were born one after the other."""
        count = len(self.by_birth)
        start, width = self.random.integers(0, count), self.random.integers(1, min(64, max(9, count // 3)))
        return self.by_birth[int(start) : int(start + width)]

    def _relatives(self) -> list[int]:
        """Draws a value and those around it: what it may be remade from, and what may be remade from it."""
        width = int(self.random.integers(2, 13))
        found = [int(self.random.integers(0, len(self.by_birth)))]
        for value in found:  # grows on the way
            new = [other for other in self.relatives[value] if other not in found]
            found += new[: width - len(found)]
        return found


def _evened(model: PeakModel) -> PeakModel:
    """Returns the model of a step in which every remake takes equally long.

    Where some take next to nothing, a descent that looks at seconds takes all of these first. What they are made
    from then has to be kept, and it gets stuck high above the lowest peak.
    """
    even = copy(model)
    remakes = model.own_seconds[model.remakes]
    if remakes.any():
        even.own_seconds = np.where(model.remakes, remakes.mean(), model.own_seconds)
    return even


def _timeless(model: PeakModel) -> PeakModel:
    """Returns the model of a step in which all choices are equally quick, and slower than to keep the value.

    How low a peak gets is no matter of times, which differ from one profile of a step to the next.
    """
    timeless = copy(model)
    timeless.own_seconds = np.where(model.own_seconds > 0, 1e-12, 0.0)
    timeless.decode_seconds = np.zeros_like(model.decode_seconds)
    return timeless

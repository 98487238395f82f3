"""A fast search for the best plans at every budget at once: the frontier of peak and time.

From a step in which all is kept, the peak is lowered level by level. At each level the change that frees most bytes for
a second is made, where bytes count as much as their position binds; then what has become needless is undone. After
that, stretches of the solutions on the way are drawn anew, and what becomes faster or smaller is kept.

Nothing here knows a budget: a plan for a budget is the fastest solution that fits, so a larger budget is never slower.
All random numbers are the same in each run, and effort is counted in work done, not in time. So the same profile always
gives the same frontier, however the search is spread over time.

Note: [smooth peak]
    The peak is flat under most changes: it only moves if all positions that bind move. What is lowered instead is
    ``tau * log(sum(exp(live / tau)))``, whose gradient is a price per byte at each position, next to nothing far below
    the peak. The sum of what exceeds the level would not do: it counts a long plateau as much as all of its positions,
    and lets a single position rise for it.

Note: [price of an error]
    Where errors are limited, a choice with an error uses up a part of what all of them may have. A part of the limit
    counts as seconds then, or the first choices on the way would use it up for little. What is reported is never
    priced.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Iterator
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np

from backstash.planning.model.peak import Bytes, PeakModel
from backstash.planning.search.exact import Solution, brute_force_all, solution
from backstash.planning.search.native import search_from_kept
from backstash.planning.search.offers import Offers, Prices

SMALL = 2000
"""Problems of so few combinations are solved by trying all of them."""
DESCENT, IMPROVEMENT = 8_000_000, 5_000_000
"""How much is done at most to lower the peak, and then to improve what was found; about as many microseconds."""
EFFORT = 80_000
"""How much is done to improve what was found, for each value."""
LEAST = 12
"""A step of fewer values is searched as one of so many."""
LEVELS = 32
"""Levels at which faster solutions are looked for; they are closer to each other where the peak is low."""
FINE = 0.0002
"""Neighbours on the frontier whose times differ by less than this share of the step need nothing between them."""
MANY = 2000
"""Networks of more values are searched with less effort."""
BLOCKS = 512
"""Positions are looked at in so many blocks, by the most bytes in each."""
SOFTNESS = (0.003, 0.01, 0.03)
"""Tau of the smooth peak, as shares of the level."""
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
    """The frontier of a step, which can be searched a little at a time.

    Args:
        model, error_limit: as for :func:`frontier`.
    """

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
            self._all = best(brute_force_all(model, limit))
            return
        climb = self._climb = _Climb(model, limit)
        yield from climb.descend()
        yield from climb.improve()
        if len(model.nbytes) <= MANY:
            for other in (_evened(model), _timeless(model)):
                beside = _Climb(other, limit)
                yield from beside.descend()
                yield from beside.lower_lowest()
                yield from climb.take_over(beside.pool)
            yield from climb.improve()
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
        self.price = 0.0  # seconds that the whole of the limit counts as (Note: [price of an error])
        self.offers = Offers(model)
        self.search = search_from_kept(model)
        self.pool: list[Interim] = []
        self.work = self.end = 0.0
        self.turn = 0
        count = len(model.base)
        self.blocks = np.unique(np.linspace(0, count - 1, min(count, BLOCKS)).astype(np.int64))
        self.alike = _alike(model)
        self.by_birth: list[int] = np.argsort(model.born, kind="stable").tolist()
        self.relatives: list[list[int]] = [[] for _ in self.by_birth]
        for row, parents in enumerate(model.parents):
            for parent in parents:
                self.relatives[int(model.value_of[row])].append(parent)
                self.relatives[parent].append(int(model.value_of[row]))
        self.random = np.random.default_rng(0)
        self._note()

    def descend(self) -> Iterator[None]:
        """Lowers the peak level by level, as far as it goes, once for each softness."""
        count = len(self.model.nbytes)
        soft = SOFTNESS if count <= 400 else SOFTNESS[1:2]
        levels = 60 if count <= MANY else 30
        for number, share in enumerate(soft):
            self._set_price(PRICES[number % len(PRICES)])
            self.end = DESCENT * (number + 1) / len(soft)
            self.search = search_from_kept(self.model)
            top = level = int(self.search.live.max())
            step = top // levels
            while step > top // 2000 and self.work < self.end:
                before = self.search.rows.copy()
                if self._lower(level - step, share, max(1, count // 100)):
                    level -= step
                    self._relax(level)
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
            begun = self.work
            self.pool = best(self.pool)
            for number in range(LEVELS):
                self.end = begun + (effort * (0.45, 0.9)[turn] - begun) * (number + 1) / LEVELS
                level = int(low + (top - low) * (number / LEVELS) ** 2)
                known = min(
                    (found for found in self.pool if found.peak_nbytes <= level), key=lambda found: found.seconds
                )
                while self.work < self.end:
                    self.search.load(known.rows)
                    known = self._faster(level, known)
                    yield
            self.end = effort * (0.65, 1.0)[turn]
            yield from self._fill_gaps()

    def lower_lowest(self) -> Generator[None, None, int]:
        """Draws stretches of the solution of the lowest peak anew for a lower one, and returns the lowest peak."""
        self.work, self.end = 0.0, self._effort() * 0.25
        lowest = min(self.pool, key=lambda found: found.peak_nbytes)
        trial = 0
        while self.work < self.end:
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
        count = len(self.model.nbytes)
        return min(IMPROVEMENT, EFFORT * max(count, LEAST)) if count <= MANY else IMPROVEMENT / 4

    def _set_price(self, share: float) -> None:
        has_limit = 0.0 < self.limit < np.inf and self.model.errors.any()
        self.price = share * self.model.base_seconds if has_limit else 0.0

    def _fill_gaps(self) -> Iterator[None]:
        """Looks for solutions between neighbours whose times are far apart, the widest gap first."""
        tries: Counter[tuple[int, int]] = Counter()
        while self.work < self.end:
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
            self._relax(level)
            if self.search.seconds < known.seconds - 1e-9:
                return self._note()
        return known

    def _note(self) -> Interim:
        found = Interim(int(self.search.live.max()), self.search.seconds, self.search.rows.copy())
        self.pool.append(found)
        return found

    def _set(self, value: int, row: int) -> None:
        self.work += 15.0 + (6.0 + 0.0001 * len(self.model.base)) * self.search.set(value, row)

    def _smooth(self, tau: float) -> float:
        """The smooth peak (Note: [smooth peak])."""
        self.work += 15.0 + 0.001 * len(self.model.base)
        most = np.maximum.reduceat(self.search.live, self.blocks)
        top = most.max()
        return float(top + tau * np.log(np.exp((most - top) / tau).sum()))

    def _lower(self, level: int, share: float, batch: int) -> bool:
        """Changes the solution until its peak is at most ``level``. Returns False if it gets stuck.

        Args:
            level: bytes.
            share: softness of the peak.
            batch: how many changes are made at most before the prices are set anew.
        """
        search, value_of = self.search, self.model.value_of
        tau = max(1.0, share * level)
        refused = np.zeros(len(value_of), bool)
        peak = self._smooth(tau)
        rounds = 0
        while int(search.live.max()) > level:
            rounds += 1
            if self.work > self.end or rounds > 2 * len(search.rows) + 50:
                return False
            prices = np.exp((search.live - search.live.max()) / tau)
            freed, seconds = self.offers.make(search, prices / prices.sum())
            if self.price:
                off = self.model.errors - self.model.errors[search.rows][value_of]
                seconds = seconds + off * (self.price / self.limit)
            self.work += 300.0 + 0.1 * (len(freed) + len(prices))
            freed[refused] = 0.0
            tried = self._order(freed, np.maximum(seconds, 1e-6), batch)
            if not len(tried):
                return False
            changed: set[int] = set()
            for row in tried.tolist():
                value = int(value_of[row])
                if value in changed:
                    continue
                old = int(search.rows[value])
                self._set(value, row)
                now = self._smooth(tau)
                if now < peak - 0.001 * tau and search.keeps(self.limit):
                    peak = now
                    changed.add(value)
                    if len(changed) >= batch or int(search.live.max()) <= level:
                        break
                else:
                    self._set(value, old)
                    refused[row] = True
            if changed:
                refused[:] = False
        return True

    def _order(self, freed: Prices, seconds: Prices, batch: int) -> Bytes:
        """Returns the rows to try, best first. In a large batch, equal choices of repeated layers come together."""
        rows = np.flatnonzero(freed > 0)
        score = freed[rows] / seconds[rows]
        if batch > 1:
            alike = self.alike[rows]
            together = np.bincount(alike, freed[rows]) / np.maximum(np.bincount(alike, seconds[rows]), 1e-9)
            score = together[alike] * (1.0 + 1e-6 * score / max(score.max(initial=0.0), 1e-30))
        return rows[np.argsort(-score, kind="stable")[: 8 * batch]]

    def _relax(self, level: int) -> None:
        """Gives each value a faster choice, the most expensive values first, where the peak stays within ``level``."""
        search, model, own = self.search, self.model, self.model.own_seconds
        slack = level - _range_max(search.live, model.born, np.maximum(model.born, search.makes - 1))
        active = np.flatnonzero((search.rows != model.first[:-1]) & (slack > 0))
        self.work += 100.0 + 0.5 * len(search.live)
        for value in active[np.argsort(-own[search.rows[active]], kind="stable")].tolist():
            if self.work > self.end:
                return
            old = int(search.rows[value])
            held = 0 if model.remakes[old] else int(model.held[old])
            rows = range(int(model.first[value]), int(model.first[value + 1]))
            for row in sorted((row for row in rows if own[row] < own[old]), key=lambda row: float(own[row])):
                if not model.remakes[row] and int(model.held[row]) - held > slack[value]:
                    continue
                before = search.seconds
                self._set(value, row)
                if search.seconds < before and int(search.live.max()) <= level and search.keeps(self.limit):
                    break
                self._set(value, old)

    def _shake(self) -> None:
        """Changes the choices of a few values at random: of a stretch of births, or of relatives by recipe."""
        model, random = self.model, self.random
        kind = int(random.integers(0, 4))
        for value in self._stretch() if random.random() < 0.6 else self._relatives():
            first, last = int(model.first[value]), int(model.first[value + 1])
            row = int(random.integers(first, last))
            if kind == 0:
                row = first
            elif kind == 1:
                row = next((row for row in range(first, last) if model.remakes[row]), first)
            elif kind == 2 and random.random() < 0.5:
                continue
            old = int(self.search.rows[value])
            if row != old:
                self._set(value, row)
                if not self.search.keeps(self.limit):
                    self._set(value, old)

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


def _alike(model: PeakModel) -> Bytes:
    """Returns a number for each row, equal for the same choice of equal values in repeated layers."""
    known: dict[tuple[object, ...], int] = {}
    found = []
    for value in model.profile.values:
        layer = re.sub(r"\d+", "*", value.module), value.op, value.nbytes, len(value.reads)
        for choice in value.choices:
            found.append(known.setdefault((*layer, choice.name, choice.held_nbytes), len(known)))
    return np.array(found, np.int64)


def _range_max(live: Bytes, first: Bytes, last: Bytes) -> Bytes:
    """Returns the most of ``live`` between two positions, both included, for many pairs of them."""
    tables = [live]
    while 2 ** len(tables) <= len(live):
        half = 2 ** (len(tables) - 1)
        tables.append(np.maximum(tables[-1][:-half], tables[-1][half:]))
    width = last - first + 1
    power = np.frexp(width.astype(float))[1] - 1
    most = np.empty_like(first)
    for level, table in enumerate(tables):
        mine = power == level
        most[mine] = np.maximum(table[first[mine]], table[last[mine] + 1 - 2**level])
    return most

"""The moves of the fast search: a solution's peak is lowered, room is made use of, values are changed at random.

What is written here is the reference; native.py does the same in C++, with the same bits. So sums are in the order of
positions, and powers of e are computed here, because libraries round them in different ways.

Note: [smooth peak]
    The peak is flat under most changes: it only moves if all positions that bind move. What is lowered instead is
    ``tau * log(sum(exp(live / tau)))``, whose gradient is a price per byte at each position, next to nothing far below
    the peak. The sum of what exceeds the level would not do: it counts a long plateau as much as all of its positions,
    and lets a single position rise for it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from backstash.planning.model.peak import Bytes, PeakModel
from backstash.planning.search.changes import Search

Prices = NDArray[np.float64]

BLOCKS = 512
"""Positions are looked at in so many blocks, by the most bytes in each."""

_POWER = 0.0018775767, 0.0089893397, 0.0558282752, 0.2401535968, 0.6931528731, 0.9999999999
"""A polynomial that is 2 to the power of z for z in [0, 1), within a millionth."""


class Moves:
    """Changes of a solution, and what they have taken.

    Args:
        limit: the most that the squares of all errors may add up to.

    Attributes:
        price: seconds that a unit of that sum counts as (Note: [price of an error] in greedy.py).
        work: what was done so far, in about as many microseconds of the search in C++.
        end: how much work a move may begin with.
    """

    def __init__(self, search: Search, limit: float) -> None:
        self.model = model = search.model
        self.search, self.limit, self.price = search, limit, 0.0
        self.work = self.end = 0.0
        self.blocks = block_starts(model)[:-1]
        self.alike = alike(model)
        self._offers = Offers(model)

    def keep_all(self) -> None:
        """Begins again with all values kept."""
        self.search.load(self.model.first[:-1])

    def set_all(self, values: Sequence[int] | Bytes, rows: Sequence[int] | Bytes) -> None:
        """Gives values the choices of these rows, one after the other, but for those that pass the limit of errors."""
        for value, row in zip(values, rows, strict=True):
            old = int(self.search.rows[value])
            if row != old:
                self._set(int(value), int(row))
                if not self.search.keeps(self.limit):
                    self._set(int(value), old)

    def lower(self, level: int, tau: float, batch: int) -> bool:
        """Changes the solution until its peak is at most ``level``. Returns False if it gets stuck.

        Args:
            level: bytes.
            tau: softness of the peak, in bytes (Note: [smooth peak]).
            batch: how many changes are made at most before the prices are set anew.
        """
        search, value_of = self.search, self.model.value_of
        refused = np.zeros(len(value_of), bool)
        peak = self._smooth(tau)
        rounds = 0
        while int(search.live.max()) > level:
            rounds += 1
            if self.work > self.end or rounds > 2 * len(search.rows) + 50:
                return False
            self.work += 2.0 + 0.02 * len(value_of) + 0.006 * len(search.live)
            freed, seconds = self._offers.make(search, exponential(search.live, float(search.live.max()), tau))
            if self.price:
                off = self.model.errors - self.model.errors[search.rows][value_of]
                seconds = seconds + off * self.price
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

    def relax(self, level: int) -> None:
        """Gives each value a faster choice, the most expensive values first, where the peak stays within ``level``."""
        search, model, own = self.search, self.model, self.model.own_seconds
        slack = level - range_max(search.live, model.born, np.maximum(model.born, search.makes - 1))
        active = np.flatnonzero((search.rows != model.first[:-1]) & (slack > 0))
        self.work += 1.0 + 0.02 * len(search.live)
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

    def _set(self, value: int, row: int) -> None:
        self.work += 0.5 + (0.25 + 0.0005 * len(self.blocks)) * self.search.set(value, row)

    def _smooth(self, tau: float) -> float:
        """Returns the smooth peak (Note: [smooth peak])."""
        self.work += 0.5 + 0.003 * len(self.blocks)
        most = np.maximum.reduceat(self.search.live, self.blocks)
        top = float(most.max())
        return top + tau * math.log(float(np.cumsum(exponential(most, top, tau))[-1]))

    def _order(self, freed: Prices, seconds: Prices, batch: int) -> Bytes:
        """Returns the rows to try, best first. In a large batch, equal choices of repeated layers come together."""
        rows = np.flatnonzero(freed > 0)
        score = freed[rows] / seconds[rows]
        if batch > 1:
            alike = self.alike[rows]
            together = np.bincount(alike, freed[rows]) / np.maximum(np.bincount(alike, seconds[rows]), 1e-9)
            score = together[alike] * (1.0 + 1e-6 * score / max(score.max(initial=0.0), 1e-30))
        return rows[np.argsort(-score, kind="stable")[: 8 * batch]]


def exponential(live: Bytes, top: float, tau: float) -> Prices:
    """Returns e to the power of (live - top) / tau for each number of ``live``, none of which is above ``top``."""
    y: Prices = np.maximum((live - top) / tau * 1.4426950408889634, -1000.0)
    whole = np.floor(y)
    z = y - whole
    power: Prices = np.full_like(z, _POWER[0])
    for each in _POWER[1:]:
        power = power * z + each
    return np.ldexp(power, whole.astype(np.int64))


def block_starts(model: PeakModel) -> Bytes:
    """Returns where the blocks begin whose most bytes are looked at, and then the number of positions."""
    count = len(model.base)
    return np.unique([*np.linspace(0, count - 1, min(count, BLOCKS)).astype(np.int64), count])


def alike(model: PeakModel) -> Bytes:
    """Returns a number for each row, equal for the same choice of equal values in repeated layers."""
    known: dict[tuple[object, ...], int] = {}
    found = []
    for value in model.profile.values:
        layer = re.sub(r"\d+", "*", value.module), value.op, value.nbytes, len(value.reads)
        for choice in value.choices:
            found.append(known.setdefault((*layer, choice.name, choice.held_nbytes), len(known)))
    return np.array(found, np.int64)


def range_max(live: Bytes, first: Bytes, last: Bytes) -> Bytes:
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


class Offers:
    """What each choice of each value would change, all of them at once."""

    def __init__(self, model: PeakModel) -> None:
        self.model = model
        pairs = [(row, parent) for row, parents in enumerate(model.parents) for parent in parents]
        self._rows = np.array([row for row, _ in pairs], np.int64)
        self._parents = np.array([parent for _, parent in pairs], np.int64)
        stretches = [(row, at, read) for row, found in enumerate(model.fetched) for at, read in found]
        self._fetched = np.array(stretches, np.int64).reshape(-1, 3)

    def make(self, search: Search, prices: Prices) -> tuple[Prices, Prices]:
        """Returns for each row the priced bytes that it would free, and the seconds that it would add.

        Exact but for two things: a parent's own parents, and what a value that is remade now would leave to its
        parents. Who takes an offer looks at what it has really changed.

        Args:
            prices: of a byte at each position.
        """
        model, value = self.model, self.model.value_of
        sums = np.concatenate([[0.0], np.cumsum(prices)])
        read_prices = np.bincount(model.read_values, prices[model.read_positions], len(model.nbytes))
        start = np.where(model.remakes, search.makes[value], model.born[value])
        cost = model.held * (sums[search.last[value] + 1] - sums[start])
        cost += (model.encode + model.workspace) * prices[start]
        cost += model.decode * read_prices[value]
        if len(self._fetched):
            row, at, read = self._fetched.T
            cost += np.bincount(row, model.decode[row] * (sums[read] - sums[at]), len(cost))
        seconds = model.own_seconds - model.own_seconds[search.rows][value]
        if len(self._rows):
            parent, made = self._parents, search.makes[value[self._rows]]
            row = search.rows[parent]
            effect = model.held[row] * np.maximum(0.0, sums[made + 1] - sums[search.last[parent] + 1])
            earlier = np.maximum(0.0, sums[search.makes[parent]] - sums[made])
            effect += np.where(model.remakes[row], model.nbytes[parent] * earlier, 0.0)
            effect += model.decode[row] * prices[made]
            cost += np.bincount(self._rows, effect, len(cost))
            seconds = seconds + np.bincount(self._rows, model.decode_seconds[row], len(cost))
        freed: Prices = cost[search.rows][value] - cost
        freed[search.rows] = 0.0
        return freed, seconds

"""The bytes and seconds of every change of a solution, all at once: the offers that the fast search chooses from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from backstash.planning.model.peak import PeakModel
from backstash.planning.search.changes import Search

Prices = NDArray[np.float64]


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

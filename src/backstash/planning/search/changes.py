"""A solution that is changed value by value, with the bytes at each position kept up to date.

It says at any time what :meth:`PeakModel.evaluate` would say, which a test compares after each of many changes. What is
written here is the reference; native.py does the same in C++.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from heapq import heapify, heappop, heappush

import numpy as np

from backstash.planning.model.peak import Bytes, PeakModel


class Search(ABC):
    """A solution of a profile, and how it may be changed.

    Attributes:
        rows: the row of each value's choice, as PeakModel numbers them. At first, all values are kept.
        live: bytes alive at each position.
        seconds: time of the step.
        error: sum of the squares of the errors of the choices.
        conflicts: how many values are remade from one that is stored with an error.
        makes: the first need of each value: where it would be made if it was remade.
        last: the last need of each value.
    """

    def __init__(self, model: PeakModel) -> None:
        self.model = model
        self.rows: Bytes = model.first[:-1].copy()
        found = model.evaluate(self.rows - model.first[:-1])
        self.live, self.seconds, self.error = found.live, found.seconds, 0.0
        self.conflicts = 0
        self.makes, self.last = model.first_read.copy(), model.last_read.copy()

    @abstractmethod
    def set(self, value: int, row: int) -> int:
        """Changes how a value is held, and with it the lives of all that it is remade from.

        Returns:
            How many values were touched, which is what the change costs.
        """

    @property
    def choices(self) -> tuple[int, ...]:
        """For each value the index of its choice."""
        return tuple((self.rows - self.model.first[:-1]).tolist())

    def keeps(self, limit: float) -> bool:
        """Whether nothing is remade from what has an error, and the sum of the squares of errors is within a limit."""
        return not self.conflicts and self.error <= limit * (1 + 1e-9) + 1e-30  # sums are rounded

    def load(self, rows: Bytes) -> None:
        """Changes whatever differs from the given rows."""
        for value in np.flatnonzero(self.rows != rows).tolist():
            self.set(value, int(rows[value]))


class ReferenceSearch(Search):
    """The search in Python."""

    def __init__(self, model: PeakModel) -> None:
        super().__init__(model)
        self._remade_from = [0] * len(model.nbytes)  # how many values are remade from each
        self._reads = [frozenset(value.reads) for value in model.profile.values]
        self._needs: list[dict[int, int]] = [defaultdict(int) for _ in self._reads]  # children made there, by position
        # Plain lists: reading a number from an array takes several times as long.
        self._rank = {value: rank for rank, value in enumerate(model.order)}
        self._remakes: list[bool] = model.remakes.tolist()
        at_start = (model.encode + model.workspace).tolist()
        columns = model.held.tolist(), at_start, model.decode.tolist(), model.decode_seconds.tolist()
        self._facts: list[tuple[int, int, int, float]] = list(zip(*columns, strict=True))
        self._row: list[int] = self.rows.tolist()
        self._born: list[int] = model.born.tolist()
        self._first_read: list[int] = model.first_read.tolist()
        self._last_read: list[int] = model.last_read.tolist()
        self._make, self._last = list(self._first_read), list(self._last_read)

    def set(self, value: int, row: int) -> int:
        """Changes how a value is held (see :class:`Search`)."""
        model, old = self.model, self._row[value]
        self._add(value, -1)
        self.seconds += float(model.own_seconds[row] - model.own_seconds[old])
        self.error += float(model.errors[row] - model.errors[old])
        self.conflicts += (model.has_error[row] - model.has_error[old]) * self._remade_from[value]
        made = self._make[value]
        changes: dict[int, list[tuple[int, int]]] = {}  # by value: positions at which a child more or less is made
        if self._remakes[old]:
            for parent in model.parents[old]:
                self._note_child(parent, -1)
                changes.setdefault(parent, []).append((made, -1))
        self.rows[value] = self._row[value] = row
        if self._remakes[row]:
            for parent in model.parents[row]:
                self._note_child(parent, 1)
                changes.setdefault(parent, []).append((made, 1))
        self._add(value, 1)
        return 1 + self._propagate(changes)

    def _propagate(self, changes: dict[int, list[tuple[int, int]]]) -> int:
        """Moves the needs of values, and of what they are remade from. Returns how many values were touched."""
        model, waiting = self.model, [(self._rank[value], value) for value in changes]
        heapify(waiting)
        count = 0
        while waiting:  # children before what they are remade from, so that each value is touched once
            _, value = heappop(waiting)
            count += 1
            self._add(value, -1)
            needs, before = self._needs[value], self._make[value]
            for position, change in changes.pop(value):
                needs[position] += change
                if not needs[position]:
                    del needs[position]
            last, now = max([self._last_read[value], *needs]), min([self._first_read[value], *needs])
            self.last[value] = self._last[value] = last
            self.makes[value] = self._make[value] = now
            row = self._row[value]
            if now != before and self._remakes[row]:
                for parent in model.parents[row]:
                    if parent not in changes:
                        changes[parent] = []
                        heappush(waiting, (self._rank[parent], parent))
                    changes[parent] += [(before, -1), (now, 1)]
            self._add(value, 1)
        return count

    def _note_child(self, parent: int, change: int) -> None:
        self._remade_from[parent] += change
        self.conflicts += change * self.model.has_error[self._row[parent]]

    def _add(self, value: int, sign: int) -> None:
        row, live = self._row[value], self.live
        held, at_start, decode, seconds = self._facts[row]
        start = self._make[value] if self._remakes[row] else self._born[value]
        if held:
            live[start : self._last[value] + 1] += sign * held
        if at_start:
            live[start] += sign * at_start
        if decode or seconds:
            reads = self._reads[value]
            extra = [position for position in self._needs[value] if position not in reads]
            self.seconds += sign * seconds * len(extra)
            if decode:
                for position in (*reads, *extra):
                    live[position] += sign * decode
                for at, read in self.model.fetched[row]:
                    live[at:read] += sign * decode

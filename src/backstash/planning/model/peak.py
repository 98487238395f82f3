"""The peak model: the bytes alive at each position of a step, and its time, if each value is held in a given way.

The rules, which are those of the executor. A *need* of a value is a position at which it must be there: its own reads,
and each position at which a value is remade from it.

* A value that is kept holds its bytes from its birth through its last need.
* A value that is encoded, or moved to a store, holds ``held_nbytes`` and ``reserve_nbytes`` for as long. It takes
  ``encode_nbytes`` more at its birth and ``decode_nbytes`` more at each of its needs. It is decoded once per need.
* A value that is moved may be fetched before it is read. It takes ``decode_nbytes`` from that position on as well.
* A value that is remade holds nothing in the forward pass. It is made once, at its first need, which takes
  ``workspace_nbytes`` more at that position, and holds its bytes from there through its last need. What it is made
  from is needed at that position, so a chain of remade values is made at a single position.
* Everything at one position is added up, as if it were there at the same moment. So the model never says too little.
* No value is remade from one that is stored with an error, because what is remade is proven to have the same bits.
* The error of the gradients is the root of the sum of the squares of the choices' errors (Note: [errors add up]).

Note: [errors add up]
    To first order, the error of the gradients is the sum of what the rounding of each value causes. These roundings are
    independent of each other and have a mean of zero, or nearly so. So the expected square of their sum is the sum of
    their squares. The model holds the squares, which can be added up and subtracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backstash.errors import PlanError
from backstash.planning.model.problem import Choice, PlannedValue, StepProfile, children_first

Bytes = NDArray[np.int64]

WITHOUT_CLAIM = 2
"""How many times a value's bytes its readers' kernels may take beyond those of this package."""


@dataclass(frozen=True)
class Evaluation:
    """What a step takes if its values are held in a given way.

    Attributes:
        live: bytes alive at each position, ``[positions]``.
    """

    live: Bytes
    peak_nbytes: int
    seconds: float


class PeakModel:
    """The rules above for one profile, with its numbers as arrays.

    The choices of all values are numbered one after the other: choice ``c`` of value ``v`` is the row ``first[v] + c``.

    Attributes:
        order: the indices of all values, each before all that it may be remade from.
        parents: for each row, the values that this choice remakes from.
        held: for each row, the bytes that it holds, with those that are reserved (Note: [reserve] in problem.py).
        reserve: for each row, the bytes among these that are reserved.
        errors: for each row, the square of its error.
        fetched: for each row, the stretches of positions, end excluded, in which its value is on its way back.
        base: bytes of everything else at each position.
        base_seconds: time of a step under a Session that keeps everything.
    """

    def __init__(self, profile: StepProfile) -> None:
        self.profile = profile
        values = profile.values
        rows = [choice for value in values for choice in value.choices]
        self.base = np.array(profile.base_nbytes, np.int64)
        self.base_seconds = profile.seconds + profile.session_seconds
        self.order = children_first(values) or []
        self.choice_counts = np.array([len(value.choices) for value in values], np.int64)
        self.first = np.concatenate([[0], np.cumsum(self.choice_counts)]).astype(np.int64)
        self.value_of = np.repeat(np.arange(len(values)), self.choice_counts)
        self.nbytes = np.array([value.nbytes for value in values], np.int64)
        self.born = np.array([value.born for value in values], np.int64)
        self.first_read = np.array([value.reads[0] for value in values], np.int64)
        self.last_read = np.array([value.reads[-1] for value in values], np.int64)
        self.read_counts = np.array([len(value.reads) for value in values], np.int64)
        self.read_values = np.repeat(np.arange(len(values)), self.read_counts)
        self.read_positions = np.array([read for value in values for read in value.reads], np.int64)
        self.parents = [choice.parents for choice in rows]
        self.remakes = np.array([choice.kind == "recompute" for choice in rows], bool)
        self.in_place = np.array([choice.in_place for choice in rows], bool)
        self.reserve = np.array([choice.reserve_nbytes for choice in rows], np.int64)
        self.held = np.array([choice.held_nbytes for choice in rows], np.int64) + self.reserve
        self.held[self.remakes] = self.nbytes[self.value_of[self.remakes]]
        self.encode = np.array([choice.encode_nbytes for choice in rows], np.int64)
        self.decode = np.array([choice.decode_nbytes for choice in rows], np.int64)
        self.workspace = np.array([choice.workspace_nbytes for choice in rows], np.int64)
        self.decode_seconds = np.array([choice.decode_seconds for choice in rows], float)
        self.own_seconds = np.array([own_seconds(v.choices[c], len(v.reads)) for v, c in _numbered(profile)], float)
        self.errors = np.array([choice.error**2 for choice in rows], float)
        self.has_error = [choice.error > 0.0 for choice in rows]
        self.fetched = [
            tuple(zip(value.choices[c].fetches, value.reads, strict=False)) for value, c in _numbered(profile)
        ]
        self.fetching = np.array([bool(stretches) for stretches in self.fetched], bool)

    def evaluate(self, choices: Sequence[int] | Bytes) -> Evaluation:
        """Returns what the step takes.

        Args:
            choices: for each value the index of one of its choices.

        Raises:
            PlanError: there is not one index for each value, or one is out of range.
        """
        chosen = np.asarray(choices, np.int64)
        if chosen.shape != self.nbytes.shape or ((chosen < 0) | (chosen >= self.choice_counts)).any():
            raise PlanError(
                f"a step was to be evaluated for the choices {choices!r:.80}, but it has {len(self.nbytes)} values. "
                f"Pass for each of them the index of one of its choices."
            )
        rows = self.first[:-1] + chosen
        start, last, extra = self._lives(rows)
        count = len(self.base)
        steps = np.zeros(count + 1, np.int64)
        np.add.at(steps, start, self.held[rows])
        np.add.at(steps, last + 1, -self.held[rows])
        live = self.base + np.cumsum(steps)[:-1]
        np.add.at(live, self.born, self.encode[rows])
        np.add.at(live, start, self.workspace[rows])
        seconds = self.base_seconds + float(self.own_seconds[rows].sum())
        decoded = self.decode[rows[self.read_values]]
        np.add.at(live, self.read_positions, decoded)
        for value in np.flatnonzero(self.fetching[rows]).tolist():
            for at, read in self.fetched[rows[value]]:
                live[at:read] += self.decode[rows[value]]
        for value, position in extra:  # needs that are no reads, in which the value is decoded as well
            live[position] += self.decode[rows[value]]
            seconds += float(self.decode_seconds[rows[value]])
        return Evaluation(live, int(live.max()), seconds)

    def first_nbytes(self, choices: Sequence[int] | Bytes) -> int:
        """Returns the peak of a first step of its shape, in which the calls are proven that make values again.

        A proof runs when a call has returned, and takes its result once more, with whatever lies beside it in its
        kernel or its comparison. A call that works in place is proven on copies.
        """
        live = self.evaluate(choices).live
        rows = self.first[:-1] + np.asarray(choices, np.int64)
        remade = self.remakes[rows]
        results, inside = self.nbytes[remade], self.workspace[rows[remade]]  # which has the results of inner calls
        compared = np.maximum(results, inside) * 5 // 4  # with a bool for each element
        proofs = np.maximum(np.where(self.in_place[rows[remade]], 2 * results, results) + inside, compared)
        before = np.maximum.accumulate(live)[self.born[remade]]
        return int(max(live.max(), (before + proofs).max(initial=0)))

    def count_remade(self, choices: Sequence[int] | Bytes) -> int:
        """Returns how many values are remade."""
        return int(self.remakes[self.first[:-1] + np.asarray(choices, np.int64)].sum())

    def reserved(self, choices: Sequence[int] | Bytes) -> Bytes:
        """Returns the bytes at each position that are there for numbers which encode worse than the profiled ones."""
        rows = self.first[:-1] + np.asarray(choices, np.int64)
        start, last, _ = self._lives(rows)
        steps = np.zeros(len(self.base) + 1, np.int64)
        np.add.at(steps, start, self.reserve[rows])
        np.add.at(steps, last + 1, -self.reserve[rows])
        return np.cumsum(steps)[:-1]

    def has_room(self, choices: Sequence[int] | Bytes, limit: int) -> list[bool]:
        """Returns for each value whether its readers may hold it until they are done.

        A kernel of this package frees what it has read before it allocates a gradient, or writes over a gradient. That
        takes time, and lowers what is alive by no more than the value's bytes twice: torch's own kernel of a batch norm
        has a gradient and a workspace of that size. So it is not worth it where that much more fits at each of the
        value's reads, beside all else that is read there.
        """
        live = self.evaluate(choices).live.copy()
        np.add.at(live, self.read_positions, WITHOUT_CLAIM * self.nbytes[self.read_values])
        fits = np.ones(len(self.nbytes), bool)
        np.logical_and.at(fits, self.read_values, live[self.read_positions] <= limit)
        found: list[bool] = fits.tolist()
        return found

    def in_flight(self, live: Bytes, limit: int) -> list[int]:
        """Returns for each value how many bytes more may be held from its birth until another value is born.

        From the last birth on, they may be held for the rest of the step.

        Args:
            live: bytes alive at each position, [positions].
        """
        births, which = np.unique(self.born, return_inverse=True)
        ends = np.append(births[1:] + 1, len(live))
        most = np.array([live[birth + 1 : end].max() for birth, end in zip(births, ends, strict=True)], np.int64)
        found: list[int] = np.maximum(limit - most, 0)[which].tolist()
        return found

    def remakes_what_has_an_error(self, choices: Sequence[int] | Bytes) -> bool:
        """Whether a value would be remade from one that is stored with an error, which no plan may do."""
        rows = (self.first[:-1] + np.asarray(choices, np.int64)).tolist()
        return any(self.has_error[rows[parent]] for row in rows if self.remakes[row] for parent in self.parents[row])

    def _lives(self, rows: Bytes) -> tuple[Bytes, Bytes, set[tuple[int, int]]]:
        """Returns where each value's bytes begin and end to be held, and the needs that are not reads."""
        remade = self.remakes[rows]
        makes, last = self.first_read.copy(), self.last_read.copy()
        extra: set[tuple[int, int]] = set()
        for value in self.order:
            if remade[value]:
                position = makes[value]  # all children are done, so this is its first need
                for parent in self.parents[rows[value]]:
                    makes[parent] = min(makes[parent], position)
                    last[parent] = max(last[parent], position)
                    if position not in self.profile.values[parent].reads:
                        extra.add((parent, int(position)))
        return np.where(remade, makes, self.born), last, extra


def own_seconds(choice: Choice, reads: int) -> float:
    """Returns the time that a choice adds to a step for a value with so many reads, if nothing is remade from it."""
    return choice.encode_seconds + choice.decode_seconds * reads + choice.seconds


def evaluate(profile: StepProfile, choices: Sequence[int]) -> Evaluation:
    """Returns what a step takes if each value is held as the choice of that index says (see :class:`PeakModel`).

    Example:
        >>> from backstash.planning.model.problem import PlannedValue, Position
        >>> positions = [Position("relu", "", False, 0.1), Position("loss", "", False, 0.1)]
        >>> positions += [Position("LossBackward0", "", True, 0.1), Position("ReluBackward0", "", True, 0.2)]
        >>> mask = Choice("bitmask", "encode", 4, encode_nbytes=100, encode_seconds=0.1)
        >>> value = PlannedValue("/Relu#0:result", "", "Relu", "float32 [25]", 100, 1, (3,), (Choice.keep(100), mask))
        >>> profile = StepProfile(tuple(positions), (200, 50, 300, 200), (value,), 400)
        >>> evaluate(profile, [0]).live.tolist(), evaluate(profile, [1]).live.tolist()
        ([200, 150, 400, 300], [200, 154, 304, 204])
    """
    return PeakModel(profile).evaluate(choices)


def _numbered(profile: StepProfile) -> list[tuple[PlannedValue, int]]:
    return [(value, index) for value in profile.values for index in range(len(value.choices))]

"""The best plan there is: by trying everything on small problems, and as a mixed integer program on larger ones.

The program says what peak.py says, so its answer is the optimum of that model. Its variables:

* ``choose[v, c]``: value ``v`` is held by its choice ``c``; exactly one for each value.
* ``make[v, c, t]``: ``v`` is remade by its choice ``c`` at position ``t``. ``t`` is the first read of ``v``, or an
  earlier position at which a value may be remade from it. ``v`` is made at a need, and at no later need than the first.
* ``longer[v, c, t]``: ``v`` is held by ``c`` beyond its last own read, because something is remade from it at ``t``.
* ``decode[v, c, t]``: ``v`` is decoded at ``t``, which is no read of its own, because something is remade from it
  there.

The last two are products of the others. They need no integers of their own: the bytes and seconds that they cost push
them down to the largest of their lower bounds.

Source: the way to write needs as linear constraints follows Checkmate (Jain et al., MLSys 2020), section 4. There every
stage may compute everything again; here a value is remade once, as the executor does, so there is no stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import numpy as np

from backstash.errors import PlanError
from backstash.planning.model.peak import PeakModel

COMBINATIONS = 1 << 18
"""The most combinations that :func:`brute_force` tries."""


@dataclass(frozen=True)
class Solution:
    """A way to hold each value of a profile.

    Attributes:
        choices: for each value the index of one of its choices.
        seconds: the time of a step that the model predicts.
        error: predicted error of all choices together (Note: [errors add up] in peak.py).
    """

    choices: tuple[int, ...]
    peak_nbytes: int
    seconds: float
    error: float


def solution(model: PeakModel, choices: Iterable[int]) -> Solution:
    """Returns the choices with what the model says of them."""
    chosen = tuple(int(choice) for choice in choices)
    found = model.evaluate(chosen)
    error = float(np.sqrt(model.errors[model.first[:-1] + np.array(chosen, np.int64)].sum()))
    return Solution(chosen, found.peak_nbytes, found.seconds, error)


def brute_force(model: PeakModel, error_limit: float | None = None) -> list[Solution]:
    """Returns all solutions but those whose errors are too large, or that remake a value from one with an error.

    Raises:
        PlanError: there are more than :data:`COMBINATIONS` combinations.
    """
    count = float(np.exp(min(700.0, np.log(model.choice_counts).sum()))) + 0.5
    if count > COMBINATIONS + 1:
        raise PlanError(
            f"brute force was asked for {count:.3g} combinations, but it tries at most {COMBINATIONS}. Use exact()."
        )
    combinations = product(*(range(count) for count in model.choice_counts.tolist()))
    found = (solution(model, each) for each in combinations if not model.remakes_what_has_an_error(each))
    return [item for item in found if error_limit is None or item.error <= error_limit * (1 + 1e-9)]


def exact(
    model: PeakModel,
    budget: int | None,
    error_limit: float | None = None,
    *,
    time_limit: float = 60.0,
    gap: float = 1e-6,
) -> Solution | None:
    """Returns the fastest solution within the budget, by a mixed integer program; None if there is none.

    Args:
        budget: bytes; None for the solution of the least peak, whatever its time.
        error_limit: the largest error of all choices together; None for any.
        time_limit: seconds after which the solver gives up.
        gap: how far from the optimum an answer may be, as a share of what the solution adds to a plain step; of the
            peak if ``budget`` is None.

    Raises:
        PlanError: scipy is not installed, or the solver did not find the optimum in time.
    """
    program, limit = _Program(model), budget
    found = program.solve(limit, error_limit, time_limit, gap)
    while found is not None and budget is not None and limit is not None and found.peak_nbytes > budget:
        limit -= found.peak_nbytes - budget  # the solver's tolerance is some bytes
        found = program.solve(limit, error_limit, time_limit, gap)
    return found


class _Program:
    """The rows and columns of the mixed integer program."""

    def __init__(self, model: PeakModel) -> None:
        self.model = model
        self.costs: list[float] = []
        self.integral: list[bool] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []
        self.at: list[dict[int, float]] = [defaultdict(float) for _ in model.base]  # bytes by column, at each position
        self.held: list[tuple[int, int, int, int]] = []  # column, first and last position, bytes
        self.choose = [self._column(seconds) for seconds in model.own_seconds.tolist()]
        self.make: dict[int, dict[int, list[tuple[int, int]]]] = {}  # value: position: (row of the choice, column)
        self.needed: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))  # as parent: columns
        for value in range(len(model.nbytes)):
            self._row({self.choose[row]: 1.0 for row in self._choices(value)}, 1.0, 1.0)
        for value in model.order:
            self._remake(value)
        for value in range(len(model.nbytes)):
            self._hold(value)

    def _choices(self, value: int) -> range:
        return range(int(self.model.first[value]), int(self.model.first[value + 1]))

    def _column(self, cost: float = 0.0, integral: bool = True) -> int:
        self.costs.append(cost)
        self.integral.append(integral)
        return len(self.costs) - 1

    def _row(self, coefficients: dict[int, float], low: float, high: float) -> None:
        self.rows.append((coefficients, low, high))

    def _remake(self, value: int) -> None:
        """When a value is remade, and what that needs of others. All that may be remade from it have been done."""
        model = self.model
        first = int(model.first_read[value])
        needed = self.needed[value]
        self.make[value] = defaultdict(list)
        ways = [row for row in self._choices(value) if model.remakes[row]]
        for row in ways:
            columns = {}
            for position in sorted({first, *(t for t in needed if t < first)}):
                column = columns[position] = self._column()
                self.make[value][position].append((row, column))
                for parent in set(model.parents[row]):
                    self.needed[parent][position].append(column)
                self.at[position][column] += float(model.workspace[row])
            self._row({self.choose[row]: -1.0} | dict.fromkeys(columns.values(), 1.0), 0.0, 0.0)
            for parent in set(model.parents[row]):  # what has an error is not remade from
                rough = [self.choose[other] for other in self._choices(parent) if model.has_error[other]]
                if rough:
                    self._row({self.choose[row]: 1.0} | dict.fromkeys(rough, 1.0), -np.inf, 1.0)
        for position, makes in self.make[value].items():
            mine = {column: 1.0 for _, column in makes}
            if position != first:  # it is made at a need
                self._row(mine | dict.fromkeys(needed[position], -1.0), -np.inf, 0.0)
        for position, columns_ in needed.items():
            late = [column for t, makes in self.make[value].items() if t > position for _, column in makes]
            for child in columns_ if late else ():  # and not after one
                self._row(dict.fromkeys(late, 1.0) | {child: 1.0}, -np.inf, 1.0)

    def _hold(self, value: int) -> None:
        """The bytes that a value takes, and the time to decode it for what is remade from it."""
        model = self.model
        born, last = int(model.born[value]), int(model.last_read[value])
        reads = set(model.profile.values[value].reads)
        for row in self._choices(value):
            column, nbytes = self.choose[row], int(model.held[row])
            if not model.remakes[row]:
                self.held.append((column, born, last, nbytes))
                self.at[born][column] += float(model.encode[row])
                stretches = [(at, read - 1) for at, read in model.fetched[row] if at < read]
                self.held += [(column, at, until, int(model.decode[row])) for at, until in stretches]
            for position in reads:
                self.at[position][column] += float(model.decode[row])
            previous = last
            later = sorted(position for position in self.needed[value] if position > last)
            for number, position in enumerate(later if nbytes else ()):
                longer = self._column(integral=False)
                self.held.append((longer, previous + 1, position, nbytes))
                for child in (c for t in later[number:] for c in self.needed[value][t]):
                    self._row({longer: 1.0, column: -1.0, child: -1.0}, -1.0, np.inf)
                previous = position
            if model.decode[row] or model.decode_seconds[row]:
                for position in self.needed[value].keys() - reads:
                    decode = self._column(float(model.decode_seconds[row]), integral=False)
                    self.at[position][decode] += float(model.decode[row])
                    for child in self.needed[value][position]:
                        self._row({decode: 1.0, column: -1.0, child: -1.0}, -1.0, np.inf)
        for position, makes in self.make[value].items():
            for row, column in makes:
                self.held.append((column, position, last, int(model.held[row])))

    def _peaks(self) -> list[tuple[dict[int, float], int]]:
        """Returns the bytes by column at each position, and the base; of equal positions the one with most base."""
        starts: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for column, first, last, nbytes in self.held:
            if nbytes:
                starts[first].append((column, nbytes))
                starts[last + 1].append((column, -nbytes))
        held: dict[int, float] = defaultdict(float)
        found: dict[tuple[tuple[int, float], ...], int] = {}
        for position, base in enumerate(self.model.base.tolist()):
            for column, nbytes in starts[position]:
                held[column] += nbytes
            total = dict(held)
            for column, nbytes_ in self.at[position].items():
                total[column] = total.get(column, 0.0) + nbytes_
            key = tuple(sorted((column, nbytes_) for column, nbytes_ in total.items() if nbytes_))
            found[key] = max(found.get(key, 0), base)
        return [(dict(key), base) for key, base in found.items()]

    def solve(self, budget: int | None, error_limit: float | None, time_limit: float, gap: float) -> Solution | None:
        """See :func:`exact`."""
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError:
            raise PlanError(
                "the exact solver was asked for, but it needs scipy, which is not installed. Install "
                "backstash[planner], or use the greedy solver."
            ) from None
        model, costs = self.model, np.array(self.costs)
        rows = list(self.rows)
        unit = float(max(model.base.max(initial=1), model.nbytes.max(initial=1), 1))  # bytes near 1 suit the solver
        peak = len(costs)
        for coefficients, base in self._peaks():
            scaled = {column: nbytes / unit for column, nbytes in coefficients.items()}
            limit = (0.0 if budget is None else budget) - base
            rows.append((scaled | ({peak: -1.0} if budget is None else {}), -np.inf, limit / unit))
        if error_limit is not None:
            shares = (model.errors / max(error_limit**2, 1e-30)).tolist()
            squares = {column: min(share, 1e6) for column, share in zip(self.choose, shares, strict=True) if share}
            rows.append((squares, -np.inf, 1.0))
        if budget is None:
            costs = np.append(np.zeros(peak), 1.0)
        elif costs.max(initial=0.0) > 0:
            costs = costs / costs.max()
        entries = [(n, column, v) for n, (found, _, _) in enumerate(rows) for column, v in found.items()]
        numbers, columns, values = (np.array(part) for part in zip(*entries, strict=True))
        matrix = csr_array((values, (numbers, columns)), shape=(len(rows), len(costs)))
        result = milp(
            costs,
            integrality=np.array([*self.integral, *([False] if budget is None else [])], int),
            bounds=Bounds(0.0, np.array([1.0] * peak + ([np.inf] if budget is None else []))),
            constraints=LinearConstraint(matrix, [low for _, low, _ in rows], [high for _, _, high in rows]),
            options={"time_limit": time_limit, "mip_rel_gap": gap},
        )
        if result.status == 2:
            return None
        if result.status != 0:
            raise PlanError(
                f"the exact solver was asked for the best of {len(model.nbytes)} values in {time_limit} s, but it says "
                f"{result.message}. Allow it more time, or use the greedy solver."
            )
        chosen = [
            max(self._choices(value), key=lambda row: result.x[self.choose[row]]) - int(model.first[value])
            for value in range(len(model.nbytes))
        ]
        return solution(model, chosen)

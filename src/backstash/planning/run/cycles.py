"""The number of backward passes in a step: how many it takes until a program saves the same values again.

Note: [steps of several passes]
    The critic of an adversarial pair runs in each of a step's passes, and the generator in one of them. So it is not
    enough that a value comes back: the passes of two whole steps are compared, one by one. Passes that save mostly the
    same values are of one kind, and a step is the shortest sequence of kinds that repeats itself. What was saved is
    compared, and not what was decided on: under a plan some values are decided on that a call held before, such as the
    statistics of a norm whose input is made again, and when that is may differ from step to step.

    A pipeline has several micro-batches in flight, so a pass may save nothing, or what a later one reads. A step that
    is found in the middle of others, or has passes that save nothing, ends with a pass after which nothing is held for
    another, as long as there are such passes.

    What runs before training counts as the first pass, or is a part of it: a parametrization that is registered, a lazy
    layer that learns its shape, a sanity check. So if the first passes do not come back, they are left out. Where all
    passes of a program differ, as with a depth that is drawn anew, a step ends when the first value comes back.

Note: [longer periods]
    Five critics to one generator begin like a program whose steps are single passes, and they are planned like one. So
    as long as steps are measured, and when values come that a plan does not know, the kinds of passes are compared with
    those of the step that was found. If another kind comes, a longer period is looked for that includes it. Where there
    is none, because a branch is drawn at random, each kind of passes has to be planned for by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from backstash.saved import without_cycle

MOST_CYCLES = 64
"""Passes of the longest step that is looked for."""

MOST_VALUES = 1000
"""Values of the longest step that replaces a shorter one: to plan for so many takes about a minute."""

PATIENCE = 8
"""After how many passes the first ones may be left out."""

LEAST_LEFT = 4
"""How many passes have to be left then."""

MOST_SEEN = 24
"""After how many passes a program that has not repeated itself is taken for one that never does."""

MOST_PASSES = 8 * MOST_CYCLES
"""How many passes are remembered."""

MOST_KINDS = 256
"""How many kinds of passes are remembered until they are forgotten when none of them is looked at."""

ALIKE = 0.75
"""The share of values that two passes have in common if they are the same pass of two steps: some layers are drawn."""


class Order:
    """The kinds of a program's backward passes in their order.

    Attributes:
        passes: the kinds of the passes that were seen since it was cleared, as numbers.
        pattern: the kinds of a step's passes; empty as long as no step is known.
        is_mixed: whether passes of other kinds came in no order that repeats itself.
    """

    def __init__(self) -> None:
        self.passes: list[int] = []
        self.pattern: tuple[int, ...] = ()
        self.is_mixed = False
        self._is_last: list[bool] = []  # for each of these passes, whether nothing was held for another one after it
        self._kinds: list[Set[str]] = []
        self._odd: int | None = None  # the first pass that was not the one of the pattern

    def clear(self) -> None:
        """Forgets the passes, but not their kinds."""
        self.passes.clear()
        self._is_last.clear()
        self._odd = None
        if len(self._kinds) > MOST_KINDS:
            self._kinds, self.pattern = [], ()

    def add(self, keys: Iterable[str], may_be_last: bool = True) -> None:
        """Notes a pass.

        Args:
            keys: of what was saved before it.
        """
        values = {without_cycle(key) for key in keys}
        found = next((kind for kind, known in enumerate(self._kinds) if _are_alike(known, values)), None)
        if found is None:
            found = len(self._kinds)
            self._kinds.append(values)
        self.passes.append(found)
        self._is_last.append(may_be_last)
        if len(self.passes) > MOST_PASSES:
            del self.passes[0], self._is_last[0]
            self._odd = None if self._odd is None else max(0, self._odd - 1)

    def first_period(self) -> int:
        """Returns how many passes make a step, by those from the program's beginning on; 0 if more have to be seen."""
        seen = len(self.passes)
        if period := self._period_from(0):
            return period
        if seen < PATIENCE:
            return 0
        for left_out in range(1, min(seen // 2, seen - LEAST_LEFT) + 1):
            if period := self._period_from(left_out):
                return period
        if seen <= MOST_SEEN and len(set(self.passes)) < seen:
            return 0
        first = self._kinds[self.passes[0]]
        is_known = any(self._is_last)
        may_begin = [index for index in range(1, seen) if self._is_last[index - 1] or not is_known]
        back = next((index for index in may_begin if first & self._kinds[self.passes[index]]), 0)
        return back or (seen if seen > MOST_SEEN else 0)

    def settle(self, period: int, phase: int) -> None:
        """A step has so many passes, and as many of the latest ones as ``phase`` belong to a step in progress."""
        last = len(self.passes) - phase
        self.pattern = tuple(self.passes[last - period : last]) if last >= period else ()
        self._odd = None

    @property
    def begins_with_a_step(self) -> bool:
        """Whether the first pass that is remembered is of the kind with which steps begin."""
        return self.passes[:1] == list(self.pattern[:1])

    def is_odd(self, period: int, phase: int) -> bool:
        """Returns whether the latest pass, or an earlier one, is not that of the pattern.

        Args:
            phase: which pass of a step the latest one was.
        """
        if not self.pattern and phase == period - 1 and len(self.passes) >= period:
            self.pattern = tuple(self.passes[-period:])
        if self._odd is None and self.pattern and self.passes[-1] != self.pattern[phase]:
            self._odd = len(self.passes) - 1
        return self._odd is not None

    @property
    def unresolved(self) -> int:
        """How many passes were seen since one was not that of the pattern; 0 if all of them were."""
        return 0 if self._odd is None else len(self.passes) - self._odd

    def longer_period(self) -> int:
        """Returns how many passes make a step, if these include the one that did not fit; 0 where none do.

        They are more than those of the pattern, or as many of which some have changed; fewer only if these have
        repeated themselves for as long as may be.
        """
        seen = len(self.passes)
        for period in range(1, min(seen // 2, MOST_CYCLES) + 1):
            repeated = seen - self._start_of(period)
            includes = self._odd is not None and seen - repeated <= self._odd
            are_shared = not set(self.pattern).isdisjoint(self.passes[-period:])
            is_longer = period >= max(2, len(self.pattern)) and are_shared
            if repeated >= 2 * period and includes and (is_longer or repeated >= 2 * MOST_CYCLES):
                return period
        return 0

    @property
    def has_others(self) -> bool:
        """Whether passes were seen, at any time, of kinds that the pattern does not have."""
        return not set(range(len(self._kinds))) <= set(self.pattern)

    def values_in(self, period: int) -> int:
        """Returns how many values the latest so many passes have."""
        return sum(len(self._kinds[kind]) for kind in self.passes[-period:])

    def shift(self, phase: int) -> int | None:
        """Returns by how many passes the latest steps came later than was thought; None if they are others.

        Args:
            phase: which pass of a step the latest one was thought to be.
        """
        period = len(self.pattern)
        needed = 2 * (max(period, PATIENCE) if period > 1 else MOST_CYCLES)
        if not period or len(self.passes) < needed:
            return None
        latest = self.passes[-needed:]
        for shift in range(period):
            if all(kind == self.pattern[(phase - shift - age) % period] for age, kind in enumerate(reversed(latest))):
                return shift
        return None

    def ahead_of(self, period: int, phase: int) -> int:
        """Returns by how many passes steps begin too late, if one begins while something is held for its first pass.

        Args:
            phase: how many passes of the step in progress have run.
        """
        last = next((age for age, is_last in enumerate(reversed(self._is_last)) if is_last), phase)
        is_whole = phase < len(self._is_last) and self._is_last[-1 - phase]
        return 0 if is_whole else (last - phase) % period

    def _start_of(self, period: int) -> int:
        """From which pass on all of them come again after so many passes."""
        start = len(self.passes) - period
        while start > 0 and self.passes[start - 1] == self.passes[start - 1 + period]:
            start -= 1
        return start

    def _period_from(self, start: int) -> int:
        """The shortest period of the passes from one of them on, of which two are there; 0 if there is none."""
        seen = len(self.passes)
        for period in range(1, min((seen - start) // 2, MOST_CYCLES) + 1):
            if self._start_of(period) <= start and self._may_be_step(start, period):
                return period
        return 0

    def _may_be_step(self, start: int, period: int) -> bool:
        """Whether so many passes from one on may be a step: else some of what they hold is for others."""
        if self._is_last[start + period - 1] and (not start or self._is_last[start - 1]):
            return True
        if start or not all(self._kinds[kind] for kind in self.passes[:period]):
            return len(self.passes) > MOST_SEEN and not any(self._is_last)
        return True


def _are_alike(one: Set[str], other: Set[str]) -> bool:
    return len(one & other) >= ALIKE * len(one | other)

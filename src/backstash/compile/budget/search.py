"""The values that a graph saves under a budget, and their forms: a greedy search that sees the whole course of memory.

Three moves lower the memory: a saved value is computed again in the backward pass, or a value is rounded, or it is
saved after all, so that others are computed from it. Each move is judged by the bytes above the budget that it takes
away, added up over all operators, for a second that it costs. Moves that turn out to be of no use are taken back at the
end, the dearest first. A search may also begin with everything rounded: what is rounded one by one lowers no peak where
a chain of values would have to be.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from backstash.compile.budget.joint import Joint
from backstash.compile.budget.lifetimes import Estimate, Lifetimes

_LEAST_SHARE = 1 / 2000
"""Saved values below this share of the budget are left as they are."""

_FREE_SECONDS = 1e-6

_NEARLY = 0.7
"""Where values may be rounded, a move is made if it is worth this share of what the next best was worth when it was
looked at last. To look at each again before every move would take several times as long as it takes to compile a graph.
An exact search has fewer moves, and waits for the best."""


class Fate(Enum):
    """What becomes of a value."""

    AGAIN, ROUNDED, SAVED = range(3)

    def __lt__(self, other: Fate) -> bool:
        return bool(self.value < other.value)


Move = tuple[int, Fate]


@dataclass(frozen=True)
class Options:
    """What may be done with the values that torch's partitioner saves, under one setting or another.

    Attributes:
        held: bytes of each of them in its exact form.
        rounded: bytes of those that the policy rounds.
        fixed: those that the program holds anyway.
        inputs: the inputs of the graph that the backward pass may read.
        tests: for comparisons whose outcomes are stored beside a rounded value that value.
        starts: what the partitioner saves under each setting, and what it computes again then.
    """

    held: Mapping[int, int]
    rounded: Mapping[int, int] = field(default_factory=dict)
    fixed: Collection[int] = frozenset()
    inputs: Collection[int] = frozenset()
    tests: Mapping[int, int] = field(default_factory=dict)
    starts: Sequence[tuple[Collection[int], Collection[int]]] = ()


@dataclass
class SearchResult:
    """What a search has found.

    Attributes:
        saved: bytes of each saved value in the form that was chosen.
        rounded: the values that are rounded.
        estimate: what it leads to.
    """

    saved: dict[int, int]
    rounded: set[int]
    estimate: Estimate


class GraphSearch:
    """A search for the cheapest way to stay below a budget.

    Args:
        budget: bytes at the peak, inputs excluded.
        start: the values that are saved at first.
        is_rounded: whether those of them that may be rounded are.
    """

    def __init__(
        self, joint: Joint, options: Options, budget: int, start: Collection[int], is_rounded: bool = False
    ) -> None:
        self._joint = joint
        self._options = options
        self._budget = budget
        self._lifetimes = Lifetimes(joint, options.rounded, options.tests)
        saved = {number: options.held[number] for number in start}
        rounded = {number for number in start if number in options.rounded} if is_rounded else set[int]()
        rounded.difference_update(options.fixed)
        saved |= {number: options.rounded[number] for number in rounded}
        self._current = SearchResult(saved, rounded, self._lifetimes.estimate(saved))
        self._start = frozenset(start)
        self._always = self._current.estimate.again
        self._reachable = self._found_again()

    def run(self) -> SearchResult:
        """The values to save: below the budget if that was found, else with the lowest peak that was found."""
        done: list[Move] = [(number, Fate.ROUNDED) for number in self._current.rounded]
        best, count = self._current, len(done)
        while self._current.estimate.peak > self._budget:
            before = len(done)
            for move in self._moves():
                done.append(move)
                if self._current.estimate.peak < best.estimate.peak:
                    best, count = self._current, len(done)
            if len(done) == before:
                break
        self._current = best
        return self._without_useless(done[:count])

    def _moves(self) -> Iterator[Move]:
        """Makes the best move, as long as one lowers the memory above the budget."""
        waiting = [(-float("inf"), move) for move in self._possible()]
        heapq.heapify(waiting)
        nearly = _NEARLY if self._options.rounded else 1.0
        while waiting and self._current.estimate.peak > self._budget:
            _, move = heapq.heappop(waiting)
            found = self._after(move)
            if found is None:
                continue
            score = self._score(found)
            if score <= 0:
                continue  # it may be of use when other moves have been made: the next round tries it again
            if waiting and -score > waiting[0][0] * nearly:
                heapq.heappush(waiting, (-score, move))
                continue
            self._current = found
            yield move

    def _possible(self) -> Iterator[Move]:
        least = self._budget * _LEAST_SHARE
        for number, held in self._options.held.items():
            if held < least or number in self._options.fixed:
                continue
            if number not in self._current.saved:
                yield number, Fate.SAVED
            elif number in self._reachable:
                yield number, Fate.AGAIN
            if number in self._options.rounded and number not in self._current.rounded:
                yield number, Fate.ROUNDED

    def _after(self, move: Move) -> SearchResult | None:
        """What a move leads to; None if it cannot be made any more."""
        number, form = move
        saved, rounded = dict(self._current.saved), set(self._current.rounded)
        if form is Fate.ROUNDED:
            if number in rounded:
                return None
            saved[number] = self._options.rounded[number]
            rounded.add(number)
        elif (number in saved) == (form is Fate.SAVED):
            return None
        elif form is Fate.SAVED:
            saved[number] = self._options.held[number]
        else:
            del saved[number]
            rounded.discard(number)
        return self._of(saved, rounded)

    def _of(self, saved: dict[int, int], rounded: set[int]) -> SearchResult | None:
        found = SearchResult(saved, rounded, self._lifetimes.estimate(saved))
        # A value that is computed from a rounded one would have an error that nobody has looked at.
        again = found.estimate.again
        if rounded and self._sources(found.estimate, again - self._always) & rounded:
            return None
        unseen = rounded - self._start
        for saved_there, again_there in self._options.starts if unseen else ():
            unseen -= set(saved_there) - self._sources(found.estimate, again.difference(again_there))
        return None if unseen else found

    def _sources(self, estimate: Estimate, again: Collection[int]) -> set[int]:
        """The saved values from which values are computed again."""
        found: set[int] = set()
        seen: set[int] = set()
        waiting = list(again)
        while waiting:
            for read in self._joint.reads[waiting.pop()]:
                if read in estimate.saved:
                    found.add(read)
                elif read not in seen:
                    seen.add(read)
                    waiting.append(read)
        return found

    def _score(self, found: SearchResult) -> float:
        before, after = self._current.estimate, found.estimate
        gained = before.above(self._budget) - after.above(self._budget)
        return gained / max(after.seconds - before.seconds, _FREE_SECONDS)

    def _without_useless(self, done: list[Move]) -> SearchResult:
        """Takes moves back that are not needed to stay as low."""
        limit = max(self._budget, self._current.estimate.peak)
        changed = {number for number, form in done if form is not Fate.SAVED}
        for number in sorted(changed, key=lambda number: -self._joint.seconds[number]):
            saved, rounded = dict(self._current.saved), set(self._current.rounded)
            saved[number] = self._options.held[number]
            rounded.discard(number)
            found = self._of(saved, rounded)
            if found is None or found.estimate.peak > limit:
                continue
            if found.estimate.seconds <= self._current.estimate.seconds:
                self._current = found
        return self._current

    def _found_again(self) -> set[int]:
        """The values that can be computed again from inputs that may be read, and from what is saved in any case."""
        joint, options = self._joint, self._options
        good: list[bool] = []
        found: set[int] = set()
        for number, reads in enumerate(joint.reads):
            if joint.is_input[number]:
                good.append(number in options.inputs)
                continue
            again = not joint.must_be_saved(number) and not joint.is_gradient[number] and all(good[n] for n in reads)
            if again:
                found.add(number)
            is_saved = number in options.held or (joint.must_be_saved(number) and joint.nbytes[number] > 0)
            good.append(again or is_saved)
        return found

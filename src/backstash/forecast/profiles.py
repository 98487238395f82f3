"""The profile of a traced step on a card: what a planner has to know, without a step that has run there.

The values are those that autograd alone holds (Note: [steps of a trace] in tracing.py). Their choices are those whose
bytes do not depend on numbers: bits in the place of a sign, narrow indices, to move a value, and to make it again from
the operations that made it. Codecs whose size depends on the numbers, such as zvc, are left out, because no number is
known.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from backstash.forecast.costs import Clock, Work
from backstash.forecast.tracing import SavedUse, StepTrace, Storage, TracedOperation, TracedSteps
from backstash.planning.measure.link import Link, Speed
from backstash.planning.measure.moving import moved
from backstash.planning.measure.survey import Movable, SurveyedValue
from backstash.planning.measure.timeline import Timeline
from backstash.planning.model.problem import Choice, PlannedValue, Position, StepProfile
from backstash.saved import MIN_NBYTES, Need, SavedTensor

PART = 1 << 12
"""Values of less than this part of the peak, one in so many, are kept: there are many, and they hardly count."""

LONGEST = 48
"""Operations of the longest recipe."""

LATENCY = 20e-6
"""Seconds until a transfer to the host's memory has begun."""

HIDDEN = 0.9
"""The share of a transfer that is hidden while something is computed."""


@dataclass(frozen=True, slots=True)
class Remake:
    """How a value is made again.

    Attributes:
        operations: numbers of the operations, in their order.
        parents: the values that they read.
        workspace_nbytes: the most bytes of what is made on the way, beside the value itself.
    """

    operations: tuple[int, ...]
    parents: frozenset[Storage]
    workspace_nbytes: int


class TracedValues:
    """The values of a traced step, and how each could be held. They are the same on every card.

    Args:
        step: the step of which autograd holds nothing.

    Attributes:
        uses: by memory, the reads of the values that autograd alone holds from some operation on.
    """

    def __init__(self, step: StepTrace) -> None:
        self.step = step
        uses: dict[Storage, list[SavedUse]] = defaultdict(list)
        for use in step.uses:
            uses[use.storage].append(use)
        first_backward = next((n for n, each in enumerate(step.operations) if each.is_backward), 0)
        self.first_backward = first_backward
        self._of_node: dict[int, list[int]] = defaultdict(list)
        for number, operation in enumerate(step.operations):
            if operation.node >= 0:
                self._of_node[operation.node].append(number)
        self.uses = {
            storage: found
            for storage, found in uses.items()
            if step.died.get(storage, math.inf) <= min(use.at for use in found) and _need(found) is not Need.SHAPE
        }
        self._writers: dict[Storage, list[int]] = defaultdict(list)
        for number, operation in enumerate(step.operations[:first_backward]):
            for storage in operation.writes:
                self._writers[storage].append(number)
        self.remakes = {storage: found for storage in self.uses if (found := self._remake(storage)) is not None}

    def reads(self, storage: Storage) -> tuple[int, ...]:
        """Returns where a value is read: of each node that reads it, the operation in which most is alive."""
        return tuple(sorted({self._read_at(use) for use in self.uses[storage]}))

    def _read_at(self, use: SavedUse) -> int:
        own = self._of_node.get(use.node) or [min(use.at, len(self.step.operations) - 1)]
        return max(own, key=lambda number: self.step.operations[number].most_nbytes)

    def born(self, storage: Storage) -> int:
        """Returns the operation from which on autograd alone holds a value."""
        return min(self.step.died[storage], self.reads(storage)[0])

    def _remake(self, target: Storage) -> Remake | None:
        """Returns how a value is made again from other values and from what is held anyway; None where it cannot be."""
        step, first_read = self.step, self.reads(target)[0]
        needed: set[int] = set()
        parents: set[Storage] = set()
        waiting = [(target, len(step.operations))]
        while waiting:
            storage, until = waiting.pop()
            writers = [number for number in self._writers.get(storage, ()) if number < until]
            if not writers:
                return None
            for number in writers:
                if number in needed:
                    continue
                operation = step.operations[number]
                if operation.work.kernels and not operation.is_repeatable:
                    return None
                needed.add(number)
                if len(needed) > LONGEST:
                    return None
                for source in operation.reads:
                    if source == storage:
                        continue
                    is_final = not any(later > number for later in self._writers.get(source, ()))
                    if is_final and source in self.uses and source != target:
                        parents.add(source)
                    elif not (is_final and step.died.get(source, math.inf) > first_read):
                        waiting.append((source, number))
        order = tuple(sorted(needed))
        return Remake(order, frozenset(parents), self._workspace(order, target))

    def _workspace(self, order: Sequence[int], target: Storage) -> int:
        """Returns the most bytes that operations hold beside the target, if each result goes when nothing reads it."""
        operations = [self.step.operations[number] for number in order]
        last = {storage: at for at, each in enumerate(operations) for storage in (*each.reads, *each.writes)}
        made: set[Storage] = set()
        alive = most = 0
        for at, each in enumerate(operations):
            for storage in each.writes:
                if storage not in made and storage != target:
                    made.add(storage)
                    alive += self.step.nbytes.get(storage, 0)
            most = max(most, alive)
            for storage in {*each.reads, *each.writes}:
                if storage in made and last[storage] == at:
                    alive -= self.step.nbytes.get(storage, 0)
                    made.discard(storage)
        return most


def _need(uses: Sequence[SavedUse]) -> Need:
    order = (Need.VALUE, Need.INDEX, Need.SIGN, Need.SHAPE)
    return min((use.need for use in uses), key=order.index)


def profile_on(traced: TracedSteps, values: TracedValues, clock: Clock) -> StepProfile:
    """Returns the profile of a step on a card.

    Args:
        values: those of the step of which autograd holds nothing.
    """
    step = values.step
    seconds = [clock.on_card(each.work) for each in step.operations]
    most = max(MIN_NBYTES, traced.plain.peak_nbytes // PART)
    index = {each: number for number, each in enumerate(s for s in values.uses if step.nbytes[s] >= most)}
    line = _Line(values, index, seconds)
    found = {storage: _surveyed(values, storage, number, clock) for storage, number in index.items()}
    moves = _moves(line, found, clock)
    planned = []
    for storage, value in found.items():
        facts = value.facts
        choices = [*value.choices, *_remade(values, storage, index, seconds), *moves.get(facts.key, ())]
        reads, born = line.reads(storage), line.born(storage)
        keys = facts.key, facts.fqn, facts.op, str(facts.spec)
        planned.append(PlannedValue(*keys, value.nbytes, born, reads, tuple(choices)))
    host = sum(clock.on_host(each.work) for each in step.operations) + len(step.uses) * clock.rates.hook_seconds
    return StepProfile(
        line.positions,
        tuple(line.base_nbytes),
        tuple(planned),
        traced.plain.peak_nbytes - step.before_nbytes,
        step.before_nbytes,
        machine=clock.card.words,
        device="cuda",
        session_seconds=max(0.0, host - sum(seconds)),
        tries=("lossless", "recompute", "offload"),
    )


class _Line:
    """The operations of a step in as few positions as its values can tell apart."""

    def __init__(self, values: TracedValues, planned: Collection[Storage], seconds: Sequence[float]) -> None:
        step, self._values = values.step, values
        count = len(step.operations)
        base = [each.most_nbytes - step.before_nbytes for each in step.operations]
        held = [0] * (count + 1)
        for storage in values.uses:
            if storage not in planned:
                held[values.born(storage)] += step.nbytes[storage]
                held[values.reads(storage)[-1] + 1] -= step.nbytes[storage]
        cuts = {0, values.first_backward}
        for storage in planned:
            cuts.add(values.born(storage))
            for read in values.reads(storage):
                cuts |= {read, read + 1}
        self._starts = sorted(cut for cut in cuts if cut < count)
        base = [own + more for own, more in zip(base, accumulate(held), strict=False)]
        self.base_nbytes, self.seconds = [], []
        positions = []
        for start, end in zip(self._starts, [*self._starts[1:], count], strict=True):
            first = max(range(start, end), key=lambda number: seconds[number])
            operation = step.operations[first]
            self.base_nbytes.append(max(base[start:end]))
            self.seconds.append(sum(seconds[start:end]))
            is_backward = start >= values.first_backward
            positions.append(Position(operation.name, operation.module, is_backward, self.seconds[-1]))
        self.positions = tuple(positions)
        self.first_backward = self._at(values.first_backward)

    def born(self, storage: Storage) -> int:
        """Returns the position from which on autograd alone holds a value."""
        return self._at(self._values.born(storage))

    def reads(self, storage: Storage) -> tuple[int, ...]:
        """Returns the positions in which a value is read."""
        return tuple(self._at(read) for read in self._values.reads(storage))

    def _at(self, operation: int) -> int:
        return bisect_right(self._starts, operation) - 1


def _surveyed(values: TracedValues, storage: Storage, number: int, clock: Clock) -> SurveyedValue:
    uses = values.uses[storage]
    use = next(each for each in uses if each.need is _need(uses))
    nbytes = values.step.nbytes[storage]
    key = f"{use.module}/{use.op}#{number}:{use.role}"
    choices = [Choice.keep(nbytes)]
    numel = nbytes // max(1, use.spec.nbytes // max(1, use.spec.numel))
    if use.need in (Need.SIGN, Need.INDEX):
        name, held = ("bitmask", numel // 8) if use.need is Need.SIGN else ("narrow", numel // 2)
        decoded = numel if use.need is Need.SIGN else nbytes  # a mask is decoded to a byte per element
        once = clock.on_card(Work(nbytes + held, kernels=1))
        again = clock.on_card(Work(decoded + held, kernels=1))
        choices.append(Choice(name, "encode", held, 0, decoded, once, again, reason="fewer bits per element"))
    facts = SavedTensor(key, use.op, use.role, use.module, use.spec, use.need)
    return SurveyedValue(facts, nbytes, choices, movable=(Movable(nbytes, nbytes),))


def _remade(
    values: TracedValues, storage: Storage, index: dict[Storage, int], seconds: Sequence[float]
) -> list[Choice]:
    found = values.remakes.get(storage)
    if found is None:
        return []
    operations: list[TracedOperation] = [values.step.operations[number] for number in found.operations]
    names = dict.fromkeys(each.name.strip("_") for each in operations if each.work.kernels)
    parents = tuple(sorted(index[parent] for parent in found.parents if parent in index))
    time = sum(seconds[number] for number in found.operations)
    kind = Choice("recompute", "recompute", 0, parents=parents, workspace_nbytes=found.workspace_nbytes, seconds=time)
    return [replace(kind, reason=", ".join(names))]


def _moves(line: _Line, found: dict[Storage, SurveyedValue], clock: Clock) -> dict[str, tuple[Choice, ...]]:
    """Returns the choices to move values to the host's memory."""
    way = Speed(LATENCY, clock.moved(1), HIDDEN)
    link = Link("host", "", Speed(0.0, 0.0, 0.0), way, way)
    record = Timeline([], "cuda")
    for storage, value in found.items():
        record.born[value.facts.key] = line.born(storage)
        record.reads[value.facts.key] = list(line.reads(storage))
    return moved(link, {value.facts.key: value for value in found.values()}, record, line.seconds, line.first_backward)

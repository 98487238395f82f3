"""The profiler's record of a step by position: what was alive in each, what was let go of there, and what was read.

Note: [positions]
    A position is an operation of the program, or the moment between two operations at which values are let go of. Such
    a moment is a position of its own, because a value that is encoded there lies beside its planes, and both lie beside
    nothing of the next operation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from backstash.planning.measure.events import NODE, PREFIX, walk
from backstash.planning.model.allocator import Allocation
from backstash.torch_internals import profiler_event

MOST_MOMENTS = 16
"""Of a position with more moments, the most bytes alone are kept."""


@dataclass
class At:
    """A position.

    Attributes:
        name: of the operation; empty for a moment between two operations.
        seconds: its time under the profiler.
        moments: the bytes alive each time when they had risen and were about to fall, in their order, at least one; of
            more than MOST_MOMENTS the most alone.
    """

    name: str
    is_backward: bool
    seconds: float
    most_nbytes: int
    moments: list[int] = field(default_factory=list)
    _last: int = 0
    _is_rising: bool = True
    _has_many: bool = False

    def __post_init__(self) -> None:
        self.moments = [self.most_nbytes]
        self._last = self.most_nbytes

    def note(self, nbytes: int) -> None:
        """From now on, so many bytes are alive."""
        self.most_nbytes = max(self.most_nbytes, nbytes)
        is_rising = nbytes > self._last
        if self._has_many:
            self.moments[0] = self.most_nbytes
        elif is_rising and self._is_rising:
            self.moments[-1] = nbytes
        elif is_rising:
            self.moments.append(nbytes)
            if len(self.moments) > MOST_MOMENTS:
                self.moments, self._has_many = [self.most_nbytes], True
        self._last, self._is_rising = nbytes, is_rising


@dataclass
class Trial:
    """What a trial has allocated, which is no part of the step.

    Attributes:
        before: bytes that were alive when it began.
        most: the most bytes that were alive in it.
    """

    before: int
    most: int = 0


class Alive:
    """What is alive of the memory that was allocated since the record began.

    Note: [freed from before the record]
        A step may free memory from before the record. On CPU the profiler does not report it. An accelerator's own
        count has it, and should: the gradients of the step before are freed in each step that begins with
        ``zero_grad()``. But Python's garbage collector may run in the recorded step, and free what other code has left
        behind, which no step of the training frees once more: with 64 MiB of a model that was gone, a small network's
        step seemed to take less than nothing, and its plan was refused. So the record says when the collector runs
        (MemoryProfiler), and what it frees from before the record does not count.

    Attributes:
        nbytes: bytes of it, above those at the step's beginning.
        gradients: by their addresses, the sizes of the gradients of the step before that are yet to be freed.
        freed_nbytes: bytes of these gradients that were freed.
        is_collecting: whether Python's garbage collector runs.
    """

    def __init__(self, device: str) -> None:
        self.nbytes = self.freed_nbytes = 0
        self.gradients: dict[int, int] = {}
        self.is_collecting = False
        self._sizes: dict[int, int] = {}  # by address
        self._of_backward: set[int] = set()
        self._given = None if device == "cpu" else Given()

    def change(self, facts: Any, is_backward: bool) -> None:
        """An allocation (``alloc_size > 0``), in the backward pass or elsewhere, or a release."""
        before = self._sizes.pop(facts.ptr, 0)
        self._of_backward.discard(facts.ptr)
        self.freed_nbytes += self.gradients.pop(facts.ptr, 0)
        if facts.alloc_size > 0:  # what was there before was freed unseen
            self._sizes[facts.ptr] = facts.alloc_size
            if is_backward:
                self._of_backward.add(facts.ptr)
        change = max(0, facts.alloc_size) - before
        if self._given is not None:
            change = self._given.change(facts)
            if self.is_collecting and facts.alloc_size < 0 and not before:  # Note: [freed from before the record]
                change -= facts.alloc_size
        self.nbytes += change

    def end_step(self) -> None:
        """The backward pass of the step before has ended."""
        self.gradients = {address: self._sizes[address] for address in self._of_backward}
        self.nbytes = self.freed_nbytes = 0

    def begin_step(self) -> None:
        """The step begins: bytes count from here, and gradients that were freed already are allocated anew in it."""
        self.nbytes = -self.freed_nbytes


class Given:
    """What CUDA's allocator has given out, by its own count, which knows what every thread has freed."""

    def __init__(self) -> None:
        self._totals: dict[int, int] = {}  # by the numbers of the devices

    def change(self, facts: Any) -> int:
        """By how many bytes the count has changed since the last event of the same device."""
        before = self._totals.get(facts.device.index, facts.total_allocated - facts.alloc_size)
        self._totals[facts.device.index] = facts.total_allocated
        return int(facts.total_allocated - before)


@dataclass
class Timeline:
    """The record of one step.

    Attributes:
        born: by the key of a value, the position from which on only autograd holds it.
        reads: by the key of a value, the positions that read it.
        trials: by their numbers, what the trials of a survey have allocated.
        changes: the allocations and releases of the step, in their order, for a model of an allocator.
        plain: the plain step that was recorded behind it; None where none was, or where other nodes run in its backward
            pass.

    Note: [where a step begins]
        The profiler does not report that memory is freed which was allocated before it was started. In a program's own
        loop the gradients of the step before are freed in a step. So the memory of the step before is recorded as well,
        up to the note "step", with which its backward pass ends; the note "pass" tells where a backward pass begins and
        ends. What lies between that and the first operation of the forward pass is of neither step: the program drops
        results, the optimizer steps, a batch is loaded. Autograd may record operations there, as of a batch that is
        normalised, or of gradients that are kept. So where the program enters a Session for the forward pass, the note
        "forward" tells that, and the first operation is the one behind it. Bytes count from that operation on, above
        what is held there and the gradients that were freed before it. So they may be below 0 until backward has
        allocated new gradients.
        If that step is not of the kind that is asked for, another note "step" begins the next one. The note "plain"
        begins a plain step behind the last of them, and the note "over" ends it, where the profiler can only be stopped
        later.
    """

    events: list[Any]
    device: str
    positions: list[At] = field(default_factory=lambda: [At("start", False, 0.0, 0)])
    born: dict[str, int] = field(default_factory=dict)
    reads: dict[str, list[int]] = field(default_factory=dict)
    trials: dict[int, Trial] = field(default_factory=dict)
    changes: list[Allocation] = field(default_factory=list)
    plain: Timeline | None = None

    @property
    def peak_nbytes(self) -> int:
        """The most bytes alive in the step."""
        return max(position.most_nbytes for position in self.positions)

    @property
    def nodes(self) -> list[str]:
        """The names of the autograd nodes that have run, in their order."""
        return [position.name for position in self.positions if position.is_backward and position.name]

    def __post_init__(self) -> None:
        for _ in self.read(self.events):
            pass

    def read(self, events: list[Any]) -> Iterator[None]:
        """Reads a record, for a timeline that was made of no events, a little at a time."""
        ordered: list[tuple[int, int, Any, bool]] = []  # by time; of events at one time, the outer one first
        for event, is_operation in walk(events):
            ordered.append((event.start_time_ns, len(ordered), event, is_operation))
            yield
        ordered.sort()
        yield from self._follow(iter(ordered), Alive(self.device))

    def _follow(
        self, ordered: Iterator[tuple[int, int, Any, bool]], alive: Alive, is_between: bool = False
    ) -> Iterator[None]:
        trial: Trial | None = None
        for _, _, event, is_operation in ordered:
            yield
            if event.tag == profiler_event.Allocation:
                facts = event.extra_fields
                if facts.device.type != self.device or not facts.alloc_size:
                    continue
                alive.change(facts, self.positions[-1].is_backward)
                if trial is None:
                    self.changes.append(Allocation(facts.ptr, max(0, facts.alloc_size)))
                if trial is not None:
                    trial.most = max(trial.most, alive.nbytes)
                else:
                    self.positions[-1].note(alive.nbytes)
            elif event.name.startswith(PREFIX):
                kind, _, text = event.name.removeprefix(PREFIX).partition(" ")
                noted = json.loads(text)
                if kind == "trial":
                    trial = self.trials[noted["number"]] = Trial(alive.nbytes, alive.nbytes)
                elif kind == "tried":
                    trial = None
                elif kind == "collection":
                    alive.is_collecting = noted["begins"]
                elif kind == "step":  # what came before was recorded to know what is freed in it
                    alive.end_step()
                    self._begin()
                    is_between = True
                elif kind == "forward":  # what has run since then is no part of the step
                    is_between = True
                elif kind == "pass":  # of the step before, of which no operators are recorded
                    self.positions[-1].is_backward = noted["is_backward"]
                elif kind == "plain":
                    alive.end_step()
                    plain = Timeline([], self.device)
                    yield from plain._follow(ordered, alive, is_between=True)
                    self.plain = plain if plain.nodes == self.nodes else None
                    break
                elif kind == "over":  # what comes now is the optimizer's
                    break
                elif kind == "born":
                    if self.positions[-1].name != "":
                        self.positions.append(At("", self.positions[-1].is_backward, 0.0, alive.nbytes))
                    self.born[noted["key"]] = len(self.positions) - 1
                elif kind == "read":
                    self.reads.setdefault(noted["key"], []).append(len(self.positions) - 1)
            elif is_operation and trial is None:
                if is_between:
                    is_between = False
                    alive.begin_step()
                    self._begin()
                name = event.name.removeprefix(NODE)
                is_backward = event.name.startswith(NODE)
                self.positions.append(At(name, is_backward, event.duration_time_ns / 1e9, alive.nbytes))

    def _begin(self) -> None:
        self.positions = [At("start", False, 0.0, 0)]
        self.born.clear()
        self.reads.clear()
        self.trials.clear()
        self.changes.clear()

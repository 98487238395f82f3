"""Reads the profiler's record of a step: allocations, operations, and the notes of a Session between them.

Note: [freed from before]
    The profiler reports a release of memory that was allocated before its start, but not where that memory came from.
    A trace therefore does not hold such memory.

Note: [events without an operation]
    An event that happens in no operation, as most releases of a forward pass do, is an outermost event. Of these the
    profiler reports only the CPU's. So everything happens in a scope that lasts as long as the record.

Note: [one profiler]
    There can only be one profiler at a time. Where one runs already, torch refuses to start the program's own; where
    the program's own is ready to start, as in the warm-up of its schedule, another one that starts and stops in between
    makes torch crash. So no record begins while the program has a profiler, and a record ends when the program gets one
    ready. Torch does not tell of a profiler that is ready, so the functions by which profilers get ready, start and
    stop are replaced by ones that do. A record ends before the process forks, too: the profiler's threads are not there
    in the child, which would wait for them forever when it stops the profiler.

Note: [operators alone]
    Annotations of a program (``record_function``), and those of torch's asynchronous communication, may begin in one
    record and end after it. Torch then writes to memory that the record has freed. So a record has no annotations, and
    what backstash notes in it looks like operators (see torch_internals.starting_profiler).

Note: [interrupted profiler]
    A signal's handler may raise between any two instructions of Python, also while a profiler starts or stops. Torch's
    own class then does not know whether its profiler runs, so that it runs on, or is stopped twice. So torch's
    functions are called here. Before the first of them it is noted that the profiler may run, and what stops it asks
    torch whether it does, and can be called again.

Note: [end of a thread]
    A program may end while a step is recorded, and so may the thread that trains. If nobody stops the profiler then,
    torch crashes when the process ends. So a thread that ends stops it, and the main one does when the program ends.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Self

import torch
from torch import Tensor

from backstash.codecs.base import Encoded
from backstash.planning.model.trace import Buffer, Decode, Op, Role, Trace
from backstash.redeem.accumulation import LINEAR
from backstash.remake.recipes import Recipe
from backstash.stash.value import Value
from backstash.torch_internals import (
    hide_from_dynamo,
    profiler_event,
    profiler_runs,
    record_operation,
    record_scope,
    replace_profilers_calls,
    without_native_warnings,
)

PREFIX = "backstash "
NODE = "autograd::engine::evaluate_function: "
SCOPE = "backstash::record"

_NO_OPERATION = ("aten::detach", "aten::_has_compatible_shallow_copy_type")
"""Functions that a Session calls to hold a tensor, or its version alone."""

_HALVED = ("ConvolutionBackward0", *LINEAR)
"""Nodes that compute the weight's gradient, release their input, and compute the input's gradient."""

Event = Any
"""An event of the profiler's record. Its class is private to torch, and the type of ``extra_fields`` varies."""


class Others:
    """The program's own profilers (Note: [one profiler]).

    Attributes:
        is_busy: whether one of them runs, or is ready to.
        give_way: called before one of them gets ready or starts, on its thread, and before the process forks.
        functions: those of torch that get a profiler ready, start it and stop it, by these words: ``"prepare"``,
            ``"enable"`` and ``"disable"``.
    """

    def __init__(self) -> None:
        self.is_busy = False
        self.give_way: Callable[[], None] = lambda: None
        self.functions: dict[str, Callable[..., Any]] = {}
        replace_profilers_calls(self._heard)
        os.register_at_fork(before=lambda: self.give_way())

    def _heard(self, event: str, function: Callable[..., Any]) -> Callable[..., Any]:
        self.functions[event] = function

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if event != "disable":
                self.give_way()
            result = function(*args, **kwargs)
            self.is_busy = event != "disable"
            return result

        return call


others = Others()


class Notes:
    """A watcher that writes what a Session tells it into the profiler's record, between the allocations."""

    def storing(self, encoded: Encoded) -> None:
        """Notes the planes that a store is about to hold."""
        note("storing", planes=_addresses(encoded), codec=encoded.codec)

    def fetched(self, encoded: Encoded) -> None:
        """Notes the planes that are about to be read."""
        note("fetched", planes=_addresses(encoded))

    def taken(self, memory: Tensor) -> None:
        """Notes the memory that a value is about to be decoded or remade into."""
        note("taken", address=_address(memory), nbytes=memory.numel() * memory.itemsize)

    def released(self, memory: Tensor) -> None:
        """Notes the memory whose reader is done with it."""
        note("released", address=_address(memory))

    def decided(self, value: Value, whole: Tensor, find_recipe: Callable[[], Recipe | str]) -> None:
        """Notes nothing."""

    def read(self, tensor: Tensor, is_stored: bool, key: str) -> None:
        """Notes the memory that autograd reads, unless the tensor has none of its own."""
        if tensor.layout is torch.strided and type(tensor) is Tensor:
            note("read", address=_address(tensor), is_stored=is_stored)

    def dropped(self, keys: Iterable[str]) -> None:
        """Notes nothing."""


class Thread:
    """A thread of the program. An identifier of threads may be that of an earlier one; this object is not.

    Attributes:
        running: the profiler that was started on it.
    """

    running: MemoryProfiler | None = None

    @classmethod
    def current(cls) -> Thread:
        """The thread that runs this."""
        found: Thread | None = getattr(_own, "thread", None)
        if found is None:
            found = _own.thread = cls()
        return found

    def stop(self) -> None:
        """Stops the profiler, if there is one (Note: [end of a thread])."""
        if self.running is not None:
            self.running.stop()

    __del__ = stop  # what a thread has for itself is deleted on that thread


_own = threading.local()
atexit.register(lambda: Thread.current().stop())


class MemoryProfiler:
    """A profiler of every allocation and release, which prints nothing (Note: [interrupted profiler]).

    It does without that of ``torch.profiler``, which imports Inductor when it starts: that takes 100 times as long as a
    small step.

    The record also says when Python's garbage collector runs (Note: [freed from before the record] in timeline.py).

    Attributes:
        thread: the one on which it was made, and is started; None once that has ended.
        results: what it has recorded; None until it was stopped.
    """

    def __init__(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler prints two lines each time
        asked = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)  # which is never started
        self._asked = asked.config(), asked.kineto_activities  # type: ignore[no-untyped-call]  # torch has no types here
        self._quiet = ExitStack()
        self._scope = record_operation(SCOPE)  # Note: [events without an operation]
        self._may_run = False
        self.thread = weakref.ref(Thread.current())
        self.results: Any = None

    def __enter__(self) -> Self:
        self._may_run = True
        Thread.current().running = self
        try:
            self._quiet.enter_context(without_native_warnings())
            gc.callbacks.append(_note_collection)
            self._quiet.callback(gc.callbacks.remove, _note_collection)
            _get_ready(*self._asked)
            others.functions["enable"](*self._asked, {record_scope.FUNCTION})  # Note: [operators alone]
            self._scope.__enter__()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops it if it runs, or has begun to. May be called again, also if the last call was interrupted."""
        if not self._may_run:
            return
        with suppress(RuntimeError):  # the scope has not begun, or has ended
            self._scope.__exit__(None, None, None)
        if profiler_runs():
            self.results = others.functions["disable"]()
        self.let_go()
        self._may_run = False
        thread = self.thread()
        if thread is not None and thread.running is self:
            thread.running = None

    def let_go(self) -> None:
        """Undoes what starting has changed for the whole process. The thread on which it was started goes on."""
        self._quiet.close()


def _get_ready(*asked: Any) -> None:
    """Gets a profiler ready, or leaves it so: of torch 2.11 it is an error where an interrupted one has been."""
    try:
        others.functions["prepare"](*asked)
    except RuntimeError as error:
        if "not running" not in str(error):
            raise


def _note_collection(phase: str, info: dict[str, int]) -> None:
    """Is told by Python's garbage collector that it begins, or has ended."""
    note("collection", begins=phase == "start")


hide_from_dynamo(_note_collection, and_all_below=True)


def memory_profiler() -> MemoryProfiler:
    """A profiler of every allocation and release, which has not been started yet."""
    return MemoryProfiler()


def roots_of(profiled: MemoryProfiler) -> list[Event]:
    """The outermost events of what a profiler has recorded; none if it was stopped before it has recorded anything."""
    roots: list[Event] = [] if profiled.results is None else profiled.results.experimental_event_tree()
    return roots


def note(event: str, **facts: Any) -> None:
    """Writes a line into the profiler's record."""
    with record_operation(f"{PREFIX}{event} {json.dumps(facts)}"):
        pass


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _addresses(encoded: Encoded) -> list[int]:
    return [_address(plane) for plane in encoded.planes.values()]


@dataclass(eq=False)
class RecordedBuffer:
    """A buffer while the record is read.

    Attributes:
        name: the operation that it was allocated in or after.
        start: the tick at which it was allocated.
        began_in: the number of the operation in which it was allocated.
        end: the tick at which it was released; None while it is alive.
        ended_in: the number of the operation in which it was released; None while it is alive.
        role: its role, if a note of the Session tells it.
    """

    name: str
    address: int
    nbytes: int
    start: int
    began_in: int
    end: int | None = None
    ended_in: int | None = None
    role: Role | None = None

    def role_in(self, backward: int) -> Role:
        """Its role, where the backward pass begins at tick ``backward``."""
        if self.role is not None:
            return self.role
        if self.began_in == self.ended_in:
            return "workspace"
        if self.start < backward:
            return "immediate" if self.end is not None and self.end < backward else "stashed"
        return "gradient" if self.end is None else "immediate"


@dataclass(eq=False)
class Decoding:
    """A decoding or remaking while the record is read.

    Attributes:
        name: the node that asked for the value.
        start: the tick at which the value is complete.
        end: the tick at which its last reader has run.
        memory: the memory that it was decoded into; None if its planes were read as they are.
        planes: the memory of the planes that it was decoded from.
    """

    name: str
    nbytes: int
    start: int
    end: int
    memory: RecordedBuffer | None
    planes: list[RecordedBuffer] = field(default_factory=list)


class StepRecord:
    """Everything that the profiler's record says of one step, in the order of time.

    Args:
        device: the type of device whose memory is traced, ``"cpu"`` or that of the accelerator, such as ``"cuda"``.

    Attributes:
        memory: all memory that was allocated in the step.
        backward: the tick at which the backward pass begins; None if no autograd node ran.
        ticks: number of allocations and releases so far.
    """

    def __init__(self, roots: list[Event], device: str) -> None:
        self.memory: list[RecordedBuffer] = []
        self.ops: list[Op] = []
        self.decodings: list[Decoding] = []
        self.backward: int | None = None
        self.ticks = 0
        self._device = device
        self._alive: dict[int, RecordedBuffer] = {}  # by address
        self._latest: dict[RecordedBuffer, Decoding] = {}  # what each memory was filled with last
        self._reading: set[Decoding] = set()  # what the running node reads
        self._awaits_planes = False  # whether memory was taken whose planes have not been fetched yet
        self._doing = ""  # the operation that runs, or ran last
        self._node_ends = 0  # nanoseconds
        notes: dict[str, Callable[[dict[str, Any]], None]] = {
            "storing": self._store,
            "fetched": self._fetch,
            "taken": self._take,
            "released": self._release,
            "read": self._read,
            "collection": lambda facts: None,
        }
        for event, is_operation in sorted(walk(roots), key=lambda pair: pair[0].start_time_ns):
            if event.start_time_ns > self._node_ends:
                self._end_readings()
            if event.tag == profiler_event.Allocation:
                self._allocate(event)
            elif event.name.startswith(PREFIX):
                kind, _, facts = event.name.removeprefix(PREFIX).partition(" ")
                notes[kind](json.loads(facts))
            elif is_operation:
                self._begin_operation(event)
        self._end_readings()

    def trace(self, policy: str) -> Trace:
        """The step as a Trace."""
        assert self.backward is not None
        end = max(self.ticks, 1)
        for decoding in reversed(self.decodings):  # memory has the role of the first value that was in it
            if decoding.memory is not None and decoding.memory.role in ("decoded", "recomputed"):
                decoding.memory.role = "decoded" if decoding.planes else "recomputed"
        numbers = {id(memory): number for number, memory in enumerate(self.memory)}
        buffers = tuple(
            Buffer(m.name, m.role_in(self.backward), m.nbytes, m.start, end if m.end is None else m.end)
            for m in self.memory
        )
        decodes = []
        for decoding in self.decodings:
            start, memory = min(decoding.start, end - 1), decoding.memory
            released = end if memory is None or memory.end is None else memory.end
            planes = tuple(numbers[id(plane)] for plane in decoding.planes)
            ended = max(min(decoding.end, released), start + 1)
            decodes.append(Decode(decoding.name, decoding.nbytes, start, ended, planes))
        return Trace(policy, buffers, tuple(self.ops), self.backward, end, tuple(decodes))

    # -- events of the profiler ------------------------------------------------------------------------------------

    def _begin_operation(self, event: Event) -> None:
        self._doing = event.name.removeprefix(NODE)
        self.ops.append(Op(self._doing, self.ticks))
        if event.name.startswith(NODE):
            self._node_ends = event.end_time_ns
            if self.backward is None:
                self.backward = self.ticks

    def _end_readings(self) -> None:
        """Ends the readings of a node that has run, as if the node's last allocation or release had ended them."""
        for decoding in self._reading:
            decoding.end = self.ticks - 1
        self._reading.clear()

    def _allocate(self, event: Event) -> None:
        """Notes an allocation (``alloc_size > 0``) or a release."""
        facts = event.extra_fields
        if facts.device.type != self._device or not facts.alloc_size:
            return
        if facts.alloc_size > 0:
            memory = RecordedBuffer(self._doing, facts.ptr, facts.alloc_size, self.ticks, len(self.ops))
            self._alive[facts.ptr] = memory
            self.memory.append(memory)
        else:
            if _is_in_kernel(event):  # else autograd gives back what the node has read
                self._end_reading(facts.ptr)
            released = self._alive.pop(facts.ptr, None)
            if released is None:  # Note: [freed from before]
                return
            released.end, released.ended_in = self.ticks, len(self.ops)
        self.ticks += 1

    # -- notes of the Session --------------------------------------------------------------------------------------

    def _store(self, facts: dict[str, Any]) -> None:
        for plane in self._at(facts["planes"]):
            plane.role, plane.name = "encoded", f"{facts['codec']} after {plane.name}"

    def _take(self, facts: dict[str, Any]) -> None:
        memory = self._alive.get(facts["address"])
        start = max(self.ticks - 1, self.ops[-1].start if self.ops else 0)  # fresh memory was allocated a tick before
        decoding = Decoding(self._doing, facts["nbytes"], start, start + 1, memory)
        self.decodings.append(decoding)
        self._awaits_planes = True
        self._reading.add(decoding)
        if memory is None:
            return
        memory.role = "decoded"
        before = self._latest.get(memory)
        if before in self._reading:  # its last reader is this very node, and the value before is overwritten now
            self._reading.discard(before)
            before.end = self.ticks
        self._latest[memory] = decoding

    def _fetch(self, facts: dict[str, Any]) -> None:
        if not self._awaits_planes:  # the planes are read as they are
            self.decodings.append(Decoding(self._doing, 0, self.ticks, self.ticks + 1, None))
        planes = self.decodings[-1].planes = self._at(facts["planes"])
        for plane in planes:
            plane.role = plane.role or "encoded"  # planes that another store has brought back have no role yet
        self._awaits_planes = False

    def _read(self, facts: dict[str, Any]) -> None:
        memory = self._alive.get(facts["address"])
        if memory is None:
            return
        remade = facts["is_stored"] and memory not in self._latest  # in memory of its own, or the planes themselves
        if remade and memory.role != "encoded":
            memory.role = "decoded"
            self._latest[memory] = Decoding(self._doing, memory.nbytes, memory.start, self.ticks, memory)
            self.decodings.append(self._latest[memory])
        if memory in self._latest:
            self._reading.add(self._latest[memory])

    def _release(self, facts: dict[str, Any]) -> None:
        self._end_reading(facts["address"])

    def _end_reading(self, address: int) -> None:
        """The running node's kernel is done with the memory at that address, before it makes what comes next."""
        memory = self._alive.get(address)
        decoding = None if memory is None else self._latest.get(memory)
        if decoding is None or decoding not in self._reading:
            return
        self._reading.discard(decoding)
        decoding.end = self.ticks - 1
        if self._doing in _HALVED:
            self.ops.append(Op(f"{self._doing} (input)", self.ticks))

    def _at(self, addresses: list[int]) -> list[RecordedBuffer]:
        """The memory at these addresses that was allocated in the step."""
        return [self._alive[address] for address in addresses if address in self._alive]


def _is_in_kernel(event: Event) -> bool:
    """Whether it happened inside of a kernel, and not in an autograd node beside one."""
    while (event := event.parent) is not None:
        if event.name.startswith("aten::"):
            return True
    return False


def walk(roots: list[Event]) -> Iterator[tuple[Event, bool]]:
    """Yields every event, and whether it is an operation of the program.

    An operation is an autograd node, or an outermost function that autograd records. Calls of the Session between
    operations are none: autograd does not record them, or they compute nothing.
    """
    waiting = [(root, False) for root in reversed(roots)]
    while waiting:
        event, inside = waiting.pop()
        is_operation = False
        if not inside and event.tag == profiler_event.TorchOp:
            of_autograd = event.extra_fields.sequence_number >= 0
            is_function = event.extra_fields.scope == record_scope.FUNCTION and event.name not in _NO_OPERATION
            is_operation = event.name.startswith(NODE) or (of_autograd and is_function)
        yield event, is_operation
        waiting += [(child, inside or is_operation) for child in reversed(event.children)]

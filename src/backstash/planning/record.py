"""The trace of a real step.

torch's profiler tells of every allocation and release with its address. What it cannot tell - which addresses are
planes, which are decoded into, and when they are read - the Session's stores and buffers write into the same record.
They are watched, not replaced: the step does what it does without being recorded.

Note: [freed from before]
    The profiler does not tell of memory from before its start that is released inside, so a trace does not hold it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from backstash.backward.accumulation import LINEAR
from backstash.codecs.base import Encoded
from backstash.errors import MeasureError
from backstash.planning.trace import Buffer, Decode, Op, Role, Trace
from backstash.policies.base import Policy
from backstash.session import MIN_NBYTES, Session
from backstash.stash.buffers import release
from backstash.stores import Store
from backstash.torch_internals import no_torch_function, profiler_event, record_scope

_PUT, _GOT, _TAKEN, _READ, _RELEASED = (f"backstash {what} " for what in ("put", "got", "taken", "read", "released"))
_NODE = "autograd::engine::evaluate_function: "
_NO_OPERATION = ("aten::detach", "aten::_has_compatible_shallow_copy_type")
"""What a Session calls to hold a tensor, or its version alone."""

_HALVED = ("ConvolutionBackward0", *LINEAR)
"""Nodes that make the weight's gradient, let go of their input, and make the input's gradient (backstash.backwards)."""


def record(
    step: Callable[[], object],
    policy: str | Policy | Session | None = None,
    *,
    model: nn.Module | None = None,
    stores: Mapping[str, Store] | None = None,
    min_nbytes: int = MIN_NBYTES,
    warmup: int = 1,
    device: str = "cpu",
) -> Trace:
    """Run ``step`` ``warmup + 1`` times under a policy and return what the last run held.

    Args:
        step: one training step, forward and backward.
        policy: a policy or its name, or a Session, whose report shows from then on what was alive at the peak; None:
            plain PyTorch, without a Session.
        model: its parameters, buffers and the gradients that outlast the step are put in the trace as well.
        stores, min_nbytes: as Session has them, where none is given.
        warmup: steps run first, so that gradients and what libraries cache are there already.
        device: the type of device whose memory is traced, ``"cpu"`` or ``"cuda"``.

    Raises:
        UnknownNameError: no policy has that name.
        MeasureError: the step ran no backward pass, or the device is not there.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        >>> x = torch.ones(8, 64)
        >>> plain = record(lambda: model(x).sum().backward())
        >>> encoded = record(lambda: model(x).sum().backward(), "lossless", min_nbytes=0)
        >>> sorted({buffer.role for buffer in encoded.buffers} - {buffer.role for buffer in plain.buffers})
        ['decoded', 'encoded']
    """
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise MeasureError(f"record was asked for device={device!r}, but it traces 'cpu', and 'cuda' where one is.")
    session = policy if isinstance(policy, Session) or policy is None else None
    if session is None and policy is not None:
        session = Session(policy, model=model, stores=stores, min_nbytes=min_nbytes)  # type: ignore[arg-type]

    def once() -> None:
        with session or nullcontext():
            step()

    with nullcontext() if session is None else session.watched_by(_Notes()):
        for _ in range(warmup):
            once()
        release()  # so that the trace sees the decode buffers come
        resident = [] if model is None else list(_resident(model))
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler prints two lines each time
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as profiled:
            once()
    log = _read(profiled.profiler.kineto_results.experimental_event_tree(), device)  # type: ignore[union-attr]
    if log.backward is None:
        raise MeasureError(
            "record was asked for the trace of a training step, but no autograd node ran in it. Call backward() in it."
        )
    trace = _trace(log, "plain" if session is None else repr(session.policy))
    still = set() if model is None else {memory for _, memory in _resident(model)}
    new = {memory.address for memory in log.memory if memory.end is None}  # perhaps where an old gradient was
    outlasting = [replace(b, end=trace.end) for b, memory in resident if memory in still and memory[0] not in new]
    trace = replace(trace, buffers=(*trace.buffers, *outlasting))  # at the end: decodes name buffers by number
    if session is not None:
        session.report_peak(trace.at_peak())
    return trace


class _Notes:
    """A watcher that writes what it is told into the profiler's record, between the allocations."""

    def storing(self, encoded: Encoded) -> None:
        _note(_PUT, planes=_addresses(encoded), codec=encoded.codec)

    def fetched(self, encoded: Encoded) -> None:
        _note(_GOT, planes=_addresses(encoded))

    def taken(self, memory: Tensor) -> None:
        _note(_TAKEN, whole=memory.untyped_storage().data_ptr(), nbytes=memory.numel() * memory.itemsize)

    def released(self, memory: Tensor) -> None:
        _note(_RELEASED, whole=memory.untyped_storage().data_ptr())

    def read(self, tensor: Tensor, is_stored: bool) -> None:
        if tensor.layout is torch.strided and type(tensor) is Tensor:
            _note(_READ, whole=tensor.untyped_storage().data_ptr(), made=is_stored)


def _addresses(encoded: Encoded) -> list[int]:
    return [plane.untyped_storage().data_ptr() for plane in encoded.planes.values()]


def _note(what: str, **facts: Any) -> None:
    with no_torch_function(), record_function(what + json.dumps(facts)):
        pass


def _resident(model: nn.Module) -> Iterator[tuple[Buffer, tuple[int, int]]]:
    """What the model holds, with the address and size that tell whether it is still the same after the step."""
    named: list[tuple[str, Role, Tensor]] = []
    for name, parameter in model.named_parameters():
        named.append((name, "parameter", parameter))
        if parameter.grad is not None:
            named.append((name, "gradient", parameter.grad))
    named += [(name, "parameter", buffer) for name, buffer in model.named_buffers()]
    seen = set()
    for name, role, tensor in named:
        storage = tensor.untyped_storage()
        memory = storage.data_ptr(), storage.nbytes()
        if memory not in seen:
            seen.add(memory)
            yield Buffer(name, role, storage.nbytes(), 0, 1), memory


@dataclass(eq=False)
class _Memory:
    """A buffer while the record is read; ``began_in`` and ``ended_in`` number the operations of its ends."""

    name: str
    address: int
    nbytes: int
    start: int
    began_in: int
    end: int | None = None
    ended_in: int | None = None
    role: Role | None = None


@dataclass(eq=False)
class _Decoding:
    """A decode while the record is read."""

    name: str
    nbytes: int
    start: int
    end: int
    memory: _Memory | None
    planes: list[_Memory] = field(default_factory=list)


@dataclass
class _Log:
    """What the profiler's record says, in its order."""

    memory: list[_Memory] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    decodings: list[_Decoding] = field(default_factory=list)
    backward: int | None = None
    ticks: int = 0


def _read(roots: list[Any], device: str) -> _Log:
    """Go through the record once, in the order of time."""
    log, open_now = _Log(), dict[int, _Memory]()
    read: set[_Decoding] = set()  # by the node that runs
    latest: dict[_Memory, _Decoding] = {}
    doing, node_ends, awaited = "", 0, False
    for event, is_op in sorted(_walk(roots), key=lambda pair: pair[0].start_time_ns):
        if read and event.start_time_ns > node_ends:
            for decoding in read:
                decoding.end = log.ticks - 1  # as if the node's last event released it
            read.clear()
        if event.tag == profiler_event.Allocation:
            _allocation(log, open_now, event.extra_fields, device, doing)
        elif event.name.startswith(_PUT):
            facts = json.loads(event.name.removeprefix(_PUT))
            for plane in _found(open_now, facts["planes"]):
                plane.role, plane.name = "encoded", f"{facts['codec']} after {plane.name}"
        elif event.name.startswith(_TAKEN):
            facts = json.loads(event.name.removeprefix(_TAKEN))
            memory = open_now.get(facts["whole"])
            start = max(log.ticks - 1, log.ops[-1].start if log.ops else 0)  # memory of its own is a tick old
            decoding = _Decoding(doing, facts["nbytes"], start, start + 1, memory)
            log.decodings.append(decoding)
            awaited = True
            read.add(decoding)
            if memory is not None:
                memory.role = "decoded"
                before = latest.get(memory)
                if before in read:  # its last reader is this very node, and what was in it is gone
                    read.discard(before)
                    before.end = log.ticks
                latest[memory] = decoding
        elif event.name.startswith(_GOT):
            if not awaited:  # read as they are
                log.decodings.append(_Decoding(doing, 0, log.ticks, log.ticks + 1, None))
            log.decodings[-1].planes = _found(open_now, json.loads(event.name.removeprefix(_GOT))["planes"])
            for plane in log.decodings[-1].planes:  # those that have come back from another store
                plane.role = plane.role or "encoded"
            awaited = False
        elif event.name.startswith(_READ):
            facts = json.loads(event.name.removeprefix(_READ))
            memory = open_now.get(facts["whole"])
            own = memory is not None and facts["made"] and memory not in latest  # made again, in memory of its own
            if memory is not None and own and memory.role != "encoded":  # and not read where its planes are
                memory.role = "decoded"
                latest[memory] = _Decoding(doing, memory.nbytes, memory.start, log.ticks, memory)
                log.decodings.append(latest[memory])
            if memory in latest:
                read.add(latest[memory])
        elif event.name.startswith(_RELEASED):
            settled = latest.get(open_now.get(json.loads(event.name.removeprefix(_RELEASED))["whole"]))  # type: ignore[arg-type]
            if settled in read:
                read.discard(settled)
                settled.end = log.ticks - 1
                if doing in _HALVED:
                    log.ops.append(Op(f"{doing} (input)", log.ticks))
        elif is_op:
            doing = event.name.removeprefix(_NODE)
            log.ops.append(Op(doing, log.ticks))
            if event.name.startswith(_NODE):
                node_ends = event.end_time_ns
                if log.backward is None:
                    log.backward = log.ticks
    for decoding in read:
        decoding.end = log.ticks - 1
    return log


def _allocation(log: _Log, open_now: dict[int, _Memory], facts: Any, device: str, doing: str) -> None:
    """Memory that is allocated (``alloc_size > 0``) or released."""
    if facts.device.type != device or not facts.alloc_size:
        return
    if facts.alloc_size > 0:
        open_now[facts.ptr] = memory = _Memory(doing, facts.ptr, facts.alloc_size, log.ticks, len(log.ops))
        log.memory.append(memory)
    else:
        released = open_now.pop(facts.ptr, None)
        if released is None:  # Note: [freed from before]
            return
        released.end, released.ended_in = log.ticks, len(log.ops)
    log.ticks += 1


def _walk(roots: list[Any]) -> Iterator[tuple[Any, bool]]:
    """Every event with whether it is an operation of the program: an autograd node, or an outermost recorded function.

    What the Session does between operations is no operation: it is not recorded by autograd, or computes nothing.
    """
    waiting = [(root, False) for root in reversed(roots)]
    while waiting:
        event, inside = waiting.pop()
        is_op = False
        if not inside and event.tag == profiler_event.TorchOp:
            of_autograd = event.extra_fields.sequence_number >= 0
            is_function = event.extra_fields.scope == record_scope.FUNCTION and event.name not in _NO_OPERATION
            is_op = event.name.startswith(_NODE) or (of_autograd and is_function)
        yield event, is_op
        waiting += [(child, inside or is_op) for child in reversed(event.children)]


def _found(open_now: dict[int, _Memory], addresses: list[int]) -> list[_Memory]:
    return [open_now[address] for address in addresses if address in open_now]


def _trace(log: _Log, policy: str) -> Trace:
    assert log.backward is not None
    end = max(log.ticks, 1)
    for made in reversed(log.decodings):  # the first thing that was in it counts
        if made.memory is not None and made.memory.role in ("decoded", "recomputed"):
            made.memory.role = "decoded" if made.planes else "recomputed"
    numbers = {id(memory): number for number, memory in enumerate(log.memory)}
    buffers = tuple(
        Buffer(m.name, m.role or _role(m, log.backward), m.nbytes, m.start, end if m.end is None else m.end)
        for m in log.memory
    )
    decodes = []
    for made in log.decodings:
        start = min(made.start, end - 1)
        released = end if made.memory is None or made.memory.end is None else made.memory.end
        planes = tuple(numbers[id(plane)] for plane in made.planes)
        decodes.append(Decode(made.name, made.nbytes, start, max(min(made.end, released), start + 1), planes))
    return Trace(policy, buffers, tuple(log.ops), log.backward, end, tuple(decodes))


def _role(memory: _Memory, backward: int) -> Role:
    if memory.began_in == memory.ended_in:
        return "workspace"
    if memory.start < backward:
        return "immediate" if memory.end is not None and memory.end < backward else "stashed"
    return "gradient" if memory.end is None else "immediate"

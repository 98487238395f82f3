"""The store that holds planes in the memory of the host."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from itertools import count

import torch
from torch import Tensor

from backstash import graphs
from backstash.arguments import check_count
from backstash.codecs.base import Encoded
from backstash.errors import GraphError
from backstash.stores.base import DropLock, Holdings, Ticket, Usage
from backstash.stores.space import Space

_SLAB = 64 << 20
"""Bytes of a slab of pinned memory. A power of two, because the pinned allocator rounds up to the next one."""

_ALIGNMENT = 512
"""Planes in a slab begin at multiples of this many bytes."""

IN_FLIGHT = 256 << 20
"""Bytes of an accelerator's memory that may wait for the end of their copy, unless a store is told otherwise."""


class HostStore:
    """Holds planes in host memory: an accelerator's as copies in pinned memory, all others as they are.

    A copy runs on a stream of its own. If more than ``in_flight`` bytes are under way, the stream that computes waits
    for the oldest copy, and so do the operations that come after; the host never waits. Pinned memory is allocated in
    slabs, used again, and not given back. If the system refuses to pin more memory, the store uses pageable memory,
    with one warning.

    Args:
        capacity: the most bytes that the store may hold; None for no limit.
        in_flight: bytes of the accelerator's memory that may wait for the end of their copy.

    Raises:
        TypeError: an argument is of another type.
        ValueError: ``capacity`` is negative.

    Example:
        >>> from backstash import codecs
        >>> store = HostStore(capacity=1 << 20)
        >>> ticket = store.put(codecs.get("zvc").encode(torch.ones(1000)))
        >>> store.get(ticket).spec.shape
        (1000,)
    """

    def __init__(self, capacity: int | None = None, *, in_flight: int = IN_FLIGHT) -> None:
        self._holdings = Holdings(type(self).__name__, capacity)
        check_count(in_flight, "in_flight", "bytes", "HostStore")
        self._in_flight = in_flight
        self._values: dict[int, Encoded | _Parked] = {}
        self._lanes: dict[torch.device, _Lane] = {}
        self._numbers = count()
        self._lock = DropLock(self._forget)

    def __repr__(self) -> str:
        return f"HostStore(capacity={self._holdings.capacity})"

    def put(self, encoded: Encoded) -> Ticket:
        """Holds a value. Planes on CPU are not copied.

        Raises:
            StoreFullError: the value exceeds ``capacity``.
        """
        device = next((plane.device for plane in encoded.planes.values() if plane.device.type != "cpu"), None)
        with self._lock.held:
            ticket = Ticket(next(self._numbers), encoded.nbytes)
            self._holdings.add(encoded, ticket.nbytes)
            try:
                self._values[ticket.number] = encoded if device is None else self._lane(device).park(encoded)
            except BaseException:
                self._holdings.remove(ticket.nbytes)
                raise
            return ticket

    def prefetch(self, ticket: Ticket) -> None:
        """Begins the copy back to the accelerator."""
        with self._lock.held:
            value = self._values.get(ticket.number)
            if isinstance(value, _Parked):
                value.lane.fetch(value)

    def get(self, ticket: Ticket) -> Encoded:
        """The value that was put. The current stream waits for the copy back; the host does not."""
        with self._lock.held:
            value = self._values[ticket.number]
            return value.lane.take(value) if isinstance(value, _Parked) else value

    def drop(self, ticket: Ticket) -> None:
        """Forgets the value."""
        self._lock.drop(ticket)

    def usage(self) -> Usage:
        """Bytes and values that are held now."""
        with self._lock.held:
            return self._holdings.usage()

    @property
    def in_flight(self) -> int:
        """Bytes of the accelerator's memory that may wait for the end of their copy. It may be set at any time."""
        return self._in_flight

    @in_flight.setter
    def in_flight(self, nbytes: int) -> None:
        with self._lock.held:
            self._in_flight = nbytes
            for lane in self._lanes.values():
                lane.in_flight = nbytes

    def drain(self) -> None:
        """Has the current stream wait for the copies so far, whose memory is free from then on. The host goes on."""
        with self._lock.held:
            for lane in self._lanes.values():
                lane.drain()

    def settle(self) -> None:
        """Has the current stream wait for all copies. A graph that moves values begins after it."""
        with self._lock.held:
            for lane in self._lanes.values():
                lane.join()

    def _forget(self, ticket: Ticket) -> None:
        value = self._values.pop(ticket.number, None)
        if value is not None:
            self._holdings.remove(ticket.nbytes)
        if isinstance(value, _Parked):
            value.lane.release(value)

    def _lane(self, device: torch.device) -> _Lane:
        if device not in self._lanes:
            self._lanes[device] = _Lane(device, self._in_flight)
        return self._lanes[device]


class _Parked:
    """A value whose planes on the device are in pinned memory, at ``places``. The others are in ``encoded``."""

    __slots__ = ("captured", "done", "encoded", "fetched", "lane", "places", "stream")

    def __init__(self, encoded: Encoded, lane: _Lane, places: dict[str, _Place]) -> None:
        self.encoded, self.lane, self.places = encoded, lane, places
        self.captured = graphs.capture()  # the graph that moves it, if one does
        self.fetched: dict[str, Tensor] | None = None  # planes that are being copied back, or are back
        self.stream: torch.Stream | None = None  # the stream on which that memory was allocated
        self.done: torch.Event | None = None  # the end of the value's last copy, in either direction


class _Place:
    """The pinned memory of a plane, and its dtype, shape and device."""

    __slots__ = ("device", "dtype", "memory", "shape", "slab", "start")

    def __init__(self, plane: Tensor, memory: Tensor, slab: Space | None, start: int) -> None:
        self.dtype, self.shape, self.device = plane.dtype, plane.shape, plane.device
        self.memory, self.slab, self.start = memory, slab, start

    @property
    def room(self) -> int:
        """Bytes that are set aside for it."""
        return _room(self.memory.numel())

    def memory_of(self, nbytes: int) -> Tensor:
        """The memory of another plane in its place, of so many bytes."""
        return self.memory.as_strided((nbytes,), (1,))

    def free(self) -> None:
        """Lets others have it."""
        if self.slab is not None:
            self.slab.give(self.start, self.room)


class _Lane:
    """The copies between one accelerator and host memory. The caller holds the store's lock.

    Note: [copies on side streams]
        The memory that a copy reads or writes stays referenced in ``flying`` until the copy's event has passed. If it
        were freed earlier, the caching allocator would hand it to the compute stream, which does not wait for the copy.
        Memory to copy back into is allocated on the compute stream, and the copy waits for the work that was queued on
        that stream before.

    Note: [places of a graph]
        A graph writes to the same places of pinned memory in each replay, so nobody else may have them for as long as
        it lives. What is given back while it is captured is used again in the same capture alone. Its copies do not
        wait for copies of earlier steps: the stream that replays it does (:meth:`HostStore.settle`).
    """

    def __init__(self, device: torch.device, in_flight: int) -> None:
        self.device, self.in_flight = device, in_flight
        self.out, self.back = torch.Stream(device), torch.Stream(device)
        self.flying: deque[tuple[torch.Event, int, list[Tensor]]] = deque()
        self.nbytes = 0
        self.slabs: list[tuple[Tensor, Space]] = []
        self.pins = True
        self.of_graph: list[_Place] = []  # that the graph which is being captured may use again
        self.late: deque[_Place | _Parked] = deque()  # to be released when no graph is being captured

    def park(self, encoded: Encoded) -> _Parked:
        """Begins to copy the planes that are on this device to the host."""
        planes = {name: plane.contiguous() for name, plane in encoded.planes.items() if plane.device == self.device}
        rest = {name: plane for name, plane in encoded.planes.items() if name not in planes}
        order = Encoded(encoded.codec, encoded.spec, dict.fromkeys(encoded.planes, torch.empty(0)) | rest, encoded.meta)
        value = _Parked(order, self, {name: self._place(plane) for name, plane in planes.items()})
        self.out.wait_stream(torch.accelerator.current_stream(self.device))
        with self.out:
            for name, plane in planes.items():
                value.places[name].memory.copy_(_bytes(plane), non_blocking=True)
            value.done = self.out.record_event()
        self._keep(value.done, list(planes.values()))
        return value

    def fetch(self, value: _Parked) -> dict[str, Tensor]:
        """Begins to copy the planes back, unless that has begun already. Returns the planes that are copied into."""
        if value.fetched is None:
            assert value.done is not None
            value.stream = torch.accelerator.current_stream(self.device)
            value.fetched = {
                name: torch.empty(place.shape, dtype=place.dtype, device=place.device)
                for name, place in value.places.items()
            }
            self.back.wait_stream(value.stream)
            self.back.wait_event(value.done)
            with self.back:
                for name, plane in value.fetched.items():
                    _bytes(plane).copy_(value.places[name].memory, non_blocking=True)
                value.done = self.back.record_event()
            self._keep(value.done, [*value.fetched.values(), *(place.memory for place in value.places.values())])
        return value.fetched

    def take(self, value: _Parked) -> Encoded:
        """The value with its planes on the device, for use on the current stream."""
        fetched, current = self.fetch(value), torch.accelerator.current_stream(self.device)
        assert value.done is not None
        current.wait_event(value.done)
        if current != value.stream:  # to which the memory is given back, before the current stream has read it
            assert value.stream is not None
            fetched = {name: plane.clone() for name, plane in fetched.items()}
            value.stream.wait_stream(current)
        value.fetched = None
        encoded = value.encoded
        return Encoded(encoded.codec, encoded.spec, {**encoded.planes, **fetched}, encoded.meta)

    def release(self, value: _Parked) -> None:
        """Frees the value's places. The next copy into them runs on ``out``, which waits here for the last reader."""
        assert value.done is not None
        if value.captured is not graphs.capture():
            self.late.append(value)  # events of a graph and of no graph do not wait for each other
            return
        self.out.wait_event(value.done)
        if value.captured is not None:
            self.of_graph += value.places.values()
            return
        for place in value.places.values():
            place.free()

    def drain(self) -> None:
        """Has the current stream wait for all copies that are under way, and lets go of their memory."""
        current = torch.accelerator.current_stream(self.device)
        for event, _, _ in self.flying:
            current.wait_event(event)
        self.flying.clear()
        self.nbytes = 0

    def join(self) -> None:
        """Has the current stream wait for all copies. What they read and wrote need not be held for them any more."""
        current = torch.accelerator.current_stream(self.device)
        current.wait_stream(self.out)
        current.wait_stream(self.back)
        self.flying.clear()
        self.nbytes = 0
        self.of_graph.clear()

    def _of_graph(self, captured: graphs.Capture, plane: Tensor, nbytes: int) -> _Place | None:
        """A place that the graph which is being captured has used before; None where none is as large."""
        captured.before_end(self, self.join)
        fitting = [place for place in self.of_graph if place.room == _room(nbytes)]
        if not fitting:
            return None
        self.of_graph.remove(fitting[0])
        return _Place(plane, fitting[0].memory_of(nbytes), fitting[0].slab, fitting[0].start)

    def _place(self, plane: Tensor) -> _Place:
        captured = graphs.capture()
        nbytes = plane.numel() * plane.element_size()
        if captured is None:
            self._release_late()
            return self._new_place(plane, nbytes)
        place = self._of_graph(captured, plane, nbytes)
        if place is None:
            place = self._new_place(plane, nbytes)
            weakref.finalize(captured, self.late.append, place).atexit = False
        return place

    def _release_late(self) -> None:
        while self.late:
            late = self.late.popleft()
            if isinstance(late, _Place):
                late.free()
            elif late.captured is None:
                self.release(late)

    def _new_place(self, plane: Tensor, nbytes: int) -> _Place:
        room = _room(nbytes)
        for memory, slab in self.slabs:
            start = slab.take(room)
            if start is not None:
                return _Place(plane, memory[start : start + nbytes], slab, start)
        pinned = self._pinned(max(_SLAB, room)) if self.pins else None
        if pinned is None:
            return _Place(plane, torch.empty(nbytes, dtype=torch.uint8), None, 0)
        slab = Space(pinned.numel())
        self.slabs.append((pinned, slab))
        slab.take(room)
        return _Place(plane, pinned[:nbytes], slab, 0)

    def _pinned(self, nbytes: int) -> Tensor | None:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            if graphs.capture() is not None:
                raise GraphError(
                    f"a captured step was to move {nbytes} bytes more to the host than the steps before it, but pinned "
                    f"memory cannot be allocated in a capture. Run more steps eagerly first (learning=)."
                ) from error
            self.pins = False
            warnings.warn(
                f"backstash: the system pins no {nbytes} bytes more ({error}); pageable memory serves, and copies to "
                f"it are slower and not asynchronous.",
                stacklevel=2,
            )
            return None

    def _keep(self, done: torch.Event, tensors: list[Tensor]) -> None:
        """Holds ``tensors`` until their copy has ended. The current stream waits for the oldest if too many are."""
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors if not tensor.is_cpu)
        self.flying.append((done, nbytes, tensors))
        self.nbytes += nbytes
        may_ask = graphs.capture() is None
        while self.flying:
            event, nbytes, _ = self.flying[0]
            if not (may_ask and event.query()):
                if self.nbytes <= self.in_flight:
                    return
                torch.accelerator.current_stream(self.device).wait_event(event)
            self.flying.popleft()
            self.nbytes -= nbytes


def _bytes(plane: Tensor) -> Tensor:
    return plane.reshape(-1).view(torch.uint8)


def _room(nbytes: int) -> int:
    """Bytes to set aside for a plane of ``nbytes``; more than 0, so that no two planes begin at the same place."""
    return max(1, -(-nbytes // _ALIGNMENT)) * _ALIGNMENT

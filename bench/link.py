"""A store behind a link of known speed: what offloading would cost, on a machine that has no such link."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from backstash.codecs import Encoded
from backstash.stores import HostStore, Store, Ticket, Usage

PCIE = 12.8e9
"""Bytes per second of the link that vDNN, cDMA and Layrub were measured with: 16 lanes of PCIe 3."""


class LinkStore:
    """Lets every transfer to and from a store last as long as it would over a full-duplex link.

    A transfer occupies its direction for ``nbytes / bytes_per_second``, one after the other, and arrives ``latency``
    later. ``put`` does not wait for it, unless more than ``in_flight`` bytes would be under way. ``prefetch`` begins
    the transfer back; ``get`` begins it if nobody has, and waits until it has arrived. Nothing is transferred in truth:
    the store behind holds the value at once. What is on its way out is held until a call finds that it has left, as it
    would be on the device.

    Attributes:
        out_nbytes, back_nbytes: bytes that were sent each way so far.

    Args:
        store: what holds the values.
        bytes_per_second: of each direction.
        latency: seconds from the end of a transfer to its arrival.
        in_flight: bytes that may be on their way out.
        clock, sleep: the time, and how to let it pass.
    """

    def __init__(
        self,
        store: Store,
        bytes_per_second: float,
        latency: float = 0.0,
        *,
        in_flight: int = 256 << 20,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not bytes_per_second > 0 or latency < 0:
            raise ValueError(
                f"LinkStore was asked for {bytes_per_second} bytes per second and a latency of {latency}, but it takes "
                f"more than none, and 0 or more."
            )
        self.store, self.bytes_per_second, self.latency, self.in_flight = store, bytes_per_second, latency, in_flight
        self._clock, self._sleep = clock, sleep
        self._lock = Lock()
        self._out_free = self._back_free = 0.0  # when a direction's last transfer ends
        self._under_way: deque[tuple[float, int, int]] = deque()  # out: when each ends, its bytes, its number
        self._leaving: dict[int, Encoded] = {}  # what is on its way out
        self._arrived: dict[int, float] = {}  # out, by ticket
        self._fetched: dict[int, float] = {}  # back: when it arrives, and has not been asked for yet
        self._stall_seconds = 0.0
        self.out_nbytes = self.back_nbytes = 0

    def put(self, encoded: Encoded) -> Ticket:
        """Take a value; waits until there is room among what is under way."""
        ticket = self.store.put(encoded)
        with self._lock:
            room_at = self._let_go()
            excess = sum(nbytes for _, nbytes, _ in self._under_way) + ticket.nbytes - self.in_flight
            while excess > 0 and self._under_way:
                room_at, nbytes, number = self._under_way.popleft()
                self._leaving.pop(number, None)
                excess -= nbytes
            self._out_free = max(room_at, self._out_free) + ticket.nbytes / self.bytes_per_second
            self._under_way.append((self._out_free, ticket.nbytes, ticket.number))
            self._leaving[ticket.number] = encoded
            self.out_nbytes += ticket.nbytes
            self._arrived[ticket.number] = self._out_free + self.latency
        self._wait_until(room_at)
        return ticket

    def prefetch(self, ticket: Ticket) -> None:
        """Begin the transfer back."""
        with self._lock:
            self._let_go()
            if ticket.number in self._arrived and ticket.number not in self._fetched:
                self._fetched[ticket.number] = self._send_back(ticket)
        self.store.prefetch(ticket)

    def get(self, ticket: Ticket) -> Encoded:
        """The value, when it has arrived."""
        encoded = self.store.get(ticket)
        with self._lock:
            self._let_go()
            arrives = self._fetched.pop(ticket.number, None)
            if arrives is None:
                arrives = self._send_back(ticket)
        self._wait_until(arrives)
        return encoded

    def drop(self, ticket: Ticket) -> None:
        """Forget the value."""
        self._arrived.pop(ticket.number, None)
        self._fetched.pop(ticket.number, None)
        self._leaving.pop(ticket.number, None)
        self.store.drop(ticket)

    def drain(self) -> None:
        """Waits until everything has left."""
        self._wait_until(self._out_free)
        with self._lock:
            self._let_go()

    def usage(self) -> Usage:
        """What the store holds; the time waited for the link counts too."""
        usage = self.store.usage()
        return Usage(usage.nbytes, usage.peak_nbytes, usage.count, usage.stall_seconds + self._stall_seconds)

    def _let_go(self) -> float:
        """Let go of what has left; returns the time."""
        now = self._clock()
        while self._under_way and self._under_way[0][0] <= now:
            self._leaving.pop(self._under_way.popleft()[2], None)
        return now

    def _send_back(self, ticket: Ticket) -> float:
        """When a transfer that begins as soon as it can arrives."""
        self.back_nbytes += ticket.nbytes
        begins = max(self._clock(), self._back_free, self._arrived.get(ticket.number, 0.0))
        self._back_free = begins + ticket.nbytes / self.bytes_per_second
        return self._back_free + self.latency

    def _wait_until(self, moment: float) -> None:
        started = self._clock()
        if moment > started:
            self._sleep(moment - started)
            with self._lock:
                self._stall_seconds += self._clock() - started


class FarStore:
    """Holds copies of the planes in memory that torch does not count: a host's, on a machine that has only one memory.

    ``put`` copies them there, ``prefetch`` or else ``get`` copies them back into torch's memory, which the caller of
    ``get`` then owns. So the bytes that are counted are those that a device would hold. For counting, not for timing:
    on a real machine a link copies, and not the processor.
    """

    def __init__(self) -> None:
        self._store = HostStore()
        self._back: dict[int, Encoded] = {}

    def put(self, encoded: Encoded) -> Ticket:
        """Take a copy."""
        return self._store.put(
            replace(encoded, planes={name: _uncounted(plane) for name, plane in encoded.planes.items()})
        )

    def prefetch(self, ticket: Ticket) -> None:
        """Copy it back."""
        if ticket.number not in self._back:
            self._back[ticket.number] = _copy(self._store.get(ticket))

    def get(self, ticket: Ticket) -> Encoded:
        """The copy that was prefetched, or one."""
        fetched = self._back.pop(ticket.number, None)
        return _copy(self._store.get(ticket)) if fetched is None else fetched

    def drop(self, ticket: Ticket) -> None:
        """Forget the value."""
        self._back.pop(ticket.number, None)
        self._store.drop(ticket)

    def usage(self) -> Usage:
        """What is held there."""
        return self._store.usage()


def _uncounted(plane: Tensor) -> Tensor:
    memory = torch.from_numpy(np.empty(plane.numel() * plane.element_size(), np.uint8)).untyped_storage()
    parked: Tensor = torch.empty(0, dtype=plane.dtype).set_(memory, 0, plane.shape)  # type: ignore[call-overload]
    return parked.copy_(plane)


def _copy(value: Encoded) -> Encoded:
    return replace(value, planes={name: plane.clone() for name, plane in value.planes.items()})

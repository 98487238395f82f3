"""A store behind a link of known speed: what offloading would cost, on a machine that has no such link."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import Lock

from backstash.codecs import Encoded
from backstash.stores import Store, Ticket, Usage


class LinkStore:
    """Lets every transfer to and from a store last as long as it would over a full-duplex link.

    A transfer occupies its direction for ``nbytes / bytes_per_second``, one after the other, and arrives ``latency``
    later. ``put`` does not wait for it, unless more than ``in_flight`` bytes would be under way. ``prefetch`` begins
    the transfer back; ``get`` begins it if nobody has, and waits until it has arrived. Nothing is transferred in truth:
    the store behind holds the value at once.

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
        self._under_way: deque[tuple[float, int]] = deque()  # out: when each ends, and its bytes
        self._arrived: dict[int, float] = {}  # out, by ticket
        self._fetched: dict[int, float] = {}  # back: when it arrives, and has not been asked for yet
        self._stall_seconds = 0.0

    def put(self, encoded: Encoded) -> Ticket:
        """Take a value; waits until there is room among what is under way."""
        ticket = self.store.put(encoded)
        with self._lock:
            now = self._clock()
            while self._under_way and self._under_way[0][0] <= now:
                self._under_way.popleft()
            excess = sum(nbytes for _, nbytes in self._under_way) + ticket.nbytes - self.in_flight
            room_at = now
            while excess > 0 and self._under_way:
                room_at, nbytes = self._under_way.popleft()
                excess -= nbytes
            self._out_free = max(room_at, self._out_free) + ticket.nbytes / self.bytes_per_second
            self._under_way.append((self._out_free, ticket.nbytes))
            self._arrived[ticket.number] = self._out_free + self.latency
        self._wait_until(room_at)
        return ticket

    def prefetch(self, ticket: Ticket) -> None:
        """Begin the transfer back."""
        with self._lock:
            if ticket.number in self._arrived and ticket.number not in self._fetched:
                self._fetched[ticket.number] = self._send_back(ticket)
        self.store.prefetch(ticket)

    def get(self, ticket: Ticket) -> Encoded:
        """The value, when it has arrived."""
        encoded = self.store.get(ticket)
        with self._lock:
            arrives = self._fetched.pop(ticket.number, None)
            if arrives is None:
                arrives = self._send_back(ticket)
        self._wait_until(arrives)
        return encoded

    def drop(self, ticket: Ticket) -> None:
        """Forget the value."""
        self._arrived.pop(ticket.number, None)
        self._fetched.pop(ticket.number, None)
        self.store.drop(ticket)

    def usage(self) -> Usage:
        """What the store holds; the time waited for the link counts too."""
        usage = self.store.usage()
        return Usage(usage.nbytes, usage.peak_nbytes, usage.count, usage.stall_seconds + self._stall_seconds)

    def _send_back(self, ticket: Ticket) -> float:
        """When a transfer that begins as soon as it can arrives."""
        begins = max(self._clock(), self._back_free, self._arrived.get(ticket.number, 0.0))
        self._back_free = begins + ticket.nbytes / self.bytes_per_second
        return self._back_free + self.latency

    def _wait_until(self, moment: float) -> None:
        started = self._clock()
        if moment > started:
            self._sleep(moment - started)
            with self._lock:
                self._stall_seconds += self._clock() - started

"""Planes stay where they were made."""

from __future__ import annotations

from itertools import count
from threading import RLock

from backstash.codecs.base import Encoded
from backstash.stores.base import Ticket, Usage


class DeviceStore:
    """Holds the planes on the device that encoded them."""

    def __init__(self) -> None:
        self._values: dict[int, Encoded] = {}
        self._numbers = count()
        self._nbytes = 0
        self._peak_nbytes = 0
        self._lock = RLock()  # a finalizer that drops a value may run inside put, on the same thread

    def put(self, encoded: Encoded) -> Ticket:
        """Take a value; nothing is copied."""
        with self._lock:
            ticket = Ticket(next(self._numbers), encoded.nbytes)
            self._values[ticket.number] = encoded
            self._nbytes += ticket.nbytes
            self._peak_nbytes = max(self._peak_nbytes, self._nbytes)
        return ticket

    def prefetch(self, ticket: Ticket) -> None:
        """Nothing to do: the planes are here."""

    def get(self, ticket: Ticket) -> Encoded:
        """The value."""
        return self._values[ticket.number]

    def drop(self, ticket: Ticket) -> None:
        """Forget the value; its planes go with their last reference."""
        with self._lock:
            if self._values.pop(ticket.number, None) is not None:
                self._nbytes -= ticket.nbytes

    def usage(self) -> Usage:
        """What is held."""
        return Usage(self._nbytes, self._peak_nbytes, len(self._values))

"""The store that leaves planes on the device that encoded them."""

from __future__ import annotations

from itertools import count
from threading import RLock

from backstash.codecs.base import Encoded
from backstash.stores.base import Holdings, Ticket, Usage


class DeviceStore:
    """Holds the planes on the device that encoded them.

    Args:
        capacity: the most bytes that it may hold; None for no limit.

    Raises:
        ValueError: ``capacity`` is negative.
    """

    __slots__ = ("__weakref__", "_holdings", "_lock", "_numbers", "_values")

    def __init__(self, capacity: int | None = None) -> None:
        self._holdings = Holdings(type(self).__name__, capacity)
        self._values: dict[int, Encoded] = {}
        self._numbers = count()
        self._lock = RLock()  # a finalizer that drops a value may run inside put, on the same thread

    def put(self, encoded: Encoded) -> Ticket:
        """Holds a value, without a copy.

        Raises:
            StoreFullError: it does not fit into ``capacity``.
        """
        with self._lock:
            ticket = Ticket(next(self._numbers), encoded.nbytes)
            self._holdings.add(encoded, ticket.nbytes)
            self._values[ticket.number] = encoded
        return ticket

    def prefetch(self, ticket: Ticket) -> None:
        """Does nothing, because the planes are on the device already."""

    def get(self, ticket: Ticket) -> Encoded:
        """The value that was put."""
        return self._values[ticket.number]

    def drop(self, ticket: Ticket) -> None:
        """Forgets the value. Its planes are freed with their last reference."""
        with self._lock:
            if self._values.pop(ticket.number, None) is not None:
                self._holdings.remove(ticket.nbytes)

    def usage(self) -> Usage:
        """Bytes and values that are held now."""
        return self._holdings.usage()

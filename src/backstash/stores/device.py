"""Planes stay where they were made."""

from __future__ import annotations

from itertools import count
from threading import RLock

from backstash.codecs.base import Encoded
from backstash.stores.base import Account, Ticket, Usage


class DeviceStore:
    """Holds the planes on the device that encoded them.

    Args:
        capacity: the most bytes that it may hold; None for no limit.

    Raises:
        ValueError: ``capacity`` is negative.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._account = Account(type(self).__name__, capacity)
        self._values: dict[int, Encoded] = {}
        self._numbers = count()
        self._lock = RLock()  # a finalizer that drops a value may run inside put, on the same thread

    def put(self, encoded: Encoded) -> Ticket:
        """Take a value; nothing is copied.

        Raises:
            StoreFullError: it does not fit into ``capacity``.
        """
        with self._lock:
            ticket = Ticket(next(self._numbers), encoded.nbytes)
            self._account.add(encoded, ticket.nbytes)
            self._values[ticket.number] = encoded
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
                self._account.remove(ticket.nbytes)

    def usage(self) -> Usage:
        """What is held."""
        return self._account.usage()

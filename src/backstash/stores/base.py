"""What a store is: it holds encoded values, and never decodes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Protocol, runtime_checkable
from weakref import WeakMethod

from backstash.codecs.base import Encoded
from backstash.errors import StoreFullError


@dataclass(frozen=True, slots=True)
class Usage:
    """What a store holds.

    Attributes:
        nbytes: bytes held now.
        peak_nbytes: the most it ever held.
        count: values held now.
        stall_seconds: time that ``put`` and ``get`` have waited for a transfer, since the store was made.
    """

    nbytes: int
    peak_nbytes: int
    count: int
    stall_seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A claim on one value in a store."""

    number: int
    nbytes: int


class Account:
    """Counts what a store holds; whoever calls it holds the store's lock.

    Args:
        name: of the store, for its errors.
        capacity: the most bytes that it may hold; None for no limit.
    """

    def __init__(self, name: str, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 0:
            raise ValueError(f"{name} was asked for capacity={capacity}, but it is a number of bytes: 0 or more.")
        self.name, self.capacity = name, capacity
        self.nbytes = self.peak_nbytes = self.count = 0
        self.stall_seconds = 0.0

    def add(self, encoded: Encoded, nbytes: int) -> None:
        """Count a value in.

        Raises:
            StoreFullError: it does not fit; then nothing is counted.
        """
        if self.capacity is not None and self.nbytes + nbytes > self.capacity:
            raise StoreFullError(
                f"{self.name} was asked to hold {nbytes} bytes ({encoded.codec} of {encoded.spec}) beside the "
                f"{self.nbytes} that it holds, but its capacity is {self.capacity}. Raise the capacity, or put another "
                f"store behind it: stores.TierStore."
            )
        self.nbytes += nbytes
        self.count += 1
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

    def remove(self, nbytes: int) -> None:
        """Count a value out."""
        self.nbytes -= nbytes
        self.count -= 1

    def usage(self) -> Usage:
        """What is held."""
        return Usage(self.nbytes, self.peak_nbytes, self.count, self.stall_seconds)


class DropLock:
    """The lock of a store whose bookkeeping must not change under its hands.

    Note: [drop inside put]
        The garbage collector may run a finalizer anywhere, so also inside ``put``, on the thread that holds the lock.
        Waiting for the lock would be a deadlock, and entering it a second time would change what ``put`` is halfway
        through. So what is dropped meanwhile is forgotten when the lock is free again.

    Args:
        forget: a method of the store, called under the lock; held weakly.
    """

    def __init__(self, forget: Callable[[Ticket], None]) -> None:
        self._forget = WeakMethod(forget)
        self._dropped: deque[Ticket] = deque()
        self._lock = Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *raised: object) -> None:
        self._lock.release()
        self._settle()

    def drop(self, ticket: Ticket) -> None:
        """Forget the value now, or when whoever holds the lock leaves it. Never waits."""
        self._dropped.append(ticket)
        self._settle()

    def _settle(self) -> None:
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                forget = self._forget()
                while self._dropped:
                    ticket = self._dropped.popleft()
                    if forget is not None:
                        forget(ticket)
            finally:
                self._lock.release()


@runtime_checkable
class Store(Protocol):
    """Holds encoded values by ticket. All methods may be called from any thread."""

    def put(self, encoded: Encoded) -> Ticket:
        """Take a value.

        Raises:
            StoreFullError: there is no room for it.
            StoreError: what is put can no longer be written.
        """

    def prefetch(self, ticket: Ticket) -> None:
        """Hint that ``get`` will come soon."""

    def get(self, ticket: Ticket) -> Encoded:
        """The value, any number of times.

        Raises:
            StoreError: it cannot be brought back.
            DamagedPlanesError: what came back is not what was put.
        """

    def drop(self, ticket: Ticket) -> None:
        """Forget the value."""

    def usage(self) -> Usage:
        """What is held."""

"""The contract of a store, which holds encoded values and never decodes them, and the pieces that stores share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Protocol, runtime_checkable
from weakref import WeakMethod

from backstash.arguments import check_count
from backstash.codecs.base import Encoded
from backstash.errors import StoreFullError


@dataclass(frozen=True, slots=True)
class Usage:
    """How much a store holds.

    Attributes:
        nbytes: bytes held now.
        peak_nbytes: the most bytes that the store ever held.
        count: number of values held now.
        stall_seconds: how long ``put`` and ``get`` have waited for transfers, since the store was created.
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


class Holdings:
    """Counts the bytes and values of a store. The caller holds the store's lock.

    Args:
        name: the store's name, for errors.
        capacity: the most bytes that the store may hold; None for no limit.
    """

    __slots__ = ("capacity", "count", "name", "nbytes", "peak_nbytes", "stall_seconds")

    def __init__(self, name: str, capacity: int | None = None) -> None:
        check_count(0 if capacity is None else capacity, "capacity", "bytes", name)
        self.name, self.capacity = name, capacity
        self.nbytes = self.peak_nbytes = self.count = 0
        self.stall_seconds = 0.0

    def add(self, encoded: Encoded, nbytes: int) -> None:
        """Counts a value of ``nbytes`` in.

        Raises:
            StoreFullError: the value exceeds the capacity. Nothing is counted then.
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
        """Counts a value of ``nbytes`` out."""
        self.nbytes -= nbytes
        self.count -= 1

    def usage(self) -> Usage:
        """Bytes and values that are held now."""
        return Usage(self.nbytes, self.peak_nbytes, self.count, self.stall_seconds)


class DropLock:
    """The lock of a store that must not forget a value while another method changes its accounts.

    Note: [drop inside put]
        The garbage collector may run a finalizer anywhere, so also inside ``put``, on the thread that holds the lock.
        If the finalizer waited for the lock, that would be a deadlock. If it entered the lock a second time, it would
        change accounts that ``put`` has changed by half. So a value that is dropped meanwhile is forgotten before the
        lock is taken next.

    Args:
        forget: a method of the store, which is called under the lock. It is held weakly.
    """

    def __init__(self, forget: Callable[[Ticket], None]) -> None:
        self._forget = WeakMethod(forget)
        self._dropped: deque[Ticket] = deque()
        self._lock = Lock()

    @property
    def held(self) -> Lock:
        """For a ``with`` statement. It is the lock itself, because a method in Python may be interrupted by Ctrl-C."""
        self._forget_dropped()
        return self._lock

    def drop(self, ticket: Ticket) -> None:
        """Forgets the value now, or before the lock is taken next. Never waits."""
        self._dropped.append(ticket)
        self._forget_dropped()

    def _forget_dropped(self) -> None:
        while self._dropped:
            taken: list[bool] = []
            try:
                taken.extend(map(self._lock.acquire, (False,)))  # one call, so that Ctrl-C comes before or after it
                if not taken[0]:
                    return
                forget = self._forget()
                while self._dropped:
                    ticket = self._dropped.popleft()
                    if forget is not None:
                        forget(ticket)
            finally:
                if taken and taken[0]:
                    self._lock.release()


@runtime_checkable
class Store(Protocol):
    """Holds encoded values by ticket. Every method may be called from any thread."""

    def put(self, encoded: Encoded) -> Ticket:
        """Holds a value from now on.

        Raises:
            StoreFullError: there is no room for the value.
            StoreError: the store has failed and cannot take values any more.
        """

    def prefetch(self, ticket: Ticket) -> None:
        """Begins to bring the value back, because ``get`` will ask for it soon."""

    def get(self, ticket: Ticket) -> Encoded:
        """Returns the value that was put, any number of times.

        Raises:
            StoreError: the value cannot be brought back.
            DamagedPlanesError: other bytes came back than were put.
        """

    def drop(self, ticket: Ticket) -> None:
        """Forgets the value; a second call does nothing."""

    def usage(self) -> Usage:
        """Bytes and values that are held now."""


def check_is_store(store: object, asked: str) -> None:
    """Raises an error for what is no store.

    Args:
        store: a store, of any type.
        asked: what was asked for, as the begin of a sentence.

    Raises:
        TypeError: it has not the methods of a store.
    """
    if isinstance(store, type) or not isinstance(store, Store):
        raise TypeError(
            f"{asked}, but a store has the methods of backstash.stores.Store. Pass one such as HostStore()."
        )

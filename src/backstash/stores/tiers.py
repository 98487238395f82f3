"""The store that consists of several stores, one behind the other."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import count
from threading import Lock

from backstash.codecs.base import Encoded
from backstash.errors import StoreError, StoreFullError
from backstash.stores.base import DropLock, Holdings, Store, Ticket, Usage, check_is_store


class TierStore:
    """Puts each value into the first of its stores that has room for it.

    A store that fails is passed over from then on, with one warning. The values that it holds can still be read.

    Args:
        stores: the stores, the fastest first. All but the last need a capacity.

    Raises:
        TypeError: these are no stores.
        ValueError: ``stores`` is empty, or names a store twice.

    Example:
        >>> from backstash.stores import DeviceStore, HostStore
        >>> store = TierStore([DeviceStore(capacity=1 << 30), HostStore()])
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        if not isinstance(stores, Iterable):
            raise TypeError(
                f"TierStore was asked for stores={stores!r:.80}, but it takes several. Pass them in a list, the "
                f"fastest first."
            )
        self.stores = tuple(stores)
        if not self.stores:
            raise ValueError("TierStore was asked for no stores, but it takes one or more, the fastest first.")
        for store in self.stores:
            check_is_store(store, f"TierStore was asked for {store!r:.80} among its stores")
        if len(set(map(id, self.stores))) < len(self.stores):
            raise ValueError(
                f"TierStore was asked for {self!r:.200}, but one store is named twice, and what has no room there has "
                f"none the second time. Name each once."
            )
        self._holdings = Holdings(type(self).__name__)
        self._failed: set[int] = set()
        self._values: dict[int, tuple[Store, Ticket]] = {}
        self._numbers = count()
        self._lock = DropLock(self._forget)
        self._telling = Lock()

    def __repr__(self) -> str:
        return f"TierStore([{', '.join(map(repr, self.stores))}])"

    def put(self, encoded: Encoded) -> Ticket:
        """Holds a value in the first store that has room for it.

        Raises:
            StoreFullError: no store has room for the value.
            StoreError: the last store failed.
        """
        store, held = self._put(encoded)
        with self._lock.held:
            ticket = Ticket(next(self._numbers), held.nbytes)
            self._values[ticket.number] = store, held
            self._holdings.add(encoded, held.nbytes)
        return ticket

    def prefetch(self, ticket: Ticket) -> None:
        """Asks the store that holds the value to begin to bring it back."""
        found = self._values.get(ticket.number)
        if found is not None:
            found[0].prefetch(found[1])

    def get(self, ticket: Ticket) -> Encoded:
        """The value, from the store that holds it."""
        store, held = self._values[ticket.number]
        return store.get(held)

    def drop(self, ticket: Ticket) -> None:
        """Forgets the value, here and in the store that holds it."""
        self._lock.drop(ticket)

    def settle(self) -> None:
        """As of :class:`HostStore`, of all stores that can."""
        for store in self.stores:
            if hasattr(store, "settle"):
                store.settle()

    def usage(self) -> Usage:
        """Bytes and values that were put here and are held now, and how long all stores together have waited."""
        with self._lock.held:
            usage = self._holdings.usage()
        stalls = sum(store.usage().stall_seconds for store in self.stores)
        return Usage(usage.nbytes, usage.peak_nbytes, usage.count, stalls)

    def _put(self, encoded: Encoded) -> tuple[Store, Ticket]:
        *others, last = range(len(self.stores))
        for tier in others:
            if tier in self._failed:
                continue
            store = self.stores[tier]
            try:
                return store, store.put(encoded)
            except StoreFullError:
                continue
            except StoreError as error:
                self._pass_over(tier, error)
        return self.stores[last], self.stores[last].put(encoded)

    def _pass_over(self, tier: int, error: StoreError) -> None:
        with self._telling:
            if tier in self._failed:
                return
            self._failed.add(tier)
        warnings.warn(
            f"backstash: {self.stores[tier]!r} failed and is passed over from now on, {self.stores[tier + 1]!r} serves "
            f"instead: {error}",
            stacklevel=4,
        )

    def _forget(self, ticket: Ticket) -> None:
        found = self._values.pop(ticket.number, None)
        if found is not None:
            self._holdings.remove(ticket.nbytes)
            found[0].drop(found[1])

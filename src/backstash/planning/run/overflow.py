"""A store whose values stay in memory where it has no room for them, so that a full disk ends no training."""

from __future__ import annotations

from collections.abc import Callable

from backstash.codecs.base import Encoded
from backstash.stores import DeviceStore, Store, Ticket, TierStore


class Overflowing(TierStore):
    """Puts values into a store, and leaves on their device those for which there is no room.

    Args:
        tell: is called with the reason for each value that stays.
    """

    def __init__(self, store: Store, tell: Callable[[str], None]) -> None:
        super().__init__([store, DeviceStore()])
        self._tell = tell

    def _put(self, encoded: Encoded) -> tuple[Store, Ticket]:
        store, ticket = super()._put(encoded)
        if store is self.stores[-1]:
            held = self.stores[0].usage().nbytes
            self._tell(f"{self.stores[0]!r} has no room for {ticket.nbytes} bytes beside the {held} that it holds")
        return store, ticket

"""What a store is: it holds encoded values, and never decodes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from backstash.codecs.base import Encoded


@dataclass(frozen=True, slots=True)
class Usage:
    """What a store holds.

    Attributes:
        nbytes: bytes held now.
        peak_nbytes: the most it ever held.
        count: values held now.
    """

    nbytes: int
    peak_nbytes: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A claim on one value in a store."""

    number: int
    nbytes: int


class Store(Protocol):
    """Holds encoded values by ticket. All methods may be called from any thread."""

    def put(self, encoded: Encoded) -> Ticket:
        """Take a value."""

    def prefetch(self, ticket: Ticket) -> None:
        """Hint that ``get`` will come soon."""

    def get(self, ticket: Ticket) -> Encoded:
        """The value, any number of times."""

    def drop(self, ticket: Ticket) -> None:
        """Forget the value."""

    def usage(self) -> Usage:
        """What is held."""

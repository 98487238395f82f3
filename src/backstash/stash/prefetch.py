"""The return of planes from where they were moved, just before backward reads them.

Note: [order of reading]
    Backward reads stored values in an order that nobody knows beforehand, but training repeats it. So the first step
    waits for each value, and notes them; every later one asks the stores for those that followed then. What is held on
    the device is noted too, as it tells how far backward has come. A wrong guess costs time and nothing else: what was
    fetched in vain counts as under way until its graph is gone, and so leaves the less room for others.

Note: [window]
    What is fetched early takes memory early. So no more is under way than a few of the largest values, and no more than
    there is room for: with it the device holds no more of what was saved than it held at its peak. One exception: while
    a value is read the next one may come whatever the room, as else nothing would ever be hidden where all is moved.
    Values that together take less than half of the largest do not count as the next one: a large one that waited for
    its small neighbours to be read would come too late.
    A value that will be read again that soon is not fetched again: its planes stay with it.

Note: [out before backward]
    Where it is planned what is asked for, it is planned as well that everything has left when backward begins, because
    most is alive then. An accelerator's host is far ahead of the device: when the host has come to backward, most
    copies are yet to be made, and the host may not wait for them. So the device is told to wait for the last of them at
    this place of its queue, where they are over if the plan is right. The memory that they have read is free then.
"""

from __future__ import annotations

import time
import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from backstash.codecs.base import Encoded
from backstash.stores import Store, Ticket

if TYPE_CHECKING:
    from backstash.policies.base import Policy

WINDOW = 3
"""How many values as large as the largest one may be under way, or there and not read yet."""

Tag = tuple[str, int]
"""Which value of a step it is: its key, and how many values of that key came before it."""


class MoveTimer(Protocol):
    """Is told of what is moved and read in a step, at the moment when it happens. It must not keep what it is told."""

    def put(self, key: str, nbytes: int, store: Store) -> None:
        """A value was moved, and the device has waited until it could be."""

    def begin_backward(self) -> None:
        """Backward begins."""

    def reach(self, key: str) -> None:
        """A node of backward reads a value, moved or not."""

    def begin_read(self, key: str) -> None:
        """The planes of a moved value are about to be read."""

    def end_read(self, key: str) -> None:
        """They are there."""


@runtime_checkable
class Drains(Protocol):
    """A store that can have the device wait for what is on its way out."""

    def drain(self) -> None:
        """Has the current stream wait until all that was put has left, so that its memory is free. The host goes on."""


class Moved(Protocol):
    """A value in a store that is not the device; its owner may let go of it at any time."""

    tag: Tag | None
    planes: Encoded | None
    store: Store
    ticket: Ticket


class Prefetcher:
    """Asks stores for what backward will read next (Notes: [order of reading], [window]).

    Used under its owner's lock. It holds values by weak references only.

    Args:
        ahead: how many values may be under way, whatever their size; None: as many as fit into the window.
        fetches: which values are asked for when a value is read first, by their keys, where that is planned. Nothing is
            learned then, and nothing else is asked for.
        stays: by the key of a value, the numbers of its reads after which it stays for the next one, where it is
            planned what is asked for.
        timer: is told of what is moved; None where nobody asked for that.
    """

    def __init__(
        self,
        ahead: int | None = None,
        fetches: Mapping[str, tuple[str, ...]] | None = None,
        stays: Mapping[str, frozenset[int]] | None = None,
        timer: MoveTimer | None = None,
    ) -> None:
        self.ahead = ahead
        self.fetches, self.stays, self.timer = fetches, stays, timer
        self._order: list[Tag] = []  # as the step before read them
        self._places: dict[Tag, list[int]] = {}  # where in that order
        self._milestones: dict[str, int] = {}  # how many had been read when a value on the device was, by key
        self._begin()

    def _begin(self) -> None:
        self._moved: dict[Tag, weakref.ref[Moved]] = {}
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._read: list[Tag] = []
        self._passed: dict[str, int] = {}
        self._next = 0  # in the order
        self._reached: set[str] = set()  # keys that were read, where it is planned what is fetched then
        self._reads: defaultdict[Tag, int] = defaultdict(int)  # of what stays for another read, so far
        self._under_way: dict[Tag, int] = {}  # bytes
        self._there: dict[Tag, int] = {}  # bytes of those that have come and will be read again, and of that being read
        self._largest = 0

    @property
    def order(self) -> Sequence[Tag]:
        """The values that the step before has read, in that order, which is learned from it."""
        return self._order

    @property
    def idle(self) -> bool:
        """Whether nothing was moved in this step."""
        return not self._moved

    def begin_step(self, policy: Policy | None = None) -> None:
        """A new forward pass begins: what backward read since the last one is the order now.

        Args:
            policy: says what is planned, if anything is; None for what was planned before.
        """
        if policy is not None:
            self.fetches, self.stays, self.timer = policy.fetches, policy.stays, policy.move_timer
        if self._read:
            self._order, self._milestones = self._read, self._passed
            self._places = {}
            for place, tag in enumerate(self._order):
                self._places.setdefault(tag, []).append(place)
        self._begin()

    def begin_backward(self) -> None:
        """Backward begins: what was read before, to prove that values can be made again, is of no order.

        Where it is planned what is asked for, the device waits for what is on its way (Note: [out before backward]).
        """
        self._reached.clear()
        self._reads.clear()
        self._read, self._passed, self._next = [], {}, 0
        if self.fetches is not None:
            stores = {id(moved.store): moved.store for each in self._moved.values() if (moved := each()) is not None}
            for store in stores.values():
                if isinstance(store, Drains):
                    store.drain()
        if self.timer is not None:
            self.timer.begin_backward()

    def put(self, moved: Moved, key: str) -> None:
        """A value was moved."""
        moved.tag = key, self._counts[key]
        self._counts[key] += 1
        self._moved[moved.tag] = weakref.ref(moved)
        self._largest = max(self._largest, moved.ticket.nbytes)
        if self.timer is not None:
            self.timer.put(key, moved.ticket.nbytes, moved.store)

    def reach(self, key: str) -> None:
        """Backward reads a value: ask for what is planned to be fetched now."""
        if self.timer is not None:
            self.timer.reach(key)
        if self.fetches is None or key in self._reached:
            return
        self._reached.add(key)
        for wanted in self.fetches.get(key, ()):
            for number in range(self._counts.get(wanted, 0)):
                moved = self._alive((wanted, number))
                if moved is not None:
                    with suppress(torch.OutOfMemoryError):  # then it is fetched when it is read, and more is free
                        moved.store.prefetch(moved.ticket)

    def passed(self, key: str, room: int) -> None:
        """Backward reads a value that is on the device. Takes ``room`` as :meth:`advance`."""
        if self.fetches is not None:
            return
        self._passed.setdefault(key, len(self._read))
        self._next = max(self._next, self._milestones.get(key, 0))
        self.advance(room)

    def read(self, moved: Moved, room: int) -> tuple[Encoded, float]:
        """The planes of a value, and how many seconds it took the store to bring them.

        The next ones are asked for before it is waited for, but for a value that nobody has asked for yet: it must not
        queue behind them. Takes ``room`` as :meth:`advance`.
        """
        if self.fetches is not None:
            return self._read_planned(moved)
        tag = moved.tag
        if tag is None or self._alive(tag) is not moved:  # of an older step
            tag = None
        asked = tag in self._under_way or tag in self._there
        if tag is not None:
            self._read.append(tag)
            places = self._places.get(tag)
            if places:  # the next of them, or else the last
                self._next = 1 + places[min(bisect_left(places, self._next), len(places) - 1)]
            self._under_way.pop(tag, None)
            self._there[tag] = moved.ticket.nbytes
        again = asked and self.advance(room, moved)
        encoded, moved.planes, seconds = moved.planes, None, 0.0
        if self.timer is not None and tag is not None:
            self.timer.begin_read(tag[0])
        if encoded is None:
            started = time.perf_counter()
            encoded = moved.store.get(moved.ticket)
            seconds = time.perf_counter() - started
        if self.timer is not None and tag is not None:
            self.timer.end_read(tag[0])
        if not asked:
            again = self.advance(room, moved)
        if again:
            moved.planes = encoded
        elif tag is not None:
            del self._there[tag]
        return encoded, seconds

    def _read_planned(self, moved: Moved) -> tuple[Encoded, float]:
        encoded, moved.planes, seconds = moved.planes, None, 0.0
        if encoded is None:
            started = time.perf_counter()
            encoded = moved.store.get(moved.ticket)
            seconds = time.perf_counter() - started
        if self.stays and moved.tag is not None:
            numbers = self.stays.get(moved.tag[0])
            if numbers is not None:
                if self._reads[moved.tag] in numbers:
                    moved.planes = encoded
                self._reads[moved.tag] += 1
        return encoded, seconds

    def advance(self, room: int, reading: Moved | None = None) -> bool:
        """Ask for as many of the next values as may be under way.

        Args:
            room: bytes that the device holds less than at its peak.
            reading: the value that is read now.

        Returns:
            Whether ``reading`` will be read again soon.
        """
        if self.fetches is not None:
            return False
        for known in (self._under_way, self._there):
            for tag in [tag for tag in known if self._alive(tag) is None]:
                del known[tag]
        again = False
        for place in range(self._next, len(self._order)):
            tag = self._order[place]
            moved = self._alive(tag)
            if moved is not None and moved is reading:
                again = again or place == self._next or self.ahead is not None or self._taken <= self._limit(room)
            if moved is None or tag in self._under_way or tag in self._there:
                continue
            if not self._fits(moved.ticket.nbytes, room, reading):
                break
            self._under_way[tag] = moved.ticket.nbytes
            try:
                moved.store.prefetch(moved.ticket)
            except torch.OutOfMemoryError:  # then it is fetched when it is read, and more is free
                del self._under_way[tag]
                break
        return again

    def _fits(self, nbytes: int, room: int, reading: Moved | None) -> bool:
        if self.ahead is not None:
            return len(self._under_way) < self.ahead
        if reading is not None and 2 * sum(self._under_way.values()) < self._largest:
            return True
        return self._taken + nbytes <= self._limit(room)

    @property
    def _taken(self) -> int:
        return sum(self._under_way.values()) + sum(self._there.values())

    def _limit(self, room: int) -> int:
        return min(WINDOW * self._largest, room)

    def _alive(self, tag: Tag) -> Moved | None:
        moved = self._moved.get(tag)
        return moved() if moved is not None else None

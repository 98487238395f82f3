"""The store that holds planes in the memory of another process of the same training.

Note: [a peer's memory]
    Each rank is a client of its peer, and serves whoever has it as a peer, on a thread of its own. What they send each
    other goes through a process group of its own, so that it cannot come between the program's collectives, and each
    value has a tag of its own for each direction, so that values may come back in any order, and beside those that two
    ranks put at each other. What is dropped may be dropped by a finalizer, which must not wait for a connection; so the
    peer is told with the next value that is put or asked for.

    A server waits for requests for as long as there are none. gloo closes all connections of a group where one wait
    ends in vain, so the group has no timeout, and what a client waits for has one of its own. A thread that comes back
    from gloo when the interpreter is ending aborts the process. So a store that is open then is closed, and ranks wait
    for each other a little. They do not wait longer where an error ends one of them: its peer may wait for that rank in
    a collective of the program's.
"""

from __future__ import annotations

import atexit
import sys
import time
from datetime import timedelta
from itertools import count
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from backstash.codecs.base import Encoded
from backstash.errors import StoreError
from backstash.stores.base import DropLock, Holdings, Ticket, Usage
from backstash.stores.blocks import BlockedValue, gather_planes, plane_bytes

_PUT, _GET, _DROP, _END = range(4)

_REQUESTS, _FIRST = 1, 2
"""Tags: of requests, and of the first value's bytes on their way to the peer. On its way back it has the next one."""

_TAGS = 1 << 20
"""So many values may be under way before a tag is used again."""

_PATIENCE, _FOREVER = timedelta(minutes=30), timedelta(days=365)
"""How long a client waits for its peer, and a server for a request."""

_GRACE = 2.0
"""Seconds in which other ranks may close theirs where an error, or the interpreter's end, closes this rank's."""


class PeerStore:
    """Holds planes in the host memory of another rank of the process group, such as one on a machine with room.

    All ranks make theirs at the same time, because that makes a process group (gloo). ``put`` and ``get`` wait for the
    connection, ``prefetch`` does not. Planes of an accelerator pass through this rank's host memory. Bytes are not
    checked on their way, beyond what TCP does.

    Args:
        peer: the rank that holds this rank's values.
        capacity: the most bytes that the peer is to hold for this rank; None for no limit.

    Raises:
        StoreError: there is no process group, or no such other rank.
        ValueError: ``capacity`` is negative.
    """

    def __init__(self, peer: int, capacity: int | None = None) -> None:
        self._holdings = Holdings(type(self).__name__, capacity)
        if not (dist.is_available() and dist.is_initialized()):
            raise StoreError(
                "PeerStore was asked for, but there is no process group. Call torch.distributed.init_process_group() "
                "first, on all ranks."
            )
        rank, world = dist.get_rank(), dist.get_world_size()
        is_rank = isinstance(peer, int) and not isinstance(peer, bool) and 0 <= peer < world
        self._group: Any = dist.new_group(backend="gloo", timeout=_FOREVER)
        peers: list[Any] = [None] * world
        dist.all_gather_object(peers, peer if is_rank and peer != rank else None, group=self._group)
        if None in peers:
            raise StoreError(
                f"PeerStore was asked for peer={peer!r:.80} on rank {rank} of {world}, but rank {peers.index(None)} "
                f"named no other rank. Name one from 0 to {world - 1} that is not the own one, on every rank."
            )
        self.peer = peer
        self._values: dict[int, BlockedValue] = {}
        self._coming: dict[int, tuple[Tensor, Any]] = {}  # by number: what is on its way back
        self._dropped: list[int] = []  # of which the peer does not know yet
        self._flying: list[tuple[Tensor, Any]] = []  # what comes back although it was dropped: gloo writes into it
        self._numbers = count()
        self._lock = DropLock(self._forget)
        self._is_open = True
        clients = [client for client, named in enumerate(peers) if named == rank]
        self._servers = [Thread(target=_serve, args=(self._group, client), daemon=True) for client in clients]
        for server in self._servers:
            server.start()
        _open.add(self)

    def __repr__(self) -> str:
        return f"PeerStore(peer={self.peer}, capacity={self._holdings.capacity})"

    def put(self, encoded: Encoded) -> Ticket:
        """Sends a value to the peer.

        Raises:
            StoreFullError: the value exceeds ``capacity``.
            StoreError: the store is closed, or the peer is gone.
        """
        with self._lock.held:
            self._require_open()
            value = BlockedValue(encoded, next(self._numbers))
            self._holdings.add(encoded, value.nbytes)
            self._values[value.ticket.number] = value
            try:
                memory = torch.empty(value.nbytes, dtype=torch.uint8)
                gather_planes(value.places, [plane_bytes(plane) for plane in encoded.planes.values()], 0, memory)
                self._ask(_PUT, value)
                self._give(memory, _tag(value.ticket.number))
            except BaseException:
                self._forget(value.ticket)
                raise
            return value.ticket

    def prefetch(self, ticket: Ticket) -> None:
        """Asks the peer for the value, and does not wait for it."""
        with self._lock.held:
            value = self._values.get(ticket.number)
            if value is not None and self._is_open and ticket.number not in self._coming:
                self._fetch(value)

    def get(self, ticket: Ticket) -> Encoded:
        """The value that was put.

        Raises:
            StoreError: the store is closed, or the peer is gone.
        """
        with self._lock.held:
            self._require_open()
            value = self._values[ticket.number]
            memory, work = self._coming.get(ticket.number) or self._fetch(value)
            self._transfer(lambda: work.wait(_PATIENCE))
            self._coming.pop(ticket.number, None)
            return value.encoded(memory)

    def drop(self, ticket: Ticket) -> None:
        """Forgets the value. The peer frees its memory with the next value that is put or asked for."""
        self._lock.drop(ticket)

    def usage(self) -> Usage:
        """Bytes and values that the peer holds for this rank."""
        with self._lock.held:
            return self._holdings.usage()

    def close(self) -> None:
        """Ends the connection; all ranks call it, and wait for each other unless an error is on its way.

        Values that were put are gone. A second call does nothing.

        Raises:
            StoreError: the peer is gone, and no other error is on its way.
        """
        self._close(sys.exc_info()[0] is not None)

    def _close(self, hurries: bool) -> None:
        with self._lock.held:
            if not self._is_open:
                return
            self._is_open = False
            _open.discard(self)
            try:
                self._send(_END, 0, 0)
            except StoreError:
                if not hurries:
                    raise
        until = time.monotonic() + _GRACE
        for server in self._servers:
            server.join(max(0.0, until - time.monotonic()) if hurries else None)

    # -- the connection, under the lock --------------------------------------------------------------------------------

    def _fetch(self, value: BlockedValue) -> tuple[Tensor, Any]:
        memory = torch.empty(value.nbytes, dtype=torch.uint8)
        work = dist.irecv(memory, self.peer, group=self._group, tag=_tag(value.ticket.number, comes_back=True))
        self._coming[value.ticket.number] = memory, work
        self._ask(_GET, value)
        return memory, work

    def _ask(self, what: int, value: BlockedValue) -> None:
        self._flying = [each for each in self._flying if not each[1].is_completed()]
        while self._dropped:
            self._send(_DROP, self._dropped[-1], 0)
            self._dropped.pop()
        self._send(what, value.ticket.number, value.nbytes)

    def _send(self, what: int, number: int, nbytes: int) -> None:
        self._give(torch.tensor([what, number, nbytes]), _REQUESTS)

    def _give(self, x: Tensor, tag: int) -> None:
        def give() -> None:
            work: Any = dist.isend(x, self.peer, group=self._group, tag=tag)
            work.wait(_PATIENCE)

        self._transfer(give)

    def _transfer(self, transfer: Any) -> None:
        started = time.perf_counter()
        try:
            transfer()
        except RuntimeError as error:
            raise StoreError(
                f"{self!r} was asked to transfer a value, but the connection to rank {self.peer} has failed: {error}. "
                f"What was put there is lost: repeat the step without this store."
            ) from error
        finally:
            self._holdings.stall_seconds += time.perf_counter() - started

    def _require_open(self) -> None:
        if not self._is_open:
            raise StoreError(f"{self!r} was asked for a value, but it was closed. Make another one, on all ranks.")

    def _forget(self, ticket: Ticket) -> None:
        value = self._values.pop(ticket.number, None)
        if value is None:
            return
        self._holdings.remove(ticket.nbytes)
        self._dropped.append(ticket.number)
        coming = self._coming.pop(ticket.number, None)
        if coming is not None:
            self._flying.append(coming)


_open: set[PeerStore] = set()


@atexit.register
def _close_all() -> None:
    for store in list(_open):
        store._close(hurries=True)


def _tag(number: int, comes_back: bool = False) -> int:
    return _FIRST + 2 * (number % _TAGS) + comes_back


def _serve(group: Any, client: int) -> None:
    """Holds another rank's values, until it closes its store or is gone."""
    held: dict[int, Tensor] = {}
    sending: list[tuple[Any, Tensor]] = []
    request = torch.empty(3, dtype=torch.int64)
    while True:
        try:
            dist.recv(request, client, group=group, tag=_REQUESTS)
            what, number, nbytes = request.tolist()
            if what == _PUT:
                held[number] = torch.empty(nbytes, dtype=torch.uint8)
                dist.recv(held[number], client, group=group, tag=_tag(number))
            elif what == _GET:
                sending = [(work, x) for work, x in sending if not work.is_completed()]
                tag = _tag(number, comes_back=True)
                sending.append((dist.isend(held[number], client, group=group, tag=tag), held[number]))
            elif what == _DROP:
                held.pop(number, None)
            else:
                return
        except RuntimeError:  # the client's process has ended
            return

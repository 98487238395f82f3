"""The store that holds planes in a file.

Note: [forked stores]
    A process that is forked has none of the threads that write and read, and the places in the file are given out by
    the one that it was forked from. So there the store begins anew, with a file of its own at the first ``put``. Values
    that were put before belong to the other process alone.
"""

from __future__ import annotations

import os
import time
import zlib
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import count
from pathlib import Path
from queue import LifoQueue
from weakref import WeakSet

from torch import Tensor

from backstash.arguments import check_count, is_path
from backstash.codecs.base import Encoded
from backstash.errors import DamagedPlanesError, StoreError, StoreFullError
from backstash.stores.aligned import PAGE, MemoryPool, aligned_memory
from backstash.stores.base import DropLock, Holdings, Ticket, Usage
from backstash.stores.blocks import BLOCK, BlockedValue, ReadTransfers, gather_planes, plane_bytes
from backstash.stores.file import UnnamedFile
from backstash.stores.space import Space

_THREADS = 3
"""Threads in each direction: some compute checksums while the blocks of others are under way."""


class DiskStore:
    """Holds planes in one unnamed file in ``directory``, which is written and read past the system's page cache.

    ``put`` copies the planes into aligned memory, from which threads write them, and returns; the memory of the planes
    is free then. It waits while more than ``in_flight`` bytes are not written yet. ``prefetch`` begins to read, and
    ``get`` waits for the end of reading. A checksum (CRC-32) of each block that is read is compared with the checksum
    of the block that was put. The file grows as far as it is needed. Its space is used again, and is freed by
    ``close``, with the store, or when the process ends or is killed.

    After a write has failed the store refuses every later ``put``. Values that were written before can still be read.

    Args:
        directory: the folder of the file. It is created if it is missing.
        capacity: the most bytes that the file may hold, in whole pages; None for all that the disk has.
        in_flight: bytes of memory for blocks that are not written yet, and as many for values that were prefetched.
        reuse: bytes of memory that was read into that are kept, and used again; None for as many as ``in_flight``.

    Raises:
        StoreError: no file can be created in ``directory``.
        TypeError: an argument is of another type.
        ValueError: ``capacity`` is negative, or ``in_flight`` is less than 8 MiB.

    Example:
        >>> import torch
        >>> from tempfile import TemporaryDirectory
        >>> from backstash import codecs
        >>> with TemporaryDirectory() as directory, DiskStore(directory) as store:
        ...     ticket = store.put(codecs.get("zvc").encode(torch.ones(1000)))
        ...     store.get(ticket).spec.shape
        (1000,)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        capacity: int | None = None,
        *,
        in_flight: int = 64 << 20,
        reuse: int | None = None,
    ) -> None:
        if not is_path(directory):
            raise TypeError(
                f"DiskStore was asked for directory={directory!r:.80}, but that is no path. Pass the folder of its "
                "file."
            )
        check_count(in_flight, "in_flight", "bytes", "DiskStore")
        check_count(0 if reuse is None else reuse, "reuse", "bytes", "DiskStore")
        if in_flight < 2 * BLOCK:
            raise ValueError(f"DiskStore was asked for in_flight={in_flight}, but it takes {2 * BLOCK} bytes or more.")
        self.directory = Path(directory)
        self._in_flight = in_flight
        self._reuse = in_flight if reuse is None else reuse
        self._numbers = count()
        self._closed = False
        self._begin(capacity)
        self._open()
        _stores.add(self)

    def _begin(self, capacity: int | None) -> None:
        """Begins with nothing held, and without the file."""
        self._is_open = False
        self._holdings = Holdings(type(self).__name__, capacity)
        self._values: dict[int, BlockedValue] = {}
        self._lock = DropLock(self._forget)
        self._writers = ThreadPoolExecutor(_THREADS, "backstash-write")
        self._readers = ThreadPoolExecutor(_THREADS, "backstash-read")
        self._failure: OSError | None = None
        self._prefetched = 0

    def _open(self) -> None:
        """Opens the file, and takes the memory for what is under way."""
        self._file = UnnamedFile(self.directory)
        capacity = self._holdings.capacity
        self._space = Space(1 << 62 if capacity is None else capacity // PAGE * PAGE)
        self._staging: LifoQueue[Tensor] = LifoQueue()  # last in, first out: the memory used last is in the caches
        for _ in range(self._in_flight // BLOCK):
            self._staging.put(aligned_memory(BLOCK))
        self._memory = MemoryPool(self._reuse)
        self._is_open = True

    def __repr__(self) -> str:
        return f"DiskStore({str(self.directory)!r}, capacity={self._holdings.capacity})"

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def put(self, encoded: Encoded) -> Ticket:
        """Holds a value. Returns when the planes are copied, before they are written.

        Raises:
            StoreFullError: the value exceeds ``capacity``, or the disk is full.
            StoreError: an earlier write has failed, or the store is closed.
        """
        with self._lock.held:
            value = self._admit(encoded)
        try:
            views = [plane_bytes(plane) for plane in encoded.planes.values()]
            for block in range(value.blocks):
                staging = self._free_staging()
                gather_planes(value.places, views, block * BLOCK, staging)
                with self._lock.held:
                    self._check_open(value)
                    value.writes.append(self._writers.submit(self._write, value, block, staging))
                    value.users += 1
        except BaseException:  # a device that has no memory left, an interrupt
            self.drop(value.ticket)
            raise
        finally:
            self._done(value)
        return value.ticket

    def prefetch(self, ticket: Ticket) -> None:
        """Begins to read the value, unless ``in_flight`` bytes were prefetched that no ``get`` has asked for yet."""
        with self._lock.held:
            value = self._values.get(ticket.number)
            if value is None or value.reading is not None or self._closed:
                return
            if self._prefetched == 0 or self._prefetched + value.nbytes <= self._in_flight:
                value.reading = self._begin_reading(value)
                self._prefetched += value.nbytes

    def get(self, ticket: Ticket) -> Encoded:
        """The value that was put, in memory of its own.

        Raises:
            StoreError: the value could not be written or read, or the store is closed.
            DamagedPlanesError: other bytes were read than were put.
        """
        with self._lock.held:
            value = self._values.get(ticket.number)
            if value is None:
                raise StoreError(
                    f"{self!r} was asked for a value that it does not hold. It was dropped, or put before this process "
                    f"was forked: end the backward pass before a fork."
                )
            self._check_open(value)
            reading = self._take_reading(value) or self._begin_reading(value)
        started = time.perf_counter()
        wait(reading.blocks)
        self._holdings.stall_seconds += time.perf_counter() - started
        for block in reading.blocks:
            if block.cancelled():
                self._check_open(value)
            block.result()
        return value.encoded(reading.memory)

    def drop(self, ticket: Ticket) -> None:
        """Forgets the value, without waiting for a transfer."""
        self._lock.drop(ticket)

    def usage(self) -> Usage:
        """Bytes, in whole pages, and values that are held now."""
        with self._lock.held:
            return self._holdings.usage()

    def flush(self) -> None:
        """Waits until every value that was put is written, or its write has failed."""
        with self._lock.held:
            writes = [write for value in self._values.values() for write in value.writes]
        wait(writes)

    def close(self) -> None:
        """Frees the file and all values in it."""
        with self._lock.held:
            self._closed = True
        self._readers.shutdown(cancel_futures=True)
        self._writers.shutdown(cancel_futures=True)
        self._file.close()

    # -- under the lock ------------------------------------------------------------------------------------------

    def _admit(self, encoded: Encoded) -> BlockedValue:
        """Reserves room for a value. ``put`` is its user until it has handed over all blocks to the writers."""
        value = BlockedValue(encoded, next(self._numbers))
        self._check_open(value)
        if self._failure is not None:
            raise StoreError(
                f"{self!r} was asked to hold {value}, but a write failed before: {self._failure}. See what ails the "
                f"disk, and begin the step again with a new store."
            ) from self._failure
        if not self._is_open:
            self._open()
        self._holdings.add(encoded, value.nbytes)
        try:
            value.start = self._place(value)
        except BaseException:
            self._holdings.remove(value.nbytes)
            raise
        self._values[value.ticket.number] = value
        return value

    def _place(self, value: BlockedValue) -> int:
        """Returns the byte of the file with which the value begins."""
        if value.nbytes == 0:
            return 0
        start = self._space.take(value.nbytes)
        if start is None:
            raise StoreFullError(
                f"{self!r} was asked to hold {value.nbytes} bytes ({value}), but what is free of its capacity is in "
                f"smaller pieces. Raise the capacity, or put another store behind it: stores.TierStore."
            )
        try:
            self._file.grow(start + value.nbytes, self._holdings.capacity)
        except OSError as error:
            self._space.give(start, value.nbytes)
            raise StoreFullError(
                f"{self!r} was asked to hold {value.nbytes} bytes ({value}), but its file has {self._file.nbytes} and "
                f"cannot grow: {error}. Make room, or put another store behind it: stores.TierStore."
            ) from error
        return start

    def _check_open(self, value: BlockedValue) -> None:
        if self._closed:
            raise StoreError(f"{self!r} was asked for {value}, but it is closed. Close it after the last backward.")

    def _begin_reading(self, value: BlockedValue) -> ReadTransfers:
        memory = self._memory.take(value.nbytes)
        value.users += value.blocks
        blocks = [self._readers.submit(self._read, value, block, memory) for block in range(value.blocks)]
        return ReadTransfers(memory, blocks)

    def _take_reading(self, value: BlockedValue) -> ReadTransfers | None:
        """Returns the value's prefetched reading, which belongs to the caller from now on, or None."""
        reading, value.reading = value.reading, None
        if reading is not None:
            self._prefetched -= value.nbytes
        return reading

    def _forget(self, ticket: Ticket) -> None:
        value = self._values.pop(ticket.number, None)
        if value is not None:
            value.dropped = True
            self._take_reading(value)
            self._holdings.remove(value.nbytes)
            self._release(value)

    def _release(self, value: BlockedValue) -> None:
        """Frees the value's part of the file if the value was dropped and no transfer uses it."""
        if value.dropped and value.users == 0 and value.nbytes:
            self._space.give(value.start, value.nbytes)

    # -- by threads ----------------------------------------------------------------------------------------------

    def _free_staging(self) -> Tensor:
        started = time.perf_counter()
        staging = self._staging.get()
        self._holdings.stall_seconds += time.perf_counter() - started
        return staging

    def _write(self, value: BlockedValue, block: int, staging: Tensor) -> None:
        data = staging[: value.length(block)].numpy().data
        try:
            if not value.dropped:
                value.checksums[block] = zlib.crc32(data)
                self._file.write(data, value.start + block * BLOCK)
        except OSError as error:
            value.failure = self._failure = error
        finally:
            self._staging.put(staging)
            self._done(value)

    def _read(self, value: BlockedValue, block: int, memory: Tensor) -> None:
        first = block * BLOCK
        data = memory[first : first + value.length(block)].numpy().data
        try:
            wait(value.writes)
            if value.dropped:
                return
            if value.failure is not None:
                raise StoreError(
                    f"{self!r} was asked for {value}, but it could not be written: {value.failure}. See what ails the "
                    f"disk, and compute the step again with a new store."
                ) from value.failure
            try:
                self._file.read(data, value.start + first)
            except OSError as error:
                raise StoreError(
                    f"{self!r} was asked for {value}, but it could not be read: {error}. See what ails the disk, and "
                    f"compute the step again with a new store."
                ) from error
            if zlib.crc32(data) != value.checksums[block]:
                raise DamagedPlanesError(
                    f"{self!r} was asked for {value}, got other bytes than were put: the checksum of block {block} of "
                    f"{value.blocks} differs. Something else wrote to the file, or the disk fails; compute the step "
                    f"again with a new store."
                )
        finally:
            self._done(value)

    def _done(self, value: BlockedValue) -> None:
        with self._lock.held:
            value.users -= 1
            self._release(value)


_stores: WeakSet[DiskStore] = WeakSet()


def _begin_anew() -> None:
    for store in _stores:
        store._begin(store._holdings.capacity)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)  # Note: [forked stores]

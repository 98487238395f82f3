"""Planes in a file.

Note: [a file without a name]
    The file is unnamed from the moment it is opened, so nobody can damage or delete it, and its space is free again as
    soon as this process has ended, however it ended: the system itself cleans up, and not the next run.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import count
from pathlib import Path
from queue import LifoQueue

import torch
from torch import Tensor

from backstash.codecs.base import Encoded
from backstash.errors import DamagedPlanesError, StoreError, StoreFullError
from backstash.stores.base import Account, DropLock, Ticket, Usage
from backstash.stores.space import Space
from backstash.torch_internals import storage_use_count

_PAGE = 4096  # what the system reads and writes past its cache: whole ones, aligned in memory and in the file
_LINE = 64  # planes begin at multiples of it, as those that torch allocates do
BLOCK = 4 << 20
"""Bytes of one transfer."""

_STEP = 256 << 20  # bytes by which the file grows
_THREADS = 3  # in each direction: some compute checksums while the blocks of others are under way
_HUGE_FROM = 4 << 20


class DiskStore:
    """Holds the planes in one file of its own in ``directory``, written and read past the system's page cache.

    ``put`` copies the planes into aligned memory, from which threads write them, and returns; then the memory of the
    planes is free. It waits where more than ``in_flight`` bytes are not written yet. ``prefetch`` begins to read, and
    ``get`` waits for it. What comes back is compared with a checksum (CRC-32) of what was put. The file grows as far as
    it is needed, is used again, and is given back by ``close``, with the store, or when the process ends or is killed.

    A write that fails makes the store refuse every later ``put``; what was written before can still be read.

    Args:
        directory: where the file is; made if it is missing.
        capacity: the most bytes that it may hold, in whole pages; None for all that the disk has.
        in_flight: bytes of memory for what is not written yet, and as many for what was prefetched. Memory that was
            read into is used again; as much of it is kept.

    Raises:
        StoreError: no file can be made in ``directory``.
        ValueError: ``capacity`` is negative, or ``in_flight`` less than 8 MiB.

    Example:
        >>> from backstash import codecs
        >>> with tempfile.TemporaryDirectory() as directory, DiskStore(directory) as store:
        ...     ticket = store.put(codecs.get("zvc").encode(torch.ones(1000)))
        ...     store.get(ticket).spec.shape
        (1000,)
    """

    def __init__(
        self, directory: str | os.PathLike[str], capacity: int | None = None, *, in_flight: int = 64 << 20
    ) -> None:
        if in_flight < 2 * BLOCK:
            raise ValueError(f"DiskStore was asked for in_flight={in_flight}, but it takes {2 * BLOCK} bytes or more.")
        self.directory = Path(directory)
        self._account = Account(type(self).__name__, capacity)
        self._file = _File(self.directory)
        self._space = Space(1 << 62 if capacity is None else capacity // _PAGE * _PAGE)
        self._in_flight = in_flight
        self._values: dict[int, _Value] = {}
        self._numbers = count()
        self._lock = DropLock(self._forget)
        self._staging: LifoQueue[Tensor] = LifoQueue()  # last in, first out: what was used last is in the caches
        for _ in range(in_flight // BLOCK):
            self._staging.put(_aligned(BLOCK))
        self._memory = _Memory(in_flight)
        self._writers = ThreadPoolExecutor(_THREADS, "backstash-write")
        self._readers = ThreadPoolExecutor(_THREADS, "backstash-read")
        self._failure: OSError | None = None
        self._prefetched = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"DiskStore({str(self.directory)!r}, capacity={self._account.capacity})"

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def put(self, encoded: Encoded) -> Ticket:
        """Take a value.

        Raises:
            StoreFullError: it does not fit into ``capacity``, or the disk is full.
            StoreError: something could not be written, or the store is closed.
        """
        with self._lock:
            value = self._admit(encoded)
        try:
            views = [_bytes(plane) for plane in encoded.planes.values()]
            for block in range(value.blocks):
                staging = self._free_staging()
                _gather(value.places, views, block * BLOCK, staging)
                with self._lock:
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
        """Begin to read it, unless as many bytes as may be in flight have been prefetched and not been asked for."""
        with self._lock:
            value = self._values.get(ticket.number)
            if value is None or value.reading is not None or self._closed:
                return
            if self._prefetched == 0 or self._prefetched + value.nbytes <= self._in_flight:
                value.reading = self._begin_reading(value)
                self._prefetched += value.nbytes

    def get(self, ticket: Ticket) -> Encoded:
        """The value, in memory of its own.

        Raises:
            StoreError: it could not be written or read, or the store is closed.
            DamagedPlanesError: what was read is not what was put.
        """
        with self._lock:
            value = self._values[ticket.number]
            self._check_open(value)
            reading = self._take_reading(value) or self._begin_reading(value)
        started = time.perf_counter()
        wait(reading.blocks)
        self._account.stall_seconds += time.perf_counter() - started
        for block in reading.blocks:
            if block.cancelled():
                self._check_open(value)
            block.result()
        return value.encoded(reading.memory)

    def drop(self, ticket: Ticket) -> None:
        """Forget the value; nothing is waited for."""
        self._lock.drop(ticket)

    def usage(self) -> Usage:
        """What is held, in whole pages."""
        with self._lock:
            return self._account.usage()

    def flush(self) -> None:
        """Wait until all that was put is written, or failed to be."""
        with self._lock:
            writes = [write for value in self._values.values() for write in value.writes]
        wait(writes)

    def close(self) -> None:
        """Give the file back, with all that is in it."""
        with self._lock:
            self._closed = True
        self._readers.shutdown(cancel_futures=True)
        self._writers.shutdown(cancel_futures=True)
        self._file.close()

    # -- under the lock ------------------------------------------------------------------------------------------

    def _admit(self, encoded: Encoded) -> _Value:
        """Find a place for a value. Its user is ``put``, until it has handed over all that is to be written."""
        value = _Value(encoded, next(self._numbers))
        self._check_open(value)
        if self._failure is not None:
            raise StoreError(
                f"{self!r} was asked to hold {value}, but a write failed before: {self._failure}. See what ails the "
                f"disk, and begin the step again with a new store."
            ) from self._failure
        self._account.add(encoded, value.nbytes)
        try:
            value.start = self._place(value)
        except BaseException:
            self._account.remove(value.nbytes)
            raise
        self._values[value.ticket.number] = value
        return value

    def _place(self, value: _Value) -> int:
        """Where its bytes go in the file."""
        if value.nbytes == 0:
            return 0
        start = self._space.take(value.nbytes)
        if start is None:
            raise StoreFullError(
                f"{self!r} was asked to hold {value.nbytes} bytes ({value}), but what is free of its capacity is in "
                f"smaller pieces. Raise the capacity, or put another store behind it: stores.TierStore."
            )
        try:
            self._file.grow(start + value.nbytes, self._account.capacity)
        except OSError as error:
            self._space.give(start, value.nbytes)
            raise StoreFullError(
                f"{self!r} was asked to hold {value.nbytes} bytes ({value}), but its file has {self._file.nbytes} and "
                f"cannot grow: {error}. Make room, or put another store behind it: stores.TierStore."
            ) from error
        return start

    def _check_open(self, value: _Value) -> None:
        if self._closed:
            raise StoreError(f"{self!r} was asked for {value}, but it is closed. Close it after the last backward.")

    def _begin_reading(self, value: _Value) -> _Reading:
        memory = self._memory.take(value.nbytes)
        value.users += value.blocks
        blocks = [self._readers.submit(self._read, value, block, memory) for block in range(value.blocks)]
        return _Reading(memory, blocks)

    def _take_reading(self, value: _Value) -> _Reading | None:
        """What was prefetched; it is the caller's from now on."""
        reading, value.reading = value.reading, None
        if reading is not None:
            self._prefetched -= value.nbytes
        return reading

    def _forget(self, ticket: Ticket) -> None:
        value = self._values.pop(ticket.number, None)
        if value is not None:
            value.dropped = True
            self._take_reading(value)
            self._account.remove(value.nbytes)
            self._release(value)

    def _release(self, value: _Value) -> None:
        """Let go of its part of the file, if it was dropped and nobody writes or reads there."""
        if value.dropped and value.users == 0 and value.nbytes:
            self._space.give(value.start, value.nbytes)

    # -- by threads ----------------------------------------------------------------------------------------------

    def _free_staging(self) -> Tensor:
        started = time.perf_counter()
        staging = self._staging.get()
        self._account.stall_seconds += time.perf_counter() - started
        return staging

    def _write(self, value: _Value, block: int, staging: Tensor) -> None:
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

    def _read(self, value: _Value, block: int, memory: Tensor) -> None:
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

    def _done(self, value: _Value) -> None:
        with self._lock:
            value.users -= 1
            self._release(value)


class _Reading:
    """A value on its way back."""

    __slots__ = ("blocks", "memory")

    def __init__(self, memory: Tensor, blocks: list[Future[None]]) -> None:
        self.memory, self.blocks = memory, blocks


class _Memory:
    """Aligned memory to read into, used again when nobody holds it: page faults would cost a third of the speed.

    Args:
        limit: bytes that are kept; what was used last.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: list[tuple[Tensor, torch.UntypedStorage]] = []

    def take(self, nbytes: int) -> Tensor:
        """Memory with any contents, uint8 [nbytes]; whoever holds it or a view of it keeps it."""
        for i, (memory, storage) in enumerate(self._kept):
            fits = nbytes <= memory.numel() <= nbytes + nbytes // 4
            if fits and storage_use_count(storage._cdata) == 2:  # memory and storage
                self._kept.append(self._kept.pop(i))
                return memory[:nbytes]
        memory = _aligned(nbytes)
        self._kept.append((memory, memory.untyped_storage()))
        while sum(memory.numel() for memory, _ in self._kept) > self._limit:
            del self._kept[0]
        return memory[:nbytes]


class _Place:
    """What a plane was, and where its bytes are among those of its value."""

    __slots__ = ("begin", "device", "dtype", "end", "name", "shape")

    def __init__(self, name: str, plane: Tensor, begin: int) -> None:
        self.name, self.dtype, self.shape, self.device = name, plane.dtype, plane.shape, plane.device
        self.begin, self.end = begin, begin + plane.numel() * plane.element_size()


class _Value:
    """All that is known of a value but its bytes.

    ``users`` counts who needs its part of the file: ``put`` and every transfer that has not ended.
    """

    __slots__ = (
        "blocks",
        "checksums",
        "codec",
        "dropped",
        "failure",
        "meta",
        "nbytes",
        "places",
        "reading",
        "spec",
        "start",
        "ticket",
        "users",
        "writes",
    )

    def __init__(self, encoded: Encoded, number: int) -> None:
        self.codec, self.spec, self.meta = encoded.codec, encoded.spec, encoded.meta
        self.places: list[_Place] = []
        end = 0
        for name, plane in encoded.planes.items():
            self.places.append(_Place(name, plane, end))
            end = _up(self.places[-1].end, _LINE)
        self.nbytes = _up(end, _PAGE)
        self.blocks = -(-self.nbytes // BLOCK)
        self.ticket = Ticket(number, self.nbytes)
        self.start = 0
        self.checksums = [0] * self.blocks
        self.writes: list[Future[None]] = []
        self.reading: _Reading | None = None
        self.failure: OSError | None = None
        self.users = 1
        self.dropped = False

    def __str__(self) -> str:
        return f"{self.codec} of {self.spec}, ticket {self.ticket.number}"

    def length(self, block: int) -> int:
        """Bytes of a block."""
        return min(BLOCK, self.nbytes - block * BLOCK)

    def encoded(self, memory: Tensor) -> Encoded:
        """The value, its planes as parts of ``memory``, or copied to the device that they came from."""
        planes = {
            place.name: memory[place.begin : place.end].view(place.dtype).view(place.shape).to(place.device)
            for place in self.places
        }
        return Encoded(self.codec, self.spec, planes, self.meta)


class _File:
    """An unnamed file (Note: [a file without a name]), past the system's cache where the file system allows it."""

    def __init__(self, directory: Path) -> None:
        self.nbytes = 0
        self._descriptor = -1
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._descriptor, self.direct = self._open(directory)
        except OSError as error:
            raise StoreError(
                f"DiskStore was asked to keep a file in {directory}, but that failed: {error}. Name a directory on a "
                f"local disk that you may write to."
            ) from error

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Give its space back."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def grow(self, nbytes: int, limit: int | None) -> None:
        """Set space aside for at least ``nbytes``, so that a full disk is found out here and not by a write."""
        if nbytes <= self.nbytes:
            return
        ample = _up(nbytes, _STEP) if limit is None else min(_up(nbytes, _STEP), max(limit, nbytes))
        try:
            self._reserve(ample)
        except OSError:
            self._reserve(nbytes)

    def write(self, data: memoryview, at: int) -> None:
        """Write all of ``data``."""
        begin, end = at, at + len(data)
        while at < end:
            written = os.pwrite(self._descriptor, data[at - begin :], at)
            if written == 0:
                raise OSError(errno.EIO, f"nothing was written at byte {at}")
            at += written
        if not self.direct:
            self._leave_cache(begin, end)

    def read(self, data: memoryview, at: int) -> None:
        """Fill ``data``."""
        begin, end = at, at + len(data)
        while at < end:
            read = os.preadv(self._descriptor, [data[at - begin :]], at)
            if read == 0:
                raise OSError(errno.EIO, f"the file ends at byte {at}, {end - at} bytes too early")
            at += read
        if not self.direct:
            self._leave_cache(begin, end)

    @staticmethod
    def _open(directory: Path) -> tuple[int, bool]:
        for direct in (getattr(os, "O_DIRECT", 0), 0):
            try:
                descriptor = _unnamed(directory, os.O_RDWR | direct)
            except OSError:
                if direct:
                    continue
                raise
            try:
                os.pwrite(descriptor, _aligned(_PAGE).numpy().data, 0)
            except OSError:  # some file systems take O_DIRECT and then refuse what it does
                os.close(descriptor)
                if not direct:
                    raise
            else:
                return descriptor, bool(direct)
        raise AssertionError

    def _reserve(self, nbytes: int) -> None:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._descriptor, self.nbytes, nbytes - self.nbytes)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
        self.nbytes = nbytes

    def _leave_cache(self, begin: int, end: int) -> None:
        """Keep the system from filling the memory with what is read once at most."""
        if hasattr(os, "posix_fadvise"):
            os.fdatasync(self._descriptor)  # only what is on the disk can leave
            os.posix_fadvise(self._descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)


def _unnamed(directory: Path, flags: int) -> int:
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(directory, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):  # no such thing on this file system
                raise
    descriptor, name = tempfile.mkstemp(prefix="backstash-", dir=directory)
    try:
        return os.open(name, flags)
    finally:
        os.close(descriptor)
        os.unlink(name)


def _aligned(nbytes: int) -> Tensor:
    """Fresh memory, uint8 [nbytes], that begins at a page."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes)
    if nbytes >= _HUGE_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _bytes(plane: Tensor) -> Tensor:
    return plane.contiguous().reshape(-1).view(torch.uint8)


def _gather(places: list[_Place], views: list[Tensor], first: int, block: Tensor) -> None:
    """Copy into ``block`` what of the planes belongs into bytes ``first`` and up of their value.

    By NumPy where it can: torch would copy with all its threads, and wait for those that the writers have displaced.
    """
    last = first + block.numel()
    for place, view in zip(places, views, strict=True):
        begin, end = max(place.begin, first), min(place.end, last)
        if begin < end:
            to, part = block[begin - first : end - first], view[begin - place.begin : end - place.begin]
            if part.device.type == "cpu":
                to.numpy()[:] = part.numpy()
            else:
                to.copy_(part)


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit

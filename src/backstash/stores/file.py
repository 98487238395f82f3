"""The file of a DiskStore.

Note: [a file without a name]
    The file has no name from the moment when it is opened. So nobody can damage or delete it, and the system frees its
    space when this process ends, in whichever way it ends: the next run has nothing to clean up.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from backstash.errors import StoreError
from backstash.stores.aligned import PAGE, aligned_memory, round_up

_LEAST, _MOST = 4 << 20, 256 << 20
"""Bytes by which the file grows, if its capacity allows that: as many as it has, within these limits."""


class UnnamedFile:
    """An unnamed file (Note: [a file without a name]), past the system's cache if the file system allows that."""

    def __init__(self, directory: Path) -> None:
        self.nbytes = 0
        self._descriptor = -1
        try:
            directory.mkdir(exist_ok=True)  # without the folders above it, because a missing one may be a typing error
            self._descriptor, self.direct = self._open(directory)
        except (OSError, ValueError) as error:  # the latter for a name that no file can have
            raise StoreError(
                f"DiskStore was asked to keep a file in {directory}, but that failed: {error}. Name a directory on a "
                f"local disk that you may write to. If it is not there, it is made, in a directory that is there."
            ) from error

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Frees the file's space."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def grow(self, nbytes: int, limit: int | None) -> None:
        """Reserves space for at least ``nbytes``, so that a full disk raises an error here and not in a write.

        Raises:
            OSError: the disk has no room for ``nbytes``; the file takes no more of it than before.
        """
        if nbytes <= self.nbytes:
            return
        ample = round_up(nbytes, min(max(round_up(self.nbytes, PAGE), _LEAST), _MOST))
        try:
            self._reserve(ample if limit is None else min(ample, max(limit, nbytes)))
        except OSError:
            self._reserve(nbytes)

    def write(self, data: memoryview, at: int) -> None:
        """Writes all of ``data`` at byte ``at`` of the file."""
        begin, end = at, at + len(data)
        while at < end:
            written = os.pwrite(self._descriptor, data[at - begin :], at)
            if written == 0:
                raise OSError(errno.EIO, f"nothing was written at byte {at}")
            at += written
        if not self.direct:
            self._leave_cache(begin, end)

    def read(self, data: memoryview, at: int) -> None:
        """Fills ``data`` with the bytes that begin at byte ``at`` of the file."""
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
        """Returns the descriptor of an unnamed file, and whether it bypasses the system's cache."""
        for direct in (getattr(os, "O_DIRECT", 0), 0):
            try:
                descriptor = _unnamed(directory, os.O_RDWR | direct)
            except OSError:
                if direct:
                    continue
                raise
            try:
                os.pwrite(descriptor, aligned_memory(PAGE).numpy().data, 0)
            except OSError:  # some file systems accept O_DIRECT and then refuse to write
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
                    os.ftruncate(self._descriptor, self.nbytes)  # some file systems have taken all that was there
                    raise
        self.nbytes = nbytes

    def _leave_cache(self, begin: int, end: int) -> None:
        """Removes these bytes from the system's cache, because they are read once at most."""
        if hasattr(os, "posix_fadvise"):
            os.fdatasync(self._descriptor)  # only bytes that are on the disk can be removed
            os.posix_fadvise(self._descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)


def _unnamed(directory: Path, flags: int) -> int:
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(directory, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in (
                errno.EOPNOTSUPP,
                errno.EISDIR,
                errno.ENOENT,
            ):  # this file system has no unnamed files
                raise
    descriptor, name = tempfile.mkstemp(prefix="backstash-", dir=directory)
    try:
        return os.open(name, flags)
    finally:
        os.close(descriptor)
        os.unlink(name)

"""Memory that begins at a page, as reading and writing past the system's cache requires it."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from backstash.torch_internals import storage_use_count

PAGE = 4096
"""Bytes of a page. Direct transfers begin and end at multiples of it, in memory and in the file."""

_HUGE_FROM = 4 << 20
"""Memory of at least this many bytes is backed by huge pages, which take fewer page faults."""


def aligned_memory(nbytes: int) -> Tensor:
    """Fresh memory that begins at a page, as uint8 [nbytes]."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # not shared with a forked process
    if nbytes >= _HUGE_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def round_up(nbytes: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is at least ``nbytes``."""
    return -(-nbytes // unit) * unit


def _counted(nbytes: int) -> Tensor:
    """As :func:`aligned_memory`, in memory that torch has allocated. It has a storage of its own, from byte 0 on."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = torch.empty(nbytes + PAGE, dtype=torch.uint8, device="cpu").numpy()
    start = -memory.ctypes.data % PAGE
    return torch.frombuffer(memory[start : start + nbytes], dtype=torch.uint8)


class MemoryPool:
    """Aligned memory to read into, which is used again when nobody holds it.

    Page faults of fresh memory would cost a third of the speed of reading. The memory is torch's, so that it counts
    among what a step has allocated.

    Args:
        limit: how many bytes of the memory used last are kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: list[tuple[Tensor, torch.UntypedStorage]] = []

    def take(self, nbytes: int) -> Tensor:
        """Memory with undefined contents, as uint8 [nbytes]. It stays the caller's while any view of it is alive."""
        for i, (memory, storage) in enumerate(self._kept):
            fits = nbytes <= memory.numel() <= nbytes + nbytes // 4
            if fits and storage_use_count(storage._cdata) == 2:  # those of ``memory`` and of ``storage``
                self._kept.append(self._kept.pop(i))
                return memory[:nbytes]
        memory = _counted(nbytes)
        self._kept.append((memory, memory.untyped_storage()))
        while sum(memory.numel() for memory, _ in self._kept) > self._limit:
            del self._kept[0]
        return memory[:nbytes]

"""Memory that values are decoded into, used again from layer to layer.

Fresh memory costs page faults, on CPU more than decoding does. A buffer is free again when nothing but this pool holds
its storage. What was decoded into it stays there until it is used again, so that a value that two nodes need one after
the other is decoded once.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from backstash.ops.cpu.library import advise_huge
from backstash.saved import TensorSpec
from backstash.torch_internals import storage_use_count

SMALLEST = 1 << 18
"""Smaller buffers are not pooled: the allocator has them at hand."""

LARGE = 1 << 20
"""Larger buffers are given back once they were read, where peaks are; smaller ones wait for the next layer, if there is
room for them."""

_pools: weakref.WeakSet[Buffers] = weakref.WeakSet()


def new_memory(spec: TensorSpec) -> Tensor:
    """Memory laid out like ``spec`` that no pool holds, contents undefined; on CPU in huge pages where it is large."""
    nbytes = spec.nbytes
    if spec.device.type != "cpu" or nbytes < LARGE:
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    storage = _bytes_in_huge_pages(nbytes).untyped_storage()
    return torch.empty(0, dtype=spec.dtype, device="cpu").set_(storage, 0, spec.shape, spec.stride)  # type: ignore[call-overload]


def _bytes_in_huge_pages(nbytes: int) -> Tensor:
    memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    advise_huge(memory)
    return memory


class _Buffer:
    __slots__ = ("cdata", "memory", "owner", "storage", "version", "whole")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.storage = memory.untyped_storage()
        self.cdata = self.storage._cdata
        self.owner: weakref.ref[object] | None = None
        self.whole: Tensor | None = None
        self.version = 0

    @property
    def free(self) -> bool:
        return storage_use_count(self.cdata) == 2 + (self.whole is not None)

    @property
    def awaited(self) -> bool:
        """Whether its contents are whole and belong to somebody."""
        whole = self.whole
        return (
            whole is not None and self.owner is not None and self.owner() is not None and whole._version == self.version
        )


class Buffers:
    """A small pool of decode buffers on CPU; elsewhere torch's own allocator is one already.

    It holds what was used last and nothing else: when no free buffer fits, the free ones are given back before a new
    one is made, so the pool never adds more than the largest buffer to the peak. A Session clears it when the last
    tensor that autograd saved under it is gone: nothing is held from step to step.

    Attributes:
        is_planned: whether a plan has counted the bytes of each moment. Then nothing is pooled, because memory that
            waits for the next layer is in no plan.
    """

    __slots__ = ("__weakref__", "_buffers", "_keeps", "_lent", "is_planned")

    def __init__(self) -> None:
        self.is_planned = False
        self._buffers: list[_Buffer] = []
        self._lent: tuple[weakref.ref[object], Tensor, int] | None = None
        self._keeps = 0  # released since memory was taken last
        _pools.add(self)

    def holding(self, owner: object) -> Tensor | None:
        """What was made for ``owner`` last, if it is still there and nothing has written to it."""
        for buffer in self._buffers:
            if buffer.awaited and buffer.owner is not None and buffer.owner() is owner:
                return buffer.whole
        if self._lent is not None and self._lent[0]() is owner and self._lent[1]._version == self._lent[2]:
            return self._lent[1]
        return None

    def lend(self, owner: object, whole: Tensor) -> None:
        """Remember, until the next one or the next decoding, what ``owner`` holds in memory of its own."""
        self._lent = weakref.ref(owner), whole, whole._version

    def take(self, spec: TensorSpec, dtype: torch.dtype, waits: bool = True) -> Tensor:
        """Memory laid out like ``spec``, of elements of ``dtype``, contents undefined.

        Args:
            spec, dtype: of the memory.
            waits: whether the pool may hold it until it is used again.
        """
        self._lent = None
        self._keeps = 0
        nbytes = spec.numel * dtype.itemsize
        if spec.device.type != "cpu" or nbytes < SMALLEST:
            return torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=spec.device)
        if self.is_planned or not waits:
            memory = _bytes_in_huge_pages(nbytes).untyped_storage()
            return torch.empty(0, dtype=dtype, device="cpu").set_(memory, 0, spec.shape, spec.stride)  # type: ignore[call-overload]
        fitting = [b for b in self._buffers if nbytes <= b.memory.numel() and b.free]
        if fitting:
            buffer = min(fitting, key=lambda b: (b.awaited, b.memory.numel()))
        else:
            self.clear()
            buffer = _Buffer(_bytes_in_huge_pages(nbytes))
            self._buffers.append(buffer)
        buffer.owner = buffer.whole = None
        # set_ and not a view: a view of another dtype holds one more tensor on the storage, and so its use count up.
        return torch.empty(0, dtype=dtype, device="cpu").set_(buffer.storage, 0, spec.shape, spec.stride)  # type: ignore[call-overload]

    def filled(self, owner: object, whole: Tensor) -> None:
        """Remember whose data ``whole`` holds now; not for a reader that may write into it unseen."""
        if not self._buffers:
            return
        cdata = whole.untyped_storage()._cdata
        for buffer in self._buffers:
            if buffer.cdata == cdata:
                buffer.owner, buffer.whole, buffer.version = weakref.ref(owner), whole, whole._version

    def forget(self, owner: object) -> None:
        """What was made for ``owner`` may be something else from now on."""
        for buffer in self._buffers:
            if buffer.owner is not None and buffer.owner() is owner:
                buffer.owner = buffer.whole = None
        if self._lent is not None and self._lent[0]() is owner:
            self._lent = None

    def part_with(self, whole: Tensor) -> None:
        """Somebody holds the memory of ``whole`` from now on: it is never used again here."""
        cdata = whole.untyped_storage()._cdata
        self._buffers = [buffer for buffer in self._buffers if buffer.cdata != cdata]
        self._lent = None

    def release(self, owner: object) -> None:
        """What was made for ``owner`` has been read by everybody.

        Its memory is given back. What it was made of, if that has yet to be read itself, may stay instead of it.
        """
        released = sum(b.memory.numel() for b in self._buffers if b.owner is not None and b.owner() is owner)
        self._keeps = max(self._keeps, released)
        self.forget(owner)
        self.shrink(self._keeps)

    def adopt(self, dead: Tensor) -> None:
        """Take over the memory of a tensor that its last holder is about to let go, for what is decoded next.

        It takes the place of every free buffer, unless one of these is as large.
        """
        storage = dead.untyped_storage()
        nbytes = storage.nbytes()
        if dead.device.type != "cpu" or nbytes < SMALLEST or self.is_planned:
            return
        if any(buffer.memory.numel() >= nbytes or buffer.cdata == storage._cdata for buffer in self._buffers):
            return
        self.clear()
        self._buffers.append(_Buffer(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)))  # type: ignore[call-overload]

    def shrink(self, keeps: int = 0) -> None:
        """Give back every large buffer that nobody reads: what is allocated next is as large.

        But up to ``keeps`` bytes of those whose contents somebody has yet to read.
        """
        self._lent = None
        staying = []
        for buffer in self._buffers:
            nbytes = buffer.memory.numel()
            if nbytes >= LARGE and buffer.free:
                if not buffer.awaited or nbytes > keeps:
                    continue
                keeps -= nbytes
            staying.append(buffer)
        self._buffers = staying

    def clear(self) -> None:
        """Give back every buffer that nobody reads."""
        self._lent = None
        self._buffers = [buffer for buffer in self._buffers if not buffer.free]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.memory.numel() for buffer in self._buffers)


def held_nbytes() -> int:
    """Bytes that all pools of this process hold."""
    return sum(pool.nbytes for pool in _pools)


def release_buffers() -> None:
    """Give back every buffer that nobody reads, of all pools of this process."""
    for pool in list(_pools):
        pool.clear()

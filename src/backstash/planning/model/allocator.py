"""CUDA's caching allocator as a model: what it reserves of a device for a sequence of allocations.

A step ends in an out-of-memory error when the device has no memory left to reserve, and not when so many bytes are
allocated. The allocator of torch reserves memory in segments, hands out blocks of them, and keeps what is freed for
later. What it keeps and cannot use for what is asked is fragmentation.

Note: [rules of the allocator]
    Sizes are multiples of 512 bytes. What is no larger than 1 MiB comes from segments of 2 MiB, what is smaller than
    10 MiB from segments of 20 MiB, and each larger one from a segment of its own, a multiple of 2 MiB. The smallest
    free block of the same pool and stream that is large enough is taken, and the lowest of several. Its rest becomes a
    free block of its own if it has 512 bytes, or more than 1 MiB where blocks are large. Freed blocks join free
    neighbours of the same segment.

    With ``expandable_segments`` each pool of each stream has one segment, as long as the device, of which parts of
    2 MiB (of 20 MiB where blocks are large) are reserved when they are needed. A free block at the end of what is
    reserved counts as one that can grow.

Source: c10/cuda/CUDACachingAllocator.cpp. What is not modelled: a device that is full, where the allocator first gives
back what is wholly free, private pools of CUDA graphs, blocks that wait for another stream (``record_stream``),
``max_split_size_mb``, ``roundup_power2_divisions`` and garbage collection by threshold. The model was not compared with
a GPU.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from backstash.errors import PlanError

SMALLEST_BLOCK = 512
SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20
LARGE, LARGE_SEGMENT = 10 << 20, 20 << 20
ROUND_LARGE = 2 << 20


@dataclass(eq=False)
class Block:
    """A part of a segment.

    Attributes:
        address: its first byte, in the segment.
        is_free: whether nobody has it.
        is_reserved: whether the device gives memory for it; of an expandable segment, the rest is free address space.
        before, after: its neighbours in the segment.
    """

    segment: int
    address: int
    nbytes: int
    is_free: bool = True
    is_reserved: bool = True
    before: Block | None = None
    after: Block | None = None


@dataclass
class Pool:
    """The blocks of one stream that are small, or those that are large."""

    is_small: bool
    free: list[Block] = field(default_factory=list)
    growing: Block | None = None  # the address space behind an expandable segment

    @property
    def unit(self) -> int:
        """Bytes of a segment for several blocks, and those by which one grows that can."""
        return SMALL_SEGMENT if self.is_small else LARGE_SEGMENT


class CachingAllocator:
    """CUDA's caching allocator on one device.

    Args:
        is_expandable: whether ``expandable_segments`` is on.

    Attributes:
        allocated_nbytes, reserved_nbytes: bytes of the blocks that are in use, and of all segments.
        peak_allocated_nbytes, peak_reserved_nbytes: the most of these.
        fragmented_nbytes: while the most was reserved, the least of it that was not allocated at one moment.
        reserved: how many bytes were reserved each time, in their order.

    Example:
        >>> allocator = CachingAllocator()
        >>> first, second = allocator.allocate(15 << 20), allocator.allocate(3 << 20)
        >>> allocator.reserved  # a multiple of 2 MiB, and a segment for several
        [16777216, 20971520]
        >>> allocator.free(first)
        >>> third = allocator.allocate(12 << 20)  # of the 16 MiB that are free, or the 17 MiB
        >>> allocator.reserved_nbytes - allocator.allocated_nbytes == (36 - 15) << 20
        True
    """

    def __init__(self, is_expandable: bool = False) -> None:
        self.is_expandable = is_expandable
        self.allocated_nbytes = self.reserved_nbytes = 0
        self.peak_allocated_nbytes = self.peak_reserved_nbytes = self.fragmented_nbytes = 0
        self.reserved: list[int] = []
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._pool_of: dict[int, Pool] = {}  # by the number of a segment
        self._numbers = itertools.count()

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """Returns a block of at least so many bytes for a stream."""
        size = block_nbytes(nbytes)
        is_small = size <= SMALL
        pool = self._pools.setdefault((stream, is_small), Pool(is_small))
        block = self._best(pool, size)
        if block is None or block.nbytes < size:
            block = self._grown(pool, size, block) if self.is_expandable else self._segment(pool, size)
        pool.free.remove(block)
        rest = block.nbytes - size
        if rest >= SMALLEST_BLOCK if is_small or self.is_expandable else rest > SMALL:
            other = Block(block.segment, block.address + size, rest, before=block, after=block.after)
            if other.after is not None:
                other.after.before = other
            block.nbytes, block.after = size, other
            pool.free.append(other)
        block.is_free = False
        self.allocated_nbytes += block.nbytes
        self.peak_allocated_nbytes = max(self.peak_allocated_nbytes, self.allocated_nbytes)
        if self.reserved_nbytes > self.peak_reserved_nbytes:
            self.peak_reserved_nbytes = self.reserved_nbytes
            self.fragmented_nbytes = self.reserved_nbytes - self.allocated_nbytes
        elif self.reserved_nbytes == self.peak_reserved_nbytes:  # what is allocated now lies in what was free then
            self.fragmented_nbytes = min(self.fragmented_nbytes, self.reserved_nbytes - self.allocated_nbytes)
        return block

    def free(self, block: Block) -> None:
        """Takes back a block that :meth:`allocate` has returned."""
        if block.is_free:
            raise PlanError("the model of an allocator was asked to free a block that is free. Free each one once.")
        pool = self._pool_of[block.segment]
        self.allocated_nbytes -= block.nbytes
        block.is_free = True
        for other in (block.before, block.after):
            if other is not None and other.is_free and other.is_reserved:
                pool.free.remove(other)
                block = _joined(block, other)
        pool.free.append(block)

    def _best(self, pool: Pool, size: int) -> Block | None:
        """The free block that is taken: with expandable segments perhaps one that is too small and can grow."""
        fitting = [each for each in pool.free if _could_have(each, self.is_expandable) >= size]
        whole = [each for each in fitting if each.nbytes >= size]
        found = min(whole, key=lambda each: (each.nbytes, each.segment, each.address), default=None)
        if not self.is_expandable:
            return found
        smaller = [each for each in whole if found is not None and _could_have(each) < _could_have(found)]
        return min(smaller, key=lambda each: (_could_have(each), each.address), default=found) or next(
            (each for each in fitting if each.after is pool.growing), None
        )

    def _segment(self, pool: Pool, size: int) -> Block:
        """A new segment."""
        nbytes = pool.unit if size < LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE
        self._reserve(nbytes)
        block = Block(next(self._numbers), 0, nbytes)
        self._pool_of[block.segment] = pool
        pool.free.append(block)
        return block

    def _grown(self, pool: Pool, size: int, last: Block | None) -> Block:
        """A free block at the end of the pool's expandable segment, of which as much is reserved as is missing."""
        if pool.growing is None:
            pool.growing = Block(next(self._numbers), 0, 1 << 62, is_reserved=False)
            self._pool_of[pool.growing.segment] = pool
        rest = pool.growing
        missing = size - (0 if last is None else last.nbytes)
        nbytes = -(-missing // pool.unit) * pool.unit
        self._reserve(nbytes)
        block = Block(rest.segment, rest.address, nbytes, before=rest.before, after=rest)
        if block.before is not None:
            block.before.after = block
        rest.before, rest.address, rest.nbytes = block, rest.address + nbytes, rest.nbytes - nbytes
        if last is not None:
            pool.free.remove(last)
            block = _joined(last, block)
        pool.free.append(block)
        return block

    def _reserve(self, nbytes: int) -> None:
        """Has the device give so many bytes more."""
        self.reserved_nbytes += nbytes
        self.reserved.append(nbytes)


def block_nbytes(nbytes: int) -> int:
    """Returns how many bytes are allocated where so many are asked for."""
    return max(SMALLEST_BLOCK, -(-nbytes // SMALLEST_BLOCK) * SMALLEST_BLOCK)


def _could_have(block: Block, is_expandable: bool = True) -> int:
    """How large a block is, or can become."""
    grows = is_expandable and block.after is not None and not block.after.is_reserved
    return block.nbytes + (block.after.nbytes if grows and block.after is not None else 0)


def _joined(block: Block, other: Block) -> Block:
    """Two neighbours as one block."""
    first, second = (block, other) if block.address < other.address else (other, block)
    first.nbytes += second.nbytes
    first.after = second.after
    if first.after is not None:
        first.after.before = first
    return first


@dataclass(frozen=True, slots=True)
class Allocation:
    """An allocation or a release.

    Attributes:
        number: of the allocation, by which its release is known; the next allocation may have the same.
        nbytes: bytes that are asked for; 0 for a release.
    """

    number: int
    nbytes: int = 0
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Reserved:
    """What a sequence of allocations takes of a device.

    Attributes:
        fragmented_nbytes: while the most was reserved, how much of it was never in use.
    """

    allocated_nbytes: int
    reserved_nbytes: int
    fragmented_nbytes: int
    segments: int


def replay(changes: Iterable[Allocation], allocator: CachingAllocator | None = None) -> Reserved:
    """Returns what the allocator reserves for a sequence of allocations and releases.

    Releases of what was allocated before the sequence are passed over. What is not released, and allocated once more by
    the same number, was released unseen.
    """
    model = allocator or CachingAllocator()
    blocks: dict[int, Block] = {}
    for change in changes:
        if change.number in blocks:
            model.free(blocks.pop(change.number))
        if change.nbytes:
            blocks[change.number] = model.allocate(change.nbytes, change.stream)
    peaks = model.peak_allocated_nbytes, model.peak_reserved_nbytes, model.fragmented_nbytes
    return Reserved(*peaks, len(model.reserved))


def reserved_by(changes: Iterable[Allocation]) -> Reserved:
    """Returns what a step reserves that is repeated, where ``expandable_segments`` is as in this process.

    Args:
        changes: of one step. It runs twice, because the second finds what the first has left.
    """
    words = f"{os.environ.get('PYTORCH_ALLOC_CONF', '')},{os.environ.get('PYTORCH_CUDA_ALLOC_CONF', '')}"
    allocator = CachingAllocator("expandable_segments:true" in words.lower().replace(" ", ""))
    each = list(changes)
    return replay([*each, *each], allocator)

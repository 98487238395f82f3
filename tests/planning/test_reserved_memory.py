"""The model of CUDA's caching allocator: its rules one by one, what no sequence may break, and snapshots of it."""

from __future__ import annotations

import os
import pickle
import random
from itertools import pairwise
from pathlib import Path

import pytest

import bench.snapshot
from backstash.errors import PlanError
from backstash.planning.model.allocator import (
    Allocation,
    Block,
    CachingAllocator,
    block_nbytes,
    replay,
    reserved_by,
)
from bench.snapshot import recorded

MIB = 1 << 20


def test_sizes_are_rounded_and_segments_have_three_sizes() -> None:
    allocator = CachingAllocator()
    for nbytes in (1, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 21 * MIB + 1):
        allocator.allocate(nbytes)
    assert block_nbytes(1) == 512 and block_nbytes(513) == 1024
    # 512 bytes and 1 MiB share 2 MiB; 1 MiB + 512 and 10 MiB - 512 share 20 MiB; the others have their own.
    assert allocator.reserved == [2 * MIB, 20 * MIB, 10 * MIB, 22 * MIB]
    assert allocator.allocated_nbytes == 512 + MIB + (MIB + 512) + (10 * MIB - 512) + 10 * MIB + 22 * MIB


def test_the_smallest_block_that_fits_is_taken_and_its_rest_is_kept_whole_if_it_is_small() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(each * MIB) for each in (30, 24, 28)]
    for block in blocks:
        allocator.free(block)
    taken = allocator.allocate(23 * MIB)
    assert taken is blocks[1] and taken.nbytes == 24 * MIB  # no more than 1 MiB would be left, so it is not split
    taken = allocator.allocate(26 * MIB)
    assert taken.segment == blocks[2].segment and taken.nbytes == 26 * MIB
    assert allocator.reserved_nbytes == 82 * MIB


def test_streams_and_pools_share_nothing() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(16 * MIB, stream=1))
    allocator.allocate(16 * MIB, stream=2)
    allocator.allocate(1000, stream=1)  # small blocks come from segments of their own
    assert allocator.reserved == [16 * MIB, 16 * MIB, 2 * MIB]


def test_freed_neighbours_are_one_block_again() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved == [20 * MIB]
    for number in (0, 2, 1, 3):
        allocator.free(blocks[number])
    assert allocator.allocate(20 * MIB).nbytes == 20 * MIB and allocator.reserved == [20 * MIB]


def test_a_lower_hole_is_fragmentation_that_an_expandable_segment_does_not_have() -> None:
    """Each step asks for 1 MiB more, as a growing sequence does: no block that was freed is large enough again."""
    changes = [change for n in range(10) for change in (Allocation(n, (20 + 2 * n) * MIB), Allocation(n))]
    fixed = replay(changes)
    assert fixed.allocated_nbytes == 38 * MIB and fixed.reserved_nbytes == sum(20 + 2 * n for n in range(10)) * MIB
    assert fixed.fragmented_nbytes == fixed.reserved_nbytes - fixed.allocated_nbytes
    growing = replay(changes, CachingAllocator(is_expandable=True))
    assert growing.allocated_nbytes == 38 * MIB and growing.reserved_nbytes == 40 * MIB  # in units of 20 MiB


def test_the_rest_of_a_segment_that_is_used_later_is_no_fragmentation() -> None:
    """Ten values of 4 MiB fill two segments of 20 MiB; the sixth takes the second, of which most is yet to be used."""
    values = [Allocation(number, 4 * MIB) for number in range(10)]
    filled = replay(values)
    assert filled.allocated_nbytes == filled.reserved_nbytes == 40 * MIB and filled.fragmented_nbytes == 0
    eight = [*values[:8], *(Allocation(number) for number in range(8))]
    assert reserved_by(eight).reserved_nbytes == 40 * MIB and reserved_by(eight).fragmented_nbytes == 8 * MIB


def test_a_block_is_freed_once() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(1)
    allocator.free(block)
    with pytest.raises(PlanError, match="Free each one once"):
        allocator.free(block)


@pytest.mark.parametrize("is_expandable", [False, True])
def test_no_sequence_breaks_what_an_allocator_promises(is_expandable: bool) -> None:
    """Blocks in use never overlap, segments have no gaps, free neighbours are one block, and bytes add up."""
    for seed in range(20):
        draw = random.Random(seed)
        allocator = CachingAllocator(is_expandable)
        used: list[tuple[Block, int]] = []
        for _ in range(120):
            if used and draw.random() < 0.45:
                allocator.free(used.pop(draw.randrange(len(used)))[0])
            else:
                nbytes = draw.choice([draw.randint(1, 2000), draw.randint(1, 4 * MIB), draw.randint(1, 60 * MIB)])
                used.append((allocator.allocate(nbytes, draw.randint(0, 1)), nbytes))
        assert all(nbytes <= block.nbytes < nbytes + 512 + MIB for block, nbytes in used)
        assert allocator.allocated_nbytes == sum(block.nbytes for block, _ in used)
        free = [block for pool in allocator._pools.values() for block in pool.free]
        whole: dict[int, list[Block]] = {}
        for block in [*free, *(block for block, _ in used)]:
            whole.setdefault(block.segment, []).append(block)
        assert allocator.reserved_nbytes == sum(block.nbytes for blocks in whole.values() for block in blocks)
        for blocks in whole.values():
            blocks.sort(key=lambda block: block.address)
            assert blocks[0].address == 0
            for one, other in pairwise(blocks):
                assert one.address + one.nbytes == other.address and one.after is other and other.before is one
                assert not (one.is_free and other.is_free)


def test_a_step_that_is_repeated_finds_what_the_one_before_has_left() -> None:
    """A gradient lies in the room of a released value; the next step's value needs room of its own beside it."""
    step = [Allocation(1, 30 * MIB), Allocation(1), Allocation(2, 20 * MIB)]
    assert replay(step).reserved_nbytes == 30 * MIB
    assert reserved_by(step).reserved_nbytes == 60 * MIB and reserved_by(step).allocated_nbytes == 50 * MIB


def event(action: str, addr: int, nbytes: int, stream: int = 0) -> dict[str, object]:
    return {"action": action, "addr": addr, "size": nbytes, "stream": stream, "frames": []}


def test_a_snapshot_is_read_and_the_model_reserves_what_its_allocator_did() -> None:
    """A history whose segments follow from the allocator's rules by hand."""
    first, second = 0x10000000, 0x20000000
    events = [
        event("free_completed", 0x999, 512),  # of what was there before the record
        event("segment_alloc", first, 16 * MIB),
        event("alloc", first, 15 * MIB),
        event("segment_alloc", second, 20 * MIB),
        event("alloc", second, 3 * MIB),
        event("free_requested", first, 15 * MIB),
        event("free_completed", first, 15 * MIB),
        event("alloc", first, 12 * MIB),  # the smaller of the two free blocks, 16 and 17 MiB
        event("segment_alloc", 0x30000000, 2 * MIB, stream=7),
        event("alloc", 0x30000000, 100, stream=7),
    ]
    found = recorded(pickle.dumps({"segments": [], "device_traces": [events]}, 4))
    assert found.reserved == (16 * MIB, 20 * MIB, 2 * MIB) and not found.is_expandable
    modelled, given = found.modelled()
    assert given == found.reserved and modelled.reserved_nbytes == found.reserved_nbytes == 38 * MIB
    assert modelled.fragmented_nbytes == 38 * MIB - (12 + 3) * MIB - 512


def test_a_snapshot_with_segments_that_grow() -> None:
    base = 0x10000000
    events = [
        event("segment_map", base, 20 * MIB),
        event("alloc", base, 15 * MIB),
        event("segment_map", base + 20 * MIB, 20 * MIB),
        event("alloc", base + 15 * MIB, 8 * MIB),
    ]
    found = recorded(pickle.dumps({"segments": [], "device_traces": [events]}, 4))
    modelled, given = found.modelled()
    assert found.is_expandable and given == found.reserved == (20 * MIB, 20 * MIB)
    assert modelled.reserved_nbytes == 40 * MIB and modelled.fragmented_nbytes == 17 * MIB


def test_a_snapshot_is_printed_beside_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [event("segment_alloc", 0x10000000, 16 * MIB), event("alloc", 0x10000000, 15 * MIB)]
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps({"device_traces": [events]}))
    assert bench.snapshot.main([str(file)]) == 0
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()[2:]] == [
        ["recorded", "16.0", "1"],
        ["modelled", "16.0", "1"],
    ]
    file.write_bytes(pickle.dumps({"device_traces": [[*events, event("segment_alloc", 0x20000000, 2 * MIB)]]}))
    assert bench.snapshot.main([str(file)]) == 1, "the allocator asked for more than the model does"


@pytest.mark.parametrize("data", [b"", b"text", pickle.dumps([1]), pickle.dumps({"segments": []})])
def test_what_is_no_snapshot_is_refused(data: bytes) -> None:
    with pytest.raises(PlanError, match="snapshot of CUDA's allocator"):
        recorded(data)


def test_a_snapshot_cannot_run_code() -> None:
    with pytest.raises(PlanError, match="it holds posix.getcwd|it holds nt.getcwd"):
        recorded(pickle.dumps(os.getcwd))

"""The positions of a recorded step, from events as the profiler gives them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from backstash.planning.measure.timeline import Timeline
from backstash.torch_internals import profiler_event


def events(*changes: tuple[int, int]) -> list[Any]:
    """Allocations as (address, bytes), with a negative number of bytes where memory is freed."""
    cpu = torch.device("cpu")
    return [
        SimpleNamespace(
            tag=profiler_event.Allocation,
            name="[memory]",
            start_time_ns=number,
            duration_time_ns=0,
            children=[],
            extra_fields=SimpleNamespace(device=cpu, ptr=address, alloc_size=nbytes),
        )
        for number, (address, nbytes) in enumerate(changes)
    ]


def most(*changes: tuple[int, int]) -> int:
    return max(position.most_nbytes for position in Timeline(events(*changes), "cpu").positions)


def test_memory_is_counted_until_it_is_freed() -> None:
    assert most((1, 100), (2, 50), (1, -100), (3, 70)) == 150


def test_an_address_that_is_given_again_was_freed_unseen() -> None:
    assert most((1, 100), (1, 100), (1, 100)) == 100
    assert most((1, 100), (1, 40), (2, 50)) == 100


def test_memory_that_was_there_before_is_no_gain() -> None:
    assert most((9, -500), (1, 100)) == 100


def test_cuda_s_allocator_counts_what_any_thread_frees() -> None:
    """Of two devices; before the first event 1,000 and 500 bytes were given out."""
    changes = ((1, 100, 0, 1100), (2, 50, 0, 1150), (7, 20, 1, 520), (3, 60, 0, 1110), (2, -50, 0, 1060))
    found = events(*((address, nbytes) for address, nbytes, _, _ in changes))
    for event, (_, _, device, total) in zip(found, changes, strict=True):
        event.extra_fields.device = torch.device("cuda", device)
        event.extra_fields.total_allocated = total
    assert [position.most_nbytes for position in Timeline(found, "cuda").positions] == [170]

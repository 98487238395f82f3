"""The positions of a recorded step, from events as the profiler gives them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from backstash.planning.timeline import Timeline
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

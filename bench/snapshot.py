"""A snapshot of CUDA's allocator beside the model of it: ``python -m bench.snapshot SNAPSHOT [--device N]``.

The snapshot is the file that ``torch.cuda.memory._dump_snapshot`` writes, of a history that began with an empty cache.
The allocations in it run through the model, which should have asked the device for the same segments.
"""

from __future__ import annotations

import argparse
import io
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backstash.errors import PlanError
from backstash.planning.model.allocator import Allocation, CachingAllocator, Reserved, replay
from bench.rounds import mib, table

_GIVEN = ("segment_alloc", "segment_map")
_TAKEN = ("segment_free", "segment_unmap")


class _Plain(pickle.Unpickler):
    """Reads numbers, texts, lists and dicts, of which a snapshot consists, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuses every class."""
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


@dataclass(frozen=True)
class Recorded:
    """What the allocator of one device has recorded.

    Attributes:
        changes: allocations and releases, in their order.
        reserved: the bytes that the device gave each time, in their order.
        reserved_nbytes: the most bytes that were reserved, above those before the record.
        is_expandable: whether segments could grow.
    """

    changes: tuple[Allocation, ...]
    reserved: tuple[int, ...]
    reserved_nbytes: int
    is_expandable: bool

    def modelled(self) -> tuple[Reserved, tuple[int, ...]]:
        """Returns what the model takes for the same changes, and the bytes that it has the device give each time."""
        allocator = CachingAllocator(self.is_expandable)
        found = replay(self.changes, allocator)
        return found, tuple(allocator.reserved)


def recorded(data: bytes, device: int = 0) -> Recorded:
    """Reads a snapshot, with the history that ``torch.cuda.memory._record_memory_history()`` has recorded.

    Releases of blocks that were allocated before the record are left out. So the model is exact only for a record that
    began with a cache that was empty.

    Args:
        data: the content of the file, pickled.
        device: the number of the device.

    Raises:
        PlanError: it is no snapshot, or has no history of the device.
    """
    asked = f"the history of device {device} was asked for from a snapshot of CUDA's allocator"
    do = "Call torch.cuda.memory._record_memory_history() first, and pass what _dump_snapshot() has written."
    try:
        content = _Plain(io.BytesIO(data)).load()
        events = content["device_traces"][device]
        return _recorded(events)
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError) as error:
        raise PlanError(f"{asked}, but this is none: {error}. {do}") from None
    except (KeyError, IndexError, TypeError) as error:
        raise PlanError(f"{asked}, but it lacks {error}. {do}") from None


def _recorded(events: Iterable[dict[str, Any]]) -> Recorded:
    changes: list[Allocation] = []
    reserved: list[int] = []
    numbers: dict[int, int] = {}  # by address
    held = most = 0
    is_expandable = False
    for number, event in enumerate(events):
        action, nbytes = event["action"], int(event["size"])
        if action == "alloc":
            numbers[event["addr"]] = number
            changes.append(Allocation(number, nbytes, int(event["stream"])))
        elif action == "free_completed" and event["addr"] in numbers:
            changes.append(Allocation(numbers.pop(event["addr"])))
        elif action in _GIVEN:
            is_expandable = is_expandable or action == "segment_map"
            reserved.append(nbytes)
            held += nbytes
            most = max(most, held)
        elif action in _TAKEN:
            held -= nbytes
    return Recorded(tuple(changes), tuple(reserved), most, is_expandable)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints both; returns 0 if they reserved the same, else 1."""
    parser = argparse.ArgumentParser(prog="python -m bench.snapshot", description=__doc__)
    parser.add_argument("snapshot", type=Path)
    parser.add_argument("--device", type=int, default=0)
    asked = parser.parse_args(arguments)
    found = recorded(asked.snapshot.read_bytes(), asked.device)
    modelled, given = found.modelled()
    rows = [
        ("recorded", mib(found.reserved_nbytes), str(len(found.reserved)), ""),
        ("modelled", mib(modelled.reserved_nbytes), str(len(given)), mib(modelled.fragmented_nbytes)),
    ]
    print(table(("allocator", "reserved MiB", "segments", "of it unusable MiB"), rows))
    return 0 if given == found.reserved else 1


if __name__ == "__main__":
    raise SystemExit(main())

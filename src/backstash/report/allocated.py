"""The history of CUDA's allocator, read from a file of ``torch.cuda.memory._snapshot()``, beside its model."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from backstash.errors import PlanError
from backstash.planning.model.allocator import Allocation, CachingAllocator, Reserved, replay

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

"""The trace of a step as a snapshot for torch's memory viewer, which opens those of CUDA's allocator alone otherwise.

Drop the file on the page ``memory_viz`` of pytorch.org, which uploads nothing, or read it with the functions of
``torch/cuda/_memory_viz.py``.

The viewer is written in JavaScript and reads some opcodes of pickle only, those of protocols 2 to 4. It colours
allocations by their category, which is the buffer's role here, and needs one category that is called "unknown".
"""

from __future__ import annotations

import pickle
from bisect import bisect_right
from typing import Any

from backstash.planning.model.trace import Buffer, Trace
from backstash.planning.search.schedule import offsets

PROTOCOL = 4
"""The newest protocol of pickle that the viewer reads."""

FIRST_ADDRESS = 1 << 20
"""Where memory begins. A viewer may take address 0 for none."""


def snapshot(trace: Trace) -> bytes:
    """Returns a trace in the format of ``torch.cuda.memory._snapshot()``, pickled.

    Allocations and releases are in the order in which they happened, with the sizes that were asked for. A trace knows
    no addresses: those in the snapshot are of a placement in which buffers that are alive together do not overlap.
    Instead of a stack of Python functions, each allocation has two frames: the operation in which it was made, with the
    number of that operation in the forward or backward pass, and the buffer's role.

    Args:
        trace: the step, as ``record(step)`` returns it. Its device appears as device 0.

    Example:
        >>> y, dy = Buffer("conv2d", "stashed", 100, 0, 4), Buffer("ReluBackward0", "immediate", 60, 3, 5)
        >>> found = pickle.loads(snapshot(Trace("plain", (y, dy), (), backward=2, end=5)))
        >>> [(event["action"], event["size"]) for event in found["device_traces"][0]][:4]
        [('segment_alloc', 160), ('alloc', 100), ('alloc', 60), ('free_requested', 100)]
    """
    buffers = [buffer for buffer in trace.buffers if buffer.nbytes]  # one without bytes would share another's address
    places = offsets(buffers)
    addresses = [FIRST_ADDRESS + place for place in places]
    frames = [_frames(trace, buffer) for buffer in buffers]
    moments = [(buffer.end, 0, number) for number, buffer in enumerate(buffers) if buffer.end < trace.end]
    moments += [(buffer.start, 1, number) for number, buffer in enumerate(buffers)]
    size = max((place + buffer.nbytes for place, buffer in zip(places, buffers, strict=True)), default=0)
    begun = {"action": "segment_alloc", "addr": FIRST_ADDRESS, "size": size, "stream": 0, "frames": []}
    events: list[dict[str, Any]] = [{**begun, "category": "unknown"}] if buffers else []
    for _, is_allocated, number in sorted(moments):  # what ends at a time is released before what begins at it
        facts = {"addr": addresses[number], "size": buffers[number].nbytes, "stream": 0, "frames": frames[number]}
        if is_allocated:
            events.append({"action": "alloc", **facts, "category": buffers[number].role})
        else:  # the two events of an allocator that may have to wait for other streams
            events += [{"action": "free_requested", **facts}, {"action": "free_completed", **facts}]
    segment = {
        "device": 0,
        "address": FIRST_ADDRESS,
        "total_size": size,
        "allocated_size": sum(buffer.nbytes for buffer in buffers if buffer.end >= trace.end),
        "stream": 0,
        "segment_type": "large",
        "frames": [],
        "blocks": _blocks(trace, buffers, addresses, frames, FIRST_ADDRESS + size),
    }
    return pickle.dumps({"segments": [segment] if buffers else [], "device_traces": [events]}, PROTOCOL)


def _frames(trace: Trace, buffer: Buffer) -> list[dict[str, Any]]:
    """Returns where a buffer was allocated, innermost first."""
    first = bisect_right([op.start for op in trace.ops], trace.backward - 1)
    number = bisect_right([op.start for op in trace.ops], buffer.start)
    is_backward = buffer.start >= trace.backward
    place = {
        "filename": "backward" if is_backward else "forward",
        "line": max(0, number - first) if is_backward else number,
        "name": buffer.name,
    }
    return [place, {"filename": "role", "line": 0, "name": buffer.role}]


def _blocks(
    trace: Trace, buffers: list[Buffer], addresses: list[int], frames: list[list[dict[str, Any]]], top: int
) -> list[dict[str, Any]]:
    """Returns the segment's blocks at the end of the step: what is still alive, and the gaps."""
    alive = sorted((addresses[number], number) for number, buffer in enumerate(buffers) if buffer.end >= trace.end)
    blocks: list[dict[str, Any]] = []
    at = FIRST_ADDRESS
    for address, number in alive:
        if at < address:
            blocks.append(_gap(at, address))
        nbytes = buffers[number].nbytes
        blocks.append(
            {
                "address": address,
                "size": nbytes,
                "requested_size": nbytes,
                "state": "active_allocated",
                "frames": frames[number],
            }
        )
        at = address + nbytes
    return [*blocks, _gap(at, top)] if at < top else blocks


def _gap(begin: int, end: int) -> dict[str, Any]:
    return {"address": begin, "size": end - begin, "requested_size": 0, "state": "inactive", "frames": []}

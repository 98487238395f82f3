"""Moving a value of a graph to the host and back, with torch's own operators for it (``ao::offload``, ``ao::reload``).

They copy on a stream of their own, into pinned memory, and free the source when the copy is complete. The copy is
waited for right behind its start, so nothing is gained in time by it; torch's passes over ``ao::wait_tensor`` may move
the waiting to where it is free. Torch has the operators for accelerators only: on a CPU there is nowhere to move to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from backstash.compile.graph.emit import Emitter, GraphValue, sizes_of, tensor_of
from backstash.torch_internals import offload_operators

HOST = "host"
"""The one store that a graph reaches."""


@dataclass(frozen=True)
class Offloaded:
    """The value as it is, in the host's memory."""

    label: str = "raw in host"
    is_exact: bool = True

    def encode(self, emit: Emitter, x: GraphValue) -> tuple[GraphValue, ...]:
        """A copy on the host. The value's own memory is freed."""
        operators = offload_operators()
        assert operators is not None
        moved = emit(operators.offload.default, x)
        return (emit(operators.wait_tensor.default, moved, x),)

    def decode(self, emit: Emitter, planes: Sequence[GraphValue], like: torch.Tensor) -> GraphValue:
        """A copy on the device."""
        operators = offload_operators()
        assert operators is not None
        sizes, strides = sizes_of(planes[0]), list(tensor_of(planes[0]).stride())
        moved = emit(operators.reload.default, planes[0], like.device, sizes, strides)
        return emit(operators.wait_tensor.default, moved, planes[0])

    def nbytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        """None on the device."""
        return 0


def offloaded(store: str, device: torch.device) -> Offloaded | str:
    """The form of a value that a policy wants in another store, or why it has none."""
    if store != HOST:
        return f"a graph cannot reach the store {store!r}: leave the region uncompiled"
    if device.type == "cpu":
        return f"the value is in the host's memory already, so a graph cannot reach the store {store!r} with less"
    if offload_operators() is None:
        return f"a graph cannot reach the store {store!r}: this torch has no ao::offload"
    return Offloaded()

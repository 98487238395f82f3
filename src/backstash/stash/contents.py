"""What the storages of a step hold, and the calls that made it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from backstash.saved import TensorSpec, is_odd
from backstash.stash import calls
from backstash.stash.calls import Content, Held, View
from backstash.stash.parameters import ParameterStorages

SNAPSHOT_NBYTES = 1 << 20
"""A parameter or buffer up to this size is copied for a recipe that reads it; a larger one has no recipes."""


class Contents:
    """Contents by the address of their storage. A weak reference keeps the address from being given to another one.

    Args:
        min_nbytes: what is smaller is copied where a call reads it, and no call that makes it is noted.
        parameters: tells the storages of parameters and buffers.
    """

    def __init__(self, min_nbytes: int, parameters: ParameterStorages) -> None:
        self._min_nbytes = min_nbytes
        self._parameters = parameters
        self._contents: dict[int, tuple[StorageWeakRef, Content]] = {}
        self._snapshots: dict[tuple[Any, ...], tuple[StorageWeakRef, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._contents)

    def of(self, x: Tensor) -> Content:
        """What the storage of ``x`` holds now."""
        storage = x.untyped_storage()
        cdata, version = storage._cdata, x._version
        known = self._contents.get(cdata)
        before, escaped = None, False
        if known is not None and not known[0].expired():
            content = known[1]
            if content.version == version:
                return content
            before = content if content.version == version - 1 else None
            escaped = content.escaped
        content = Content(version, before)
        content.escaped = escaped
        alive = known[0] if known is not None and not known[0].expired() else StorageWeakRef(storage)
        self._contents[cdata] = alive, content
        return content

    def note_call(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, random_state: Tensor | None
    ) -> None:
        """Remember how the content of the result's storage was made."""
        if (
            result.layout is not torch.strided
            or not result.is_floating_point()
            or result.untyped_storage().nbytes() < self._min_nbytes
            or is_odd(result)
        ):
            return
        call = calls.call_of(function, args, kwargs, result, lambda x: self._argument(x, result), random_state)
        content = self.of(result)
        if call is not None and not content.escaped:
            content.call = call

    def escape(self, x: Tensor, storage: torch.UntypedStorage) -> None:
        """Something may change the memory of ``x`` from now on without a new version: no recipe reads it."""
        if self._parameters.include(x, storage):
            self._snapshots.clear()
        elif storage.nbytes() >= self._min_nbytes:
            content = self.of(x)
            content.escaped, content.call = True, None

    def begin_step(self) -> None:
        """Forget what died, how the rest was made, and all copies of parameters."""
        self._snapshots.clear()
        self._contents = {cdata: known for cdata, known in self._contents.items() if not known[0].expired()}
        for _, content in self._contents.values():  # else a running average would remember all of its steps
            content.call = None

    def clear(self) -> None:
        """Forget everything."""
        self._contents.clear()
        self._snapshots.clear()

    def _argument(self, x: Tensor, result: Tensor) -> View | Held | None:
        """A tensor argument of the call that made ``result``; None where a call that reads it cannot be repeated."""
        storage = x.untyped_storage()
        if storage.nbytes() < self._min_nbytes or self._parameters.include(x, storage):
            return self._snapshot(x, storage)
        if storage._cdata != result.untyped_storage()._cdata:
            content = self.of(x)
        else:  # an in-place op: it read the content before this one
            after = self.of(x)
            content, after.before = after.before or Content(x._version - 1), None
        return View(content, TensorSpec.of(x), int(x.storage_offset()))

    def _snapshot(self, x: Tensor, storage: torch.UntypedStorage) -> Held | None:
        """A copy of a parameter, a buffer, or something small, as it is now; None if it is large.

        The program may change them before backward (a running average, an average of weights swapped in), also through
        ``.data`` and so without a new version.
        """
        if x.nbytes < self._min_nbytes:
            copy = x.detach().clone()
            return Held(copy, copy._version)
        if x.nbytes > SNAPSHOT_NBYTES:
            return None
        index = (storage._cdata, x._version, x.storage_offset(), x.shape, x.stride())
        known = self._snapshots.get(index)
        if known is None or known[0].expired():
            self._snapshots[index] = known = StorageWeakRef(storage), x.detach().clone()
        return Held(known[1], known[1]._version)

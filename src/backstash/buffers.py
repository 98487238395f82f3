"""Memory that values are decoded into, used again from layer to layer.

Fresh memory costs page faults, on CPU more than decoding does. A buffer is free again when nothing but this pool holds
its storage. What was decoded into it stays there until it is used again, so that a value that two nodes need one after
the other is decoded once.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from backstash.ops.backends import advise_huge

if TYPE_CHECKING:
    from backstash.session import _Form

SMALLEST = 1 << 18
"""Smaller buffers are not pooled: the allocator has them at hand."""

_use_count = torch._C._storage_Use_Count


class _Buffer:
    __slots__ = ("cdata", "form", "memory", "storage", "version", "whole")

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        advise_huge(self.memory)
        self.storage = self.memory.untyped_storage()
        self.cdata = self.storage._cdata
        self.form: weakref.ref[_Form] | None = None
        self.whole: Tensor | None = None
        self.version = 0

    @property
    def free(self) -> bool:
        return _use_count(self.cdata) == 2 + (self.whole is not None)


class Buffers:
    """A small pool of decode buffers on CPU; elsewhere torch's own allocator is one already.

    It holds what was used last and nothing else: when no free buffer fits, the free ones are given back before a new
    one is made, so the pool never adds more than the largest buffer to the peak.
    """

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []

    def holding(self, form: _Form) -> Tensor | None:
        """What was decoded from ``form`` last, if it is still there and nothing has written to it."""
        for buffer in self._buffers:
            whole = buffer.whole
            if whole is not None and buffer.form is not None and buffer.form() is form:
                return whole if whole._version == buffer.version else None
        return None

    def take(self, form: _Form, dtype: torch.dtype) -> Tensor:
        """Memory for ``form``, laid out like what was encoded, contents undefined."""
        spec = form.spec
        nbytes = spec.numel * dtype.itemsize
        if spec.device.type != "cpu" or nbytes < SMALLEST:
            return torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=spec.device)
        fitting = [b for b in self._buffers if nbytes <= b.memory.numel() and b.free]
        if fitting:
            buffer = min(fitting, key=lambda b: b.memory.numel())
        else:
            self.clear()
            buffer = _Buffer(nbytes)
            self._buffers.append(buffer)
        buffer.form = buffer.whole = None
        # set_ and not a view: a view of another dtype holds one more tensor on the storage, and so its use count up.
        return torch.empty(0, dtype=dtype, device="cpu").set_(buffer.storage, 0, spec.shape, spec.stride)  # type: ignore[call-overload]

    def filled(self, form: _Form, whole: Tensor, trusted: bool) -> None:
        """Remember what ``whole`` holds now. An untrusted reader may write into it unseen, so then it is forgotten."""
        if not trusted:
            return
        cdata = whole.untyped_storage()._cdata
        for buffer in self._buffers:
            if buffer.cdata == cdata:
                buffer.form, buffer.whole, buffer.version = weakref.ref(form), whole, whole._version

    def clear(self) -> None:
        """Give back every buffer that nobody reads."""
        self._buffers = [buffer for buffer in self._buffers if not buffer.free]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.memory.numel() for buffer in self._buffers)

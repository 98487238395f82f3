"""Tensors in memory: what lies behind them, copies that keep the layout, poisoned memory around them."""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.saved import TensorSpec

MARGIN = 3
"""Elements before and after a poisoned tensor. It is odd, so that the tensor is aligned to its elements and no more."""


def memory(x: Tensor) -> Tensor:
    """All the memory behind ``x``, as uint8 [nbytes of its storage]."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def copy(x: Tensor) -> Tensor:
    """``x`` in the same layout, in memory of its own."""
    copied = torch.empty(0, dtype=x.dtype, device=x.device)
    copied = copied.set_(x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride())  # type: ignore[call-overload]
    return copied.requires_grad_(x.requires_grad)


def span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """The number of elements of memory from the first element of a layout to its last, both included."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def poisoned(spec: TensorSpec, dtype: torch.dtype, poison: int) -> tuple[Tensor, Tensor]:
    """Memory full of the byte ``poison``, as uint8, and in the middle of it a tensor in the layout of ``spec``."""
    nbytes = (span(spec.shape, spec.stride) + 2 * MARGIN) * dtype.itemsize
    whole = torch.full((nbytes,), poison, dtype=torch.uint8, device=spec.device)
    return whole, whole.view(dtype).as_strided(spec.shape, spec.stride, MARGIN)


def describe_layout(x: Tensor) -> str:
    """Spec, strides and storage offset of a tensor, for messages."""
    return f"{TensorSpec.of(x)} with strides {list(x.stride())} at offset {x.storage_offset()}"

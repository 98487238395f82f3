"""Integers of few bits between each group's extremes, on CUDA: the launchers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backstash.ops import triton
from backstash.ops.formats import groups
from backstash.ops.schema import ZVC_CHUNK, bytes_for


def blockquant_encode(
    x: Tensor, bits: int, group_size: int, stochastic: bool, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each element, how far it is between its group's extremes. See ``reference.blockquant_encode``."""
    codes = x.new_empty(bytes_for(x.numel(), bits), dtype=torch.uint8)
    ranges = x.new_empty(2 * groups(x.numel(), group_size))
    refused = x.new_zeros(1, dtype=torch.int64)
    arguments = triton._bits_of(x), codes, triton._bits_of(ranges), refused, x.numel(), codes.numel(), seed
    _launch("blockquant_encode_kernel", x, bits, group_size, *arguments, STOCHASTIC=stochastic)
    return codes, ranges, refused


def blockquant_decode(codes: Tensor, ranges: Tensor, bits: int, group_size: int, out: Tensor) -> None:
    """Fill ``out`` [n] from the planes of :func:`blockquant_encode`.

    Raises:
        DamagedPlanesError: a plane is not of the size that ``out`` needs.
    """
    triton._check_plane("blockquant_decode", "codes", codes, bytes_for(out.numel(), bits), out)
    triton._check_plane("blockquant_decode", "ranges", ranges, 2 * groups(out.numel(), group_size), out)
    arguments = codes, triton._bits_of(ranges), triton._bits_of(out), out.numel()
    _launch("blockquant_decode_kernel", out, bits, group_size, *arguments, UNIT=1 / (2**bits - 1))


def _launch(kernel: str, dense: Tensor, bits: int, group_size: int, *args: Any, **constants: Any) -> None:
    rows = ZVC_CHUNK // group_size
    triton._launch(
        getattr(triton._kernels(), kernel),
        triton._blocks(groups(dense.numel(), group_size), rows),
        *args,
        HALF=dense.dtype == torch.float16,
        BITS=bits,
        ROWS=rows,
        GROUP=group_size,
        num_warps=triton.ZVC_WARPS,
        **constants,
    )

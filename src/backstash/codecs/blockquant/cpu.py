"""Integers of few bits between each group's extremes, in C++.

Other dtypes than float32, float16 and bfloat16, and other widths and group sizes, go to the reference.
"""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from backstash.codecs.blockquant import reference as reference
from backstash.ops import bytes_for, groups
from backstash.ops.cpu import library
from backstash.ops.cpu.planes import SMALL_FLOATS, check_plane, new_plane, threads_for

_PLANES, _IMAGE = [c_void_p] * 3, [c_int64] * 2  # codes, low, high; channels, area

_lib: Any = library.functions(
    bs_blockquant_encode="l(pliiliuppi)",
    bs_blockquant_decode="(ppilplii)",
    bs_blockquant_encode_rows="(pliiliuillpppi)",
    bs_blockquant_decode_rows="(pppiliplilli)",
)

_SIZES = [2**power for power in range(4, 13)]


def blockquant_encode(
    x: Tensor, bits: int, group_size: int, stochastic: bool, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`backstash.codecs.blockquant.reference.blockquant_encode`."""
    if x.dtype not in SMALL_FLOATS or bits not in (1, 2, 4, 8) or group_size not in _SIZES:
        return reference.blockquant_encode(x, bits, group_size, stochastic, seed)
    n = x.numel()
    codes, ranges = new_plane(bytes_for(n, bits), torch.uint8), new_plane(2 * groups(n, group_size), x.dtype)
    arguments = x.data_ptr(), n, SMALL_FLOATS[x.dtype], bits, group_size, stochastic, seed
    refused = _lib.bs_blockquant_encode(*arguments, codes.data_ptr(), ranges.data_ptr(), threads_for(x.nbytes))
    return codes, ranges, torch.tensor([refused], device="cpu")


def blockquant_decode(codes: Tensor, ranges: Tensor, bits: int, group_size: int, out: Tensor) -> None:
    """See :func:`backstash.codecs.blockquant.reference.blockquant_decode`."""
    n = out.numel()
    taken = out.dtype in SMALL_FLOATS and ranges.dtype is out.dtype and bits in (1, 2, 4, 8) and group_size in _SIZES
    if not taken:
        return reference.blockquant_decode(codes, ranges, bits, group_size, out)
    check_plane("blockquant_decode", "codes", codes, bytes_for(n, bits))
    check_plane("blockquant_decode", "ranges", ranges, 2 * groups(n, group_size))
    arguments = codes.data_ptr(), ranges.data_ptr(), bits, group_size, out.data_ptr(), n, SMALL_FLOATS[out.dtype]
    _lib.bs_blockquant_decode(*arguments, threads_for(out.nbytes))


def blockquant_encode_rows(
    x: Tensor, bits: int, group_size: int, stochastic: bool, seed: int, across: bool, channels: int, area: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`backstash.codecs.blockquant.reference.blockquant_encode_rows`."""
    if x.dtype not in SMALL_FLOATS or bits not in (1, 2, 4, 8) or group_size not in _SIZES:
        return reference.blockquant_encode_rows(x, bits, group_size, stochastic, seed, across, channels, area)
    n = x.numel()
    if channels and (channels * area % group_size or (across and n // (channels * area) % (8 // bits))):
        x, channels, area = x.view(-1, area, channels).transpose(1, 2).reshape(-1), 0, 0
    count = groups(n, group_size)
    codes = new_plane(count * group_size * bits // 8, torch.uint8)
    low, high = new_plane(count, x.dtype), new_plane(count, x.dtype)
    arguments = x.data_ptr(), n, SMALL_FLOATS[x.dtype], bits, group_size, stochastic, seed, across
    planes = codes.data_ptr(), low.data_ptr(), high.data_ptr()
    _lib.bs_blockquant_encode_rows(*arguments, channels, area, *planes, threads_for(x.nbytes))
    return codes, low, high


def blockquant_decode_rows(
    codes: Tensor,
    low: Tensor,
    high: Tensor,
    bits: int,
    group_size: int,
    across: bool,
    channels: int,
    area: int,
    out: Tensor,
) -> None:
    """See :func:`backstash.codecs.blockquant.reference.blockquant_decode_rows`."""
    n = out.numel()
    taken = out.dtype in SMALL_FLOATS and low.dtype is high.dtype is out.dtype and bits in (1, 2, 4, 8)
    if not taken or group_size not in _SIZES:
        return reference.blockquant_decode_rows(codes, low, high, bits, group_size, across, channels, area, out)
    reference.check_rows(codes, low, high, bits, group_size, n)
    planes = codes.data_ptr(), low.data_ptr(), high.data_ptr()
    arguments = bits, group_size, across, out.data_ptr(), n, SMALL_FLOATS[out.dtype], channels, area
    _lib.bs_blockquant_decode_rows(*planes, *arguments, threads_for(out.nbytes))

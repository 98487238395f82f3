"""Masks in C++.

Other dtypes than float32, float64, float16 and bfloat16 go to the reference; so do elements of 1 and of 16 bytes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from backstash.codecs.masks import reference as reference
from backstash.ops import bytes_for
from backstash.ops.cpu import library
from backstash.ops.cpu.planes import FLOATS, UNSIGNED, check_plane, new_plane, rounded, scalar_bits, threads_for

_lib: Any = library.functions(
    bs_bitmask_encode="(pliiddpi)",
    bs_binary_encode="l(pliwwpi)",
    bs_mask_decode="(ppliwwi)",
    bs_mask_select="(pplipi)",
)


def bitmask_encode(x: Tensor, test: int, lo: float, hi: float) -> Tensor:
    """See :func:`backstash.codecs.masks.reference.bitmask_encode`."""
    code = FLOATS.get(x.dtype)
    if code is None:
        return reference.bitmask_encode(x, test, lo, hi)
    n = x.numel()
    mask = new_plane(bytes_for(n, 1), torch.uint8)
    lo, hi = rounded(lo, x.dtype), rounded(hi, x.dtype)
    _lib.bs_bitmask_encode(x.data_ptr(), n, code, test, lo, hi, mask.data_ptr(), threads_for(n * x.element_size()))
    return mask


def bitmask_decode(mask: Tensor, out: Tensor, if_set: float, if_clear: float) -> None:
    """See :func:`backstash.codecs.masks.reference.bitmask_decode`."""
    width = out.element_size()
    if width not in UNSIGNED or out.dtype.is_complex:
        return reference.bitmask_decode(mask, out, if_set, if_clear)
    n = out.numel()
    check_plane("bitmask_decode", "mask", mask, bytes_for(n, 1))
    ones = scalar_bits(if_set, math.copysign(1.0, if_set), out.dtype)
    zeros = scalar_bits(if_clear, math.copysign(1.0, if_clear), out.dtype)
    _lib.bs_mask_decode(mask.data_ptr(), out.data_ptr(), n, width, ones, zeros, threads_for(n * width))


def _pair_bits(pair: Tensor) -> tuple[int, int]:
    first, second = pair.view(UNSIGNED[pair.element_size()]).tolist()
    return first, second


def binary_encode(x: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`backstash.codecs.masks.reference.binary_encode`."""
    width = x.element_size()
    if width not in (2, 4, 8) or pair.element_size() != width:
        return reference.binary_encode(x, pair)
    n = x.numel()
    mask = new_plane(bytes_for(n, 1), torch.uint8)
    first, second = _pair_bits(pair)
    neither = _lib.bs_binary_encode(x.data_ptr(), n, width, first, second, mask.data_ptr(), threads_for(n * width))
    return mask, torch.tensor([neither], device="cpu")


def binary_decode(mask: Tensor, pair: Tensor, out: Tensor) -> None:
    """See :func:`backstash.codecs.masks.reference.binary_decode`."""
    width = out.element_size()
    if width not in (2, 4, 8) or pair.element_size() != width:
        return reference.binary_decode(mask, pair, out)
    n = out.numel()
    check_plane("binary_decode", "mask", mask, bytes_for(n, 1))
    zeros, ones = _pair_bits(pair)
    _lib.bs_mask_decode(mask.data_ptr(), out.data_ptr(), n, width, ones, zeros, threads_for(n * width))


def mask_select(x: Tensor, mask: Tensor, out: Tensor) -> None:
    """See :func:`backstash.codecs.masks.reference.mask_select`."""
    n, width = x.numel(), x.element_size()
    if width not in (2, 4, 8):
        return reference.mask_select(x, mask, out)
    check_plane("mask_select", "mask", mask, bytes_for(n, 1))
    _lib.bs_mask_select(x.data_ptr(), mask.data_ptr(), n, width, out.data_ptr(), threads_for(n * width))

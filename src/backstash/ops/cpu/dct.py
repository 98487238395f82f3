"""8x8 cosine transforms, quantised and without their zeros, in C++. Other dtypes go to the reference."""

from __future__ import annotations

from ctypes import byref, c_float, c_int64
from typing import Any

import torch
from torch import Tensor

from backstash.errors import DamagedPlanesError
from backstash.ops import cpu, reference
from backstash.ops.cpu import library
from backstash.ops.reference import dct as layout

_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3}  # the codes of native/elements.h
_BASIS = (c_float * 64)(*layout.BASIS)
_lib = library.load()


def dct_encode(
    x: Tensor, outer: int, height: int, width: int, inner: int, shifts: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`backstash.ops.reference.dct.dct_encode`."""
    if _lib is None or x.dtype not in _TYPES:
        return reference.dct_encode(x, outer, height, width, inner, shifts)
    blocks, threads, strange = layout.dct_blocks(outer, height, width, inner), cpu._threads(x.nbytes), c_int64()
    codes, mask = cpu._new(64 * blocks, torch.uint8), cpu._new(8 * blocks, torch.uint8)
    offsets = torch.empty(-(-blocks // 64), dtype=torch.int64, device="cpu")
    scales = torch.empty(outer * inner, dtype=torch.float32, device="cpu")
    planes = codes.data_ptr(), mask.data_ptr(), offsets.data_ptr()
    sizes = x.data_ptr(), _TYPES[x.dtype], outer, height, width, inner, _BASIS, _powers(shifts, -1)
    stored = _lib.bs_dct_transform(*sizes, *planes, scales.data_ptr(), byref(strange), threads)
    values = cpu._new(stored, torch.uint8)
    _lib.bs_dct_gather(*planes, blocks, values.data_ptr(), threads)
    return mask, offsets, values, scales, torch.tensor([strange.value], device="cpu")


def dct_decode(
    mask: Tensor,
    offsets: Tensor,
    values: Tensor,
    scales: Tensor,
    outer: int,
    height: int,
    width: int,
    inner: int,
    shifts: list[int],
    out: Tensor,
) -> None:
    """See :func:`backstash.ops.reference.dct.dct_decode`. All planes are checked before ``out`` is touched.

    Raises:
        DamagedPlanesError: a plane is not of the size that ``out`` needs, or the mask's bits, the offsets and the
            number of codes do not agree.
    """
    if _lib is None or out.dtype not in _TYPES:
        return reference.dct_decode(mask, offsets, values, scales, outer, height, width, inner, shifts, out)
    blocks = layout.dct_blocks(outer, height, width, inner)
    for name, plane, size in (
        ("mask", mask, 8 * blocks),
        ("offsets", offsets, -(-blocks // 64)),
        ("scales", scales, outer * inner),
    ):
        cpu._check_plane("dct_decode", name, plane, size)
    planes = mask.data_ptr(), offsets.data_ptr(), values.data_ptr(), values.numel(), scales.data_ptr()
    sizes = outer, height, width, inner, _BASIS, _powers(shifts, 1)
    if _lib.bs_dct_decode(*planes, *sizes, out.data_ptr(), _TYPES[out.dtype], cpu._threads(out.nbytes)) != 0:
        raise DamagedPlanesError(layout.dct_damage(values.numel()))


def _powers(shifts: list[int], sign: int) -> Any:
    return (c_float * 64)(*(2.0 ** (sign * shift) for shift in shifts))

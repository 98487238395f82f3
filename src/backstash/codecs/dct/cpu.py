"""8x8 cosine transforms in C++, quantised and without their zeros.

Other dtypes than float32, float16 and bfloat16 go to the reference.
"""

from __future__ import annotations

from ctypes import byref, c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from backstash.codecs.dct import reference as reference
from backstash.codecs.dct.reference import BASIS, dct_blocks, dct_damage
from backstash.errors import DamagedPlanesError
from backstash.ops.cpu import library
from backstash.ops.cpu.planes import SMALL_FLOATS, check_plane, new_plane, threads_for

_lib: Any = library.functions(
    {
        "bs_dct_transform": (c_int64, [c_void_p, c_int, *[c_int64] * 4, *[c_void_p] * 7, c_int]),
        "bs_dct_gather": (None, [c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int]),
        "bs_dct_decode": (
            c_int,
            [*[c_void_p] * 3, c_int64, c_void_p, *[c_int64] * 4, *[c_void_p] * 3, c_int, c_int],
        ),
    }
)

_BASIS = (c_float * 64)(*BASIS)


def dct_encode(
    x: Tensor, outer: int, height: int, width: int, inner: int, shifts: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`backstash.codecs.dct.reference.dct_encode`."""
    if x.dtype not in SMALL_FLOATS:
        return reference.dct_encode(x, outer, height, width, inner, shifts)
    blocks, threads, strange = dct_blocks(outer, height, width, inner), threads_for(x.nbytes), c_int64()
    codes, mask = new_plane(64 * blocks, torch.uint8), new_plane(8 * blocks, torch.uint8)
    offsets = torch.empty(-(-blocks // 64), dtype=torch.int64, device="cpu")
    scales = torch.empty(outer * inner, dtype=torch.float32, device="cpu")
    planes = codes.data_ptr(), mask.data_ptr(), offsets.data_ptr()
    sizes = x.data_ptr(), SMALL_FLOATS[x.dtype], outer, height, width, inner, _BASIS, _powers(shifts, -1)
    stored = _lib.bs_dct_transform(*sizes, *planes, scales.data_ptr(), byref(strange), threads)
    values = new_plane(stored, torch.uint8)
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
    """See :func:`backstash.codecs.dct.reference.dct_decode`. All planes are checked before ``out`` is touched.

    Raises:
        DamagedPlanesError: a plane is not of the size that ``out`` needs, or the mask's bits, the offsets and the
            number of codes do not agree.
    """
    if out.dtype not in SMALL_FLOATS:
        return reference.dct_decode(mask, offsets, values, scales, outer, height, width, inner, shifts, out)
    blocks = dct_blocks(outer, height, width, inner)
    for name, plane, size in (
        ("mask", mask, 8 * blocks),
        ("offsets", offsets, -(-blocks // 64)),
        ("scales", scales, outer * inner),
    ):
        check_plane("dct_decode", name, plane, size)
    planes = mask.data_ptr(), offsets.data_ptr(), values.data_ptr(), values.numel(), scales.data_ptr()
    sizes = outer, height, width, inner, _BASIS, _powers(shifts, 1)
    if _lib.bs_dct_decode(*planes, *sizes, out.data_ptr(), SMALL_FLOATS[out.dtype], threads_for(out.nbytes)) != 0:
        raise DamagedPlanesError(dct_damage(values.numel()))


def _powers(shifts: list[int], sign: int) -> Any:
    return (c_float * 64)(*(2.0 ** (sign * shift) for shift in shifts))

"""Small floating-point formats in C++.

Other dtypes than float32, float16 and bfloat16 go to the reference; so do formats of 16 bits, unless the dtype is
float32.
"""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from backstash.errors import DamagedPlanesError
from backstash.ops.cpu import library
from backstash.ops.cpu.planes import FLOATS, check_plane, new_plane, threads_for
from backstash.ops.formats import FORMATS, SCALED, Format, groups
from backstash.ops.layout import bytes_for, zvc_chunks
from backstash.ops.reference import minifloat as reference
from backstash.ops.reference.sparse import zvc_damage

_lib: Any = library.functions(
    {
        "bs_minifloat_encode": (None, [c_void_p, c_int64, c_int, c_int, c_int, c_void_p, c_int]),
        "bs_minifloat_decode": (None, [c_void_p, c_int, c_void_p, c_int64, c_int, c_int]),
        "bs_minifloat_scaled_encode": (None, [c_void_p, c_int64, c_int, c_int, c_int64, c_void_p, c_void_p, c_int]),
        "bs_minifloat_scaled_decode": (None, [c_void_p, c_void_p, c_int, c_int64, c_void_p, c_int64, c_int, c_int]),
        "bs_minifloat_images_encode": (
            None,
            [c_void_p, c_int64, c_int, c_int, *[c_int64] * 3, c_void_p, c_void_p, c_int],
        ),
        "bs_minifloat_images_decode": (
            None,
            [c_void_p, c_void_p, c_int, *[c_int64] * 3, c_void_p, c_int64, c_int, c_int],
        ),
        "bs_zvc_minifloat_encode": (
            c_int64,
            [c_void_p, c_int64, c_int, c_int, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int],
        ),
        "bs_zvc_minifloat_place": (None, [c_void_p, c_int64, c_int, c_int, *[c_void_p] * 5, c_int64, c_int]),
        "bs_zvc_minifloat_decode": (
            c_int,
            [c_void_p, c_void_p, c_void_p, c_int64, c_int, c_void_p, c_int64, c_int, c_int],
        ),
    }
)

_SCRATCH = 31 << 20
"""Bytes of codes that zvc_minifloat_encode keeps until it knows how many there are. It computes the others twice.

From 32 MiB on, glibc takes memory from the system afresh each time, which costs more than it saves."""


def _takes(form: Format, dtype: torch.dtype) -> bool:
    return dtype is torch.float32 or (dtype in (torch.float16, torch.bfloat16) and form.bits < 16)


def minifloat_encode(x: Tensor, format: str, nonzero: bool) -> Tensor:
    """See :func:`backstash.ops.reference.minifloat.minifloat_encode`."""
    form, n = FORMATS[format], x.numel()
    if not _takes(form, x.dtype):
        return reference.minifloat_encode(x, format, nonzero)
    codes = new_plane(form.words(n), form.dtype)
    arguments = x.data_ptr(), n, FLOATS[x.dtype], form.code, nonzero
    _lib.bs_minifloat_encode(*arguments, codes.data_ptr(), threads_for(x.nbytes))
    return codes


def minifloat_decode(codes: Tensor, format: str, out: Tensor) -> None:
    """See :func:`backstash.ops.reference.minifloat.minifloat_decode`.

    Raises:
        DamagedPlanesError: the plane is not of the size that ``out`` needs.
    """
    form, n = FORMATS[format], out.numel()
    if not _takes(form, out.dtype) or codes.dtype is not form.dtype:
        return reference.minifloat_decode(codes, format, out)
    check_plane("minifloat_decode", "codes", codes, form.words(n))
    arguments = codes.data_ptr(), form.code, out.data_ptr(), n, FLOATS[out.dtype]
    _lib.bs_minifloat_decode(*arguments, threads_for(out.nbytes))


def minifloat_scaled_encode(x: Tensor, format: str, group_size: int) -> tuple[Tensor, Tensor]:
    """See :func:`backstash.ops.reference.minifloat.minifloat_scaled_encode`."""
    form, n = FORMATS[format], x.numel()
    if not _takes(form, x.dtype) or format not in SCALED:
        return reference.minifloat_scaled_encode(x, format, group_size)
    codes, scales = new_plane(n, form.dtype), new_plane(groups(n, group_size), torch.float32)
    arguments = x.data_ptr(), n, FLOATS[x.dtype], form.code, group_size
    _lib.bs_minifloat_scaled_encode(*arguments, codes.data_ptr(), scales.data_ptr(), threads_for(x.nbytes))
    return codes, scales


def minifloat_scaled_decode(codes: Tensor, scales: Tensor, format: str, group_size: int, out: Tensor) -> None:
    """See :func:`backstash.ops.reference.minifloat.minifloat_scaled_decode`.

    Raises:
        DamagedPlanesError: a plane is not of the size that ``out`` needs.
    """
    form, n = FORMATS[format], out.numel()
    if not _takes(form, out.dtype) or format not in SCALED or scales.dtype is not torch.float32:
        return reference.minifloat_scaled_decode(codes, scales, format, group_size, out)
    check_plane("minifloat_scaled_decode", "codes", codes, n)
    check_plane("minifloat_scaled_decode", "scales", scales, groups(n, group_size))
    arguments = codes.data_ptr(), scales.data_ptr(), form.code, group_size, out.data_ptr(), n, FLOATS[out.dtype]
    _lib.bs_minifloat_scaled_decode(*arguments, threads_for(out.nbytes))


def minifloat_images_encode(x: Tensor, format: str, group_size: int, channels: int, area: int) -> tuple[Tensor, Tensor]:
    """See :func:`backstash.ops.reference.minifloat.minifloat_images_encode`."""
    form, n = FORMATS[format], x.numel()
    if not _takes(form, x.dtype) or format not in SCALED:
        return reference.minifloat_images_encode(x, format, group_size, channels, area)
    if n and channels * area % group_size:  # a group reaches from one image into the next
        return minifloat_scaled_encode(x.view(-1, area, channels).transpose(1, 2).reshape(-1), format, group_size)
    codes, scales = new_plane(n, form.dtype), new_plane(groups(n, group_size), torch.float32)
    arguments = x.data_ptr(), n, FLOATS[x.dtype], form.code, group_size, channels, area
    _lib.bs_minifloat_images_encode(*arguments, codes.data_ptr(), scales.data_ptr(), threads_for(x.nbytes))
    return codes, scales


def minifloat_images_decode(
    codes: Tensor, scales: Tensor, format: str, group_size: int, channels: int, area: int, out: Tensor
) -> None:
    """See :func:`backstash.ops.reference.minifloat.minifloat_images_decode`.

    Raises:
        DamagedPlanesError: a plane is not of the size that ``out`` needs.
    """
    form, n = FORMATS[format], out.numel()
    if not _takes(form, out.dtype) or format not in SCALED or scales.dtype is not torch.float32:
        return reference.minifloat_images_decode(codes, scales, format, group_size, channels, area, out)
    check_plane("minifloat_images_decode", "codes", codes, n)
    check_plane("minifloat_images_decode", "scales", scales, groups(n, group_size))
    arguments = codes.data_ptr(), scales.data_ptr(), form.code, group_size, channels, area
    _lib.bs_minifloat_images_decode(*arguments, out.data_ptr(), n, FLOATS[out.dtype], threads_for(out.nbytes))


def zvc_minifloat_encode(x: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`backstash.ops.reference.minifloat.zvc_minifloat_encode`."""
    form, n = FORMATS[format], x.numel()
    if not _takes(form, x.dtype):
        return reference.zvc_minifloat_encode(x, format)
    source = x.data_ptr(), n, FLOATS[x.dtype], form.code
    threads = threads_for(x.nbytes)
    mask = new_plane(bytes_for(n, 1), torch.uint8)
    offsets = torch.empty(zvc_chunks(n), dtype=torch.int64, device="cpu")
    places = torch.empty_like(offsets)
    room = min(form.words(n) * form.dtype.itemsize + 4 * places.numel(), _SCRATCH)
    scratch = new_plane(room + 8, torch.uint8)  # the kernel may read what lies behind the last code
    kept = scratch.data_ptr(), places.data_ptr()
    stored = _lib.bs_zvc_minifloat_encode(*source, mask.data_ptr(), offsets.data_ptr(), kept[0], room, kept[1], threads)
    values = new_plane(form.words(stored), form.dtype)
    planes = mask.data_ptr(), offsets.data_ptr(), *kept, values.data_ptr()
    _lib.bs_zvc_minifloat_place(*source, *planes, stored, threads)
    return mask, offsets, values


def zvc_minifloat_decode(mask: Tensor, offsets: Tensor, values: Tensor, format: str, out: Tensor) -> None:
    """See :func:`backstash.ops.reference.minifloat.zvc_minifloat_decode`. Checks all planes before it touches ``out``.

    Raises:
        DamagedPlanesError: a plane is not of the size that ``out`` needs, or the mask's bits, the offsets and the
            number of values do not agree.
    """
    form, n = FORMATS[format], out.numel()
    if not _takes(form, out.dtype) or values.dtype is not form.dtype:
        return reference.zvc_minifloat_decode(mask, offsets, values, format, out)
    check_plane("zvc_minifloat_decode", "mask", mask, bytes_for(n, 1))
    check_plane("zvc_minifloat_decode", "offsets", offsets, zvc_chunks(n))
    planes = mask.data_ptr(), offsets.data_ptr(), values.data_ptr()
    target = out.data_ptr(), n, FLOATS[out.dtype]
    if _lib.bs_zvc_minifloat_decode(*planes, values.numel(), form.code, *target, threads_for(out.nbytes)) != 0:
        raise DamagedPlanesError(zvc_damage(values.numel()))

"""Small floating-point formats in C++.

Other dtypes than float32, float16 and bfloat16 go to the reference; so do formats of 16 bits, unless the dtype is
float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backstash.codecs.minifloat import reference as reference
from backstash.codecs.minifloat.formats import FORMATS, SCALED, Format
from backstash.ops import groups
from backstash.ops.cpu import library
from backstash.ops.cpu.planes import FLOATS, check_plane, new_plane, threads_for

_lib: Any = library.functions(
    bs_minifloat_encode="(pliiipi)",
    bs_minifloat_decode="(piplii)",
    bs_minifloat_scaled_encode="(pliilppi)",
    bs_minifloat_scaled_decode="(ppilplii)",
    bs_minifloat_images_encode="(pliilllppi)",
    bs_minifloat_images_decode="(ppilllplii)",
)


def takes(form: Format, dtype: torch.dtype) -> bool:
    """Returns whether the kernels convert between the format and the dtype."""
    return dtype is torch.float32 or (dtype in (torch.float16, torch.bfloat16) and form.bits < 16)


def minifloat_encode(x: Tensor, format: str, nonzero: bool) -> Tensor:
    """See :func:`backstash.codecs.minifloat.reference.minifloat_encode`."""
    form, n = FORMATS[format], x.numel()
    if not takes(form, x.dtype):
        return reference.minifloat_encode(x, format, nonzero)
    codes = new_plane(form.words(n), form.dtype)
    arguments = x.data_ptr(), n, FLOATS[x.dtype], form.code, nonzero
    _lib.bs_minifloat_encode(*arguments, codes.data_ptr(), threads_for(x.nbytes))
    return codes


def minifloat_decode(codes: Tensor, format: str, out: Tensor) -> None:
    """See :func:`backstash.codecs.minifloat.reference.minifloat_decode`."""
    form, n = FORMATS[format], out.numel()
    if not takes(form, out.dtype) or codes.dtype is not form.dtype:
        return reference.minifloat_decode(codes, format, out)
    check_plane("minifloat_decode", "codes", codes, form.words(n))
    arguments = codes.data_ptr(), form.code, out.data_ptr(), n, FLOATS[out.dtype]
    _lib.bs_minifloat_decode(*arguments, threads_for(out.nbytes))


def minifloat_scaled_encode(x: Tensor, format: str, group_size: int) -> tuple[Tensor, Tensor]:
    """See :func:`backstash.codecs.minifloat.reference.minifloat_scaled_encode`."""
    form, n = FORMATS[format], x.numel()
    if not takes(form, x.dtype) or format not in SCALED:
        return reference.minifloat_scaled_encode(x, format, group_size)
    codes, scales = new_plane(n, form.dtype), new_plane(groups(n, group_size), torch.float32)
    arguments = x.data_ptr(), n, FLOATS[x.dtype], form.code, group_size
    _lib.bs_minifloat_scaled_encode(*arguments, codes.data_ptr(), scales.data_ptr(), threads_for(x.nbytes))
    return codes, scales


def minifloat_scaled_decode(codes: Tensor, scales: Tensor, format: str, group_size: int, out: Tensor) -> None:
    """See :func:`backstash.codecs.minifloat.reference.minifloat_scaled_decode`."""
    form, n = FORMATS[format], out.numel()
    if not takes(form, out.dtype) or format not in SCALED or scales.dtype is not torch.float32:
        return reference.minifloat_scaled_decode(codes, scales, format, group_size, out)
    check_plane("minifloat_scaled_decode", "codes", codes, n)
    check_plane("minifloat_scaled_decode", "scales", scales, groups(n, group_size))
    arguments = codes.data_ptr(), scales.data_ptr(), form.code, group_size, out.data_ptr(), n, FLOATS[out.dtype]
    _lib.bs_minifloat_scaled_decode(*arguments, threads_for(out.nbytes))


def minifloat_images_encode(x: Tensor, format: str, group_size: int, channels: int, area: int) -> tuple[Tensor, Tensor]:
    """See :func:`backstash.codecs.minifloat.reference.minifloat_images_encode`."""
    form, n = FORMATS[format], x.numel()
    if not takes(form, x.dtype) or format not in SCALED:
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
    """See :func:`backstash.codecs.minifloat.reference.minifloat_images_decode`."""
    form, n = FORMATS[format], out.numel()
    if not takes(form, out.dtype) or format not in SCALED or scales.dtype is not torch.float32:
        return reference.minifloat_images_decode(codes, scales, format, group_size, channels, area, out)
    check_plane("minifloat_images_decode", "codes", codes, n)
    check_plane("minifloat_images_decode", "scales", scales, groups(n, group_size))
    arguments = codes.data_ptr(), scales.data_ptr(), form.code, group_size, channels, area
    _lib.bs_minifloat_images_decode(*arguments, out.data_ptr(), n, FLOATS[out.dtype], threads_for(out.nbytes))

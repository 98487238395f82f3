"""ZVC in C++, of elements and of small formats.

Elements of 1 byte and of 16 bytes go to the reference; of small formats what ``codecs/minifloat/cpu.py`` leaves to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backstash.codecs.minifloat.cpu import takes
from backstash.codecs.minifloat.formats import FORMATS
from backstash.codecs.zvc import reference as reference
from backstash.codecs.zvc.reference import zvc_damage
from backstash.errors import DamagedPlanesError
from backstash.ops import bytes_for, zvc_chunks
from backstash.ops.cpu import library
from backstash.ops.cpu.planes import FLOATS, check_plane, new_plane, threads_for

_lib: Any = library.functions(
    bs_zvc_mark="l(plippi)",
    bs_zvc_gather="(plipppli)",
    bs_zvc_decode="i(ppplplii)",
    bs_zvc_minifloat_encode="l(pliippplpi)",
    bs_zvc_minifloat_place="(pliipppppli)",
    bs_zvc_minifloat_decode="i(pppliplii)",
)

_SCRATCH = 31 << 20
"""Bytes of codes that zvc_minifloat_encode keeps until it knows how many there are. It computes the others twice.

From 32 MiB on, glibc takes memory from the system afresh each time, which costs more than it saves."""


def zvc_encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`backstash.codecs.zvc.reference.zvc_encode`."""
    width = x.element_size()
    if width not in (2, 4, 8):
        return reference.zvc_encode(x)
    n, source = x.numel(), x.data_ptr()
    threads = threads_for(n * width)
    mask = new_plane(bytes_for(n, 1), torch.uint8)
    offsets = torch.empty(zvc_chunks(n), dtype=torch.int64, device="cpu")
    planes = mask.data_ptr(), offsets.data_ptr()
    stored = _lib.bs_zvc_mark(source, n, width, *planes, threads)
    values = new_plane(stored, x.dtype)
    _lib.bs_zvc_gather(source, n, width, *planes, values.data_ptr(), stored, threads)
    return mask, offsets, values


def zvc_decode(mask: Tensor, offsets: Tensor, values: Tensor, out: Tensor) -> None:
    """See :func:`backstash.codecs.zvc.reference.zvc_decode`. All planes are checked before ``out`` is touched."""
    width = out.element_size()
    if width not in (2, 4, 8) or values.element_size() != width:
        return reference.zvc_decode(mask, offsets, values, out)
    n, stored = out.numel(), values.numel()
    check_plane("zvc_decode", "mask", mask, bytes_for(n, 1))
    check_plane("zvc_decode", "offsets", offsets, zvc_chunks(n))
    planes = mask.data_ptr(), offsets.data_ptr(), values.data_ptr()
    if _lib.bs_zvc_decode(*planes, stored, out.data_ptr(), n, width, threads_for(n * width)) != 0:
        raise DamagedPlanesError(zvc_damage(stored))


def zvc_minifloat_encode(x: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`backstash.codecs.zvc.reference.zvc_minifloat_encode`."""
    form, n = FORMATS[format], x.numel()
    if not takes(form, x.dtype):
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
    """See :func:`backstash.codecs.zvc.reference.zvc_minifloat_decode`. Checks all planes before it touches ``out``."""
    form, n = FORMATS[format], out.numel()
    if not takes(form, out.dtype) or values.dtype is not form.dtype:
        return reference.zvc_minifloat_decode(mask, offsets, values, format, out)
    check_plane("zvc_minifloat_decode", "mask", mask, bytes_for(n, 1))
    check_plane("zvc_minifloat_decode", "offsets", offsets, zvc_chunks(n))
    planes = mask.data_ptr(), offsets.data_ptr(), values.data_ptr()
    target = out.data_ptr(), n, FLOATS[out.dtype]
    if _lib.bs_zvc_minifloat_decode(*planes, values.numel(), form.code, *target, threads_for(out.nbytes)) != 0:
        raise DamagedPlanesError(zvc_damage(values.numel()))

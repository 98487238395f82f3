"""Exponents as codes into windows, in C++: of elements of 2 and of 4 bytes. Others go to the reference."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from backstash.errors import DamagedPlanesError
from backstash.ops.cpu import library
from backstash.ops.cpu.planes import new_plane, threads_for
from backstash.ops.layout import bytes_for, exponents_blocks, zvc_chunks
from backstash.ops.reference import exponents as reference
from backstash.ops.reference.exponents import check_exponents, exponents_damage

_lib: Any = library.functions(
    {
        "bs_exponents_code": (c_int64, [c_void_p, c_int64, c_int, c_int, *[c_void_p] * 4, c_int]),
        "bs_exponents_gather": (None, [c_void_p, c_int64, c_int, c_int, *[c_void_p] * 3, c_int64, c_int]),
        "bs_exponents_decode": (c_int, [*[c_void_p] * 5, c_int64, c_void_p, c_int64, c_int, c_int, c_int]),
    }
)


def exponents_encode(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`backstash.ops.reference.exponents.exponents_encode`."""
    if x.element_size() not in (2, 4):
        return reference.exponents_encode(x, bits)
    *planes, stored = _coded(x, bits)
    fractions, codes, bases, offsets = planes
    return fractions, codes, bases, offsets, _escapes(x, bits, codes, offsets, stored)


def exponents_encode_within(x: Tensor, bits: int, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`backstash.ops.reference.exponents.exponents_encode_within`."""
    if x.element_size() not in (2, 4):
        return reference.exponents_encode_within(x, bits, room)
    fractions, codes, bases, offsets, stored = _coded(x, bits)
    count = torch.full((1,), stored, dtype=torch.int64, device="cpu")
    return fractions, codes, bases, offsets, _escapes(x, bits, codes, offsets, room), count


def _coded(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Returns the planes but the one of escapes, and the number of these."""
    n, width = x.numel(), x.element_size()
    fractions = new_plane((width - 1) * n, torch.uint8)
    codes = new_plane(bytes_for(n, bits), torch.uint8)
    bases = torch.empty(exponents_blocks(n), dtype=torch.uint8, device="cpu")
    offsets = torch.empty(zvc_chunks(n), dtype=torch.int64, device="cpu")
    planes = fractions, codes, bases, offsets
    addresses = [plane.data_ptr() for plane in planes]
    stored = _lib.bs_exponents_code(x.data_ptr(), n, width, bits, *addresses, threads_for(n * width))
    return *planes, stored


def _escapes(x: Tensor, bits: int, codes: Tensor, offsets: Tensor, room: int) -> Tensor:
    """Returns the first ``room`` escapes; what is behind the last one is undefined."""
    n, width, escapes = x.numel(), x.element_size(), new_plane(room, torch.uint8)
    planes = codes.data_ptr(), offsets.data_ptr(), escapes.data_ptr()
    _lib.bs_exponents_gather(x.data_ptr(), n, width, bits, *planes, room, threads_for(n * width))
    return escapes


def exponents_decode(
    fractions: Tensor, codes: Tensor, bases: Tensor, offsets: Tensor, escapes: Tensor, bits: int, out: Tensor
) -> None:
    """See :func:`backstash.ops.reference.exponents.exponents_decode`. All planes are checked before ``out`` is touched.

    Raises:
        DamagedPlanesError: a plane is not of the size that ``out`` needs, or the codes, the offsets and the number of
            escapes do not agree.
    """
    width = out.element_size()
    if width not in (2, 4):
        return reference.exponents_decode(fractions, codes, bases, offsets, escapes, bits, out)
    check_exponents(fractions, codes, bases, offsets, bits, out)
    n, stored = out.numel(), escapes.numel()
    planes = [plane.data_ptr() for plane in (fractions, codes, bases, offsets, escapes)]
    if _lib.bs_exponents_decode(*planes, stored, out.data_ptr(), n, width, bits, threads_for(n * width)) != 0:
        raise DamagedPlanesError(exponents_damage(stored))

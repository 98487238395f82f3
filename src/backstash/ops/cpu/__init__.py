"""The kernels in C++ (``native/``), called through ctypes: the functions that ``ops/backends.py`` expects of a backend.

Every plane is byte-identical to the one of ``ops/reference``. What the C++ does not take, these functions hand to the
reference themselves, and only this:

* bitmask: tests on a dtype other than float32, float64, float16, bfloat16; decoding to elements of 16 bytes.
* binary, ZVC: elements of 1 byte or 16 bytes.
* narrow: a dtype other than int64, int32, int16, int8, uint8, bool.
* window: more than three spatial dimensions.

Outputs of a decoder belong to the caller: who makes a fresh one calls :func:`advise_huge` on it first.
"""

from __future__ import annotations

import math
from ctypes import byref, c_int64
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from backstash.errors import DamagedPlanesError
from backstash.ops import reference
from backstash.ops.cpu import library
from backstash.ops.cpu.library import available, build_info, isa, set_isa
from backstash.ops.schema import bytes_for, window_bits, zvc_chunks

__all__ = [
    "advise_huge",
    "available",
    "binary_decode",
    "binary_encode",
    "bitmask_decode",
    "bitmask_encode",
    "build_info",
    "isa",
    "look",
    "narrow_decode",
    "narrow_encode",
    "set_isa",
    "window_decode",
    "window_encode",
    "zvc_decode",
    "zvc_encode",
]

# The codes of native/elements.h.
_FLOATS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
_INTEGERS = {torch.int64: 0, torch.int32: 1, torch.int16: 2, torch.int8: 3, torch.uint8: 4, torch.bool: 5}
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}

_SERIAL_BELOW = 256 << 10
"""Bytes of the larger side below which waking a second thread costs more than it saves."""

_HUGE_FROM = 4 << 20
"""Bytes from which huge pages are asked for: below, the memory comes from a heap that has been touched already."""

_lib: Any = library.load()


def advise_huge(t: Tensor) -> None:
    """Ask the system for huge pages behind ``t``, which nobody has written yet: one page fault per 2 MiB, not 4 KiB.

    Does nothing below 4 MiB, off Linux, and where the system declines.
    """
    nbytes = t.numel() * t.element_size()
    if nbytes >= _HUGE_FROM and _lib is not None:
        _lib.bs_advise_huge(t.data_ptr(), nbytes)


def _threads(nbytes: int) -> int:
    return 1 if nbytes < _SERIAL_BELOW else torch.get_num_threads()


def _new(numel: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty(numel, dtype=dtype, device="cpu")
    if numel >= _HUGE_FROM // 8:  # no dtype is wider: small outputs skip the rest
        advise_huge(out)
    return out


@lru_cache(maxsize=256)
def _scalar_bits(value: float, sign: float, dtype: torch.dtype) -> int:
    """The bits of ``value`` as torch converts it to ``dtype``. ``sign`` keeps 0.0 and -0.0 apart in the cache."""
    return int(torch.tensor(value, dtype=dtype, device="cpu").view(_UNSIGNED[dtype.itemsize]).item())


@lru_cache(maxsize=256)
def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype, device="cpu").item())


def _check_plane(op: str, name: str, plane: Tensor, numel: int) -> None:
    if plane.numel() != numel:
        raise DamagedPlanesError(
            f"{op} asked for {numel} elements in the plane {name!r}, got {plane.numel()}. "
            f"The stash was overwritten or cut short; compute the step again."
        )


def look(x: Tensor, runs: int, run: int, step: int) -> tuple[int, int]:
    """See :func:`backstash.ops.reference.look`."""
    if x.element_size() not in (2, 4, 8):
        return reference.look(x, runs, run, step)
    nonzeros, patterns = c_int64(), c_int64()
    _lib.bs_look(x.data_ptr(), x.element_size(), runs, run, step, byref(nonzeros), byref(patterns))
    return nonzeros.value, patterns.value


def bitmask_encode(x: Tensor, test: int, lo: float, hi: float) -> Tensor:
    """See :func:`backstash.ops.reference.bitmask_encode`."""
    code = _FLOATS.get(x.dtype)
    if code is None:
        return reference.bitmask_encode(x, test, lo, hi)
    n = x.numel()
    mask = _new(bytes_for(n, 1), torch.uint8)
    lo, hi = _rounded(lo, x.dtype), _rounded(hi, x.dtype)
    _lib.bs_bitmask_encode(x.data_ptr(), n, code, test, lo, hi, mask.data_ptr(), _threads(n * x.element_size()))
    return mask


def bitmask_decode(mask: Tensor, out: Tensor, if_set: float, if_clear: float) -> None:
    """See :func:`backstash.ops.reference.bitmask_decode`.

    Raises:
        DamagedPlanesError: the mask is not of the size that ``out`` needs.
    """
    width = out.element_size()
    if width not in _UNSIGNED or out.dtype.is_complex:
        return reference.bitmask_decode(mask, out, if_set, if_clear)
    n = out.numel()
    _check_plane("bitmask_decode", "mask", mask, bytes_for(n, 1))
    ones = _scalar_bits(if_set, math.copysign(1.0, if_set), out.dtype)
    zeros = _scalar_bits(if_clear, math.copysign(1.0, if_clear), out.dtype)
    _lib.bs_mask_decode(mask.data_ptr(), out.data_ptr(), n, width, ones, zeros, _threads(n * width))


def _pair_bits(pair: Tensor) -> tuple[int, int]:
    first, second = pair.view(_UNSIGNED[pair.element_size()]).tolist()
    return first, second


def binary_encode(x: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`backstash.ops.reference.binary_encode`."""
    width = x.element_size()
    if width not in (2, 4, 8) or pair.element_size() != width:
        return reference.binary_encode(x, pair)
    n = x.numel()
    mask = _new(bytes_for(n, 1), torch.uint8)
    first, second = _pair_bits(pair)
    neither = _lib.bs_binary_encode(x.data_ptr(), n, width, first, second, mask.data_ptr(), _threads(n * width))
    return mask, torch.tensor([neither], device="cpu")


def binary_decode(mask: Tensor, pair: Tensor, out: Tensor) -> None:
    """See :func:`backstash.ops.reference.binary_decode`.

    Raises:
        DamagedPlanesError: the mask is not of the size that ``out`` needs.
    """
    width = out.element_size()
    if width not in (2, 4, 8) or pair.element_size() != width:
        return reference.binary_decode(mask, pair, out)
    n = out.numel()
    _check_plane("binary_decode", "mask", mask, bytes_for(n, 1))
    zeros, ones = _pair_bits(pair)
    _lib.bs_mask_decode(mask.data_ptr(), out.data_ptr(), n, width, ones, zeros, _threads(n * width))


def zvc_encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`backstash.ops.reference.zvc_encode`."""
    width = x.element_size()
    if width not in (2, 4, 8):
        return reference.zvc_encode(x)
    n, source = x.numel(), x.data_ptr()
    threads = _threads(n * width)
    mask = _new(bytes_for(n, 1), torch.uint8)
    offsets = torch.empty(zvc_chunks(n), dtype=torch.int64, device="cpu")
    planes = mask.data_ptr(), offsets.data_ptr()
    stored = _lib.bs_zvc_mark(source, n, width, *planes, threads)
    values = _new(stored, x.dtype)
    _lib.bs_zvc_gather(source, n, width, *planes, values.data_ptr(), stored, threads)
    return mask, offsets, values


def zvc_decode(mask: Tensor, offsets: Tensor, values: Tensor, out: Tensor) -> None:
    """See :func:`backstash.ops.reference.zvc_decode`. All planes are checked before ``out`` is touched.

    Raises:
        DamagedPlanesError: a plane is not of the size that ``out`` needs, or the mask's bits, the offsets and the
            number of values do not agree.
    """
    width = out.element_size()
    if width not in (2, 4, 8) or values.element_size() != width:
        return reference.zvc_decode(mask, offsets, values, out)
    n, stored = out.numel(), values.numel()
    _check_plane("zvc_decode", "mask", mask, bytes_for(n, 1))
    _check_plane("zvc_decode", "offsets", offsets, zvc_chunks(n))
    planes = mask.data_ptr(), offsets.data_ptr(), values.data_ptr()
    if _lib.bs_zvc_decode(*planes, stored, out.data_ptr(), n, width, _threads(n * width)) != 0:
        raise DamagedPlanesError(reference.zvc_damage(stored))


def narrow_encode(x: Tensor, bits: int, base: int) -> Tensor:
    """See :func:`backstash.ops.reference.narrow_encode`."""
    code = _INTEGERS.get(x.dtype)
    if code is None or not 1 <= bits <= 32:
        return reference.narrow_encode(x, bits, base)
    n = x.numel()
    packed = _new(bytes_for(n, bits), torch.uint8)
    _lib.bs_narrow_encode(x.data_ptr(), n, code, bits, base, packed.data_ptr(), _threads(n * x.element_size()))
    return packed


def narrow_decode(packed: Tensor, bits: int, base: int, out: Tensor) -> None:
    """See :func:`backstash.ops.reference.narrow_decode`.

    Raises:
        DamagedPlanesError: the plane is not of the size that ``out`` needs.
    """
    code = _INTEGERS.get(out.dtype)
    if code is None or not 1 <= bits <= 32:
        return reference.narrow_decode(packed, bits, base, out)
    n = out.numel()
    _check_plane("narrow_decode", "packed", packed, bytes_for(n, bits))
    _lib.bs_narrow_decode(packed.data_ptr(), bits, base, out.data_ptr(), n, code, _threads(n * out.element_size()))


def _geometry(*fields: list[int] | tuple[int, ...]) -> object:
    """``native/window.cpp``'s geometry: what each field says of three dimensions, those that are missing of size 1."""
    dimensions = len(fields[0])
    neutral = (1, 1, 1, 1, 0, 1)  # input_size, output_size, kernel, stride, padding, dilation
    numbers = [n for field, one in zip(fields, neutral, strict=True) for n in (*[one] * (3 - dimensions), *field)]
    return (c_int64 * 18)(*numbers)


def window_encode(
    indices: Tensor,
    inner: int,
    input_size: list[int],
    output_size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> tuple[Tensor, Tensor]:
    """See :func:`backstash.ops.reference.window_encode`."""
    if not 1 <= len(kernel) <= 3 or indices.dtype is not torch.int64:
        return reference.window_encode(indices, inner, input_size, output_size, kernel, stride, padding, dilation)
    n, bits = indices.numel(), window_bits(kernel)
    packed = _new(bytes_for(n, bits), torch.uint8)
    geometry = _geometry(input_size, output_size, kernel, stride, padding, dilation)
    bad = _lib.bs_window_encode(indices.data_ptr(), n, inner, geometry, bits, packed.data_ptr(), _threads(n * 8))
    return packed, torch.tensor([bad], device="cpu")


def window_decode(
    packed: Tensor,
    inner: int,
    input_size: list[int],
    output_size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    out: Tensor,
) -> None:
    """See :func:`backstash.ops.reference.window_decode`.

    Raises:
        DamagedPlanesError: the plane is not of the size that ``out`` needs.
    """
    if not 1 <= len(kernel) <= 3 or out.dtype is not torch.int64:
        return reference.window_decode(packed, inner, input_size, output_size, kernel, stride, padding, dilation, out)
    n, bits = out.numel(), window_bits(kernel)
    _check_plane("window_decode", "packed", packed, bytes_for(n, bits))
    geometry = _geometry(input_size, output_size, kernel, stride, padding, dilation)
    _lib.bs_window_decode(packed.data_ptr(), inner, geometry, bits, out.data_ptr(), n, _threads(n * 8))

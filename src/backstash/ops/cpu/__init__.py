"""The kernels in C++ (``native/``), called through ctypes: the functions that ``ops/backends.py`` expects of a backend.

Every plane is byte-identical to the one of ``ops/reference``. What the C++ does not take, these functions hand to the
reference themselves, and only this:

* bitmask: tests on a dtype other than float32, float64, float16, bfloat16; decoding to elements of 16 bytes.
* binary, ZVC, CSR, RLE: elements of 1 byte or 16 bytes.
* fewbit: a dtype other than float32, float16, bfloat16; more than 4 bits.
* minifloat: a dtype other than float32, float16, bfloat16; a format of 16 bits and a dtype other than float32.
* narrow: a dtype other than int64, int32, int16, int8, uint8, bool.
* szp, blockquant, dct: a dtype other than float32, float16, bfloat16.
* sz: a dtype other than float32, float16, bfloat16.
* window: more than three spatial dimensions.

Outputs of a decoder belong to the caller: who makes a fresh one calls :func:`advise_huge` on it first.
"""

from __future__ import annotations

import math
from ctypes import byref, c_int32, c_int64, c_uint32
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from backstash.errors import DamagedPlanesError
from backstash.ops import reference
from backstash.ops.cpu import library
from backstash.ops.cpu.blockquant import blockquant_decode, blockquant_encode
from backstash.ops.cpu.dct import dct_decode, dct_encode
from backstash.ops.cpu.library import available, build_info, isa, set_isa
from backstash.ops.cpu.norm import batch_norm_channels, batch_norm_pixels
from backstash.ops.cpu.sz import sz_decode, sz_encode, sz_range, sz_survey
from backstash.ops.cpu.szp import szp_decode, szp_encode, szp_range
from backstash.ops.formats import FORMATS, SCALED, Format, groups
from backstash.ops.schema import bytes_for, csr_rows, window_bits, zvc_chunks

__all__ = [
    "advise_huge",
    "affine",
    "available",
    "batch_norm_channels",
    "batch_norm_pixels",
    "binary_decode",
    "binary_encode",
    "bitmask_decode",
    "bitmask_encode",
    "blockquant_decode",
    "blockquant_encode",
    "build_info",
    "csr_decode",
    "csr_encode",
    "dct_decode",
    "dct_encode",
    "fewbit_decode",
    "fewbit_encode",
    "images",
    "isa",
    "look",
    "mask_select",
    "minifloat_decode",
    "minifloat_encode",
    "minifloat_scaled_decode",
    "minifloat_scaled_encode",
    "narrow_decode",
    "narrow_encode",
    "rle_decode",
    "rle_encode",
    "scale_by_codes",
    "set_isa",
    "sz_decode",
    "sz_encode",
    "sz_range",
    "sz_survey",
    "szp_decode",
    "szp_encode",
    "szp_range",
    "window_decode",
    "window_encode",
    "window_scatter",
    "zvc_decode",
    "zvc_encode",
    "zvc_minifloat_decode",
    "zvc_minifloat_encode",
]

# The codes of native/elements.h.
_FLOATS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
_INTEGERS = {torch.int64: 0, torch.int32: 1, torch.int16: 2, torch.int8: 3, torch.uint8: 4, torch.bool: 5}
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_SIGNED = {2: torch.int16, 4: torch.int32}
_INFINITY = {torch.float32: 0x7F800000, torch.float16: 0x7C00, torch.bfloat16: 0x7F80}

_SERIAL_BELOW = 256 << 10
"""Bytes of the larger side below which waking a second thread costs more than it saves."""

_HUGE_FROM = 4 << 20
"""Bytes from which huge pages are asked for: below, the memory comes from a heap that has been touched already."""

_SCRATCH = 31 << 20
"""Most bytes of codes that zvc_minifloat_encode puts aside until it knows how many there are; others it makes twice.

From 32 MiB on, glibc takes memory from the system afresh each time, which costs more than it saves."""

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


def images(x: Tensor) -> tuple[int, int] | None:
    """How [N, C, ...] lies in memory: (outer, inner) of [outer, C, inner], inner is 1 in channels last; else None."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if x.is_contiguous():
        return x.shape[0], math.prod(x.shape[2:])
    if channels_last is not None and x.is_contiguous(memory_format=channels_last):
        return x.numel() // x.shape[1], 1
    return None


def affine(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    relu: bool,
    out: Tensor,
) -> bool:
    """``[relu](batch_norm(x) [+ residual])`` from the statistics that batch norm saved, in one pass.

    Rounded as ATen's kernel is on a CPU with fused multiply-add; who uses it proves the bits.

    Args:
        x: float32 [N, C, ...], contiguous or channels last; ``residual`` and ``out`` are laid out like it.
        mean, invstd, weight, bias: float32 [C].

    Returns:
        False, with ``out`` untouched, where a layout or a dtype is another one.
    """
    channels = x.shape[1] if x.dim() > 1 else 0
    vectors = [one for one in (mean, invstd, weight, bias) if one is not None]
    if not channels or any(
        v.dtype is not torch.float32 or v.shape != (channels,) or not v.is_contiguous() for v in vectors
    ):
        return False
    layout = images(x)
    if layout is None:
        return False
    outer, inner = layout
    scratch = torch.empty(2 * channels, dtype=torch.float32, device="cpu")
    pointers = [None if one is None else one.data_ptr() for one in (x, residual, mean, invstd, weight, bias, scratch)]
    _lib.bs_affine(*pointers, outer, channels, inner, relu, out.data_ptr(), _threads(x.numel() * 4))
    return True


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


def mask_select(x: Tensor, mask: Tensor, out: Tensor) -> bool:
    """``out[i] = x[i] if bit i of mask else 0``, flat, elements of 2, 4 or 8 bytes; ``out`` may be ``x``.

    Returns:
        Whether it could: there is a native library, and the elements are of such a width.

    Raises:
        DamagedPlanesError: the mask is not of the size that ``x`` needs.
    """
    n, width = x.numel(), x.element_size()
    if _lib is None or width not in (2, 4, 8):
        return False
    _check_plane("mask_select", "mask", mask, bytes_for(n, 1))
    _lib.bs_mask_select(x.data_ptr(), mask.data_ptr(), n, width, out.data_ptr(), _threads(n * width))
    return True


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


def csr_encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`backstash.ops.reference.csr_encode`."""
    width = x.element_size()
    if width not in (2, 4, 8):
        return reference.csr_encode(x)
    n, source = x.numel(), x.data_ptr()
    threads = _threads(n * width)
    rows = torch.empty(csr_rows(n) + 1, dtype=torch.int32, device="cpu")
    stored = _lib.bs_csr_count(source, n, width, rows.data_ptr(), threads)
    columns, values = _new(stored, torch.uint8), _new(stored, x.dtype)
    planes = rows.data_ptr(), columns.data_ptr(), values.data_ptr()
    _lib.bs_csr_gather(source, n, width, *planes, stored, threads)
    return columns, rows, values


def csr_decode(columns: Tensor, rows: Tensor, values: Tensor, out: Tensor) -> None:
    """See :func:`backstash.ops.reference.csr_decode`. All planes are checked before ``out`` is touched.

    Raises:
        DamagedPlanesError: a plane is not of the size that ``out`` or another plane needs, or the rows, the columns and
            the number of values do not agree.
    """
    width = out.element_size()
    if width not in (2, 4, 8) or values.element_size() != width or rows.dtype is not torch.int32:
        return reference.csr_decode(columns, rows, values, out)
    n, stored = out.numel(), values.numel()
    _check_plane("csr_decode", "rows", rows, csr_rows(n) + 1)
    _check_plane("csr_decode", "columns", columns, stored)
    planes = columns.data_ptr(), rows.data_ptr(), values.data_ptr()
    if _lib.bs_csr_decode(*planes, stored, out.data_ptr(), n, width, _threads(n * width)) != 0:
        raise DamagedPlanesError(reference.csr_damage(stored))


@lru_cache(maxsize=256)
def _keys(thresholds: tuple[float, ...], bits: int, dtype: torch.dtype) -> Any:
    """Thresholds of float32 as integers that numbers of ``dtype``, taken as such, exceed where these exceed those.

    A number of ``dtype`` exceeds a threshold just where it exceeds the largest one of ``dtype`` that is not above it.
    """
    edges = torch.tensor(thresholds, dtype=torch.float32, device="cpu")
    near = edges.to(dtype) + 0.0  # -0.0 becomes 0.0
    keys = []
    for word, above in zip(near.view(_SIGNED[dtype.itemsize]).tolist(), (near.float() > edges).tolist(), strict=True):
        key = word if word >= 0 else word ^ (2 ** (8 * dtype.itemsize - 1) - 1)
        key -= above
        keys.append(key - (key == -1))  # that is -0.0, which is no number below 0.0
    padding = [2 ** (8 * dtype.itemsize - 1) - 1] * (2**bits - 1 - len(keys))
    return (c_int32 * (2**bits - 1))(*keys, *padding)


@lru_cache(maxsize=256)
def _table(values: tuple[float, ...], dtype: torch.dtype) -> Any:
    """The bits of ``values`` rounded to ``dtype``."""
    rounded = torch.tensor(values, dtype=dtype, device="cpu").view(_UNSIGNED[dtype.itemsize])
    return (c_uint32 * len(values))(*rounded.tolist())


def fewbit_encode(x: Tensor, thresholds: list[float], bits: int) -> tuple[Tensor, Tensor]:
    """See :func:`backstash.ops.reference.fewbit_encode`."""
    infinity = _INFINITY.get(x.dtype)
    if infinity is None or not 1 <= bits <= 4:
        return reference.fewbit_encode(x, thresholds, bits)
    n, width = x.numel(), x.element_size()
    packed = _new(bytes_for(n, bits), torch.uint8)
    keys = _keys(tuple(thresholds), bits, x.dtype)
    threads = _threads(n * width)
    nonfinite = _lib.bs_fewbit_encode(x.data_ptr(), n, width, infinity, bits, keys, packed.data_ptr(), threads)
    return packed, torch.tensor([nonfinite], device="cpu")


def fewbit_decode(packed: Tensor, values: list[float], bits: int, out: Tensor) -> None:
    """See :func:`backstash.ops.reference.fewbit_decode`.

    Raises:
        DamagedPlanesError: the plane is not of the size that ``out`` needs.
    """
    if out.dtype not in _INFINITY or not 1 <= bits <= 4 or len(values) != 2**bits:
        return reference.fewbit_decode(packed, values, bits, out)
    n, width = out.numel(), out.element_size()
    _check_plane("fewbit_decode", "packed", packed, bytes_for(n, bits))
    table = _table(tuple(values), out.dtype)
    _lib.bs_fewbit_decode(packed.data_ptr(), bits, table, out.data_ptr(), n, width, _threads(n * width))


def scale_by_codes(x: Tensor, packed: Tensor, table: Tensor, out: Tensor) -> bool:
    """See :func:`backstash.ops.reference.scale_by_codes`; flat, ``out`` may be ``x``.

    Returns:
        Whether it could: there is a native library, and ``x`` and the table are both float32 or both float64.

    Raises:
        DamagedPlanesError: the plane is not of the size that ``x`` needs, or the table has not 2, 4, 8 or 16 values.
    """
    n, width, bits = x.numel(), x.element_size(), table.numel().bit_length() - 1
    if _lib is None or x.dtype not in (torch.float32, torch.float64) or table.dtype is not x.dtype:
        return False
    _check_plane("scale_by_codes", "table", table, 2 ** min(max(bits, 1), 4))
    _check_plane("scale_by_codes", "packed", packed, bytes_for(n, bits))
    pointers = packed.data_ptr(), bits, table.data_ptr(), out.data_ptr()
    _lib.bs_scale_by_codes(x.data_ptr(), *pointers, n, width, _threads(n * width))
    return True


def _takes(form: Format, dtype: torch.dtype) -> bool:
    return dtype is torch.float32 or (dtype in (torch.float16, torch.bfloat16) and form.bits < 16)


def minifloat_encode(x: Tensor, format: str, nonzero: bool) -> Tensor:
    """See :func:`backstash.ops.reference.minifloat_encode`."""
    form, n = FORMATS[format], x.numel()
    if not _takes(form, x.dtype):
        return reference.minifloat_encode(x, format, nonzero)
    codes = _new(form.words(n), form.dtype)
    arguments = x.data_ptr(), n, _FLOATS[x.dtype], form.code, nonzero
    _lib.bs_minifloat_encode(*arguments, codes.data_ptr(), _threads(x.nbytes))
    return codes


def minifloat_decode(codes: Tensor, format: str, out: Tensor) -> None:
    """See :func:`backstash.ops.reference.minifloat_decode`.

    Raises:
        DamagedPlanesError: the plane is not of the size that ``out`` needs.
    """
    form, n = FORMATS[format], out.numel()
    if not _takes(form, out.dtype) or codes.dtype is not form.dtype:
        return reference.minifloat_decode(codes, format, out)
    _check_plane("minifloat_decode", "codes", codes, form.words(n))
    arguments = codes.data_ptr(), form.code, out.data_ptr(), n, _FLOATS[out.dtype]
    _lib.bs_minifloat_decode(*arguments, _threads(out.nbytes))


def minifloat_scaled_encode(x: Tensor, format: str, group_size: int) -> tuple[Tensor, Tensor]:
    """See :func:`backstash.ops.reference.minifloat_scaled_encode`."""
    form, n = FORMATS[format], x.numel()
    if not _takes(form, x.dtype) or format not in SCALED:
        return reference.minifloat_scaled_encode(x, format, group_size)
    codes, scales = _new(n, form.dtype), _new(groups(n, group_size), torch.float32)
    arguments = x.data_ptr(), n, _FLOATS[x.dtype], form.code, group_size
    _lib.bs_minifloat_scaled_encode(*arguments, codes.data_ptr(), scales.data_ptr(), _threads(x.nbytes))
    return codes, scales


def minifloat_scaled_decode(codes: Tensor, scales: Tensor, format: str, group_size: int, out: Tensor) -> None:
    """See :func:`backstash.ops.reference.minifloat_scaled_decode`.

    Raises:
        DamagedPlanesError: a plane is not of the size that ``out`` needs.
    """
    form, n = FORMATS[format], out.numel()
    if not _takes(form, out.dtype) or format not in SCALED or scales.dtype is not torch.float32:
        return reference.minifloat_scaled_decode(codes, scales, format, group_size, out)
    _check_plane("minifloat_scaled_decode", "codes", codes, n)
    _check_plane("minifloat_scaled_decode", "scales", scales, groups(n, group_size))
    arguments = codes.data_ptr(), scales.data_ptr(), form.code, group_size, out.data_ptr(), n, _FLOATS[out.dtype]
    _lib.bs_minifloat_scaled_decode(*arguments, _threads(out.nbytes))


def zvc_minifloat_encode(x: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`backstash.ops.reference.zvc_minifloat_encode`."""
    form, n = FORMATS[format], x.numel()
    if not _takes(form, x.dtype):
        return reference.zvc_minifloat_encode(x, format)
    source = x.data_ptr(), n, _FLOATS[x.dtype], form.code
    threads = _threads(x.nbytes)
    mask = _new(bytes_for(n, 1), torch.uint8)
    offsets = torch.empty(zvc_chunks(n), dtype=torch.int64, device="cpu")
    places = torch.empty_like(offsets)
    room = min(form.words(n) * form.dtype.itemsize + 4 * places.numel(), _SCRATCH)
    scratch = _new(room + 8, torch.uint8)  # the kernel may read what lies behind the last code
    kept = scratch.data_ptr(), places.data_ptr()
    stored = _lib.bs_zvc_minifloat_encode(*source, mask.data_ptr(), offsets.data_ptr(), kept[0], room, kept[1], threads)
    values = _new(form.words(stored), form.dtype)
    planes = mask.data_ptr(), offsets.data_ptr(), *kept, values.data_ptr()
    _lib.bs_zvc_minifloat_place(*source, *planes, stored, threads)
    return mask, offsets, values


def zvc_minifloat_decode(mask: Tensor, offsets: Tensor, values: Tensor, format: str, out: Tensor) -> None:
    """See :func:`backstash.ops.reference.zvc_minifloat_decode`. All planes are checked before ``out`` is touched.

    Raises:
        DamagedPlanesError: a plane is not of the size that ``out`` needs, or the mask's bits, the offsets and the
            number of values do not agree.
    """
    form, n = FORMATS[format], out.numel()
    if not _takes(form, out.dtype) or values.dtype is not form.dtype:
        return reference.zvc_minifloat_decode(mask, offsets, values, format, out)
    _check_plane("zvc_minifloat_decode", "mask", mask, bytes_for(n, 1))
    _check_plane("zvc_minifloat_decode", "offsets", offsets, zvc_chunks(n))
    planes = mask.data_ptr(), offsets.data_ptr(), values.data_ptr()
    target = out.data_ptr(), n, _FLOATS[out.dtype]
    if _lib.bs_zvc_minifloat_decode(*planes, values.numel(), form.code, *target, _threads(out.nbytes)) != 0:
        raise DamagedPlanesError(reference.zvc_damage(values.numel()))


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


def window_scatter(packed: Tensor, geometry: tuple[Any, ...], grad: Tensor, out: Tensor) -> bool:
    """The gradient of a max pooling's input, flat, from its output's and the codes of ``window_encode``.

    Added up as ATen's kernels do, window after window in memory order.

    Args:
        packed, geometry: what ``window_encode`` returned, and its arguments from ``inner`` on.
        grad: of the output.
        out: filled with the gradient.

    Returns:
        Whether it could: there is a native library, and ``grad`` is of float32 or float64.

    Raises:
        DamagedPlanesError: the plane is not of the size that ``grad`` needs.
    """
    inner, *sizes = geometry
    kernel = sizes[2]
    if _lib is None or not 1 <= len(kernel) <= 3 or grad.dtype not in (torch.float32, torch.float64):
        return False
    n, bits = grad.numel(), window_bits(kernel)
    _check_plane("window_scatter", "packed", packed, bytes_for(n, bits))
    wide = grad.dtype is torch.float64
    threads = _threads(out.numel() * out.element_size())
    _lib.bs_window_scatter(
        packed.data_ptr(), inner, _geometry(*sizes), bits, grad.data_ptr(), n, wide, out.data_ptr(), threads
    )
    return True


from backstash.ops.cpu.rle import rle_decode, rle_encode  # noqa: E402

"""Few-bit codes in C++.

Other dtypes than float32, float16 and bfloat16 go to the reference; products of others than float32 and float64, too.
"""

from __future__ import annotations

from ctypes import c_int32, c_uint32
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from backstash.codecs.fewbit import reference as reference
from backstash.ops import bytes_for
from backstash.ops.cpu import library
from backstash.ops.cpu.planes import UNSIGNED, check_plane, new_plane, threads_for

_lib: Any = library.functions(
    bs_fewbit_encode="l(pliiippi)",
    bs_fewbit_decode="(pipplii)",
    bs_scale_by_codes="(ppipplii)",
)

_INFINITY = {torch.float32: 0x7F800000, torch.float16: 0x7C00, torch.bfloat16: 0x7F80}

_SIGNED = {2: torch.int16, 4: torch.int32}


@lru_cache(maxsize=256)
def _keys(thresholds: tuple[float, ...], bits: int, dtype: torch.dtype) -> Any:
    """Returns integers to compare elements with: an element's bits exceed a key if its value exceeds the threshold.

    A number of ``dtype`` exceeds a threshold, float32, exactly where it exceeds the largest number of ``dtype`` that is
    not above the threshold.
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
    rounded = torch.tensor(values, dtype=dtype, device="cpu").view(UNSIGNED[dtype.itemsize])
    return (c_uint32 * len(values))(*rounded.tolist())


def fewbit_encode(x: Tensor, thresholds: list[float], bits: int) -> tuple[Tensor, Tensor]:
    """See :func:`backstash.codecs.fewbit.reference.fewbit_encode`."""
    infinity = _INFINITY.get(x.dtype)
    if infinity is None or not 1 <= bits <= 4:
        return reference.fewbit_encode(x, thresholds, bits)
    n, width = x.numel(), x.element_size()
    packed = new_plane(bytes_for(n, bits), torch.uint8)
    keys = _keys(tuple(thresholds), bits, x.dtype)
    threads = threads_for(n * width)
    nonfinite = _lib.bs_fewbit_encode(x.data_ptr(), n, width, infinity, bits, keys, packed.data_ptr(), threads)
    return packed, torch.tensor([nonfinite], device="cpu")


def fewbit_decode(packed: Tensor, values: list[float], bits: int, out: Tensor) -> None:
    """See :func:`backstash.codecs.fewbit.reference.fewbit_decode`."""
    if out.dtype not in _INFINITY or not 1 <= bits <= 4 or len(values) != 2**bits:
        return reference.fewbit_decode(packed, values, bits, out)
    n, width = out.numel(), out.element_size()
    check_plane("fewbit_decode", "packed", packed, bytes_for(n, bits))
    table = _table(tuple(values), out.dtype)
    _lib.bs_fewbit_decode(packed.data_ptr(), bits, table, out.data_ptr(), n, width, threads_for(n * width))


def scale_by_codes(x: Tensor, packed: Tensor, table: Tensor, out: Tensor) -> None:
    """See :func:`backstash.codecs.fewbit.reference.scale_by_codes`."""
    n, width, bits = x.numel(), x.element_size(), table.numel().bit_length() - 1
    if x.dtype not in (torch.float32, torch.float64) or table.dtype is not x.dtype:
        return reference.scale_by_codes(x, packed, table, out)
    check_plane("scale_by_codes", "table", table, 2 ** min(max(bits, 1), 4))
    check_plane("scale_by_codes", "packed", packed, bytes_for(n, bits))
    pointers = packed.data_ptr(), bits, table.data_ptr(), out.data_ptr()
    _lib.bs_scale_by_codes(x.data_ptr(), *pointers, n, width, threads_for(n * width))

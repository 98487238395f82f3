"""Positions in pooling windows in C++.

More than three spatial dimensions go to the reference; so do gradients in other dtypes than float32 and float64.
"""

from __future__ import annotations

from ctypes import c_int64
from typing import Any

import torch
from torch import Tensor

from backstash.codecs.narrow.windows import reference as reference
from backstash.codecs.narrow.windows.reference import in_three_dimensions, window_bits
from backstash.ops import bytes_for
from backstash.ops.cpu import library
from backstash.ops.cpu.planes import check_plane, new_plane, threads_for

_lib: Any = library.functions(
    bs_window_encode="l(pllpipi)",
    bs_window_decode="(plpipli)",
    bs_window_scatter="(plpiplipi)",
)


def _geometry(*fields: list[int]) -> object:
    return (c_int64 * 18)(*in_three_dimensions(*fields))


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
    """See :func:`backstash.codecs.narrow.windows.reference.window_encode`."""
    if not 1 <= len(kernel) <= 3 or indices.dtype is not torch.int64:
        return reference.window_encode(indices, inner, input_size, output_size, kernel, stride, padding, dilation)
    n, bits = indices.numel(), window_bits(kernel)
    packed = new_plane(bytes_for(n, bits), torch.uint8)
    geometry = _geometry(input_size, output_size, kernel, stride, padding, dilation)
    bad = _lib.bs_window_encode(indices.data_ptr(), n, inner, geometry, bits, packed.data_ptr(), threads_for(n * 8))
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
    """See :func:`backstash.codecs.narrow.windows.reference.window_decode`."""
    if not 1 <= len(kernel) <= 3 or out.dtype is not torch.int64:
        return reference.window_decode(packed, inner, input_size, output_size, kernel, stride, padding, dilation, out)
    n, bits = out.numel(), window_bits(kernel)
    check_plane("window_decode", "packed", packed, bytes_for(n, bits))
    geometry = _geometry(input_size, output_size, kernel, stride, padding, dilation)
    _lib.bs_window_decode(packed.data_ptr(), inner, geometry, bits, out.data_ptr(), n, threads_for(n * 8))


def window_scatter(
    packed: Tensor,
    inner: int,
    input_size: list[int],
    output_size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    grad: Tensor,
    out: Tensor,
) -> None:
    """See :func:`backstash.codecs.narrow.windows.reference.window_scatter`."""
    sizes = input_size, output_size, kernel, stride, padding, dilation
    if not 1 <= len(kernel) <= 3 or grad.dtype not in (torch.float32, torch.float64):
        return reference.window_scatter(packed, inner, *sizes, grad, out)
    n, bits = grad.numel(), window_bits(kernel)
    check_plane("window_scatter", "packed", packed, bytes_for(n, bits))
    wide = grad.dtype is torch.float64
    threads = threads_for(out.numel() * out.element_size())
    _lib.bs_window_scatter(
        packed.data_ptr(), inner, _geometry(*sizes), bits, grad.data_ptr(), n, wide, out.data_ptr(), threads
    )

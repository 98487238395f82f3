"""Norms, curves and dropout in one pass, in C++ (``native/onepass.cpp``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backstash.ops.cpu import library
from backstash.ops.cpu.planes import SMALL_FLOATS, check_plane, pointers, threads_for
from backstash.ops.layout import Rounding, bytes_for, images
from backstash.ops.onepass import reference as reference

_lib: Any = library.functions(
    bs_norm_rows="(ppippppilliipii)",
    bs_group_norm="(pippppilllllippllipppi)",
    bs_channel_norm="(ppippppllliddippi)",
    bs_gated="(ppilpplliippi)",
    bs_curve="(pilippllipi)",
    bs_dropout="(pilpdipi)",
)


def _code(x: Tensor | None) -> int:
    return 0 if x is None else SMALL_FLOATS[x.dtype]


def row_norm(
    x: Tensor,
    residual: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    order: int,
    nan: int,
    out: Tensor,
) -> None:
    """See :func:`backstash.ops.onepass.reference.row_norm`."""
    rows, of_vectors = rstd.numel(), _code(bias if weight is None else weight)
    sizes = rows, x.numel() // max(1, rows)
    inputs = *pointers(x, residual), _code(x), *pointers(mean, rstd, weight, bias), of_vectors
    _lib.bs_norm_rows(*inputs, *sizes, int(order), nan, out.data_ptr(), _code(out), threads_for(x.nbytes))


def grouped_norm(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    curve: int,
    whole: Tensor | None,
    tail: Tensor | None,
    chunk: int,
    step: int,
    nan: int,
    out: Tensor,
    normed: Tensor | None,
) -> None:
    """See :func:`backstash.ops.onepass.reference.grouped_norm`."""
    sizes = images(x)
    if sizes is None or not x.numel():
        return reference.grouped_norm(
            x, mean, rstd, weight, bias, groups, curve, whole, tail, chunk, step, nan, out, normed
        )
    lines = torch.empty(2 * x.shape[0] * x.shape[1], dtype=torch.float32, device="cpu")
    pixels = x.numel() // (x.shape[0] * x.shape[1])
    of_vectors = _code(bias if weight is None else weight)
    inputs = x.data_ptr(), _code(x), *pointers(mean, rstd, weight, bias), of_vectors
    shape = x.shape[0], x.shape[1], pixels, sizes[1], groups
    table = int(curve), *pointers(whole, tail), chunk, step, nan
    _lib.bs_group_norm(*inputs, *shape, *table, *pointers(lines, out, normed), threads_for(x.nbytes))


def channel_norm(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: int,
    lo: float,
    hi: float,
    outer: int,
    inner: int,
    nan: int,
    out: Tensor,
    rounding: int = Rounding.SCALED,
) -> None:
    """See :func:`backstash.ops.onepass.reference.channel_norm`, to which other roundings are left."""
    if rounding != Rounding.SCALED:
        given = x, mean, invstd, weight, bias, residual, activation, lo, hi, outer, inner, nan, out, rounding
        return reference.channel_norm(*given)
    lines = torch.empty(2 * x.shape[1], dtype=torch.float32, device="cpu")
    inputs = *pointers(x, residual), _code(x), *pointers(mean, invstd, weight, bias)
    numbers = outer, x.shape[1], inner, int(activation), lo, hi, nan
    _lib.bs_channel_norm(*inputs, *numbers, *pointers(lines, out), threads_for(x.nbytes))


def gated(
    gate: Tensor,
    up: Tensor,
    whole: Tensor | None,
    tail: Tensor | None,
    chunk: int,
    step: int,
    nan: int,
    tail_nan: int,
    out: Tensor,
    inner: Tensor | None,
) -> None:
    """See :func:`backstash.ops.onepass.reference.gated`."""
    inputs = *pointers(gate, up), _code(gate), gate.numel()
    table = *pointers(whole, tail), chunk, step, nan, tail_nan
    _lib.bs_gated(*inputs, *table, *pointers(out, inner), threads_for(gate.nbytes))


def curve(
    x: Tensor, curve: int, whole: Tensor | None, tail: Tensor | None, chunk: int, step: int, nan: int, out: Tensor
) -> None:
    """See :func:`backstash.ops.onepass.reference.curve`."""
    table = int(curve), *pointers(whole, tail), chunk, step, nan
    _lib.bs_curve(x.data_ptr(), _code(x), x.numel(), *table, out.data_ptr(), threads_for(x.nbytes))


def dropout_bits(x: Tensor, mask: Tensor, scale: float, nan: int, out: Tensor) -> None:
    """See :func:`backstash.ops.onepass.reference.dropout_bits`."""
    check_plane("dropout_bits", "mask", mask, bytes_for(x.numel(), 1))
    _lib.bs_dropout(
        x.data_ptr(), _code(x), x.numel(), mask.data_ptr(), scale, nan, out.data_ptr(), threads_for(x.nbytes)
    )

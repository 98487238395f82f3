"""Norms, curves and dropout in one pass, in C++ (``native/onepass.cpp``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backstash.ops.cpu import library
from backstash.ops.cpu.planes import SMALL_FLOATS, check_plane, threads_for
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


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


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
    _lib.bs_norm_rows(
        x.data_ptr(),
        _pointer(residual),
        _code(x),
        _pointer(mean),
        rstd.data_ptr(),
        _pointer(weight),
        _pointer(bias),
        _code(bias if weight is None else weight),
        rstd.numel(),
        x.numel() // max(1, rstd.numel()),
        int(order),
        nan,
        out.data_ptr(),
        _code(out),
        threads_for(x.nbytes),
    )


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
    sizes = images(x)
    if sizes is None or not x.numel():
        return reference.grouped_norm(
            x, mean, rstd, weight, bias, groups, curve, whole, tail, chunk, step, nan, out, normed
        )
    lines = torch.empty(2 * x.shape[0] * x.shape[1], dtype=torch.float32, device="cpu")
    pixels = x.numel() // (x.shape[0] * x.shape[1])
    _lib.bs_group_norm(
        x.data_ptr(),
        _code(x),
        mean.data_ptr(),
        rstd.data_ptr(),
        _pointer(weight),
        _pointer(bias),
        _code(bias if weight is None else weight),
        x.shape[0],
        x.shape[1],
        pixels,
        sizes[1],
        groups,
        int(curve),
        _pointer(whole),
        _pointer(tail),
        chunk,
        step,
        nan,
        lines.data_ptr(),
        out.data_ptr(),
        _pointer(normed),
        threads_for(x.nbytes),
    )


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
    _lib.bs_channel_norm(
        x.data_ptr(),
        _pointer(residual),
        _code(x),
        mean.data_ptr(),
        invstd.data_ptr(),
        _pointer(weight),
        _pointer(bias),
        outer,
        x.shape[1],
        inner,
        int(activation),
        lo,
        hi,
        nan,
        lines.data_ptr(),
        out.data_ptr(),
        threads_for(x.nbytes),
    )


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
    _lib.bs_gated(
        gate.data_ptr(),
        up.data_ptr(),
        _code(gate),
        gate.numel(),
        _pointer(whole),
        _pointer(tail),
        chunk,
        step,
        nan,
        tail_nan,
        out.data_ptr(),
        _pointer(inner),
        threads_for(gate.nbytes),
    )


def curve(
    x: Tensor, curve: int, whole: Tensor | None, tail: Tensor | None, chunk: int, step: int, nan: int, out: Tensor
) -> None:
    _lib.bs_curve(
        x.data_ptr(),
        _code(x),
        x.numel(),
        int(curve),
        _pointer(whole),
        _pointer(tail),
        chunk,
        step,
        nan,
        out.data_ptr(),
        threads_for(x.nbytes),
    )


def dropout_bits(x: Tensor, mask: Tensor, scale: float, nan: int, out: Tensor) -> None:
    check_plane("dropout_bits", "mask", mask, bytes_for(x.numel(), 1))
    _lib.bs_dropout(
        x.data_ptr(), _code(x), x.numel(), mask.data_ptr(), scale, nan, out.data_ptr(), threads_for(x.nbytes)
    )

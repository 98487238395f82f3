"""Norms from saved statistics, curves, gates and dropout, in one pass over memory.

A value that is made again has to get the bits that it had. So a norm's order of arithmetic is an argument
(:class:`backstash.ops.layout.NormOrder`), and a curve may be given as a table: a function of 16-bit numbers has 65,536
values, which torch's own kernels make once, and then nobody has to know how they round. What is computed here instead,
an exponential or an error function, has the same bits on every device, and on x86 those of ATen's vectors.

Note: [tails of curves]
    ATen cuts a tensor into a chunk for each thread, runs vectors for whole steps of a chunk, and calls the C library
    for what is left of it. The two may round differently. So there is a table for each, and the kernels are told the
    chunk and the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from backstash.errors import DamagedPlanesError
from backstash.ops.layout import Activation, ComputedCurve, NormOrder, Rounding, bytes_for, images
from backstash.ops.norms.reference import fused, normalized
from backstash.ops.registration import kernel
from backstash.ops.table import IN_CUDA

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CODES = 1 << 16
"""The values of a function of 16-bit numbers."""

_FALLBACK = "repeats torch's calls one by one: the same bits in more passes"


def _check(name: str, arguments: Sequence[Any]) -> None:
    """Checks dtypes, and that every tensor fills its memory without gaps.

    Raises:
        ValueError: one has another dtype, or has gaps.
    """
    for x in arguments:
        if not isinstance(x, Tensor):
            continue
        is_dense = x.is_contiguous() or (x.dim() > 1 and images(x) is not None)
        if not is_dense or x.dtype not in (*FLOATS, torch.int16, torch.uint8):
            raise ValueError(
                f"backstash::{name} asked for float32, bfloat16 or float16 in dense memory, got {x.dtype} "
                f"{list(x.shape)} with strides {list(x.stride())}. Call torch's own function instead."
            )


def rounded(y: Tensor, dtype: torch.dtype, nan: int) -> Tensor:
    """Returns float32 ``y`` as ``dtype``, to the nearest number.

    Args:
        y: float32.
        dtype: float32, bfloat16 or float16.
        nan: the bits of every NaN where ``dtype`` has 16; 0 for a quiet NaN of the same sign and upper payload.
    """
    if dtype is torch.float32:
        return y
    bits = y.view(torch.int32)
    kept = bits >> 16 | 0x40 if dtype is torch.bfloat16 else (bits >> 16 & 0x8000) | 0x7E00 | (bits >> 13 & 0x3FF)
    odd = torch.full_like(bits, nan) if nan else kept
    return torch.where(y.isnan(), odd.to(torch.int16), y.to(dtype).view(torch.int16)).view(dtype)


def exponential(x: Tensor) -> Tensor:
    """Returns exp(x) of float32 within one unit in the last place: the steps of SLEEF's ``expf_u10``."""
    whole = (x * 1.4426950408889634).clamp(-1000, 1000).nan_to_num(1000).round()
    power = whole.int()

    def step(total: Tensor | float, factor: Tensor | float, addend: Tensor | float) -> Tensor:
        return fused(*torch.broadcast_tensors(*(torch.as_tensor(each, dtype=x.dtype, device=x.device)
                                                for each in (total, factor, addend))))  # fmt: skip

    rest = step(whole, -0.693145751953125, x)
    rest = step(whole, -1.428606765330187045e-06, rest)
    total: Tensor | float = 0.000198527617612853646278381
    for term in (0.00139304355252534151077271, 0.00833336077630519866943359, 0.0416664853692054748535156,
                 0.166666671633720397949219, 0.5):  # fmt: skip
        total = step(total, rest, term)
    near_one = step(rest * rest, total, rest) + 1
    half = power >> 1
    found = near_one * ((half + 127) << 23).view(torch.float32) * ((power - half + 127) << 23).view(torch.float32)
    return found.where(~(x < -104), 0.0).where(~(x > 100), torch.inf)


def error_function(x: Tensor) -> Tensor:
    """Returns erf(x) of float32 by Abramowitz and Stegun's 7.1.26, in the steps of ATen's vectors on x86."""

    def step(total: Tensor, factor: Tensor, addend: float) -> Tensor:
        return fused(total, factor, torch.full_like(total, addend))

    one, sign = torch.ones_like(x), x.view(torch.int32) & -0x80000000
    t = 1 / step(torch.full_like(x, 0.3275911), x.abs(), 1.0)
    total = torch.full_like(x, 1.061405429)
    for term in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        total = step(total, t, term)
    found = fused(-exponential(-(x * x)) * t, total, one)
    return (found.view(torch.int32) ^ sign).view(torch.float32)


def curved(x: Tensor, curve: int) -> Tensor:
    """Returns a :class:`backstash.ops.layout.ComputedCurve` of float32 numbers."""
    if curve == ComputedCurve.SILU:
        return x / (1 + exponential(-x))
    if curve == ComputedCurve.GELU:
        return x * 0.5 * (1 + error_function(x * torch.tensor(0.5**0.5, dtype=torch.float32)))
    return x


def _looked_up(x: Tensor, whole: Tensor, tail: Tensor | None, chunk: int, step: int) -> Tensor:
    """Returns the values of a table at 16-bit numbers [n] in memory order (Note: [tails of curves])."""
    codes = x.view(torch.int16).int() & (CODES - 1)
    found = whole[codes]
    if tail is not None and step:
        place = torch.arange(x.numel(), device=x.device)
        length = (x.numel() - place // chunk * chunk).clamp(max=chunk)
        found = torch.where(place % chunk >= length // step * step, tail[codes], found)
    return found.view(x.dtype)


def _flat(x: Tensor) -> Tensor:
    return x.as_strided((x.numel(),), (1,))


def _wide(x: Tensor) -> Tensor:
    return x.float()


@kernel(
    "(Tensor x, Tensor? residual, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? bias, int order, int nan, "
    "Tensor(a!) out) -> ()",
    check=_check,
    without=IN_CUDA,
    fallback=_FALLBACK,
)
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
    """Fills ``out`` with the layer norm of ``x [+ residual]``, or without ``mean`` its RMS norm.

    Bytes: those of x, residual and out, 4 for each row's statistic, and weight and bias from a cache.

    Args:
        x, residual: [rows, width], of one dtype; their sum is rounded to it.
        mean, rstd: float32 [rows]: the mean, and one over the root of the variance or of the mean square.
        weight, bias: [width], float32 or of x's dtype; without them 1 and 0.
        order: code of a :class:`backstash.ops.layout.NormOrder`.
        nan: bits of a NaN where it is rounded to 16 bits; see :func:`rounded`.
        out: [rows, width], of x's dtype or any smaller one.
    """
    y, r = _wide(x), rstd.view(-1, 1)
    if residual is not None:
        y = _wide(rounded(y + _wide(residual), x.dtype, nan))
    w = None if weight is None else _wide(weight)
    b = None if bias is None else _wide(bias)
    ones, zeros = torch.ones_like(y), torch.zeros_like(y)
    if order == NormOrder.SCALED:
        m = torch.zeros_like(r) if mean is None else mean.view(-1, 1)
        scale = (r * (1 if w is None else w)).expand_as(y)
        y = fused(y, scale, fused((-m).expand_as(y), scale, (zeros if b is None else b.expand_as(y))))
    else:
        if mean is None:
            y = y * r
        elif order == NormOrder.SHIFTED:
            y = fused(y, r.expand_as(y), (-(r * mean.view(-1, 1))).expand_as(y))
        else:
            y = (y - mean.view(-1, 1)) * r
        if order == NormOrder.ROUNDED:
            y = _wide(rounded(y, out.dtype, nan))
        if order in (NormOrder.NORMALIZED, NormOrder.SHIFTED) and b is not None:
            y = fused(y, ones if w is None else w.expand_as(y), b.expand_as(y))
        else:
            y = y if w is None else y * w
            y = y if b is None else y + b
    out.copy_(rounded(y, out.dtype, nan))


@kernel(
    "(Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, int groups, int curve, Tensor? whole, "
    "Tensor? tail, int chunk, int step, int nan, Tensor(a!) out, Tensor(b!)? normed) -> ()",
    check=_check,
    without=IN_CUDA,
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
    """Fills ``out`` with a curve of the group norm of images, and ``normed`` with the group norm itself.

    The norm is ``fma(x, rstd * weight, fma(-mean, rstd * weight, bias))``, as ATen's on x86.

    Bytes: those of x, out and normed; statistics, weight and bias come from a cache.

    Args:
        x: [N, C, ...], contiguous or in channels last; ``out`` and ``normed`` are laid out like it.
        mean, rstd: float32 [N, groups].
        weight, bias: [C], float32 or of x's dtype.
        groups: how many.
        curve: code of a :class:`backstash.ops.layout.ComputedCurve`, where there is no table.
        whole, tail, chunk, step: the curve as int16 [65536] (Note: [tails of curves]); step 0 where there are no tails.
        nan: as for :func:`row_norm`.
    """
    y, each = _wide(x), x.shape[1] // groups
    spread = (x.shape[0], x.shape[1], *[1] * (x.dim() - 2))
    m, r = (part.view(-1, groups).repeat_interleave(each, 1).view(spread) for part in (mean, rstd))
    across = (1, x.shape[1], *[1] * (x.dim() - 2))
    scale = r if weight is None else r * _wide(weight).view(across)
    shift = torch.zeros(across, dtype=torch.float32, device=x.device) if bias is None else _wide(bias).view(across)
    line = fused(-m, scale, shift.expand_as(scale))
    y = fused(*torch.broadcast_tensors(y, scale, line))
    norm = torch.empty_like(x).copy_(rounded(y, x.dtype, nan))
    if normed is not None:
        normed.copy_(norm)
    if whole is not None:
        _flat(out).copy_(_looked_up(_flat(norm), whole, tail, chunk, step))
    else:
        out.copy_(rounded(curved(_wide(norm), curve), out.dtype, nan))


@kernel(
    "(Tensor gate, Tensor up, Tensor? whole, Tensor? tail, int chunk, int step, int nan, int tail_nan, "
    "Tensor(a!) out, Tensor(b!)? inner) -> ()",
    check=_check,
    without=IN_CUDA,
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
    """Fills ``out`` with ``silu(gate) * up``, and ``inner`` with ``silu(gate)``; each is rounded.

    Bytes: those of gate, up, out and inner.

    Args:
        gate, up, out, inner: [n], of one dtype.
        whole, tail, chunk, step: silu as a table, as for :func:`grouped_norm`; without one it is computed.
        nan, tail_nan: bits of a NaN that is rounded to 16 bits, in vectors and in tails.
    """
    if whole is not None:
        found = _looked_up(gate, whole, tail, chunk, step)
    else:
        found = rounded(curved(_wide(gate), ComputedCurve.SILU), gate.dtype, nan)
    if inner is not None:
        inner.copy_(found)
    product = _wide(found) * _wide(up)
    made = rounded(product, out.dtype, nan)
    if step and out.dtype is not torch.float32:
        place = torch.arange(out.numel(), device=out.device)
        length = (out.numel() - place // chunk * chunk).clamp(max=chunk)
        made = torch.where(place % chunk >= length // step * step, rounded(product, out.dtype, tail_nan), made)
    out.copy_(made)


@kernel(
    "(Tensor x, int curve, Tensor? whole, Tensor? tail, int chunk, int step, int nan, Tensor(a!) out) -> ()",
    check=_check,
    without=IN_CUDA,
)
def curve(
    x: Tensor, curve: int, whole: Tensor | None, tail: Tensor | None, chunk: int, step: int, nan: int, out: Tensor
) -> None:
    """Fills ``out`` with a function of one number: GELU, silu, or whatever a table has.

    Bytes: those of x and out.

    Args:
        x, out: [n], of one dtype.
        curve: code of a :class:`backstash.ops.layout.ComputedCurve`, where there is no table.
        whole, tail, chunk, step, nan: as for :func:`grouped_norm`.
    """
    if whole is not None:
        out.copy_(_looked_up(x, whole, tail, chunk, step))
    else:
        out.copy_(rounded(curved(_wide(x), curve), out.dtype, nan))


@kernel(
    "(Tensor x, Tensor mean, Tensor invstd, Tensor? weight, Tensor? bias, Tensor? residual, int activation, "
    "float lo, float hi, int outer, int inner, int nan, Tensor(a!) out, int rounding=0) -> ()",
    check=_check,
    without=IN_CUDA,
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
    """Fills ``out`` with ``activation(batch_norm(x) [+ residual])``, each of which is rounded to x's dtype.

    The batch norm is that of :func:`backstash.ops.norms.reference.affine`.

    Bytes: those of x, residual and out; statistics, weight and bias come from a cache.

    Args:
        x: [N, C, ...], contiguous or in channels last; ``residual`` and ``out`` are of its dtype and laid out like it.
        mean, invstd, weight, bias: float32 [C].
        activation, lo, hi: as for ``affine``.
        outer, inner: what :func:`backstash.ops.layout.images` says of ``x``.
        nan: as for :func:`row_norm`.
        rounding: code of a :class:`backstash.ops.layout.Rounding`.
    """
    y = normalized(_wide(x), mean, invstd, weight, bias, rounding)
    if residual is not None:
        y = _wide(rounded(y.contiguous(), x.dtype, nan)) + _wide(residual)
    y = _wide(rounded(y.contiguous(), x.dtype, nan))
    if activation == Activation.CLAMP:
        y = torch.where(y < lo, lo, y)
        y = torch.where(y > hi, hi, y)
    if activation == Activation.LEAKY_RELU:
        y = torch.where(y > 0, y, y * lo)
    out.copy_(rounded(y, x.dtype, nan))


@kernel("(Tensor x, Tensor mask, float scale, int nan, Tensor(a!) out) -> ()", check=_check, without=IN_CUDA)
def dropout_bits(x: Tensor, mask: Tensor, scale: float, nan: int, out: Tensor) -> None:
    """Fills ``out`` with x times ``scale`` where a bit is set, and times zero elsewhere.

    Bytes: those of x and out, and an eighth of a byte for each element.

    Args:
        x, out: [n], of one dtype.
        mask: uint8 [ceil(n / 8)], a bit for each element.
        scale: rounded to float32; of a dropout, one over the share that is kept, as it was rounded to x's dtype.
        nan: as for :func:`row_norm`.

    Raises:
        DamagedPlanesError: the mask has another size.
    """
    if mask.numel() != bytes_for(x.numel(), 1):
        raise DamagedPlanesError(
            f"dropout_bits asked for {bytes_for(x.numel(), 1)} bytes of mask for {x.numel()} elements, got "
            f"{mask.numel()}. The stash was overwritten or cut short; compute the step again."
        )
    place = torch.arange(x.numel(), device=x.device)
    is_kept = (mask[place // 8] >> (place % 8).to(torch.uint8)) & 1 != 0
    factor = torch.where(is_kept, torch.tensor(scale, dtype=torch.float32, device=x.device), 0.0)
    out.copy_(rounded(_wide(x) * factor, out.dtype, nan))

"""Batch norm's forward pass again from saved statistics, and its backward pass, rounded as ATen rounds on x86.

Nothing promises ATen's bits, which depend on its version and on the processor. So whoever uses these kernels compares
bits with ATen first, and calls ATen where they differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from backstash.ops.layout import Activation, Rounding, images, per_channel
from backstash.ops.registration import kernel
from backstash.ops.table import TABLE

_WITHOUT = {"triton": "ATen's CUDA kernels add up in another order"}
_FALLBACK = "calls ATen's kernels: the same bits, in more passes but faster than plain torch"

LANES = 8
"""ATen sums in so many lanes on every x86 processor."""


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Returns ``a * b + c`` of float32 tensors, rounded once, as a processor's fused multiply-add does."""
    product, addend = a.double() * b.double(), c.double()  # exact: 48 of 53 bits
    total = product + addend
    of_product = total - addend
    error = (product - of_product) + (addend - (total - of_product))  # exact: what `total` lacks
    # Rounded to odd instead of to nearest, so that the rounding to float32 is right in spite of being the second one.
    bits = total.view(torch.int64)
    inexact = (error != 0) & (bits & 1 == 0) & total.isfinite()
    towards = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(inexact, bits + towards, bits).view(torch.float64).float()


def check_images(name: str, arguments: Sequence[Any]) -> None:
    """Checks that all tensors among the arguments are float32 images [N, C, ...] of one layout, or vectors [C].

    Raises:
        ValueError: one is not, or images are neither contiguous nor in channels last.
    """
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    vectors = [tensor for tensor in tensors if tensor.dim() == 1]
    x = tensors[0]
    laid_out = x.dim() > 1 and images(x) is not None
    for tensor in tensors:
        laid_out &= tensor.dim() == 1 or (tensor.shape == x.shape and tensor.stride() == x.stride())
        laid_out &= tensor.dtype is torch.float32
    if not laid_out or not per_channel(x.shape[1], *vectors):
        raise ValueError(
            f"backstash::{name} asked for float32 images [N, C, ...], contiguous or in channels last, and contiguous "
            f"float32 vectors [C], got {', '.join(f'{t.dtype} {list(t.shape)} {list(t.stride())}' for t in tensors)} "
            f"(dtype, shape, strides). Call ATen's kernel instead."
        )


def _spread(vector: Tensor, x: Tensor) -> Tensor:
    """Returns a vector [C] as [C, 1, ...], which lines up with ``x`` [N, C, ...]."""
    return vector.view(-1, *[1] * (x.dim() - 2))


@kernel(
    "(Tensor x, Tensor mean, Tensor invstd, Tensor? weight, Tensor? bias, Tensor? residual, int activation, "
    "float lo, float hi, int outer, int inner, Tensor(a!) out, Tensor? mask=None, int rounding=0, "
    "Tensor(b!)? picked=None, int begin=0, int step=1, Tensor? residual_mean=None, Tensor? residual_invstd=None, "
    "Tensor? residual_weight=None, Tensor? residual_bias=None) -> ()",
    check=check_images,
    fallback=_FALLBACK,
)
def affine(
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
    out: Tensor,
    mask: Tensor | None = None,
    rounding: int = Rounding.SCALED,
    picked: Tensor | None = None,
    begin: int = 0,
    step: int = 1,
    residual_mean: Tensor | None = None,
    residual_invstd: Tensor | None = None,
    residual_weight: Tensor | None = None,
    residual_bias: Tensor | None = None,
) -> None:
    """Fills ``out`` with ``activation(batch_norm(x) [+ residual])`` from the statistics that batch norm saved.

    In the batch norm a product and the sum after it are rounded once, as on a processor with fused multiply-add.

    Args:
        x: float32 [N, C, ...], contiguous or in channels last; ``residual`` and ``out`` are laid out like it.
        mean, invstd, weight, bias: float32 [C], contiguous.
        activation: code of an :class:`backstash.ops.layout.Activation`.
        lo, hi: its numbers; it ignores those that it does not need.
        outer, inner: what :func:`backstash.ops.layout.images` says of ``x``.
        mask: uint8, a bit for each element in memory order. Where it is clear the result is zero, elsewhere the
            smallest normal number if it would be less.
        rounding: code of a :class:`backstash.ops.layout.Rounding`.
        picked: float32 [n], which is filled with elements of ``out``, in memory order.
        begin, step: which is the first of these, and how far they are apart.
        residual_mean, residual_invstd, residual_weight, residual_bias: where ``residual`` is the input of a batch norm
            whose result is added.
    """
    y = normalized(x, mean, invstd, weight, bias, rounding)
    if residual is not None and residual_mean is not None and residual_invstd is not None:
        residual = normalized(residual, residual_mean, residual_invstd, residual_weight, residual_bias, rounding)
    if residual is not None:
        y = y + residual
    out.copy_(_activated(y, activation, lo, hi))
    if mask is not None:
        elements = out.as_strided((out.numel(),), (1,))
        TABLE["mask_select"].reference(elements.clamp(min=torch.finfo(out.dtype).tiny), mask, elements)
    if picked is not None:
        pick(out, picked, begin, step)


def pick(out: Tensor, picked: Tensor, begin: int, step: int) -> None:
    """Fills ``picked`` [n] with elements of ``out`` at even distances in memory."""
    picked.copy_(out.as_strided((picked.numel(),), (step,), int(out.storage_offset()) + begin))


def normalized(
    x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None, rounding: int
) -> Tensor:
    """Returns the batch norm of float32 ``x`` [N, C, ...] in the order that is asked for."""
    bias = torch.zeros_like(mean) if bias is None else bias
    scale = invstd if weight is None else invstd * weight
    if rounding == Rounding.SCALED:
        return fused(x, _spread(scale, x), _spread(fused(-mean, scale, bias), x))
    if rounding == Rounding.SHIFTED:
        return fused(x, _spread(scale, x), _spread(bias - mean * scale, x))
    centred, added = x - _spread(mean, x), _spread(bias, x)
    if rounding == Rounding.CENTRED:
        return fused(centred, _spread(scale, x), added)
    invstd, weight = _spread(invstd, x), _spread(torch.ones_like(mean) if weight is None else weight, x)
    if rounding == Rounding.WEIGHTED:
        return fused(weight * centred, invstd, added)
    return fused(centred * invstd, weight, added)


def _activated(y: Tensor, activation: int, lo: float, hi: float) -> Tensor:
    if activation == Activation.CLAMP:
        y = torch.where(y < lo, lo, y)
        return torch.where(y > hi, hi, y)
    if activation == Activation.LEAKY_RELU:
        return torch.where(y > 0, y, y * lo)
    return y


@kernel(None, without=_WITHOUT, fallback=_FALLBACK)
def batch_norm_channels(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor, int]:
    """Fills ``out`` with the gradient of a batch norm's contiguous input, and returns those of weight and bias.

    Args:
        grad, x, out: float32 [N, C, ...], contiguous; ``out`` may be ``grad``.
        mean, invstd, weight: float32 [C].

    Returns:
        The gradients of weight and bias, float32 [C]; and the number of channels whose sums are not finite. Of these
        channels nothing is written but a NaN as the weight's gradient.
    """
    outer, channels, inner = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    rows, dy = x.reshape(outer, channels, inner), grad.reshape(outer, channels, inner)
    sums, dots = torch.zeros(2, channels, dtype=torch.float64, device=x.device)
    for image in range(outer):
        some, dot = _row_sums(dy[image], rows[image], mean[:, None])
        sums, dots = sums + some, dots + dot
    count = torch.tensor(float(outer * inner), dtype=torch.float32, device=x.device)
    weight_grad, bias_grad = (dots * invstd).float(), sums.float()
    k, grad_mean = dots.float() * invstd * invstd / count, (sums / count.double()).float()
    good = k.isfinite() & grad_mean.isfinite()
    weight_grad = torch.where(good, weight_grad, math.nan)
    found = torch.empty_like(grad)
    batch_norm_pixels(grad, x, mean, invstd, weight, k, grad_mean, found)
    out.copy_(torch.where(_spread(good, x), found, out))
    return weight_grad, bias_grad, int((~good).sum())


def _row_sums(dy: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Sums ``dy`` and ``(x - mean) * dy`` over rows [C, n], in ATen's order: whole vectors first, then the rest.

    Products are rounded in whole vectors and in rows that are shorter than one, and not in the rest.
    """
    n = x.shape[1]
    width = LANES if n >= LANES else 1
    whole = n // width * width
    centred = x - mean
    products = centred * dy
    grads, dots = dy[:, :width].clone(), products[:, :width].clone()
    for begin in range(width, whole, width):
        grads += dy[:, begin : begin + width]
        dots += products[:, begin : begin + width]
    for lane, i in enumerate(range(whole, n)):
        grads[:, lane] += dy[:, i]
        dots[:, lane] = fused(centred[:, i], dy[:, i], dots[:, lane])
    while width > 1:
        width //= 2
        grads, dots = grads[:, :width] + grads[:, width:], dots[:, :width] + dots[:, width:]
    return grads[:, 0], dots[:, 0]


@kernel(
    "(Tensor grad, Tensor x, Tensor mean, Tensor invstd, Tensor? weight, Tensor k, Tensor grad_mean, Tensor(a!) out)"
    " -> ()",
    check=check_images,
    without=_WITHOUT,
    fallback=_FALLBACK,
)
def batch_norm_pixels(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    k: Tensor,
    grad_mean: Tensor,
    out: Tensor,
) -> None:
    """Fills ``out`` with ``((grad - grad_mean) - (x - mean) * k) * invstd * weight``, the first product unrounded.

    Args:
        grad, x, out: float32 [N, C, ...]; ``out`` may be ``grad``.
        mean, invstd, weight, k, grad_mean: float32 [C].
    """
    left = fused(-(x - _spread(mean, x)), _spread(k, x), grad - _spread(grad_mean, x))
    left = left * _spread(invstd, x)
    out.copy_(left if weight is None else left * _spread(weight, x))

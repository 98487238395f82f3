"""Batch norm in C++ (``native/affine.cpp``, ``native/norm.cpp``), with the rounding and sums of ATen's x86 kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from backstash.ops.cpu import library
from backstash.ops.cpu.planes import check_plane, pointers, threads_for
from backstash.ops.layout import Rounding, bytes_for
from backstash.ops.norms import reference as reference

_lib: Any = library.functions(
    bs_affine="(pppppppllliddppi)",
    bs_batch_norm_channels="l(ppppplllpppi)",
    bs_batch_norm_pixels="(pppppppllpi)",
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
    """See :func:`backstash.ops.norms.reference.affine`, to which other roundings and two norms in one are left."""
    if rounding != Rounding.SCALED or residual_mean is not None:
        given = x, mean, invstd, weight, bias, residual, activation, lo, hi, outer, inner, out, mask, rounding
        of_residual = residual_mean, residual_invstd, residual_weight, residual_bias
        return reference.affine(*given, picked, begin, step, *of_residual)
    channels = x.shape[1]
    scratch = torch.empty(2 * channels, dtype=torch.float32, device="cpu")
    inputs = pointers(x, residual, mean, invstd, weight, bias, scratch)
    if mask is not None:
        check_plane("affine", "mask", mask, bytes_for(x.numel(), 1))
    numbers = outer, channels, inner, activation, lo, hi
    _lib.bs_affine(*inputs, *numbers, *pointers(mask, out), threads_for(x.numel() * 4))
    if picked is not None:
        reference.pick(out, picked, begin, step)
    return None


def batch_norm_channels(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor, int]:
    """See :func:`backstash.ops.norms.reference.batch_norm_channels`."""
    outer, channels, inner = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    # Two tensors with their own memory, because they become the gradients of two parameters.
    weight_grad, bias_grad = (torch.empty(channels, dtype=torch.float32, device="cpu") for _ in range(2))
    results = pointers(out, weight_grad, bias_grad)
    inputs = pointers(grad, x, mean, invstd, weight)
    left: int = _lib.bs_batch_norm_channels(*inputs, outer, channels, inner, *results, threads_for(x.numel() * 4))
    return weight_grad, bias_grad, left


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
    """See :func:`backstash.ops.norms.reference.batch_norm_pixels`."""
    channels = x.shape[1]
    inputs = pointers(grad, x, mean, invstd, weight, k, grad_mean)
    _lib.bs_batch_norm_pixels(*inputs, x.numel() // channels, channels, out.data_ptr(), threads_for(x.numel() * 4))

"""Batch norm's forward pass again from saved statistics, by the kernel in CUDA C++ (``native/onepass/kernels.cu``)."""

from __future__ import annotations

from torch import Tensor

from backstash.ops.layout import Rounding, bytes_for, check_plane
from backstash.ops.onepass.cuda import available as available
from backstash.ops.onepass.cuda import launch


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
    """See :func:`backstash.ops.norms.reference.affine`."""
    numel = x.numel()
    if mask is not None:
        check_plane("affine", "mask", mask, bytes_for(numel, 1), out)
    norm, second = (mean, invstd, weight, bias), (residual_mean, residual_invstd, residual_weight, residual_bias)
    tensors = x, *norm, residual, *second, mask, out, None, picked, None, None
    sizes = numel, x.shape[1], inner, begin, step, 0 if picked is None else picked.numel()
    launch("bs_affine_f32", x, *tensors, *sizes, float(lo), float(hi), int(activation), int(rounding), 0)

"""Batch norm's forward pass again from saved statistics, on CUDA."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from backstash.ops.layout import Activation, Rounding, bytes_for
from backstash.ops.triton.elements import block_offsets
from backstash.ops.triton.launching import BLOCK, blocks_of, check_plane, launch

CLAMP = tl.constexpr(int(Activation.CLAMP))

LEAKY_RELU = tl.constexpr(int(Activation.LEAKY_RELU))

SCALED = tl.constexpr(int(Rounding.SCALED))

WEIGHTED = tl.constexpr(int(Rounding.WEIGHTED))

NORMALIZED = tl.constexpr(int(Rounding.NORMALIZED))

SHIFTED = tl.constexpr(int(Rounding.SHIFTED))

TINY = tl.constexpr(2.0**-126)


@triton.jit
def normalized(x, mean_ptr, invstd_ptr, weight_ptr, bias_ptr, channel, valid, ROUNDING: tl.constexpr):
    """Returns the batch norm of elements of these channels."""
    mean = tl.load(mean_ptr + channel, mask=valid, other=0.0)
    invstd = tl.load(invstd_ptr + channel, mask=valid, other=0.0)
    weight = 1.0 if weight_ptr is None else tl.load(weight_ptr + channel, mask=valid, other=0.0)
    bias = tl.zeros_like(x) if bias_ptr is None else tl.load(bias_ptr + channel, mask=valid, other=0.0)
    if ROUNDING == SCALED:
        scale = invstd * weight
        y = tl.fma(x, scale, tl.fma(-mean, scale, bias))
    elif ROUNDING == WEIGHTED:
        y = tl.fma(weight * (x - mean), invstd, bias)
    elif ROUNDING == NORMALIZED:
        y = tl.fma((x - mean) * invstd, tl.zeros_like(x) + weight, bias)
    elif ROUNDING == SHIFTED:
        scale = invstd * weight
        y = tl.fma(x, scale, bias - mean * scale)
    else:
        y = tl.fma(x - mean, invstd * weight, bias)
    return y


@triton.jit
def affine_kernel(
    x_ptr,
    mean_ptr,
    invstd_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    mean2_ptr,
    invstd2_ptr,
    weight2_ptr,
    bias2_ptr,
    mask_ptr,
    out_ptr,
    picked_ptr,
    numel,
    channels,
    inner,
    lo,
    hi,
    begin: tl.int64,
    step: tl.int64,
    picks,
    blocks,
    ACTIVATION: tl.constexpr,
    ROUNDING: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores a block of the result. The last program computes the picked elements once more and stores these."""
    offs = block_offsets(BLOCK)
    valid = offs < numel
    lane = tl.arange(0, BLOCK)
    if picked_ptr is not None:
        picking = tl.zeros([BLOCK], tl.int32) + tl.program_id(0) == blocks
        offs = tl.where(picking, begin + lane * step, offs)
        valid = tl.where(picking, lane < picks, valid)
    # A division of 64 bits takes longer than the memory that an element waits for.
    index = offs if WIDE else offs.to(tl.int32)
    channel = index // inner % channels
    x = tl.load(x_ptr + offs, mask=valid, other=0.0)
    y = normalized(x, mean_ptr, invstd_ptr, weight_ptr, bias_ptr, channel, valid, ROUNDING)
    if residual_ptr is not None:
        added = tl.load(residual_ptr + offs, mask=valid, other=0.0)
        if mean2_ptr is not None:
            added = normalized(added, mean2_ptr, invstd2_ptr, weight2_ptr, bias2_ptr, channel, valid, ROUNDING)
        y += added
    if ACTIVATION == CLAMP:
        y = tl.where(y < lo, lo, y)
        y = tl.where(y > hi, hi, y)
    elif ACTIVATION == LEAKY_RELU:
        y = tl.where(y > 0.0, y, y * lo)
    if mask_ptr is not None:
        bits = tl.load(mask_ptr + offs // 8, mask=valid, other=0).to(tl.int32)
        is_set = (bits >> (offs % 8).to(tl.int32)) & 1 != 0
        y = tl.where(is_set, tl.where(y < TINY, TINY, y), 0.0)
    if picked_ptr is not None:
        tl.store(picked_ptr + lane, y, mask=valid & picking)
        valid = valid & ~picking
    tl.store(out_ptr + offs, y, mask=valid)


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
    """See :func:`backstash.ops.norms.reference.affine`. At most ``BLOCK`` elements are picked."""
    numel = x.numel()
    if mask is not None:
        check_plane("affine", "mask", mask, bytes_for(numel, 1), out)
    blocks = blocks_of(numel, BLOCK)
    norm, second = (mean, invstd, weight, bias), (residual_mean, residual_invstd, residual_weight, residual_bias)
    tensors = x, *norm, residual, *second, mask, out, picked
    picks = 0 if picked is None else picked.numel()
    numbers = numel, x.shape[1], inner, float(lo), float(hi), begin, step, picks, blocks
    constants = {"ACTIVATION": int(activation), "ROUNDING": int(rounding), "WIDE": numel >= 1 << 31, "BLOCK": BLOCK}
    launch(affine_kernel, blocks + (picked is not None), *tensors, *numbers, **constants)

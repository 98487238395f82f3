"""Batch norm's backward pass (``native/norm.cpp``).

Rounded and summed up as ATen's kernels are on x86; who uses it proves the bits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from backstash.ops import cpu
from backstash.ops.cpu import library

_lib: Any = library.load()


def batch_norm_channels(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor, int]:
    """Write the input's gradient to ``out``, and return those of weight and bias.

    Args:
        grad, x, out: float32 [N, C, ...], contiguous; ``out`` may be ``grad``.
        mean, invstd, weight: float32 [C].

    Returns:
        The gradients of weight and bias, float32 [C], and in how many channels sums are not finite: of these, nothing
        is written but a NaN for the weight's gradient.
    """
    channels = x.shape[1]
    # Each in memory of its own, as they become the parameters' gradients.
    made = [torch.empty(channels, dtype=torch.float32, device="cpu") for _ in range(2)]
    pointers = [one.data_ptr() if one is not None else None for one in (grad, x, mean, invstd, weight)]
    sizes = x.shape[0], channels, math.prod(x.shape[2:])
    results = [one.data_ptr() for one in (out, *made)]
    left: int = _lib.bs_batch_norm_channels(*pointers, *sizes, *results, cpu._threads(x.nbytes))
    return made[0], made[1], left


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
    """Write ``((grad - grad_mean) - (x - mean) * k) * invstd * weight`` to ``out``, the first product unrounded.

    Args:
        grad, x, out: float32 [N, C, ...], channels last; ``out`` may be ``grad``.
        mean, invstd, weight, k, grad_mean: float32 [C].
    """
    pointers = [one.data_ptr() if one is not None else None for one in (grad, x, mean, invstd, weight, k, grad_mean)]
    _lib.bs_batch_norm_pixels(*pointers, x.numel() // x.shape[1], x.shape[1], out.data_ptr(), cpu._threads(x.nbytes))

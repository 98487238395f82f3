"""Sizes of planes, and how images lie in memory: what the kernels of all backends and the codecs agree on."""

from __future__ import annotations

import math
from enum import IntEnum

import torch
from torch import Tensor

from backstash.errors import DamagedPlanesError

ZVC_CHUNK = 4096
"""Elements of a ZVC chunk. The offsets plane has one entry per chunk."""


class Activation(IntEnum):
    """The functions that the kernel ``affine`` can apply to its result, by the codes of ``native/affine.cpp``.

    ATen's bits of these do not depend on where in memory an element is. Of hardswish they do: vectors turn a NaN into
    another NaN, the elements after the last whole vector do not. Silu needs an exponential, which no two libraries
    round alike.
    """

    NONE = 0
    CLAMP = 1
    """``min(max(x, lo), hi)``: relu, relu6 and hardtanh. NaN stays NaN, and a zero of either sign stays as it is."""
    LEAKY_RELU = 2
    """``x`` where it is positive, else ``x * lo``."""


class Rounding(IntEnum):
    """In which order a batch norm computes, by the codes of the kernel ``affine``.

    ``fma(a, b, c)`` is ``a * b + c``, rounded once. Which order ATen or cuDNN takes is documented nowhere: whoever uses
    the kernel compares bits first.
    """

    SCALED = 0
    """``fma(x, invstd * weight, fma(-mean, invstd * weight, bias))``: ATen on x86."""
    WEIGHTED = 1
    """``fma(weight * (x - mean), invstd, bias)``: as ATen's CUDA kernels are written."""
    NORMALIZED = 2
    """``fma((x - mean) * invstd, weight, bias)``."""
    CENTRED = 3
    """``fma(x - mean, invstd * weight, bias)``."""
    SHIFTED = 4
    """``fma(x, invstd * weight, bias - mean * (invstd * weight))``: cuDNN, where it reads a channel once."""


class NormOrder(IntEnum):
    """In which order a norm of rows computes, by the codes of ``native/onepass/bodies.h``."""

    NORMALIZED = 0
    """``fma((x - mean) * rstd, weight, bias)``: ATen's layer norm on x86."""
    SEPARATE = 1
    """``(x - mean) * rstd * weight + bias``, each rounded: torch's RMS norm where it is several calls."""
    SCALED = 2
    """``fma(x, rstd * weight, fma(-mean, rstd * weight, bias))``: ATen's group norm on x86."""
    ROUNDED = 3
    """As SEPARATE, but ``(x - mean) * rstd`` is rounded to the result's dtype: RMS norms of transformers."""
    SHIFTED = 4
    """``fma(fma(x, rstd, -(rstd * mean)), weight, bias)``: ATen's layer norm of 16 bits with float32 weights on x86."""


class ComputedCurve(IntEnum):
    """Functions of one number that are computed, by the codes of ``native/onepass/bodies.h``."""

    NONE = 0
    SILU = 1
    GELU = 2
    """By the error function, without ``approximate``."""


def bytes_for(numel: int, bits: int) -> int:
    """Returns the bytes that ``numel`` fields of ``bits`` bits take when they are packed without gaps."""
    return (numel * bits + 7) // 8


def check_plane(op: str, name: str, plane: Tensor, expected: int, out: Tensor | None = None) -> None:
    """Checks that a plane has as many elements as the output needs.

    Args:
        op: the kernel that asks.
        name: the plane's name.
        plane: the plane.
        expected: how many elements it has to have.
        out: the output, which the error tells of where it is given.

    Raises:
        DamagedPlanesError: it has not.
    """
    if plane.numel() != expected:
        asked = f"{expected} elements in the plane {name!r}"
        if out is not None:
            dtype = str(out.dtype).removeprefix("torch.")
            asked = f"the {expected} elements of plane {name!r} that {out.numel()} values of {dtype} take"
        raise DamagedPlanesError(
            f"{op} asked for {asked}, got {plane.numel()}. The stash was overwritten or cut short; compute the step "
            f"again."
        )


def disagreement(op: str, wanted: str, what: str, stored: int) -> str:
    """Returns the message for a stash whose planes disagree: what a kernel wanted, and of what how many are stored."""
    return (
        f"{op} asked for {wanted}, got planes that disagree ({stored} {what} stored). The stash was overwritten or cut "
        f"short; compute the step again."
    )


def zvc_chunks(numel: int) -> int:
    """Returns the number of ZVC chunks of ``numel`` elements."""
    return (numel + ZVC_CHUNK - 1) // ZVC_CHUNK


def images(x: Tensor) -> tuple[int, int] | None:
    """Returns ``(outer, inner)`` if the memory of ``x`` [N, C, ...] is [outer, C, inner], otherwise None.

    ``inner`` is the number of pixels where ``x`` is contiguous, and 1 where it is in channels last.
    """
    if x.is_contiguous():
        return x.shape[0], math.prod(x.shape[2:])
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if channels_last is not None and x.is_contiguous(memory_format=channels_last):
        return x.numel() // x.shape[1], 1
    return None


def per_channel(channels: int, *vectors: Tensor | None) -> bool:
    """Whether every tensor in ``vectors`` is contiguous, float32 and of shape [channels]. None counts as such."""
    for vector in vectors:
        if vector is None:
            continue
        if vector.dtype is not torch.float32 or vector.shape != (channels,) or not vector.is_contiguous():
            return False
    return True


def groups(numel: int, group_size: int) -> int:
    """Returns the number of groups, and so of scales, of ``numel`` elements."""
    return -(-numel // group_size)

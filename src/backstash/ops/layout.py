"""Sizes of planes, and how images lie in memory: what the kernels of all backends and the codecs agree on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

ZVC_CHUNK = 4096
"""Elements of a ZVC chunk. The offsets plane has one entry per chunk."""

CSR_ROW = 256
"""Elements of a CSR row: a column index of one byte tells so many apart."""

SZP_BLOCK = 32
"""Values of an szp block. Every block has its own width, and one bit of each of its values fills a word."""

EXPONENTS_BLOCK = 512
"""Elements whose exponents are coded in one window. A chunk of ZVC_CHUNK is a whole number of such blocks.

On what a Llama and a GPT-2 save, blocks of 128 are 0.4 % larger, because of their bases, and blocks of 1,024 less than
0.1 % smaller. An outlier is one of fewer neighbours in a small block.
"""

EXPONENTS_LANES = 32
"""Lanes of such a block: element ``i`` is in lane ``i % EXPONENTS_LANES``."""


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


def bytes_for(numel: int, bits: int) -> int:
    """Returns the bytes that ``numel`` fields of ``bits`` bits take when they are packed without gaps."""
    return (numel * bits + 7) // 8


def window_bits(kernel: Sequence[int]) -> int:
    """Returns the bits that tell the positions of a pooling window apart: 2 for 2x2, 4 for 3x3."""
    return max(1, (math.prod(kernel) - 1).bit_length())


def zvc_chunks(numel: int) -> int:
    """Returns the number of ZVC chunks of ``numel`` elements."""
    return (numel + ZVC_CHUNK - 1) // ZVC_CHUNK


def exponents_blocks(numel: int) -> int:
    """Returns the number of blocks of EXPONENTS_BLOCK of ``numel`` elements."""
    return (numel + EXPONENTS_BLOCK - 1) // EXPONENTS_BLOCK


def csr_rows(numel: int) -> int:
    """Returns the number of CSR rows of ``numel`` elements."""
    return (numel + CSR_ROW - 1) // CSR_ROW


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

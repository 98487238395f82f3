"""8x8 cosine transforms of images, quantised and without their zeros: see codecs.dct."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from backstash.codecs.zvc.reference import zvc_decode, zvc_encode
from backstash.errors import DamagedPlanesError
from backstash.ops import dynamic_size, kernel

SIDE = 8
"""Rows and columns of a block."""

LARGEST = 127
"""The largest magnitude of an element before the transform, and of a code."""

BASIS = tuple(
    math.sqrt((1 if u == 0 else 2) / SIDE) * math.cos((2 * k + 1) * u * math.pi / (2 * SIDE))
    for u in range(SIDE)
    for k in range(SIDE)
)
"""The orthonormal cosine transform, a row per frequency."""


def dct_blocks(outer: int, height: int, width: int, inner: int) -> int:
    """Returns the number of 8x8 blocks of all images, which are padded with zeros at the lower and right edges."""
    return outer * inner * -(-height // SIDE) * -(-width // SIDE)


_IMAGES = "int outer, int height, int width, int inner, int[] shifts"
_WITHOUT = {"triton": "the reference serves: dct is a baseline to compare other codecs with"}


def _dct(
    x: Tensor, outer: int, height: int, width: int, inner: int, shifts: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    blocks = dct_blocks(outer, height, width, inner)
    return (
        x.new_empty(SIDE * blocks, dtype=torch.uint8),
        x.new_empty(-(-blocks // 64), dtype=torch.int64),
        x.new_empty(dynamic_size(), dtype=torch.uint8),
        x.new_empty(outer * inner, dtype=torch.float32),
        x.new_empty(1, dtype=torch.int64),
    )


@kernel(f"(Tensor x, {_IMAGES}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", _dct, without=_WITHOUT)
def dct_encode(
    x: Tensor, outer: int, height: int, width: int, inner: int, shifts: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Divides every image by its largest magnitude, and transforms and quantises each of its 8x8 blocks.

    All arithmetic is in float32, every operation rounded, sums from the first element or frequency to the last.

    Args:
        x: float32, bfloat16 or float16 [outer * height * width * inner], in that order in memory; an image is what
            has one outer and one inner index.
        outer, height, width, inner: sizes, none of them 0.
        shifts: of each of the 64 coefficients of a block, row by row, the power of two by which it is divided.

    Returns:
        mask, offsets and values uint8, which :func:`backstash.codecs.zvc.reference.zvc_encode` makes of the codes.
        These are integers of 8 bits, block after block of image after image, inner indices first. Then scales float32
        [outer * inner], the images' largest magnitudes; and int64 [1], the number of elements that are not finite. If
        that is not zero, the planes are useless.
    """
    images = x.float().view(outer, height, width, inner).movedim(3, 1).reshape(-1, height, width)
    finite = images.isfinite()
    images = images.masked_fill(~finite, 0.0)
    scales = images.abs().amax((1, 2))
    divisors = torch.where(scales > 0, scales, 1.0)[:, None, None]
    rows, columns = -(-height // SIDE), -(-width // SIDE)
    padded = images.new_zeros(images.shape[0], rows * SIDE, columns * SIDE)
    padded[:, :height, :width] = images / divisors * LARGEST
    blocks = padded.view(-1, rows, SIDE, columns, SIDE).transpose(2, 3).reshape(-1, SIDE, SIDE)
    basis = _basis(x)
    along = sum((blocks[:, :, k, None] * basis[:, k] for k in range(1, SIDE)), blocks[:, :, 0, None] * basis[:, 0])
    both = sum((basis[:, k, None] * along[:, None, k] for k in range(1, SIDE)), basis[:, 0, None] * along[:, None, 0])
    codes = (both * _steps(x, shifts).reciprocal()).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    return *zvc_encode(codes.view(-1).view(torch.uint8)), scales, (~finite).sum().view(1)


@kernel(
    f"(Tensor mask, Tensor offsets, Tensor values, Tensor scales, {_IMAGES}, Tensor(a!) out) -> ()", without=_WITHOUT
)
def dct_decode(
    mask: Tensor,
    offsets: Tensor,
    values: Tensor,
    scales: Tensor,
    outer: int,
    height: int,
    width: int,
    inner: int,
    shifts: list[int],
    out: Tensor,
) -> None:
    """Fills ``out`` [outer * height * width * inner] from the planes of :func:`dct_encode`.

    Raises:
        DamagedPlanesError: the planes' sizes, the mask's bits and the offsets do not agree.
    """
    count = dct_blocks(outer, height, width, inner)
    if mask.numel() != count * SIDE or scales.numel() != outer * inner or offsets.numel() != -(-count // 64):
        raise DamagedPlanesError(dct_damage(values.numel()))
    codes = torch.empty(count * SIDE * SIDE, dtype=torch.uint8, device=out.device)
    zvc_decode(mask, offsets, values, codes)
    both = codes.view(torch.int8).view(-1, SIDE, SIDE).float() * _steps(out, shifts)
    basis = _basis(out)
    along = sum((basis[u, :, None] * both[:, None, u] for u in range(1, SIDE)), basis[0, :, None] * both[:, None, 0])
    blocks = sum((along[:, :, u, None] * basis[u] for u in range(1, SIDE)), along[:, :, 0, None] * basis[0])
    rows, columns = -(-height // SIDE), -(-width // SIDE)
    padded = blocks.view(-1, rows, columns, SIDE, SIDE).transpose(2, 3).reshape(-1, rows * SIDE, columns * SIDE)
    unit = torch.tensor(1 / LARGEST, dtype=torch.float32, device=out.device)
    images = (padded[:, :height, :width] * unit).clamp(-1, 1) * scales[:, None, None]
    out.copy_(images.view(outer, inner, height, width).movedim(1, 3).reshape(-1))


def dct_damage(stored: int) -> str:
    """Returns the message for a stash whose planes disagree."""
    return (
        f"dct_decode asked for the codes that the mask and the offsets announce, got planes that disagree ({stored} "
        f"codes stored). The stash was overwritten or cut short; compute the step again."
    )


def _basis(x: Tensor) -> Tensor:
    return torch.tensor(BASIS, dtype=torch.float32, device=x.device).view(SIDE, SIDE)


def _steps(x: Tensor, shifts: list[int]) -> Tensor:
    return torch.tensor([2.0**shift for shift in shifts], device=x.device).view(SIDE, SIDE)

"""JPEG-ACT's way to store images: cosine transforms of 8x8 blocks, a table of steps, and no zeros; to compare with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from backstash.arguments import check_word
from backstash.codecs.base import Encoded, ErrorBound, check_planes, flat, like, refuses_singles, require_accepted
from backstash.errors import CodecRefusedError
from backstash.ops.registration import ops
from backstash.saved import Need, TensorSpec

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

_LOW = 3
TABLES = {
    "optL": (_LOW,) * 64,
    "optH": tuple(_LOW if u + v == 0 else 5 if u + v < 8 else 4 for u in range(8) for v in range(8)),
}
"""For each table, by name, the power of two by which each coefficient is divided."""

MAX_SHIFT = 7


@dataclass(frozen=True)
class Dct:
    """Stores the quantised cosine transforms of 8x8 blocks of images, those coefficients that are not zero.

    Preserves: SHAPE, VALUE - with **no bound on an element's error**: what a block loses depends on all of it. A large
        element among small ones may become anything within its image's largest magnitude, and zeros do not stay zero.
    Layout: an image is what has one index in each but the last two dimensions; its blocks are filled up with zeros at
        the lower and the right edge. Plane ``scales`` float32, of each image the largest magnitude, which becomes 127.
        The 64 coefficients of a block, row by row, divided by their steps and rounded, are codes of 8 bits; these are
        stored as Zvc stores elements: ``mask`` uint8 [8 * blocks], ``offsets`` int64 [ceil(blocks / 64)], ``values``
        uint8 [nonzeros].
    Bytes: 8 * blocks + 8 * ceil(blocks / 64) + nonzeros + 4 * images.
    Determinism: the same planes on every device: products are added up from the first to the last, whatever the
        settings for matrix products are.
    Source: JPEG-ACT (ISCA 2020): the transform, tables of powers of two (optL for the first epochs, optH after them)
        and zero-value compression in place of Huffman codes. Ours scales every image of its own by its largest
        magnitude, not every channel to a fixed range, so that nothing is clamped; does not round to 8 bits before the
        transform; rounds to nearest after it; and has an optH after that one's description, not its every entry.

    Args:
        table: ``"optL"``, 8 for all coefficients; or ``"optH"``, 8 for the mean, 32 for the lower frequencies, 16 for
            the rest.
        shift: how many times all steps are doubled, 0 to 7.

    Raises:
        ValueError: there is no such table or shift.
        CodecRefusedError: on encode, an element is infinite or NaN.

    Example:
        >>> x = torch.linspace(0, 1, 64).view(1, 1, 8, 8) + torch.linspace(0, 1, 8)
        >>> encoded = Dct().encode(x)
        >>> encoded.nbytes, bool((Dct().decode(encoded) - x).abs().max() < 0.1)
        (27, True)
    """

    table: str = "optL"
    shift: int = 0

    id: ClassVar[str] = "dct"
    preserves: ClassVar[frozenset[Need]] = frozenset({Need.SHAPE, Need.VALUE})
    bound: ClassVar[ErrorBound | None] = ErrorBound(abs=math.inf)

    def __post_init__(self) -> None:
        check_word(self.table, "table", "Dct", "optL")
        if self.table not in TABLES:
            raise ValueError(f"Dct was asked for table={self.table!r}, but there are {', '.join(map(repr, TABLES))}.")
        if self.shift not in range(MAX_SHIFT + 1):
            raise ValueError(f"Dct was asked for shift={self.shift!r}, but the choices are 0 to {MAX_SHIFT}.")

    @property
    def label(self) -> str:
        """With the table, and the shift where there is one: ``"dct-optL"``, ``"dct-optH+2"``."""
        return f"{self.id}-{self.table}" + (f"+{self.shift}" if self.shift else "")

    def accepts(self, spec: TensorSpec) -> str | None:
        """Accepts floating tensors of 16 or 32 bits that have images: contiguous ones and channels last."""
        refused = refuses_singles(spec)
        if refused is None and _geometry(spec) is None:
            return f"it has no images in memory: shape {spec.shape}, strides {spec.stride}"
        return refused

    def declines(self, x: Tensor) -> str | None:
        """Declines images that fill less than half of their 8x8 blocks."""
        outer, height, width, inner = _geometry(TensorSpec.of(x)) or (1, 0, 0, 1)
        share = x.numel() / (64 * _blocks(outer, height, width, inner)) if x.numel() else 0.0
        return None if share >= 0.5 else f"its images, {height} by {width}, fill {share:.0%} of 8x8 blocks"

    def encode(self, x: Tensor) -> Encoded:
        """Transforms every block. The host waits to know whether all is finite and how many codes are not zero."""
        spec = require_accepted(self, x)
        outer, height, width, inner = _sizes(spec)
        images = flat(x).float().view(outer, height, width, inner).movedim(3, 1).reshape(-1, height, width)
        strange = images.numel() - int(images.isfinite().sum())
        if strange:
            raise CodecRefusedError(
                f"codec 'dct' was asked to encode {spec}, got {strange} infinite or NaN elements, which spoil their "
                f"blocks. Use an exact codec, or Keep()."
            )
        scales = images.abs().amax((1, 2))
        divisors = torch.where(scales > 0, scales, 1.0)[:, None, None]
        rows, columns = -(-height // SIDE), -(-width // SIDE)
        padded = images.new_zeros(images.shape[0], rows * SIDE, columns * SIDE)
        padded[:, :height, :width] = images / divisors * LARGEST
        blocks = padded.view(-1, rows, SIDE, columns, SIDE).transpose(2, 3).reshape(-1, SIDE, SIDE)
        basis = _basis(x)
        coefficients = _from_left(basis, _from_right(blocks, basis.T))
        codes = (coefficients / self._steps(x)).round().clamp(-LARGEST, LARGEST).to(torch.int8)
        mask, offsets, values = ops.zvc_encode(codes.view(-1).view(torch.uint8))
        return Encoded(self.id, spec, {"mask": mask, "offsets": offsets, "values": values, "scales": scales})

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """Images that look like the original ones.

        Raises:
            DamagedPlanesError: the planes do not fit together.
        """
        outer, height, width, inner = sizes = _sizes(encoded.spec)
        count, planes = _blocks(*sizes), encoded.planes
        check_planes(encoded, {"mask": SIDE * count, "offsets": -(-count // 64), "scales": outer * inner})
        out = like(encoded.spec, out)
        codes = torch.empty(count * SIDE * SIDE, dtype=torch.uint8, device=out.device)
        ops.zvc_decode(planes["mask"], planes["offsets"], planes["values"], codes)
        basis = _basis(out)
        coefficients = codes.view(torch.int8).view(-1, SIDE, SIDE).float() * self._steps(out)
        blocks = _from_right(_from_left(basis.T, coefficients), basis)
        rows, columns = -(-height // SIDE), -(-width // SIDE)
        padded = blocks.view(-1, rows, columns, SIDE, SIDE).transpose(2, 3).reshape(-1, rows * SIDE, columns * SIDE)
        unit = torch.tensor(1 / LARGEST, dtype=torch.float32, device=out.device)
        images = (padded[:, :height, :width] * unit).clamp(-1, 1) * planes["scales"][:, None, None]
        flat(out).copy_(images.view(outer, inner, height, width).movedim(1, 3).reshape(-1))
        return out

    def nbytes_bound(self, spec: TensorSpec) -> int:
        """The size where no code is zero."""
        sizes = _sizes(spec)
        blocks = _blocks(*sizes)
        return 72 * blocks + 8 * -(-blocks // 64) + 4 * sizes[0] * sizes[3]

    def _steps(self, x: Tensor) -> Tensor:
        return torch.tensor([2.0 ** (step + self.shift) for step in TABLES[self.table]], device=x.device).view(
            SIDE, SIDE
        )


def _geometry(spec: TensorSpec) -> tuple[int, int, int, int] | None:
    """Outer size, height, width and inner size in memory order, None where there are no images."""
    if len(spec.shape) < 2 or 0 in spec.shape:
        return None
    *_, height, width = spec.shape
    numel = spec.numel
    example = torch.empty_strided(spec.shape, spec.stride, device="meta")
    if example.is_contiguous():
        return numel // (height * width), height, width, 1
    if len(spec.shape) == 4 and example.is_contiguous(memory_format=torch.channels_last):
        return spec.shape[0], height, width, spec.shape[1]
    return None


def _sizes(spec: TensorSpec) -> tuple[int, int, int, int]:
    sizes = _geometry(spec)
    assert sizes is not None, "accepts() refuses it"
    return sizes


def _blocks(outer: int, height: int, width: int, inner: int) -> int:
    """The number of 8x8 blocks of all images, which are padded with zeros at the lower and right edges."""
    return outer * inner * -(-height // SIDE) * -(-width // SIDE)


def _basis(x: Tensor) -> Tensor:
    return torch.tensor(BASIS, dtype=torch.float32, device=x.device).view(SIDE, SIDE)


def _from_right(blocks: Tensor, by: Tensor) -> Tensor:
    """``blocks @ by``."""
    first, *others = (blocks[:, :, k, None] * by[k] for k in range(SIDE))
    return sum(others, first)


def _from_left(by: Tensor, blocks: Tensor) -> Tensor:
    """``by @ blocks``."""
    first, *others = (by[:, k, None] * blocks[:, None, k] for k in range(SIDE))
    return sum(others, first)

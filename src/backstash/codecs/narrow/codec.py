"""Integers and bools in the fewest bits; max-pool indices as positions inside their windows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from backstash.codecs.base import (
    EXACT,
    Draft,
    Encoded,
    ErrorBound,
    Judged,
    ReadPlanes,
    certain,
    check_planes,
    flat,
    like,
    refuses_layout,
    require_accepted,
    taken,
)
from backstash.codecs.direct import Direct, Geometry, MaskBits, WindowOffsets
from backstash.codecs.narrow.windows.reference import window_bits
from backstash.errors import CodecRefusedError
from backstash.ops import bytes_for
from backstash.ops.registration import ops
from backstash.saved import Need, PoolWindow, TensorSpec

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
MAX_BITS = 32


@dataclass(frozen=True)
class Narrow:
    """Stores integers in the fewest bits that hold their range, bools in one.

    Preserves: SHAPE, SIGN, INDEX, VALUE.
    Layout: plane ``packed`` uint8 [ceil(n * bits / 8)], a little-endian bit stream, ``bits`` per element in memory
        order. Without a window the field is ``x - base``; with one it is the row-major position in the window.
    Bytes: ceil(n * bits / 8), where bits = max(1, ceil(log2(max - min + 1))), or of the window's positions: 2 for
        2x2, 4 for 3x3.
    Determinism: the same planes on every backend.
    Source: Gist (ISCA 2018), section 3.1, keeps a 4-bit map for the pooling that follows a relu; ours takes the
        window from the backward formula, any size, dilation and number of dimensions.

    Args:
        window: geometry of the pooling whose indices these are; None for plain integers.

    Raises:
        CodecRefusedError: on encode, an index lies outside its window, or the range needs more than 32 bits.

    Example:
        >>> encoded = Narrow().encode(torch.tensor([70, 71, 72, 73] * 4))
        >>> encoded.nbytes, Narrow().decode(encoded)[:4].tolist()
        (4, [70, 71, 72, 73])
    """

    window: PoolWindow | None = None

    id: ClassVar[str] = "narrow"
    preserves: ClassVar[frozenset[Need]] = EXACT
    bound: ClassVar[ErrorBound | None] = None

    def accepts(self, spec: TensorSpec) -> str | None:
        """Accepts dense integer and bool tensors; with a window, int64 laid out contiguous or channels_last."""
        if spec.dtype not in INTEGERS:
            return "it takes integers and bool only"
        if self.window is not None and _walk(spec, len(self.window.kernel)) is None:
            return "its layout is neither contiguous nor channels_last"
        return refuses_layout(spec)

    def declines(self, x: Tensor) -> str | None:
        """Declines where the fields would be no narrower than the integers. Without a window it reads all of them."""
        if self.window is None and x.numel() == 0:
            return "it is empty"
        bits = window_bits(self.window.kernel) if self.window else _range(flat(x))[0]
        width = 8 * x.element_size()
        return None if bits < min(width, MAX_BITS + 1) else f"its range needs {bits} of {width} bits"

    def encode(self, x: Tensor) -> Encoded:
        """Packs the fields."""
        spec = require_accepted(self, x)
        if self.window is None:
            bits, base = _range(flat(x))
            if bits > MAX_BITS:
                raise CodecRefusedError(
                    f"codec 'narrow' was asked to encode {spec} in at most {MAX_BITS} bits, got a range that needs "
                    f"{bits}. Use Keep()."
                )
            return self._packed(x, spec, bits, base)
        return certain(self.draft(x, True))

    def draft(self, x: Tensor, known: Any) -> Draft:
        """As ``encode``, without a wait: with the ``known`` range of integers, or positions that may be none."""
        spec = require_accepted(self, x)
        if self.window is not None:
            packed, outside = ops.window_encode(flat(x), *self.geometry(spec))
            encoded = Encoded(self.id, spec, {"packed": packed}, {"bits": window_bits(self.window.kernel)})
            return Draft(encoded, outside, lambda numbers: taken(self._refusal(spec, numbers[0])))
        bits, base = known
        return Draft(self._packed(x, spec, bits, base), torch.stack(flat(x).aminmax()), partial(_judge, bits, base))

    def _packed(self, x: Tensor, spec: TensorSpec, bits: int, base: int) -> Encoded:
        packed = ops.narrow_encode(flat(x), bits, base)
        return Encoded(self.id, spec, {"packed": packed}, {"bits": bits, "base": base})

    def known(self, encoded: Encoded) -> Any:
        """The bits and the smallest of the integers. A bool's are known without a look, and so encoding never waits."""
        if self.window is not None:
            return True
        return None if encoded.spec.dtype == torch.bool else (encoded.meta["bits"], encoded.meta["base"])

    def _refusal(self, spec: TensorSpec, outside: int) -> str | None:
        if not outside:  # where a window holds only padding, or only -inf in max_pool3d
            return None
        return (
            f"codec 'narrow' was asked to encode {spec} as positions in {self.window}, got {outside} indices outside "
            f"their window. Use Narrow() without a window."
        )

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """Returns the original integers."""
        packed, bits = encoded.planes["packed"], int(encoded.meta["bits"])  # type: ignore[arg-type]
        check_planes(encoded, {"packed": bytes_for(encoded.spec.numel, bits)})
        out = like(encoded.spec, out)
        if self.window is None:
            ops.narrow_decode(packed, bits, encoded.meta["base"], flat(out))
        else:
            ops.window_decode(packed, *self.geometry(encoded.spec), flat(out))
        return out

    def nbytes_bound(self, spec: TensorSpec) -> int:
        """32 bits per element, or the bits of a window's position."""
        if self.window is not None:
            return bytes_for(spec.numel, window_bits(self.window.kernel))
        return bytes_for(spec.numel, 1 if spec.dtype == torch.bool else min(MAX_BITS, 8 * spec.dtype.itemsize))

    def direct(self, form: type[Direct]) -> ReadPlanes | None:
        """Offers the positions in their windows, if there is a window, and else the bits of bools."""
        if form is MaskBits:
            return self._bits if self.window is None else None
        return self._offsets if form is WindowOffsets and self.window is not None else None

    def _bits(self, encoded: Encoded) -> MaskBits | None:
        return MaskBits(encoded.planes["packed"]) if encoded.spec.dtype is torch.bool else None

    def _offsets(self, encoded: Encoded) -> WindowOffsets:
        return WindowOffsets(encoded.planes["packed"], self.geometry(encoded.spec))

    def geometry(self, spec: TensorSpec) -> Geometry:
        """How windows lie over indices like ``spec``, as ``window_encode`` takes it; only with a ``window``."""
        window = self.window
        assert window is not None
        dims = len(window.kernel)
        inner = _walk(spec, dims)
        assert inner is not None  # accepts() has refused other layouts
        return (
            inner,
            list(window.input_size),
            list(spec.shape[-dims:]),
            list(window.kernel),
            list(window.stride),
            list(window.padding),
            list(window.dilation),
        )


def _judge(bits: int, base: int, edges: list[int]) -> Judged:
    """Whether integers between these edges, the smallest and the largest, have their place above ``base``."""
    low, high = edges
    last = base + (1 << bits) - 1
    if base <= low and high <= last:
        return Judged(None, (bits, base))
    low, last = min(base, low), max(last, high)
    bits = (last - low).bit_length()
    refusal = f"its integers are from {edges[0]} to {edges[1]}, which was not expected"
    return Judged(refusal, (bits, low) if bits <= MAX_BITS else None)


def _range(x: Tensor) -> tuple[int, int]:
    """Bits that hold ``max - min`` of a flat integer tensor, and ``min``; (1, 0) for bool without looking."""
    if x.dtype == torch.bool or x.numel() == 0:
        return 1, 0
    low, high = (int(edge) for edge in x.aminmax())
    return max(1, (high - low).bit_length()), low


def _walk(spec: TensorSpec, dims: int) -> int | None:
    """Elements between spatial neighbours in memory; None where memory does not hold positions in row-major order."""
    sizes, steps = spec.shape[-dims:], spec.stride[-dims:]
    if spec.dtype != torch.int64 or len(sizes) < dims:
        return None
    inner = 1 if len(spec.shape) <= dims else prod(spec.shape[-dims - 1 : -dims])
    for candidate in (1, inner):
        expected, fits = candidate, True
        for size, step in zip(reversed(sizes), reversed(steps), strict=True):
            fits &= size == 1 or step == expected
            expected *= size
        channel_step = expected if candidate == 1 else 1
        if fits and (inner == 1 or spec.stride[-dims - 1] == channel_step):
            return candidate
    return None

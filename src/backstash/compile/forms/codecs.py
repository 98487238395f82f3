"""Codecs as graphs of aten operators: what a policy's codec becomes inside a compiled graph.

Only codecs whose planes have a size that does not depend on the data have such a form, because a graph has fixed
shapes. Decoded values have the bits that the eager codec decodes to; the planes may be laid out differently
(Note: [packed along a dimension] in graph/layout.py). Encodings take a value in memory order (layout.in_memory_order).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from backstash.codecs import Bitmask, BlockQuant, Codec, FewBit, Minifloat, Narrow, Shape
from backstash.codecs.base import SINGLES
from backstash.compile.forms.rounding import GraphBlockQuant, GraphFewBit, GraphMinifloat
from backstash.compile.graph.emit import Emitter, GraphValue, tensor_of
from backstash.compile.graph.layout import cast, constant, pack, pack_bools, packed_nbytes, unpack_bits, unpack_bools
from backstash.saved import Mask, Test

_aten = torch.ops.aten


class GraphCodec(Protocol):
    """An encoding as calls of operators.

    Attributes:
        is_exact: whether gradients keep their bits.
    """

    @property
    def label(self) -> str:
        """See above."""

    @property
    def is_exact(self) -> bool:
        """See above."""

    def encode(self, emit: Emitter, x: GraphValue) -> tuple[GraphValue, ...]:
        """Returns the planes of a contiguous value."""

    def decode(self, emit: Emitter, planes: Sequence[GraphValue], like: torch.Tensor) -> GraphValue:
        """Returns a contiguous value, given a (fake) tensor that has its sizes, dtype and device."""

    def nbytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes of the planes."""


@dataclass(frozen=True)
class Bits:
    """A bool as one bit per element."""

    label: str = "bits"
    is_exact: bool = True

    def encode(self, emit: Emitter, x: GraphValue) -> tuple[GraphValue, ...]:
        """One plane."""
        return (pack_bools(emit, x),)

    def decode(self, emit: Emitter, planes: Sequence[GraphValue], like: torch.Tensor) -> GraphValue:
        """A bool."""
        return unpack_bools(emit, planes[0], list(like.shape))

    def nbytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        """A bit per element."""
        return packed_nbytes(sizes, 1)


@dataclass(frozen=True)
class Integers:
    """Integers from 0 to ``limit - 1``, in the fewest bits of 1, 2, 4, 8, 16 and 32 that hold them."""

    limit: int
    is_exact: bool = True

    @property
    def width(self) -> int:
        """Bits of an integer."""
        return next(bits for bits in (1, 2, 4, 8, 16, 32, 64) if self.limit <= 1 << min(bits, 31 if bits == 32 else 63))

    @property
    def label(self) -> str:
        """With the width."""
        return f"integers of {self.width} bits"

    def encode(self, emit: Emitter, x: GraphValue) -> tuple[GraphValue, ...]:
        """One plane. 16 and 32 bits are signed types, whose bit patterns stand for numbers without a sign."""
        if self.width >= 16:
            return (cast(emit, x, torch.int16 if self.width == 16 else torch.int32),)
        return (pack(emit, cast(emit, x, torch.uint8), self.width),)

    def decode(self, emit: Emitter, planes: Sequence[GraphValue], like: torch.Tensor) -> GraphValue:
        """The integers in their own dtype."""
        if self.width >= 16:
            wide = cast(emit, planes[0], like.dtype)
            return emit(_aten.bitwise_and.Scalar, wide, 0xFFFF) if self.width == 16 else wide
        return cast(emit, unpack_bits(emit, planes[0], self.width, list(like.shape)), like.dtype)

    def nbytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        """The integers' bits."""
        return packed_nbytes(sizes, self.width)


@dataclass(frozen=True)
class Sides:
    """Which side of a threshold each element is on, as in codecs.Bitmask.

    A graph cannot look whether there is a NaN. Where NaN must stay NaN there is a second bit in any case.
    """

    mask: Mask
    label: str = "bitmask"
    is_exact: bool = True

    def encode(self, emit: Emitter, x: GraphValue) -> tuple[GraphValue, ...]:
        """One plane, or two."""
        planes = [outcome(emit, x, self.mask.test, self.mask.lo, self.mask.hi)]
        if self.mask.ternary:
            planes.append(emit(_aten.lt.Scalar, x, 0))
        if self.mask.nan:
            planes.append(emit(_aten.ne.Tensor, x, x))
        return tuple(pack_bools(emit, plane) for plane in planes)

    def decode(self, emit: Emitter, planes: Sequence[GraphValue], like: torch.Tensor) -> GraphValue:
        """The stand-ins of codecs.Bitmask in the value's dtype."""
        mask = self.mask

        def where(plane: GraphValue, number: float, otherwise: GraphValue) -> GraphValue:
            bits = unpack_bools(emit, plane, list(like.shape))
            return emit(_aten.where.self, bits, constant(emit, number, plane, like.dtype), otherwise)

        clear = constant(emit, 0.0 if mask.ternary else mask.if_clear, planes[0], like.dtype)
        found = where(planes[0], 1.0 if mask.ternary else mask.if_set, clear)
        if mask.ternary:
            found = where(planes[1], -1.0, found)
        if mask.nan:
            found = where(planes[-1], float("nan"), found)
        return found

    def nbytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        """A bit per element and plane."""
        return packed_nbytes(sizes, 1) * (1 + self.mask.ternary + self.mask.nan)


def outcome(emit: Emitter, x: GraphValue, test: Test, low: float, high: float) -> GraphValue:
    """The outcome of an elementwise test, a bool."""

    def both(first: GraphValue, second: GraphValue) -> GraphValue:
        return emit(_aten.logical_and.default, first, second)

    if test is Test.NOT_LE:
        return emit(_aten.logical_not.default, emit(_aten.le.Scalar, x, low))
    if test is Test.GT:
        return emit(_aten.gt.Scalar, x, low)
    if test is Test.INSIDE:
        return both(emit(_aten.gt.Scalar, x, low), emit(_aten.lt.Scalar, x, high))
    if test is Test.NOT_OUTSIDE:
        outside = emit(_aten.logical_or.default, emit(_aten.le.Scalar, x, low), emit(_aten.ge.Scalar, x, high))
        return emit(_aten.logical_not.default, outside)
    if test is Test.CLOSED:
        return both(emit(_aten.ge.Scalar, x, low), emit(_aten.le.Scalar, x, high))
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor_of(x).element_size()]
    return emit(_aten.ne.Scalar, emit(_aten.view.dtype, x, width), 0)


@dataclass(frozen=True)
class GraphFacts:
    """What a graph's form of a codec may rest on.

    Attributes:
        limit: the value is an integer from 0 to ``limit - 1``; None if that is not proven.
    """

    dtype: torch.dtype
    limit: int | None = None


NO_FORM = "the codec's size depends on the data"


def _narrow(codec: Any, facts: GraphFacts) -> GraphCodec | str:
    if facts.dtype == torch.bool:
        return Bits()
    if facts.limit is None:
        return "nothing in the graph proves a range of these integers"
    integers = Integers(facts.limit)
    saves = integers.width < 8 * facts.dtype.itemsize
    return integers if saves else f"its range needs {integers.width} of {8 * facts.dtype.itemsize} bits"


def _singles(form: Callable[[Any], GraphCodec]) -> Callable[[Any, GraphFacts], GraphCodec | str]:
    def of(codec: Any, facts: GraphFacts) -> GraphCodec | str:
        return form(codec) if facts.dtype in SINGLES else f"it takes no {facts.dtype}"

    return of


FORMS: dict[type[Any], Callable[[Any, GraphFacts], GraphCodec | str]] = {
    Bitmask: lambda codec, facts: Sides(codec.mask),
    Narrow: _narrow,
    Minifloat: _singles(lambda codec: GraphMinifloat(codec.format, codec.group_size)),
    BlockQuant: _singles(
        lambda codec: GraphBlockQuant(codec.bits, codec.group_size, codec.rounding == "stochastic", codec.seed)
    ),
    FewBit: _singles(lambda codec: GraphFewBit(codec.function, codec.bits)),
}
"""The codecs that have a graph's form."""


def form_of(codec: Codec, facts: GraphFacts) -> GraphCodec | str:
    """The form of a codec in a graph, or the reason why there is none."""
    make = FORMS.get(type(codec))
    return NO_FORM if make is None else make(codec, facts)


@dataclass(frozen=True)
class Nothing:
    """For a value of which backward reads the sizes and strides only: no plane."""

    label: str = "shape"
    is_exact: bool = True

    def encode(self, emit: Emitter, x: GraphValue) -> tuple[GraphValue, ...]:
        """No plane."""
        return ()

    def decode(self, emit: Emitter, planes: Sequence[GraphValue], like: torch.Tensor) -> GraphValue:
        """A tensor of the same sizes, whose elements nobody has set."""
        return emit(_aten.empty.memory_format, list(like.shape), dtype=like.dtype, device=like.device, pin_memory=False)

    def nbytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        """None."""
        return 0


FORMS[Shape] = lambda codec, facts: Nothing()

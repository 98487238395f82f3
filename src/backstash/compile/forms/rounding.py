"""Codecs with an error as graphs of aten operators: small floating-point formats, integers in groups, derivatives.

Each rounds as the reference kernel of its codec does; tests compare the decoded bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from backstash.codecs.fewbit.table import TABLE
from backstash.codecs.minifloat.formats import FORMATS, LEAST_SCALE, Format, scale_ceiling
from backstash.compile.graph.emit import Emitter, GraphValue, product, sizes_of, tensor_of
from backstash.compile.graph.layout import (
    cast,
    clamp,
    constant,
    count_up,
    in_groups,
    out_of_groups,
    pack,
    packed_nbytes,
    unpack_bits,
)
from backstash.ops.layout import groups
from backstash.saved import cut_to

_aten = torch.ops.aten
_WORD = 0xFFFFFFFF
_EXPONENT = 0x7F800000  # of an infinity in float32


@dataclass(frozen=True)
class GraphMinifloat:
    """codecs.Minifloat: numbers of a small floating-point format, each group with a scale if ``group_size`` is not 0.

    fp10 takes 16 bits here instead of 32 for three.
    """

    format: str
    group_size: int
    is_exact: bool = False

    @property
    def label(self) -> str:
        """The format's name."""
        return self.format

    def encode(self, emit: Emitter, x: GraphValue) -> tuple[GraphValue, ...]:
        """The codes, and the scales if there are any."""
        form = FORMATS[self.format]
        negative = emit(_aten.lt.Scalar, emit(_aten.view.dtype, x, _signed(x)), 0)
        single = cast(emit, x, torch.float32)
        if not self.group_size:
            return (self._codes(emit, single, negative, form),)
        ceiling = scale_ceiling(form, tensor_of(x).dtype)
        clamped = clamp(emit, single, -ceiling, ceiling)
        magnitudes = emit(_aten.abs.default, clamped)
        is_finite = emit(_aten.lt.Scalar, emit(_aten.abs.default, single), math.inf)
        finite = emit(_aten.where.self, is_finite, magnitudes, constant(emit, 0.0, single))
        most = emit(_aten.amax.default, in_groups(emit, finite, self.group_size, 0.0), [1], True)
        scales = self._scales(emit, most, form)
        rows = in_groups(emit, emit(_aten.where.self, is_finite, clamped, single), self.group_size, 0.0)
        # The scale is a power of two, so the division by it is exact but for what becomes subnormal, which is tested
        # against the reference; an infinity or a NaN stays what it is.
        scaled = out_of_groups(emit, emit(_aten.div.Tensor, rows, scales), sizes_of(x))
        codes = self._codes(emit, scaled, negative, form)
        return codes, emit(_aten.view.default, scales, [sizes_of(scales)[0]])

    def decode(self, emit: Emitter, planes: Sequence[GraphValue], like: torch.Tensor) -> GraphValue:
        """The rounded numbers. A NaN is the quiet NaN without a payload."""
        form = FORMATS[self.format]
        codes = emit(_aten.bitwise_and.Scalar, cast(emit, planes[0], torch.int32), (1 << form.bits) - 1)
        magnitude = emit(_aten.bitwise_and.Scalar, codes, form.nan)
        shifted = emit(_aten.bitwise_left_shift.Tensor_Scalar, magnitude, 23 - form.mantissa)
        bits = emit(_aten.add.Scalar, shifted, (127 - form.bias) << 23)
        number = emit(_aten.view.dtype, bits, torch.float32)
        small = constant(emit, 0.0, number)
        if form.subnormals:
            fraction = cast(emit, emit(_aten.bitwise_and.Scalar, magnitude, (1 << form.mantissa) - 1), torch.float32)
            small = emit(_aten.mul.Scalar, fraction, 2.0 ** (1 - form.bias - form.mantissa))
        is_normal = emit(_aten.ge.Scalar, magnitude, 1 << form.mantissa)
        number = emit(_aten.where.self, is_normal, number, small)
        if self.group_size:
            rows = in_groups(emit, number, self.group_size, 0.0)
            scales = emit(_aten.unsqueeze.default, planes[1], 1)
            number = out_of_groups(emit, emit(_aten.mul.Tensor, rows, scales), sizes_of(number))
        for last, odd in ((form.top, math.inf), (form.infinity, math.nan)):
            is_odd = emit(_aten.gt.Scalar, magnitude, last)
            number = emit(_aten.where.self, is_odd, constant(emit, odd, number), number)
        negative = emit(_aten.ne.Tensor, magnitude, codes)
        number = emit(_aten.where.self, negative, emit(_aten.neg.default, number), number)
        return cast(emit, number, like.dtype)

    def nbytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        """The codes' bytes, and four for each scale."""
        total, wide = int(product(sizes)), 1 if FORMATS[self.format].bits == 8 else 2
        return total * wide + (4 * groups(total, self.group_size) if self.group_size else 0)

    def _codes(self, emit: Emitter, single: GraphValue, negative: GraphValue, form: Format) -> GraphValue:
        """Rounds float32 to codes."""
        bits = emit(_aten.bitwise_and.Scalar, emit(_aten.view.dtype, single, torch.int32), 0x7FFFFFFF)
        magnitude, drop = clamp(emit, bits, None, _EXPONENT), 23 - form.mantissa
        odd = emit(_aten.bitwise_and.Scalar, emit(_aten.bitwise_right_shift.Tensor_Scalar, magnitude, drop), 1)
        raised = emit(_aten.add.Tensor, emit(_aten.add.Scalar, magnitude, (1 << drop - 1) - 1), odd)
        code = emit(_aten.bitwise_right_shift.Tensor_Scalar, raised, drop)
        code = emit(_aten.sub.Scalar, code, (127 - form.bias) << form.mantissa)
        if form.subnormals:
            steps = emit(_aten.mul.Scalar, emit(_aten.abs.default, single), 2.0 ** (form.bias + form.mantissa - 1))
            whole = cast(emit, emit(_aten.round.default, clamp(emit, steps, None, 256.0)), torch.int32)
            code = emit(_aten.where.self, emit(_aten.lt.Scalar, steps, 2**form.mantissa), whole, code)
        zero = constant(emit, 0, code)
        code = emit(_aten.where.self, emit(_aten.lt.Scalar, code, form.least), zero, code)
        code = clamp(emit, code, None, form.top)
        for last, odd in ((_EXPONENT - 1, form.infinity), (_EXPONENT, form.nan)):
            is_odd = emit(_aten.gt.Scalar, bits, last)
            code = emit(_aten.where.self, is_odd, constant(emit, odd, code), code)
        sign = emit(_aten.bitwise_left_shift.Tensor_Scalar, cast(emit, negative, torch.int32), form.bits - 1)
        return cast(emit, emit(_aten.bitwise_or.Tensor, code, sign), torch.uint8 if form.bits == 8 else torch.int16)

    def _scales(self, emit: Emitter, most: GraphValue, form: Format) -> GraphValue:
        """The least power of two that makes ``most`` fit the format, but LEAST_SCALE at least."""
        # most / largest = f * 2**e with f in [0.5, 1) has the scale 2**e, or 2**(e - 1) where f is 0.5. With largest
        # = m * 2**k, that is the exponent of ``most`` less k, one more where its mantissa is above m.
        mantissa, power = math.frexp(form.largest)
        bits = emit(_aten.view.dtype, most, torch.int32)
        above = emit(_aten.gt.Scalar, emit(_aten.bitwise_and.Scalar, bits, 0x7FFFFF), int((2 * mantissa - 1) * 2**23))
        exponent = emit(_aten.bitwise_right_shift.Tensor_Scalar, bits, 23)
        biased = emit(_aten.add.Tensor, emit(_aten.sub.Scalar, exponent, power - 1), cast(emit, above, torch.int32))
        least = 127 + int(math.log2(LEAST_SCALE))
        kept = clamp(emit, biased, least, None)
        return emit(_aten.view.dtype, emit(_aten.bitwise_left_shift.Tensor_Scalar, kept, 23), torch.float32)


@dataclass(frozen=True)
class GraphBlockQuant:
    """codecs.BlockQuant: integers of few bits between the extremes of each group.

    A graph cannot refuse an element that is infinite or NaN. No element of its group is decoded to a finite number, so
    that the gradient shows it.
    """

    bits: int
    group_size: int
    stochastic: bool
    seed: int
    is_exact: bool = False

    @property
    def label(self) -> str:
        """With the bits."""
        return f"blockquant{self.bits}"

    def encode(self, emit: Emitter, x: GraphValue) -> tuple[GraphValue, ...]:
        """The codes, each group's smallest element, and its largest."""
        single = cast(emit, x, torch.float32)
        # A NaN is an extreme of its group, and an infinity makes the range infinite.
        low = self._extreme(emit, single, math.inf, _aten.amin.default)
        high = self._extreme(emit, single, -math.inf, _aten.amax.default)
        span = emit(_aten.sub.Tensor, high, low)
        positive = emit(_aten.gt.Scalar, span, 0)
        divisor = emit(_aten.where.self, positive, span, constant(emit, 1.0, span))
        rows = in_groups(emit, single, self.group_size, 0.0)
        steps = emit(_aten.div.Tensor, emit(_aten.sub.Tensor, rows, low), divisor)
        steps = emit(_aten.mul.Scalar, steps, float(2**self.bits - 1))
        if self.stochastic:
            steps = emit(_aten.add.Tensor, steps, self._uniform(emit, low, high, rows))
        else:
            steps = emit(_aten.add.Scalar, steps, 0.5)
        levels = clamp(emit, emit(_aten.floor.default, steps), 0.0, float(2**self.bits - 1))
        broken = emit(_aten.ne.Tensor, levels, levels)
        levels = emit(_aten.where.self, broken, constant(emit, 0.0, levels), levels)
        codes = pack(emit, cast(emit, levels, torch.uint8), self.bits)
        dtype = tensor_of(x).dtype
        return codes, *(cast(emit, emit(_aten.view.default, row, [sizes_of(row)[0]]), dtype) for row in (low, high))

    def decode(self, emit: Emitter, planes: Sequence[GraphValue], like: torch.Tensor) -> GraphValue:
        """Every element at the step that it was rounded to."""
        low, high = (emit(_aten.unsqueeze.default, cast(emit, plane, torch.float32), 1) for plane in planes[1:])
        codes = unpack_bits(emit, planes[0], self.bits, [sizes_of(low)[0], self.group_size])
        unit = cut_to(1 / (2**self.bits - 1), torch.float32)
        share = emit(_aten.mul.Scalar, cast(emit, codes, torch.float32), unit)
        rows = emit(_aten.mul.Tensor, share, emit(_aten.sub.Tensor, high, low))
        rows = emit(_aten.add.Tensor, rows, low)
        return cast(emit, out_of_groups(emit, rows, list(like.shape)), like.dtype)

    def nbytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        """The codes of whole groups, and two elements for each group."""
        count = groups(int(product(sizes)), self.group_size)
        return count * (self.group_size * self.bits // 8 + 2 * dtype.itemsize)

    def _extreme(self, emit: Emitter, single: GraphValue, fill: float, of: Any) -> GraphValue:
        """Each group's extreme [groups, 1], in which -0.0 is 0.0."""
        return emit(_aten.add.Scalar, emit(of, in_groups(emit, single, self.group_size, fill), [1], True), 0.0)

    def _uniform(self, emit: Emitter, low: GraphValue, high: GraphValue, rows: GraphValue) -> GraphValue:
        """A number from 0 up to 1 for each element, from a hash of the seed, the extremes and the index."""

        def word(x: GraphValue) -> GraphValue:
            wide = cast(emit, emit(_aten.view.dtype, x, torch.int32), torch.int64)
            return emit(_aten.bitwise_and.Scalar, wide, _WORD)

        def folded(x: GraphValue, shift: int) -> GraphValue:
            return emit(_aten.bitwise_xor.Tensor, x, emit(_aten.bitwise_right_shift.Tensor_Scalar, x, shift))

        def times(x: GraphValue, factor: int) -> GraphValue:
            return emit(_aten.bitwise_and.Scalar, emit(_aten.mul.Scalar, x, factor), _WORD)

        def mixed(x: GraphValue) -> GraphValue:
            return folded(times(folded(times(folded(x, 16), 0x7FEB352D), 15), 0x846CA68B), 16)

        count, group_size = sizes_of(rows)
        first = mixed(emit(_aten.bitwise_xor.Scalar, word(low), self.seed))
        second = mixed(emit(_aten.bitwise_xor.Tensor, first, word(high)))
        index = emit(_aten.view.default, count_up(emit, count * group_size, rows, torch.int64), [count, group_size])
        found = emit(_aten.bitwise_xor.Tensor, emit(_aten.bitwise_and.Scalar, index, _WORD), first)
        found = folded(times(folded(found, 16), 0x7FEB352D), 15)
        above = emit(_aten.bitwise_right_shift.Tensor_Scalar, index, 32)
        second = emit(_aten.bitwise_and.Scalar, emit(_aten.add.Tensor, second, above), _WORD)
        found = folded(times(emit(_aten.bitwise_xor.Tensor, found, second), 0x846CA68B), 16)
        top = emit(_aten.bitwise_right_shift.Tensor_Scalar, found, 8)
        return emit(_aten.mul.Scalar, cast(emit, top, torch.float32), 2.0**-24)


@dataclass(frozen=True)
class GraphFewBit:
    """codecs.FewBit: in which interval of nearly constant derivative each element is.

    A graph cannot refuse an element that is infinite or NaN. If there is one, all of the value is decoded to NaN, so
    that the gradient shows it.
    """

    function: str
    bits: int
    is_exact: bool = False

    @property
    def label(self) -> str:
        """The function and the bits."""
        return f"{self.function}{self.bits}"

    @property
    def width(self) -> int:
        """Bits that a code takes: three take four."""
        return 4 if self.bits == 3 else self.bits

    def encode(self, emit: Emitter, x: GraphValue) -> tuple[GraphValue, ...]:
        """The codes, and whether all elements are finite, a float32."""
        single = cast(emit, x, torch.float32)
        code = constant(emit, 0, single, torch.uint8)
        for bound in TABLE[self.function, self.bits][0]:
            code = emit(_aten.add.Tensor, code, cast(emit, emit(_aten.gt.Scalar, single, bound), torch.uint8))
        finite = emit(_aten.lt.Scalar, emit(_aten.abs.default, single), math.inf)
        code = emit(_aten.where.self, finite, code, constant(emit, 0, code))
        all_finite = emit(_aten.amin.default, cast(emit, finite, torch.float32), [], False)
        return pack(emit, code, self.width), all_finite

    def decode(self, emit: Emitter, planes: Sequence[GraphValue], like: torch.Tensor) -> GraphValue:
        """The number that stands for each interval, or NaN."""
        codes = unpack_bits(emit, planes[0], self.width, list(like.shape))
        points = TABLE[self.function, self.bits][1]
        found = constant(emit, points[0], codes, like.dtype)
        for code, point in enumerate(points[1:], 1):
            is_code = emit(_aten.ge.Scalar, codes, code)
            found = emit(_aten.where.self, is_code, constant(emit, point, codes, like.dtype), found)
        is_finite = emit(_aten.gt.Scalar, planes[1], 0.0)
        return emit(_aten.where.self, is_finite, found, constant(emit, math.nan, codes, like.dtype))

    def nbytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        """The codes, and four bytes."""
        return packed_nbytes(sizes, self.width) + 4


def _signed(x: GraphValue) -> torch.dtype:
    """The signed integers of an element's size, whose sign is the element's."""
    return {2: torch.int16, 4: torch.int32}[tensor_of(x).element_size()]

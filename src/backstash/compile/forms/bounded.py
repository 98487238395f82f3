"""Values of a graph that are held within a bound: which may be, the facts for the policy, and codecs.Szp for them.

In a graph Szp has a fixed width: multiples of a step that the graph reads from outside, in few bits each.

Note: [bounds in a graph]
    The bound is no constant of the graph. An operator (:mod:`~backstash.compile.forms.bounds`) hands the step to the
    graph in each forward pass, so a policy that moves its bounds needs no compilation. A graph has fixed shapes, so the
    width cannot follow the bound: each block of 128 neighbours in memory has a step of its own, which is the one that
    the bound asks for wherever the block's codes fit the width, and as much coarser as they need where they do not.
    Nothing overflows, and how far the coarsest block may be off is noted in each step, for the report.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from backstash.compile.forms.bounds import (
    BLOCK,
    BoundedValue,
    as_layer,
    blocks_nbytes,
    emit_coarsest,
    emit_step,
    facts_of,
)
from backstash.compile.graph.emit import Emitter, GraphValue, product, sizes_of, tensor_of
from backstash.compile.graph.layers import Layer, layer_of_split
from backstash.compile.graph.layout import (
    cast,
    clamp,
    constant,
    in_groups,
    memory_order,
    out_of_groups,
    pack,
    unpack_bits,
)
from backstash.compile.graph.reading import TESTS, Reader
from backstash.compile.graph.values import SavedValue, Split
from backstash.policies.base import Policy
from backstash.saved import Need, SavedTensor

_aten = torch.ops.aten

BITS = (4, 8)
"""The widths of the codes of a value that is held within a bound."""

_SPARE = 4
"""Codes of a width that a block's range may not take: those of zero and of the quarters of a step, and a rounding."""

_MOST_STEPS = 2.0**13
"""A magnitude has no more steps than this. So what float32 rounds stays within the share of a step that Szp spares for
it, and an offset fits int16."""

_LEAST = {torch.float16: 2.0**-22}
"""The smallest step, of which a quarter is still a number of the dtype."""


@dataclass(frozen=True)
class GraphSzp:
    """codecs.Szp with a width for the whole value.

    As there, zeros stay zero, what is not zero does not become it and keeps its sign, and steps of the 16-bit dtypes
    are powers of two. No element of a block that holds an infinity or a NaN is decoded to a finite number, zeros aside.

    Attributes:
        bits: 4 or 8.
        place: where the step comes from.
    """

    bits: int
    place: BoundedValue
    is_exact: bool = False

    @property
    def label(self) -> str:
        """With the bits."""
        return f"szp{self.bits}"

    def encode(self, emit: Emitter, x: GraphValue) -> tuple[GraphValue, ...]:
        """The codes, and each block's offset and step."""
        wanted = emit_step(emit, x, self.place)
        single = cast(emit, x, torch.float32)
        low = emit(_aten.amin.default, in_groups(emit, single, BLOCK, math.inf), [1], True)
        high = emit(_aten.amax.default, in_groups(emit, single, BLOCK, -math.inf), [1], True)
        step = self._steps(emit, low, high, wanted, tensor_of(x).dtype)
        emit_coarsest(emit, wanted, emit(_aten.amax.default, step, [0, 1]), self.place)
        offset = self._codes(emit, low, step)
        codes = emit(_aten.sub.Tensor, self._codes(emit, in_groups(emit, single, BLOCK, 0.0), step), offset)
        codes = clamp(emit, codes, 0.0, float(2**self.bits - 1))  # what fills up the last block is cut off
        count = sizes_of(low)[0]
        planes = pack(emit, cast(emit, codes, torch.uint8), self.bits), cast(emit, offset, torch.int16), step
        return planes[0], *(emit(_aten.view.default, plane, [count]) for plane in planes[1:])

    def decode(self, emit: Emitter, planes: Sequence[GraphValue], like: torch.Tensor) -> GraphValue:
        """Every element at its multiple."""
        count = sizes_of(planes[1])[0]
        offset, step = (emit(_aten.unsqueeze.default, plane, 1) for plane in planes[1:])
        codes = cast(emit, unpack_bits(emit, planes[0], self.bits, [count, BLOCK]), torch.float32)
        codes = emit(_aten.add.Tensor, codes, cast(emit, offset, torch.float32))
        magnitude = emit(_aten.sub.Scalar, emit(_aten.abs.default, codes), 1.0)
        near = emit(_aten.eq.Scalar, magnitude, 0.0)
        magnitude = emit(_aten.where.self, near, constant(emit, 0.25, magnitude), magnitude)
        zero = emit(_aten.eq.Scalar, codes, 0.0)
        sign = emit(
            _aten.where.self, emit(_aten.lt.Scalar, codes, 0.0), *(constant(emit, s, codes) for s in (-1.0, 1.0))
        )
        rows = emit(_aten.mul.Tensor, emit(_aten.mul.Tensor, magnitude, sign), step)
        rows = emit(_aten.where.self, zero, constant(emit, 0.0, rows), rows)
        return cast(emit, out_of_groups(emit, rows, list(like.shape)), like.dtype)

    def nbytes(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        """The codes of whole blocks, and six bytes for each block."""
        return blocks_nbytes(int(product(sizes)), self.bits)

    def _steps(
        self, emit: Emitter, low: GraphValue, high: GraphValue, wanted: GraphValue, dtype: torch.dtype
    ) -> GraphValue:
        """The step of each block [blocks, 1]."""
        span = emit(_aten.mul.Scalar, emit(_aten.sub.Tensor, high, low), 1.0 / (2**self.bits - _SPARE))
        largest = emit(_aten.maximum.default, emit(_aten.abs.default, low), emit(_aten.abs.default, high))
        step = emit(_aten.maximum.default, span, emit(_aten.mul.Scalar, largest, 1.0 / _MOST_STEPS))
        step = emit(_aten.maximum.default, step, wanted)
        step = clamp(emit, step, _LEAST.get(dtype, 2.0**-120), None)
        if dtype == torch.float32:
            return step
        # Rounded up to a power of two; the one that is wanted is a power of two already.
        bits = emit(_aten.add.Scalar, emit(_aten.view.dtype, step, torch.int32), 0x7FFFFF)
        power = emit(_aten.view.dtype, emit(_aten.bitwise_and.Scalar, bits, 0x7F800000), torch.float32)
        return emit(_aten.where.self, emit(_aten.lt.Scalar, step, math.inf), power, step)

    def _codes(self, emit: Emitter, x: GraphValue, step: GraphValue) -> GraphValue:
        """Steps of each element, one more away from zero than Szp has, so that 0 is left for zero; float32."""
        steps = emit(_aten.round.default, emit(_aten.div.Tensor, emit(_aten.abs.default, x), step))
        magnitude = emit(_aten.add.Scalar, steps, 1.0)
        broken = emit(_aten.ne.Tensor, magnitude, magnitude)
        magnitude = emit(_aten.where.self, broken, constant(emit, 1.0, magnitude), magnitude)
        negative = emit(_aten.lt.Scalar, x, 0.0)
        codes = emit(_aten.where.self, negative, emit(_aten.neg.default, magnitude), magnitude)
        zero = emit(_aten.eq.Scalar, x, 0.0)
        return emit(_aten.where.self, zero, constant(emit, 0.0, codes), codes)


@dataclass
class Bounding:
    """Gives the values of one graph that are held within bounds their places.

    Attributes:
        policy: is asked.
        loop: the name of the Loop that the graph asks.
    """

    policy: Policy
    loop: str
    graph: str
    bits: int
    split: Split
    _numbers: Counter[tuple[str, str]] = field(default_factory=Counter)

    def named(self, readers: Sequence[Reader], facts: list[SavedTensor]) -> tuple[list[SavedTensor], dict[int, Layer]]:
        """The readers as a Session names them where the policy may bound what they read, and their layers by number.

        Args:
            readers: those of one value.
            facts: what each of them reads, named by the operators of the backward graph.
        """
        found = {number: layer_of_split(self.split, reader) for number, reader in enumerate(readers)}
        layers = {number: layer for number, layer in found.items() if layer is not None}
        # The outcome of a comparison is stored beside a rounded value, so it reads no more than a bit of each element.
        tests = [reader.node.target in TESTS for reader in readers]
        named = [replace(fact, need=Need.SIGN) if test else fact for fact, test in zip(facts, tests, strict=True)]
        for number, layer in layers.items():
            place = layer.path, layer.kind
            named[number] = as_layer(facts[number], layer, self._numbers[place])
            self._numbers[place] += 1
        return (named, layers) if layers and self.policy.may_bound(named) else (facts, {})

    def form(
        self,
        saved: SavedTensor,
        readers: Sequence[SavedTensor],
        layers: dict[int, Layer],
        value: SavedValue,
        comparisons: int,
    ) -> GraphSzp:
        """The codec for a value within a bound, beside which so many outcomes of comparisons are saved."""
        order = memory_order(value.tensor) or ()
        facts = facts_of(saved, readers, list(layers.items()), order, self.bits, comparisons)
        weights = tuple(layer.weight for layer in layers.values())
        return GraphSzp(self.bits, BoundedValue(self.loop, self.graph, facts.text(), weights))

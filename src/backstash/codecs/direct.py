"""Forms in which a backward kernel can read a codec's planes without decoding them.

A kernel asks for the form that it can read (``stashed.direct(MaskBits)``), and a codec whose planes are in that form
says how to take them out of an :class:`~backstash.codecs.base.Encoded` (``codec.direct(MaskBits)``, see
:mod:`backstash.codecs.base`). So neither knows the other, and a codec of your own can serve the kernels as well.

| form | which codecs here | which nodes read it |
| --- | --- | --- |
| MaskBits | Bitmask, Narrow of bools | Relu, Threshold, Hardtanh, NativeDropout |
| Slopes | Bitmask, FewBit | LeakyRelu, Gelu, Silu, Elu, Tanh, Sigmoid, Softplus |
| Factors | Binary | Mul, such as dropout's |
| WindowOffsets | Narrow with a window | MaxPool2DWithIndices |
| Slices | Sliced | Convolution |

Elements are numbered in memory order everywhere, ``n`` is their number, and every tensor is on the device of the one
that was encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

Geometry = tuple[int, list[int], list[int], list[int], list[int], list[int], list[int]]
"""Elements between spatial neighbours in memory; input size, output size, kernel, stride, padding, dilation."""


class Direct:
    """Any of the forms below."""

    __slots__ = ()


Readable = TypeVar("Readable", bound=Direct)
"""The form that a kernel asks for."""


@dataclass(frozen=True, slots=True)
class MaskBits(Direct):
    """The outcome of the codec's own ``mask`` for each element; the kernel keeps the gradient where the bit is set.

    Attributes:
        bits: uint8 [ceil(n / 8)]; element ``i`` is bit ``i % 8`` of byte ``i // 8``.
    """

    bits: Tensor


@dataclass(frozen=True, slots=True)
class Slopes(Direct):
    """For each element a code, and for each code a number at which the kernel computes the derivative.

    Attributes:
        packed: uint8 [ceil(n * b / 8)], a little-endian stream of codes of ``b`` = 1, 2, 3 or 4 bits.
        points: [2**b], of the encoded tensor's dtype, on the CPU.
    """

    packed: Tensor
    points: Tensor


@dataclass(frozen=True, slots=True)
class Factors(Direct):
    """For each element a code, and for each code the very number that was encoded.

    Attributes:
        packed: uint8 [ceil(n * b / 8)], a little-endian stream of codes of ``b`` = 1, 2, 3 or 4 bits.
        values: [2**b], of the encoded tensor's dtype.
    """

    packed: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class WindowOffsets(Direct):
    """For each index of a max pooling its row-major position in the pooling's window.

    Attributes:
        packed: uint8 [ceil(n * b / 8)], a little-endian stream of positions, each in the ``b`` bits that the largest
            position of the kernel takes.
        geometry: how the windows lie over the input.
    """

    packed: Tensor
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class Slices(Direct):
    """Slices of the first dimension that can be decoded one at a time.

    Attributes:
        ranges: of each slice the first sample and the one behind the last; together they cover the batch in order.
        decode: returns the slice with that number, in memory of its own.
    """

    ranges: Sequence[tuple[int, int]]
    decode: Callable[[int], Tensor]

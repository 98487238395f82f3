"""The small floating-point formats that codes of ``minifloat`` are in: a sign bit, exponent bits, mantissa bits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Format:
    """A small floating-point format. ``codecs/minifloat/reference.py`` says how a number is rounded to it.

    Attributes:
        name: what users call it.
        code: the integer that the C++ kernels know it by.
        exponent, mantissa: numbers of bits.
        bias: the bias of the exponent.
        top: the code of the largest magnitude, without the sign. The code after it is infinity, and larger ones are
            NaN.
        subnormals: whether it has numbers below its smallest normal number. If not, an exponent field of 0 is zero.
        dtype: the dtype of a plane of codes.
        fields: codes in an element of such a plane, the first one lowest.
    """

    name: str
    code: int
    exponent: int
    mantissa: int
    bias: int
    top: int
    subnormals: bool
    dtype: torch.dtype
    fields: int = 1

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return 1 + self.exponent + self.mantissa

    @property
    def infinity(self) -> int:
        """The code of infinity, without its sign."""
        return self.top + 1

    @property
    def nan(self) -> int:
        """The code that a NaN gets, without its sign: all ones."""
        return (1 << (self.exponent + self.mantissa)) - 1

    @property
    def least(self) -> int:
        """The code of the smallest magnitude that is not zero."""
        return 1 if self.subnormals else 1 << self.mantissa

    @property
    def smallest_normal(self) -> float:
        """The smallest magnitude that has all mantissa bits."""
        return math.ldexp(1.0, 1 - self.bias)

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        fraction = self.top & ((1 << self.mantissa) - 1)
        return math.ldexp(2**self.mantissa + fraction, (self.top >> self.mantissa) - self.bias - self.mantissa)

    def words(self, numel: int) -> int:
        """Returns the number of elements of a plane of ``numel`` codes."""
        return -(-numel // self.fields)


FORMATS = {
    format.name: format
    for format in (
        Format("fp8", 0, 4, 3, 7, 0x7D, False, torch.uint8),
        Format("fp10", 1, 5, 4, 15, 0x1EF, False, torch.int32, fields=3),
        Format("fp16", 2, 5, 10, 15, 0x7BFF, False, torch.int16),
        Format("float8_e4m3fn", 3, 4, 3, 7, 0x7D, True, torch.uint8),
        Format("float8_e5m2", 4, 5, 2, 15, 0x7B, True, torch.uint8),
        Format("bfloat16", 5, 8, 7, 127, 0x7F7F, True, torch.int16),
    )
}
"""All formats by their names."""

SCALED = ("float8_e4m3fn", "float8_e5m2")
"""The names of the formats whose groups may share a scale."""

LEAST_SCALE = 2.0**-126
"""The smallest scale: its reciprocal is a normal number of float32, too."""


def scale_ceiling(form: Format, dtype: torch.dtype) -> float:
    """Returns the largest finite number of ``dtype`` with no more mantissa bits than ``form`` has.

    Finite magnitudes above it count as it before they are scaled, so that none is decoded to an infinity.
    """
    kept = 2 - 2.0**-form.mantissa
    return kept * (2.0**15 if dtype == torch.float16 else 2.0**127)

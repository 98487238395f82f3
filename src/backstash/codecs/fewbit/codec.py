"""A few bits per element for an activation whose backward reads its input only through a derivative."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from backstash.arguments import check_word
from backstash.codecs.base import (
    Draft,
    Encoded,
    ErrorBound,
    ReadPlanes,
    certain,
    check_planes,
    flat,
    like,
    refuses_singles,
    require_accepted,
    taken,
)
from backstash.codecs.direct import Direct, Slopes
from backstash.codecs.fewbit.table import TABLE
from backstash.ops import bytes_for
from backstash.ops.registration import ops
from backstash.saved import Need, TensorSpec

BITS = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class SlopedFunction:
    """A function, and what its backward reads (needs.FUNCTIONS tells which node that is).

    Attributes:
        saved: from the input to what is saved: the input itself, or the result.
        slope: the derivative at the input, from what is saved; for float64.
    """

    saved: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


def _itself(x: Tensor) -> Tensor:
    return x


def _gelu_slope(x: Tensor) -> Tensor:
    density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    below: Tensor = torch.special.ndtr(x)
    return below + x * density


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(scale * (x + cubic * x**3))
    return (1 + t) / 2 + x * (1 - t * t) / 2 * scale * (1 + 3 * cubic * x * x)


def _silu_slope(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


ACTIVATIONS = {
    "gelu": SlopedFunction(_itself, _gelu_slope),
    "gelu_tanh": SlopedFunction(_itself, _gelu_tanh_slope),
    "silu": SlopedFunction(_itself, _silu_slope),
    "elu": SlopedFunction(_itself, lambda x: torch.exp(x.clamp(max=0))),
    "elu_": SlopedFunction(torch.nn.functional.elu, lambda y: y.clamp(max=0) + 1),
    "tanh": SlopedFunction(torch.tanh, lambda y: 1 - y * y),
    "sigmoid": SlopedFunction(torch.sigmoid, lambda y: y * (1 - y)),
    "softplus": SlopedFunction(_itself, torch.sigmoid),
}
"""The functions that there are tables for. ``elu_`` is elu in place, whose node saves the result."""


@dataclass(frozen=True, slots=True)
class DerivativeError:
    """How far the derivative of what is decoded is from the derivative of the original.

    Attributes:
        max: over all inputs.
        rms: root of the mean square, over standard normal inputs.
    """

    max: float
    rms: float


@dataclass(frozen=True)
class FewBit:
    """Stores in which of 2**bits intervals an element is, chosen so that the derivative there is almost constant.

    Serves one function's backward and no other reader; `serves` says which, and a Session asks it. Decoded is a number
    of the same dtype whose derivative is the interval's mean; as a value it means nothing, so ``bound`` is infinite,
    and `derivative_error` says how far the derivative is off.

    Preserves: SHAPE, VALUE - as far as the derivative of ``function`` reads it.
    Layout: plane ``packed`` uint8 [ceil(n * bits / 8)], a little-endian bit stream, per element in memory order how
        many of the bounds between the intervals (`fewbit_table.TABLE`) it exceeds; -0.0 is 0.0.
    Bytes: ceil(n * bits / 8).
    Determinism: the same planes on every backend.
    Source: Few-bit Backward (ICML 2023, arXiv 2202.00441), section 3, "Optimal quantization": intervals that minimise
        the mean square error of a piecewise constant derivative, by dynamic programming. Theirs is an autograd function
        in the place of each activation; ours decodes to an input at which torch's own backward gives that constant, so
        the model does not change. Ours weighs errors by a standard normal input.

    Args:
        function: one of gelu, gelu_tanh, silu, elu, elu_ (in place), tanh, sigmoid, softplus.
        bits: 1 to 4.

    Raises:
        ValueError: another function, or other bits.
        CodecRefusedError: on encode, an element is infinite or NaN: its derivative is no interval's.

    Example:
        >>> x = torch.tensor([-9.0, -1.0, 0.0, 1.0, 9.0])
        >>> codec = FewBit("gelu", bits=3)
        >>> codec.label, codec.encode(x).nbytes, round(codec.derivative_error.rms, 3)
        ('gelu3', 2, 0.044)
    """

    function: str = "gelu"
    bits: int = 3

    id: ClassVar[str] = "fewbit"
    preserves: ClassVar[frozenset[Need]] = frozenset({Need.SHAPE, Need.VALUE})
    bound: ClassVar[ErrorBound | None] = ErrorBound(abs=math.inf)

    def __post_init__(self) -> None:
        check_word(self.function, "function", "FewBit", "gelu")
        if self.function not in ACTIVATIONS:
            raise ValueError(
                f"FewBit was asked for the function {self.function!r}, but there are tables for "
                f"{', '.join(ACTIVATIONS)}. Choose one of these, or another codec."
            )
        if self.bits not in BITS:
            raise ValueError(f"FewBit was asked for {self.bits!r} bits, but the choices are 1, 2, 3 and 4.")

    @property
    def label(self) -> str:
        """The function and the bits: ``"gelu3"``."""
        return f"{self.function}{self.bits}"

    @property
    def serves(self) -> frozenset[str]:
        """The one function (``SavedTensor.function``) whose derivative the codes stand for."""
        return frozenset({self.function})

    @property
    def derivative_error(self) -> DerivativeError:
        """The error of the derivative, measured on a fine grid of inputs."""
        return _derivative_error(self.function, self.bits)

    def direct(self, form: type[Direct]) -> ReadPlanes | None:
        """Offers the codes, and for each the number that it is decoded to."""
        return self._slopes if form is Slopes else None

    def _slopes(self, encoded: Encoded) -> Slopes:
        points = torch.tensor(TABLE[self.function, self.bits][1], dtype=encoded.spec.dtype, device="cpu")
        return Slopes(encoded.planes["packed"], points)

    def accepts(self, spec: TensorSpec) -> str | None:
        """Accepts dense float32, bfloat16 and float16 tensors."""
        return refuses_singles(spec)

    def declines(self, x: Tensor) -> str | None:
        """Declines nothing."""
        return None

    def encode(self, x: Tensor) -> Encoded:
        """Compares each element with up to 15 bounds."""
        return certain(self.draft(x))

    def draft(self, x: Tensor, known: object = True) -> Draft:
        """As ``encode``, without a wait to know whether all is finite."""
        spec = require_accepted(self, x)
        packed, nonfinite = ops.fewbit_encode(flat(x), list(TABLE[self.function, self.bits][0]), self.bits)
        encoded = Encoded(self.id, spec, {"packed": packed})
        return Draft(encoded, nonfinite, lambda numbers: taken(self._refusal(spec, numbers[0])))

    def known(self, encoded: Encoded) -> object:
        """That it was taken."""
        return True

    def _refusal(self, spec: TensorSpec, nonfinite: int) -> str | None:
        if not nonfinite:
            return None
        return (
            f"codec 'fewbit' was asked to encode {spec} for the derivative of {self.function}, got {nonfinite} "
            f"infinite or NaN elements. Use Keep()."
        )

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """Of each element's interval, the number whose derivative stands for the interval's.

        Raises:
            DamagedPlanesError: the plane is too short or too long.
        """
        check_planes(encoded, {"packed": bytes_for(encoded.spec.numel, self.bits)})
        out = like(encoded.spec, out)
        ops.fewbit_decode(encoded.planes["packed"], list(TABLE[self.function, self.bits][1]), self.bits, flat(out))
        return out

    def nbytes_bound(self, spec: TensorSpec) -> int:
        """``bits`` per element."""
        return bytes_for(spec.numel, self.bits)


def grid(cells: int) -> tuple[Tensor, Tensor]:
    """Inputs by which intervals are chosen and errors measured.

    Args:
        cells: how many there are between two integers.

    Returns:
        The middles of the cells from -10 to 10, float64; the share of standard normal inputs in each cell, tails
        included.
    """
    bounds = torch.arange(-10 * cells, 10 * cells + 1, dtype=torch.float64) / cells
    shares = torch.special.ndtr(bounds)
    shares[0], shares[-1] = 0.0, 1.0
    return (bounds[1:] + bounds[:-1]) / 2, shares.diff()


@cache
def _derivative_error(function: str, bits: int) -> DerivativeError:
    activation = ACTIVATIONS[function]
    thresholds, values = (torch.tensor(numbers, dtype=torch.float64) for numbers in TABLE[function, bits])

    def errors(x: Tensor, right: bool = False) -> Tensor:
        saved = activation.saved(x)
        return activation.slope(values[torch.bucketize(saved, thresholds, right=right)]) - activation.slope(saved)

    x, shares = grid(2048)
    everywhere = torch.arange(-4096, 4097, dtype=torch.float64) / 128  # the bounds between intervals are among these
    largest = max(float(errors(everywhere, right).abs().max()) for right in (False, True))
    return DerivativeError(largest, float((errors(x).square() * shares).sum().sqrt()))

"""What is known of a saved tensor without holding it: TensorSpec, Need, Mask, SavedTensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""The tensor types that are looked at; other subclasses are kept."""


def is_odd(x: torch.Tensor) -> bool:
    """Whether the tensor is one that no codec handles: quantized, lazily conjugated or negated, or without memory."""
    return x.is_quantized or x.is_conj() or x.is_neg() or x.device.type == "meta" or x.is_nested


class Need(Enum):
    """What a backward formula really reads of a saved tensor.

    The order is strength: whoever has the ``VALUE`` can serve every other need.
    """

    SHAPE = 1  # sizes, strides, dtype and device only
    SIGN = 2  # which side of a threshold each element is on (see Mask)
    INDEX = 3  # integers that point into another tensor
    VALUE = 4  # every bit

    def __repr__(self) -> str:
        return self.name


class Test(Enum):
    """An elementwise test, written as the backward kernels write it, so that NaN falls on the same side.

    ``lo`` and ``hi`` are rounded to the tensor's dtype first, as the kernels do.
    """

    NOT_LE = "not_le"  # not (x <= lo)               relu, threshold
    GT = "gt"  # x > lo                              leaky_relu
    INSIDE = "inside"  # lo < x and x < hi           hardsigmoid
    NOT_OUTSIDE = "not_outside"  # not (x <= lo or x >= hi)  hardtanh
    CLOSED = "closed"  # lo <= x and x <= hi         clamp, hardshrink, softshrink
    NONZERO = "nonzero"  # any bit is set: -0.0 and NaN count

    __test__ = False  # a name that pytest would collect

    def __repr__(self) -> str:
        return f"Test.{self.name}"

    @property
    def code(self) -> int:
        """The integer that the kernels know this test by."""
        return _TEST_CODES[self]


_TEST_CODES = {test: code for code, test in enumerate(Test)}


@dataclass(frozen=True, slots=True)
class Mask:
    """The sign information that a backward formula reads: one bit per element.

    Args:
        test: the elementwise test whose outcome is the bit.
        lo, hi: the bounds of the test.
        if_set: a value that stands in for every element that passes: the formula treats it the same.
        if_clear: the stand-in for every other element.
        ternary: the formula reads ``sign(x)``: a second bit tells negative elements, whose stand-in is -1.
        nan: the kernel treats a NaN as passing or not by its position (Note: [NaN by position]), so NaN stays NaN.
    """

    test: Test
    lo: float = 0.0
    hi: float = math.inf
    if_set: float = 1.0
    if_clear: float = 0.0
    ternary: bool = False
    nan: bool = False


@dataclass(frozen=True, slots=True)
class PoolWindow:
    """Geometry of a max pooling, by which an index is a position inside a window.

    Args:
        input_size, kernel, stride, padding, dilation: one entry per spatial dimension (1 to 3).
    """

    input_size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Everything about a tensor but its data.

    Attributes:
        shape: sizes.
        stride: strides in elements.
        dtype: element type.
        device: device.
        nbytes: bytes of its elements (``numel * itemsize``).
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int

    @classmethod
    def of(cls, x: torch.Tensor) -> TensorSpec:
        """The spec of ``x``; tensors that look the same have the same object, because training repeats itself."""
        index = x.shape, x.stride(), x.dtype, x.device
        known = _specs.get(index)
        if known is None:
            if len(_specs) >= _MOST_SPECS:
                _specs.clear()
            known = _specs[index] = cls(tuple(x.shape), x.stride(), x.dtype, x.device, x.numel() * x.element_size())
        return known

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


_specs: dict[tuple[Any, ...], TensorSpec] = {}
_MOST_SPECS = 4096


class Effect(Enum):
    """What a small error in a saved value does to the gradients that backward computes of it (see effects.py)."""

    UNKNOWN = "unknown"
    """Nothing is known, or the error is not bounded: the value divides, or is one number for many elements."""
    LINEAR = "linear"
    """The gradients are linear in the value: an error that is zero on average leaves them right on average."""
    NORMALISED = "normalised"
    """The same, but the error counts in units of its row's standard deviation, by which backward divides it."""
    SENSITIVE = "sensitive"
    """A curved function or a difference of nearly equal numbers makes more of the error: it has to be small."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Facts about one saved tensor; holds no tensor.

    Attributes:
        key: stable across steps, e.g. ``"features.3/ReLU#0:result"``: module path, autograd node, how many of
            that node this module call has made, and the name that the node's formula gives the tensor.
        op: name of the autograd node without its suffix, ``"Relu"``; ``"?"`` where the node is not known.
        role: the formula's name of the tensor: ``"self"``, ``"result"``, ``"weight"``, ...
        fqn: path of the module whose forward saved it, ``""`` outside modules.
        spec: its shape, strides, dtype and device.
        need: what backward reads of it.
        mask: which bit backward reads where ``need`` is ``SIGN``.
        window: geometry of the pooling that made the indices, where ``need`` is ``INDEX`` and it is known.
        function: the function of one variable whose derivative is all that backward reads the value for, by the name
            that codecs.FewBit has for it; None where there is none.
        effect: what a small error in it does to the gradients.
        row: how many neighbours in memory share their scale: one token's features, or what shares a norm's statistics;
            0 where that is not known.
    """

    key: str
    op: str
    role: str
    fqn: str
    spec: TensorSpec
    need: Need
    mask: Mask | None = None
    window: PoolWindow | None = None
    function: str | None = None
    effect: Effect = Effect.UNKNOWN
    row: int = 0

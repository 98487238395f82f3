"""Facts about a saved tensor, which hold no tensor: TensorSpec, Need, Mask, Effect, SavedTensor."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal, NamedTuple, TypeGuard

import torch

MIN_NBYTES = 16 << 10
"""Smaller tensors are kept, unless told otherwise."""

UNKNOWN_OP = "?"
"""In the place of an op, where no node was found that has saved a tensor: that of a compiled function, for example."""

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""The types of tensors that codecs may encode. Tensors of other subclasses are kept as they are."""


def is_tensor(x: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor of any class, and not an object that says so by its ``__class__``."""
    return issubclass(type(x), torch.Tensor)


def is_odd(x: torch.Tensor) -> bool:
    """Whether no codec handles the tensor: it is quantized, lazily conjugated or negated, nested, or has no memory.

    A zero tensor of forward-mode differentiation has a storage with a size, and no memory in it. A tensor that was made
    in inference mode has no version, so nobody could tell whether it was changed.
    """
    if x.is_quantized or x.is_conj() or x.is_neg() or x.is_meta or x.is_nested or x.is_inference():
        return True
    return x._is_zerotensor()


def owns_memory(x: torch.Tensor) -> bool:
    """Whether a tensor fills a storage that torch has allocated, and that no other process has mapped.

    Of all memory of CUDA torch says that it may be shared. To ask makes Python's object of the storage.
    """
    storage = x.untyped_storage()
    return storage.nbytes() == x.nbytes and storage.resizable() and not storage.is_shared()


class Need(Enum):
    """How much a backward formula really reads of a saved tensor.

    The needs are in the order of strength: the ``VALUE`` serves every other need as well.
    """

    SHAPE = 1  # sizes, strides, dtype and device only
    SIGN = 2  # which side of a threshold each element is on (see Mask)
    INDEX = 3  # integers that point into another tensor
    VALUE = 4  # every bit

    def __repr__(self) -> str:
        return self.name


class Test(Enum):
    """An elementwise test, written as the backward kernels write it, so that a NaN has the same outcome.

    ``lo`` and ``hi`` are rounded to the tensor's dtype first, as the kernels round them.
    """

    NOT_LE = "not_le"  # not (x <= lo)               relu, threshold
    GT = "gt"  # x > lo                              leaky_relu
    INSIDE = "inside"  # lo < x and x < hi           hardsigmoid
    NOT_OUTSIDE = "not_outside"  # not (x <= lo or x >= hi)  hardtanh
    CLOSED = "closed"  # lo <= x and x <= hi         clamp, hardshrink, softshrink
    NONZERO = "nonzero"  # any bit is set: -0.0 and NaN count

    __test__ = False  # or pytest would collect this class because of its name

    def __repr__(self) -> str:
        return f"Test.{self.name}"

    @property
    def code(self) -> int:
        """The integer that the kernels know this test by."""
        return _TEST_CODES[self]


_TEST_CODES = {test: code for code, test in enumerate(Test)}


@dataclass(frozen=True, slots=True)
class Mask:
    """The sign information that a backward formula reads: one bit per element, or two.

    Args:
        test: the elementwise test whose outcome is the bit.
        lo, hi: the bounds of the test.
        if_set: the stand-in for every element that passes the test. The formula treats it like the element.
        if_clear: the stand-in for every other element.
        ternary: whether the formula reads ``sign(x)``. A second bit then marks negative elements, whose stand-in is -1.
        nan: whether a kernel's outcome for NaN depends on its position (Note: [NaN by position]). NaN stays NaN then.
    """

    test: Test
    lo: float = 0.0
    hi: float = math.inf
    if_set: float = 1.0
    if_clear: float = 0.0
    ternary: bool = False
    nan: bool = False

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether the dtype can represent every bound exactly. Kernels differ in how they round other bounds."""
        return _fits(self, dtype)


@cache
def _fits(mask: Mask, dtype: torch.dtype) -> bool:
    bounds = [bound for bound in (mask.lo, mask.hi, mask.if_set, mask.if_clear) if math.isfinite(bound)]
    return dtype in _FORMATS and all(cut_to(bound, dtype) == bound for bound in bounds)


_FORMATS = {torch.float64: "d", torch.float32: "f", torch.bfloat16: "f", torch.float16: "e"}
"""By floating dtype, the format of the module struct that its numbers are packed in."""


def cut_to(number: float, dtype: torch.dtype) -> float:
    """A number that is cut to a dtype's precision: it is the number itself if and only if the dtype can hold it.

    No tensor is asked, because some callers run where every tensor is fake.
    """
    form = _FORMATS[dtype]
    try:
        packed = struct.pack("<" + form, number)
    except OverflowError:
        return math.inf
    if dtype == torch.bfloat16:
        packed = b"\0\0" + packed[2:]
    found: float = struct.unpack("<" + form, packed)[0]
    return found


@dataclass(frozen=True, slots=True)
class PoolWindow:
    """The geometry of a max pooling, by which an index becomes a position inside a window.

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
        shape: sizes of the dimensions.
        stride: strides of the dimensions, in elements.
        dtype: type of the elements.
        device: the tensor's device.
        nbytes: bytes of the elements (``numel * itemsize``).
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int

    @classmethod
    def of(cls, x: torch.Tensor) -> TensorSpec:
        """The spec of ``x``; tensors that look the same have the same object, because training repeats itself."""
        try:
            stride = x.stride()
        except RuntimeError:  # of a compressed sparse layout
            stride = ()
        index = x.shape, stride, x.dtype, x.device
        known = _specs.get(index)
        if known is None:
            if len(_specs) >= _MOST_SPECS:
                _specs.clear()
            known = _specs[index] = cls(tuple(x.shape), stride, x.dtype, x.device, x.numel() * x.element_size())
        return known

    def describes(self, x: torch.Tensor) -> bool:
        """Whether ``x`` has this spec."""
        return x.dtype is self.dtype and x.shape == self.shape and x.stride() == self.stride and x.device == self.device

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


_specs: dict[tuple[Any, ...], TensorSpec] = {}
_MOST_SPECS = 4096


class Effect(Enum):
    """How a small error in a saved value changes the gradients that backward computes from it (see formulas.py)."""

    UNKNOWN = "unknown"
    """The effect is not known or not bounded: the value is a divisor, or one number for many elements."""
    LINEAR = "linear"
    """The gradients are linear in the value, so an error with a mean of zero does not change their mean."""
    NORMALISED = "normalised"
    """As LINEAR, but backward divides the error by the standard deviation of the value's row."""
    SENSITIVE = "sensitive"
    """A curved function or a difference of nearly equal numbers magnifies the error, so the error must be small."""


class ReadProduct(NamedTuple):
    """The one product in which a backward formula reads a matrix, or a batch of them.

    Attributes:
        side: ``"left"`` for a value [..., rows, inner] that is read in ``value.mT @ grad``, ``"right"`` for a value
            [..., inner, columns] that is read in ``grad @ value.mT``. The gradient is [..., rows, columns].
        other: the size of the gradient that the value does not have: its columns on the left, its rows on the right.
    """

    side: Literal["left", "right"]
    other: int


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Facts about one saved tensor; holds no tensor.

    Attributes:
        key: a name that is the same in every step, such as ``"features.3/Relu#0:result"``: the module's path, the
            autograd node, the number of the node among its kind in this call of the module, and the role.
        op: name of the autograd node without its suffix, such as ``"Relu"``; ``"?"`` if the node is not known.
        role: the name that the node's formula gives the tensor: ``"self"``, ``"result"``, ``"weight"``, ...
        fqn: path of the module whose forward saved the tensor; ``""`` outside modules.
        spec: the tensor's shape, strides, dtype and device.
        need: how much backward reads of the tensor.
        mask: the bits that backward reads, if ``need`` is ``SIGN``.
        window: the geometry of the pooling that computed the indices, if ``need`` is ``INDEX`` and it is known.
        function: the function of one variable, as codecs.FewBit names it, if backward reads the value for the
            derivative of this function only; else None.
        effect: how a small error in the value changes the gradients.
        row: how many neighbours in memory share their scale, as the features of a token or the elements that share a
            norm's statistics do; 0 if that is not known.
        product: the product, if backward reads the value for nothing else; else None.
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
    product: ReadProduct | None = None

    def number_in(self, label: str) -> int | None:
        """The number of the node among its kind in a call of a module; None where another call has saved the tensor.

        Args:
            label: what keys call the call of the module.
        """
        before = f"{label}/{self.op}#"
        return int(self.key[len(before) :].partition(":")[0]) if self.key.startswith(before) else None


def cycle_of(key: str) -> int:
    """Returns in which pass of a step a value was saved, by its key: 0 for the first.

    The key has to tell passes apart (Note: [calls apart] in capture/names.py).
    """
    _, plus, number = key.partition("/")[0].rpartition("+")
    return int(number) if plus and number.isdecimal() else 0


def without_cycle(key: str) -> str:
    """Returns the key that the value would have in the first pass of a step (see :func:`cycle_of`)."""
    path, slash, rest = key.partition("/")
    before, plus, number = path.rpartition("+")
    return f"{before}{slash}{rest}" if plus and number.isdecimal() else key


def first_life_of(key: str) -> str:
    """Returns the key that a value had when it was decided on first (stash/encode.py names its later lives)."""
    where, colon, role = key.rpartition(":")
    return f"{where}{colon}{role.partition('~')[0]}"

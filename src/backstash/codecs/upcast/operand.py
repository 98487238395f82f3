"""Float32 numbers as a product reads them whose arithmetic begins by rounding its operands to bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from backstash.bits import equal_bits
from backstash.codecs.base import Draft, Encoded, ErrorBound
from backstash.codecs.upcast.codec import Upcast
from backstash.errors import PrecisionChangedError
from backstash.numerics import matmul_precision, rounds_products, settings
from backstash.proofs import proofs
from backstash.saved import Need, ReadProduct, SavedTensor, TensorSpec

Rounding = Literal["nearest", "truncated"]

_LEAST = 0x0080
"""Bits of the smallest normal number of bfloat16. Whether a product reads smaller ones as zero is up to processors."""

_INFINITE = 0x7F80


class _Question(NamedTuple):
    """Whether a product has the same bits when a matrix of that shape and layout, or a batch of them, is rounded."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    product: ReadProduct
    rounding: Rounding


MOST_ASKED = 4096
"""How many questions are remembered. A program with more shapes than that may not change settings within a step."""


class _Asked:
    def __init__(self) -> None:
        self.questions: dict[_Question, None] = {}
        self.is_forgetful = False

    def add(self, question: _Question) -> None:
        """Remembers a question. The first one is forgotten if there are too many."""
        if question not in self.questions and len(self.questions) >= MOST_ASKED:
            self.questions.pop(next(iter(self.questions), question), None)
            self.is_forgetful = True
        self.questions[question] = None

    def are_proven(self, spec: TensorSpec, rounding: Rounding) -> bool:
        """Whether all products that may read what was stored of such a value have the same bits now."""
        alike = [each for each in tuple(self.questions) if each[:2] == (spec.shape, spec.stride)]
        return not self.is_forgetful and all(_is_proven(each) for each in alike if each.rounding == rounding)


_asked = _Asked()


@dataclass(frozen=True)
class Operand(Upcast):
    """Stores float32 matrices as the bfloat16 numbers to which the product that reads them rounds them.

    If a program asks for it (:func:`rounds_products`), a product on a CPU with instructions for bfloat16 begins by
    rounding its operands to bfloat16. What it never sees needs no memory. Nothing of this is assumed: for each shape,
    layout, device and setting a product of such matrices is computed with and without rounding, and a reader is refused
    whose product has other bits. The value may be either factor of a product of matrices, or of batches of them.

    Preserves: SHAPE, VALUE - each element rounded to 8 significant bits, to nearest with ties to even or towards zero.
    Layout: plane ``upper`` bfloat16 [n], the rounded numbers in memory order. With ``values`` in its place the planes
        in which these encode that row, their names behind ``values.``.
    Bytes: values, which are 2 * n where they have no codec of their own.
    Determinism: the same planes on every backend.
    Source: observed: with oneDNN 3 on processors with AVX-512 BF16 or AMX the gradient of a linear layer's weight has
        the same bits whether its input was rounded before or not; rounding towards zero gives others. Convolutions
        have other bits with either.

    Args:
        values: as for Upcast.
        rounding: ``"nearest"`` or ``"truncated"``: which of the two the product is taken to do.

    Raises:
        CodecRefusedError: on encode, an element is infinite, NaN or below the normal numbers, or would become that.
        PrecisionChangedError: on decode, a setting is another one, under which the product reads more.

    Example:
        >>> x = torch.tensor([1.0, 1.00390625, 3.14159265])
        >>> Operand().encode(x).nbytes, Operand().decode(Operand().encode(x)).tolist()
        (6, [1.0, 1.0, 3.140625])
        >>> Operand(rounding="truncated").decode(Operand(rounding="truncated").encode(-x)).tolist()
        [-1.0, -1.0, -3.140625]
    """

    rounding: Rounding = "nearest"

    id: ClassVar[str] = "operand"
    preserves: ClassVar[frozenset[Need]] = frozenset({Need.SHAPE, Need.VALUE})
    repeats: ClassVar[bool] = True

    _others: ClassVar[str] = "not finite, or below the normal numbers"

    @property
    def bound(self) -> ErrorBound | None:  # type: ignore[override]  # read-only here
        """Half a step of 8 significant bits, or a whole one where they are truncated."""
        return ErrorBound(each=2.0**-8 if self.rounding == "nearest" else 2.0**-7, tiny=2.0**-126)

    @property
    def label(self) -> str:
        """With the rounding where it is not to nearest: ``"operand truncated exponents"``."""
        name = super().label
        return name if self.rounding == "nearest" else name.replace(self.id, f"{self.id} {self.rounding}", 1)

    def accepts(self, spec: TensorSpec) -> str | None:
        """Accepts dense tensors of float32 on a CPU."""
        return super().accepts(spec) if spec.device.type == "cpu" else "it is not on a CPU"

    def _numbers(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rounded = _rounded(x, self.rounding)
        magnitude = rounded.view(torch.int16) & 0x7FFF
        others = (magnitude >= _INFINITE) | ((magnitude <= _LEAST) & (magnitude > 0))
        return rounded, torch.count_nonzero(others).reshape(1)

    def draft(self, x: Tensor, known: int | None) -> Draft:
        """As of Upcast, and notes under which settings it was made."""
        draft = super().draft(x, known)
        return draft._replace(encoded=replace(draft.encoded, meta={**draft.encoded.meta, _SETTINGS: _now()}))

    def refuses_reader(self, saved: SavedTensor) -> str | None:
        """Why a reader would notice that the matrix was rounded: it is no product, or one that reads more of it."""
        if saved.product is None or self.accepts(saved.spec) is not None:
            return f"backward of {saved.op} reads more of it than a product does"
        question = _Question(saved.spec.shape, saved.spec.stride, saved.product, self.rounding)
        if not _is_proven(question):
            return f"backward of {saved.op} reads more than bfloat16 of it, under these settings and on this processor"
        _asked.add(question)
        return None

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """The rounded matrix.

        Raises:
            DamagedPlanesError: the planes do not fit together.
            PrecisionChangedError: a setting was changed since, and some product would notice now, or may.
        """
        if encoded.meta[_SETTINGS] != _now() and not _asked.are_proven(encoded.spec, self.rounding):
            raise PrecisionChangedError(
                f"backward was asked for a product with {encoded.spec}, which was stored as products read it "
                f"under the settings of the forward pass (fp32_precision 'bf16'), but a setting was changed "
                f"since (it is {matmul_precision()!r} now), and the product reads more of it. "
                f"Change the precision between steps, or run this one under policy 'keep'."
            )
        return super().decode(encoded, out)


_SETTINGS = "settings"


def _rounded(x: Tensor, rounding: Rounding) -> Tensor:
    if rounding == "nearest":
        return x.to(torch.bfloat16)
    return (x.contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def _now() -> int:
    """A number for the settings that results on a CPU depend on now: equal ones are the same object (see numerics)."""
    return id(settings("cpu"))


def _is_proven(question: _Question) -> bool:
    return proofs.ask("product of bfloat16", (*question, torch.float32), partial(_prove, question))


def _prove(question: _Question) -> bool:
    """Whether no product in which a backward pass reads a matrix tells whether it was rounded before.

    Asked of gradients in each layout that autograd hands over: in rows, in columns, a part of a larger one that begins
    anywhere, one that is expanded, and one whose batch stands behind its rows; and of both forms in which autograd asks
    for the product. And so of what a backward pass with a graph asks for: the matrix times the gradient of that
    product, again in both forms.
    """
    shape, stride, product, rounding = question
    if not rounds_products() or len(shape) not in (2, 3) or not product.other or not all(shape):
        return False
    generator = torch.Generator().manual_seed(0)
    value = torch.empty_strided(shape, stride, dtype=torch.float32).copy_(_telling(shape, generator))
    rounded = torch.empty_strided(shape, stride, dtype=torch.float32).copy_(_rounded(value, rounding))
    if product.side == "right":
        value, rounded = value.mT, rounded.mT
    multiply = torch.mm if len(shape) == 2 else torch.bmm
    *batch, rows, inner = value.shape
    for grad in _layouts(generator, *batch, rows, product.other):
        for read in (lambda x, g: multiply(g.mT, x), lambda x, g: multiply(x.mT, g)):
            if not equal_bits(read(value, grad), read(rounded, grad)):
                return False
    for grad in _layouts(generator, *batch, product.other, inner):
        for read in (lambda x, g: multiply(g, x.mT), lambda x, g: multiply(x, g.mT)):
            if not equal_bits(read(value, grad), read(rounded, grad)):
                return False
    return True


def _telling(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers that tell ways to round apart: a few differ only where a number is about halfway between two others."""
    exponents = torch.randint(-8, 9, (*shape[:-1], 1), generator=generator)
    bits = (torch.randn(shape, generator=generator, dtype=torch.float32) * exponents.float().exp2()).view(torch.int32)
    ends = torch.tensor([0x0001, 0x7FFF, 0x8000, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    ends = ends[torch.randint(len(ends), shape, generator=generator)]
    is_drawn = torch.rand(shape, generator=generator, dtype=torch.float32) < 0.5
    return torch.where(is_drawn, bits, (bits & -65536) | ends).view(torch.float32)


def _layouts(generator: torch.Generator, *shape: int) -> Iterator[Tensor]:
    columns = shape[-1]
    wide = torch.randn(*shape[:-1], columns + 3, generator=generator, dtype=torch.float32)
    yield wide[..., :columns].contiguous()
    yield wide[..., :columns].mT.contiguous().mT
    yield wide[..., 1 : columns + 1]
    yield wide[..., :1, :1].expand(shape)
    if len(shape) == 3:
        yield wide.transpose(0, 1).contiguous().transpose(0, 1)[..., :columns]

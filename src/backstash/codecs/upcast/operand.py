"""Float32 numbers as a product reads them whose arithmetic begins by rounding its operands to bfloat16."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from backstash.bits import equal_bits
from backstash.codecs.base import Draft, Encoded, ErrorBound
from backstash.codecs.upcast.codec import Upcast
from backstash.errors import PrecisionChangedError
from backstash.numerics import matmul_precision, rounds_products, settings
from backstash.proofs import proofs
from backstash.saved import Need, SavedTensor, TensorSpec

_LEAST = 0x0080
"""Bits of the smallest normal number of bfloat16. Whether a product reads smaller ones as zero is up to processors."""

_INFINITE = 0x7F80

_shapes: dict[tuple[int, int], set[int]] = {}
"""Of matrices [rows, inner] that were stored, the numbers of columns of the gradients that they are multiplied by."""


@dataclass(frozen=True)
class Operand(Upcast):
    """Stores a float32 matrix as the bfloat16 numbers to which the product that reads it rounds it.

    If a program asks for it (:func:`rounds_products`), a product on a CPU with instructions for bfloat16 begins by
    rounding its operands to bfloat16. What it never sees needs no memory. Nothing of this is assumed: for each shape,
    device and setting a product of such matrices is computed with and without rounding, and a reader is refused whose
    product has other bits.

    Preserves: SHAPE, VALUE - each element rounded to nearest, ties to even, with 8 significant bits.
    Layout: plane ``upper`` bfloat16 [n], the rounded numbers in memory order. With ``values`` in its place the planes
        in which these encode that row, their names behind ``values.``.
    Bytes: values, which are 2 * n where they have no codec of their own.
    Determinism: the same planes on every backend.
    Source: observed: with oneDNN 3 on processors with AVX-512 BF16 or AMX the gradient of a linear layer's weight has
        the same bits whether its input was rounded before or not; rounding towards zero gives others.

    Args:
        values: as for Upcast.

    Raises:
        CodecRefusedError: on encode, an element is infinite, NaN or below the normal numbers, or would become that.
        PrecisionChangedError: on decode, a setting is another one, under which the product reads more.

    Example:
        >>> x = torch.tensor([1.0, 1.00390625, 3.14159265])
        >>> Operand().encode(x).nbytes, Operand().decode(Operand().encode(x)).tolist()
        (6, [1.0, 1.0, 3.140625])
    """

    id: ClassVar[str] = "operand"
    preserves: ClassVar[frozenset[Need]] = frozenset({Need.SHAPE, Need.VALUE})
    bound: ClassVar[ErrorBound | None] = ErrorBound(each=2.0**-8, tiny=2.0**-126)
    repeats: ClassVar[bool] = True

    _others: ClassVar[str] = "not finite, or below the normal numbers"

    def accepts(self, spec: TensorSpec) -> str | None:
        """Accepts dense tensors of float32 on a CPU."""
        return super().accepts(spec) if spec.device.type == "cpu" else "it is not on a CPU"

    def _numbers(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rounded = x.to(torch.bfloat16)
        magnitude = rounded.view(torch.int16) & 0x7FFF
        others = (magnitude >= _INFINITE) | ((magnitude <= _LEAST) & (magnitude > 0))
        return rounded, torch.count_nonzero(others).reshape(1)

    def draft(self, x: Tensor, known: int | None) -> Draft:
        """As of Upcast, and notes under which settings it was made."""
        draft = super().draft(x, known)
        return draft._replace(encoded=replace(draft.encoded, meta={**draft.encoded.meta, _SETTINGS: _now()}))

    def refuses_reader(self, saved: SavedTensor) -> str | None:
        """Why a reader would notice that the matrix was rounded: it is no product, or one that reads more of it."""
        if not saved.columns or len(saved.spec.shape) != 2 or saved.spec.device.type != "cpu":
            return f"backward of {saved.op} reads more of it than a product does"
        rows, inner = saved.spec.shape
        if not _is_proven(rows, inner, saved.columns):
            return f"backward of {saved.op} reads more than bfloat16 of it, under these settings and on this processor"
        _shapes.setdefault((rows, inner), set()).add(saved.columns)
        return None

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """The rounded matrix.

        Raises:
            DamagedPlanesError: the planes do not fit together.
            PrecisionChangedError: a setting was changed since, and some product would notice now.
        """
        if encoded.meta[_SETTINGS] != _now():
            for (rows, inner), all_columns in _shapes.items():
                if rows * inner == encoded.spec.numel and not all(_is_proven(rows, inner, n) for n in all_columns):
                    raise PrecisionChangedError(
                        f"backward was asked for a product with {encoded.spec}, which was stored as products read it "
                        f"under the settings of the forward pass (fp32_precision 'bf16'), but a setting was changed "
                        f"since (it is {matmul_precision()!r} now), and the product reads more of it. "
                        f"Change the precision between steps, or run this one under policy 'keep'."
                    )
        return super().decode(encoded, out)


_SETTINGS = "settings"


def _now() -> int:
    """A number for the settings that results on a CPU depend on now: equal ones are the same object (see numerics)."""
    return id(settings("cpu"))


def _is_proven(rows: int, inner: int, columns: int) -> bool:
    facts = rows, inner, columns, torch.float32
    return proofs.ask("product of bfloat16", facts, partial(_prove, rows, inner, columns))


def _prove(rows: int, inner: int, columns: int) -> bool:
    """Whether ``x.t() @ grad`` has the same bits for ``x`` [rows, inner] and for ``x`` rounded to bfloat16.

    Asked of gradients [rows, columns] in each layout that autograd hands over: in rows, in columns, a part of a larger
    one that begins anywhere, and one that is expanded; and of both forms in which autograd asks for the product. And so
    of what a backward pass with a graph asks for: ``x`` times the gradient of that product, again in both forms.
    """
    if not rounds_products() or not rows * inner * columns:
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inner, generator=generator)
    x *= torch.exp2(torch.randint(-8, 9, (rows, 1), generator=generator))  # so that no rounded sum hides a lost bit
    rounded = x.bfloat16().float()
    wide = torch.randn(rows, columns + 3, generator=generator)
    layouts = (
        wide[:, :columns].contiguous(),
        wide[:, :columns].t().contiguous().t(),
        wide[:, 1 : columns + 1],
        wide[:1, :1].expand(rows, columns),
    )
    for grad in layouts:
        for product in (lambda a, g: torch.mm(g.t(), a), lambda a, g: torch.mm(a.t(), g)):
            if not equal_bits(product(x, grad), product(rounded, grad)):
                return False
    of_weight = torch.randn(columns, inner, generator=generator)
    for again in (of_weight, of_weight.t().contiguous().t()):
        for product in (lambda a, g: torch.mm(g, a.t()), lambda a, g: torch.mm(a, g.t())):
            if not equal_bits(product(x, again), product(rounded, again)):
                return False
    return True

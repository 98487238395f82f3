"""Shared by the gradient tests: the comparison of bits, and a policy that encodes everything that can be encoded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from backstash.codecs import Bitmask, Encoded, ErrorBound, Narrow, Shape, Zvc
from backstash.codecs.base import EXACT, FLOATS, flat, like, refuses_layout, require_accepted
from backstash.codecs.narrow.codec import INTEGERS
from backstash.policies.base import Action, Keep, Outcome, Policy, Recompute, Stash
from backstash.saved import Need, SavedTensor, TensorSpec
from backstash.stash.ledger import Report

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """Returns the elements of ``x`` as integers in row-major order: -0.0 differs from 0.0, and NaN equals itself."""
    x = x.detach().resolve_conj().resolve_neg()
    if x.is_complex():
        x = torch.view_as_real(x)
    x = x.reshape(-1)
    return x.view(_BITS[x.element_size()])


def difference(expected: Tensor | None, got: Tensor | None) -> str | None:
    """Says how two gradients differ, or returns None if dtype, sizes, layout, strides and all bits are equal."""
    if expected is None or got is None:
        return None if expected is got else f"expected {_facts(expected)}, got {_facts(got)}"
    if _facts(expected) != _facts(got):
        return f"expected {_facts(expected)}, got {_facts(got)}"
    if expected.layout is torch.sparse_coo:
        pairs = [(expected._indices(), got._indices()), (expected._values(), got._values())]
    elif expected.layout is torch.strided:
        pairs = [(expected, got)]
    else:
        pairs = [(expected.to_dense(), got.to_dense())]
    for one, other in pairs:
        different = bits(one) != bits(other)
        if different.any():
            where = int(different.long().argmax())
            return (
                f"{int(different.sum())} of {different.numel()} numbers differ, first number {where} of "
                f"{_facts(expected)}: expected bits {int(bits(one)[where]):#x}, got {int(bits(other)[where]):#x}"
            )
    return None


def differences(expected: Sequence[Tensor | None], got: Sequence[Tensor | None]) -> list[str]:
    """Returns one line for each gradient that differs."""
    assert len(expected) == len(got)
    found = (difference(one, other) for one, other in zip(expected, got, strict=True))
    return [f"gradient {i}: {text}" for i, text in enumerate(found) if text is not None]


def _facts(x: Tensor | None) -> str:
    if x is None:
        return "None"
    strides = f" strides {list(x.stride())}" if x.layout is torch.strided else f" {x.layout}"
    return f"{x.dtype} {list(x.shape)}{strides}"


@dataclass(frozen=True)
class AlwaysZvc(Zvc):
    """A Zvc that also encodes values that become larger by it."""

    def declines(self, x: Tensor) -> str | None:
        return "it is empty" if x.numel() == 0 else None


@dataclass(frozen=True)
class Copy:
    """Stores a copy of any dense tensor, for element types that no real codec accepts."""

    id: ClassVar[str] = "copy"
    preserves: ClassVar[frozenset[Need]] = EXACT
    bound: ClassVar[ErrorBound | None] = None

    def accepts(self, spec: TensorSpec) -> str | None:
        return refuses_layout(spec)

    def declines(self, x: Tensor) -> str | None:
        return None

    def encode(self, x: Tensor) -> Encoded:
        return Encoded(self.id, require_accepted(self, x), {"copy": flat(x).clone()})

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        out = like(encoded.spec, out)
        flat(out).copy_(encoded.planes["copy"])
        return out

    def nbytes_bound(self, spec: TensorSpec) -> int:
        return spec.nbytes


@dataclass(frozen=True)
class Everything:
    """A policy that encodes everything that can be encoded, also where it saves no memory."""

    def decide(self, saved: SavedTensor) -> Action:
        if saved.need is Need.SHAPE:
            return Stash(Shape())
        if saved.need is Need.SIGN and saved.mask is not None:
            return Stash((Bitmask(saved.mask), Copy()))
        if saved.spec.dtype in INTEGERS:
            windowed = () if saved.window is None else (Narrow(saved.window),)
            return Stash((*windowed, Narrow(), Copy()))
        if saved.spec.dtype in FLOATS:
            return Stash((AlwaysZvc(), Copy()))
        return Stash(Copy())

    def observe(self, outcome: Outcome) -> None:
        pass


class Remake(Policy):
    """A policy that makes every value again that can be, whatever made it, and keeps the rest of what is read whole."""

    is_fixed = True
    remakes_anything = True

    def decide(self, saved: SavedTensor) -> Action:
        if saved.need is Need.SHAPE:
            return Stash(Shape())
        return Recompute(Keep(), any_producer=True)


def encoded_and_kept(reports: Iterable[Report]) -> tuple[int, int]:
    """Returns how many stored values were encoded, and how many were kept as they are."""
    codecs = [row.codec for report in reports for row in report.rows if row.saved_nbytes]
    kept = codecs.count("kept")
    return len(codecs) - kept, kept


class Keeps(torch.autograd.Function):
    """A function whose backward returns a gradient and keeps a view of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: list[Any]) -> Tensor:
        ctx.keep = keep
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0] * 2.0
        ctx.keep.append(grad.view(-1))
        return grad, None

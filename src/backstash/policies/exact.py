"""Exact policies that stay on the device: Lossless, and KeepAll, which encodes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from backstash import codecs
from backstash.arguments import check_share, check_switch
from backstash.codecs.base import FLOATS, Codec
from backstash.codecs.narrow.codec import INTEGERS
from backstash.numerics import rounds_products
from backstash.policies.base import Action, Keep, Policy, Recompute, Stash
from backstash.saved import Need, SavedTensor


@cache
def _upcasts() -> tuple[Codec, ...]:
    """For float32 values that were bfloat16 before: the smaller form, and one for exponents that are far apart."""
    return codecs.Upcast(codecs.Exponents()), codecs.Upcast()


@cache
def _operands(dense: bool) -> tuple[Codec, ...]:
    """For float32 values that products alone read: the ways to round that products are known to have.

    With ``dense`` the smaller form of each, and one for exponents that are far apart.
    """
    operands = codecs.Operand(), codecs.Operand(rounding="truncated")
    if not dense:
        return operands
    return tuple(replace(operand, values=values) for operand in operands for values in (codecs.Exponents(), None))


@dataclass(frozen=True)
class Lossless(Policy):
    """Exact: gradients are bit-identical.

    If backward only reads the shape, nothing but the shape is stored; if it only reads the sign, a bit per element.
    Integers and bools are stored in the fewest bits. A value that a cheap function computed from held values is remade.
    Any other value is compressed if a sample of it shows zeros, or only two different numbers. A value that is read by
    products alone, whose arithmetic begins by rounding it, is stored rounded: only where that was asked for
    (``torch.set_float32_matmul_precision("medium")`` on a CPU) and was seen in the bits (see codecs.Operand).

    Args:
        min_saving: the smallest share of a value's bytes that makes compression worthwhile (see codecs.Zvc).
        recompute: whether values are remade.
        dense: whether what is left, dense values, is stored with shorter exponents (see codecs.Exponents): a quarter
            less in bfloat16 and an eighth in float32, for two more passes over each value. Values of float32 that were
            bfloat16 before (see codecs.Upcast) take three eighths of their bytes.

    Raises:
        TypeError: an argument is of another type.
        ValueError: ``min_saving`` is no share.
    """

    min_saving: float = 0.02
    recompute: bool = True
    dense: bool = False

    is_fixed = True
    min_nbytes = None  # the first step decides

    def __post_init__(self) -> None:
        check_share(self.min_saving, "min_saving", "Lossless")
        check_switch(self.recompute, "recompute", "Lossless")
        check_switch(self.dense, "dense", "Lossless")

    @property
    def recomputes(self) -> bool:  # type: ignore[override]  # read-only here
        """The argument ``recompute``."""
        return self.recompute

    def decide(self, saved: SavedTensor) -> Action:
        """Returns the smallest exact form of what backward reads."""
        if saved.need is Need.SHAPE:
            return Stash(codecs.Shape())
        if saved.need is Need.SIGN and saved.mask is not None:
            return Stash(codecs.Bitmask(saved.mask))
        if saved.spec.dtype in INTEGERS:
            windowed = () if saved.window is None else (codecs.Narrow(saved.window),)
            return Stash((*windowed, codecs.Narrow()))
        if saved.spec.dtype in FLOATS:
            zvc = codecs.Zvc(self.min_saving)
            chain: tuple[Codec, ...] = (codecs.Binary(), zvc)
            if self.dense:
                chain = (codecs.Binary(), *_upcasts(), zvc, codecs.Exponents())
            if saved.product is not None and saved.spec.dtype is torch.float32 and rounds_products():
                chain = (*_operands(self.dense), *chain)
            stash = Stash(chain)
            return Recompute(stash) if self.recompute else stash
        return Keep(f"no exact codec takes {saved.spec.dtype}")


@dataclass(frozen=True)
class KeepAll(Policy):
    """Encodes nothing. Memory is that of plain PyTorch, and the report shows what is in it."""

    is_fixed = True
    recomputes = False

    def decide(self, saved: SavedTensor) -> Action:
        """Returns Keep()."""
        return Keep()


def lossless(min_saving: float = 0.02, recompute: bool = True, dense: bool = False) -> Lossless:
    """Returns the policy :class:`Lossless`."""
    return Lossless(min_saving, recompute, dense)

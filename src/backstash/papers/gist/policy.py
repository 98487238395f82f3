"""Gist's rules (ISCA 2018): Binarize, Sparse Storage and Dense Compute, Delayed Precision Reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backstash.codecs import Binary, Csr, FewBit, Minifloat, Zvc
from backstash.codecs.base import FLOATS, SINGLES
from backstash.policies import Action, Lossless, Policy, Recompute, Stash
from backstash.policies.base import STEADY, check_count, check_switch
from backstash.saved import Effect, Need, SavedTensor


@dataclass(frozen=True)
class Gist(Policy):
    """Gist's rules (ISCA 2018): Binarize, Sparse Storage and Dense Compute, Delayed Precision Reduction.

    A relu in front of a pooling becomes a bit per element, and the pooling's indices take 4 bits or fewer. A sparse
    value is stored as its non-zeros, either in Gist's CSR or behind a bit mask, whichever is smaller.

    With a ``format``, stored numbers are reduced to it, sparse or dense, after the forward pass has used them in full.
    The zeros of a relu stay zeros and no other number becomes zero, so the relu's gradient passes at the same
    elements. A value stays exact if it is not known for each of its readers what an error does to the gradients
    (``SavedTensor.effect``): the result that a loss saves (log-softmax), divisors, which might become zero, and what
    backward compares with another value, such as the input of a maximum. The paper's networks have none but the loss's.

    Args:
        format: a format of Minifloat: ``"fp16"``, ``"fp10"``, ``"fp8"``, ... With None the policy is exact, as Gist's
            lossless mode is.
        fewbit: bits for a value of which backward only reads a function's derivative (see codecs.FewBit); with None
            such a value is stored like any other.
        recompute: whether a value is remade instead, which takes no memory, if a cheap function computed it from
            values that are stored exactly. The paper remakes nothing: without this, transformers and networks with
            batch norms are stored in more bytes than under ``lossless``.

    Raises:
        ValueError: Minifloat has no such format, or FewBit has not so many bits.

    Source: Gist (ISCA 2018). Ours remakes values as well, unless it is told not to.
    """

    format: str | None = None
    fewbit: int | None = None
    recompute: bool = True

    revision = STEADY

    @property
    def is_fixed(self) -> bool:  # type: ignore[override]  # read-only here
        """Whether the strongest reader of a value decides alone: where nothing is reduced."""
        return self.format is None

    @property
    def recomputes(self) -> bool:  # type: ignore[override]  # read-only here
        """The argument ``recompute``."""
        return self.recompute

    def __post_init__(self) -> None:
        check_switch(self.recompute, "recompute", "Gist")
        if self.format is not None:
            Minifloat(self.format)
        if self.fewbit is not None:
            check_count(self.fewbit, "fewbit", "bits", "Gist")
            FewBit(bits=self.fewbit)

    def decide(self, saved: SavedTensor) -> Action:
        """Returns the action for a value that has no other reader."""
        return self.decide_together(saved, (saved,))

    def decide_together(self, saved: SavedTensor, readers: Sequence[SavedTensor]) -> Action:
        """Returns the paper's encoding of what backward reads, which a value that is remade does without."""
        is_sign = saved.need is Need.SIGN and saved.mask is not None
        if saved.need is Need.SHAPE or is_sign or saved.spec.dtype not in FLOATS:
            return Lossless(recompute=False).decide(saved)
        stash = self._stash(saved, all(map(_may_have_errors, readers)))
        return Recompute(stash, exact_roots=True) if self.recompute else stash

    def _stash(self, saved: SavedTensor, is_reduced: bool) -> Stash:
        """Returns the paper's encoding of a floating value, whose numbers may be reduced or not."""
        exact = (Binary(), *_sparse(saved, None))
        if self.format is None or saved.spec.dtype not in SINGLES or not is_reduced:
            return Stash(exact)
        values = Minifloat(self.format)
        # A sparse form is worthwhile only if it is smaller than the dense form. The dense form does not serve a relu,
        # which reads the zeros, so the sparse form follows it again without that condition.
        dense_saving = 1 - values.bits / (8 * saved.spec.dtype.itemsize)
        if dense_saving <= 0:
            return Stash(exact)
        codes = (FewBit(saved.function, self.fewbit),) if self.fewbit and saved.function else ()
        sparse = _sparse(saved, Minifloat(self.format, group_size=0), dense_saving)
        return Stash((Binary(), *codes, *sparse, values, Zvc(values=sparse[1].values), *exact[1:]))


def _may_have_errors(reader: SavedTensor) -> bool:
    return reader.need is not Need.VALUE or reader.effect is not Effect.UNKNOWN or reader.function is not None


def _sparse(saved: SavedTensor, values: Minifloat | None, min_saving: float = 0.02) -> tuple[Csr, Zvc]:
    """Returns two sparse codecs: Csr, which refuses a tensor of which Zvc is smaller, and Zvc."""
    width = 8 * saved.spec.dtype.itemsize
    bits = width if values is None else values.bits
    crossing = 1 - Csr.crossing * (8 + bits) / width - 1 / (8 * width)
    return Csr(max(min_saving, crossing), values), Zvc(min_saving, values)


def gist(format: str = "fp16", fewbit: int | None = None, recompute: bool = True) -> Gist:
    """Returns the policy :class:`Gist` with all of its encodings."""
    return Gist(format, fewbit, recompute)


def gist_lossless(recompute: bool = True) -> Gist:
    """Returns the policy :class:`Gist` without precision reduction."""
    return Gist(recompute=recompute)

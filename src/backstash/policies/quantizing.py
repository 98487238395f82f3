"""A policy that rounds values to a few bits each where it is known what the error does to the gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from backstash.arguments import check_count, check_switch
from backstash.codecs import Binary, BlockQuant, FewBit, Signed, Zvc
from backstash.codecs.base import SINGLES
from backstash.codecs.fewbit.codec import ACTIVATIONS
from backstash.codecs.fewbit.codec import BITS as CODE_BITS
from backstash.policies.base import STEADY, Action, Policy, Recompute, Stash
from backstash.policies.exact import Lossless
from backstash.saved import Effect, Need, SavedTensor

FINE_BITS = 8
"""The fewest bits for a value whose error has more than a linear effect."""

GROUP, LEAST_GROUP = 256, 64
"""Elements of a group: ActNN's number, and the fewest with which a group's two extremes, float32, take a bit per
element."""

LEAST_CODE_BITS = 3
"""The fewest bits of FewBit, which is biased: bias was 36 % of a ViT's gradient error with 2 bits, 23 % with 3, 15 %
with 4."""


@dataclass(frozen=True)
class Quantized(Policy):
    """Values in a few bits each between the extremes of their group, after ActNN (ICML 2021); the rest is exact.

    A value is rounded only if it is known for each of its readers what an error does to the gradients
    (``SavedTensor.effect``, formulas.py):

    * A value in which the gradients are linear, such as the input of a layer, has ``bits`` bits. Its errors cancel on
      average.
    * A value that a norm reads has ``bits`` bits too, but each group lies within one row of the norm, so that the range
      of a larger neighbour does not set a row's error. If rows cannot be divided into groups of 64 elements or more,
      the value has 8 bits.
    * A value of which backward only reads one function's derivative is stored with codecs.FewBit, in 3 bits or more.
    * A value that goes through another curved function has 8 bits or more. So has every value that a fused attention
      saves: its backward puts queries and keys through an exponential, and subtracts nearly equal products of the
      values and the result.

    The following stay exact: the tensors that a loss saves, the statistics of norms and attentions, factors that are
    broadcast, divisors, and every value whose effect is unknown. A value that a relu reads as well has one more bit per
    element, so that the relu decides as it did.

    Errors are passed on to the layers below. Therefore they add up, unlike those of :class:`policies.comet.Comet`.
    ``Session(check=...)`` measures by how much.

    Args:
        bits: bits of codecs.BlockQuant: 1, 2, 4 or 8.
        recompute: whether a value is remade if everything that it is computed from is exact.

    Raises:
        ValueError: BlockQuant has not so many bits.

    Source: ActNN (ICML 2021). Ours rounds only values whose readers are known, as listed above.
    """

    bits: int = 2
    recompute: bool = True

    revision = STEADY

    def __post_init__(self) -> None:
        check_count(self.bits, "bits", "bits", "Quantized")
        check_switch(self.recompute, "recompute", "Quantized")
        BlockQuant(self.bits)

    @property
    def recomputes(self) -> bool:  # type: ignore[override]  # read-only here
        """The argument ``recompute``."""
        return self.recompute

    def decide(self, saved: SavedTensor) -> Action:
        """Returns the action for a value that has no other reader."""
        return self.decide_together(saved, (saved,))

    def decide_together(self, saved: SavedTensor, readers: Sequence[SavedTensor]) -> Action:
        """Returns a few bits per element if the effect of an error on every reader is known, else an exact form."""
        exact = Lossless(recompute=self.recompute).decide(saved)
        values = [reader for reader in readers if reader.need is Need.VALUE]
        is_known = values and all(reader.effect is not Effect.UNKNOWN for reader in values)
        if saved.need is not Need.VALUE or saved.spec.dtype not in SINGLES or not is_known:
            return exact
        rounded = Stash((Binary(), *self._codes(values), *self._integers(values), Zvc()))
        return Recompute(rounded, exact_roots=True) if self.recompute else rounded

    def _codes(self, values: Sequence[SavedTensor]) -> tuple[FewBit, ...]:
        """Returns a codec for the derivative, if that of one function is all that the readers of the value need.

        There is none if the codes take no fewer bits than the integers.
        """
        functions = {reader.function for reader in values}
        function = functions.pop() if len(functions) == 1 else None
        if function not in ACTIVATIONS or self.bits > max(CODE_BITS):
            return ()
        return (FewBit(function, max(self.bits, LEAST_CODE_BITS)),)

    def _integers(self, values: Sequence[SavedTensor]) -> tuple[BlockQuant, Signed]:
        """Returns two codecs: for a value, and for a value whose zeros and signs are read as well."""
        fine = max(self.bits, FINE_BITS)
        normalised = [reader.row for reader in values if reader.effect is Effect.NORMALISED]
        group = group_of(values)
        is_aligned = group > 0
        is_fine = any(reader.effect is Effect.SENSITIVE for reader in values)
        bits = fine if is_fine or (normalised and not is_aligned) else self.bits
        # Signed gathers the elements that are not zero, and a group of these no longer lies within a row of the norm.
        among_zeros = fine if is_fine or normalised else self.bits
        return BlockQuant(bits, group if is_aligned else GROUP), Signed(BlockQuant(among_zeros))


def group_of(values: Sequence[SavedTensor]) -> int:
    """Returns how many neighbours may share a range, so that each group lies within one row of a norm that reads it.

    Args:
        values: those readers of a value that read it whole.

    Returns:
        0 if the rows cannot be divided into groups of 64 elements or more.
    """
    normalised = [reader.row for reader in values if reader.effect is Effect.NORMALISED]
    group = math.gcd(GROUP, *(normalised or [reader.row for reader in values]))
    return group if group >= LEAST_GROUP else 0


def quantized(bits: int = 2) -> Quantized:
    """Returns the policy :class:`Quantized`."""
    return Quantized(bits)

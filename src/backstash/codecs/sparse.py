"""The common part of codecs for tensors with many zeros, which differ in how they note where the others are."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from backstash.codecs.base import EXACT, ErrorBound, asks_for_sign, check_saving, flat, refuses_floats
from backstash.codecs.minifloat.codec import Minifloat
from backstash.codecs.sample import look
from backstash.saved import Mask, Need, TensorSpec, Test


@dataclass(frozen=True)
class Sparse:
    """Stores the elements that have any bit set, on request in a smaller format.

    Args:
        min_saving: the smallest share of the dense bytes worth a pass over them; declined below it.
        values: the smaller format of the values, one without scales; None keeps every bit.

    Raises:
        ValueError: ``min_saving`` is no share, or ``values`` has scales.
    """

    min_saving: float = 0.02
    values: Minifloat | None = None

    id: ClassVar[str]

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_saving(self, self.min_saving)
        if self.values is not None and getattr(self.values, "group_size", True):
            raise ValueError(
                f"{name} was asked for values={self.values!r}, but what it stores has no groups of neighbours. Use "
                f"Minifloat({getattr(self.values, 'format', 'fp16')!r}, group_size=0)."
            )

    @property
    def label(self) -> str:
        """The codec's id, or ``"zvc+fp8"`` and the like."""
        return self.id if self.values is None else f"{self.id}+{self.values.label}"

    @property
    def preserves(self) -> frozenset[Need]:
        """Every need; with ``values``, the needs that it preserves."""
        return EXACT if self.values is None else self.values.preserves

    @property
    def bound(self) -> ErrorBound | None:
        """The bound of ``values``; None without them."""
        return None if self.values is None else self.values.bound

    @property
    def repeats(self) -> bool:
        """Whether ``values`` does (base.repeats)."""
        return self.values is None or self.values.repeats

    def keeps(self, mask: Mask) -> bool:
        """Whether the mask's test, and whether an element is negative or NaN, comes out as for the original.

        Always without ``values``. With it zero, the sign, infinities and NaN are kept, but no other number is: so for
        tests against zero, whatever stands in.
        """
        return self.values is None or mask.test is Test.NONZERO or asks_for_sign(mask)

    def accepts(self, spec: TensorSpec) -> str | None:
        """Accepts dense floating tensors of 16, 32 or 64 bits, and of them those that ``values`` accepts."""
        if self.values is not None:
            return self.values.accepts(spec)
        return refuses_floats(spec)

    def declines(self, x: Tensor) -> str | None:
        """Declines where a sample has too few zeros (see codecs.sample). On CUDA the host waits for it."""
        elements, nonzeros, _ = look(flat(x))
        if elements == 0:
            return "it is empty"
        return None if self._pays(nonzeros, elements, x.dtype) else f"{nonzeros / elements:.0%} of a sample is not zero"

    def most_nonzeros(self, elements: int, dtype: torch.dtype) -> int:
        """How many elements of a sample may at most not be zero for a tensor not to be declined; -1 for none."""
        return bisect(range(elements + 1), False, key=lambda nonzeros: not self._pays(nonzeros, elements, dtype)) - 1

    def _pays(self, nonzeros: int, elements: int, dtype: torch.dtype) -> bool:
        """Whether a pass over a tensor saves enough, of a sample of which so many elements are not zero."""
        saving = 1.0 - self._bits_per_element(nonzeros / elements, dtype) / (8 * dtype.itemsize)
        return saving >= self.min_saving

    def _bits_per_element(self, density: float, dtype: torch.dtype) -> float:
        raise NotImplementedError

    def _bits_per_value(self, dtype: torch.dtype) -> float:
        return 8 * dtype.itemsize if self.values is None else self.values.bits

"""A few bits of a value that is going to be remade, to be compared when it is.

Note: [samples]
    A recipe is proven before it is trusted, and begins only from what cannot change unseen as far as the Session sees.
    What it does not see - an extension that writes through a pointer, a change while no observer looks - would make the
    remade value another one, and the gradient wrong without a word. So a value that is forgotten leaves a sample of its
    bits behind, of other elements in each step; a difference is an error that names the value. It is no proof: a change
    of few elements may be missed. With ``check="full"`` a checksum of all bits is kept instead.
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from backstash.ops.bits import bits_of

ELEMENTS = 64
"""How many elements are kept."""

ROWS = 64
"""How many samples of an accelerator lie in one allocation."""

_SPREAD = 0x9E3779B1
"""Multiplied with the step's number it gives offsets that are spread evenly."""


class Rows:
    """Memory for samples on accelerators, many in one allocation, which is freed when all of them are."""

    def __init__(self) -> None:
        self._slabs: dict[tuple[torch.device, torch.dtype, int], tuple[weakref.ref[Tensor], int]] = {}

    def take(self, like: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Returns memory for elements on the current stream, [number], and what keeps more of it to be taken."""
        key = like.device, like.dtype, torch.accelerator.current_stream(like.device).stream_id
        reference, used = self._slabs.get(key, (None, 0))
        slab = None if reference is None else reference()
        if slab is None or used == ROWS:
            slab, used = torch.empty(ROWS * ELEMENTS, dtype=like.dtype, device=like.device), 0
            reference = weakref.ref(slab)
        assert reference is not None
        self._slabs[key] = reference, used + 1
        return slab.as_strided((number,), (1,), used * ELEMENTS), slab


@dataclass(slots=True, eq=False)
class Sample:
    """Elements of a value at even distances, or a checksum of all of it.

    Attributes:
        bits: the elements, [n]; None with a checksum.
        begin, step: where the first is and how far they are apart, in elements.
        checksum: CRC-32 of all bytes; None with elements.
        allows: whether the remade elements may be off by as much as that number from those that are given; None: they
            may not differ in a bit.
        rows: makes memory for elements; None where they are not copied in an accelerator's memory.
        slab: the memory that they lie in.
        picked: the same elements of what was remade last, where the kernel that made it has copied them.
    """

    bits: Tensor | None
    begin: int
    step: int
    checksum: int | None = None
    allows: Callable[[float, Tensor], bool] | None = None
    rows: Rows | None = None
    slab: Tensor | None = None
    picked: Tensor | None = None

    @classmethod
    def of(
        cls,
        whole: Tensor,
        number: int,
        full: bool = False,
        allows: Callable[[float, Tensor], bool] | None = None,
        rows: Rows | None = None,
    ) -> Sample:
        """A sample of a dense tensor.

        Args:
            whole: the value.
            number: of the step, which decides on the elements.
            full: a checksum instead; not where elements may differ.
            allows, rows: as in the attributes.
        """
        if full and allows is None:
            return cls(None, 0, 1, _checksum(whole))
        count = whole.numel()
        step = max(1, count // ELEMENTS)
        begin = number * _SPREAD % step
        sample = cls(None, begin, step, None, allows)
        if rows is not None and not whole.is_cpu:
            sample.rows = rows
        sample.bits = sample.copied(sample.elements(whole))
        return sample

    def room(self, whole: Tensor) -> Tensor | None:
        """Where a kernel that makes the value again copies the elements to, [n]; None where that does not help."""
        if self.rows is None or self.allows is not None or self.bits is None:
            return None
        return self.rows.take(whole, self.bits.numel())[0]

    def copied(self, elements: Tensor) -> Tensor:
        """A copy of the elements of a value, [n]."""
        if self.rows is None:
            return elements.clone()
        row, self.slab = self.rows.take(elements, elements.numel())
        return row.copy_(elements)

    def differs(self, whole: Tensor) -> bool:
        """Whether a remade value is certainly not the one that the sample was taken of."""
        if self.checksum is not None:
            return _checksum(whole) != self.checksum
        assert self.bits is not None
        elements = self.elements(whole)
        if elements.shape != self.bits.shape or elements.dtype is not self.bits.dtype:
            return True
        if self.allows is None:
            return not torch.equal(bits_of(elements), bits_of(self.bits))
        if not elements.numel():
            return False
        return not self.allows(float((elements - self.bits).abs_().nan_to_num_(0.0, math.inf).max()), self.bits)

    def elements(self, whole: Tensor) -> Tensor:
        """The elements of a value that the sample is of, [n]."""
        count = whole.numel()
        number = min(ELEMENTS, max(0, -(-(count - self.begin) // self.step)))
        return whole.as_strided((number,), (self.step,), whole.storage_offset() + self.begin)


def _checksum(whole: Tensor) -> int:
    flat = whole.detach().as_strided((whole.numel(),), (1,), whole.storage_offset())
    return zlib.crc32(bits_of(flat).cpu().numpy().data)

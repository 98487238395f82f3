"""Compressed sparse rows: the elements that are not zero, and a byte each that says where they are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from backstash.codecs.base import Draft, Encoded, Judged, flat, like, no_room, require_accepted, room_for, trimmed
from backstash.codecs.csr.reference import CSR_ROW, csr_rows
from backstash.codecs.sparse import Sparse
from backstash.errors import DamagedPlanesError
from backstash.ops import ZVC_CHUNK
from backstash.ops.registration import ops
from backstash.saved import TensorSpec

MAX_NUMEL = 2**31 - 1
"""The most elements that row pointers of int32 can count: 8 GiB of float32."""


@dataclass(frozen=True)
class Csr(Sparse):
    """Stores the elements that have any bit set, and of each its place in a row of 256; on request in a smaller format.

    Smaller than zvc where fewer than one element in nine is not zero (see `crossing`).

    Preserves: SHAPE, SIGN, INDEX, VALUE - every bit: -0.0 and NaN payloads are not zero. With ``values`` SHAPE and
        VALUE within the bound of that; zeros stay what they are, and what is not zero does not become it.
    Layout: the tensor in memory order as rows of 256 elements, the last one shorter. Plane ``columns`` uint8 [number of
        elements that have any bit set], rising within a row; ``rows`` int32 [ceil(n / 256) + 1], row ``r`` has the
        columns and values ``rows[r]`` to ``rows[r + 1]``; ``values`` [as many as columns] of the tensor's dtype, or as
        many codes as Minifloat's plane ``codes`` has them; but what would become zero becomes its smallest magnitude.
    Bytes: nonzeros + 4 * (ceil(n / 256) + 1) + word * ceil(nonzeros / fields), where an element of ``values`` has
        ``word`` bytes and ``fields`` values: itemsize and 1 without a smaller format.
    Determinism: the same planes on every backend.
    Source: Gist (ISCA 2018), section 3.2, "Sparse Storage and Dense Compute": CSR with narrow value indices, of one
        byte in rows of 256; ours tests bits, not values, and decodes to memory of our own instead of cuSPARSE's.

    Args:
        min_saving: the smallest share of the dense bytes worth a pass over them; declined below it.
        values: the smaller format of the values, one without scales; None keeps every bit.

    Raises:
        ValueError: ``min_saving`` is no share, or ``values`` has scales.
        CodecRefusedError: on encode, more than 2,147,483,647 elements, which int32 row pointers might not count.

    Example:
        >>> x = torch.zeros(1000); x[7] = -0.0
        >>> encoded = Csr().encode(x)
        >>> encoded.nbytes, torch.equal(Csr().decode(encoded).view(torch.int32), x.view(torch.int32))
        (25, True)
    """

    id: ClassVar[str] = "csr"
    crossing: ClassVar[float] = 1 / 8 + 8 / ZVC_CHUNK - 4 / CSR_ROW
    """The share of non-zeros from which Zvc is smaller: a byte each and a pointer a row, or a bit per element."""

    def accepts(self, spec: TensorSpec) -> str | None:
        """Accepts dense floating tensors of 16, 32 or 64 bits and up to 2**31 - 1 elements that ``values`` accepts."""
        if spec.numel > MAX_NUMEL:
            return f"it takes at most {MAX_NUMEL:,} elements"
        return super().accepts(spec)

    def encode(self, x: Tensor) -> Encoded:
        """Counts in one pass over ``x`` and gathers in another; ``values`` then reads what was gathered."""
        spec = require_accepted(self, x)
        columns, rows, values = ops.csr_encode(flat(x))
        if self.values is not None:
            values = ops.minifloat_encode(values, self.values.format, True)
        return Encoded(self.id, spec, {"columns": columns, "rows": rows, "values": values})

    def draft(self, x: Tensor, known: int) -> Draft:
        """As ``encode``, with room for some more values than the ``known`` number of them."""
        spec = require_accepted(self, x)
        room = room_for(known, spec.numel)
        columns, rows, values, count = ops.csr_encode_within(flat(x), room)
        if self.values is not None:
            values = ops.minifloat_encode(values, self.values.format, True)
        encoded = Encoded(self.id, spec, {"columns": columns, "rows": rows, "values": values})
        return Draft(encoded, count, partial(self._judge, room))

    def _judge(self, room: int, numbers: list[int]) -> Judged:
        stored = numbers[0]
        words = stored if self.values is None else self.values.words(stored)
        return Judged(no_room(stored, room), stored, partial(trimmed, sizes={"columns": stored, "values": words}))

    def known(self, encoded: Encoded) -> int:
        """How many values it has."""
        return encoded.planes["columns"].numel()

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """Every bit of the original, or the values as the smaller format has them.

        Raises:
            DamagedPlanesError: the planes do not fit together.
        """
        columns, rows, values = (encoded.planes[name] for name in ("columns", "rows", "values"))
        stored, form = columns.numel(), self.values
        words = stored if form is None else form.codes_nbytes(stored) // values.element_size()
        if rows.numel() != csr_rows(encoded.spec.numel) + 1 or values.numel() != words:
            raise DamagedPlanesError(
                f"codec 'csr' was asked to decode {encoded.spec}, got {rows.numel()} row pointers, {columns.numel()} "
                f"columns and {values.numel()} values. The stash was overwritten or cut short; compute the step again."
            )
        out = like(encoded.spec, out)
        if form is not None:
            reduced, values = values, out.new_empty(stored)
            ops.minifloat_decode(reduced, form.format, values)
        ops.csr_decode(columns, rows, values, flat(out))
        return out

    def nbytes_bound(self, spec: TensorSpec) -> int:
        """The size that a tensor without a zero takes."""
        values = spec.nbytes if self.values is None else self.values.codes_nbytes(spec.numel)
        return spec.numel + values + 4 * (csr_rows(spec.numel) + 1)

    def _bits_per_element(self, density: float, dtype: torch.dtype) -> float:
        return density * (8 + self._bits_per_value(dtype)) + 32 / CSR_ROW

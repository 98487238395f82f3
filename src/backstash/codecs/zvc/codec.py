"""Zero-value compression: a bit per element and the elements that are not zero."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from backstash.codecs.base import (
    Draft,
    Encoded,
    Judged,
    check_planes,
    flat,
    like,
    no_room,
    require_accepted,
    room_for,
    trimmed,
)
from backstash.codecs.sparse import Sparse
from backstash.ops import bytes_for, zvc_chunks
from backstash.ops.registration import ops
from backstash.saved import TensorSpec


@dataclass(frozen=True)
class Zvc(Sparse):
    """Stores the elements that have any bit set, and where they are; on request in a smaller format.

    Preserves: SHAPE, SIGN, INDEX, VALUE - every bit: -0.0 and NaN payloads are not zero. With ``values`` SHAPE and
        VALUE within the bound of that; zeros stay what they are, and what is not zero does not become it.
    Layout: plane ``mask`` uint8 [ceil(n / 8)], element ``i`` in memory order in bit ``i % 8`` of byte ``i // 8``;
        ``offsets`` int64 [ceil(n / 4096)], where each chunk of 4,096 elements begins in ``values``;
        ``values`` [number of set bits] of the tensor's dtype, or as many codes as Minifloat's plane ``codes`` has them;
        but a magnitude that would become zero becomes the smallest one that the format has.
    Bytes: ceil(n / 8) + 8 * ceil(n / 4096) + word * ceil(nonzeros / fields), where an element of ``values`` has
        ``word`` bytes and ``fields`` values: itemsize and 1 without a smaller format.
    Determinism: the same planes on every backend.
    Source: cDMA (HPCA 2018), section 5, "ZVC"; ours has chunks with offsets, so that all cores decode at once, and
        tests bits, not values. Gist (ISCA 2018), section 3.2, reduces the precision of the values of CSR; ours does it
        in the pass that gathers them.

    Args:
        min_saving: the smallest share of the dense bytes worth a pass over them; declined below it.
        values: the smaller format of the values, one without scales; None keeps every bit.

    Raises:
        ValueError: ``min_saving`` is no share, or ``values`` has scales.

    Example:
        >>> x = torch.zeros(1000); x[7] = -0.0
        >>> encoded = Zvc().encode(x)
        >>> encoded.nbytes, torch.equal(Zvc().decode(encoded).view(torch.int32), x.view(torch.int32))
        (137, True)
        >>> from backstash.codecs import Minifloat
        >>> Zvc(values=Minifloat("fp8")).encode(x).nbytes
        134
    """

    id: ClassVar[str] = "zvc"

    def encode(self, x: Tensor) -> Encoded:
        """Two passes over ``x``: one counts and makes the mask, one gathers.

        With ``values`` the first one makes codes as well, and on CPU up to 31 MiB of them are put aside until their
        number is known: of smaller tensors ``x`` is read once.
        """
        spec = require_accepted(self, x)
        if self.values is None:
            mask, offsets, values = ops.zvc_encode(flat(x))
        else:
            mask, offsets, values = ops.zvc_minifloat_encode(flat(x), self.values.format)
        return Encoded(self.id, spec, {"mask": mask, "offsets": offsets, "values": values})

    def draft(self, x: Tensor, known: int) -> Draft:
        """As ``encode``, with room for some more values than the ``known`` number of them."""
        spec = require_accepted(self, x)
        room = room_for(known, spec.numel)
        if self.values is None:
            mask, offsets, values, count = ops.zvc_encode_within(flat(x), room)
        else:
            mask, offsets, values, count = ops.zvc_minifloat_encode_within(flat(x), self.values.format, room)
        encoded = Encoded(self.id, spec, {"mask": mask, "offsets": offsets, "values": values})
        return Draft(encoded, count, partial(self._judge, room))

    def _judge(self, room: int, numbers: list[int]) -> Judged:
        stored = numbers[0]
        words = stored if self.values is None else self.values.words(stored)
        return Judged(no_room(stored, room), stored, partial(trimmed, sizes={"values": words}))

    def known(self, encoded: Encoded) -> int:
        """How many values it has, or up to two more."""
        words = encoded.planes["values"].numel()
        return words if self.values is None else words * self.values.fields

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """Every bit of the original, or the values as the smaller format has them.

        Raises:
            DamagedPlanesError: the planes do not fit together.
        """
        planes, numel = encoded.planes, encoded.spec.numel
        check_planes(encoded, {"mask": bytes_for(numel, 1), "offsets": zvc_chunks(numel)})
        out = like(encoded.spec, out)
        if self.values is None:
            ops.zvc_decode(planes["mask"], planes["offsets"], planes["values"], flat(out))
        else:
            ops.zvc_minifloat_decode(planes["mask"], planes["offsets"], planes["values"], self.values.format, flat(out))
        return out

    def nbytes_bound(self, spec: TensorSpec) -> int:
        """The size that a tensor without a zero takes."""
        values = spec.nbytes if self.values is None else self.values.codes_nbytes(spec.numel)
        return bytes_for(spec.numel, 1) + 8 * zvc_chunks(spec.numel) + values

    def _bits_per_element(self, density: float, dtype: torch.dtype) -> float:
        return density * self._bits_per_value(dtype) + 1.0

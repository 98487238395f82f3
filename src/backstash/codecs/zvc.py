"""Zero-value compression: a bit per element and the elements that are not zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from backstash.codecs.base import EXACT, Encoded, ErrorBound, flat, like, refuses_layout, require
from backstash.codecs.bitmask import FLOATS
from backstash.codecs.sample import look
from backstash.errors import DamagedPlanesError
from backstash.ops.schema import bytes_for, zvc_chunks
from backstash.saved import Need, TensorSpec

_ops = torch.ops.backstash


@dataclass(frozen=True)
class Zvc:
    """Stores the elements that have any bit set, and where they are.

    Preserves: SHAPE, SIGN, INDEX, VALUE - every bit: -0.0 and NaN payloads are not zero.
    Layout: plane ``mask`` uint8 [ceil(n / 8)], element ``i`` in memory order in bit ``i % 8`` of byte ``i // 8``;
        ``offsets`` int64 [ceil(n / 4096)], where each chunk of 4,096 elements begins in ``values``;
        ``values`` [number of set bits] of the tensor's dtype.
    Bytes: ceil(n / 8) + 8 * ceil(n / 4096) + itemsize * nonzeros.
    Determinism: the same planes on every backend.
    Source: cDMA (HPCA 2018), section 5, "ZVC"; ours has chunks with offsets, so that all cores decode at once, and
        tests bits, not values.

    Args:
        min_saving: the smallest share of the dense bytes worth a pass over them; declined below it.

    Example:
        >>> x = torch.zeros(1000); x[7] = -0.0
        >>> encoded = Zvc().encode(x)
        >>> encoded.nbytes, torch.equal(Zvc().decode(encoded).view(torch.int32), x.view(torch.int32))
        (137, True)
    """

    min_saving: float = 0.02

    id: ClassVar[str] = "zvc"
    preserves: ClassVar[frozenset[Need]] = EXACT
    bound: ClassVar[ErrorBound | None] = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_saving < 1.0:
            raise ValueError(f"Zvc asked for min_saving={self.min_saving}, but it is a share: 0 <= min_saving < 1.")

    def accepts(self, spec: TensorSpec) -> str | None:
        """Dense floating tensors of 16, 32 or 64 bits."""
        if spec.dtype not in FLOATS:
            return "it takes float32, bfloat16, float16 and float64 only"
        return refuses_layout(spec)

    def declines(self, x: Tensor) -> str | None:
        """Declines where a sample has too few zeros (see codecs.sample). On CUDA the host waits for it."""
        elements, nonzeros, _ = look(flat(x))
        if elements == 0:
            return "it is empty"
        density = nonzeros / elements
        saving = 1.0 - density - 1.0 / (8 * x.element_size())
        return None if saving >= self.min_saving else f"{density:.0%} of a sample is not zero"

    def encode(self, x: Tensor) -> Encoded:
        """Two passes over ``x``: one counts and makes the mask, one gathers."""
        spec = require(self, x)
        mask, offsets, values = _ops.zvc_encode(flat(x))
        return Encoded(self.id, spec, {"mask": mask, "offsets": offsets, "values": values})

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """Every bit of the original.

        Raises:
            DamagedPlanesError: the planes do not fit together.
        """
        planes, numel = encoded.planes, encoded.spec.numel
        if planes["mask"].numel() != bytes_for(numel, 1) or planes["offsets"].numel() != zvc_chunks(numel):
            raise DamagedPlanesError(
                f"codec 'zvc' was asked to decode {encoded.spec}, got a mask of {planes['mask'].numel()} bytes and "
                f"{planes['offsets'].numel()} offsets. The stash was overwritten or cut short; compute the step again."
            )
        out = like(encoded.spec, out)
        _ops.zvc_decode(planes["mask"], planes["offsets"], planes["values"], flat(out))
        return out

    def nbytes_bound(self, spec: TensorSpec) -> int:
        """As if no element were zero."""
        return bytes_for(spec.numel, 1) + 8 * zvc_chunks(spec.numel) + spec.nbytes

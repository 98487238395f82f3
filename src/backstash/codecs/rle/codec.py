"""Run lengths of zeros."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from backstash.codecs.base import (
    EXACT,
    Encoded,
    check_planes,
    check_saving,
    flat,
    like,
    refuses_floats,
    require_accepted,
)
from backstash.codecs.sample import sample
from backstash.ops import bits_of, zvc_chunks
from backstash.ops.registration import ops
from backstash.saved import Need, TensorSpec


@dataclass(frozen=True)
class Rle:
    """Stores the elements that have any bit set, and how many zeros and how many others follow each other.

    Small where zeros cluster; where they are scattered, zvc is smaller and faster.

    Preserves: SHAPE, SIGN, INDEX, VALUE - every bit: -0.0 and NaN payloads are not zero.
    Layout: plane ``tokens`` uint8, the lengths of runs in memory order, alternately of elements that are zero and of
        others, zeros first; each chunk of 4,096 elements begins anew, and a run over 255 is 255, 0 and the rest of it;
        ``starts`` int64 [2 * ceil(n / 4096)], where each chunk begins in ``tokens``, then where in ``values``;
        ``values`` [number of elements that have any bit set] of the tensor's dtype.
    Bytes: tokens + 16 * ceil(n / 4096) + itemsize * nonzeros.
    Determinism: the same planes on every backend.
    Source: cDMA (HPCA 2018), section 5, "RLE"; ours has chunks with starts, so that all cores decode at once, tells the
        lengths of runs of other elements, too, and tests bits, not values.

    Args:
        min_saving: the smallest share of the dense bytes worth a pass over them; declined below it.

    Raises:
        ValueError: ``min_saving`` is no share.

    Example:
        >>> import torch
        >>> x = torch.zeros(1000); x[7] = -0.0
        >>> encoded = Rle().encode(x)
        >>> encoded.planes["tokens"].tolist()
        [7, 1, 255, 0, 255, 0, 255, 0, 227]
    """

    min_saving: float = 0.02

    id: ClassVar[str] = "rle"
    preserves: ClassVar[frozenset[Need]] = EXACT
    bound: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_saving(self, self.min_saving)

    def accepts(self, spec: TensorSpec) -> str | None:
        """Accepts dense floating tensors of 16, 32 or 64 bits."""
        return refuses_floats(spec)

    def declines(self, x: Tensor) -> str | None:
        """Declines where a sample has too few zeros, or too scattered ones. On CUDA the host waits for the sample."""
        looked = bits_of(sample(flat(x))) != 0
        if looked.numel() == 0:
            return "it is empty"
        density, runs = float(looked.double().mean()), int((looked[1:] != looked[:-1]).sum()) + 1
        saving = 1.0 - density - runs / looked.numel() / x.element_size()
        return None if saving >= self.min_saving else f"a sample is {density:.0%} not zero, in {runs} runs"

    def encode(self, x: Tensor) -> Encoded:
        """Makes the passes that zvc makes, and one over its mask."""
        spec = require_accepted(self, x)
        tokens, starts, values = ops.rle_encode(flat(x))
        return Encoded(self.id, spec, {"tokens": tokens, "starts": starts, "values": values})

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """Every bit of the original.

        Raises:
            DamagedPlanesError: the planes do not fit together.
        """
        planes, numel = encoded.planes, encoded.spec.numel
        check_planes(encoded, {"starts": 2 * zvc_chunks(numel)})
        out = like(encoded.spec, out)
        ops.rle_decode(planes["tokens"], planes["starts"], planes["values"], flat(out))
        return out

    def nbytes_bound(self, spec: TensorSpec) -> int:
        """The size where every run is one element long, and every chunk begins with a non-zero."""
        chunks = zvc_chunks(spec.numel)
        return spec.numel + chunks + 16 * chunks + spec.nbytes

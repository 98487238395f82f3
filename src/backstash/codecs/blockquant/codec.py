"""Integers of few bits between the extremes of each group of neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from backstash.codecs.base import (
    Draft,
    Encoded,
    ErrorBound,
    certain,
    check_planes,
    flat,
    like,
    refuses_singles,
    require_accepted,
    taken,
)
from backstash.ops import bytes_for, groups
from backstash.ops.registration import ops
from backstash.saved import Need, TensorSpec

BITS = (1, 2, 4, 8)
GROUP_SIZES = tuple(2**power for power in range(4, 13))
ROUNDINGS = ("stochastic", "nearest")


@dataclass(frozen=True)
class BlockQuant:
    """Stores each element as an integer of few bits: how far it is between its group's smallest and largest element.

    Preserves: SHAPE, VALUE - within ``bound``: a share of the group's range, one step or, to nearest, half of one.
    Layout: plane ``codes`` uint8 [ceil(n * bits / 8)], element ``i`` in memory order in the bits from ``i * bits`` on
        of a little-endian stream; ``ranges`` [2 * ceil(n / group_size)] of the tensor's dtype, the smallest and the
        largest element of each group. Code ``c`` stands for ``c / (2**bits - 1)`` of the way from the one to the other.
    Bytes: ceil(n * bits / 8) + 2 * itemsize * ceil(n / group_size).
    Determinism: the same planes on every backend, and whenever the same tensor is encoded. The numbers by which it is
        rounded are hashed from the seed, the group's extremes and the element's index.
    Source: ActNN (ICML 2021): 2 bits, groups of 256, stochastic rounding, by which gradients stay unbiased.
        Ours has the bits of all tensors given, not found by a sensitivity; it keeps the extremes in the tensor's dtype
        instead of a zero point and a scale; and its random numbers come from the data, so that it needs
        no generator and rounds a recomputed tensor as it did the first one.

    Args:
        bits: 1, 2, 4 or 8.
        group_size: elements that share a range, a power of two from 16 to 4,096.
        rounding: ``"stochastic"``, up with the probability by which it is right on average; or ``"nearest"``.
        seed: of the random numbers, less than 2**32.

    Raises:
        ValueError: there are no such bits, groups or rounding, or the seed is out of range.
        CodecRefusedError: on encode, an element is infinite or NaN, or a group's range is no number of float32.

    Example:
        >>> import torch
        >>> x = torch.linspace(-1, 2, 1000)
        >>> encoded = BlockQuant(bits=4, rounding="nearest").encode(x)
        >>> encoded.nbytes, bool((BlockQuant(bits=4).decode(encoded) - x).abs().max() < 0.03)
        (532, True)
    """

    bits: int = 2
    group_size: int = 256
    rounding: str = "stochastic"
    seed: int = 0

    id: ClassVar[str] = "blockquant"
    preserves: ClassVar[frozenset[Need]] = frozenset({Need.SHAPE, Need.VALUE})

    def __post_init__(self) -> None:
        choices = {"bits": BITS, "group_size": GROUP_SIZES, "rounding": ROUNDINGS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"BlockQuant was asked for {name}={getattr(self, name)!r}, but the choices are "
                    f"{', '.join(map(repr, allowed))}. Choose one of these."
                )
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise ValueError(f"BlockQuant was asked for seed={self.seed}, but a seed is at least 0 and below 2**32.")

    @property
    def label(self) -> str:
        """With the bits: ``"blockquant2"``."""
        return f"{self.id}{self.bits}"

    @property
    def bound(self) -> ErrorBound:
        """A step, or half a step to nearest; rounding adds a thousandth of it and one unit in the last place."""
        step = (0.5 if self.rounding == "nearest" else 1.0) / (2**self.bits - 1)
        return ErrorBound(rel=step * (1 + 2.0**-10), ulps=1, group_size=self.group_size)

    def accepts(self, spec: TensorSpec) -> str | None:
        """Accepts dense floating tensors of 16 or 32 bits."""
        return refuses_singles(spec)

    def declines(self, x: Tensor) -> str | None:
        """Declines only an empty tensor."""
        return None if x.numel() else "it is empty"

    def encode(self, x: Tensor) -> Encoded:
        """Reads each group twice, then from the caches. On CUDA the host waits to know whether all is finite."""
        return certain(self.draft(x))

    def draft(self, x: Tensor, known: object = True) -> Draft:
        """As ``encode``, without the wait."""
        spec = require_accepted(self, x)
        stochastic = self.rounding == "stochastic"
        codes, ranges, refused = ops.blockquant_encode(flat(x), self.bits, self.group_size, stochastic, self.seed)
        encoded = Encoded(self.id, spec, {"codes": codes, "ranges": ranges})
        return Draft(encoded, refused, lambda numbers: taken(_refusal(spec, numbers[0])))

    def known(self, encoded: Encoded) -> object:
        """That it was taken."""
        return True

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """Every element at the step that it was rounded to.

        Raises:
            DamagedPlanesError: a plane has another size.
        """
        planes = encoded.planes
        check_planes(encoded, self.sizes(encoded.spec))
        out = like(encoded.spec, out)
        ops.blockquant_decode(planes["codes"], planes["ranges"], self.bits, self.group_size, flat(out))
        return out

    def sizes(self, spec: TensorSpec) -> dict[str, int]:
        """Elements of the planes of a tensor, by name."""
        return {"codes": bytes_for(spec.numel, self.bits), "ranges": 2 * groups(spec.numel, self.group_size)}

    def nbytes_bound(self, spec: TensorSpec) -> int:
        """The size, which does not depend on the data."""
        return bytes_for(spec.numel, self.bits) + 2 * spec.dtype.itemsize * groups(spec.numel, self.group_size)


def _refusal(spec: TensorSpec, refused: int) -> str | None:
    if not refused:
        return None
    return (
        f"codec 'blockquant' was asked to encode {spec}, got {refused} elements or ranges that are infinite or NaN, "
        f"and no step between its extremes for them. Use an exact codec, or Keep()."
    )

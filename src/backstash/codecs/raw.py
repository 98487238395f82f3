"""A copy of a tensor's bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from backstash.codecs.base import EXACT, Encoded, flat, like, refuses_layout, require_accepted
from backstash.errors import DamagedPlanesError
from backstash.saved import Need, TensorSpec


@dataclass(frozen=True)
class Raw:
    """Stores a copy of the elements: for what goes to another store and cannot be made smaller.

    On the device itself it saves nothing.

    Preserves: SHAPE, SIGN, INDEX, VALUE - every bit.
    Layout: plane ``values`` [n] of the tensor's dtype, in memory order.
    Bytes: itemsize * n.
    Determinism: the same planes on every backend.
    Source: vDNN (MICRO 2016) and Layrub (TACO 2018), which move feature maps as they are.

    Example:
        >>> import torch
        >>> Raw().encode(torch.arange(6.0).reshape(2, 3).t()).planes["values"].tolist()
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    """

    id: ClassVar[str] = "raw"
    preserves: ClassVar[frozenset[Need]] = EXACT
    bound: ClassVar[None] = None

    def accepts(self, spec: TensorSpec) -> str | None:
        """Accepts dense tensors of any dtype."""
        return refuses_layout(spec)

    def declines(self, x: Tensor) -> str | None:
        """Declines only an empty tensor."""
        return "it is empty" if x.numel() == 0 else None

    def encode(self, x: Tensor) -> Encoded:
        """Copies the elements once."""
        return Encoded(self.id, require_accepted(self, x), {"values": flat(x).clone()})

    def adopt(self, x: Tensor) -> Encoded:
        """Makes the memory of ``x`` the plane, without a copy: nobody else may hold it or write to it."""
        return Encoded(self.id, require_accepted(self, x), {"values": flat(x)})

    def view(self, encoded: Encoded) -> Tensor:
        """As ``decode`` without a copy: a view of the plane, which nobody may write to.

        Raises:
            DamagedPlanesError: the plane has another length.
        """
        values, spec = self._values(encoded), encoded.spec
        return values.as_strided(spec.shape, spec.stride)

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """Every bit of the original.

        Raises:
            DamagedPlanesError: the plane has another length.
        """
        values = self._values(encoded)
        out = like(encoded.spec, out)
        flat(out).copy_(values)
        return out

    def _values(self, encoded: Encoded) -> Tensor:
        values, spec = encoded.planes["values"], encoded.spec
        if values.numel() != spec.numel or values.dtype is not spec.dtype:
            raise DamagedPlanesError(
                f"codec 'raw' was asked to decode {spec}, got {TensorSpec.of(values)}. The stash was overwritten or "
                f"cut short; compute the step again."
            )
        return values

    def nbytes_bound(self, spec: TensorSpec) -> int:
        """The bytes of the elements."""
        return spec.nbytes

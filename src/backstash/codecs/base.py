"""What a codec is.

A codec turns a tensor into named planes and back. It is a frozen dataclass, so its ``repr`` is the call that makes it
and two equal codecs do the same. The contract, which :func:`backstash.testing.check_codec` checks:

* ``encode`` never changes ``x`` and never keeps a view of it; ``decode`` is a pure function of the planes, may run any
  number of times, and fills the ``out`` it is given, whose strides are the original ones.
* What it ``preserves`` it preserves exactly, bit for bit, unless it has a ``bound``.
* It refuses what it cannot take: by the spec (``accepts``), by a cheap look at the data (``declines``), or, where only
  the full pass can tell, by raising :class:`~backstash.errors.CodecRefusedError` from ``encode``.
* It knows nothing of stores, sessions or policies.

Three members are optional:

* ``label``, a str: what reports show in place of ``id``, where one id has several forms: ``"zvc+fp8"``.
* ``keeps(mask: Mask) -> bool``: whether every element, NaN and infinities too, decodes to one that the mask's test
  treats like the original, so that a codec which does not preserve SIGN at large can serve such a SIGN need
  nevertheless; one that has no such method keeps no mask beyond what it preserves.
* ``serves``, a frozenset: the functions (``SavedTensor.function``) for whose derivative alone the codec is made; a
  Session uses it for no other reader.

Tensors are encoded in memory order, so that any dense layout (contiguous, channels_last, transposed) costs the same
and comes back with the same strides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from backstash.errors import CodecRefusedError, DamagedPlanesError
from backstash.saved import Mask, Need, TensorSpec, Test

EXACT = frozenset(Need)
"""What a codec preserves that gives back every bit."""


@dataclass(frozen=True, slots=True)
class ErrorBound:
    """How far a decoded element may be from the original. NaN stays NaN.

    With ``each``, an infinity counts as the largest finite number of its dtype; otherwise it stays what it was.

    Attributes:
        abs: the largest difference.
        rel: the largest difference as a share of the tensor's value range; with ``group_size`` of the group's.
        ulps: with ``rel``, what rounding may add to it, in units in the last place that the largest magnitude, of the
            tensor or the group, has in the tensor's dtype.
        each: the largest difference as a share of the element's own magnitude; 2**-4 where 3 bits of it are kept.
        tiny: with ``each``, the magnitude below which an element may become zero, or anything up to this, of its sign.
        limit: with ``each``, the magnitude above which an element becomes this, with its sign.
        share: with ``group_size``, what is tiny as well: a share of the group's largest magnitude.
        group_size: how many neighbours in memory order are a group.
    """

    abs: float | None = None
    rel: float | None = None
    ulps: int = 0
    each: float | None = None
    tiny: float = 0.0
    limit: float = math.inf
    share: float = 0.0
    group_size: int = 0


@dataclass(frozen=True, slots=True)
class Encoded:
    """A stashed value.

    Attributes:
        codec: id of the codec that made it.
        spec: the tensor that was encoded.
        planes: named tensors; the names appear in reports.
        meta: small numbers that decoding needs.
    """

    codec: str
    spec: TensorSpec
    planes: Mapping[str, Tensor]
    meta: Mapping[str, int | float | tuple[int, ...]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct storages behind the planes."""
        storages = {}
        for plane in self.planes.values():
            storage = plane.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())


@runtime_checkable
class Codec(Protocol):
    """See the module's docstring for the contract."""

    id: ClassVar[str]

    @property
    def preserves(self) -> frozenset[Need]:
        """The needs that it serves; a class variable where it is the same for all instances."""

    @property
    def bound(self) -> ErrorBound | None:
        """How far VALUE is served, None where it is served exactly; a class variable or a property."""

    def accepts(self, spec: TensorSpec) -> str | None:
        """None if tensors like ``spec`` can be encoded, else the reason why not."""

    def declines(self, x: Tensor) -> str | None:
        """None if encoding ``x`` pays, else the reason; judged on a sample, without a pass over the data."""

    def encode(self, x: Tensor) -> Encoded:
        """Encode ``x``, of any dense layout."""

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """Fill ``out`` (allocated like the original where None) and return it."""

    def nbytes_bound(self, spec: TensorSpec) -> int:
        """Bytes of the planes in the worst case."""


@lru_cache(maxsize=4096)
def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill one block of memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if size == 0:
            return True
        if step != expected:
            return False
        expected *= size
    return True


def flat(x: Tensor) -> Tensor:
    """``x`` as a 1-D view in memory order, without its graph. ``x`` must be dense (see :func:`refuses_layout`)."""
    x = x.detach()
    if x.dim() == 1 and x.is_contiguous():
        return x
    return x.as_strided((x.numel(),), (1,))


def refuses_layout(spec: TensorSpec) -> str | None:
    """The reason why no codec takes a tensor whose elements do not fill one block of memory, else None."""
    if is_dense(spec.shape, spec.stride):
        return None
    return f"its elements do not fill one block of memory (strides {list(spec.stride)})"


SINGLES = (torch.float32, torch.bfloat16, torch.float16)
"""Element types that codecs with an error take: what is computed as float32."""


def refuses_singles(spec: TensorSpec) -> str | None:
    """The reason why a codec of :data:`SINGLES` does not take a tensor, for its dtype or its layout, else None."""
    if spec.dtype not in SINGLES:
        return f"it takes float32, bfloat16 and float16 only, not {str(spec.dtype).removeprefix('torch.')}"
    return refuses_layout(spec)


def asks_for_sign(mask: Mask) -> bool:
    """Whether a mask asks how elements compare with zero and infinity, and no more; -0.0 is zero for it."""
    if mask.test is Test.CLOSED:
        return mask.lo in (0.0, -math.inf) and mask.hi in (0.0, math.inf)
    return mask.test in (Test.NOT_LE, Test.GT) and mask.lo == 0.0


def check_planes(encoded: Encoded, sizes: Mapping[str, int]) -> None:
    """Make sure that planes have the numbers of elements that decoding needs, by name.

    Raises:
        DamagedPlanesError: one has not.
    """
    for name, size in sizes.items():
        got = encoded.planes[name].numel()
        if got != size:
            raise DamagedPlanesError(
                f"codec {encoded.codec!r} was asked to decode {encoded.spec}, whose plane {name!r} has {size} "
                f"elements, got {got}. The stash was overwritten or cut short; compute the step again."
            )


def require(codec: Codec, x: Tensor) -> TensorSpec:
    """The spec of ``x``.

    Raises:
        CodecRefusedError: ``codec`` does not accept it.
    """
    spec = TensorSpec.of(x)
    reason = codec.accepts(spec)
    if reason is not None:
        raise CodecRefusedError(
            f"codec {codec.id!r} was asked to encode {spec}, but {reason}. "
            f"Call .accepts(spec) first, or choose another codec."
        )
    return spec


def like(spec: TensorSpec, out: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """``out`` if given, else fresh memory.

    Args:
        spec: what was encoded.
        out: must have its shape, strides and device, and its dtype or ``dtype``.
        dtype: the dtype of fresh memory, where it is not that of ``spec``.

    Raises:
        CodecRefusedError: ``out`` has another layout or dtype.
    """
    if out is None:
        return torch.empty_strided(spec.shape, spec.stride, dtype=dtype or spec.dtype, device=spec.device)
    if (
        tuple(out.shape) != spec.shape
        or out.stride() != spec.stride
        or out.dtype not in (spec.dtype, dtype)
        or out.device != spec.device
    ):
        raise CodecRefusedError(
            f"decode was asked to fill out={TensorSpec.of(out)} with strides {list(out.stride())} on {out.device}, but "
            f"{spec} with strides {list(spec.stride)} on {spec.device} was encoded. Pass out=None, or memory like it."
        )
    return out

"""The contract of a codec.

A codec turns a tensor into named planes and back. It is a frozen dataclass, so its ``repr`` is the call that makes it,
and two equal codecs do the same. Any class with the members of :class:`Codec` is a codec; nothing has to be inherited.
:func:`backstash.testing.check_codec` checks this contract:

* ``encode`` never changes ``x`` and never keeps a view of it. ``decode`` is a pure function of the planes, may run any
  number of times, and fills the ``out`` that it is given, whose strides are the original ones.
* What a codec ``preserves`` it preserves bit for bit, unless it has a ``bound``.
* A codec refuses what it cannot take: by the spec (``accepts``), by a cheap look at the data (``declines``), or, where
  only the full pass can tell, by raising :class:`~backstash.errors.CodecRefusedError` from ``encode``.
* A codec knows nothing of stores, sessions or policies.

A codec may also have the members below. Nobody reads them directly: the function that is named in brackets does, and it
knows what counts for a codec that lacks the member.

* ``label: str`` (:func:`label`): what reports show where one id has several forms: ``"zvc+fp8"``. Without it: ``id``.
* ``mask: Mask`` (:func:`mask_of`): the test whose outcome the codec stores. A codec that preserves SIGN and not VALUE
  has one.
* ``keeps(mask) -> bool`` (:func:`keeps`): whether every element, NaN and infinities too, decodes to one for which the
  mask's test has the same outcome. Then the codec serves that SIGN need although it does not preserve SIGN at large.
  Without it: False.
* ``serves: frozenset[str]`` (:func:`serves`): the functions (``SavedTensor.function``) for whose derivative alone the
  codec is made. A Session uses it for no other reader. Without it: every reader.
* ``refuses_reader(saved) -> str | None`` (:func:`refuses_reader`): why a reader would notice the error of a codec with
  a bound; None if its results have the same bits as without. A codec that has it is exact for all readers that it does
  not refuse, and a Session uses it for no other reader. Without it: whoever reads a rounded value notices.
* ``repeats: bool`` (:func:`repeats`): whether a codec with a bound decodes what it has decoded to the same bits again,
  after it was encoded once more. Without it: False.
* ``direct(form) -> ReadPlanes | None`` (:func:`direct`): how a backward kernel reads the planes without decoding them,
  in that form of :mod:`backstash.codecs.direct`. Without it: not at all.
* ``adopt(x) -> Encoded`` (:func:`adopt`): as ``encode``, for a caller who gives ``x`` up, so that its memory may become
  a plane. Without it: ``encode``.
* ``view(encoded) -> Tensor`` (:func:`view`): as ``decode``, but a view of a plane, to which nobody may write. Without
  it the tensor is always decoded.
* ``draft(x, known) -> Draft`` and ``known(encoded)`` (:func:`draft`): as ``encode``, but the host does not wait for a
  device to know how large the planes are, or whether ``x`` can be encoded at all. ``known`` is what an encoding of a
  similar tensor has told. Without them: ``encode``.

Tensors are encoded in memory order, so that every dense layout (contiguous, channels_last, transposed) costs the same
and comes back with the same strides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from backstash.arguments import check_number
from backstash.codecs.direct import Direct
from backstash.errors import CodecRefusedError, DamagedPlanesError
from backstash.saved import Mask, Need, SavedTensor, TensorSpec, Test

EXACT = frozenset(Need)
"""What a codec preserves that returns every bit."""

ReadPlanes = Callable[["Encoded"], "Direct | None"]
"""Takes the planes out of an Encoded in a form that a backward kernel reads; None where they are not in that form."""


@dataclass(frozen=True, slots=True)
class ErrorBound:
    """How far a decoded element may be from the original. NaN stays NaN, and an infinity stays what it was.

    Attributes:
        abs: the largest difference.
        rel: the largest difference as a share of the tensor's value range; with ``group_size`` of the group's.
        ulps: with ``rel``, what rounding may add to it, in units in the last place that the largest magnitude, of the
            tensor or the group, has in the tensor's dtype.
        each: the largest difference as a share of the element's own magnitude; 2**-4 where 3 bits of it are kept.
        tiny: with ``each``, the magnitude below which an element may become zero, or anything up to this, of its sign.
        limit: with ``each``, the magnitude above which a finite element becomes this, with its sign.
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


class Judged(NamedTuple):
    """What the numbers of a draft say.

    Attributes:
        refusal: why the planes are not an encoding of the tensor; None if they are.
        known: what the next draft of a similar tensor is made with. None: it had better be encoded.
        cut: takes from the planes what was room to spare; None where there is none.
    """

    refusal: str | None
    known: Any
    cut: Callable[[Encoded], Encoded] | None = None


class Draft(NamedTuple):
    """An encoding of which only the device knows whether it is whole.

    Attributes:
        encoded: the planes, with room for what was expected.
        numbers: on the device, [n].
        judge: what these numbers say, once the host has them.
    """

    encoded: Encoded
    numbers: Tensor
    judge: Callable[[list[Any]], Judged]


class Drafting(Protocol):
    """The optional members of a codec that makes drafts."""

    def draft(self, x: Tensor, known: Any) -> Draft:
        """Encode ``x`` without a wait of the host."""

    def known(self, encoded: Encoded) -> Any:
        """What an encoding tells of similar tensors: what ``draft`` is given. None: these had better be encoded."""


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


# -- optional members ------------------------------------------------------------------------------------------------


def label(codec: Codec) -> str:
    """What reports call the codec: its ``label``, else its ``id``."""
    name: str | None = getattr(codec, "label", None)
    return codec.id if name is None else name


def mask_of(codec: Codec) -> Mask | None:
    """The test whose outcome the codec stores: its ``mask``, else None."""
    mask: Mask | None = getattr(codec, "mask", None)
    return mask


def keeps(codec: Codec, mask: Mask) -> bool:
    """Whether a decoded element always has the same outcome of the mask's test as the original (``keeps``)."""
    method: Callable[[Mask], bool] | None = getattr(codec, "keeps", None)
    return method is not None and method(mask)


def serves_function(codec: Codec, function: str | None) -> bool:
    """Whether a reader of the derivative of that function, None for any other reader, may have the codec."""
    functions: frozenset[str] | None = getattr(codec, "serves", None)
    return functions is None or function in functions


def refuses_reader(codec: Codec, saved: SavedTensor) -> str | None:
    """Why a reader would notice the error of a codec that asks each of them; None if it does not ask, or would not."""
    method: Callable[[SavedTensor], str | None] | None = getattr(codec, "refuses_reader", None)
    return None if method is None else method(saved)


def repeats(codec: Codec) -> bool:
    """Whether what the codec has decoded is decoded to the same bits again after it was encoded once more.

    Every exact codec does that; one with a bound says so by an attribute ``repeats``.
    """
    return codec.bound is None or bool(getattr(codec, "repeats", False))


def direct(codec: Codec, form: type[Direct]) -> ReadPlanes | None:
    """How a backward kernel reads the codec's planes in that form without decoding them; None where it cannot."""
    method: Callable[[type[Direct]], ReadPlanes | None] | None = getattr(codec, "direct", None)
    return None if method is None else method(form)


def adopt(codec: Codec, x: Tensor) -> Encoded:
    """Encodes a tensor that the caller gives up: nobody else holds its memory, which may become a plane."""
    method: Callable[[Tensor], Encoded] = getattr(codec, "adopt", codec.encode)
    return method(x)


def view(codec: Codec) -> Callable[[Encoded], Tensor] | None:
    """How the tensor is had as a view of a plane, to which nobody may write; None where it has to be decoded."""
    method: Callable[[Encoded], Tensor] | None = getattr(codec, "view", None)
    return method


def drafting(codec: Codec) -> Drafting | None:
    """The codec itself if it makes drafts (``draft``, ``known``), else None: also where its ``draft`` is None."""
    return cast("Drafting", codec) if getattr(codec, "draft", None) is not None else None


# -- for those who write a codec --------------------------------------------------------------------------------------


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


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Element types that exact codecs of floating-point numbers take."""

SINGLES = (torch.float32, torch.bfloat16, torch.float16)
"""Element types that codecs with an error take: what is computed as float32."""


def refuses_floats(spec: TensorSpec) -> str | None:
    """The reason why a codec of :data:`FLOATS` does not take a tensor, for its dtype or its layout, else None."""
    if spec.dtype not in FLOATS:
        return "it takes float32, bfloat16, float16 and float64 only"
    return refuses_layout(spec)


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


def room_for(known: int, most: int) -> int:
    """Room for what a tensor needs if a similar one needed ``known``, of at most ``most``.

    A sixteenth more than that one, and a sixty-fourth of all: for what changes from one batch to the next.
    """
    return min(most, known + known // 16 + most // 64)


def no_room(needed: int, room: int) -> str | None:
    """The reason why a draft lacks something, None where it does not."""
    return None if needed <= room else f"it has {needed} values, and room for {room} was expected to be enough"


def taken(refusal: str | None) -> Judged:
    """What the numbers say where a codec takes a tensor or does not, and there is nothing else to be known."""
    return Judged(refusal, True if refusal is None else None)


def certain(draft: Draft) -> Encoded:
    """Returns the encoding that was drafted. The host waits to know that it is whole.

    Raises:
        CodecRefusedError: it is not.
    """
    refusal = draft.judge(draft.numbers.reshape(-1).tolist()).refusal
    if refusal is not None:
        raise CodecRefusedError(refusal)
    return draft.encoded


def trimmed(encoded: Encoded, sizes: Mapping[str, int]) -> Encoded:
    """The encoding, with no more than so many elements in these planes."""
    return replace(encoded, planes={**encoded.planes, **{name: encoded.planes[name][:n] for name, n in sizes.items()}})


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


def check_saving(codec: object, share: object) -> None:
    """Raises an error for a ``min_saving`` that is no share of a value's bytes.

    Raises:
        TypeError: it is no number.
        ValueError: it is out of range.
    """
    name = type(codec).__name__
    check_number(share, "min_saving", name, 0.05)
    assert isinstance(share, (int, float))
    if not 0.0 <= share < 1.0:
        raise ValueError(f"{name} asked for min_saving={share}, but it is a share: 0 <= min_saving < 1.")


def require_accepted(codec: Codec, x: Tensor) -> TensorSpec:
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

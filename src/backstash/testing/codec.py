"""``check_codec``: the contract in the docstring of ``backstash.codecs.base``."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from backstash import codecs
from backstash.bits import equal_bits
from backstash.codecs.base import EXACT, Codec, Encoded, ErrorBound
from backstash.errors import CodecRefusedError, DamagedPlanesError
from backstash.saved import Need, TensorSpec
from backstash.testing.comparison import compare_tensors, tested_mask
from backstash.testing.failures import fail, only
from backstash.testing.layouts import MARGIN, copy, describe_layout, poisoned
from backstash.testing.layouts import memory as memory_of
from backstash.testing.tensors import probes

_NAMES = {"inf": math.inf, "nan": math.nan, "torch": torch, **{name: getattr(codecs, name) for name in codecs.__all__}}
"""The names that the repr of a codec may contain."""

_POISONS = (0xA5, 0xFF)


@dataclass(frozen=True)
class CodecCheck:
    """How many tensors :func:`check_codec` has tried.

    Attributes:
        encoded: number of tensors that were encoded, decoded and compared.
        refused: number of tensors that the codec refused; a codec may refuse any.
    """

    encoded: int
    refused: int


def check_codec(codec: Codec, tensors: Iterable[Tensor] | None = None) -> CodecCheck:
    """Checks the contract in the docstring of ``backstash.codecs.base``.

    A codec that preserves SIGN but not VALUE must have a ``mask``, whose test and stand-ins are compared. If a
    ``bound`` has several of ``abs``, ``rel`` and ``each``, all of them must hold. Without ``each``, infinities and NaNs
    must come back unchanged. If the codec has ``keeps``, the outcomes of all masks that it promises to keep are
    compared.

    Args:
        codec: the codec to check.
        tensors: the tensors to encode copies of. Default: :func:`backstash.testing.probes`.

    Returns:
        How many tensors were encoded and compared, and how many the codec refused.

    Raises:
        AssertionError: the codec breaks the contract, or refuses every tensor that has an element.
    """
    twin = _check_declaration(codec)
    encoded, refused, elements = 0, 0, 0
    largest: tuple[Tensor, Encoded] | None = None
    for given in probes() if tensors is None else tensors:
        kept = _check_tensor(codec, twin, given)
        if kept is None:
            refused += 1
            continue
        encoded, elements = encoded + 1, elements + given.numel()
        if largest is None or given.numel() > largest[0].numel():
            largest = given, kept
    if largest is None or elements == 0:
        fail(
            f"check_codec asked {codec!r} to encode {encoded + refused} tensors",
            "refusals of all that have an element",
            "Pass tensors that it takes: check_codec(codec, tensors=...)",
        )
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: _check_decode(codec, *largest), range(4)))
    return CodecCheck(encoded, refused)


def _check_declaration(codec: Codec) -> Codec:
    """Checks the codec's members and its repr. Returns an equal codec, which the repr has constructed."""
    name = type(codec).__name__
    if not isinstance(codec, Codec):
        members = ("id", "preserves", "bound", "accepts", "declines", "encode", "decode", "nbytes_bound")
        missing = ", ".join(member for member in members if not hasattr(codec, member))
        fail(f"check_codec asked for a codec, of class {name}", f"no {missing}", "Define these members")
    if not (is_dataclass(codec) and type(codec).__dataclass_params__.frozen):  # type: ignore[attr-defined]
        fail(f"check_codec asked for a frozen dataclass, of {name}", "another class", "Use @dataclass(frozen=True)")
    if not isinstance(codec.preserves, frozenset) or Need.SHAPE not in codec.preserves:
        fail(
            f"check_codec asked {codec!r} for the needs it preserves, SHAPE among them",
            repr(codec.preserves),
            "Make it a frozenset of Need; what has a spec has the shape",
        )
    if Need.VALUE in codec.preserves and codec.bound is None and codec.preserves != EXACT:
        fail(
            f"check_codec asked {codec!r} for every need, as it preserves VALUE without a bound",
            repr(codec.preserves),
            "Use codecs.base.EXACT",
        )
    if not (codec.bound is None or (isinstance(codec.bound, ErrorBound) and codec.bound != ErrorBound())):
        fail(f"check_codec asked {codec!r} for its bound", repr(codec.bound), "Use None, or ErrorBound(abs=...)")
    module = vars(sys.modules[type(codec).__module__])
    try:
        twin = eval(repr(codec), {**_NAMES, **module, **_classes_within(codec)})
    except (SyntaxError, NameError, TypeError, AttributeError, ValueError) as error:
        fail(
            f"check_codec asked for a repr that makes {name} again",
            f"{codec!r}, which raises {type(error).__name__}: {error}",
            "Use the dataclass's own repr, with fields whose repr is an expression",
        )
    if type(twin) is not type(codec) or _parameters(twin) != _parameters(codec):
        fail(f"check_codec asked for a repr that makes {codec!r} again", repr(twin), "Use the dataclass's own repr")
    return twin  # type: ignore[no-any-return]


def _classes_within(codec: Any) -> dict[str, type]:
    """By their names, the codec's class and those of the dataclasses that are its parameters."""
    found = {type(codec).__name__: type(codec)}
    for each in (getattr(codec, field.name) for field in fields(codec)):
        if is_dataclass(each) and not isinstance(each, type):
            found = _classes_within(each) | found
    return found


def _parameters(codec: Any) -> list[str]:
    """The codec's parameters as text, in which a NaN equals itself."""
    return [repr(getattr(codec, field.name)) for field in fields(codec)]


def _check_tensor(codec: Codec, twin: Codec, given: Tensor) -> Encoded | None:
    """Checks the codec on a copy of ``given``. Returns the encoded copy, or None if the codec refused it."""
    x, original = copy(given), copy(given).detach()
    where = f"check_codec({codec!r}) on {describe_layout(x)}"
    spec = TensorSpec.of(x)
    reason = codec.accepts(spec)
    if not (reason is None or (isinstance(reason, str) and reason)):
        fail(f"{where}: accepts() was asked", repr(reason), "Return None, or the reason as text")
    if reason is not None:
        try:
            codec.encode(x)
        except CodecRefusedError:
            return None
        fail(f"{where}: encode was asked for what accepts() refuses ({reason})", "no error", "Call require(self, x)")
    with only(where, "declines() and encode()", CodecRefusedError):
        codec.declines(x)
        try:
            encoded = codec.encode(x)
        except CodecRefusedError:
            _check_unchanged(where, x, original)
            return None
        again = twin.encode(x)
    _check_unchanged(where, x, original)
    _check_encoded(where, codec, encoded, x)
    if encoded.planes.keys() != again.planes.keys() or not all(
        equal_bits(plane, again.planes[name]) for name, plane in encoded.planes.items()
    ):
        fail(f"{where}: an equal codec was asked to encode it", "other planes", "Let encode depend on nothing but x")
    memory_of(x).fill_(_POISONS[0])
    _check_decode(codec, original, encoded)
    _check_damage(where, codec, encoded)
    return encoded


def _check_unchanged(where: str, x: Tensor, original: Tensor) -> None:
    if not torch.equal(memory_of(x), memory_of(original)):
        fail(f"{where}: encode was asked to leave its input alone", "other bits in its memory", "Work on a copy")


def _check_encoded(where: str, codec: Codec, encoded: Encoded, x: Tensor) -> None:
    spec = TensorSpec.of(x)
    if not isinstance(encoded, Encoded) or encoded.codec != codec.id or encoded.spec != spec:
        fail(f"{where}: encode was asked for Encoded({codec.id!r}, {spec!r}, ...)", repr(encoded), "Return that")
    for name, plane in encoded.planes.items():
        if plane.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() and plane.numel():
            fail(f"{where}: plane {name!r} was asked for memory of its own", "a view of the input", "Clone it")
        if plane.requires_grad:
            fail(
                f"{where}: plane {name!r} was asked for without a graph",
                f"requires_grad and {plane.grad_fn}",
                "Detach x, or encode under torch.no_grad()",
            )
    bound = codec.nbytes_bound(spec)
    if encoded.nbytes > bound:
        fail(
            f"{where}: nbytes_bound() promised at most {bound} bytes",
            f"{encoded.nbytes}",
            "Bound the worst case, and keep no larger storage behind a plane",
        )


def _check_decode(codec: Codec, original: Tensor, encoded: Encoded) -> None:
    """Decodes into poisoned memory and into fresh memory, and compares each result with ``original``."""
    where = f"check_codec({codec!r}) on {describe_layout(original)}"
    planes = {name: plane.clone() for name, plane in encoded.planes.items()}
    sign_only = Need.SIGN in codec.preserves and Need.VALUE not in codec.preserves
    ternary = sign_only and tested_mask(codec).ternary
    for poison in _POISONS:
        for dtype in (encoded.spec.dtype, torch.bool) if sign_only and not ternary else (encoded.spec.dtype,):
            memory, out = poisoned(encoded.spec, dtype, poison)
            with only(where, "decode"):
                got = codec.decode(encoded, out)
            if got.data_ptr() != out.data_ptr() or got.stride() != out.stride() or got.shape != out.shape:
                fail(f"{where}: decode was asked to fill and return out", "another tensor", "Write into out")
            margin = MARGIN * dtype.itemsize
            if not bool((memory[:margin] == poison).all() and (memory[memory.numel() - margin :] == poison).all()):
                fail(f"{where}: decode was asked to fill out", "bytes written beside it", "Mind the last elements")
            compare_tensors(where, codec, original, got)
    with only(where, "decode without out"):
        fresh = codec.decode(encoded)
    if fresh.stride() != original.stride() or fresh.device != original.device:
        fail(
            f"{where}: decode without out was asked for strides {list(original.stride())} on {original.device}",
            f"{list(fresh.stride())} on {fresh.device}",
            "Allocate with codecs.base.like(encoded.spec, out)",
        )
    compare_tensors(where, codec, original, fresh)
    if not all(equal_bits(plane, planes[name]) for name, plane in encoded.planes.items()):
        fail(f"{where}: decode was asked to leave the planes alone", "other bits", "Decode may run again: only read")


def _check_damage(where: str, codec: Codec, encoded: Encoded) -> None:
    """Checks that decoding raises when a plane is one element short."""
    for name, plane in encoded.planes.items():
        if plane.numel() == 0:
            continue
        cut = plane.reshape(-1)[:-1].clone() if plane.dim() == 0 else plane[:-1].clone()
        damaged = replace(encoded, planes={**encoded.planes, name: cut})
        asked = f"{where}: decode was asked for a plane {name!r} cut short by one of its {len(plane.reshape(-1))}"
        _, out = poisoned(encoded.spec, encoded.spec.dtype, _POISONS[0])
        with only(asked, "decode", DamagedPlanesError):
            try:
                codec.decode(damaged, out)
            except DamagedPlanesError:
                continue
        fail(asked, "no error", "Check every plane's length before reading, and raise DamagedPlanesError")

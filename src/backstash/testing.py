"""Checks of the contracts, for codecs, stores and policies of your own too. They need neither pytest nor hypothesis.

Each check raises AssertionError with what was asked, what was got, and what to do. They prove what they looked at:
the built-in tensors are small, and how fast a codec is nobody asks here.

Example:
    >>> from backstash import codecs
    >>> check_codec(codecs.get("zvc")).encoded > 100
    True
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from threading import Thread
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from backstash import codecs
from backstash.codecs.base import EXACT, Codec, Encoded, ErrorBound, flat
from backstash.errors import BackstashError, CodecRefusedError, DamagedPlanesError
from backstash.ops import reference
from backstash.policies.base import Policy
from backstash.saved import Mask, Need, TensorSpec, Test
from backstash.session import Session
from backstash.stash.ledger import Report
from backstash.stores import Store, Ticket

_NAMES = {"inf": math.inf, "nan": math.nan, "torch": torch, **{name: getattr(codecs, name) for name in codecs.__all__}}
"""What the repr of a codec may name."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

_LAYOUTS: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...] = (  # shape, strides, storage offset
    ((), (), 0),
    ((1,), (1,), 0),
    ((0, 3), (3, 1), 0),
    ((37,), (1,), 3),
    ((7, 13), (1, 7), 0),
    ((2, 3, 5, 7), (105, 35, 7, 1), 0),
    ((2, 3, 5, 7), (105, 1, 21, 3), 0),
    ((8205,), (1,), 1),
    ((5, 4), (8, 2), 0),  # with gaps
    ((4, 3), (0, 1), 0),  # expanded
)
_POISONS = (0xA5, 0xFF)
_MARGIN = 3  # elements: what lies behind it is aligned to its elements only
_PATIENCE_SECONDS = 10.0


@dataclass(frozen=True)
class CodecCheck:
    """What :func:`check_codec` looked at.

    Attributes:
        encoded: tensors that were encoded, decoded and compared.
        refused: tensors that the codec refused, as it may.
    """

    encoded: int
    refused: int


@dataclass(frozen=True)
class GradientsEqual:
    """What :func:`gradients_equal` compared.

    Attributes:
        compared: names of the tensors whose gradients are equal.
        report: the accounts of the step under the policy; look there whether anything was stashed at all.
    """

    compared: tuple[str, ...]
    report: Report


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Whether shapes, dtypes and every bit are equal: -0.0 is not 0.0, and a NaN equals itself. Strides may differ."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b).to(a.device))


def probes(device: torch.device | str = "cpu") -> Iterator[Tensor]:
    """The built-in tensors of :func:`check_codec`.

    Every dtype in several layouts: 0-d, one element, empty, with a storage offset, transposed, channels_last, longer
    than a chunk, with gaps, expanded. Floats hold signed zeros, subnormals, infinities, NaN payloads; or no zero, or
    zeros only, or two values. Integers hold a narrow range, one value, or the extremes.

    Args:
        device: where they are.
    """
    generator = torch.Generator().manual_seed(0)
    for shape, stride, offset in _LAYOUTS:
        n = offset + _span(shape, stride)
        for dtype in FLOATS:
            for values in _floats(dtype, n, generator):
                yield values.to(device).as_strided(shape, stride, offset)
        for dtype in INTEGERS:
            for values in _integers(dtype, n, generator):
                yield values.to(device).as_strided(shape, stride, offset)
        yield torch.randint(0, 2, (n,), generator=generator).bool().to(device).as_strided(shape, stride, offset)
    yield torch.randn(6, dtype=torch.complex64, generator=generator).to(device)
    yield torch.tensor([0.0, 1.0, 0.0, -2.0] * 4, device=device, requires_grad=True)


def check_codec(codec: Codec, tensors: Iterable[Tensor] | None = None) -> CodecCheck:
    """Check the contract in the docstring of ``backstash.codecs.base``.

    A codec that preserves SIGN but not VALUE must have a ``mask``: its test and stand-ins are what is compared. Where a
    ``bound`` has several of ``abs``, ``rel`` and ``each``, all must hold. Without ``each``, infinities and NaNs must
    come back as they were. If the codec has ``keeps``, the masks that it says yes to are looked at.

    Args:
        codec: the codec.
        tensors: what to encode; copies are made. Default: :func:`probes`.

    Raises:
        AssertionError: the codec breaks the contract, or refused every tensor that has an element.
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
        _fail(
            f"check_codec asked {codec!r} to encode {encoded + refused} tensors",
            "refusals of all that have an element",
            "Pass tensors that it takes: check_codec(codec, tensors=...)",
        )
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: _check_decode(codec, *largest), range(4)))
    return CodecCheck(encoded, refused)


def check_store(store: Store) -> None:
    """Check what a Session needs of a store: values come back bit for bit, drops free them, any thread may call.

    Args:
        store: an open store; it may hold values, and holds the same ones afterwards.

    Raises:
        AssertionError: the store breaks the contract.
    """
    at_start = store.usage()
    _check_values(store)
    _check_threads(store)
    _check_drop_inside_put(store)
    at_end = store.usage()
    if (at_end.nbytes, at_end.count) != (at_start.nbytes, at_start.count):
        _fail(
            f"check_store asked {store!r} to drop all that was put",
            f"{at_end} after {at_start}",
            "Count every drop once, under a lock",
        )


def gradients_equal(
    forward: Callable[[], Tensor],
    model: nn.Module | Mapping[str, Tensor],
    policy: str | Policy = "lossless",
    *,
    min_nbytes: int = 0,
) -> GradientsEqual:
    """Compare loss and gradients of a plain step with those of the same step under a policy, bit for bit.

    Both start from the same parameters, buffers and random numbers of torch. Afterwards parameters, buffers,
    gradients and random state are as before.

    Args:
        forward: computes the loss, a tensor of one element; the backward pass runs here.
        model: whose parameters' gradients are compared, or leaf tensors by name.
        policy: as for a Session.
        min_nbytes: as for a Session.

    Raises:
        AssertionError: the loss or a gradient differs; the first one is named.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout())
        >>> gradients_equal(lambda: model(torch.ones(4, 8)).sum(), model).compared
        ('0.weight', '0.bias')
    """
    module = model if isinstance(model, nn.Module) else None
    named: Mapping[str, Tensor] = dict(module.named_parameters()) if module else model  # type: ignore[assignment]
    leaves = {name: leaf for name, leaf in named.items() if leaf.requires_grad}
    session = Session(policy, model=module, min_nbytes=min_nbytes)
    with _restored([*leaves.values(), *(module.buffers() if module else ())]) as restore:
        plain = _step(forward, leaves, nullcontext())
        restore()
        under_policy = _step(forward, leaves, session)
        restore()
        different = _first_difference(plain, under_policy)
        if different is not None:
            unsteady = _first_difference(plain, _step(forward, leaves, nullcontext())) is not None
            _fail(
                f"gradients_equal asked for the bits of a plain step under {session.policy!r}",
                f"another {different}",
                "Two plain steps differ as well: make the step deterministic first (torch.use_deterministic_algorithms)"
                if unsteady
                else "Look at session.report() for what was stashed on the way there, and check those codecs",
            )
    return GradientsEqual(tuple(leaves), session.report())


# -- codecs ----------------------------------------------------------------------------------------------------------


def _check_declaration(codec: Codec) -> Codec:
    """Check everything but the data; returns an equal codec."""
    name = type(codec).__name__
    if not isinstance(codec, Codec):
        members = ("id", "preserves", "bound", "accepts", "declines", "encode", "decode", "nbytes_bound")
        missing = ", ".join(member for member in members if not hasattr(codec, member))
        _fail(f"check_codec asked for a codec, of class {name}", f"no {missing}", "Define these members")
    if not (is_dataclass(codec) and type(codec).__dataclass_params__.frozen):  # type: ignore[attr-defined]
        _fail(f"check_codec asked for a frozen dataclass, of {name}", "another class", "Use @dataclass(frozen=True)")
    if not isinstance(codec.preserves, frozenset) or Need.SHAPE not in codec.preserves:
        _fail(
            f"check_codec asked {codec!r} for the needs it preserves, SHAPE among them",
            repr(codec.preserves),
            "Make it a frozenset of Need; what has a spec has the shape",
        )
    if Need.VALUE in codec.preserves and codec.bound is None and codec.preserves != EXACT:
        _fail(
            f"check_codec asked {codec!r} for every need, as it preserves VALUE without a bound",
            repr(codec.preserves),
            "Use codecs.base.EXACT",
        )
    if not (codec.bound is None or (isinstance(codec.bound, ErrorBound) and codec.bound != ErrorBound())):
        _fail(f"check_codec asked {codec!r} for its bound", repr(codec.bound), "Use None, or ErrorBound(abs=...)")
    module = vars(sys.modules[type(codec).__module__])
    try:
        twin = eval(repr(codec), {**_NAMES, **module, name: type(codec)})
    except (SyntaxError, NameError, TypeError, AttributeError, ValueError) as error:
        _fail(
            f"check_codec asked for a repr that makes {name} again",
            f"{codec!r}, which raises {type(error).__name__}: {error}",
            "Use the dataclass's own repr, with fields whose repr is an expression",
        )
    if type(twin) is not type(codec) or _parameters(twin) != _parameters(codec):
        _fail(f"check_codec asked for a repr that makes {codec!r} again", repr(twin), "Use the dataclass's own repr")
    return twin  # type: ignore[no-any-return]


def _parameters(codec: Any) -> list[str]:
    return [repr(getattr(codec, field.name)) for field in fields(codec)]  # text: a NaN equals itself


def _check_tensor(codec: Codec, twin: Codec, given: Tensor) -> Encoded | None:
    """Check all about one tensor; returns what it was encoded to, None if it was refused."""
    x, original = _copy(given), _copy(given).detach()
    where = f"{_describe(codec)} on {_describe_tensor(x)}"
    spec = TensorSpec.of(x)
    reason = codec.accepts(spec)
    if not (reason is None or (isinstance(reason, str) and reason)):
        _fail(f"{where}: accepts() was asked", repr(reason), "Return None, or the reason as text")
    if reason is not None:
        try:
            codec.encode(x)
        except CodecRefusedError:
            return None
        _fail(f"{where}: encode was asked for what accepts() refuses ({reason})", "no error", "Call require(self, x)")
    with _only(where, "declines() and encode()", CodecRefusedError):
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
        _fail(f"{where}: an equal codec was asked to encode it", "other planes", "Let encode depend on nothing but x")
    _memory(x).fill_(_POISONS[0])
    _check_decode(codec, original, encoded)
    _check_damage(where, codec, encoded)
    return encoded


def _check_unchanged(where: str, x: Tensor, original: Tensor) -> None:
    if not torch.equal(_memory(x), _memory(original)):
        _fail(f"{where}: encode was asked to leave its input alone", "other bits in its memory", "Work on a copy")


def _check_encoded(where: str, codec: Codec, encoded: Encoded, x: Tensor) -> None:
    spec = TensorSpec.of(x)
    if not isinstance(encoded, Encoded) or encoded.codec != codec.id or encoded.spec != spec:
        _fail(f"{where}: encode was asked for Encoded({codec.id!r}, {spec!r}, ...)", repr(encoded), "Return that")
    for name, plane in encoded.planes.items():
        if plane.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() and plane.numel():
            _fail(f"{where}: plane {name!r} was asked for memory of its own", "a view of the input", "Clone it")
        if plane.requires_grad:
            _fail(
                f"{where}: plane {name!r} was asked for without a graph",
                f"requires_grad and {plane.grad_fn}",
                "Detach x, or encode under torch.no_grad()",
            )
    bound = codec.nbytes_bound(spec)
    if encoded.nbytes > bound:
        _fail(
            f"{where}: nbytes_bound() promised at most {bound} bytes",
            f"{encoded.nbytes}",
            "Bound the worst case, and keep no larger storage behind a plane",
        )


def _check_decode(codec: Codec, original: Tensor, encoded: Encoded) -> None:
    """Decode several times, into poisoned memory and fresh one, and compare with ``original``."""
    where = f"{_describe(codec)} on {_describe_tensor(original)}"
    planes = {name: plane.clone() for name, plane in encoded.planes.items()}
    sign_only = Need.SIGN in codec.preserves and Need.VALUE not in codec.preserves
    ternary = sign_only and _mask(codec).ternary
    for poison in _POISONS:
        for dtype in (encoded.spec.dtype, torch.bool) if sign_only and not ternary else (encoded.spec.dtype,):
            memory, out = _poisoned(encoded.spec, dtype, poison)
            with _only(where, "decode"):
                got = codec.decode(encoded, out)
            if got.data_ptr() != out.data_ptr() or got.stride() != out.stride() or got.shape != out.shape:
                _fail(f"{where}: decode was asked to fill and return out", "another tensor", "Write into out")
            margin = _MARGIN * dtype.itemsize
            if not bool((memory[:margin] == poison).all() and (memory[memory.numel() - margin :] == poison).all()):
                _fail(f"{where}: decode was asked to fill out", "bytes written beside it", "Mind the last elements")
            _compare(where, codec, original, got)
    with _only(where, "decode without out"):
        fresh = codec.decode(encoded)
    if fresh.stride() != original.stride() or fresh.device != original.device:
        _fail(
            f"{where}: decode without out was asked for strides {list(original.stride())} on {original.device}",
            f"{list(fresh.stride())} on {fresh.device}",
            "Allocate with codecs.base.like(encoded.spec, out)",
        )
    _compare(where, codec, original, fresh)
    if not all(equal_bits(plane, planes[name]) for name, plane in encoded.planes.items()):
        _fail(f"{where}: decode was asked to leave the planes alone", "other bits", "Decode may run again: only read")


def _compare(where: str, codec: Codec, original: Tensor, got: Tensor) -> None:
    """Check ``got`` against ``original`` in what the codec preserves, and in the masks that it keeps."""
    if got.shape != original.shape:
        _fail(f"{where}: decode was asked for shape {list(original.shape)}", f"{list(got.shape)}", "Use encoded.spec")
    if Need.VALUE in codec.preserves:
        _same_dtype(where, original, got)
        if codec.bound is None:
            _compare_bits(where, original, got)
        else:
            _compare_bounded(where, codec.bound, original, got)
    elif Need.SIGN in codec.preserves:
        if got.dtype != torch.bool:
            _same_dtype(where, original, got)
        _compare_bits(where, _stand_ins(_mask(codec), original, got.dtype), got)
    else:
        _same_dtype(where, original, got)
        if Need.INDEX in codec.preserves and not original.dtype.is_floating_point:
            _compare_bits(where, original, got)
    if hasattr(codec, "keeps") and got.dtype.is_floating_point:
        _compare_kept(where, codec.keeps, original, got)


_MASKS = [
    Mask(test, lo, hi, ternary=ternary, nan=ternary)
    for test in Test
    for lo, hi in ((0.0, math.inf), (-math.inf, 0.0), (-math.inf, math.inf), (-1.0, 1.0))
    for ternary in (False, True)
]


def _compare_kept(where: str, keeps: Callable[[Mask], bool], original: Tensor, got: Tensor) -> None:
    x, y = original.detach(), got
    for mask in filter(keeps, _MASKS):
        outcomes = [reference.passes(one, mask.test.code, mask.lo, mask.hi) for one in (x, y)]
        different = outcomes[0] != outcomes[1]
        if mask.ternary:
            different |= (x < 0) != (y < 0)
        if mask.nan:
            different |= x.isnan() != y.isnan()
        if bool(different.any()):
            _fail(
                f"{where}: keeps() promised the outcomes of {mask}",
                f"{int(different.sum())} other ones",
                "Say yes only to masks that no element, NaN and infinities too, decodes to another outcome of",
            )


def _same_dtype(where: str, original: Tensor, got: Tensor) -> None:
    if got.dtype != original.dtype:
        _fail(f"{where}: decode was asked for {original.dtype}", f"{got.dtype}", "Use encoded.spec")


def _compare_bits(where: str, expected: Tensor, got: Tensor) -> None:
    if equal_bits(expected, got):
        return
    size = expected.element_size()
    wanted, found = (_bytes(x).view(-1, size).flip(1).cpu() for x in (expected, got))
    different = (wanted != found).any(1).nonzero()[:, 0].tolist()
    first = different[0]
    _fail(
        f"{where}: decode was asked for the bits of what was encoded",
        f"{len(different)} other elements of {expected.numel()}, the first at {first} (row-major), where "
        f"0x{bytes(wanted[first].tolist()).hex()} became 0x{bytes(found[first].tolist()).hex()}",
        "Compare and copy bits, not values: -0.0 == 0.0 and NaN payloads get lost",
    )


def _compare_bounded(where: str, bound: ErrorBound, original: Tensor, got: Tensor) -> None:
    x, y = original.detach().double(), got.double()
    if bound.each is not None:
        _compare_each(where, bound, bound.each, original.detach(), got)
        if bound.abs is None and bound.rel is None:
            return
    finite = x.isfinite()
    strange = torch.where(finite, False, (x != y) & ~(x.isnan() & y.isnan()))
    if bool(strange.any()):
        _fail(
            f"{where}: decode was asked for infinities and NaNs as they were",
            f"{int(strange.sum())} other elements",
            "Store them apart, or raise CodecRefusedError from encode",
        )
    if not bool(finite.any()):
        return
    if bound.rel is not None and (bound.group_size or bound.ulps):
        _compare_groups(where, bound, bound.rel, flat(original), flat(got))
        return
    x, y = x[finite], y[finite]
    error = float((x - y).abs().max())
    limits = [] if bound.abs is None else [bound.abs]
    limits += [] if bound.rel is None else [bound.rel * float(x.max() - x.min())]
    if not error <= min(limits):
        _fail(f"{where}: {bound} was promised, here {min(limits)}", f"an error of {error}", "Round to nearest")


def _compare_groups(where: str, bound: ErrorBound, rel: float, original: Tensor, got: Tensor) -> None:
    """Check the bound that is a share of each group's range, or the tensor's; all elements are finite."""
    info, size = torch.finfo(original.dtype), bound.group_size or original.numel()
    for x, y in zip(original.split(size), got.split(size), strict=True):
        x, y = x.double(), y.double()
        exponent = math.frexp(max(float(x.abs().max()), info.tiny))[1] - 1
        limit = rel * float(x.max() - x.min()) + bound.ulps * info.eps * 2.0**exponent
        error = float((x - y).abs().max())
        if not error <= limit:
            _fail(f"{where}: {bound} was promised, in a group {limit}", f"an error of {error}", "Round to nearest")


def _compare_each(where: str, bound: ErrorBound, each: float, original: Tensor, got: Tensor) -> None:
    """Check the part of the bound that is relative to each element. Every product is exact but the group's share."""
    largest = torch.finfo(original.dtype).max
    x, y = flat(original).double().clamp(-largest, largest), flat(got).double()
    magnitude = x.abs()
    tiny = torch.full_like(x, bound.tiny)
    if bound.group_size and x.numel():
        padded = x.new_zeros(-(-x.numel() // bound.group_size), bound.group_size)
        padded.view(-1)[: x.numel()] = magnitude.nan_to_num(nan=0.0)
        shares = (bound.share * padded.amax(1)).repeat_interleave(bound.group_size)[: x.numel()]
        tiny = tiny.maximum(shares)
    near = (x - y).abs() <= each * magnitude
    small = (magnitude < tiny) & (y.abs() <= tiny) & (x * y >= 0) & ((x != 0) | (y == 0))
    near = torch.where(magnitude > bound.limit, y == bound.limit * x.sign(), near | small)
    wrong = torch.where(x.isnan(), ~y.isnan(), ~near)
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        was, became = float(flat(original)[first]), float(y[first])
        _fail(
            f"{where}: {bound} was promised",
            f"{int(wrong.sum())} other elements, the first at {first} (in memory), where {was} became {became}",
            "Round to nearest, clamp what is too large, and keep signs and NaNs",
        )


def _mask(codec: Codec) -> Mask:
    mask = getattr(codec, "mask", None)
    if not isinstance(mask, Mask):
        _fail(
            f"check_codec asked {codec!r} for its mask, as it preserves SIGN and not VALUE",
            repr(mask),
            "Give it a field 'mask: Mask', which says what the bits mean",
        )
    return mask


def _stand_ins(mask: Mask, x: Tensor, dtype: torch.dtype) -> Tensor:
    """What a codec with this mask must decode to."""
    passed = reference.passes(x, mask.test.code, mask.lo, mask.hi)
    if dtype == torch.bool:
        return passed
    values = [1.0, 0.0] if mask.ternary else [mask.if_set, mask.if_clear]
    if_set, if_clear = torch.tensor(values, dtype=dtype, device=x.device)
    stand_ins = torch.where(passed, if_set, if_clear)
    return stand_ins.masked_fill(x < 0, -1.0) if mask.ternary else stand_ins


def _check_damage(where: str, codec: Codec, encoded: Encoded) -> None:
    """Cut each plane short by one element."""
    for name, plane in encoded.planes.items():
        if plane.numel() == 0:
            continue
        cut = plane.reshape(-1)[:-1].clone() if plane.dim() == 0 else plane[:-1].clone()
        damaged = replace(encoded, planes={**encoded.planes, name: cut})
        asked = f"{where}: decode was asked for a plane {name!r} cut short by one of its {len(plane.reshape(-1))}"
        _, out = _poisoned(encoded.spec, encoded.spec.dtype, _POISONS[0])
        with _only(asked, "decode", DamagedPlanesError):
            try:
                codec.decode(damaged, out)
            except DamagedPlanesError:
                continue
        _fail(asked, "no error", "Check every plane's length before reading, and raise DamagedPlanesError")


# -- stores ----------------------------------------------------------------------------------------------------------


def _value(seed: int) -> Encoded:
    """Planes as codecs make them: several dtypes, an empty one, metadata."""
    generator = torch.Generator().manual_seed(seed)
    n = 64 + seed % 7
    planes = {
        "mask": torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator),
        "offsets": torch.randint(-(2**62), 2**62, (3,), generator=generator),
        "values": torch.cat([_specials(torch.float32), torch.randn(n, generator=generator)]),
        "half": torch.randn(n, generator=generator).bfloat16(),
        "flags": torch.randint(0, 2, (5,), generator=generator).bool(),
        "none": torch.empty(0, dtype=torch.float64),
    }
    return Encoded("check", TensorSpec.of(torch.empty(n)), planes, {"bits": seed, "scale": 0.5, "sizes": (1, 2)})


def _same(store: Store, expected: Encoded, got: Encoded) -> None:
    if (got.codec, got.spec, dict(got.meta)) != (expected.codec, expected.spec, dict(expected.meta)):
        _fail(f"check_store asked {store!r} for {expected.codec} {expected.meta}", f"{got.codec} {got.meta}", _NO_MIX)
    if list(got.planes) != list(expected.planes):
        _fail(f"check_store asked {store!r} for planes {list(expected.planes)}", f"{list(got.planes)}", _NO_MIX)
    for name, plane in expected.planes.items():
        if got.planes[name].device != plane.device or not equal_bits(got.planes[name], plane):
            _fail(
                f"check_store asked {store!r} for plane {name!r} as it was put: {_describe_tensor(plane)}",
                f"{_describe_tensor(got.planes[name])} with other bits, shape, dtype or device",
                "Bring back every plane where it was, bit for bit",
            )


_NO_MIX = "Return what was put under this ticket"


def _check_values(store: Store) -> None:
    base = store.usage()
    values = {store.put(_value(seed)): seed for seed in range(5)}
    bare = store.put(Encoded("check", TensorSpec.of(torch.empty(3)), {}))
    usage = store.usage()
    nbytes = sum(ticket.nbytes for ticket in values) + bare.nbytes
    if (usage.count - base.count, usage.nbytes - base.nbytes) != (len(values) + 1, nbytes):
        _fail(f"check_store asked {store!r} to hold {nbytes} bytes more than {base}", f"{usage}", "Count in put")
    if usage.peak_nbytes < usage.nbytes:
        _fail(f"check_store asked {store!r} for its peak", f"{usage}", "Take the maximum in put")
    for ticket, seed in values.items():
        if ticket.nbytes < _value(seed).nbytes:
            _fail(
                f"check_store asked {store!r} for the bytes of a value of {_value(seed).nbytes}",
                f"{ticket}",
                "Give the ticket the bytes that are held; a store does not encode",
            )
    order = [*values, *reversed(values), *values]
    for ticket, following in pairwise(order):
        store.prefetch(following)
        _same(store, _value(values[ticket]), store.get(ticket))
    if store.get(bare).planes:
        _fail(f"check_store asked {store!r} for a value without planes", "planes", _NO_MIX)
    _check_drops(store, list(values.items()), bare)


def _check_drops(store: Store, values: list[tuple[Ticket, int]], bare: Ticket) -> None:
    (first, seed), *rest = values
    held = store.get(first)
    store.prefetch(first)
    for _ in range(2):  # the second time it does nothing: finalizers may come late
        before = store.usage()
        store.drop(first)
    if store.usage() != before:
        _fail(f"check_store asked {store!r} to drop twice", f"{store.usage()} after {before}", "Count a drop once")
    later = store.put(_value(99))
    _same(store, _value(seed), held)
    for ticket, other in rest:
        _same(store, _value(other), store.get(ticket))
    try:
        store.get(first)
    except (LookupError, BackstashError):
        pass
    else:
        _fail(f"check_store asked {store!r} for a dropped value", "a value", "Raise: a stale one is a wrong gradient")
    store.drop(bare)
    for ticket, _ in rest:
        store.drop(ticket)
    store.drop(later)
    value = _value(7)
    memory = StorageWeakRef(value.planes["values"].untyped_storage())
    ticket = store.put(value)
    del value
    store.drop(ticket)
    if not memory.expired():
        gc.collect()
    if not memory.expired():
        _fail(f"check_store asked {store!r} to forget a value", "its planes still in memory", "Drop every reference")


def _check_threads(store: Store) -> None:
    def work(worker: int) -> None:
        tickets = [(store.put(_value(seed)), seed) for seed in range(worker * 16, worker * 16 + 16)]
        for ticket, seed in reversed(tickets):
            store.prefetch(ticket)
            _same(store, _value(seed), store.get(ticket))
            store.drop(ticket)

    shared = store.put(_value(5))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(8)))
        for got in threads.map(store.get, [shared] * 8):
            _same(store, _value(5), got)
        list(threads.map(store.drop, [shared] * 8))


class _Claim:
    """Drops its ticket when the garbage collector finds it, as abandoned graphs do."""

    def __init__(self, store: Store, ticket: Ticket) -> None:
        self.store, self.ticket, self.cycle = store, ticket, self

    def __del__(self) -> None:
        self.store.drop(self.ticket)


def _check_drop_inside_put(store: Store) -> None:
    """Let the garbage collector drop at every step of a put, on the same thread."""
    value = _value(1)

    def work() -> None:
        for allocations in range(1, 120):
            ticket = store.put(value)
            gc.disable()
            gc.collect(0)
            _Claim(store, ticket)
            gc.set_threshold(allocations, 10**6, 10**6)
            gc.enable()
            store.drop(store.put(value))

    enabled, thresholds = gc.isenabled(), gc.get_threshold()
    worker = Thread(target=work, daemon=True)
    try:
        worker.start()
        worker.join(_PATIENCE_SECONDS)
    finally:
        gc.set_threshold(*thresholds)
        (gc.enable if enabled else gc.disable)()
    if worker.is_alive():
        _fail(
            f"check_store asked {store!r} to drop a value while the same thread puts another",
            "a deadlock",
            "The garbage collector may run finalizers inside put: guard it with an RLock",
        )
    gc.collect()


# -- gradients -------------------------------------------------------------------------------------------------------

_Step = tuple[Tensor, dict[str, Tensor | None]]


def _step(forward: Callable[[], Tensor], leaves: Mapping[str, Tensor], context: AbstractContextManager[Any]) -> _Step:
    for leaf in leaves.values():
        leaf.grad = None
    with context:
        loss = forward()
    loss.backward()
    return loss.detach().clone(), {name: leaf.grad for name, leaf in leaves.items()}


def _first_difference(a: _Step, b: _Step) -> str | None:
    if not equal_bits(a[0], b[0]):
        return f"loss: {a[0].item()!r} plain, {b[0].item()!r} under the policy"
    for name, plain in a[1].items():
        other = b[1][name]
        if plain is None or other is None:
            if plain is not other:
                return f"gradient of {name}: there is one only {'plain' if other is None else 'under the policy'}"
        elif not equal_bits(plain, other):
            far = float((plain.double() - other.double()).abs().max()) if plain.shape == other.shape else math.nan
            return f"gradient of {name} ({TensorSpec.of(plain)}): it differs by up to {far:.3g}"
    return None


@contextmanager
def _restored(tensors: list[Tensor]) -> Iterator[Callable[[], None]]:
    """Puts contents and random state back when it is called, and on leaving gradients too."""
    contents = [tensor.detach().clone() for tensor in tensors]
    gradients = [tensor.grad for tensor in tensors]
    random_state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore() -> None:
        with torch.no_grad():
            for tensor, content in zip(tensors, contents, strict=True):
                tensor.copy_(content)
        torch.set_rng_state(random_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)

    try:
        yield restore
    finally:
        restore()
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient


# -- tensors ---------------------------------------------------------------------------------------------------------


def _fail(asked: str, got: str, advice: str) -> NoReturn:
    raise AssertionError(f"{asked}, got {got}. {advice}.")


@contextmanager
def _only(where: str, what: str, *expected: type[Exception]) -> Iterator[None]:
    """Turns any exception but AssertionError into one that says where it came from; a foreign codec may raise any."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        names = " or ".join(kind.__name__ for kind in expected)
        advice = f"Raise {names} for what it cannot do" if names else "It must not raise here"
        got = f"{type(error).__name__}: {error}"
        raise AssertionError(f"{where}: {what} was asked for, got {got} {advice}.") from error


def _describe(codec: Codec) -> str:
    return f"check_codec({codec!r})"


def _describe_tensor(x: Tensor) -> str:
    return f"{TensorSpec.of(x)} with strides {list(x.stride())} at offset {x.storage_offset()}"


def _bytes(x: Tensor) -> Tensor:
    """The elements of ``x`` in row-major order, as uint8 [numel * itemsize]."""
    return x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _memory(x: Tensor) -> Tensor:
    """All the memory behind ``x``, as uint8 [nbytes of its storage]."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def _copy(x: Tensor) -> Tensor:
    """``x`` in the same layout, in memory of its own."""
    copy = torch.empty(0, dtype=x.dtype, device=x.device)
    copy = copy.set_(x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride())  # type: ignore[call-overload]
    return copy.requires_grad_(x.requires_grad)


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last, both included."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _poisoned(spec: TensorSpec, dtype: torch.dtype, poison: int) -> tuple[Tensor, Tensor]:
    """Memory full of ``poison``, uint8, and in its middle a tensor in the layout of ``spec``."""
    nbytes = (_span(spec.shape, spec.stride) + 2 * _MARGIN) * dtype.itemsize
    memory = torch.full((nbytes,), poison, dtype=torch.uint8, device=spec.device)
    return memory, memory.view(dtype).as_strided(spec.shape, spec.stride, _MARGIN)


def _specials(dtype: torch.dtype) -> Tensor:
    """Signed zeros, subnormals, infinities, NaNs with payloads, the neighbours of 1."""
    info = torch.finfo(dtype)
    numbers = [-0.0, 1.0, -1.0, 6.0, math.inf, -math.inf, math.nan, info.tiny, -info.tiny, info.max, info.min]
    values = torch.tensor(numbers, dtype=dtype)
    bits = reference.bits_of(values)
    one, nan, ones = torch.ones(1, dtype=bits.dtype), bits[6:7], bits[1:3]
    extra = [one, one | bits[:1], nan ^ one, nan ^ 5, ones + one, ones - one]
    return torch.cat([bits, *extra]).view(dtype)


def _floats(dtype: torch.dtype, n: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Half zeros with everything special; no zero; zeros only; two values: each [n]."""
    special = _specials(dtype)
    normal = torch.randn(n, generator=generator).to(dtype)
    picked = special[torch.randint(len(special), (n,), generator=generator)]
    mixed = torch.where(torch.rand(n, generator=generator) < 0.5, picked, normal)
    coins = torch.rand(n, generator=generator) < 0.5
    yield torch.where(coins, torch.zeros(n, dtype=dtype), mixed)
    yield torch.where(normal == 0, torch.ones(n, dtype=dtype), normal)
    yield torch.zeros(n, dtype=dtype)
    yield torch.where(coins, torch.tensor(1.25, dtype=dtype), torch.tensor(-0.0, dtype=dtype))


def _integers(dtype: torch.dtype, n: int, generator: torch.Generator) -> Iterator[Tensor]:
    """A narrow range; one value; the extremes among others: each [n]."""
    info = torch.iinfo(dtype)
    narrow = torch.randint(0, 11, (n,), generator=generator)
    yield (narrow + 70).to(dtype)
    yield torch.full((n,), 42, dtype=dtype)
    edges = torch.tensor([info.min, info.max, 0, 1], dtype=dtype)
    yield edges[narrow % 4]

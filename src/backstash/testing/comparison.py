"""Comparisons of what was decoded with what was encoded, in all that a codec promises to preserve."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from backstash.bits import equal_bits, row_major_bytes
from backstash.codecs.base import Codec, ErrorBound, flat
from backstash.codecs.masks.reference import passes
from backstash.saved import Mask, Need, Test
from backstash.testing.failures import fail


def compare_tensors(where: str, codec: Codec, original: Tensor, got: Tensor) -> None:
    """Compares ``got`` with ``original`` in all that the codec preserves, and in the masks that it keeps.

    Args:
        where: the codec and the tensor, for messages.
        codec: the codec that has encoded ``original`` and decoded ``got``.
        original: the tensor that was encoded, of any shape.
        got: the decoded tensor, of the same shape.

    Raises:
        AssertionError: they differ.
    """
    if got.shape != original.shape:
        fail(f"{where}: decode was asked for shape {list(original.shape)}", f"{list(got.shape)}", "Use encoded.spec")
    if Need.VALUE in codec.preserves:
        _same_dtype(where, original, got)
        if codec.bound is None:
            _compare_bits(where, original, got)
        else:
            compare_bounded(where, codec.bound, original, got)
    elif Need.SIGN in codec.preserves:
        if got.dtype != torch.bool:
            _same_dtype(where, original, got)
        _compare_bits(where, _stand_ins(tested_mask(codec), original, got.dtype), got)
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
    if equal_bits(x, y):
        return
    tested: dict[tuple[Test, float, float], Tensor] = {}
    for mask in filter(keeps, _MASKS):
        test = mask.test, mask.lo, mask.hi
        if test not in tested:
            outcomes = [passes(values, mask.test.code, mask.lo, mask.hi) for values in (x, y)]
            tested[test] = outcomes[0] != outcomes[1]
        different = tested[test]
        if mask.ternary:
            different = different | ((x < 0) != (y < 0))
        if mask.nan:
            different = different | (x.isnan() != y.isnan())
        if bool(different.any()):
            fail(
                f"{where}: keeps() promised the outcomes of {mask}",
                f"{int(different.sum())} other ones",
                "Say yes only to masks that no element, NaN and infinities too, decodes to another outcome of",
            )


def _same_dtype(where: str, original: Tensor, got: Tensor) -> None:
    if got.dtype != original.dtype:
        fail(f"{where}: decode was asked for {original.dtype}", f"{got.dtype}", "Use encoded.spec")


def _compare_bits(where: str, expected: Tensor, got: Tensor) -> None:
    if equal_bits(expected, got):
        return
    size = expected.element_size()
    wanted, found = (row_major_bytes(x).view(-1, size).flip(1).cpu() for x in (expected, got))
    different = (wanted != found).any(1).nonzero()[:, 0].tolist()
    first = different[0]
    fail(
        f"{where}: decode was asked for the bits of what was encoded",
        f"{len(different)} other elements of {expected.numel()}, the first at {first} (row-major), where "
        f"0x{bytes(wanted[first].tolist()).hex()} became 0x{bytes(found[first].tolist()).hex()}",
        "Compare and copy bits, not values: -0.0 == 0.0 and NaN payloads get lost",
    )


def compare_bounded(where: str, bound: ErrorBound, original: Tensor, got: Tensor) -> None:
    """Compares ``got`` with ``original`` in float64, and allows the error that ``bound`` allows and no more.

    Args:
        where: the codec and the tensor, for messages.
        bound: the bound that the codec promises.
        original: the tensor that was encoded, of any shape.
        got: the decoded tensor, of the same shape.

    Raises:
        AssertionError: an element is out of its bound, or an infinity or a NaN was changed.
    """
    x, y = original.detach().double(), got.double()
    if bound.each is not None:
        _compare_each(where, bound, bound.each, original.detach(), got)
        if bound.abs is None and bound.rel is None:
            return
    finite = x.isfinite()
    strange = torch.where(finite, False, (x != y) & ~(x.isnan() & y.isnan()))
    if bool(strange.any()):
        fail(
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
        fail(f"{where}: {bound} was promised, here {min(limits)}", f"an error of {error}", "Round to nearest")


def _compare_groups(where: str, bound: ErrorBound, rel: float, original: Tensor, got: Tensor) -> None:
    """Checks a bound that is a share of the range of each group, or of the whole tensor. All elements are finite."""
    info, size = torch.finfo(original.dtype), bound.group_size or original.numel()
    for x, y in zip(original.split(size), got.split(size), strict=True):
        x, y = x.double(), y.double()
        exponent = math.frexp(max(float(x.abs().max()), info.tiny))[1] - 1
        limit = rel * float(x.max() - x.min()) + bound.ulps * info.eps * 2.0**exponent
        error = float((x - y).abs().max())
        if not error <= limit:
            fail(f"{where}: {bound} was promised, in a group {limit}", f"an error of {error}", "Round to nearest")


def _compare_each(where: str, bound: ErrorBound, each: float, original: Tensor, got: Tensor) -> None:
    """Checks the part of a bound that is relative to each element. All products but the group's share are exact."""
    x, y = flat(original).double(), flat(got).double()
    magnitude = x.abs()
    tiny = torch.full_like(x, bound.tiny)
    if bound.group_size and x.numel():
        padded = x.new_zeros(-(-x.numel() // bound.group_size), bound.group_size)
        padded.view(-1)[: x.numel()] = magnitude.masked_fill(~x.isfinite(), 0.0)
        shares = (bound.share * padded.amax(1)).repeat_interleave(bound.group_size)[: x.numel()]
        tiny = tiny.maximum(shares)
    near = (x - y).abs() <= each * magnitude
    small = (magnitude < tiny) & (y.abs() <= tiny) & (x * y >= 0) & ((x != 0) | (y == 0))
    near = torch.where(magnitude > bound.limit, y == bound.limit * x.sign(), near | small)
    near = torch.where(x.isinf(), y == x, near)
    wrong = torch.where(x.isnan(), ~y.isnan(), ~near)
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        was, became = float(flat(original)[first]), float(y[first])
        fail(
            f"{where}: {bound} was promised",
            f"{int(wrong.sum())} other elements, the first at {first} (in memory), where {was} became {became}",
            "Round to nearest, clamp what is too large, and keep signs and NaNs",
        )


def tested_mask(codec: Codec) -> Mask:
    """The mask of a codec that preserves SIGN and not VALUE.

    Raises:
        AssertionError: the codec has no mask.
    """
    mask = getattr(codec, "mask", None)
    if not isinstance(mask, Mask):
        fail(
            f"check_codec asked {codec!r} for its mask, as it preserves SIGN and not VALUE",
            repr(mask),
            "Give it a field 'mask: Mask', which says what the bits mean",
        )
    return mask


def _stand_ins(mask: Mask, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor that a codec with this mask must decode to, in ``dtype`` and in the shape of ``x``."""
    passed = passes(x, mask.test.code, mask.lo, mask.hi)
    if dtype == torch.bool:
        return passed
    values = [1.0, 0.0] if mask.ternary else [mask.if_set, mask.if_clear]
    if_set, if_clear = torch.tensor(values, dtype=dtype, device=x.device)
    stand_ins = torch.where(passed, if_set, if_clear)
    return stand_ins.masked_fill(x < 0, -1.0) if mask.ternary else stand_ins

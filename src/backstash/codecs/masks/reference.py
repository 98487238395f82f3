"""One bit per element: the outcome of a test, which of two values it is; and the use of such a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.ops import bits_of, bytes_for, check_plane, kernel, pack_fields, unpack_fields
from backstash.saved import Test


def passes(x: Tensor, test: int, lo: float, hi: float) -> Tensor:
    """Returns the outcome of a :class:`~backstash.saved.Test` per element, bool [n]; bounds become ``x.dtype``."""
    kind = list(Test)[test]
    if kind is Test.NONZERO:
        return bits_of(x) != 0
    low = torch.tensor(lo, dtype=x.dtype, device=x.device)
    high = torch.tensor(hi, dtype=x.dtype, device=x.device)
    if kind is Test.NOT_LE:
        return ~(x <= low)
    if kind is Test.GT:
        return x > low
    if kind is Test.INSIDE:
        return (low < x) & (x < high)
    if kind is Test.NOT_OUTSIDE:
        return ~((x <= low) | (x >= high))
    return (low <= x) & (x <= high)


def _mask(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(bytes_for(x.numel(), 1), dtype=torch.uint8)


def _mask_and_count(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _mask(x), x.new_empty(1, dtype=torch.int64)


@kernel("(Tensor x, int test, float lo, float hi) -> Tensor", _mask)
def bitmask_encode(x: Tensor, test: int, lo: float, hi: float) -> Tensor:
    """Tests each element: [n] floating to uint8 [ceil(n / 8)], element ``i`` in bit ``i % 8`` of byte ``i // 8``."""
    return pack_fields(passes(x, test, lo, hi).long(), 1)


@kernel("(Tensor mask, Tensor(a!) out, float if_set, float if_clear) -> ()")
def bitmask_decode(mask: Tensor, out: Tensor, if_set: float, if_clear: float) -> None:
    """Fills ``out`` [n] (any floating dtype, bool or uint8) with one of two values per bit."""
    flags = unpack_fields(mask, 1, out.numel()).bool()
    out.copy_(torch.where(flags, torch.tensor(if_set, dtype=out.dtype), torch.tensor(if_clear, dtype=out.dtype)))


@kernel("(Tensor x, Tensor pair) -> (Tensor, Tensor)", _mask_and_count)
def binary_encode(x: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
    """Stores a tensor whose elements all have the bits of ``pair[0]`` (bit 0) or of ``pair[1]`` (bit 1).

    Args:
        x: [n], 2, 4 or 8 bytes per element.
        pair: [2] of the same dtype.

    Returns:
        The mask, uint8 [ceil(n / 8)]; and int64 [1], the number of elements that are neither. If that is not zero, the
        mask is useless.
    """
    bits, two = bits_of(x), bits_of(pair)
    other = bits != two[0]
    return pack_fields(other.long(), 1), (other & (bits != two[1])).sum().view(1)


@kernel("(Tensor mask, Tensor pair, Tensor(a!) out) -> ()")
def binary_decode(mask: Tensor, pair: Tensor, out: Tensor) -> None:
    """Fills ``out`` [n] with ``pair[bit]``, bit for bit."""
    bits_of(out).copy_(bits_of(pair)[unpack_fields(mask, 1, out.numel())])


@kernel("(Tensor x, Tensor mask, Tensor(a!) out) -> ()")
def mask_select(x: Tensor, mask: Tensor, out: Tensor) -> None:
    """Fills ``out`` [n] with ``x[i]`` where bit ``i`` of the mask is set, and with zero elsewhere.

    Args:
        x: [n] of any dtype.
        mask: uint8 [ceil(n / 8)].
        out: [n] of the dtype of ``x``; it may be ``x``.

    Raises:
        DamagedPlanesError: the mask is not of the size that ``x`` needs.
    """
    check_plane("mask_select", "mask", mask, bytes_for(x.numel(), 1))
    flags = unpack_fields(mask, 1, x.numel()).bool()
    out.copy_(torch.where(flags, x, torch.zeros((), dtype=x.dtype, device=x.device)))

"""Tensors without their zeros as a mask and values (ZVC): see codecs.zvc for the layout."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from backstash.codecs.minifloat.formats import FORMATS
from backstash.codecs.minifloat.reference import minifloat_decode, minifloat_encode
from backstash.errors import DamagedPlanesError
from backstash.ops import (
    ON_DEVICES,
    bits_of,
    bytes_for,
    disagreement,
    dynamic_size,
    gathered,
    kernel,
    pack_fields,
    per_chunk,
    unpack_fields,
    zvc_chunks,
)

zvc_damage = partial(disagreement, "zvc_decode", "the values that the mask and the offsets announce", "values")


def _planes(x: Tensor, words: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    mask = x.new_empty(bytes_for(x.numel(), 1), dtype=torch.uint8)
    return mask, x.new_empty(zvc_chunks(x.numel()), dtype=torch.int64), x.new_empty(words, dtype=dtype)


def _zvc(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _planes(x, dynamic_size(), x.dtype)


def _zvc_within(x: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_planes(x, room, x.dtype), x.new_empty(1, dtype=torch.int64)


@kernel("(Tensor x) -> (Tensor, Tensor, Tensor)", _zvc)
def zvc_encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compresses zeros: a bit per element, and the elements that have any bit set, in order.

    Args:
        x: [n], 2, 4 or 8 bytes per element.

    Returns:
        mask uint8 [ceil(n / 8)]; offsets int64 [ceil(n / ZVC_CHUNK)], where each chunk's first value stands in the
        values plane; values [number of set bits] of ``x``'s dtype.
    """
    flags = bits_of(x) != 0
    counts = per_chunk(flags)
    return pack_fields(flags.long(), 1), counts.cumsum(0) - counts, x[flags]


@kernel("(Tensor x, int room) -> (Tensor, Tensor, Tensor, Tensor)", _zvc_within, without=ON_DEVICES)
def zvc_encode_within(x: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`zvc_encode`, but a plane of values that has a given size, for which no host waits.

    Args:
        x: [n], 2, 4 or 8 bytes per element.
        room: values that the plane has room for.

    Returns:
        mask and offsets; values [room], undefined behind the last value; int64 [1], how many values ``x`` has. If there
        are more than ``room``, the plane lacks the last ones.
    """
    flags = bits_of(x) != 0
    counts = per_chunk(flags)
    (values,) = gathered(flags, room, x)
    return pack_fields(flags.long(), 1), counts.cumsum(0) - counts, values, flags.sum(0, keepdim=True)


@kernel("(Tensor mask, Tensor offsets, Tensor values, Tensor(a!) out) -> ()")
def zvc_decode(mask: Tensor, offsets: Tensor, values: Tensor, out: Tensor) -> None:
    """Fills ``out`` [n] from the planes of :func:`zvc_encode`.

    Raises:
        DamagedPlanesError: the mask's bits, the offsets and the number of values do not agree.
    """
    flags = unpack_fields(mask, 1, out.numel()).bool()
    counts = per_chunk(flags)
    if int(counts.sum()) != values.numel() or not torch.equal(counts.cumsum(0) - counts, offsets):
        raise DamagedPlanesError(zvc_damage(values.numel()))
    bits_of(out).zero_()
    bits_of(out)[flags] = bits_of(values)


def _zvc_codes(x: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor]:
    return _planes(x, dynamic_size(), FORMATS[format].dtype)


def _zvc_codes_within(x: Tensor, format: str, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    form = FORMATS[format]
    return *_planes(x, form.words(room), form.dtype), x.new_empty(1, dtype=torch.int64)


@kernel("(Tensor x, str format) -> (Tensor, Tensor, Tensor)", _zvc_codes)
def zvc_minifloat_encode(x: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor]:
    """Runs :func:`zvc_encode`, and :func:`minifloat_encode` on the values, none of which becomes zero."""
    mask, offsets, values = zvc_encode(x)
    return mask, offsets, minifloat_encode(values, format, True)


@kernel("(Tensor x, str format, int room) -> (Tensor, Tensor, Tensor, Tensor)", _zvc_codes_within, without=ON_DEVICES)
def zvc_minifloat_encode_within(x: Tensor, format: str, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`zvc_minifloat_encode`, but a plane with room for so many values, for which no host waits.

    Returns:
        mask and offsets; the codes of the first ``room`` values, and zeros where there are fewer; int64 [1], how many
        values ``x`` has.
    """
    mask, offsets, values, count = zvc_encode_within(x, room)
    return mask, offsets, minifloat_encode(values, format, True), count


@kernel("(Tensor mask, Tensor offsets, Tensor values, str format, Tensor(a!) out) -> ()")
def zvc_minifloat_decode(mask: Tensor, offsets: Tensor, values: Tensor, format: str, out: Tensor) -> None:
    """Fills ``out`` [n] from the planes of :func:`zvc_minifloat_encode`.

    Raises:
        DamagedPlanesError: the mask's bits, the offsets and the number of values do not agree.
    """
    stored = int(unpack_fields(mask, 1, out.numel()).sum())
    if values.numel() != FORMATS[format].words(stored):
        raise DamagedPlanesError(zvc_damage(values.numel()))
    dense = torch.empty(stored, dtype=out.dtype, device=out.device)
    minifloat_decode(values, format, dense)
    zvc_decode(mask, offsets, dense, out)

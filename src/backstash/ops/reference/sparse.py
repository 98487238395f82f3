"""Tensors without their zeros: a mask and values (ZVC), or columns, rows and values (CSR)."""

from __future__ import annotations

import torch
from torch import Tensor

from backstash.errors import DamagedPlanesError
from backstash.ops.layout import CSR_ROW, bytes_for, csr_rows, zvc_chunks
from backstash.ops.reference.bits import bits_of, pack, per_chunk, unpack
from backstash.ops.table import ON_DEVICES, dynamic_size, kernel


def _zvc(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(bytes_for(x.numel(), 1), dtype=torch.uint8),
        x.new_empty(zvc_chunks(x.numel()), dtype=torch.int64),
        x.new_empty(dynamic_size()),
    )


def _zvc_within(x: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        x.new_empty(bytes_for(x.numel(), 1), dtype=torch.uint8),
        x.new_empty(zvc_chunks(x.numel()), dtype=torch.int64),
        x.new_empty(room),
        x.new_empty(1, dtype=torch.int64),
    )


def _csr_within(x: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        x.new_empty(room, dtype=torch.uint8),
        x.new_empty(csr_rows(x.numel()) + 1, dtype=torch.int32),
        x.new_empty(room),
        x.new_empty(1, dtype=torch.int64),
    )


def _csr(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    nonzeros = dynamic_size()
    return (
        x.new_empty(nonzeros, dtype=torch.uint8),
        x.new_empty(csr_rows(x.numel()) + 1, dtype=torch.int32),
        x.new_empty(nonzeros),
    )


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
    return pack(flags.long(), 1), counts.cumsum(0) - counts, x[flags]


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
    return pack(flags.long(), 1), counts.cumsum(0) - counts, values, flags.sum(0, keepdim=True)


def gathered(flags: Tensor, room: int, *tensors: Tensor) -> list[Tensor]:
    """Returns the first ``room`` elements of each tensor that have a flag, and zeros where there are fewer.

    No size depends on the data, so the host does not wait for a device.
    """
    ranks = flags.cumsum(0) - 1
    places = torch.where(flags & (ranks < room), ranks, room)  # one more place takes all the others
    found = [x.new_zeros(room + 1) for x in tensors]
    for plane, x in zip(found, tensors, strict=True):
        bits_of(plane).scatter_(0, places, bits_of(x))
    return [plane[:room].clone() for plane in found]


def with_room(values: Tensor, room: int) -> Tensor:
    """Returns the first ``room`` values, and zeros where there are fewer."""
    found = values.new_zeros(room)
    found[: values.numel()] = values[:room]
    return found


def count_of(values: Tensor) -> Tensor:
    """Returns the number of values, int64 [1] where they are."""
    return torch.full((1,), values.numel(), dtype=torch.int64, device=values.device)


@kernel("(Tensor mask, Tensor offsets, Tensor values, Tensor(a!) out) -> ()")
def zvc_decode(mask: Tensor, offsets: Tensor, values: Tensor, out: Tensor) -> None:
    """Fills ``out`` [n] from the planes of :func:`zvc_encode`.

    Raises:
        DamagedPlanesError: the mask's bits, the offsets and the number of values do not agree.
    """
    flags = unpack(mask, 1, out.numel()).bool()
    counts = per_chunk(flags)
    if int(counts.sum()) != values.numel() or not torch.equal(counts.cumsum(0) - counts, offsets):
        raise DamagedPlanesError(zvc_damage(values.numel()))
    bits_of(out).zero_()
    bits_of(out)[flags] = bits_of(values)


def zvc_damage(stored: int) -> str:
    """Returns the message for a ZVC stash whose planes disagree."""
    return (
        f"zvc_decode asked for the values that the mask and the offsets announce, got planes that disagree "
        f"({stored} values stored). The stash was overwritten or cut short; compute the step again."
    )


@kernel("(Tensor x) -> (Tensor, Tensor, Tensor)", _csr)
def csr_encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Stores the elements that have any bit set, and the place of each in its row of CSR_ROW elements.

    Args:
        x: [n], 2, 4 or 8 bytes per element, n < 2**31.

    Returns:
        columns uint8 [number of elements that have any bit set]; rows int32 [ceil(n / CSR_ROW) + 1], where row ``r``
        has the columns and values ``rows[r]`` to ``rows[r + 1]``; values [as many] of ``x``'s dtype.
    """
    where = bits_of(x).nonzero().view(-1)
    rows = torch.zeros(csr_rows(x.numel()) + 1, dtype=torch.int32, device=x.device)
    rows[1:] = torch.bincount(where // CSR_ROW, minlength=csr_rows(x.numel())).cumsum(0)
    return (where % CSR_ROW).to(torch.uint8), rows, x[where]


@kernel("(Tensor x, int room) -> (Tensor, Tensor, Tensor, Tensor)", _csr_within, without=ON_DEVICES)
def csr_encode_within(x: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`csr_encode`, but columns and values of a given size, for which no host waits.

    Returns:
        columns [room]; rows; values [room]; int64 [1], how many values ``x`` has. If there are more than ``room``, the
        planes lack the last ones; behind the last one they are undefined.
    """
    flags = bits_of(x) != 0
    padded = flags.new_zeros(csr_rows(x.numel()) * CSR_ROW)
    padded[: x.numel()] = flags
    rows = torch.zeros(csr_rows(x.numel()) + 1, dtype=torch.int32, device=x.device)
    rows[1:] = padded.view(-1, CSR_ROW).sum(1).cumsum(0)
    columns = torch.arange(x.numel(), device=x.device).remainder(CSR_ROW).to(torch.uint8)
    columns, values = gathered(flags, room, columns, x)
    return columns, rows, values, flags.sum(0, keepdim=True)


@kernel("(Tensor columns, Tensor rows, Tensor values, Tensor(a!) out) -> ()")
def csr_decode(columns: Tensor, rows: Tensor, values: Tensor, out: Tensor) -> None:
    """Fills ``out`` [n] from the planes of :func:`csr_encode`.

    Raises:
        DamagedPlanesError: the rows do not add up to the columns and values, or columns do not rise within a row, or
            one is past the end of ``out``.
    """
    if rows.numel() != csr_rows(out.numel()) + 1 or columns.numel() != values.numel():
        raise DamagedPlanesError(csr_damage(values.numel()))
    counts = rows.long().diff()
    if int(rows[0]) != 0 or int(rows[-1]) != values.numel() or bool(((counts < 0) | (counts > CSR_ROW)).any()):
        raise DamagedPlanesError(csr_damage(values.numel()))
    starts = torch.arange(csr_rows(out.numel()), device=out.device) * CSR_ROW
    where = starts.repeat_interleave(counts) + columns
    if bool((where.diff() <= 0).any()) or bool((where[-1:] >= out.numel()).any()):
        raise DamagedPlanesError(csr_damage(values.numel()))
    bits_of(out).zero_()
    bits_of(out)[where] = bits_of(values)


def csr_damage(stored: int) -> str:
    """Returns the message for a CSR stash whose planes disagree."""
    return (
        f"csr_decode asked for the columns and values that the rows announce, got planes that disagree "
        f"({stored} values stored). The stash was overwritten or cut short; compute the step again."
    )

"""Tensors without their zeros as columns, rows and values (CSR): see codecs.csr for the layout."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from backstash.errors import DamagedPlanesError
from backstash.ops import ON_DEVICES, bits_of, disagreement, dynamic_size, gathered, kernel

csr_damage = partial(disagreement, "csr_decode", "the columns and values that the rows announce", "values")

CSR_ROW = 256
"""Elements of a CSR row: a column index of one byte tells so many apart."""


def csr_rows(numel: int) -> int:
    """Returns the number of CSR rows of ``numel`` elements."""
    return (numel + CSR_ROW - 1) // CSR_ROW


def _planes(x: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.new_empty(csr_rows(x.numel()) + 1, dtype=torch.int32)
    return x.new_empty(room, dtype=torch.uint8), rows, x.new_empty(room)


def _csr(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _planes(x, dynamic_size())


def _csr_within(x: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_planes(x, room), x.new_empty(1, dtype=torch.int64)


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

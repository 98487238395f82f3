"""CSR, on CUDA."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.codecs.csr.reference import CSR_ROW, csr_rows
from backstash.errors import DamagedPlanesError
from backstash.ops import bits_of
from backstash.ops.triton.elements import row_tile
from backstash.ops.triton.launching import ZVC_WARPS, blocks_of, check_plane, launch

CSR_ROWS = 16
"""Rows of CSR that one program makes or reads: 4096 elements, as many as a chunk of ZVC."""


@triton.jit
def csr_count_kernel(x_ptr, counts_ptr, numel, ROWS: tl.constexpr, ROW: tl.constexpr):
    """First pass of CSR: counts the elements of each row that have any bit set."""
    offs_rows, offs_x = row_tile(ROWS, ROW)
    flags = tl.load(x_ptr + offs_x, mask=offs_x < numel, other=0) != 0
    tl.store(counts_ptr + offs_rows, tl.sum(flags.to(tl.int32), axis=1), mask=offs_rows * ROW < numel)


@triton.jit
def csr_compact_kernel(x_ptr, rows_ptr, columns_ptr, values_ptr, numel, room, ROWS: tl.constexpr, ROW: tl.constexpr):
    """Second pass of CSR: stores a row's non-zero elements and columns, from its pointer on, as far as ``room``."""
    offs_rows, offs_x = row_tile(ROWS, ROW)
    x = tl.load(x_ptr + offs_x, mask=offs_x < numel, other=0)
    flags = (x != 0).to(tl.int32)
    first = tl.load(rows_ptr + offs_rows, mask=offs_rows * ROW < numel, other=0).to(tl.int64)
    offs_values = first[:, None] + tl.cumsum(flags, axis=1) - flags
    columns = tl.broadcast_to(tl.arange(0, ROW)[None, :], [ROWS, ROW]).to(tl.uint8)
    mask = (flags != 0) & (offs_values < room)
    tl.store(columns_ptr + offs_values, columns, mask=mask)
    tl.store(values_ptr + offs_values, x, mask=mask)


@triton.jit
def csr_decode_kernel(columns_ptr, rows_ptr, values_ptr, out_ptr, numel, stored, ROWS: tl.constexpr, ROW: tl.constexpr):
    """Stores zeros, and over these each row's values where its columns say. Values that the planes lack stay zero."""
    offs_rows, offs_out = row_tile(ROWS, ROW)
    tl.store(out_ptr + offs_out, tl.zeros([ROWS, ROW], out_ptr.dtype.element_ty), mask=offs_out < numel)
    tl.debug_barrier()  # another thread of this program may have written the zero that this one's value replaces
    there = offs_rows * ROW < numel
    first = tl.load(rows_ptr + offs_rows, mask=there, other=0).to(tl.int64)
    last = tl.load(rows_ptr + offs_rows + 1, mask=there, other=0).to(tl.int64)
    offs_values = first[:, None] + tl.arange(0, ROW)[None, :]
    mask = (offs_values < last[:, None]) & (offs_values >= 0) & (offs_values < stored)
    columns = tl.load(columns_ptr + offs_values, mask=mask, other=0).to(tl.int64)
    offs_out = offs_rows[:, None] * ROW + columns
    mask &= offs_out < numel
    tl.store(out_ptr + offs_out, tl.load(values_ptr + offs_values, mask=mask, other=0), mask=mask)


def csr_counted(x: Tensor) -> Tensor:
    """Runs CSR's first pass. Returns the rows plane, whose last entry is the number of values, on the device."""
    counts = x.new_empty(csr_rows(x.numel()), dtype=torch.int32)
    _launch_rows(csr_count_kernel, x.numel(), bits_of(x), counts, x.numel())
    rows = x.new_zeros(counts.numel() + 1, dtype=torch.int32)
    torch.cumsum(counts, 0, dtype=torch.int32, out=rows[1:])
    return rows


def csr_compact(x: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> None:
    """Runs CSR's second pass: fills ``columns`` and ``values``, as far as they have room."""
    arguments = bits_of(x), rows, columns, bits_of(values), x.numel(), values.numel()
    _launch_rows(csr_compact_kernel, x.numel(), *arguments, num_warps=ZVC_WARPS)


def csr_encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`backstash.codecs.csr.reference.csr_encode`.

    **Waits for the device**, once, after the first of two passes, as :func:`zvc_encode` does.
    """
    rows = csr_counted(x)
    stored = int(rows[-1].item())
    columns, values = x.new_empty(stored, dtype=torch.uint8), x.new_empty(stored)
    csr_compact(x, rows, columns, values)
    return columns, rows, values


def csr_encode_within(x: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`backstash.codecs.csr.reference.csr_encode_within`. Never waits for the device."""
    rows = csr_counted(x)
    columns, values = x.new_empty(room, dtype=torch.uint8), x.new_empty(room)
    csr_compact(x, rows, columns, values)
    return columns, rows, values, rows[-1:].long()


def csr_decode(columns: Tensor, rows: Tensor, values: Tensor, out: Tensor) -> None:
    """See :func:`backstash.codecs.csr.reference.csr_decode`.

    Raises:
        DamagedPlanesError: a plane has the wrong size, or there are more values than elements. That the rows, the
            columns and the values agree is not checked, which would wait for the device: no access leaves its plane.
    """
    check_plane("csr_decode", "rows", rows, csr_rows(out.numel()) + 1, out)
    check_plane("csr_decode", "columns", columns, values.numel(), out)
    if values.numel() > out.numel():
        raise DamagedPlanesError(
            f"csr_decode asked for at most {out.numel()} values, got {values.numel()}. The stash was overwritten or "
            f"belongs to another tensor; compute the step again."
        )
    arguments = columns, rows, bits_of(values), bits_of(out), out.numel(), values.numel()
    _launch_rows(csr_decode_kernel, out.numel(), *arguments, num_warps=ZVC_WARPS)


def _launch_rows(kernel: Any, numel: int, *args: Any, **constants: Any) -> None:
    programs = blocks_of(csr_rows(numel), CSR_ROWS)
    launch(kernel, programs, *args, ROWS=CSR_ROWS, ROW=CSR_ROW, **constants)

"""ZVC and CSR, on CUDA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstash.errors import DamagedPlanesError
from backstash.ops.layout import CSR_ROW, ZVC_CHUNK, bytes_for, csr_rows, zvc_chunks
from backstash.ops.reference.bits import bits_of
from backstash.ops.triton.elements import block_offsets, elements_of, row_tile, to_bytes, to_flags
from backstash.ops.triton.launching import ZVC_WARPS, blocks_of, check_plane, launch

CSR_ROWS = 16
"""Rows of CSR that one program makes or reads: 4096 elements, as many as a chunk of ZVC."""


@triton.jit
def zvc_mask_kernel(x_ptr, mask_ptr, counts_ptr, numel, CHUNK_BYTES: tl.constexpr):
    """First pass of ZVC, a program per chunk: stores its mask bytes, and the number of its non-zero elements."""
    offs_bytes = block_offsets(CHUNK_BYTES)
    offs_x = elements_of(offs_bytes)
    flags = tl.load(x_ptr + offs_x, mask=offs_x < numel, other=0) != 0
    tl.store(mask_ptr + offs_bytes, to_bytes(flags), mask=offs_bytes * 8 < numel)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(flags.to(tl.int32)).to(tl.int64))


@triton.jit
def zvc_compact_kernel(x_ptr, offsets_ptr, values_ptr, numel, room, CHUNK: tl.constexpr):
    """Second pass of ZVC, a program per chunk: stores its non-zero elements, from its offset on, as far as ``room``."""
    offs_x = block_offsets(CHUNK)
    x = tl.load(x_ptr + offs_x, mask=offs_x < numel, other=0)
    flags = (x != 0).to(tl.int32)
    offs_values = tl.load(offsets_ptr + tl.program_id(0)) + tl.cumsum(flags, axis=0) - flags
    tl.store(values_ptr + offs_values, x, mask=(flags != 0) & (offs_values < room))


@triton.jit
def zvc_decode_kernel(mask_ptr, offsets_ptr, values_ptr, out_ptr, numel, stored, CHUNK: tl.constexpr):
    """Stores a chunk's elements from its mask bytes and its values, and zero where the planes lack a value."""
    offs_bytes = block_offsets(CHUNK // 8)
    mask_bytes = tl.load(mask_ptr + offs_bytes, mask=offs_bytes * 8 < numel, other=0)
    flags = tl.reshape(to_flags(mask_bytes).to(tl.int32), [CHUNK])
    offs_values = tl.load(offsets_ptr + tl.program_id(0)) + tl.cumsum(flags, axis=0) - flags
    there = (flags != 0) & (offs_values >= 0) & (offs_values < stored)
    values = tl.load(values_ptr + offs_values, mask=there, other=0)
    offs_out = block_offsets(CHUNK)
    tl.store(out_ptr + offs_out, values, mask=offs_out < numel)


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


def zvc_masked(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Runs ZVC's first pass. Returns mask, offsets, and int64 [1], the number of values, all on the device."""
    chunks = zvc_chunks(x.numel())
    mask = x.new_empty(bytes_for(x.numel(), 1), dtype=torch.uint8)
    counts = x.new_empty(chunks, dtype=torch.int64)
    kernel = zvc_mask_kernel
    launch(kernel, chunks, bits_of(x), mask, counts, x.numel(), CHUNK_BYTES=ZVC_CHUNK // 8, num_warps=ZVC_WARPS)
    ends = counts.cumsum(0)
    return mask, ends - counts, ends[-1:] if chunks else x.new_zeros(1, dtype=torch.int64)


def _zvc_compact(x: Tensor, offsets: Tensor, values: Tensor) -> None:
    """Runs ZVC's second pass: fills ``values`` with the elements that have any bit set, as far as it has room."""
    kernel = zvc_compact_kernel
    launch(
        kernel,
        offsets.numel(),
        bits_of(x),
        offsets,
        bits_of(values),
        x.numel(),
        values.numel(),
        CHUNK=ZVC_CHUNK,
        num_warps=ZVC_WARPS,
    )


def zvc_encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`backstash.ops.reference.sparse.zvc_encode`.

    **Waits for the device**, once, after the first of two passes: the size of the values plane depends on the data and
    the host allocates it. In return nothing but the planes themselves is allocated (and 8 bytes per chunk, twice).
    :func:`zvc_encode_within` does not wait.

    Args:
        x: [n], 2, 4 or 8 bytes per element.

    Returns:
        mask uint8 [ceil(n / 8)]; offsets int64 [ceil(n / ZVC_CHUNK)], where each chunk's first value stands in the
        values plane; values [number of set bits] of ``x``'s dtype.
    """
    mask, offsets, count = zvc_masked(x)
    values = x.new_empty(int(count.item()))
    _zvc_compact(x, offsets, values)
    return mask, offsets, values


def zvc_encode_within(x: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`backstash.ops.reference.sparse.zvc_encode_within`. Never waits for the device."""
    mask, offsets, count = zvc_masked(x)
    values = x.new_empty(room)
    _zvc_compact(x, offsets, values)
    return mask, offsets, values, count


def zvc_decode(mask: Tensor, offsets: Tensor, values: Tensor, out: Tensor) -> None:
    """See :func:`backstash.ops.reference.sparse.zvc_decode`.

    Raises:
        DamagedPlanesError: a plane has the wrong size, or there are more values than elements. That the mask's bits,
            the offsets and the values agree is not checked, which would wait for the device: an element whose value
            the planes do not have becomes zero.
    """
    check_plane("zvc_decode", "mask", mask, bytes_for(out.numel(), 1), out)
    check_plane("zvc_decode", "offsets", offsets, zvc_chunks(out.numel()), out)
    if values.numel() > out.numel():
        raise DamagedPlanesError(
            f"zvc_decode asked for at most {out.numel()} values, got {values.numel()}. The stash was overwritten or "
            f"belongs to another tensor; compute the step again."
        )
    launch(
        zvc_decode_kernel,
        offsets.numel(),
        mask,
        offsets,
        bits_of(values),
        bits_of(out),
        out.numel(),
        values.numel(),
        CHUNK=ZVC_CHUNK,
        num_warps=ZVC_WARPS,
    )


def csr_counted(x: Tensor) -> Tensor:
    """Runs CSR's first pass. Returns the rows plane, whose last entry is the number of values, on the device."""
    programs = csr_rows(x.numel())
    counts = x.new_empty(programs, dtype=torch.int32)
    kernel = csr_count_kernel
    launch(kernel, blocks_of(programs, CSR_ROWS), bits_of(x), counts, x.numel(), ROWS=CSR_ROWS, ROW=CSR_ROW)
    rows = x.new_zeros(programs + 1, dtype=torch.int32)
    torch.cumsum(counts, 0, dtype=torch.int32, out=rows[1:])
    return rows


def csr_compact(x: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> None:
    """Runs CSR's second pass: fills ``columns`` and ``values``, as far as they have room."""
    launch(
        csr_compact_kernel,
        blocks_of(csr_rows(x.numel()), CSR_ROWS),
        bits_of(x),
        rows,
        columns,
        bits_of(values),
        x.numel(),
        values.numel(),
        ROWS=CSR_ROWS,
        ROW=CSR_ROW,
        num_warps=ZVC_WARPS,
    )


def csr_encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`backstash.ops.reference.sparse.csr_encode`.

    **Waits for the device**, once, after the first of two passes, as :func:`zvc_encode` does.

    Args:
        x: [n], 2, 4 or 8 bytes per element, n < 2**31.

    Returns:
        columns uint8 [number of elements that have any bit set]; rows int32 [ceil(n / CSR_ROW) + 1]; values [as many
        as columns] of ``x``'s dtype.
    """
    rows = csr_counted(x)
    stored = int(rows[-1].item())
    columns, values = x.new_empty(stored, dtype=torch.uint8), x.new_empty(stored)
    csr_compact(x, rows, columns, values)
    return columns, rows, values


def csr_encode_within(x: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`backstash.ops.reference.sparse.csr_encode_within`. Never waits for the device."""
    rows = csr_counted(x)
    columns, values = x.new_empty(room, dtype=torch.uint8), x.new_empty(room)
    csr_compact(x, rows, columns, values)
    return columns, rows, values, rows[-1:].long()


def csr_decode(columns: Tensor, rows: Tensor, values: Tensor, out: Tensor) -> None:
    """See :func:`backstash.ops.reference.sparse.csr_decode`.

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
    launch(
        csr_decode_kernel,
        blocks_of(csr_rows(out.numel()), CSR_ROWS),
        columns,
        rows,
        bits_of(values),
        bits_of(out),
        out.numel(),
        values.numel(),
        ROWS=CSR_ROWS,
        ROW=CSR_ROW,
        num_warps=ZVC_WARPS,
    )

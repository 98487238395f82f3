"""CSR in C++. Elements of 1 byte and of 16 bytes go to the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backstash.codecs.csr import reference
from backstash.codecs.csr.reference import csr_damage, csr_rows
from backstash.errors import DamagedPlanesError
from backstash.ops.cpu import library
from backstash.ops.cpu.planes import check_plane, new_plane, threads_for

_lib: Any = library.functions(
    bs_csr_count="l(plipi)",
    bs_csr_gather="(plipppli)",
    bs_csr_decode="i(ppplplii)",
)


def csr_encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`backstash.codecs.csr.reference.csr_encode`."""
    width = x.element_size()
    if width not in (2, 4, 8):
        return reference.csr_encode(x)
    n, source = x.numel(), x.data_ptr()
    threads = threads_for(n * width)
    rows = torch.empty(csr_rows(n) + 1, dtype=torch.int32, device="cpu")
    stored = _lib.bs_csr_count(source, n, width, rows.data_ptr(), threads)
    columns, values = new_plane(stored, torch.uint8), new_plane(stored, x.dtype)
    planes = rows.data_ptr(), columns.data_ptr(), values.data_ptr()
    _lib.bs_csr_gather(source, n, width, *planes, stored, threads)
    return columns, rows, values


def csr_decode(columns: Tensor, rows: Tensor, values: Tensor, out: Tensor) -> None:
    """See :func:`backstash.codecs.csr.reference.csr_decode`. All planes are checked before ``out`` is touched."""
    width = out.element_size()
    if width not in (2, 4, 8) or values.element_size() != width or rows.dtype is not torch.int32:
        return reference.csr_decode(columns, rows, values, out)
    n, stored = out.numel(), values.numel()
    check_plane("csr_decode", "rows", rows, csr_rows(n) + 1)
    check_plane("csr_decode", "columns", columns, stored)
    planes = columns.data_ptr(), rows.data_ptr(), values.data_ptr()
    if _lib.bs_csr_decode(*planes, stored, out.data_ptr(), n, width, threads_for(n * width)) != 0:
        raise DamagedPlanesError(csr_damage(stored))

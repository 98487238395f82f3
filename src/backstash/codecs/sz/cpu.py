"""Error-bounded, predicted and entropy-coded values, in C++.

Other dtypes than float32, float16 and bfloat16 go to the reference.
"""

from __future__ import annotations

from ctypes import c_int64
from typing import Any

import torch
from torch import Tensor

from backstash.codecs.sz import reference as reference
from backstash.codecs.sz.coding import AXES, BINS, chunks, starts
from backstash.codecs.sz.reference import sz_damage
from backstash.errors import DamagedPlanesError
from backstash.ops.cpu import library
from backstash.ops.cpu.planes import SMALL_FLOATS

_lib: Any = library.functions(
    bs_sz_range="(plipi)",
    bs_sz_survey="(plidddipllp)",
    bs_sz_encode="p(plipldddliippi)",
    bs_sz_free="(p)",
    bs_sz_collect="(pppppi)",
    bs_sz_decode="i(plplpplplddliipplii)",
)


def sz_range(x: Tensor) -> Tensor:
    """See :func:`backstash.codecs.sz.reference.sz_range`."""
    if x.dtype not in SMALL_FLOATS:
        return reference.sz_range(x)
    found = torch.empty(2, dtype=torch.float64, device="cpu")
    _lib.bs_sz_range(x.data_ptr(), x.numel(), SMALL_FLOATS[x.dtype], found.data_ptr(), torch.get_num_threads())
    return found


def sz_survey(x: Tensor, step: float, bound: float, low: int, blocks: list[int], offset: float = 0.0) -> Tensor:
    """See :func:`backstash.codecs.sz.reference.sz_survey`."""
    if x.dtype not in SMALL_FLOATS:
        return reference.sz_survey(x, step, bound, low, blocks, offset)
    begins, run = starts(x.numel())
    counts = torch.zeros(len(AXES) * BINS, dtype=torch.int64, device="cpu")
    source = x.data_ptr(), x.numel(), SMALL_FLOATS[x.dtype]
    divided = (c_int64 * 4)(*blocks)
    _lib.bs_sz_survey(*source, step, bound, offset, low, divided, len(begins), run, counts.data_ptr())
    return counts


def sz_encode(
    x: Tensor, table: Tensor, step: float, bound: float, model: list[int], blocks: list[int], offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`backstash.codecs.sz.reference.sz_encode`."""
    if x.dtype not in SMALL_FLOATS:
        return reference.sz_encode(x, table, step, bound, model, blocks, offset)
    threads, sizes, n = torch.get_num_threads(), (c_int64 * 3)(), x.numel()
    source = x.data_ptr(), n, SMALL_FLOATS[x.dtype], table.data_ptr(), table.numel()
    divided = (c_int64 * 4)(*blocks)
    encoded = _lib.bs_sz_encode(*source, step, bound, offset, *model, divided, sizes, threads)
    if encoded is None:
        raise ValueError(
            f"sz_encode asked for frequencies of 2 to 32 symbols that add up to 256, an escape's not 0, and for "
            f"memory of the size of what is encoded; got {table.numel()} frequencies. Make them with "
            f"codecs.sz.coding.model."
        )
    try:
        stream, places = (torch.empty(size, dtype=torch.int16, device="cpu") for size in sizes[:2])
        values = x.new_empty(sizes[2])
        index = torch.empty(1 + 4 * chunks(n, blocks[3]), dtype=torch.int64, device="cpu")
    except BaseException:
        _lib.bs_sz_free(encoded)
        raise
    planes = stream, index, places, values
    _lib.bs_sz_collect(encoded, *(plane.data_ptr() for plane in planes), threads)
    return planes


def sz_decode(
    table: Tensor,
    stream: Tensor,
    index: Tensor,
    places: Tensor,
    values: Tensor,
    step: float,
    model: list[int],
    blocks: list[int],
    out: Tensor,
    offset: float = 0.0,
) -> None:
    """See :func:`backstash.codecs.sz.reference.sz_decode`. All is checked before ``out`` is touched."""
    if out.dtype not in SMALL_FLOATS or values.dtype != out.dtype:
        return reference.sz_decode(table, stream, index, places, values, step, model, blocks, out, offset)
    n = out.numel()
    if index.numel() != 1 + 4 * chunks(n, blocks[3]):
        raise DamagedPlanesError(sz_damage())
    sized = [(plane.data_ptr(), plane.numel()) for plane in (stream, table, places, values)]
    planes = *sized[0], *sized[1], index.data_ptr(), *sized[2], *sized[3]
    target = out.data_ptr(), n, SMALL_FLOATS[out.dtype], torch.get_num_threads()
    if _lib.bs_sz_decode(*planes, step, offset, *model, (c_int64 * 4)(*blocks), *target) != 0:
        raise DamagedPlanesError(sz_damage())

"""Error-bounded values, predicted and entropy-coded, on CUDA: the launchers.

``encoding`` and ``decoding`` have the device code. Other dtypes than float32, float16 and bfloat16 go
to the reference.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from backstash.codecs.sz import coding as sz
from backstash.codecs.sz import reference as reference
from backstash.codecs.sz.reference import sz_damage
from backstash.codecs.sz.triton.decoding import (
    sz_check_kernel,
    sz_decode_kernel,
    sz_dequantise_kernel,
    sz_outliers_kernel,
    sz_slots_kernel,
    sz_sum_kernel,
)
from backstash.codecs.sz.triton.encoding import (
    sz_collect_kernel,
    sz_encode_kernel,
    sz_entries_kernel,
    sz_quantise_kernel,
    sz_survey_kernel,
)
from backstash.codecs.szp.triton import szp_range
from backstash.errors import DamagedPlanesError
from backstash.ops import bits_of
from backstash.ops.triton.launching import ZVC_WARPS, blocks_of, launch

PIECE = 1024
"""Elements of a chunk that one program quantises, makes again, or moves at once."""

SMALL_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def sz_range(x: Tensor) -> Tensor:
    return szp_range(x).double() if x.dtype in SMALL_FLOATS else reference.sz_range(x)


def sz_survey(x: Tensor, step: float, bound: float, low: int, blocks: list[int], offset: float = 0.0) -> Tensor:
    if x.dtype not in SMALL_FLOATS:
        return reference.sz_survey(x, step, bound, low, blocks, offset)
    counts = x.new_zeros(len(sz.AXES) * sz.BINS, dtype=torch.int64)
    programs = blocks_of(min(x.numel(), sz.SURVEYED), sz.RUN)
    arguments = bits_of(x), counts, x.numel(), *blocks[:3], low, *_numbers(step, bound, offset)
    constants = {"SURVEYED": sz.SURVEYED, "HALF": x.dtype == torch.float16, "BLOCK": sz.RUN}
    launch(sz_survey_kernel, programs, *arguments, **constants)
    return counts


def sz_encode_staged(
    x: Tensor, table: Tensor, step: float, bound: float, model: list[int], blocks: list[int], offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Runs the part of :func:`sz_encode` before the sizes of the planes are known. Never waits for the device.

    Returns:
        staging int16 [chunks, slot], where every chunk's words stay in a slot as large as its elements; and the index
        without the chunks' checksums.
    """
    base, low, axes = model
    chunks, pieces = _pieces(x.numel(), blocks[3])
    codes = x.new_empty(x.numel(), dtype=torch.int32)
    outliers = x.new_zeros(chunks, dtype=torch.int32)
    arguments = bits_of(x), codes, outliers, x.numel(), *blocks, pieces, *_numbers(step, bound, offset)
    launch(sz_quantise_kernel, chunks * pieces, *arguments, AXES=axes, HALF=x.dtype == torch.float16, BLOCK=PIECE)
    entries = x.new_empty(sz.WINDOW + 2, dtype=torch.int32)
    index = x.new_empty(1 + 4 * chunks, dtype=torch.int64)
    launch(sz_entries_kernel, 1, table, entries, index, table.numel(), base, num_warps=ZVC_WARPS)
    slot = min(x.numel(), blocks[3]) * x.element_size() // 2
    staging = x.new_empty((chunks, slot), dtype=torch.int16)
    sizes = x.new_empty((chunks, 3), dtype=torch.int64)
    coded = codes, entries, outliers, staging, sizes, x.numel(), blocks[3], slot, low
    launch(sz_encode_kernel, chunks, *coded, HAS_LOW=low > 0, WIDTH=x.element_size(), num_warps=1)
    index[1:].view(chunks, 4)[:, :3] = sizes.cumsum(0)
    return staging, index


def sz_collect(
    x: Tensor,
    step: float,
    bound: float,
    blocks: list[int],
    offset: float,
    staging: Tensor,
    index: Tensor,
    stream: Tensor,
    places: Tensor,
    values: Tensor,
) -> None:
    """Fills the planes, as far as they have room, with what :func:`sz_encode_staged` has found, and the checksums."""
    chunks, chunk = staging.shape[0], blocks[3]
    planes = stream, places, bits_of(values)
    rooms = stream.numel(), places.numel(), values.numel()
    arguments = bits_of(x), staging, index, *planes, x.numel(), chunk, staging.shape[1], *rooms
    numbers = _numbers(step, bound, offset)
    launch(sz_collect_kernel, chunks, *arguments, *numbers, HALF=x.dtype == torch.float16, BLOCK=PIECE)
    _check_chunks(stream, places, values, index, index, x.numel(), chunk, verify=False)


def sz_encode(
    x: Tensor, table: Tensor, step: float, bound: float, model: list[int], blocks: list[int], offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`backstash.codecs.sz.reference.sz_encode`.

    **Waits for the device**, once, before the planes are allocated: their sizes depend on the data. Until then 4 bytes
    per element are allocated for codes, and until the end as many bytes as ``x`` has for words. What the table says is
    not checked, which would wait.
    """
    if x.dtype not in SMALL_FLOATS:
        return reference.sz_encode(x, table, step, bound, model, blocks, offset)
    if not 2 <= table.numel() <= sz.SYMBOLS:
        raise ValueError(
            f"sz_encode asked for frequencies of 2 to {sz.SYMBOLS} symbols, got {table.numel()} frequencies. Make "
            f"them with codecs.sz.coding.model."
        )
    staging, index = sz_encode_staged(x, table, step, bound, model, blocks, offset)
    words, outliers, stored = index[-4:-1].tolist() if x.numel() else (0, 0, 0)
    stream, places = (x.new_empty(size, dtype=torch.int16) for size in (words, outliers))
    values = x.new_empty(stored)
    sz_collect(x, step, bound, blocks, offset, staging, index, stream, places, values)
    return stream, index, places, values


def sz_encode_within(
    x: Tensor,
    table: Tensor,
    step: float,
    bound: float,
    model: list[int],
    blocks: list[int],
    rooms: list[int],
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`backstash.codecs.sz.reference.sz_encode_within`. Never waits for the device."""
    if x.dtype not in SMALL_FLOATS:
        return reference.sz_encode_within(x, table, step, bound, model, blocks, rooms, offset)
    staging, index = sz_encode_staged(x, table, step, bound, model, blocks, offset)
    sizes = index[-4:-1].clone() if x.numel() else x.new_zeros(3, dtype=torch.int64)
    stream, places = (x.new_empty(room, dtype=torch.int16) for room in rooms[:2])
    values = x.new_empty(rooms[2])
    sz_collect(x, step, bound, blocks, offset, staging, index, stream, places, values)
    return stream, index, places, values, sizes


def sz_decode_flagged(
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
) -> Tensor:
    """As :func:`sz_decode`, but never waits: returns int32 [1] on the device, not 0 if the planes do not fit together.

    Sizes and checksums are compared before ``out`` is touched. The codes are in the memory of ``out`` if it is float32,
    else 4 bytes per element are allocated for them.

    Raises:
        DamagedPlanesError: a plane has the wrong size.
    """
    if out.dtype not in SMALL_FLOATS or values.dtype != out.dtype:
        return reference.sz_decode_flagged(table, stream, index, places, values, step, model, blocks, out, offset)
    base, low, axes = model
    n, chunk = out.numel(), blocks[3]
    chunks, pieces = _pieces(n, chunk)
    sized = sz.fits_in_table(table.numel(), low) and index.numel() == 1 + 4 * chunks
    if not sized or (chunks == 0 and stream.numel() + places.numel() + values.numel() > 0):
        raise DamagedPlanesError(sz_damage())
    slots = out.new_empty(1 << sz.PRECISION, dtype=torch.int64)
    damaged = out.new_empty(1, dtype=torch.int32)
    tables = table, index, slots, damaged, table.numel(), base
    launch(sz_slots_kernel, 1, *tables, num_warps=ZVC_WARPS)
    _check_chunks(stream, places, values, index, damaged, n, chunk, verify=True)
    bits = bits_of(out)
    codes = bits if bits.dtype == torch.int32 else out.new_empty(n, dtype=torch.int32)
    coded = stream, index, slots, codes, damaged, n, chunk, low
    launch(sz_decode_kernel, chunks, *coded, HAS_LOW=low > 0, num_warps=1)
    for axis, (stride, block) in enumerate(zip([1, *blocks], blocks[:3], strict=False)):
        if axes >> axis & 1 and block > stride:
            _sum(codes, damaged, stride, block)
    bits_of_values = bits_of(values)
    made = codes, index, bits_of_values, damaged, bits, n, chunk, pieces, step, offset
    launch(sz_dequantise_kernel, chunks * pieces, *made, HALF=out.dtype == torch.float16, BLOCK=PIECE)
    if places.numel():
        launch(sz_outliers_kernel, chunks, index, places, bits_of_values, damaged, bits, n, chunk, BLOCK=PIECE)
    return damaged


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
    """See :func:`backstash.codecs.sz.reference.sz_decode`.

    **Waits for the device**, once, when all is queued: damage is found there, and raised here.
    """
    if out.dtype not in SMALL_FLOATS or values.dtype != out.dtype:
        return reference.sz_decode(table, stream, index, places, values, step, model, blocks, out, offset)
    if sz_decode_flagged(table, stream, index, places, values, step, model, blocks, out, offset).item():
        raise DamagedPlanesError(sz_damage())


def _check_chunks(
    stream: Tensor,
    places: Tensor,
    values: Tensor,
    index: Tensor,
    damaged: Tensor,
    n: int,
    chunk: int,
    verify: bool,
) -> None:
    """Stores every chunk's checksum in the index; or compares it, and sets ``damaged`` if something is wrong."""
    sizes = stream.numel(), places.numel(), values.numel(), n, chunk
    planes = stream, places, values.view(torch.int16), index, damaged
    width = values.element_size() // 2
    launch(sz_check_kernel, sz.chunks(n, chunk), *planes, *sizes, VERIFY=verify, WIDTH=width, BLOCK=PIECE)


def _sum(codes: Tensor, damaged: Tensor, stride: int, block: int) -> None:
    """Computes prefix sums along lines of ``block // stride`` elements, PIECE elements at a time."""
    lines = blocks_of(codes.numel(), block) * stride
    count = min(PIECE, 1 << (block // stride - 1).bit_length())
    lines_at_once = PIECE // count
    programs = blocks_of(lines, lines_at_once)
    sized = codes.numel(), stride, block, lines
    launch(sz_sum_kernel, programs, codes, damaged, *sized, LINES=lines_at_once, COUNT=count)


def _pieces(n: int, chunk: int) -> tuple[int, int]:
    return sz.chunks(n, chunk), blocks_of(min(n, chunk), PIECE)


def _numbers(step: float, bound: float, offset: float) -> tuple[float, float, float, float]:
    return min(1.0 / step, sys.float_info.max), step, bound, offset

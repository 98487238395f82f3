"""The memory order of a value in a graph, and small integers packed into bytes along one of its dimensions.

Note: [packed along a dimension]
    Eight neighbours in memory share a byte in the planes of the eager codecs. In a compiled graph the elements that
    share a byte lie an eighth of a dimension apart, preferably of the outermost one. Both directions are then
    elementwise on contiguous runs, so that a compiler can vectorise them and fuse them with what computes or reads the
    value, and no dimension is flattened, so that it stays free to choose the layout. The values are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from backstash.compile.graph.emit import Emitter, GraphValue, is_fusing, is_multiple, product, sizes_of, tensor_of

_aten, _prims = torch.ops.aten, torch.ops.prims


def memory_order(x: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions from the outermost in memory to the innermost; None if elements overlap or leave gaps."""
    sizes, strides = list(x.shape), list(x.stride())
    hints = [hint(stride) for stride in strides]
    order = sorted(range(x.dim()), key=lambda dim: (-hints[dim], dim))
    # Dimensions of one element may have any stride, which says nothing about their place.
    expected: Any = 1
    for dim in reversed(order):
        if statically_known_true(sizes[dim] == 1):
            continue
        if not statically_known_true(strides[dim] == expected):
            return None
        expected = expected * sizes[dim]
    return tuple(order)


def hint(size: Any) -> int:
    """The number that a symbolic size stood for when the graph was compiled; 0 where there is none."""
    if isinstance(size, int):
        return size
    known = size.node.hint
    return int(known) if known is not None else 0


def inverse(order: Sequence[int]) -> list[int]:
    """The permutation that undoes another one."""
    return sorted(range(len(order)), key=lambda position: order[position])


def is_identity(order: Sequence[int]) -> bool:
    """Whether a permutation changes nothing."""
    return list(order) == sorted(order)


def in_memory_order(emit: Emitter, x: GraphValue) -> GraphValue:
    """A contiguous view of a dense value."""
    order = memory_order(tensor_of(x))
    assert order is not None
    return x if is_identity(order) else emit(_aten.permute.default, x, list(order))


def like_original(emit: Emitter, ordered: GraphValue, original: torch.Tensor) -> GraphValue:
    """Undoes :func:`in_memory_order`: a view with the original's sizes and strides."""
    order = memory_order(original)
    assert order is not None
    sizes = [original.shape[dim] for dim in order]
    if not have_same_sizes(sizes_of(ordered), sizes):
        ordered = emit(_aten.view.default, ordered, sizes)
    return ordered if is_identity(order) else emit(_aten.permute.default, ordered, inverse(order))


def have_same_sizes(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether sizes are known to be equal, whatever the symbols in them stand for."""
    return len(sizes) == len(others) and all(
        statically_known_true(size == other) for size, other in zip(sizes, others, strict=True)
    )


def cast(emit: Emitter, x: GraphValue, dtype: torch.dtype) -> GraphValue:
    """The value in another dtype."""
    return x if tensor_of(x).dtype == dtype else emit(_prims.convert_element_type.default, x, dtype)


def constant(emit: Emitter, number: float, like: GraphValue, dtype: torch.dtype | None = None) -> GraphValue:
    """A tensor of no dimensions."""
    x = tensor_of(like)
    return emit(_aten.full.default, [], number, dtype=dtype or x.dtype, device=x.device, pin_memory=False)


def clamp(emit: Emitter, x: GraphValue, low: float | None, high: float | None) -> GraphValue:
    """The value within bounds; a NaN stays."""
    if low is not None:
        x = emit(_aten.maximum.default, x, constant(emit, low, x))
    return x if high is None else emit(_aten.minimum.default, x, constant(emit, high, x))


def count_up(emit: Emitter, length: Any, like: GraphValue, dtype: torch.dtype, step: int = 1) -> GraphValue:
    """The numbers 0, step, 2 * step, ..., ``length`` of them."""
    return emit(
        _prims.iota.default,
        length,
        start=0,
        step=step,
        dtype=dtype,
        device=tensor_of(like).device,
        requires_grad=False,
    )


def packed_dimension(sizes: Sequence[Any], fields: int) -> int | None:
    """The outermost dimension whose size is known to be a multiple of ``fields``, or None."""
    return next((dim for dim, size in enumerate(sizes) if is_multiple(size, fields)), None)


def pack(emit: Emitter, codes: GraphValue, bits: int) -> GraphValue:
    """Packs integers of few bits into bytes.

    Args:
        emit: where the calls go.
        codes: uint8, contiguous, of any shape, each below ``2**bits``.
        bits: 1, 2, 4 or 8.

    Returns:
        uint8, with a ``8 / bits``-th of the elements; one dimension if no dimension's size is a multiple of that.
    """
    return pack_along(emit, codes, bits, packed_dimension(sizes_of(codes), 8 // bits))


def pack_bools(emit: Emitter, x: GraphValue) -> GraphValue:
    """The same for bools, a bit each."""
    return pack(emit, cast(emit, x, torch.float32 if is_fusing(emit) else torch.uint8), 1)


def pack_along(emit: Emitter, codes: GraphValue, bits: int, dim: int | None) -> GraphValue:
    """The same along a given dimension, or along the flattened codes.

    Where sums are not stored, bytes are summed up as floats, which hold them exactly: a compiler's vectors of bytes are
    shifted one byte at a time.
    """
    fields = 8 // bits
    if fields == 1:
        return codes
    if dim is None:
        codes, dim = _padded(emit, codes, fields), 0
    size = sizes_of(codes)[dim] // fields
    as_floats = is_fusing(emit)
    packed: GraphValue = None
    for field in range(fields):
        part = emit(_aten.slice.Tensor, codes, dim, field * size, (field + 1) * size)
        if as_floats:
            part = emit(_aten.mul.Scalar, cast(emit, part, torch.float32), float(1 << field * bits))
        elif field:
            part = emit(_aten.bitwise_left_shift.Tensor_Scalar, part, field * bits)
        add = _aten.add.Tensor if as_floats else _aten.bitwise_or.Tensor
        packed = part if packed is None else emit(add, packed, part)
    return cast(emit, packed, torch.uint8) if as_floats else packed


def unpack_bits(emit: Emitter, packed: GraphValue, bits: int, sizes: Sequence[Any]) -> GraphValue:
    """Undoes :func:`pack`, given the sizes of the codes."""

    def fields(rows: GraphValue, shifts: GraphValue) -> GraphValue:
        spread = emit(_aten.bitwise_right_shift.Tensor, rows, shifts)
        return emit(_aten.bitwise_and.Scalar, spread, (1 << bits) - 1)

    return packed if bits == 8 else _unpacked(emit, packed, bits, sizes, fields)


def unpack_bools(emit: Emitter, packed: GraphValue, sizes: Sequence[Any]) -> GraphValue:
    """Undoes :func:`pack` of bools.

    Each bit is tested where it is, and as a float where that is not stored: a compiler's vectors of bytes are shifted
    one byte at a time, and so are masks of bytes made into those of floats.
    """

    def tests(rows: GraphValue, shifts: GraphValue) -> GraphValue:
        weights = emit(_aten.bitwise_left_shift.Tensor, constant(emit, 1, shifts), shifts)
        found = emit(_aten.bitwise_and.Tensor, rows, weights)
        return emit(_aten.ne.Scalar, cast(emit, found, torch.float32) if is_fusing(emit) else found, 0)

    return _unpacked(emit, packed, 1, sizes, tests)


def _unpacked(
    emit: Emitter,
    packed: GraphValue,
    bits: int,
    sizes: Sequence[Any],
    fields_of: Callable[[GraphValue, GraphValue], GraphValue],
) -> GraphValue:
    """The fields of bytes, given what takes them from rows of bytes, and how far they have to be shifted."""
    fields = 8 // bits
    dim = packed_dimension(sizes, fields)
    inner = sizes_of(packed)
    at = 0 if dim is None else dim
    shifts = count_up(emit, fields, packed, torch.uint8, bits)
    shifts = emit(_aten.view.default, shifts, [fields] + [1] * (len(inner) - at))
    codes = fields_of(emit(_aten.unsqueeze.default, packed, at), shifts)
    if dim is None:
        flat = emit(_aten.view.default, codes, [fields * inner[0]])
        whole = emit(_aten.slice.Tensor, flat, 0, 0, product(sizes))
        return emit(_aten.view.default, whole, list(sizes))
    return emit(_aten.view.default, codes, list(sizes))


def packed_nbytes(sizes: Sequence[int], bits: int) -> int:
    """Bytes of what :func:`pack` returns for codes of these sizes."""
    return -(-int(product(sizes)) * bits // 8)


def _padded(emit: Emitter, codes: GraphValue, fields: int) -> GraphValue:
    """The codes in one dimension, with zeros behind them up to a multiple of ``fields``."""
    total = product(sizes_of(codes))
    flat = emit(_aten.view.default, codes, [total])
    missing = -total % fields
    return flat if is_multiple(total, fields) else emit(_aten.constant_pad_nd.default, flat, [0, missing], 0)


def in_groups(emit: Emitter, x: GraphValue, group_size: int, fill: float) -> GraphValue:
    """Neighbours in memory as rows [groups, group_size] of a contiguous value; ``fill`` completes the last row."""
    total = product(sizes_of(x))
    flat = emit(_aten.view.default, x, [total])
    if not is_multiple(total, group_size):
        flat = emit(_aten.constant_pad_nd.default, flat, [0, -total % group_size], fill)
    return emit(_aten.view.default, flat, [-(-total // group_size), group_size])


def out_of_groups(emit: Emitter, rows: GraphValue, sizes: Sequence[Any]) -> GraphValue:
    """Undoes :func:`in_groups`, given the sizes."""
    groups, group_size = sizes_of(rows)
    total = product(sizes)
    flat = emit(_aten.view.default, rows, [groups * group_size])
    if not is_multiple(total, group_size):
        flat = emit(_aten.slice.Tensor, flat, 0, 0, total)
    return emit(_aten.view.default, flat, list(sizes))

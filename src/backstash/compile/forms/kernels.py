"""Encodings by one call of a kernel each, in graphs on a CPU, where codecs would be many calls of aten operators.

A compiler writes code for every operator of an encoding, once for each value and once more for each code that shares a
byte. For rounding that takes longer than everything else in a graph, and on a CPU what it writes is an order of
magnitude slower than our kernels. The planes are those of rounding.py, bit for bit, so decodings may be calls of aten
operators, which a compiler fuses with what reads the value. Where a library reads it, which fuses with nothing, a
decoding is one call too: it stands in front of its reader and fills the memory that the reader wants.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from backstash.codecs.fewbit.table import TABLE
from backstash.codecs.minifloat.formats import FORMATS
from backstash.compile.forms.codecs import GraphCodec
from backstash.compile.forms.rounding import GraphBlockQuant, GraphFewBit, GraphMinifloat
from backstash.compile.graph.emit import Emitter, GraphValue, product, run_now, sizes_of, tensor_of
from backstash.compile.graph.layout import pack_along, packed_dimension
from backstash.compile.graph.reading import is_elementwise, is_view
from backstash.torch_internals import hide_from_dynamo

_LIBRARY = torch.library.Library("backstash_graph", "FRAGMENT")
_ops: Any = torch.ops.backstash_graph
_kernels: Any = torch.ops.backstash

# Whatever the order in memory that a compiler gives a value: what the elements' neighbours are is said by its sizes.
_TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)


def encode_by_kernel(emit: Emitter, codec: GraphCodec, x: GraphValue) -> tuple[GraphValue, ...] | None:
    """The planes that ``codec.encode(emit, x)`` returns, by a call of a kernel; None if there is none for it."""
    if tensor_of(x).device.type != "cpu" or is_for_backward_alone(x):
        return None
    if isinstance(codec, GraphBlockQuant):
        count = -(-product(sizes_of(x)) // codec.group_size)
        dim = packed_dimension([count, codec.group_size], 8 // codec.bits)
        settings = codec.bits, codec.group_size, codec.stochastic, codec.seed
        return _all(emit, emit(_ops.round_in_groups.default, x, *settings, dim), 3)
    if isinstance(codec, GraphFewBit):
        dim = packed_dimension(sizes_of(x), 8 // codec.width)
        bounds = list(TABLE[codec.function, codec.bits][0])
        return _all(emit, emit(_ops.find_intervals.default, x, bounds, codec.width, dim), 2)
    if isinstance(codec, GraphMinifloat) and FORMATS[codec.format].fields == 1:
        if codec.group_size:
            return _all(emit, emit(_ops.round_with_scales.default, x, codec.format, codec.group_size), 2)
        return (emit(_ops.round_to_format.default, x, codec.format),)
    return None


def decode_by_kernel(
    emit: Emitter, codec: GraphCodec, planes: Sequence[GraphValue], like: Tensor, channels_last: bool
) -> GraphValue | None:
    """What ``codec.decode(emit, planes, like)`` returns, by a call of a kernel; None if there is none for it.

    Args:
        emit: where the call goes.
        planes: what it has encoded.
        like: has the sizes and the dtype.
        channels_last: whether the result lies in memory in this order, and not by its sizes.
    """
    sizes = list(like.shape)
    if like.device.type != "cpu":
        return None
    if isinstance(codec, GraphBlockQuant):
        return emit(_ops.values_of_groups.default, *planes, codec.bits, sizes, channels_last)
    if isinstance(codec, GraphMinifloat) and codec.group_size and FORMATS[codec.format].fields == 1:
        settings = codec.format, codec.group_size, sizes, like.dtype, channels_last
        return emit(_ops.values_with_scales.default, *planes, *settings)
    return None


def is_for_backward_alone(x: GraphValue) -> bool:
    """Whether a compiler need not store a value of the forward graph: nothing of that graph but its results reads it.

    A kernel would have it stored. Of a cross entropy that are the probabilities, as large as anything in a step.
    """
    if not isinstance(x, fx.Node):
        return False
    while is_view(x) and isinstance(x.args[0], fx.Node):
        x = x.args[0]
    readers, waiting = set[fx.Node](), [x]
    while waiting:
        for user in waiting.pop().users:
            (waiting.append if is_view(user) else readers.add)(user)
    return is_elementwise(x) and all(user.op == "output" for user in readers)


def _all(emit: Emitter, results: GraphValue, count: int) -> tuple[GraphValue, ...]:
    return tuple(emit(operator.getitem, results, position) for position in range(count))


def _flat(x: Tensor) -> Tensor:
    return x.contiguous().view(-1)


def _fields(packed: Tensor, bits: int, count: int, padded: int) -> Tensor:
    """Codes from a stream of them, a byte each, with zeros behind them."""
    if bits == 8 and count == padded:
        return packed
    codes = torch.empty(padded, dtype=torch.uint8)
    codes[count:] = 0
    _kernels.narrow_decode(packed, bits, 0, codes[:count])
    return codes


def _round_in_groups(
    x: Tensor, bits: int, group_size: int, stochastic: bool, seed: int, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    is_turned = _is_channels_last(x)
    flat = x.permute(0, 2, 3, 1).view(-1) if is_turned else _flat(x)
    settings = bits, group_size, stochastic, seed, dim == 0
    codes, low, high = _kernels.blockquant_encode_rows(flat, *settings, *_image(list(x.shape), is_turned))
    count = low.numel()
    sizes = (count * bits // 8, group_size) if dim == 0 else (count, group_size * bits // 8)
    return codes.view(sizes), low, high


def _values_of_groups(
    codes: Tensor, low: Tensor, high: Tensor, bits: int, sizes: list[int], channels_last: bool
) -> Tensor:
    out = _values_like(codes, low, high, bits, sizes, channels_last)
    count = low.numel()
    if count == 0:
        return out
    group_size = codes.numel() * 8 // bits // count
    across = codes.shape[0] != count  # the codes of several groups share bytes, or those of one
    flat = out.permute(0, 2, 3, 1).view(-1) if channels_last else out.view(-1)
    settings = bits, group_size, across, *_image(sizes, channels_last)
    _kernels.blockquant_decode_rows(_flat(codes), _flat(low), _flat(high), *settings, flat)
    return out


def _values_with_scales(
    codes: Tensor,
    scales: Tensor,
    format: str,
    group_size: int,
    sizes: list[int],
    dtype: torch.dtype,
    channels_last: bool,
) -> Tensor:
    planes, out = (_flat(codes), _flat(scales)), _empty(sizes, dtype, codes.device, channels_last)
    if channels_last:
        flat = out.permute(0, 2, 3, 1).view(-1)
        _kernels.minifloat_images_decode(*planes, format, group_size, *_image(sizes, True), flat)
    else:
        _kernels.minifloat_scaled_decode(*planes, format, group_size, out.view(-1))
    return out


def _scaled_values_like(codes: Tensor, *settings: Any) -> Tensor:
    sizes, dtype, channels_last = settings[-3:]
    return _empty(sizes, dtype, codes.device, channels_last)


def _is_channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def _image(sizes: list[int], channels_last: bool) -> tuple[int, int]:
    """Channels and pixels of images in channels last; 0 and 0 for what is none."""
    return (sizes[1], sizes[2] * sizes[3]) if channels_last else (0, 0)


def _values_like(codes: Tensor, low: Tensor, high: Tensor, bits: int, sizes: list[int], channels_last: bool) -> Tensor:
    return _empty(sizes, low.dtype, low.device, channels_last)


def _empty(sizes: list[int], dtype: torch.dtype, device: torch.device, channels_last: bool) -> Tensor:
    order = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(sizes, dtype=dtype, device=device, memory_format=order)


def _find_intervals(x: Tensor, bounds: list[float], bits: int, dim: int | None) -> tuple[Tensor, Tensor]:
    stream, strange = _kernels.fewbit_encode(_flat(x), bounds, bits)
    packed: Tensor = pack_along(run_now, _fields(stream, bits, x.numel(), x.numel()).view(x.shape), bits, dim)
    return packed, (strange == 0).float().view([])


def _round_to_format(x: Tensor, format: str) -> Tensor:
    codes: Tensor = _kernels.minifloat_encode(_flat(x), format, False)
    return codes.view(x.shape)


def _round_with_scales(x: Tensor, format: str, group_size: int) -> tuple[Tensor, Tensor]:
    if _is_channels_last(x):
        flat, image = x.permute(0, 2, 3, 1).view(-1), _image(list(x.shape), True)
        codes, scales = _kernels.minifloat_images_encode(flat, format, group_size, *image)
    else:
        codes, scales = _kernels.minifloat_scaled_encode(_flat(x), format, group_size)
    return codes.view(x.shape), scales


def _groups_like(x: Tensor, bits: int, group_size: int, stochastic: bool, seed: int, dim: int) -> tuple[Tensor, ...]:
    count = -(-x.numel() // group_size)
    codes = x.new_empty([count, group_size], dtype=torch.uint8)
    return pack_along(run_now, codes, bits, dim), x.new_empty([count]), x.new_empty([count])


def _intervals_like(x: Tensor, bounds: list[float], bits: int, dim: int | None) -> tuple[Tensor, Tensor]:
    found: Tensor = pack_along(run_now, x.new_empty(list(x.shape), dtype=torch.uint8), bits, dim)
    return found, x.new_empty([], dtype=torch.float32)


def _codes_like(x: Tensor, format: str) -> Tensor:
    return x.new_empty(list(x.shape), dtype=FORMATS[format].dtype)


def _scaled_like(x: Tensor, format: str, group_size: int) -> tuple[Tensor, Tensor]:
    return _codes_like(x, format), x.new_empty([-(-x.numel() // group_size)], dtype=torch.float32)


_OPERATORS = (
    (
        "round_in_groups(Tensor x, int bits, int group_size, bool stochastic, int seed, int dim)"
        " -> (Tensor, Tensor, Tensor)",
        _round_in_groups,
        _groups_like,
    ),
    (
        "values_of_groups(Tensor codes, Tensor low, Tensor high, int bits, SymInt[] sizes, bool channels_last)"
        " -> Tensor",
        _values_of_groups,
        _values_like,
    ),
    (
        "values_with_scales(Tensor codes, Tensor scales, str format, int group_size, SymInt[] sizes, ScalarType dtype,"
        " bool channels_last) -> Tensor",
        _values_with_scales,
        _scaled_values_like,
    ),
    (
        "find_intervals(Tensor x, float[] bounds, int bits, int? dim) -> (Tensor, Tensor)",
        _find_intervals,
        _intervals_like,
    ),
    ("round_to_format(Tensor x, str format) -> Tensor", _round_to_format, _codes_like),
    ("round_with_scales(Tensor x, str format, int group_size) -> (Tensor, Tensor)", _round_with_scales, _scaled_like),
)

for _schema, _run, _like in _OPERATORS:
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema, tags=_TAGS)
    hide_from_dynamo(_run, and_all_below=True)
    _LIBRARY.impl(_name, _run, "CPU")
    torch.library.register_fake(f"backstash_graph::{_name}", _like, lib=_LIBRARY)

"""Schemas, fakes and argument checks of every kernel, as ``torch.library`` ops in the namespace ``backstash``.

All inputs and outputs are flat (1-D, contiguous): the codecs flatten in memory order. Layouts are defined by
``ops/reference``; every backend produces the same planes, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backstash.ops import sz
from backstash.ops.formats import FORMATS, groups

ZVC_CHUNK = 4096
"""Elements per ZVC chunk: every chunk has one entry in the offsets plane."""

CSR_ROW = 256
"""Elements per row of CSR: what a column of one byte tells apart."""

SZP_BLOCK = 32
"""Values per block of szp: every block has a width of its own, and a bit of all of them fills a word."""

LIBRARY = torch.library.Library("backstash", "DEF")

_WINDOW = "int inner, int[] input_size, int[] output_size, int[] kernel, int[] stride, int[] padding, int[] dilation"
_IMAGES = "int outer, int height, int width, int inner, int[] shifts"

SCHEMAS = {
    "bitmask_encode": "(Tensor x, int test, float lo, float hi) -> Tensor",
    "bitmask_decode": "(Tensor mask, Tensor(a!) out, float if_set, float if_clear) -> ()",
    "binary_encode": "(Tensor x, Tensor pair) -> (Tensor, Tensor)",
    "binary_decode": "(Tensor mask, Tensor pair, Tensor(a!) out) -> ()",
    "zvc_encode": "(Tensor x) -> (Tensor, Tensor, Tensor)",
    "zvc_decode": "(Tensor mask, Tensor offsets, Tensor values, Tensor(a!) out) -> ()",
    "rle_encode": "(Tensor x) -> (Tensor, Tensor, Tensor)",
    "rle_decode": "(Tensor tokens, Tensor starts, Tensor values, Tensor(a!) out) -> ()",
    "csr_encode": "(Tensor x) -> (Tensor, Tensor, Tensor)",
    "csr_decode": "(Tensor columns, Tensor rows, Tensor values, Tensor(a!) out) -> ()",
    "fewbit_encode": "(Tensor x, float[] thresholds, int bits) -> (Tensor, Tensor)",
    "fewbit_decode": "(Tensor packed, float[] values, int bits, Tensor(a!) out) -> ()",
    "minifloat_encode": "(Tensor x, str format, bool nonzero) -> Tensor",
    "minifloat_decode": "(Tensor codes, str format, Tensor(a!) out) -> ()",
    "minifloat_scaled_encode": "(Tensor x, str format, int group_size) -> (Tensor, Tensor)",
    "minifloat_scaled_decode": "(Tensor codes, Tensor scales, str format, int group_size, Tensor(a!) out) -> ()",
    "zvc_minifloat_encode": "(Tensor x, str format) -> (Tensor, Tensor, Tensor)",
    "zvc_minifloat_decode": "(Tensor mask, Tensor offsets, Tensor values, str format, Tensor(a!) out) -> ()",
    "szp_range": "(Tensor x) -> Tensor",
    "szp_encode": "(Tensor x, Tensor grid) -> (Tensor, Tensor, Tensor)",
    "szp_decode": "(Tensor mask, Tensor offsets, Tensor words, Tensor step, Tensor(a!) out) -> ()",
    "blockquant_encode": (
        "(Tensor x, int bits, int group_size, bool stochastic, int seed) -> (Tensor, Tensor, Tensor)"
    ),
    "blockquant_decode": "(Tensor codes, Tensor ranges, int bits, int group_size, Tensor(a!) out) -> ()",
    "dct_encode": f"(Tensor x, {_IMAGES}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "dct_decode": (f"(Tensor mask, Tensor offsets, Tensor values, Tensor scales, {_IMAGES}, Tensor(a!) out) -> ()"),
    "narrow_encode": "(Tensor x, int bits, int base) -> Tensor",
    "narrow_decode": "(Tensor packed, int bits, int base, Tensor(a!) out) -> ()",
    "sz_range": "(Tensor x) -> Tensor",
    "sz_survey": "(Tensor x, float step, float bound, int low, int[] blocks, float offset=0.) -> Tensor",
    "sz_encode": (
        "(Tensor x, Tensor table, float step, float bound, int base, int low, int axes, int[] blocks, float offset=0.)"
        " -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "sz_decode": (
        "(Tensor table, Tensor stream, Tensor index, Tensor places, Tensor values, float step, int base, int low, "
        "int axes, int[] blocks, Tensor(a!) out, float offset=0.) -> ()"
    ),
    "window_encode": f"(Tensor indices, {_WINDOW}) -> (Tensor, Tensor)",
    "window_decode": f"(Tensor packed, {_WINDOW}, Tensor(a!) out) -> ()",
}

for _name, _schema in SCHEMAS.items():
    LIBRARY.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))


def bytes_for(numel: int, bits: int) -> int:
    """Bytes of ``numel`` fields of ``bits`` bits each, packed without gaps."""
    return (numel * bits + 7) // 8


def window_bits(kernel: list[int] | tuple[int, ...]) -> int:
    """Bits that tell the positions of a pooling window apart: 2 for 2x2, 4 for 3x3."""
    positions = 1
    for size in kernel:
        positions *= size
    return max(1, (positions - 1).bit_length())


def zvc_chunks(numel: int) -> int:
    """Number of ZVC chunks that ``numel`` elements make."""
    return (numel + ZVC_CHUNK - 1) // ZVC_CHUNK


def csr_rows(numel: int) -> int:
    """Number of CSR rows that ``numel`` elements make."""
    return (numel + CSR_ROW - 1) // CSR_ROW


def check_flat(name: str, x: Tensor) -> None:
    """Raise unless ``x`` is 1-D and contiguous, which is all that the kernels read."""
    if x.dim() != 1 or not x.is_contiguous():
        raise ValueError(
            f"backstash::{name} asked for a flat contiguous tensor, got shape {list(x.shape)} with strides "
            f"{list(x.stride())}. Flatten it in memory order first (see codecs.base.flat)."
        )


def _bitmask_encode(x: Tensor, test: int, lo: float, hi: float) -> Tensor:
    return x.new_empty(bytes_for(x.numel(), 1), dtype=torch.uint8)


def _binary_encode(x: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(bytes_for(x.numel(), 1), dtype=torch.uint8), x.new_empty(1, dtype=torch.int64)


def _zvc_encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    nonzeros = torch.library.get_ctx().new_dynamic_size()
    return (
        x.new_empty(bytes_for(x.numel(), 1), dtype=torch.uint8),
        x.new_empty(zvc_chunks(x.numel()), dtype=torch.int64),
        x.new_empty(nonzeros),
    )


def _rle_encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tokens, nonzeros = torch.library.get_ctx().new_dynamic_size(), torch.library.get_ctx().new_dynamic_size()
    return (
        x.new_empty(tokens, dtype=torch.uint8),
        x.new_empty(2 * zvc_chunks(x.numel()), dtype=torch.int64),
        x.new_empty(nonzeros),
    )


def _csr_encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    nonzeros = torch.library.get_ctx().new_dynamic_size()
    return (
        x.new_empty(nonzeros, dtype=torch.uint8),
        x.new_empty(csr_rows(x.numel()) + 1, dtype=torch.int32),
        x.new_empty(nonzeros),
    )


def _fewbit_encode(x: Tensor, thresholds: list[float], bits: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(bytes_for(x.numel(), bits), dtype=torch.uint8), x.new_empty(1, dtype=torch.int64)


def _minifloat_encode(x: Tensor, format: str, nonzero: bool) -> Tensor:
    form = FORMATS[format]
    return x.new_empty(form.words(x.numel()), dtype=form.dtype)


def _minifloat_scaled_encode(x: Tensor, format: str, group_size: int) -> tuple[Tensor, Tensor]:
    form = FORMATS[format]
    scales = x.new_empty(groups(x.numel(), group_size), dtype=torch.float32)
    return x.new_empty(form.words(x.numel()), dtype=form.dtype), scales


def _zvc_minifloat_encode(x: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor]:
    words = torch.library.get_ctx().new_dynamic_size()
    return (
        x.new_empty(bytes_for(x.numel(), 1), dtype=torch.uint8),
        x.new_empty(zvc_chunks(x.numel()), dtype=torch.int64),
        x.new_empty(words, dtype=FORMATS[format].dtype),
    )


def _szp_range(x: Tensor) -> Tensor:
    return x.new_empty(2, dtype=torch.float32)


def _szp_encode(x: Tensor, grid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    words = torch.library.get_ctx().new_dynamic_size()
    return (
        x.new_empty(bytes_for(x.numel(), 1), dtype=torch.uint8),
        x.new_empty(zvc_chunks(x.numel()), dtype=torch.int64),
        x.new_empty(words, dtype=torch.int32),
    )


def _blockquant_encode(
    x: Tensor, bits: int, group_size: int, stochastic: bool, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(bytes_for(x.numel(), bits), dtype=torch.uint8),
        x.new_empty(2 * groups(x.numel(), group_size)),
        x.new_empty(1, dtype=torch.int64),
    )


def _dct_encode(
    x: Tensor, outer: int, height: int, width: int, inner: int, shifts: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    blocks = outer * inner * -(-height // 8) * -(-width // 8)
    nonzeros = torch.library.get_ctx().new_dynamic_size()
    return (
        x.new_empty(8 * blocks, dtype=torch.uint8),
        x.new_empty(-(-blocks // 64), dtype=torch.int64),
        x.new_empty(nonzeros, dtype=torch.uint8),
        x.new_empty(outer * inner, dtype=torch.float32),
        x.new_empty(1, dtype=torch.int64),
    )


def _narrow_encode(x: Tensor, bits: int, base: int) -> Tensor:
    return x.new_empty(bytes_for(x.numel(), bits), dtype=torch.uint8)


def _sz_range(x: Tensor) -> Tensor:
    return x.new_empty(2, dtype=torch.float64)


def _sz_survey(x: Tensor, step: float, bound: float, low: int, blocks: list[int], offset: float = 0.0) -> Tensor:
    return x.new_empty(len(sz.AXES) * sz.BINS, dtype=torch.int64)


def _sz_encode(
    x: Tensor,
    table: Tensor,
    step: float,
    bound: float,
    base: int,
    low: int,
    axes: int,
    blocks: list[int],
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    words, places, values = (torch.library.get_ctx().new_dynamic_size() for _ in range(3))
    return (
        x.new_empty(words, dtype=torch.int16),
        x.new_empty(1 + 4 * sz.chunks(x.numel(), blocks[3]), dtype=torch.int64),
        x.new_empty(places, dtype=torch.int16),
        x.new_empty(values),
    )


def _window_encode(
    indices: Tensor,
    inner: int,
    input_size: list[int],
    output_size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> tuple[Tensor, Tensor]:
    packed = indices.new_empty(bytes_for(indices.numel(), window_bits(kernel)), dtype=torch.uint8)
    return packed, indices.new_empty(1, dtype=torch.int64)


def _nothing(*args: object) -> None:
    return None


FAKES: dict[str, Callable[..., Any]] = {
    "bitmask_encode": _bitmask_encode,
    "binary_encode": _binary_encode,
    "zvc_encode": _zvc_encode,
    "rle_encode": _rle_encode,
    "csr_encode": _csr_encode,
    "fewbit_encode": _fewbit_encode,
    "minifloat_encode": _minifloat_encode,
    "minifloat_scaled_encode": _minifloat_scaled_encode,
    "zvc_minifloat_encode": _zvc_minifloat_encode,
    "szp_range": _szp_range,
    "szp_encode": _szp_encode,
    "blockquant_encode": _blockquant_encode,
    "dct_encode": _dct_encode,
    "narrow_encode": _narrow_encode,
    "sz_range": _sz_range,
    "sz_survey": _sz_survey,
    "sz_encode": _sz_encode,
    "window_encode": _window_encode,
    "bitmask_decode": _nothing,
    "binary_decode": _nothing,
    "zvc_decode": _nothing,
    "rle_decode": _nothing,
    "csr_decode": _nothing,
    "fewbit_decode": _nothing,
    "minifloat_decode": _nothing,
    "minifloat_scaled_decode": _nothing,
    "zvc_minifloat_decode": _nothing,
    "szp_decode": _nothing,
    "blockquant_decode": _nothing,
    "dct_decode": _nothing,
    "narrow_decode": _nothing,
    "sz_decode": _nothing,
    "window_decode": _nothing,
}

for _name, _fake in FAKES.items():
    torch.library.register_fake(f"backstash::{_name}", _fake, lib=LIBRARY)

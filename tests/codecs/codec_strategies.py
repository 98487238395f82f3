"""Tensors for the codec tests: dtypes, shapes, layouts and contents, drawn by hypothesis."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from backstash.saved import PoolWindow

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
OTHERS = (torch.complex64, torch.float8_e4m3fn, torch.uint16)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

LONG = [(4095,), (4096,), (4097,), (3, 2741), (2, 64, 9, 9)]  # around a chunk, and over it
SEEDS = st.integers(0, 2**32)

SHAPES = st.one_of(
    st.lists(st.integers(1, 5), max_size=5).map(tuple),
    st.integers(0, 300).map(lambda n: (n,)),
    st.sampled_from([(0, 3), (2, 0, 4), (1, 1), *LONG]),
)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, strides and storage offset of a dense tensor: dimensions in any order in memory."""
    shape = draw(SHAPES)
    channels_last = [0, *range(2, len(shape)), 1] if len(shape) >= 3 else list(range(len(shape)))
    order = draw(
        st.one_of(st.just(list(range(len(shape)))), st.just(channels_last), st.permutations(range(len(shape))))
    )
    stride, step = [0] * len(shape), 1
    for dim in reversed(order):
        stride[dim] = step
        step *= max(1, shape[dim])
    return shape, tuple(stride), draw(st.integers(0, 3))


def arranged(flat: Tensor, layout: tuple[tuple[int, ...], tuple[int, ...], int]) -> Tensor:
    shape, stride, offset = layout
    return flat.as_strided(shape, stride, offset)


def needed(layout: tuple[tuple[int, ...], tuple[int, ...], int]) -> int:
    return math.prod(layout[0]) + layout[2]


@st.composite
def floats(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = FLOATS) -> Tensor:
    """Normal numbers and zeros, with any bit pattern in a few places."""
    dtype, layout = draw(st.sampled_from(dtypes)), draw(layouts())
    n = needed(layout)
    generator = torch.Generator().manual_seed(draw(SEEDS))
    density = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    flat = torch.randn(n, generator=generator) * (torch.rand(n, generator=generator) < density)
    flat = flat.to(dtype)
    bits = flat.view(BITS[dtype.itemsize])
    info = torch.iinfo(bits.dtype)
    special = torch.tensor([0.0, -0.0, 1.0, math.inf, -math.inf, math.nan], dtype=dtype).view(bits.dtype).tolist()
    patterns = st.one_of(st.sampled_from(special), st.integers(info.min, info.max))
    if n:
        for where, pattern in draw(st.lists(st.tuples(st.integers(0, n - 1), patterns), max_size=12)):
            bits[where] = pattern
    return arranged(flat, layout)


@st.composite
def two_values(draw: st.DrawFn) -> Tensor:
    """At most two bit patterns, any."""
    dtype, layout = draw(st.sampled_from(FLOATS)), draw(layouts())
    generator = torch.Generator().manual_seed(draw(SEEDS))
    bits_dtype = BITS[dtype.itemsize]
    info = torch.iinfo(bits_dtype)
    pair = torch.tensor(draw(st.tuples(*[st.integers(info.min, info.max)] * 2)), dtype=bits_dtype)
    flat = pair[torch.randint(0, 2, (needed(layout),), generator=generator)].view(dtype)
    return arranged(flat, layout)


@st.composite
def integers(draw: st.DrawFn) -> Tensor:
    """A few levels, which may be the extremes; or a range."""
    dtype, layout = draw(st.sampled_from((*INTEGERS, torch.bool))), draw(layouts())
    n = needed(layout)
    generator = torch.Generator().manual_seed(draw(SEEDS))
    if dtype == torch.bool:
        return arranged(torch.randint(0, 2, (n,), generator=generator).bool(), layout)
    info = torch.iinfo(dtype)
    bounds = st.one_of(st.integers(info.min, info.max), st.sampled_from([info.min, info.max, 0]))
    levels = torch.tensor(draw(st.lists(bounds, min_size=1, max_size=6)), dtype=dtype)
    if draw(st.booleans()):
        width = draw(st.integers(1, 100))
        low = draw(st.integers(info.min, info.max - width))
        levels = torch.arange(low, low + width).to(dtype)
    return arranged(levels[torch.randint(0, len(levels), (n,), generator=generator)], layout)


def inside(window: PoolWindow, indices: Tensor) -> bool:
    """Whether every index is a position of its window. torch's are not where all of a window is padding or -inf."""
    dims, found = len(window.kernel), indices.numpy()
    if ((found < 0) | (found >= math.prod(window.input_size))).any():
        return False
    coordinates = np.unravel_index(found, window.input_size)
    for dim, at in enumerate(coordinates):
        shape = [1] * found.ndim
        shape[found.ndim - dims + dim] = -1
        origins = np.arange(indices.shape[-dims + dim]) * window.stride[dim] - window.padding[dim]
        offset, remainder = np.divmod(at - origins.reshape(shape), window.dilation[dim])
        if remainder.any() or (offset < 0).any() or (offset >= window.kernel[dim]).any():
            return False
    return True


@st.composite
def pooled(draw: st.DrawFn) -> tuple[PoolWindow, Tensor]:
    """Indices that torch's max pooling returned, and the window that it was asked for."""
    dims = draw(st.integers(1, 3))
    each = [draw(st.integers(1, 3)) for _ in range(dims)]
    kernel = tuple(each)
    stride = tuple(draw(st.integers(1, 4)) for _ in range(dims))
    padding = tuple(draw(st.integers(0, size // 2)) for size in kernel)
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(dims))
    spans = [(size - 1) * step + 1 for size, step in zip(kernel, dilation, strict=True)]
    sizes = tuple(draw(st.integers(max(1, span - 2 * pad), 9)) for span, pad in zip(spans, padding, strict=True))
    ceil_mode = draw(st.booleans())
    outer = draw(st.sampled_from([(1, 1), (2, 3), (1, 4), (3, 1), (3,), (1,)]))
    x = torch.randn(*outer, *sizes, generator=torch.Generator().manual_seed(draw(SEEDS)))
    special = draw(st.sampled_from([None, math.nan, -math.inf, 0.0]))
    if special is not None:
        x = torch.where(x < draw(st.sampled_from([0.0, 9.0])), special, x)
    if dims > 1 and len(outer) == 2 and draw(st.booleans()):
        x = x.to(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[dims - 1]
    try:
        _, indices = pool(x, kernel, stride, padding, dilation, ceil_mode, return_indices=True)
    except RuntimeError:  # an empty output
        assume(False)
    return PoolWindow(sizes, kernel, stride, padding, dilation), indices

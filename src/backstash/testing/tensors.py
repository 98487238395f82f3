"""The built-in tensors of ``check_codec``: dtypes, layouts and contents at which codecs go wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from backstash.ops.bits import bits_of
from backstash.testing.layouts import span

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

_LAYOUTS: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...] = (  # shape, strides, storage offset
    ((), (), 0),
    ((1,), (1,), 0),
    ((0, 3), (3, 1), 0),
    ((37,), (1,), 3),
    ((7, 13), (1, 7), 0),
    ((2, 3, 5, 7), (105, 35, 7, 1), 0),
    ((2, 3, 5, 7), (105, 1, 21, 3), 0),
    ((8205,), (1,), 1),
    ((5, 4), (8, 2), 0),  # with gaps
    ((4, 3), (0, 1), 0),  # expanded
)


def probes(device: torch.device | str = "cpu") -> Iterator[Tensor]:
    """Yields the built-in tensors of :func:`backstash.testing.check_codec`.

    There is every dtype in several layouts: 0-d, one element, empty, with a storage offset, transposed, channels_last,
    longer than a chunk, with gaps, expanded. Floats hold signed zeros, subnormals, infinities and NaN payloads; or no
    zero; or zeros only; or two values; those of float32 also what bfloat16 numbers become. Integers hold a narrow
    range; or one value; or the extremes.

    Args:
        device: where the tensors are.
    """
    generator = torch.Generator().manual_seed(0)
    for shape, stride, offset in _LAYOUTS:
        n = offset + span(shape, stride)
        for dtype in FLOATS:
            for values in _floats(dtype, n, generator):
                yield values.to(device).as_strided(shape, stride, offset)
        for values in _floats(torch.bfloat16, n, generator):
            yield (bits_of(values).int() << 16).view(torch.float32).to(device).as_strided(shape, stride, offset)
        for dtype in INTEGERS:
            for values in _integers(dtype, n, generator):
                yield values.to(device).as_strided(shape, stride, offset)
        yield torch.randint(0, 2, (n,), generator=generator).bool().to(device).as_strided(shape, stride, offset)
    yield torch.randn(6, dtype=torch.complex64, generator=generator).to(device)
    yield torch.tensor([0.0, 1.0, 0.0, -2.0] * 4, device=device, requires_grad=True)


def special_floats(dtype: torch.dtype) -> Tensor:
    """Signed zeros, subnormals, infinities, NaNs with payloads, and the neighbours of 1."""
    info = torch.finfo(dtype)
    numbers = [-0.0, 1.0, -1.0, 6.0, math.inf, -math.inf, math.nan, info.tiny, -info.tiny, info.max, info.min]
    values = torch.tensor(numbers, dtype=dtype)
    bits = bits_of(values)
    one, nan, ones = torch.ones(1, dtype=bits.dtype), bits[6:7], bits[1:3]
    extra = [one, one | bits[:1], nan ^ one, nan ^ 5, ones + one, ones - one]
    return torch.cat([bits, *extra]).view(dtype)


def _floats(dtype: torch.dtype, n: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yields four tensors [n]: half zeros among all special values; no zero; zeros only; two values."""
    special = special_floats(dtype)
    normal = torch.randn(n, generator=generator).to(dtype)
    picked = special[torch.randint(len(special), (n,), generator=generator)]
    mixed = torch.where(torch.rand(n, generator=generator) < 0.5, picked, normal)
    coins = torch.rand(n, generator=generator) < 0.5
    yield torch.where(coins, torch.zeros(n, dtype=dtype), mixed)
    yield torch.where(normal == 0, torch.ones(n, dtype=dtype), normal)
    yield torch.zeros(n, dtype=dtype)
    yield torch.where(coins, torch.tensor(1.25, dtype=dtype), torch.tensor(-0.0, dtype=dtype))


def _integers(dtype: torch.dtype, n: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yields three tensors [n]: a narrow range; one value; the extremes among others."""
    info = torch.iinfo(dtype)
    narrow = torch.randint(0, 11, (n,), generator=generator)
    yield (narrow + 70).to(dtype)
    yield torch.full((n,), 42, dtype=dtype)
    edges = torch.tensor([info.min, info.max, 0, 1], dtype=dtype)
    yield edges[narrow % 4]

"""Contents, outputs between canaries, and instruction sets, for the tests of the C++ kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from hypothesis import HealthCheck, settings
from torch import Tensor

from backstash.ops.backends import kernels
from backstash.ops.cpu import library
from backstash.ops.layout import ZVC_CHUNK

reference = kernels("reference")
cpu = kernels("native") if library.available() else reference

native_test = pytest.mark.skipif(
    not library.available(), reason="the native kernels are not built: run 'python setup.py build_native'"
)
"""Decorates a test of the C++ kernels."""

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SMALL_FLOATS = FLOATS[:3]
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
TAILS = range(131)
AROUND_CHUNKS = [k * ZVC_CHUNK + d for k in (1, 2, 3) for d in (-65, -64, -63, -1, 0, 1, 63, 64, 65)]
PADDING = 64
"""Elements on each side of an output that a kernel must not touch."""

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

# Infinity, NaN (quiet, signalling, with a payload), the largest number, subnormals, 1.0.
SPECIALS = {
    torch.float16: [0x7C00, 0x7E00, 0x7D23, 0x7BFF, 0x0001, 0x03FF, 0x0400, 0x3C00],
    torch.bfloat16: [0x7F80, 0x7FC0, 0x7F91, 0x7F7F, 0x0001, 0x007F, 0x0080, 0x3F80],
    torch.float32: [0x7F800000, 0x7FC00000, 0x7F812345, 0x7F7FFFFF, 0x1, 0x7FFFFF, 0x800000, 0x3F800000],
    torch.float64: [0x7FF << 52, 0xFFF << 51, (0x7FF << 52) + 99, (0x7FF << 52) - 1, 1, 1 << 51, 1 << 52, 0x3FF << 52],
}

BEST_FIRST = sorted(library.ISAS, key=lambda name: name != library.isa()) if library.available() else library.ISAS


def isas_and(*axes: Iterable[Any]) -> list[ParameterSet]:
    """Returns :func:`isas_and_each` of all combinations of values."""
    return isas_and_each(product(*axes))


def isas_and_each(combinations: Iterable[Sequence[Any]]) -> list[ParameterSet]:
    """Returns every combination of values on the best instruction set, and the first one on the other sets.

    For ``parametrize(("isa", ...), isas_and_each(...), indirect=["isa"])``. Nothing tests the other combinations: a
    kernel is compiled from one source for all instruction sets.
    """
    combinations = list(combinations)
    best, *others = BEST_FIRST
    return [
        *(pytest.param(best, *combination) for combination in combinations),
        *(pytest.param(isa, *combinations[0]) for isa in others),
    ]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def contents(n: int, dtype: torch.dtype, density: float = 0.5, seed: int = 0, offset: int = 0) -> Tensor:
    """Zeros, and with probability ``density`` something else: -0.0, NaN payloads, inf, subnormals, arbitrary bits."""
    g = generator(seed)
    total = n + offset
    width = dtype.itemsize
    bits = torch.randint(-(1 << 62), 1 << 62, (total,), generator=g)
    signs = (torch.randint(2, (total,), generator=g)) << (8 * width - 1)
    specials = torch.tensor(SPECIALS[dtype])[torch.randint(8, (total,), generator=g)] | signs
    kind = torch.randint(4, (total,), generator=g)
    values = torch.where(kind == 0, specials, torch.where(kind == 1, signs, bits))
    values = torch.where(torch.rand(total, generator=g) < density, values, 0)
    small = (values << (64 - 8 * width) >> (64 - 8 * width)).to(SIGNED[width])
    return small.view(dtype)[offset:]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def poisoned(n: int, dtype: torch.dtype, offset: int = 0) -> tuple[Tensor, Callable[[], bool]]:
    """An output full of garbage, ``offset`` elements off alignment, and a check that nothing around it was written."""
    around = torch.full(((2 * PADDING + n + offset) * dtype.itemsize,), 0xA5, dtype=torch.uint8)
    start = (PADDING + offset) * dtype.itemsize
    out = around[start : start + n * dtype.itemsize].view(dtype)

    def untouched() -> bool:
        edges = torch.cat([around[:start], around[start + n * dtype.itemsize :]])
        return bool((edges == 0xA5).all())

    return out, untouched


def flip(plane: Tensor, index: int, bit: int = 0) -> Tensor:
    damaged = plane.clone()
    damaged[index] ^= 1 << bit
    return damaged

"""Counts of a sample: equal numbers from the reference, C++ and Triton."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from native_checks import FLOATS, cpu, generator, native_test, reference
from triton_checks import launchers, on_device, specials, triton_test


def examples(n: int, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of this family's kernels for ``n`` elements."""
    arguments = (torch.arange(n) % 3).to(dtype), 1, n, 1
    return {"sample_counts": arguments, "sample_numbers": arguments}


@native_test
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("patterns", [1, 2, 3, 9])
def test_sample_counts(dtype: torch.dtype, patterns: int) -> None:
    values = torch.arange(patterns).to(dtype)
    x = values[torch.randint(patterns, (10_000,), generator=generator())]
    x[:patterns] = values
    for start, layout in itertools.product(range(4), [(1, 9990, 1), (32, 32, 300), (2, 1, 4)]):
        assert cpu.sample_counts(x[start:], *layout) == reference.sample_counts(x[start:], *layout)
    assert cpu.sample_counts(x, 1, 10_000, 1)[1] == min(patterns, 3)


@triton_test
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
def test_sample_numbers_on_triton(dtype: torch.dtype) -> None:
    values = specials(dtype) if dtype.is_floating_point else torch.tensor([0, 1, -7, 9]).to(dtype)
    for many, layout in itertools.product([1, 2, len(values)], [(1, 1, 1), (1, 4096, 1), (32, 32, 130), (1, 37, 1)]):
        x = values[torch.randint(many, (5000,))]
        got = launchers.sample_numbers(on_device(x), *layout)
        assert got.tolist() == reference.sample_numbers(x, *layout).tolist(), (many, layout)
    assert launchers.sample_numbers(on_device(x)[:0], 1, 0, 1).tolist() == [0] * 4

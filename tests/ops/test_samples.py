"""Counts of a sample: equal numbers from the reference and C++."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from native_checks import FLOATS, cpu, generator, native_test, reference


def examples(n: int, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of this family's kernels for ``n`` elements."""
    return {"sample_counts": ((torch.arange(n) % 3).to(dtype), 1, n, 1)}


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

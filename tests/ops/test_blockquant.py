"""Integers between a group's extremes: equal bytes from the reference, C++ and Triton."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from native_checks import (
    FLOATS,
    SMALL_FLOATS,
    TAILS,
    contents,
    cpu,
    generator,
    isas_and,
    native_test,
    poisoned,
    reference,
    same,
)
from thinning import star
from triton_checks import SHORT_TAILS, bits, expected, filled, half_zeros, launchers, on_device, triton_test


def examples(n: int, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of this family's kernels for ``n`` elements."""
    x = (torch.arange(n) % 3).to(dtype)
    planes = reference.blockquant_encode(x, 2, 16, True, 0)[:2]
    return {"blockquant_encode": (x, 2, 16, True, 0), "blockquant_decode": (*planes, 2, 16, torch.empty_like(x))}


@native_test
@pytest.mark.parametrize(("isa", "bits", "dtype"), isas_and([2, 1, 4, 8], SMALL_FLOATS), indirect=["isa"])
def test_blockquant(bits: int, dtype: torch.dtype, isa: str) -> None:
    for n, group_size in itertools.product((*TAILS[:40], 255, 257, 4097, 70_000), (16, 256, 4096)):
        stochastic = n % 2 == 0
        for x in (torch.randn(n, generator=generator(n)) * 10, torch.rand(n, generator=generator(n)) * 2**-130):
            planes = cpu.blockquant_encode(x.to(dtype), bits, group_size, stochastic, 7)
            wanted = reference.blockquant_encode(x.to(dtype), bits, group_size, stochastic, 7)
            assert all(same(plane, want) for plane, want in zip(planes, wanted, strict=True)), (n, group_size)
            assert int(planes[2]) == 0
            out, untouched = poisoned(n, dtype, n % 3)
            again = torch.empty(n, dtype=dtype)
            cpu.blockquant_decode(*wanted[:2], bits, group_size, out)
            reference.blockquant_decode(*wanted[:2], bits, group_size, again)
            assert same(out, again) and untouched(), (n, group_size)
        any_bits = contents(n, dtype, 0.7, n)
        refused = cpu.blockquant_encode(any_bits, bits, group_size, stochastic, 0)[2]
        assert same(refused, reference.blockquant_encode(any_bits, bits, group_size, stochastic, 0)[2])


@native_test
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_blockquant_large(threads: int, isa: str) -> None:
    """Many blocks, and an output large enough for streaming stores, with and without the alignment for them."""
    x = torch.randn(7 << 20, generator=generator())[: (7 << 20) - 3]
    codes, ranges, _ = cpu.blockquant_encode(x, 4, 256, False, 0)
    start = 3 << 16
    assert same(cpu.blockquant_encode(x[start:], 4, 256, False, 0)[0], codes[start // 2 :])
    want = torch.empty_like(x)
    cpu.blockquant_decode(codes, ranges, 4, 256, want)
    for offset in (0, 1):
        out = torch.full((x.numel() + offset + 64,), 3.0)
        cpu.blockquant_decode(codes, ranges, 4, 256, out[offset : x.numel() + offset])
        assert same(out[offset : x.numel() + offset], want)
        assert (out[x.numel() + offset :] == 3).all() and (out[:offset] == 3).all()


GROUPS = (16, 256, 4096)


@triton_test
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy, of infinities, in the interpreter
@pytest.mark.parametrize(("dtype", "width"), star(FLOATS[:3], [1, 2, 4, 8]), ids=str)
def test_blockquant_on_triton(dtype: torch.dtype, width: int) -> None:
    tails = zip(SHORT_TAILS, itertools.cycle(GROUPS), strict=False)  # within a group, whatever its size
    for n, size in (*tails, *itertools.product((255, 257), GROUPS), (256, 16), (256, 256), (4097, 256), (4097, 4096)):
        options = width, size, n % 2 == 0, 2**32 - 1 - n
        refused = launchers.blockquant_encode(on_device(half_zeros(dtype, n)), *options)[2]
        assert refused.dtype == torch.int64
        for x in ((torch.randn(n) * 10).to(dtype), (torch.randn(n) * 2.0**-20).to(dtype)):
            planes, wanted = (
                launchers.blockquant_encode(on_device(x), *options),
                reference.blockquant_encode(x, *options),
            )
            for name, got, want in zip(("codes", "ranges", "refused"), planes, wanted, strict=True):
                assert got.dtype == want.dtype, name
                assert torch.equal(bits(got), bits(want)), (name, n, size)
            got = filled(n, dtype, launchers.blockquant_decode, *wanted[:2], width, size)
            want = expected(n, dtype, reference.blockquant_decode, *wanted[:2], width, size)
            assert torch.equal(bits(got), bits(want)), (n, size)
    x = torch.zeros(1000, dtype=dtype)
    x[[3, 700]] = torch.tensor([math.inf, math.nan], dtype=dtype)
    assert int(launchers.blockquant_encode(on_device(x), width, 16, True, 0)[2]) == 2
    extreme = torch.tensor([-1.0, 1.0]) * torch.finfo(dtype).max
    refused = launchers.blockquant_encode(on_device(extreme.to(dtype)), width, 16, True, 0)[2]
    assert int(refused) == (dtype != torch.float16)

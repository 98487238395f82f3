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

from backstash.errors import DamagedPlanesError


def examples(n: int, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of this family's kernels for ``n`` elements."""
    x = (torch.arange(n) % 3).to(dtype)
    planes = reference.blockquant_encode(x, 2, 16, True, 0)[:2]
    rows = reference.blockquant_encode_rows(x, 2, 16, True, 0, False, 0, 0)
    return {
        "blockquant_encode": (x, 2, 16, True, 0),
        "blockquant_decode": (*planes, 2, 16, torch.empty_like(x)),
        "blockquant_encode_rows": (x, 2, 16, True, 0, False, 0, 0),
        "blockquant_decode_rows": (*rows, 2, 16, False, 0, 0, torch.empty_like(x)),
    }


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


ROWS = ("codes", "low", "high")


@native_test
@pytest.mark.parametrize(("isa", "bits", "dtype"), isas_and([2, 1, 4, 8], SMALL_FLOATS), indirect=["isa"])
def test_rows(bits: int, dtype: torch.dtype, isa: str) -> None:
    """Equal planes and values, with fields along the groups and along each group, in order and as images."""
    fields = 8 // bits
    for n, group_size, across in itertools.product((*TAILS[:24], 255, 4097, 70_000), (16, 256, 4096), (False, True)):
        if across and -(-n // group_size) % fields:
            continue
        settings = bits, group_size, n % 2 == 0, 7, across, 0, 0
        for x in (torch.randn(n, generator=generator(n)) * 10, torch.rand(n, generator=generator(n)) * 2**-130):
            planes = cpu.blockquant_encode_rows(x.to(dtype), *settings)
            wanted = reference.blockquant_encode_rows(x.to(dtype), *settings)
            for name, plane, want in zip(ROWS, planes, wanted, strict=True):
                assert same(plane, want), (name, n, group_size, across)
            out, untouched = poisoned(n, dtype, n % 3)
            cpu.blockquant_decode_rows(*wanted, bits, group_size, across, 0, 0, out)
            again = torch.empty(n, dtype=dtype)
            reference.blockquant_decode_rows(*wanted, bits, group_size, across, 0, 0, again)
            assert same(out, again) and untouched(), (n, group_size, across)
        strange = contents(n, dtype, 0.7, n)
        wanted = reference.blockquant_encode_rows(strange, *settings)
        for plane, want in zip(cpu.blockquant_encode_rows(strange, *settings), wanted, strict=True):
            assert same(plane, want), (n, group_size, across)


@native_test
@pytest.mark.parametrize(("isa", "dtype"), isas_and(SMALL_FLOATS), indirect=["isa"])
@pytest.mark.parametrize("shape", [(3, 1, 5, 7), (2, 33, 9, 8), (1, 64, 16, 16), (4, 40, 12, 4), (2, 8, 64, 65)])
def test_rows_become_images_in_channels_last(shape: tuple[int, int, int, int], dtype: torch.dtype, isa: str) -> None:
    x = torch.randn(shape, generator=generator(1)).to(dtype)
    channels, area = shape[1], shape[2] * shape[3]
    for across in (False, True):
        if across and -(-x.numel() // 16) % 2:
            continue
        planes = reference.blockquant_encode_rows(x.flatten(), 4, 16, False, 0, across, 0, 0)
        in_order, out = torch.empty_like(x).flatten(), torch.empty_like(x).flatten()
        reference.blockquant_decode_rows(*planes, 4, 16, across, 0, 0, in_order)
        reference.blockquant_decode_rows(*planes, 4, 16, across, channels, area, out)
        assert same(out.view(shape[0], area, channels).transpose(1, 2).reshape(-1), in_order)
        native, untouched = poisoned(x.numel(), dtype, 1)
        cpu.blockquant_decode_rows(*planes, 4, 16, across, channels, area, native)
        assert same(native, out) and untouched()
        encode = reference.blockquant_encode_rows, cpu.blockquant_encode_rows
        for stochastic, function in itertools.product((False, True), encode):
            wanted = encode[0](in_order, 4, 16, stochastic, 5, across, 0, 0)
            for plane, want in zip(function(out, 4, 16, stochastic, 5, across, channels, area), wanted, strict=True):
                assert same(plane, want)


@native_test
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_large_rows(threads: int, isa: str) -> None:
    """Many blocks: what two threads write and read is what one does."""
    x = torch.randn(8, 96, 57, 61, generator=generator())
    flat = x.flatten()
    for across in (False, True):
        flat = flat[: 2 * 4096 * (flat.numel() // (2 * 4096))] if across else flat
        planes = cpu.blockquant_encode_rows(flat, 4, 4096, False, 0, across, 0, 0)
        for plane, want in zip(
            planes, reference.blockquant_encode_rows(flat, 4, 4096, False, 0, across, 0, 0), strict=True
        ):
            assert same(plane, want)
        out, want = torch.empty_like(flat), torch.empty_like(flat)
        for image in ((0, 0), (96, 57 * 61) if flat.numel() == x.numel() else (32, 128)):
            cpu.blockquant_decode_rows(*planes, 4, 4096, across, *image, out)
            reference.blockquant_decode_rows(*planes, 4, 4096, across, *image, want)
            assert same(out, want)


@pytest.mark.parametrize("function", [reference.blockquant_encode_rows, cpu.blockquant_encode_rows])
def test_what_is_not_finite_makes_its_group_nan_and_no_other(function: Any) -> None:
    x = torch.randn(64, generator=generator())
    x[20], x[40:42] = math.inf, torch.tensor([3e38, -3e38])
    codes, low, high = function(x, 4, 16, False, 0, True, 0, 0)
    assert low.isnan().tolist() == high.isnan().tolist() == [False, True, True, False]
    assert [int(row.sum()) > 0 for row in (codes.view(2, 16) & 15, codes.view(2, 16) >> 4)] == [True, True]
    assert not (codes.view(2, 16)[1] & 15).any() and not (codes.view(2, 16)[0] >> 4).any()


@pytest.mark.parametrize("function", [reference.blockquant_decode_rows, cpu.blockquant_decode_rows])
def test_rows_of_other_sizes_are_refused(function: Any) -> None:
    planes = reference.blockquant_encode_rows(torch.randn(64), 4, 16, False, 0, False, 0, 0)
    for index, name in enumerate(ROWS):
        damaged = [*planes]
        damaged[index] = damaged[index][1:]
        with pytest.raises(DamagedPlanesError, match=f"in the plane '{name}'"):
            function(*damaged, 4, 16, False, 0, 0, torch.empty(64))


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

"""Masks: equal bytes from the reference, C++ and Triton."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from native_checks import (
    FLOATS,
    SIGNED,
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
from triton_checks import (
    MASK_LENGTHS,
    TRITON_INTEGERS,
    bits,
    each_at_some_length,
    expected,
    filled,
    half_zeros,
    launchers,
    on_device,
    specials,
    triton_test,
)

from backstash.errors import DamagedPlanesError
from backstash.ops.bits import bits_of
from backstash.ops.layout import bytes_for
from backstash.saved import Test


def examples(n: int, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of this family's kernels for ``n`` elements."""
    x, two, pair = (torch.arange(n) % 3).to(dtype), (torch.arange(n) % 2).to(dtype), torch.tensor([0, 1], dtype=dtype)
    mask = reference.bitmask_encode(x, 0, 0.0, 1.0)
    return {
        "bitmask_encode": (x, 0, 0.0, 1.0),
        "bitmask_decode": (mask, torch.empty_like(x), 1.0, 0.0),
        "binary_encode": (two, pair),
        "binary_decode": (reference.binary_encode(two, pair)[0], pair, torch.empty_like(two)),
        "mask_select": (x, mask, torch.empty_like(x)),
    }


def bounds(test: Test) -> tuple[float, float]:
    return {Test.NOT_LE: (0.0, 0.0), Test.GT: (-0.1, 0.0)}.get(test, (-1.1, 0.7))


@native_test
@pytest.mark.parametrize(("isa", "test", "dtype"), isas_and(Test, FLOATS), indirect=["isa"])
def test_bitmask_encode(test: Test, dtype: torch.dtype, isa: str) -> None:
    for n, offset in [*((n, 0) for n in TAILS), (63, 1), (200, 1), (200, 3), (4097, 5)]:
        x = contents(n, dtype, density=0.9, seed=n, offset=offset)
        expected = reference.bitmask_encode(x, test.code, *bounds(test))
        assert same(cpu.bitmask_encode(x, test.code, *bounds(test)), expected), (n, offset)


@native_test
@pytest.mark.parametrize(("isa", "dtype"), isas_and(FLOATS), indirect=["isa"])
def test_bitmask_bounds(dtype: torch.dtype, isa: str) -> None:
    x = contents(500, dtype, density=0.9)
    rounded = torch.tensor([0.1, 0.3, 0.0, -0.0], dtype=dtype)
    x[:12] = torch.cat([rounded, rounded.nextafter(rounded + 1), rounded.nextafter(rounded - 1)])
    pairs = [(0.1, 0.3), (-0.0, 0.0), (-math.inf, math.inf), (math.nan, 1.0), (1e300, 0.0)]
    for test, (lo, hi) in itertools.product(Test, pairs):
        mask, expected = (ops.bitmask_encode(x, test.code, lo, hi) for ops in (cpu, reference))
        assert same(mask, expected), (test, lo, hi)


@native_test
@pytest.mark.parametrize(("isa", "test"), isas_and(Test), indirect=["isa"])
def test_bitmask_every_half(test: Test, isa: str) -> None:
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        planes = [ops.bitmask_encode(x.view(dtype), test.code, *bounds(test)) for ops in (cpu, reference)]
        assert same(*planes), dtype


@native_test
@pytest.mark.parametrize(("isa", "dtype"), isas_and([*FLOATS, torch.bool, torch.uint8, torch.int64]), indirect=["isa"])
def test_bitmask_decode(dtype: torch.dtype, isa: str) -> None:
    values = (1.0, 0.0) if dtype in (torch.bool, torch.uint8, torch.int64) else (-0.0, math.inf)
    for n, offset in [*((n, 0) for n in TAILS), (63, 1), (200, 1), (4097, 5)]:
        mask = torch.randint(256, (bytes_for(n, 1),), generator=generator(n), dtype=torch.uint8)
        out, untouched = poisoned(n, dtype, offset)
        expected = torch.empty(n, dtype=dtype)
        cpu.bitmask_decode(mask, out, *values)
        reference.bitmask_decode(mask, expected, *values)
        assert same(out, expected) and untouched(), (n, offset)


@native_test
@pytest.mark.parametrize("wrong", [-1, 1])
def test_masks_of_another_size_are_refused(wrong: int) -> None:
    mask = torch.zeros(bytes_for(1000, 1) + wrong, dtype=torch.uint8)
    with pytest.raises(DamagedPlanesError, match="126" if wrong == 1 else "124"):
        cpu.bitmask_decode(mask, torch.empty(1000), 1.0, 0.0)
    with pytest.raises(DamagedPlanesError, match="'mask'"):
        cpu.binary_decode(mask, torch.zeros(2), torch.empty(1000))


@native_test
@pytest.mark.parametrize(("isa", "dtype"), isas_and([*FLOATS, torch.int64, torch.int32, torch.int16]), indirect=["isa"])
def test_binary(dtype: torch.dtype, isa: str) -> None:
    pairs = torch.tensor([0, -(1 << (8 * dtype.itemsize - 1)), 7, -1]).to(SIGNED[dtype.itemsize]).view(dtype)
    for (i, j), n in itertools.chain(
        itertools.product([(0, 1)], TAILS), itertools.product(itertools.permutations(range(4), 2), [100, 4097])
    ):
        pair = pairs[[i, j]]
        x = bits_of(pair)[torch.randint(2, (n,), generator=generator(n))].view(dtype)
        mask, mismatches = cpu.binary_encode(x, pair)
        expected, none = reference.binary_encode(x, pair)
        assert same(mask, expected) and same(mismatches, none) and int(mismatches) == 0
        for offset in (0, 1):
            out, untouched = poisoned(n, dtype, offset)
            cpu.binary_decode(mask, pair, out)
            assert same(out, x) and untouched()


@native_test
@pytest.mark.parametrize(("isa", "dtype"), isas_and(FLOATS), indirect=["isa"])
def test_binary_counts_mismatches(dtype: torch.dtype, isa: str) -> None:
    for n in (1, 63, 64, 65, 127, 300, 4097):
        x = contents(n, dtype, seed=n, offset=1)
        pair = torch.tensor([0.0, -0.0], dtype=dtype)
        planes, expected = cpu.binary_encode(x, pair), reference.binary_encode(x, pair)
        assert same(planes[0], expected[0]) and same(planes[1], expected[1])
        assert n < 300 or int(planes[1]) > 0


@native_test
@pytest.mark.parametrize(("isa", "dtype"), isas_and(FLOATS), indirect=["isa"])
def test_mask_select(dtype: torch.dtype, isa: str) -> None:
    for n in (*TAILS, 4096, 70_001):
        x = contents(n, dtype)
        mask = torch.randint(0, 256, (bytes_for(n, 1),), dtype=torch.uint8, generator=generator(n))
        out, intact = poisoned(n, dtype, offset=n % 3)
        cpu.mask_select(x, mask, out)
        expected = torch.empty_like(x)
        reference.mask_select(x, mask, expected)
        keep = torch.zeros(n, dtype=torch.bool)
        reference.bitmask_decode(mask, keep, 1.0, 0.0)
        assert same(expected, torch.where(keep, x, torch.zeros((), dtype=dtype))), n
        assert same(out, expected), n
        assert intact(), n
        cpu.mask_select(x, mask, x)
        assert same(x, expected), n


@native_test
def test_mask_select_refuses_other_sizes() -> None:
    x = torch.ones(100)
    with pytest.raises(DamagedPlanesError, match="mask_select asked for 13 elements in the plane 'mask', got 12"):
        cpu.mask_select(x, torch.zeros(12, dtype=torch.uint8), x)
    with pytest.raises(DamagedPlanesError, match="mask_select asked for 13 elements in the plane 'mask', got 12"):
        reference.mask_select(x, torch.zeros(12, dtype=torch.uint8), x)


@triton_test
@pytest.mark.parametrize(("dtype", "test"), star(FLOATS, list(Test)), ids=str)
def test_bitmask_encode_on_triton(dtype: torch.dtype, test: Test) -> None:
    for n, (lo, hi) in each_at_some_length([(0.0, math.inf), (-1.0, 1.0), (0.1, 6.0), (-0.1, math.nan)]):
        x = half_zeros(dtype, n)
        mask = launchers.bitmask_encode(on_device(x), test.code, lo, hi)
        assert torch.equal(mask.cpu(), reference.bitmask_encode(x, test.code, lo, hi)), (n, lo, hi)


@triton_test
@pytest.mark.parametrize("test", list(Test), ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bitmask_encode_of_every_special_on_triton(dtype: torch.dtype, test: Test) -> None:
    x = specials(dtype)
    for lo in x.tolist():
        mask = launchers.bitmask_encode(on_device(x), test.code, lo, 0.1)
        assert torch.equal(mask.cpu(), reference.bitmask_encode(x, test.code, lo, 0.1)), lo


@triton_test
@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool, torch.uint8], ids=str)
def test_bitmask_decode_on_triton(dtype: torch.dtype) -> None:
    choices = [(1.0, 0.0), (0.0, 1.0)]
    if dtype.is_floating_point:
        choices += [(-0.0, math.inf), (0.1, math.nan)]
    for n, (if_set, if_clear) in each_at_some_length(choices):
        mask = torch.randint(256, (bytes_for(n, 1),), dtype=torch.uint8)  # bits past the last element are set too
        got = filled(n, dtype, launchers.bitmask_decode, mask, if_set=if_set, if_clear=if_clear)
        want = expected(n, dtype, reference.bitmask_decode, mask, if_set=if_set, if_clear=if_clear)
        assert torch.equal(bits(got), bits(want)), (n, if_set, if_clear)


@triton_test
@pytest.mark.parametrize("dtype", [*FLOATS, *TRITON_INTEGERS[:3]], ids=str)
def test_binary_on_triton(dtype: torch.dtype) -> None:
    numbers = specials(dtype) if dtype.is_floating_point else torch.tensor([0, 1, -7, 9], dtype=dtype)
    for n, (i, j) in each_at_some_length([(0, 1), (1, 0), (2, -3), (2, 2)]):
        pair = numbers[[i, j]]
        for x in (pair[torch.randint(2, (n,))], numbers[torch.randint(len(numbers), (n,))]):
            mask, strangers = launchers.binary_encode(on_device(x), on_device(pair))
            mask_expected, strangers_expected = reference.binary_encode(x, pair)
            assert torch.equal(mask.cpu(), mask_expected), n
            assert torch.equal(strangers.cpu(), strangers_expected), n
        got = filled(n, dtype, launchers.binary_decode, mask_expected, pair)
        want = expected(n, dtype, reference.binary_decode, mask_expected, pair)
        assert torch.equal(bits(got), bits(want)), n


@triton_test
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_mask_select_on_triton(dtype: torch.dtype) -> None:
    for n in MASK_LENGTHS:
        x, mask = half_zeros(dtype, n), torch.randint(256, (bytes_for(n, 1),), dtype=torch.uint8)
        want = expected(n, dtype, reference.mask_select, x, mask)
        assert torch.equal(bits(filled(n, dtype, launchers.mask_select, x, mask)), bits(want)), n
        there = on_device(x)
        launchers.mask_select(there, on_device(mask), there)
        assert torch.equal(bits(there), bits(want)), n

"""Integers in few bits: equal bytes from the reference, C++ and Triton."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from native_checks import TAILS, cpu, generator, isas_and, native_test, poisoned, reference, same
from thinning import only
from torch import Tensor
from triton_checks import (
    BLOCK_EDGES,
    SHORT_TAILS,
    TRITON_INTEGERS,
    filled,
    launchers,
    on_device,
    triton_test,
)

from backstash.ops.triton.launching import BLOCK, BLOCK_BYTES


def examples(n: int, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of this family's kernels for ``n`` elements; these take integers alone."""
    x = torch.arange(n) % 30 + 5
    return {"narrow_encode": (x, 5, 5), "narrow_decode": (reference.narrow_encode(x, 5, 5), 5, 5, torch.empty_like(x))}


INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def check_narrow(x: Tensor, bits: int, base: int, offset: int = 0) -> None:
    packed = cpu.narrow_encode(x, bits, base)
    assert same(packed, reference.narrow_encode(x, bits, base)), (x.numel(), bits, base)
    out, untouched = poisoned(x.numel(), x.dtype, offset)
    expected = torch.empty_like(x)
    cpu.narrow_decode(packed, bits, base, out)
    reference.narrow_decode(packed, bits, base, expected)
    assert same(out, expected) and untouched(), (x.numel(), bits, base)


def integers(n: int, dtype: torch.dtype, seed: int) -> Tensor:
    if dtype is torch.bool:
        return torch.randint(2, (n,), generator=generator(seed)).bool()
    return torch.randint(-(1 << 62), 1 << 62, (n,), generator=generator(seed)).to(dtype)


@native_test
@pytest.mark.parametrize(("isa", "dtype"), isas_and(INTEGERS), indirect=["isa"])
def test_narrow_widths(dtype: torch.dtype, isa: str) -> None:
    for n in (0, 1, 7, 8, 9, 31, 64, 1023, 1024, 1025):
        x = integers(n, dtype, n)
        for bits in range(1, 33):  # what does not fit wraps, in both
            check_narrow(x, bits, (0, -5, 1 << 40)[(bits + n) % 3], offset=n % 2)


@native_test
@pytest.mark.parametrize(("isa", "bits"), isas_and([5, 1, 2, 3, 4, 8, 13, 16, 32]), indirect=["isa"])
def test_narrow_tails(bits: int, isa: str) -> None:
    for n in TAILS:
        x = torch.randint(1 << bits, (n + 1,), generator=generator(n))[1:] - 100
        packed = cpu.narrow_encode(x, bits, -100)
        assert same(packed, reference.narrow_encode(x, bits, -100))
        out, untouched = poisoned(n, torch.int64)
        cpu.narrow_decode(packed, bits, -100, out)
        assert same(out, x) and untouched()


@native_test
@pytest.mark.parametrize(("isa", "threads"), isas_and([2, 1, 3]), indirect=["isa", "threads"])
def test_large_integers(threads: int, isa: str) -> None:
    x = torch.randint(-8, 8, ((1 << 20) + 33,), generator=generator())
    for bits in (4, 5):
        out = torch.empty_like(x)
        packed = cpu.narrow_encode(x, bits, -8)
        cpu.narrow_decode(packed, bits, -8, out)
        assert torch.equal(out, x)
        # A block starts at a whole byte: what a slice encodes to is a slice of what all encodes to.
        start = 3 << 16
        assert same(cpu.narrow_encode(x[start:], bits, -8), packed[start * bits // 8 :])


@triton_test
@pytest.mark.parametrize("width", only((1, 3, 8, 13, 16, 31, 32), range(1, 33)))
def test_narrow_on_triton(width: int) -> None:
    for dtype in TRITON_INTEGERS:
        info = torch.iinfo(dtype)
        base = max(info.min, -3)
        span = min(2**width, info.max - base + 1)
        for n in (*SHORT_TAILS, 8 * BLOCK_BYTES // width + 9) if dtype == torch.int64 else (BLOCK + 1,):
            x = (torch.randint(span, (n,)) + base).to(dtype)
            packed = launchers.narrow_encode(on_device(x), width, base)
            assert torch.equal(packed.cpu(), reference.narrow_encode(x, width, base)), (dtype, n)
            got = filled(n, dtype, launchers.narrow_decode, packed, width, base)
            assert torch.equal(got, x), (dtype, n)


@triton_test
def test_narrow_of_bool_and_of_what_does_not_fit_on_triton() -> None:
    for n in (*SHORT_TAILS, *BLOCK_EDGES):
        x = torch.rand(n) < 0.5
        packed = launchers.narrow_encode(on_device(x), 1, 0)
        assert torch.equal(packed.cpu(), reference.narrow_encode(x, 1, 0)), n
        assert torch.equal(filled(n, torch.bool, launchers.narrow_decode, packed, 1, 0), x), n
    x = torch.tensor([300, -1, 2**40 + 5, 0])
    assert torch.equal(launchers.narrow_encode(on_device(x), 3, 2**33).cpu(), reference.narrow_encode(x, 3, 2**33))
    two = torch.tensor([0b11], dtype=torch.uint8)
    assert torch.equal(filled(2, torch.bool, launchers.narrow_decode, two, 1, 1), torch.tensor([True, True]))

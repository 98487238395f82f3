"""Few-bit codes: equal bytes from the reference, C++ and Triton."""

from __future__ import annotations

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
from torch import Tensor
from triton_checks import SHORT_TAILS, bits, expected, filled, half_zeros, launchers, on_device, triton_test

from backstash.errors import DamagedPlanesError
from backstash.ops.bits import bits_of
from backstash.ops.layout import bytes_for
from backstash.ops.triton.launching import BLOCK, BLOCK_BYTES


def examples(n: int, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of this family's kernels for ``n`` elements."""
    x, thresholds = (torch.arange(n) % 3).to(dtype), [0.5, 1.5, 3.0]
    packed = reference.fewbit_encode(x, thresholds, 2)[0]
    return {
        "fewbit_encode": (x, thresholds, 2),
        "fewbit_decode": (packed, [1.0, 2.0, 3.0, 4.0], 2, torch.empty_like(x)),
        "scale_by_codes": (x, packed, torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype), torch.empty_like(x)),
    }


def check_fewbit(x: Tensor, thresholds: list[float], bits: int, offset: int = 0) -> int:
    packed, nonfinite = cpu.fewbit_encode(x, thresholds, bits)
    expected, expected_nonfinite = reference.fewbit_encode(x, thresholds, bits)
    assert same(packed, expected) and same(nonfinite, expected_nonfinite), (x.numel(), thresholds)
    values = torch.linspace(-2.7, 3.1, 2**bits).tolist()
    out, untouched = poisoned(x.numel(), x.dtype, offset)
    again = torch.empty_like(x)
    cpu.fewbit_decode(packed, values, bits, out)
    reference.fewbit_decode(packed, values, bits, again)
    assert same(out, again) and untouched(), (x.numel(), thresholds)
    return int(nonfinite)


def edges(bits: int) -> list[float]:
    return torch.linspace(-1.7, 2.1, 2**bits - 1).tolist()


@native_test
@pytest.mark.parametrize(("isa", "bits", "dtype"), isas_and([3, 1, 2, 4], SMALL_FLOATS), indirect=["isa"])
def test_fewbit_tails(bits: int, dtype: torch.dtype, isa: str) -> None:
    for n in [*TAILS, 1023, 1024, 1025, 3000]:
        x = torch.randn(n + 1, generator=generator(n)).to(dtype)
        assert check_fewbit(x[1:], edges(bits), bits, offset=n % 3) == 0
        check_fewbit(contents(n, dtype, density=0.9, seed=n, offset=n % 3), edges(bits), bits)


THRESHOLDS: list[list[float]] = [
    *([], [0.0], [-0.0], [0.1], [-1e-45, 1e-45], [-1e-9, 0.0, 1e-9], [1.0, 1.001, 70000.0], [-3.4e38, 0.3, math.inf])
]


@native_test
@pytest.mark.parametrize(("isa", "dtype"), isas_and(SMALL_FLOATS), indirect=["isa"])
def test_fewbit_thresholds_between_the_numbers_of_a_dtype(dtype: torch.dtype, isa: str) -> None:
    numbers = torch.tensor([0.0, 0.1, 0.3, 1.0, 1.001, 1e-9, 1e-45, 70000.0, 3.4e38, math.inf]).to(dtype)
    bits = bits_of(numbers)
    largest = torch.iinfo(bits.dtype).max
    near = torch.cat([bits, bits + 1, (bits - 1).clamp(min=0)]).clamp(max=largest)
    x = torch.cat([near, near | torch.iinfo(bits.dtype).min]).view(dtype)
    for thresholds in THRESHOLDS:
        check_fewbit(x, torch.tensor(thresholds).tolist(), 2)


@native_test
@pytest.mark.parametrize(("isa", "bits"), isas_and([3, 1, 2, 4]), indirect=["isa"])
def test_fewbit_every_half(bits: int, isa: str) -> None:
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        assert check_fewbit(x.view(dtype), edges(bits), bits) == int((~x.view(dtype).isfinite()).sum())


@native_test
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_fewbit_large(threads: int, isa: str) -> None:
    """Many blocks, and an output large enough for streaming stores, with and without the alignment for them."""
    x = torch.randn(7 << 20, generator=generator())[: (7 << 20) - 3]
    packed, nonfinite = cpu.fewbit_encode(x, edges(3), 3)
    assert int(nonfinite) == 0
    start = 3 << 16  # a block starts at a whole byte
    assert same(cpu.fewbit_encode(x[start:], edges(3), 3)[0], packed[start * 3 // 8 :])
    assert same(packed[:12], reference.fewbit_encode(x[:32], edges(3), 3)[0])
    values = torch.linspace(-2.7, 3.1, 8)
    codes = torch.bucketize(x, torch.tensor(edges(3)))
    for offset in (0, 1):
        out = torch.full((x.numel() + offset + 64,), 3.0)
        cpu.fewbit_decode(packed, values.tolist(), 3, out[offset : x.numel() + offset])
        assert torch.equal(out[offset : x.numel() + offset], values[codes])
        assert (out[x.numel() + offset :] == 3).all() and (out[:offset] == 3).all()


@native_test
@pytest.mark.parametrize("wrong", [-1, 1])
def test_fewbit_codes_of_another_size_are_refused(wrong: int) -> None:
    packed = torch.zeros(bytes_for(999, 3) + wrong, dtype=torch.uint8)
    with pytest.raises(DamagedPlanesError, match="'packed'"):
        cpu.fewbit_decode(packed, [0.0] * 8, 3, torch.empty(999))


SCALES = [-0.0, 1.25, 0.0, -2.0, math.inf, 1e-30, -1e30, 1 / 3, 1.0, -1.0, 5e-324, 2.0, 0.1, -math.inf, 1e-3, 7.0]


@native_test
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize(
    ("isa", "bits", "dtype"), isas_and([3, 1, 2, 4], [torch.float32, torch.float64]), indirect=["isa"]
)
def test_scale_by_codes(dtype: torch.dtype, bits: int, isa: str, threads: int) -> None:
    table = torch.tensor(SCALES[: 2**bits], dtype=dtype)
    for n in (*(TAILS if threads == 1 else ()), 1023, 1024, 1025, 4096, 200_001):
        x = contents(n, dtype, density=0.9)
        packed = torch.randint(0, 256, (bytes_for(n, bits),), dtype=torch.uint8, generator=generator(n))
        expected = torch.empty_like(x)
        reference.scale_by_codes(x, packed, table, expected)
        out, intact = poisoned(n, dtype, offset=n % 3)
        cpu.scale_by_codes(x, packed, table, out)
        assert same(out, expected), n
        assert intact(), n
        cpu.scale_by_codes(x, packed, table, x)
        assert same(x, expected), n


@native_test
def test_scale_by_codes_past_the_caches(isa: str) -> None:
    x = contents((24 << 20) // 4 + 77, torch.float32)
    packed = torch.randint(0, 256, (bytes_for(x.numel(), 1),), dtype=torch.uint8, generator=generator())
    table, out = torch.tensor([0.0, 1.25]), torch.full_like(x, math.nan)
    cpu.scale_by_codes(x, packed, table, out)
    expected = torch.empty_like(x)
    reference.scale_by_codes(x, packed, table, expected)
    assert same(out, expected)


@native_test
def test_scale_by_codes_refuses_other_sizes() -> None:
    x, table = torch.ones(100), torch.ones(4)
    for ops in (cpu, reference):
        with pytest.raises(
            DamagedPlanesError, match="scale_by_codes asked for 25 elements in the plane 'packed', got 24"
        ):
            ops.scale_by_codes(x, torch.zeros(24, dtype=torch.uint8), table, x)
        for values, of in ((0, 2), (1, 2), (3, 2), (5, 4), (32, 16)):
            with pytest.raises(
                DamagedPlanesError, match=rf"asked for {of} elements in the plane 'table', got {values}"
            ):
                ops.scale_by_codes(x, torch.zeros(25, dtype=torch.uint8), torch.ones(values), x)


@native_test
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32])
def test_scale_by_codes_of_other_dtypes_is_the_reference_s(dtype: torch.dtype) -> None:
    x, out = torch.arange(100).to(dtype), torch.empty(100, dtype=dtype)
    cpu.scale_by_codes(x, torch.full((25,), 0b11100100, dtype=torch.uint8), torch.arange(4).to(dtype), out)
    assert torch.equal(out, x * (torch.arange(100) % 4).to(dtype))


@triton_test
@pytest.mark.parametrize(("dtype", "width"), star(FLOATS[:3], range(1, 5)), ids=str)
def test_fewbit_on_triton(dtype: torch.dtype, width: int) -> None:
    edges = torch.linspace(-1.5, 6.0, 2**width - 1).tolist()
    values = torch.linspace(-3.1, 2.7, 2**width).tolist()
    for thresholds in (edges, [-0.0], []):
        thresholds = torch.tensor(thresholds).tolist()
        for n in (*SHORT_TAILS, 8 * BLOCK_BYTES // width + 9, BLOCK + 1):
            x = half_zeros(dtype, n)
            packed, nonfinite = launchers.fewbit_encode(on_device(x), thresholds, width)
            packed_expected, nonfinite_expected = reference.fewbit_encode(x, thresholds, width)
            assert torch.equal(packed.cpu(), packed_expected), n
            assert torch.equal(nonfinite.cpu(), nonfinite_expected), n
            got = filled(n, dtype, launchers.fewbit_decode, packed_expected, values, width)
            want = expected(n, dtype, reference.fewbit_decode, packed_expected, values, width)
            assert torch.equal(bits(got), bits(want)), n
            if dtype is torch.float32:
                scaled = torch.randn(n), packed_expected, torch.tensor(values)
                got = filled(n, dtype, launchers.scale_by_codes, *scaled)
                assert torch.equal(bits(got), bits(expected(n, dtype, reference.scale_by_codes, *scaled))), n

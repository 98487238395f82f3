"""CSR: equal bytes from the reference, C++ and Triton; damage is found."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from native_checks import (
    FLOATS,
    TAILS,
    contents,
    cpu,
    flip,
    isas_and,
    native_test,
    poisoned,
    reference,
    same,
)
from test_zvc import check_within, rooms
from torch import Tensor
from triton_checks import LENGTHS, bits, filled, half_zeros, launchers, on_device, triton_test

from backstash.codecs.csr.reference import CSR_ROW
from backstash.errors import DamagedPlanesError
from backstash.ops.cpu import library


def examples(n: int, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of this family's kernels for ``n`` elements."""
    x = (torch.arange(n) % 3).to(dtype)
    return {
        "csr_encode": (x,),
        "csr_encode_within": (x, n // 2),
        "csr_decode": (*reference.csr_encode(x), torch.empty_like(x)),
    }


def check_csr(x: Tensor, out_offset: int = 0) -> None:
    planes = cpu.csr_encode(x)
    case = x.numel(), x.storage_offset(), out_offset, f"{planes[2].numel()} not zero"
    for plane, wanted in zip(planes, reference.csr_encode(x), strict=True):
        assert same(plane, wanted), case
        assert plane.untyped_storage().nbytes() == plane.numel() * plane.element_size(), case
    out, untouched = poisoned(x.numel(), x.dtype, out_offset)
    cpu.csr_decode(*planes, out)
    assert same(out, x) and untouched(), case


@native_test
@pytest.mark.parametrize(("isa", "dtype"), isas_and(FLOATS), indirect=["isa"])
def test_csr_tails(dtype: torch.dtype, isa: str) -> None:
    for n in [*TAILS, *(k * CSR_ROW + d for k in (1, 2, 8, 16, 17) for d in (-65, -64, -1, 0, 1, 63, 64, 65))]:
        check_csr(contents(n, dtype, seed=n))
    for n, offset in itertools.product((1, 64, 100, 4096, 4200), (1, 2, 7)):
        check_csr(contents(n, dtype, seed=n, offset=offset), out_offset=offset)


@native_test
@pytest.mark.parametrize(
    ("isa", "dtype"), isas_and([*FLOATS, torch.int64, torch.int32, torch.int16, torch.complex64]), indirect=["isa"]
)
def test_csr_densities(dtype: torch.dtype, isa: str) -> None:
    bits = {2: torch.float16, 4: torch.float32, 8: torch.float64}[dtype.itemsize]
    for n, density in itertools.product((130, 300 * CSR_ROW + 77), (0.0, 0.001, 0.1, 0.9, 1.0)):
        check_csr(contents(n, bits, density).view(dtype))


@native_test
@pytest.mark.parametrize("width", [2, 4, 8])
def test_csr_gather_stays_inside_its_planes(width: int, isa: str) -> None:
    """Kernels store whole registers: the last ones must not reach past the values that there are."""
    for n in (1, 17, 63, 64, 70, 255, 256, 257, 4095, 4096, 4097, 10_000):
        x = contents(n, {2: torch.float16, 4: torch.float32, 8: torch.float64}[width], seed=n)
        columns, rows, values = cpu.csr_encode(x)
        for offset in (0, 1, 5, 64 // width - 1):
            to, untouched = poisoned(values.numel(), x.dtype, offset)
            places, untouched_too = poisoned(values.numel(), torch.uint8, offset)
            library.load().bs_csr_gather(
                x.data_ptr(), n, width, rows.data_ptr(), places.data_ptr(), to.data_ptr(), values.numel(), 2
            )
            assert same(to, values) and untouched(), (n, offset)
            assert same(places, columns) and untouched_too(), (n, offset)


@native_test
@pytest.mark.parametrize(
    ("isa", "n", "dtype"), isas_and([600 * CSR_ROW + 100, 100, 256, 257, 4097], FLOATS), indirect=["isa"]
)
def test_csr_damage_is_found_before_anything_is_written(n: int, dtype: torch.dtype, isa: str) -> None:
    columns, rows, values = cpu.csr_encode(contents(n, dtype))
    last = rows.numel() - 1
    late = columns.clone()
    late[-1] = 255  # rises, but past the end of the tensor
    damages = [
        (flip(columns, 0, 7), rows, values),
        (columns.flip(0), rows, values),
        (torch.zeros_like(columns), rows, values),
        (torch.cat([columns[:1], columns[:-1]]), rows, values),
        (columns, flip(rows, 0), values),
        (columns, flip(rows, last, 3), values),
        (columns, flip(rows, last // 2, 30), values),
        (columns, flip(rows, (last + 1) // 2, 31), values),
        (columns, rows + 1, values),
        (columns, rows, values[:-1]),
        (columns[:-1], rows, values),
        (columns[:-1], rows, values[:-1]),
        (columns[:0], rows, values[:0]),
        (torch.cat([columns, columns[:1]]), rows, torch.cat([values, values[:1]])),
        (columns, rows[:-1], values),
        (columns, torch.cat([rows, rows[-1:]]), values),
        *([(late, rows, values)] if n % CSR_ROW else []),
    ]
    for i, planes in enumerate(damages):
        out, untouched = poisoned(n, dtype)
        for ops in (cpu, reference):
            with pytest.raises(DamagedPlanesError):
                ops.csr_decode(*planes, out)
            assert (out.view(torch.uint8) == 0xA5).all() and untouched(), (i, ops)


@native_test
def test_csr_empty() -> None:
    check_csr(torch.empty(0))
    for ops in (cpu, reference):
        with pytest.raises(DamagedPlanesError):
            ops.csr_decode(
                torch.empty(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32), torch.ones(1), torch.empty(0)
            )


def csr_cases(dtype: torch.dtype) -> Iterator[Tensor]:
    """All lengths; and rows that are full, empty, and empty between full ones."""
    for n in [*LENGTHS, CSR_ROW - 1, CSR_ROW, CSR_ROW + 1]:
        yield half_zeros(dtype, n)
    yield torch.zeros(CSR_ROW + 5, dtype=dtype)
    yield torch.full((20 * CSR_ROW,), -0.0).to(dtype)
    gap = torch.ones(3 * CSR_ROW + 1, dtype=dtype)
    gap[CSR_ROW : 2 * CSR_ROW] = 0
    yield gap


@triton_test
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
def test_csr_on_triton(dtype: torch.dtype) -> None:
    for x in csr_cases(dtype) if dtype.is_floating_point else [torch.arange(-5000, 5000) % 3]:
        planes = launchers.csr_encode(on_device(x))
        planes_expected = reference.csr_encode(x)
        for name, got, want in zip(("columns", "rows", "values"), planes, planes_expected, strict=True):
            assert got.dtype == want.dtype, name
            assert torch.equal(bits(got), bits(want)), (name, x.numel())
        for room in rooms(planes_expected[-1].numel()):
            *found, count = launchers.csr_encode_within(on_device(x), room)
            check_within(found, count, planes_expected, room)
        decoded = filled(x.numel(), dtype, launchers.csr_decode, *planes_expected)
        assert torch.equal(bits(decoded), bits(x)), x.numel()


@triton_test
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_csr_decode_of_damaged_contents_stays_inside_its_planes_on_triton(dtype: torch.dtype) -> None:
    n = 3 * CSR_ROW + 21
    columns, rows, values = reference.csr_encode(torch.where(torch.rand(n) < 0.3, torch.randn(n), 0.0).to(dtype))
    wrong = rows.clone()
    wrong[1:] = torch.tensor([2**31 - 1, -(2**31), 7, values.numel() + 9])
    last = columns.clone()
    last[rows[-2] :] = 255  # past the end of a last row of 21
    for planes in ((columns, wrong, values), (last, rows, values), (columns.flip(0), rows, values)):
        filled(n, dtype, launchers.csr_decode, *planes)
    none = filled(n, dtype, launchers.csr_decode, columns[:0], rows, values[:0])
    assert not bits(none).any(), "values out of nowhere"

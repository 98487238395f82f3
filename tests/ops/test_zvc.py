"""ZVC: equal bytes from the reference, C++ and Triton; damage is found."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_checks import (
    AROUND_CHUNKS,
    FLOATS,
    SETTINGS,
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
from torch import Tensor
from triton_checks import bits, expected, filled, launchers, on_device, triton_test, zvc_cases

from backstash.errors import DamagedPlanesError
from backstash.ops.cpu import library
from backstash.ops.layout import ZVC_CHUNK


def examples(n: int, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of this family's kernels for ``n`` elements."""
    x = (torch.arange(n) % 3).to(dtype)
    return {
        "zvc_encode": (x,),
        "zvc_encode_within": (x, n // 2),
        "zvc_decode": (*reference.zvc_encode(x), torch.empty_like(x)),
        "zvc_minifloat_encode": (x, "fp10"),
        "zvc_minifloat_encode_within": (x, "fp10", n // 2),
        "zvc_minifloat_decode": (*reference.zvc_minifloat_encode(x, "fp10"), "fp10", torch.empty_like(x)),
    }


def rooms(stored: int) -> set[int]:
    """Rooms for fewer values, for as many, and for more."""
    return {0, stored // 2, max(0, stored - 1), stored, stored + 1, stored + 100}


def check_within(found: list[Tensor], count: Tensor, planes: tuple[Tensor, ...], room: int) -> None:
    """Checks planes with room for some values against those with all; other planes have no place for values."""
    stored = planes[-1].numel()
    assert count.shape == (1,) and count.dtype == torch.int64 and int(count) == stored
    for got, want in zip(found, planes, strict=True):
        is_sized = want.numel() == stored and got.numel() == room
        assert got.dtype == want.dtype and (is_sized or got.numel() == want.numel())
        least = min(got.numel(), want.numel())
        assert torch.equal(bits(got[:least]), bits(want[:least])), room


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
def test_planes_with_room_for_some_values(dtype: torch.dtype) -> None:
    for n in (0, 1, 255, 256, 257, ZVC_CHUNK + 300):
        x = (torch.arange(n) % 3).to(dtype)
        for encode, within in (
            (reference.zvc_encode, reference.zvc_encode_within),
            (reference.csr_encode, reference.csr_encode_within),
        ):
            planes = encode(x)
            for room in rooms(planes[-1].numel()):
                *found, count = within(x, room)
                check_within(found, count, planes, room)
                assert not found[-1][planes[-1].numel() :].count_nonzero()


def check_zvc(x: Tensor, out_offset: int = 0) -> None:
    planes = cpu.zvc_encode(x)
    case = x.numel(), x.storage_offset(), out_offset, f"{planes[2].numel()} not zero"
    for plane, wanted in zip(planes, reference.zvc_encode(x), strict=True):
        assert same(plane, wanted), case
        assert plane.untyped_storage().nbytes() == plane.numel() * plane.element_size(), case
    out, untouched = poisoned(x.numel(), x.dtype, out_offset)
    cpu.zvc_decode(*planes, out)
    assert same(out, x) and untouched(), case


@native_test
@pytest.mark.parametrize(("isa", "dtype"), isas_and(FLOATS), indirect=["isa"])
def test_zvc_tails(dtype: torch.dtype, isa: str) -> None:
    for n in [*TAILS, *AROUND_CHUNKS]:
        check_zvc(contents(n, dtype, seed=n))
    for n, offset in itertools.product((1, 64, 100, 4096, 4200), (1, 2, 7)):
        check_zvc(contents(n, dtype, seed=n, offset=offset), out_offset=offset)


@native_test
@pytest.mark.parametrize(
    ("isa", "dtype"), isas_and([*FLOATS, torch.int64, torch.int32, torch.int16, torch.complex64]), indirect=["isa"]
)
def test_zvc_densities(dtype: torch.dtype, isa: str) -> None:
    bits = {2: torch.float16, 4: torch.float32, 8: torch.float64}[dtype.itemsize]
    for n, density in itertools.product((130, 3 * ZVC_CHUNK + 77), (0.0, 0.001, 0.1, 0.9, 1.0)):
        check_zvc(contents(n, bits, density).view(dtype))


@native_test
@SETTINGS
@given(
    runs=st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), max_size=12),
    dtype=st.sampled_from(FLOATS),
    offset=st.integers(0, 3),
)
def test_zvc_runs(runs: list[tuple[bool, int]], dtype: torch.dtype, offset: int) -> None:
    bits = torch.cat([torch.zeros(offset), *(torch.full((n,), float(on)) for on, n in runs)]).to(dtype)
    before = library.isa()
    for name in library.ISAS:
        library.set_isa(name)
        check_zvc(bits[offset:], out_offset=offset)
    library.set_isa(before)


@native_test
@pytest.mark.parametrize("width", [2, 4, 8])
def test_zvc_gather_stays_inside_its_plane(width: int, isa: str) -> None:
    """Kernels store whole registers: the last ones must not reach past the values that there are."""
    for n in (1, 17, 32, 41, 63, 64, 70, 100, 4095, 4096, 4097, 10_000):
        x = contents(n, {2: torch.float16, 4: torch.float32, 8: torch.float64}[width], seed=n)
        mask, offsets, values = cpu.zvc_encode(x)
        for offset in (0, 1, 5, 64 // width - 1):
            out, untouched = poisoned(values.numel(), x.dtype, offset)
            library.load().bs_zvc_gather(
                x.data_ptr(), n, width, mask.data_ptr(), offsets.data_ptr(), out.data_ptr(), values.numel(), 2
            )
            assert same(out, values) and untouched(), (n, offset)


@native_test
@pytest.mark.parametrize(
    ("isa", "n", "dtype"), isas_and([3 * ZVC_CHUNK + 100, 100, 4096, 4097], FLOATS), indirect=["isa"]
)
def test_zvc_damage_is_found_before_anything_is_written(n: int, dtype: torch.dtype, isa: str) -> None:
    mask, offsets, values = cpu.zvc_encode(contents(n, dtype))
    last = offsets.numel() - 1
    swapped = mask.clone()  # as many bits as before, but not in every chunk
    if last > 0:
        swapped[0], swapped[-1 - n % ZVC_CHUNK // 8] = 0xFF, 0
        swapped[1 : 1 + int(values.numel() % 3)] = 0xFF
    damages = [
        (flip(mask, 0), offsets, values),
        (flip(mask, (n - 1) // 8, (n - 1) % 8), offsets, values),
        (flip(mask, mask.numel() // 2, 3), offsets, values),
        (mask, flip(offsets, 0), values),
        (mask, flip(offsets, last, 1), values),
        (mask, flip(offsets, last, 62), values),
        (mask, offsets - (1 << 40), values),
        (mask, offsets + 1, torch.cat([values[:1], values])),
        (mask, offsets, values[:-1]),
        (mask, offsets, values[:0]),
        (mask, offsets, torch.cat([values, values[:1]])),
        (mask[:-1], offsets, values),
        (torch.cat([mask, mask[:1]]), offsets, values),
        (mask, offsets[:-1], values),
        (mask, torch.cat([offsets, offsets[:1]]), values),
        (torch.full_like(mask, 0xFF), offsets, values),
        (torch.zeros_like(mask), offsets, values),
        *([(swapped, offsets, values)] if last > 0 else []),
    ]
    for i, planes in enumerate(damages):
        out, untouched = poisoned(n, dtype)
        with pytest.raises(DamagedPlanesError):
            cpu.zvc_decode(*planes, out)
        assert (out.view(torch.uint8) == 0xA5).all() and untouched(), i


@native_test
def test_zvc_empty() -> None:
    check_zvc(torch.empty(0))
    with pytest.raises(DamagedPlanesError):
        cpu.zvc_decode(
            torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.int64), torch.ones(1), torch.empty(0)
        )


@native_test
def test_mask_bits_past_the_end_are_ignored(isa: str) -> None:
    x = contents(61, torch.float32)
    mask, offsets, values = cpu.zvc_encode(x)
    mask[-1] |= 0xE0
    out, _ = poisoned(61, torch.float32)
    cpu.zvc_decode(mask, offsets, values, out)
    assert same(out, x)


@triton_test
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
def test_zvc_on_triton(dtype: torch.dtype) -> None:
    for x in zvc_cases(dtype) if dtype.is_floating_point else [torch.arange(-5000, 5000) % 3]:
        planes = launchers.zvc_encode(on_device(x))
        planes_expected = reference.zvc_encode(x)
        for name, got, want in zip(("mask", "offsets", "values"), planes, planes_expected, strict=True):
            assert got.dtype == want.dtype, name
            assert torch.equal(bits(got), bits(want)), (name, x.numel())
        for room in rooms(planes_expected[-1].numel()):
            *found, count = launchers.zvc_encode_within(on_device(x), room)
            check_within(found, count, planes_expected, room)
        decoded = filled(x.numel(), dtype, launchers.zvc_decode, *planes_expected)
        assert torch.equal(bits(decoded), bits(x)), x.numel()


@triton_test
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zvc_decode_of_damaged_contents_stays_inside_its_planes_on_triton(dtype: torch.dtype) -> None:
    n = 3 * ZVC_CHUNK + 21
    mask, offsets, values = reference.zvc_encode(torch.where(torch.rand(n) < 0.3, torch.randn(n), 0.0).to(dtype))
    first = int(offsets[1])
    wrong = offsets.clone()
    wrong[1:] = torch.tensor([2**62, -(2**62), values.numel()])
    full = torch.full_like(mask, 255)
    for planes in ((mask, wrong, values), (mask, offsets, values[:first]), (full, offsets, values[:0])):
        got = filled(n, dtype, launchers.zvc_decode, *planes)
        if planes[0] is mask:
            want = expected(n, dtype, reference.zvc_decode, mask, offsets, values)
            assert torch.equal(bits(got[:ZVC_CHUNK]), bits(want[:ZVC_CHUNK])), "the sound chunk"
        assert not bits(got[ZVC_CHUNK if planes[0] is mask else 0 :]).any(), "values out of nowhere"

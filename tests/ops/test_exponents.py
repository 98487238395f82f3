"""Exponents as codes into windows: equal bytes from the reference, C++ and Triton; damage is found."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_checks import (
    AROUND_CHUNKS,
    SETTINGS,
    TAILS,
    contents,
    cpu,
    flip,
    generator,
    isas_and,
    native_test,
    poisoned,
    reference,
    same,
)
from test_zvc import check_within, rooms
from torch import Tensor
from triton_checks import LENGTHS, filled, half_zeros, launchers, on_device, triton_test

from backstash.codecs.exponents.reference import EXPONENTS_BLOCK
from backstash.errors import DamagedPlanesError
from backstash.ops.cpu import library
from backstash.ops.layout import ZVC_CHUNK

DTYPES = [torch.bfloat16, torch.float32]
BITS = [4, 3]
AROUND_BLOCKS = [k * EXPONENTS_BLOCK + d for k in (1, 2, 7) for d in (-33, -16, -8, -1, 0, 1, 2, 8, 31, 33)]


def examples(n: int, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of this family's kernels for ``n`` elements; of float32 in place of float64."""
    x = spread(n, torch.float32 if dtype.itemsize == 8 else dtype, 30)
    return {
        "exponents_encode": (x, 4),
        "exponents_encode_within": (x, 4, n // 8),
        "exponents_decode": (*reference.exponents_encode(x, 4), 4, torch.empty_like(x)),
    }


def spread(n: int, dtype: torch.dtype, width: int, low: int = 100, seed: int = 0) -> Tensor:
    """Random bits, with exponents from ``low`` on, so many different ones."""
    random = generator(seed)
    exponents = low + torch.randint(width, (n,), generator=random)
    negative = torch.randint(2, (n,), generator=random)
    shift = 8 * dtype.itemsize - 9 if dtype is not torch.float16 else 7
    rest = torch.randint(1 << shift, (n,), generator=random)
    words = (exponents << shift | rest) - (negative << (8 * dtype.itemsize - 1))
    return words.to({2: torch.int16, 4: torch.int32}[dtype.itemsize]).view(dtype)


def check(x: Tensor, bits: int, out_offset: int = 0) -> None:
    planes = cpu.exponents_encode(x, bits)
    case = x.numel(), bits, x.storage_offset(), out_offset
    for plane, wanted in zip(planes, reference.exponents_encode(x, bits), strict=True):
        assert same(plane, wanted), case
        assert plane.untyped_storage().nbytes() == plane.numel() * plane.element_size(), case
    out, untouched = poisoned(x.numel(), x.dtype, out_offset)
    cpu.exponents_decode(*planes, bits, out)
    assert same(out, x) and untouched(), case
    again = torch.empty_like(x)
    reference.exponents_decode(*planes, bits, again)
    assert same(again, x), case


@native_test
@pytest.mark.parametrize(("isa", "dtype", "bits"), isas_and(DTYPES, BITS), indirect=["isa"])
def test_tails(dtype: torch.dtype, bits: int, isa: str) -> None:
    for n in [*TAILS, *AROUND_BLOCKS, *AROUND_CHUNKS]:
        check(spread(n, dtype, (14, 6, 16, 40)[n % 4], seed=n), bits)
    for n, offset in itertools.product((1, 511, 512, 4096, 4200), (1, 2, 7)):
        check(contents(n, dtype, seed=n, offset=offset), bits, out_offset=offset)


@native_test
@pytest.mark.parametrize(("isa", "dtype", "bits"), isas_and(DTYPES, BITS), indirect=["isa"])
def test_every_window(dtype: torch.dtype, bits: int, isa: str) -> None:
    """Blocks whose exponents begin anywhere, are anywhere, or are all the same one; among them zeros and outliers."""
    for low, width in itertools.product((0, 1, 2, 5, 13, 14, 15, 120, 240, 242, 249, 255), (1, 2, 6, 7, 14, 15, 256)):
        x = spread(3 * EXPONENTS_BLOCK + 77, dtype, max(1, min(width, 256 - low)), low, seed=low + width)
        check(x, bits)
        x[::7], x[100:800:31] = 0.0, -0.0
        check(x, bits)
        x[5::64], x[600], x[601] = float("inf"), float("nan"), 1.0
        check(x, bits)


@native_test
@SETTINGS
@given(
    parts=st.lists(
        st.tuples(st.integers(0, 255), st.sampled_from([1, 3, 8, 15, 60]), st.integers(1, 1500)), max_size=6
    ),
    dtype=st.sampled_from(DTYPES),
    bits=st.sampled_from(BITS),
    offset=st.integers(0, 3),
)
def test_parts_of_any_exponents(parts: list[tuple[int, int, int]], dtype: torch.dtype, bits: int, offset: int) -> None:
    made = [spread(n, dtype, min(width, 256 - low), low, seed=n) for low, width, n in parts]
    x = torch.cat([torch.zeros(offset, dtype=dtype), *made])
    before = library.isa()
    for name in library.ISAS:
        library.set_isa(name)
        check(x[offset:], bits, out_offset=offset)
    library.set_isa(before)


@pytest.mark.parametrize("ops", [reference, pytest.param(cpu, marks=native_test)], ids=["reference", "native"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_planes_with_room_for_some_escapes(ops: Any, dtype: torch.dtype, bits: int) -> None:
    for n in (0, 1, 511, 512, 513, ZVC_CHUNK + 300):
        x = spread(n, dtype, 40)
        planes = ops.exponents_encode(x, bits)
        for room in rooms(planes[-1].numel()):
            *found, count = ops.exponents_encode_within(x, bits, room)
            check_within(found, count, planes, room)


@native_test
@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize(("isa", "dtype", "bits"), isas_and(DTYPES, BITS), indirect=["isa"])
def test_large(dtype: torch.dtype, bits: int, threads: int, isa: str) -> None:
    """Many blocks, two threads, planes large enough for streaming stores, with and without the alignment for them."""
    n = (27 << 20) // (dtype.itemsize - 1)
    part = spread(5 * ZVC_CHUNK, dtype, 20)
    for length in (n // 64 * 64, n // 64 * 64 + 13):
        x = part.repeat(length // part.numel() + 1)[:length]
        planes = cpu.exponents_encode(x, bits)
        _, codes, bases, offsets, escapes = planes
        first, period = reference.exponents_encode(part, bits), part.numel()
        assert same(codes[: period * bits // 8], first[1]) and same(bases[: period // EXPONENTS_BLOCK], first[2])
        assert same(codes[period * bits // 8 : 2 * period * bits // 8], first[1])
        assert same(offsets[:5], first[3]) and int(offsets[5]) == first[4].numel()
        assert same(escapes[: first[4].numel()], first[4])
        for offset in (0, 1):
            out = torch.full((length + offset + 64,), 3.0, dtype=dtype)
            cpu.exponents_decode(*planes, bits, out[offset : length + offset])
            assert same(out[offset : length + offset], x)
            assert (out[length + offset :] == 3).all() and (out[:offset] == 3).all()


@native_test
@pytest.mark.parametrize(("isa", "dtype", "bits"), isas_and(DTYPES, BITS), indirect=["isa"])
def test_damage_is_found_before_anything_is_written(dtype: torch.dtype, bits: int, isa: str) -> None:
    for n in (1, 100, ZVC_CHUNK, 3 * ZVC_CHUNK + 100):
        x = spread(n, dtype, 60)
        fractions, codes, bases, offsets, escapes = cpu.exponents_encode(x, bits)
        last = offsets.numel() - 1
        damages = [
            (fractions[:-1], codes, bases, offsets, escapes),
            (fractions, codes[:-1], bases, offsets, escapes),
            (fractions, codes, bases[:-1], offsets, escapes),
            (fractions, codes, bases, offsets[:-1], escapes),
            (fractions, codes, bases, offsets, torch.cat([escapes, escapes.new_zeros(1)])),
            (fractions, codes, bases, flip(offsets, 0), escapes),
            (fractions, codes, bases, flip(offsets, last, 1), escapes),
            (fractions, codes, bases, flip(offsets, last, 62), escapes),
            (fractions, codes, bases, offsets - (1 << 40), escapes),
            (fractions, torch.full_like(codes, 255) if escapes.numel() < n else codes[:0], bases, offsets, escapes),
        ]
        if escapes.numel():
            damages.append((fractions, codes, bases, offsets, escapes[:-1]))
            damages.append((fractions, torch.zeros_like(codes), bases, offsets, escapes))
        for planes, ops in itertools.product(damages, (cpu, reference)):
            out = torch.full((n,), 7.0, dtype=dtype)
            with pytest.raises(DamagedPlanesError, match="compute the step again"):
                ops.exponents_decode(*planes, bits, out)
            assert bool((out == 7).all())


@native_test
def test_bits_behind_the_last_code_are_not_read() -> None:
    for bits, n in itertools.product(BITS, (1, 3, 5, 513, 4099)):
        x = spread(n, torch.bfloat16, 30)
        fractions, codes, *rest = cpu.exponents_encode(x, bits)
        codes[-1] |= 0xFF << (n * bits % 8 or 8) & 0xFF
        for ops in (cpu, reference):
            out = torch.empty_like(x)
            ops.exponents_decode(fractions, codes, *rest, bits, out)
            assert same(out, x)


@native_test
def test_elements_of_other_sizes_go_to_the_reference() -> None:
    x = torch.randn(600, dtype=torch.float64, generator=generator())
    for ours, wanted in zip(cpu.exponents_encode(x, 4), reference.exponents_encode(x, 4), strict=True):
        assert same(ours, wanted)
    assert all(map(same, cpu.exponents_encode_within(x, 4, 9), reference.exponents_encode_within(x, 4, 9)))
    out = torch.empty_like(x)
    cpu.exponents_decode(*cpu.exponents_encode(x, 4), 4, out)
    assert same(out, x)


def check_on_triton(x: Tensor, bits: int) -> None:
    planes = reference.exponents_encode(x, bits)
    for got, want in zip(launchers.exponents_encode(on_device(x), bits), planes, strict=True):
        assert same(got.cpu(), want), (x.numel(), bits)
    assert same(filled(x.numel(), x.dtype, launchers.exponents_decode, *planes, bits), x)


@triton_test
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exponents_on_triton(dtype: torch.dtype, bits: int) -> None:
    for n in LENGTHS:
        check_on_triton(half_zeros(dtype, n), bits)
    for n in AROUND_BLOCKS[::4]:
        check_on_triton(spread(n, dtype, (14, 6, 16, 40)[n % 4], seed=n), bits)
    for low, width in itertools.product((0, 2, 15, 240, 249, 255), (1, 7, 15)):
        x = spread(2 * EXPONENTS_BLOCK + 77, dtype, max(1, min(width, 256 - low)), low, seed=low + width)
        x[::7], x[100:800:31], x[5::64] = 0.0, -0.0, float("inf")
        check_on_triton(x, bits)


@triton_test
def test_planes_with_room_for_some_escapes_on_triton() -> None:
    for dtype, bits, n in itertools.product(DTYPES, BITS, (0, 1, 513, ZVC_CHUNK + 300)):
        x = spread(n, dtype, 40)
        planes = reference.exponents_encode(x, bits)
        for room in rooms(planes[-1].numel()):
            *found, count = launchers.exponents_encode_within(on_device(x), bits, room)
            check_within([plane.cpu() for plane in found], count.cpu(), planes, room)


@triton_test
def test_damaged_planes_are_read_within_their_bounds_on_triton() -> None:
    x = spread(ZVC_CHUNK + 100, torch.float32, 60)
    fractions, codes, bases, offsets, escapes = reference.exponents_encode(x, 4)
    for wrong in (offsets - (1 << 40), offsets + (1 << 40), flip(offsets, 1, 62)):
        filled(x.numel(), x.dtype, launchers.exponents_decode, fractions, codes, bases, wrong, escapes, 4)
    filled(x.numel(), x.dtype, launchers.exponents_decode, fractions, codes, bases, offsets, escapes[:3], 4)
    with pytest.raises(DamagedPlanesError, match="fractions, codes, bases and offsets"):
        filled(x.numel(), x.dtype, launchers.exponents_decode, fractions, codes[1:], bases, offsets, escapes, 4)

"""Small floating-point formats: equal bytes from the reference, C++ and Triton."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from native_checks import (
    AROUND_CHUNKS,
    SMALL_FLOATS,
    TAILS,
    contents,
    cpu,
    flip,
    generator,
    isas_and,
    isas_and_each,
    native_test,
    poisoned,
    reference,
    same,
)
from thinning import star_of
from torch import Tensor
from triton_checks import SHORT_TAILS, bits, expected, filled, launchers, numbers_of, on_device, triton_test, zvc_cases

from backstash.codecs.minifloat.cpu import takes
from backstash.codecs.minifloat.formats import FORMATS, SCALED
from backstash.codecs.zvc import cpu as binding
from backstash.errors import DamagedPlanesError
from backstash.ops.cpu import library
from backstash.ops.layout import ZVC_CHUNK
from backstash.ops.triton.launching import BLOCK


def examples(n: int, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of this family's kernels for ``n`` elements."""
    x = (torch.arange(n) % 3).to(dtype)
    scaled = reference.minifloat_scaled_encode(x, "float8_e4m3fn", 16)
    return {
        "minifloat_encode": (x, "fp10", True),
        "minifloat_decode": (reference.minifloat_encode(x, "fp10", False), "fp10", torch.empty_like(x)),
        "minifloat_scaled_encode": (x, "float8_e4m3fn", 16),
        "minifloat_scaled_decode": (*scaled, "float8_e4m3fn", 16, torch.empty_like(x)),
        "minifloat_images_encode": (x, "float8_e4m3fn", 16, 1, n),
        "minifloat_images_decode": (*scaled, "float8_e4m3fn", 16, 1, n, torch.empty_like(x)),
    }


MINIFLOATS = [(f, d) for f in FORMATS for d in SMALL_FLOATS if takes(FORMATS[f], d)]
WORDS_EDGES = [3071, 3072, 3073, 2 * 3072 + 1]


def numbers(dtype: torch.dtype) -> Tensor:
    """Every bit pattern of 16 bits; of float32 every exponent with what lies on ties and one beside them."""
    if dtype.itemsize == 2:
        return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    near = [k * (1 << bit) + d for bit in range(10, 23) for k in (0, 1, 3, 5) for d in (-1, 0, 1)]
    mantissas = torch.tensor(sorted({m for m in (*near, (1 << 23) - 1) if 0 <= m < 1 << 23}))
    magnitudes = ((torch.arange(256) << 23)[:, None] | mantissas).view(-1)
    return torch.cat([magnitudes, magnitudes - (1 << 31)]).to(torch.int32).view(torch.float32)


def check_minifloat(x: Tensor, format: str, offset: int = 0) -> None:
    for nonzero in (False, True):
        codes = cpu.minifloat_encode(x, format, nonzero)
        assert same(codes, reference.minifloat_encode(x, format, nonzero)), x.numel()
    out, untouched = poisoned(x.numel(), x.dtype, offset)
    expected = torch.empty_like(x)
    cpu.minifloat_decode(codes, format, out)
    reference.minifloat_decode(codes, format, expected)
    assert same(out, expected) and untouched(), x.numel()


@native_test
@pytest.mark.parametrize(("isa", "format", "dtype"), isas_and_each(MINIFLOATS), indirect=["isa"])
def test_minifloat(format: str, dtype: torch.dtype, isa: str) -> None:
    check_minifloat(numbers(dtype), format)
    for n, offset in [*((n, n % 3) for n in (*TAILS, *WORDS_EDGES))]:
        check_minifloat(contents(n, dtype, 0.9, seed=n, offset=offset), format, offset)


@native_test
@pytest.mark.parametrize("group_size", [16, 256, 4096])
@pytest.mark.parametrize(
    ("isa", "format", "dtype"), isas_and_each([(f, d) for f, d in MINIFLOATS if f in SCALED]), indirect=["isa"]
)
def test_minifloat_of_groups(group_size: int, format: str, dtype: torch.dtype, isa: str) -> None:
    every = numbers(dtype)
    shuffled = every[torch.randperm(every.numel(), generator=generator())]
    for x in (every, shuffled, *(every[7 : 7 + n] for n in TAILS)):
        codes, scales = cpu.minifloat_scaled_encode(x, format, group_size)
        codes_expected, scales_expected = reference.minifloat_scaled_encode(x, format, group_size)
        assert same(scales, scales_expected) and same(codes, codes_expected), x.numel()
        out, untouched = poisoned(x.numel(), dtype, 1)
        expected = torch.empty_like(x)
        cpu.minifloat_scaled_decode(codes, scales, format, group_size, out)
        reference.minifloat_scaled_decode(codes, scales, format, group_size, expected)
        assert same(out, expected) and untouched(), x.numel()


def check_zvc_minifloat(x: Tensor, format: str, offset: int = 0) -> None:
    planes = cpu.zvc_minifloat_encode(x, format)
    for plane, wanted in zip(planes, reference.zvc_minifloat_encode(x, format), strict=True):
        assert same(plane, wanted), x.numel()
        assert plane.untyped_storage().nbytes() == plane.nbytes
    out, untouched = poisoned(x.numel(), x.dtype, offset)
    decoded = torch.empty_like(x)
    cpu.zvc_minifloat_decode(*planes, format, out)
    reference.zvc_minifloat_decode(*planes, format, decoded)
    assert same(out, decoded) and untouched(), x.numel()


@native_test
@pytest.mark.parametrize(("isa", "format", "dtype"), isas_and_each(MINIFLOATS), indirect=["isa"])
def test_zvc_minifloat(format: str, dtype: torch.dtype, isa: str) -> None:
    check_zvc_minifloat(numbers(dtype), format)
    for n in [*TAILS, *AROUND_CHUNKS]:
        check_zvc_minifloat(contents(n, dtype, seed=n, offset=n % 3), format, n % 5)
    for density in (0.0, 0.001, 1.0):
        check_zvc_minifloat(contents(40 * ZVC_CHUNK + 77, dtype, density), format)


@native_test
@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize(
    ("isa", "at"),
    isas_and([(5, 70_000, 199_999), (0,), (0, 70_000), (1, 2, 65_536, 65_537, 140_000)]),
    indirect=["isa"],
)
def test_words_that_several_blocks_share(at: tuple[int, ...], threads: int, isa: str) -> None:
    """A block of ZVC has 16 chunks; a word of fp10 may have values of three of them."""
    x = torch.zeros(200_000)
    x[list(at)] = torch.arange(1.0, len(at) + 1)
    check_zvc_minifloat(x, "fp10")
    x[65_000:65_600] = torch.arange(600.0) + 1
    check_zvc_minifloat(x, "fp10")


@native_test
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("room", [0, 70_000])
@pytest.mark.parametrize("format", ["fp8", "fp10"])
def test_codes_that_there_is_no_room_for_are_made_twice(
    format: str, room: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "_SCRATCH", room)
    for density in (0.02, 0.5):
        check_zvc_minifloat(contents(40 * ZVC_CHUNK + 77, torch.float32, density), format)


@native_test
@pytest.mark.parametrize(("isa", "format"), isas_and(["fp10", "fp8", "fp16"]), indirect=["isa"])
def test_zvc_minifloat_place_stays_inside_its_plane(format: str, isa: str) -> None:
    for n in (1, 3, 41, 64, 100, 4097, 70_000):
        x = contents(n, torch.float32, seed=n)
        mask, offsets, values = cpu.zvc_minifloat_encode(x, format)
        nowhere, scratch = torch.full_like(offsets, -1), torch.empty(8, dtype=torch.uint8)
        for offset in (0, 1, 5):
            out, untouched = poisoned(values.numel(), values.dtype, offset)
            planes = (plane.data_ptr() for plane in (mask, offsets, scratch, nowhere, out))
            stored = int((x.view(torch.int32) != 0).sum())
            library.load().bs_zvc_minifloat_place(x.data_ptr(), n, 0, FORMATS[format].code, *planes, stored, 2)
            assert same(out, values) and untouched(), (n, offset)


@native_test
@pytest.mark.parametrize(
    ("isa", "n", "format"), isas_and([3 * ZVC_CHUNK + 100, 100, 4097], ["fp10", "fp8"]), indirect=["isa"]
)
def test_zvc_minifloat_damage_is_found_before_anything_is_written(n: int, format: str, isa: str) -> None:
    mask, offsets, values = cpu.zvc_minifloat_encode(contents(n, torch.float32), format)
    last = offsets.numel() - 1
    damages = [
        (mask, offsets, values[:-1]),
        (mask, offsets, torch.cat([values, values[:1]])),
        (mask, flip(offsets, 0), values),
        (mask, flip(offsets, last, 40), values),
        (mask, flip(offsets, last, 63 - 1), values),
        (mask, -offsets - 1, values),
        (mask[:-1], offsets, values),
        (mask, offsets[:-1], values),
        (torch.full_like(mask, 0xFF), offsets, values),
    ]
    if last > 0:
        damages.append((flip(mask, 0), offsets, values))
    for i, planes in enumerate(damages):
        out, untouched = poisoned(n, torch.float32)
        with pytest.raises(DamagedPlanesError):
            cpu.zvc_minifloat_decode(*planes, format, out)
        assert (out.view(torch.uint8) == 0xA5).all() and untouched(), i


@pytest.mark.slow
@native_test
@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize(("isa", "format"), isas_and(FORMATS), indirect=["isa"])
def test_minifloat_past_the_caches(format: str, threads: int, isa: str) -> None:
    """Large enough for streaming stores of the codes too, with a part of a line and of a word at the end."""
    x = contents((24 << 20) + 3 * 1024 + 5, torch.float32, 0.7)
    codes = cpu.minifloat_encode(x, format, False)
    planes = cpu.zvc_minifloat_encode(x, format)
    out, zvc_out = torch.empty_like(x), torch.empty_like(x)
    cpu.minifloat_decode(codes, format, out)
    cpu.zvc_minifloat_decode(*planes, format, zvc_out)
    start = x.numel() - 3 * 4096 - 5
    for part in (slice(start // 3 * 3, None), slice(3 << 20, (3 << 20) + 6 * 4096)):
        some = reference.minifloat_encode(x[part], format, False)
        expected = torch.empty_like(x[part])
        reference.minifloat_decode(some, format, expected)
        assert same(out[part], expected)
        expected = torch.where(x[part] == 0, x[part], expected)
        kept = reference.minifloat_encode(x[part], format, True)
        reference.minifloat_decode(kept, format, expected)
        assert same(zvc_out[part], torch.where(x[part].view(torch.int32) == 0, x[part], expected))


@native_test
@pytest.mark.parametrize(
    ("isa", "format", "dtype"), isas_and_each([(f, d) for f, d in MINIFLOATS if f in SCALED]), indirect=["isa"]
)
@pytest.mark.parametrize("shape", [(3, 1, 5, 7), (2, 33, 9, 8), (1, 64, 16, 16), (4, 40, 12, 4), (2, 8, 64, 65)])
def test_images_in_channels_last(shape: tuple[int, int, int, int], format: str, dtype: torch.dtype, isa: str) -> None:
    x = 600 * torch.randn(shape, generator=generator(1)).to(dtype)
    x.flatten()[::97] = float("nan")
    x.flatten()[5::101] = float("inf")
    image = shape[1], shape[2] * shape[3]
    turned = x.permute(0, 2, 3, 1).reshape(-1)
    wanted = reference.minifloat_scaled_encode(x.flatten(), format, 16)
    for encode in (reference.minifloat_images_encode, cpu.minifloat_images_encode):
        for plane, want in zip(encode(turned, format, 16, *image), wanted, strict=True):
            assert same(plane, want)
    in_order = torch.empty_like(turned)
    reference.minifloat_scaled_decode(*wanted, format, 16, in_order)
    for decode in (reference.minifloat_images_decode, cpu.minifloat_images_decode):
        out, untouched = poisoned(turned.numel(), dtype, 1)
        decode(*wanted, format, 16, *image, out)
        assert same(out.view(shape[0], image[1], image[0]).transpose(1, 2).reshape(-1), in_order) and untouched()


@native_test
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_many_images(threads: int, isa: str) -> None:
    """Many blocks: what two threads write and read is what one does."""
    x = torch.randn(8, 57 * 64, 96, generator=generator())
    flat, image = x.flatten(), (96, 57 * 64)
    planes = cpu.minifloat_images_encode(flat, "float8_e4m3fn", 256, *image)
    for plane, want in zip(planes, reference.minifloat_images_encode(flat, "float8_e4m3fn", 256, *image), strict=True):
        assert same(plane, want)
    out, want = torch.empty_like(flat), torch.empty_like(flat)
    cpu.minifloat_images_decode(*planes, "float8_e4m3fn", 256, *image, out)
    reference.minifloat_images_decode(*planes, "float8_e4m3fn", 256, *image, want)
    assert same(out, want)


@pytest.mark.parametrize("decode", [reference.minifloat_images_decode, cpu.minifloat_images_decode])
def test_images_of_other_sizes_are_refused(decode: Any) -> None:
    codes, scales = reference.minifloat_images_encode(torch.randn(64), "float8_e4m3fn", 16, 4, 8)
    for planes, name in (((codes[:-1], scales), "codes"), ((codes, scales[:-1]), "scales")):
        with pytest.raises(DamagedPlanesError, match=name):
            decode(*planes, "float8_e4m3fn", 16, 4, 8, torch.empty(64))


@triton_test
@pytest.mark.parametrize(("format", "dtype"), star_of(MINIFLOATS), ids=str)
def test_minifloat_on_triton(format: str, dtype: torch.dtype) -> None:
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    some = (patterns.int() << 16 | 0x8000).view(dtype) if dtype == torch.float32 else patterns.view(dtype)
    for x in [some, *(numbers_of(dtype, n) for n in (*SHORT_TAILS, BLOCK - 1, BLOCK, 3073, 4097))]:
        for nonzero in (False, True):
            codes = launchers.minifloat_encode(on_device(x), format, nonzero)
            want = reference.minifloat_encode(x, format, nonzero)
            assert codes.dtype == want.dtype
            assert torch.equal(codes.cpu(), want), x.numel()
        got = filled(x.numel(), dtype, launchers.minifloat_decode, want, format)
        decoded = expected(x.numel(), dtype, reference.minifloat_decode, want, format)
        assert torch.equal(bits(got), bits(decoded)), x.numel()


@triton_test
@pytest.mark.parametrize(("format", "dtype"), star_of((f, d) for f, d in MINIFLOATS if f in SCALED), ids=str)
def test_minifloat_of_groups_on_triton(format: str, dtype: torch.dtype) -> None:
    for n, group_size in itertools.product((*SHORT_TAILS, 255, 256, 257, 4097), (16, 256, 4096)):
        x = numbers_of(dtype, n)
        planes = launchers.minifloat_scaled_encode(on_device(x), format, group_size)
        wanted = reference.minifloat_scaled_encode(x, format, group_size)
        for got, want in zip(planes, wanted, strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(bits(got), bits(want)), (n, group_size)
        got = filled(n, dtype, launchers.minifloat_scaled_decode, *wanted, format, group_size)
        want = expected(n, dtype, reference.minifloat_scaled_decode, *wanted, format, group_size)
        assert torch.equal(bits(got), bits(want)), (n, group_size)


@triton_test
@pytest.mark.parametrize(("format", "dtype"), star_of(MINIFLOATS), ids=str)
def test_zvc_minifloat_on_triton(format: str, dtype: torch.dtype) -> None:
    for x in zvc_cases(dtype):
        planes = launchers.zvc_minifloat_encode(on_device(x), format)
        wanted = reference.zvc_minifloat_encode(x, format)
        for got, want in zip(planes, wanted, strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(bits(got), bits(want)), x.numel()
        stored = reference.zvc_encode(x)[-1].numel()
        for room in (stored // 2, stored, stored + 5):
            within = launchers.zvc_minifloat_encode_within(on_device(x), format, room)
            for got, want in zip(within, reference.zvc_minifloat_encode_within(x, format, room), strict=True):
                assert got.dtype == want.dtype
                assert torch.equal(bits(got), bits(want)), (x.numel(), room)
            assert int(within[-1]) == stored
        got = filled(x.numel(), dtype, launchers.zvc_minifloat_decode, *wanted, format)
        want = expected(x.numel(), dtype, reference.zvc_minifloat_decode, *wanted, format)
        assert torch.equal(bits(got), bits(want)), x.numel()
    mask, offsets, values = wanted
    none = filled(x.numel(), dtype, launchers.zvc_minifloat_decode, mask, offsets + 2**62, values, format)
    assert not bits(none).any(), "values out of nowhere"

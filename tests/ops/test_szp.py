"""Error-bounded values at a width per block: equal bytes from the reference, C++ and Triton."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from native_checks import (
    AROUND_CHUNKS,
    FLOATS,
    SMALL_FLOATS,
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
from torch import Tensor
from triton_checks import bits, expected, filled, launchers, numbers_of, on_device, triton_test, zvc_cases

from backstash.codecs import Szp
from backstash.errors import DamagedPlanesError
from backstash.ops.layout import ZVC_CHUNK


def examples(n: int, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of this family's kernels for ``n`` elements; of float32 in place of float64."""
    x = (torch.arange(n) % 3).to(torch.float32 if dtype.itemsize == 8 else dtype)
    grid = torch.tensor([5.0, 0.2, 0.1])
    return {
        "szp_range": (x,),
        "szp_encode": (x, grid),
        "szp_encode_within": (x, grid, n // 2),
        "szp_decode": (*reference.szp_encode(x, grid), grid[1:2].clone(), torch.empty_like(x)),
    }


def check_szp(x: Tensor, error: float, mode: str = "abs", offset: int = 0) -> None:
    grid = Szp(error, mode).grid(x)
    assert same(cpu.szp_range(x), reference.szp_range(x))
    planes = cpu.szp_encode(x, grid)
    for plane, wanted in zip(planes, reference.szp_encode(x, grid), strict=True):
        assert same(plane, wanted), (x.numel(), error)
        assert plane.untyped_storage().nbytes() == plane.numel() * plane.element_size()
    out, untouched = poisoned(x.numel(), x.dtype, offset)
    again = torch.empty_like(x)
    cpu.szp_decode(*planes, grid[1:2], out)
    reference.szp_decode(*planes, grid[1:2], again)
    assert same(out, again) and untouched()


@pytest.mark.slow
@native_test
@pytest.mark.parametrize(("isa", "dtype"), isas_and(SMALL_FLOATS), indirect=["isa"])
def test_szp(dtype: torch.dtype, isa: str) -> None:
    for n in [*TAILS, *AROUND_CHUNKS[:10]]:
        normal = torch.randn(n, generator=generator(n)).to(dtype)
        check_szp(normal, (0.3, 0.01, 1e-4, 1e-7)[n % 4], offset=n % 3)
        check_szp(normal.abs(), (0.01, 0.3)[n % 2], "rel")
        check_szp(contents(n, dtype, density=0.8, seed=n, offset=n % 3), (1e-3, 3.0, 1e-40, 1e30)[n % 4])


@native_test
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_szp_large(threads: int, isa: str) -> None:
    """Many blocks, outputs large enough for streaming stores, with and without the alignment for them."""
    x = torch.randn(9 << 20, generator=generator())[: (9 << 20) - 5]
    x[::3] = 0
    grid = Szp(1e-5).grid(x)
    planes = cpu.szp_encode(x, grid)
    first, last = 5 * ZVC_CHUNK, x.numel() // ZVC_CHUNK * ZVC_CHUNK
    begin, end = planes[1][0], planes[1][5]
    assert same(planes[2][begin:end], reference.szp_encode(x[:first], grid)[2])
    assert same(planes[2][planes[1][-1] :], reference.szp_encode(x[last:], grid)[2])
    for offset in (0, 1):
        out = torch.full((x.numel() + offset + 64,), 3.0)
        cpu.szp_decode(*planes, grid[1:2], out[offset : x.numel() + offset])
        assert ((out[offset : x.numel() + offset] - x).abs() <= 1e-5).all()
        assert (out[x.numel() + offset :] == 3).all() and (out[:offset] == 3).all()


@native_test
@pytest.mark.parametrize(
    ("isa", "n", "dtype"),
    isas_and([3 * ZVC_CHUNK + 100, 1, 100, 4096], [torch.float32, torch.bfloat16]),
    indirect=["isa"],
)
def test_szp_damage_is_found_before_anything_is_written(n: int, dtype: torch.dtype, isa: str) -> None:
    x = torch.randn(n, generator=generator()).to(dtype)
    grid = Szp(0.01).grid(x)
    mask, offsets, words = cpu.szp_encode(x, grid)
    last = offsets.numel() - 1
    damages = [
        (mask, flip(offsets, 0), words),
        (mask, flip(offsets, last, 1), words),
        (mask, flip(offsets, last, 62), words),
        (mask, offsets - (1 << 40), words),
        (mask, offsets, words[:-1]),
        (mask, offsets, words[:0]),
        (mask, offsets, torch.cat([words, words[:1]])),
        (mask, offsets, flip(words, 0)),
        (mask, offsets, flip(words, 0, 5)),
        (mask, offsets, flip(words, 0, 6)),
        (mask, offsets, flip(words, 0, 7)),
        (mask, offsets, torch.full_like(words, -1)),
        (torch.zeros_like(mask), offsets, words),
        *([(mask[:-1], offsets, words), (mask, offsets[:-1], words)] if n > 8 else []),
    ]
    for i, planes in enumerate(damages):
        out, untouched = poisoned(n, dtype)
        with pytest.raises(DamagedPlanesError):
            cpu.szp_decode(*planes, grid[1:2], out)
        assert (out.view(torch.uint8) == 0xA5).all() and untouched(), i
        if planes[0].numel() == mask.numel():
            with pytest.raises(DamagedPlanesError):
                reference.szp_decode(*planes, grid[1:2], out)


@triton_test
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy, of infinities, in the interpreter
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_szp_on_triton(dtype: torch.dtype) -> None:
    for i, x in enumerate(
        [*zvc_cases(dtype), *(numbers_of(dtype, n) for n in (33, 4097)), torch.randn(5000).to(dtype)]
    ):
        assert torch.equal(bits(launchers.szp_range(on_device(x))), bits(reference.szp_range(x)))
        grid = Szp((0.01, 3.0, 1e-6)[i % 3]).grid(x)
        planes = launchers.szp_encode(on_device(x), on_device(grid))
        wanted = reference.szp_encode(x, grid)
        for name, got, want in zip(("mask", "offsets", "words"), planes, wanted, strict=True):
            assert got.dtype == want.dtype, name
            assert torch.equal(bits(got), bits(want)), (name, x.numel())
        stored = wanted[-1].numel()
        for room in (stored // 2, stored, stored + 5):
            *_, words, count = launchers.szp_encode_within(on_device(x), on_device(grid), room)
            assert int(count) == stored and words.numel() == room
            assert torch.equal(words[:stored], wanted[-1][:room]), (x.numel(), room)
        got = filled(x.numel(), dtype, launchers.szp_decode, *wanted, grid[1:2])
        want = expected(x.numel(), dtype, reference.szp_decode, *wanted, grid[1:2])
        assert torch.equal(bits(got), bits(want)), x.numel()
    mask, offsets, words = wanted
    for planes in ((mask, offsets + 2**62, words), (mask, offsets - 1, words), (mask, offsets, words | 0x3F3F3F3F)):
        filled(x.numel(), dtype, launchers.szp_decode, *planes, grid[1:2])

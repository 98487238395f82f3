"""Run lengths: equal bytes from the reference and C++, nothing written beside an output, damage found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from native_checks import cpu, native_test, reference, same
from torch import Tensor

from backstash.errors import DamagedPlanesError
from backstash.ops.layout import ZVC_CHUNK


def examples(n: int, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of this family's kernels for ``n`` elements."""
    x = (torch.arange(n) % 3).to(dtype)
    return {"rle_encode": (x,), "rle_decode": (*reference.rle_encode(x), torch.empty_like(x))}


SHORT = [*range(66), 127, 128, 129, 254, 255, 256, 257, 511]
LENGTHS = [*SHORT, *(k * ZVC_CHUNK + d for k in (1, 2) for d in (-64, -1, 0, 1, 63)), 17 * ZVC_CHUNK + 5]


def runs(n: int, dtype: torch.dtype, longest: int, seed: int) -> Tensor:
    """Runs of zeros and of random bits, of up to ``longest`` elements."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (n + 1,), generator=generator)
    lengths = lengths[: int((lengths.cumsum(0) < n).sum()) + 1]  # as many runs as fill n elements
    flags = (torch.arange(len(lengths)) + seed).remainder(2).bool().repeat_interleave(lengths)[:n]
    width = 8 * dtype.itemsize
    bits = torch.randint(1, 1 << min(width - 1, 62), (n,), generator=generator) << (64 - width) >> (64 - width)
    signed = {16: torch.int16, 32: torch.int32, 64: torch.int64}[width]
    return torch.where(flags, bits, 0).to(signed).view(dtype)


@native_test
@pytest.mark.parametrize("longest", [1, 3, 100, 600, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_bytes(dtype: torch.dtype, longest: int) -> None:
    for n in LENGTHS:
        for seed in (0, 1):
            x = runs(n, dtype, longest, seed)
            planes = cpu.rle_encode(x)
            assert all(map(same, planes, reference.rle_encode(x))), n
            out = torch.full((n + 2 * 64,), 7, dtype=dtype)
            cpu.rle_decode(*planes, out[64 : 64 + n])
            assert same(out[64 : 64 + n], x), n
            assert bool((out[:64] == 7).all() and (out[64 + n :] == 7).all())
            again = torch.empty_like(x)
            reference.rle_decode(*planes, again)
            assert same(again, x), n


@native_test
def test_on_two_threads() -> None:
    torch.set_num_threads(2)  # until the test ends
    x = runs(1_000_003, torch.float32, 50, 1)
    planes = cpu.rle_encode(x)
    assert all(map(same, planes, reference.rle_encode(x)))
    out = torch.empty_like(x)
    cpu.rle_decode(*planes, out)
    assert same(out, x)


@native_test
def test_garbage_is_damage_and_never_a_crash() -> None:
    generator = torch.Generator().manual_seed(0)
    n = 3 * ZVC_CHUNK + 100
    x = runs(n, torch.float32, 40, 0)
    for _ in range(300):
        planes = [plane.clone() for plane in cpu.rle_encode(x)]
        which = int(torch.randint(3, (1,), generator=generator))
        if which == 0:
            where = torch.randint(planes[0].numel(), (3,), generator=generator)
            planes[0][where] = torch.randint(256, (3,), generator=generator).to(torch.uint8)
        elif which == 1:
            where = torch.randint(planes[1].numel(), (1,), generator=generator)
            planes[1][where] = torch.randint(-(2**62), 2**62, (1,), generator=generator)
        else:
            planes[2] = planes[2][: int(torch.randint(planes[2].numel(), (1,), generator=generator))]
        results = []
        for ops in (cpu, reference):
            out = torch.full((n,), 7.0)
            try:
                ops.rle_decode(*planes, out)
            except DamagedPlanesError:
                assert bool((out == 7.0).all())
                results.append(None)
            else:
                results.append(out)
        assert (results[0] is None) == (results[1] is None)
        assert results[0] is None or same(results[0], results[1])

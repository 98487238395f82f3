"""8x8 cosine transforms: equal bytes from the reference and C++; damage is found."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from native_checks import SMALL_FLOATS, contents, cpu, flip, generator, isas_and, native_test, poisoned, reference, same

from backstash.errors import DamagedPlanesError


def examples(n: int, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of this family's kernels for ``n`` elements."""
    x, sizes = (torch.arange(n) % 3).to(dtype), (1, 4, n // 4, 1, [3] * 64)
    return {
        "dct_encode": (x, *sizes),
        "dct_decode": (*cpu.dct_encode(x, *sizes)[:4], *sizes, torch.empty_like(x)),
    }


@native_test
@pytest.mark.parametrize(("isa", "dtype"), isas_and(SMALL_FLOATS), indirect=["isa"])
def test_dct(dtype: torch.dtype, isa: str) -> None:
    for outer, height, width, inner in ((1, 1, 1, 1), (3, 8, 8, 1), (2, 13, 31, 1), (2, 9, 17, 5), (40, 14, 14, 3)):
        n = outer * height * width * inner
        sizes = outer, height, width, inner, [3 + i % 3 for i in range(64)]
        for x in (torch.randn(n, generator=generator(n)), torch.rand(n, generator=generator(n)) * 2**-140):
            planes, wanted = cpu.dct_encode(x.to(dtype), *sizes), reference.dct_encode(x.to(dtype), *sizes)
            assert all(same(plane, want) for plane, want in zip(planes, wanted, strict=True)), sizes[:4]
            out, untouched = poisoned(n, dtype, n % 3)
            again = torch.empty(n, dtype=dtype)
            cpu.dct_decode(*wanted[:4], *sizes, out)
            reference.dct_decode(*wanted[:4], *sizes, again)
            assert same(out, again) and untouched(), sizes[:4]
        any_bits = contents(n, dtype, 0.7, n)
        assert same(cpu.dct_encode(any_bits, *sizes)[4], reference.dct_encode(any_bits, *sizes)[4])
        mask, offsets, values, scales, _ = wanted
        damages = [
            (flip(mask, 0), offsets, values, scales),
            (mask, flip(offsets, 0), values, scales),
            (mask, offsets, torch.cat([values, mask[:1]]), scales),
            (mask, offsets, values, scales[:-1]),
            (mask[:-1], offsets, values, scales),
            (mask, offsets[:-1], values, scales),
        ]
        for damaged, ops in itertools.product(damages, (cpu, reference)):
            out, untouched = poisoned(n, dtype)
            with pytest.raises(DamagedPlanesError):
                ops.dct_decode(*damaged, *sizes, out)
            assert (out.view(torch.uint8) == 0xA5).all() and untouched()

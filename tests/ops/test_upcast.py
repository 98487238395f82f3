"""The upper halves of float32 numbers: equal bits from the reference, C++ and Triton, and nothing beside an output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from native_checks import AROUND_CHUNKS, TAILS, contents, cpu, generator, isas_and, native_test, reference, same
from torch import Tensor
from triton_checks import LENGTHS, launchers, on_device, triton_test


def examples(n: int, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of this family's kernel for ``n`` elements, of float32 whatever is asked for."""
    return {"upcast_encode": (upcast(n),)}


def upcast(n: int, seed: int = 0) -> Tensor:
    """Any bits in the upper halves, NaN payloads among them, and none in the lower ones."""
    words = torch.randint(-(1 << 15), 1 << 15, (n,), generator=generator(seed), dtype=torch.int32)
    return (words << 16).view(torch.float32)


def check(x: Tensor, others: int) -> None:
    for found, wanted in zip(cpu.upcast_encode(x), reference.upcast_encode(x), strict=True):
        assert same(found, wanted), x.numel()
        assert found.untyped_storage().nbytes() == found.nbytes
    upper, count = cpu.upcast_encode(x)
    assert int(count) == others
    assert others or same(upper.float(), x)


@native_test
@pytest.mark.parametrize(("isa", "offset"), isas_and([0, 1, 7]), indirect=["isa"])
def test_tails(offset: int, isa: str) -> None:
    for n in [*TAILS, *AROUND_CHUNKS, 1023, 1024, 1025, 65536 + 1025]:
        x = upcast(n + offset, seed=n)[offset:]
        check(x, 0)
        other = contents(n, torch.float32, seed=n, offset=offset)
        check(other, int(torch.count_nonzero(other.view(torch.int32) & 0xFFFF)))
        for at in {0, n // 2, n - 1} & {*range(n)}:
            changed = x.clone()
            changed.view(torch.int32)[at] |= 1 << at % 16
            check(changed, 1)


def test_every_bfloat16_number() -> None:
    x = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)
    for kernels in (reference, cpu):
        upper, count = kernels.upcast_encode(x)
        assert int(count) == 0 and same(upper.float(), x)


@native_test
@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize("isa", ["avx512", "avx2", "scalar"], indirect=True)
def test_large(threads: int, isa: str) -> None:
    """Many blocks, two threads, and an output that is large enough for streaming stores."""
    for n in (13 << 20, (13 << 20) + 77):
        x = upcast(1 << 16).repeat(n // (1 << 16) + 1)[:n]
        x.view(torch.int32)[[5, n // 2, n - 1]] |= 3
        upper, count = cpu.upcast_encode(x)
        assert int(count) == 3
        assert torch.equal(upper.view(torch.int16), (x.view(torch.int32) >> 16).to(torch.int16))


@triton_test
def test_upcast_on_triton() -> None:
    for n in LENGTHS:
        for x in (upcast(n, seed=n), contents(n, torch.float32, seed=n)):
            for found, wanted in zip(launchers.upcast_encode(on_device(x)), reference.upcast_encode(x), strict=True):
                assert same(found.cpu(), wanted), n

"""The C++ library: instruction sets, threads, memory that it may not touch, large tensors."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
import threading

import pytest
import torch
from native_checks import contents, cpu, isas_and, native_test, reference, same
from torch import Tensor

from backstash.codecs import Szp
from backstash.codecs.csr.reference import CSR_ROW
from backstash.ops import backends
from backstash.ops.bits import bits_of
from backstash.ops.cpu import library
from backstash.ops.layout import ZVC_CHUNK
from backstash.saved import Test

THRESHOLDS = [-1.7 + 0.25 * i for i in range(15)]


def at_page_end(x: Tensor, keep: list[mmap.mmap]) -> Tensor:
    """A copy of ``x`` right before a page that cannot be read. ``keep`` holds its memory."""
    page = mmap.PAGESIZE
    pages = x.nbytes // page + 1
    memory = mmap.mmap(-1, (pages + 1) * page)
    keep.append(memory)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    guard = ctypes.c_void_p(whole.data_ptr() + pages * page)
    assert ctypes.CDLL(None).mprotect(guard, ctypes.c_size_t(page), 0) == 0
    copy = whole[pages * page - x.nbytes : pages * page].view(x.dtype)
    return copy.copy_(x)


@native_test
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mprotect and mmap as Linux has them")
@pytest.mark.parametrize(("isa", "width"), isas_and([4, 2, 8]), indirect=["isa"])
def test_nothing_is_read_or_written_past_the_planes(width: int, isa: str) -> None:
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[width]
    for n, random in itertools.product((*range(1, 140, 3), 64, 128, 192, 4096, 4100), (True, False)):
        keep: list[mmap.mmap] = []
        almost_full = torch.ones(n, dtype=dtype)
        almost_full[n - n % 5 :] = 0
        x = at_page_end(contents(n, dtype, seed=n) if random else almost_full, keep)
        planes = [at_page_end(plane, keep) for plane in cpu.zvc_encode(x)]
        out = at_page_end(torch.empty(n, dtype=dtype), keep)
        cpu.zvc_decode(*planes, out)
        assert same(out, x)
        sparse = [at_page_end(plane, keep) for plane in cpu.csr_encode(x)]
        cpu.csr_decode(*sparse, out)
        assert same(out, x)
        cpu.bitmask_encode(x, Test.NOT_LE.code, 0.0, 0.0)
        cpu.bitmask_decode(planes[0], out, 1.0, 0.0)
        if width < 8:
            for error in (0.1, 1e-9):
                grid = Szp(error).grid(x)
                bounded = [at_page_end(plane, keep) for plane in cpu.szp_encode(x, grid)]
                cpu.szp_decode(*bounded, grid[1:2], out)
            cpu.szp_range(x)
            for bits in (3, 4):
                coded = [at_page_end(plane, keep) for plane in cpu.exponents_encode(x, bits)]
                cpu.exponents_decode(*coded, bits, out)
                assert same(out, x)
            for bits in (1, 2, 4, 8):
                groups = [at_page_end(plane, keep) for plane in cpu.blockquant_encode(x, bits, 16, True, 0)[:2]]
                cpu.blockquant_decode(*groups, bits, 16, out)
        for bits in range(1, 5) if width < 8 else ():
            codes = at_page_end(cpu.fewbit_encode(x, THRESHOLDS[: 2**bits - 1], bits)[0], keep)
            cpu.fewbit_decode(codes, [1.0] * 2**bits, bits, out)
        integer = at_page_end(bits_of(x).clone(), keep)
        for bits in (1, 2, 4, 5, 8, 16):
            packed = at_page_end(cpu.narrow_encode(integer, bits, 0), keep)
            cpu.narrow_decode(packed, bits, 0, integer)


@native_test
@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize(("isa", "dtype"), isas_and([torch.float32, torch.bfloat16]), indirect=["isa"])
def test_large(dtype: torch.dtype, threads: int, isa: str) -> None:
    """Many blocks, two threads, outputs large enough for streaming stores, with and without the alignment for them."""
    n = (27 << 20) // dtype.itemsize + 4097
    bits = contents(1 << 18, dtype, density=0.95).repeat(n // (1 << 18) + 2)[:n]
    expected = bits_of(bits) != 0
    mask = cpu.bitmask_encode(bits, Test.NONZERO.code, 0.0, 0.0)
    counts = torch.nn.functional.pad(expected, (0, -n % ZVC_CHUNK)).view(-1, ZVC_CHUNK).sum(1)
    planes = cpu.zvc_encode(bits)
    assert same(planes[0], mask)
    assert same(planes[1], counts.cumsum(0) - counts)
    assert same(planes[2], bits[expected])
    sparse = cpu.csr_encode(bits)
    assert same(sparse[2], planes[2])
    assert same(sparse[0], (expected.nonzero().view(-1) % CSR_ROW).to(torch.uint8))
    assert int(sparse[1][-1]) == planes[2].numel()
    for offset in (0, 1):
        out = torch.full((n + offset + 64,), 3.0, dtype=dtype)
        cpu.zvc_decode(*planes, out[offset : n + offset])
        assert same(out[offset : n + offset], bits)
        assert (out[n + offset :] == 3).all() and (out[:offset] == 3).all()
        out.fill_(3.0)
        cpu.csr_decode(*sparse, out[offset : n + offset])
        assert same(out[offset : n + offset], bits)
        assert (out[n + offset :] == 3).all() and (out[:offset] == 3).all()
        cpu.bitmask_decode(mask, out[offset : n + offset], 1.0, -2.0)
        assert torch.equal(out[offset : n + offset] == 1, expected)
        assert (out[n + offset :] == 3).all() and (out[:offset] == 3).all()


@native_test
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_many_threads_at_once(threads: int, isa: str) -> None:
    """Autograd decodes on its own threads: the library keeps no state between or during calls."""
    inputs = [contents(200_000, torch.float32, seed=seed) for seed in range(4)]
    good = [False] * 4

    def work(i: int) -> None:
        for _ in range(5):
            out = torch.empty_like(inputs[i])
            cpu.zvc_decode(*cpu.zvc_encode(inputs[i]), out)
            good[i] = same(out, inputs[i])

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(good)


@native_test
def test_what_the_library_does_not_take_goes_to_the_reference() -> None:
    small = torch.tensor([0, 3, 0, 5], dtype=torch.int8)
    for plane, expected in zip(cpu.zvc_encode(small), reference.zvc_encode(small), strict=True):
        assert same(plane, expected)
    out = torch.empty_like(small)
    cpu.zvc_decode(*cpu.zvc_encode(small), out)
    assert same(out, small)
    pair = torch.tensor([0, 3], dtype=torch.int8)
    assert int(cpu.binary_encode(small, pair)[1]) == 1
    assert same(
        cpu.bitmask_encode(small.long(), Test.GT.code, 3, 0), reference.bitmask_encode(small.long(), Test.GT.code, 3, 0)
    )
    geometry = ([4] * 4, [2] * 4, [2] * 4, [2] * 4, [0] * 4, [1] * 4)
    indices = torch.zeros(16, dtype=torch.int64)
    assert int(cpu.window_encode(indices, 1, *geometry)[1]) == 15


@native_test
def test_advise_huge_changes_nothing() -> None:
    for n in (0, 10, 3 << 20):
        x = torch.arange(n)
        backends.advise_huge(x)
        assert torch.equal(x, torch.arange(n))


@native_test
def test_isa_is_capped_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKSTASH_ISA", "sse9")
    with pytest.raises(ValueError, match="sse9"):
        library.load.__wrapped__()
    assert set(library.build_info()) == {"path", "compiler", "openmp", "isa"}
    assert library.build_info()["isa"] in library.ISAS


@native_test
def test_a_library_of_another_version_says_so() -> None:
    with pytest.raises(OSError, match=r"bs_of_tomorrow.*1 of 2 are missing.*python setup.py build_native"):
        library.functions(bs_isa="i()", bs_of_tomorrow="()")

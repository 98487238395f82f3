"""The C++ kernels against the reference: equal bytes, on every instruction set that this machine has."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thinning import star
from torch import Tensor

from backstash.codecs import Szp
from backstash.errors import DamagedPlanesError
from backstash.ops import cpu, reference
from backstash.ops.cpu import library
from backstash.ops.formats import FORMATS, SCALED
from backstash.ops.schema import CSR_ROW, ZVC_CHUNK, bytes_for
from backstash.saved import Test

pytestmark = pytest.mark.skipif(
    not cpu.available(), reason="the native kernels are not built: run 'python setup.py build_native'"
)

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
TAILS = range(131)
AROUND_CHUNKS = [k * ZVC_CHUNK + d for k in (1, 2, 3) for d in (-65, -64, -63, -1, 0, 1, 63, 64, 65)]
PADDING = 64  # elements around an output that a kernel must not touch
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

# Of the few bits that matter: infinity, NaN, quiet and signalling and with a payload, largest, subnormals, one.
SPECIALS = {
    torch.float16: [0x7C00, 0x7E00, 0x7D23, 0x7BFF, 0x0001, 0x03FF, 0x0400, 0x3C00],
    torch.bfloat16: [0x7F80, 0x7FC0, 0x7F91, 0x7F7F, 0x0001, 0x007F, 0x0080, 0x3F80],
    torch.float32: [0x7F800000, 0x7FC00000, 0x7F812345, 0x7F7FFFFF, 0x1, 0x7FFFFF, 0x800000, 0x3F800000],
    torch.float64: [0x7FF << 52, 0xFFF << 51, (0x7FF << 52) + 99, (0x7FF << 52) - 1, 1, 1 << 51, 1 << 52, 0x3FF << 52],
}
BEST_FIRST = sorted(library.ISAS, key=lambda name: name != cpu.isa()) if cpu.available() else library.ISAS
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture(params=library.ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = cpu.isa()
    if cpu.set_isa(request.param) != request.param:
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    cpu.set_isa(before)


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """One thread, so that the reference does not wait for a busy core, unless the test asks for another number."""
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request, "param", 1))
    yield torch.get_num_threads()
    torch.set_num_threads(before)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def contents(n: int, dtype: torch.dtype, density: float = 0.5, seed: int = 0, offset: int = 0) -> Tensor:
    """Zeros, and with probability ``density`` something else: -0.0, NaN payloads, inf, subnormals, arbitrary bits."""
    g = generator(seed)
    total = n + offset
    width = dtype.itemsize
    bits = torch.randint(-(1 << 62), 1 << 62, (total,), generator=g)
    signs = (torch.randint(2, (total,), generator=g)) << (8 * width - 1)
    specials = torch.tensor(SPECIALS[dtype])[torch.randint(8, (total,), generator=g)] | signs
    kind = torch.randint(4, (total,), generator=g)
    values = torch.where(kind == 0, specials, torch.where(kind == 1, signs, bits))
    values = torch.where(torch.rand(total, generator=g) < density, values, 0)
    small = (values << (64 - 8 * width) >> (64 - 8 * width)).to(SIGNED[width])
    return small.view(dtype)[offset:]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def poisoned(n: int, dtype: torch.dtype, offset: int = 0) -> tuple[Tensor, Callable[[], bool]]:
    """An output full of garbage, ``offset`` elements off alignment, and a check that nothing around it was written."""
    around = torch.full(((2 * PADDING + n + offset) * dtype.itemsize,), 0xA5, dtype=torch.uint8)
    start = (PADDING + offset) * dtype.itemsize
    out = around[start : start + n * dtype.itemsize].view(dtype)

    def untouched() -> bool:
        edges = torch.cat([around[:start], around[start + n * dtype.itemsize :]])
        return bool((edges == 0xA5).all())

    return out, untouched


def bounds(test: Test) -> tuple[float, float]:
    return {Test.NOT_LE: (0.0, 0.0), Test.GT: (-0.1, 0.0)}.get(test, (-1.1, 0.7))


# --- bitmask


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("patterns", [1, 2, 3, 9])
def test_look(dtype: torch.dtype, patterns: int) -> None:
    values = torch.arange(patterns).to(dtype)
    x = values[torch.randint(patterns, (10_000,), generator=generator())]
    x[:patterns] = values
    for start, layout in itertools.product(range(4), [(1, 9990, 1), (32, 32, 300), (2, 1, 4)]):
        assert cpu.look(x[start:], *layout) == reference.look(x[start:], *layout)
    assert cpu.look(x, 1, 10_000, 1)[1] == min(patterns, 3)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("test", Test)
def test_bitmask_encode(test: Test, dtype: torch.dtype, isa: str) -> None:
    for n, offset in [*((n, 0) for n in TAILS), (63, 1), (200, 1), (200, 3), (4097, 5)]:
        x = contents(n, dtype, density=0.9, seed=n, offset=offset)
        expected = reference.bitmask_encode(x, test.code, *bounds(test))
        assert same(cpu.bitmask_encode(x, test.code, *bounds(test)), expected), (n, offset)


@pytest.mark.parametrize("dtype", FLOATS)
def test_bitmask_bounds(dtype: torch.dtype, isa: str) -> None:
    x = contents(500, dtype, density=0.9)
    rounded = torch.tensor([0.1, 0.3, 0.0, -0.0], dtype=dtype)
    x[:12] = torch.cat([rounded, rounded.nextafter(rounded + 1), rounded.nextafter(rounded - 1)])
    pairs = [(0.1, 0.3), (-0.0, 0.0), (-math.inf, math.inf), (math.nan, 1.0), (1e300, 0.0)]
    for test, (lo, hi) in itertools.product(Test, pairs):
        mask, expected = (ops.bitmask_encode(x, test.code, lo, hi) for ops in (cpu, reference))
        assert same(mask, expected), (test, lo, hi)


@pytest.mark.parametrize("test", Test)
def test_bitmask_every_half(test: Test, isa: str) -> None:
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        planes = [ops.bitmask_encode(x.view(dtype), test.code, *bounds(test)) for ops in (cpu, reference)]
        assert same(*planes), dtype


@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool, torch.uint8, torch.int64])
def test_bitmask_decode(dtype: torch.dtype, isa: str) -> None:
    values = (1.0, 0.0) if dtype in (torch.bool, torch.uint8, torch.int64) else (-0.0, math.inf)
    for n, offset in [*((n, 0) for n in TAILS), (63, 1), (200, 1), (4097, 5)]:
        mask = torch.randint(256, (bytes_for(n, 1),), generator=generator(n), dtype=torch.uint8)
        out, untouched = poisoned(n, dtype, offset)
        expected = torch.empty(n, dtype=dtype)
        cpu.bitmask_decode(mask, out, *values)
        reference.bitmask_decode(mask, expected, *values)
        assert same(out, expected) and untouched(), (n, offset)


@pytest.mark.parametrize("wrong", [-1, 1])
def test_masks_of_another_size_are_refused(wrong: int) -> None:
    mask = torch.zeros(bytes_for(1000, 1) + wrong, dtype=torch.uint8)
    with pytest.raises(DamagedPlanesError, match="126" if wrong == 1 else "124"):
        cpu.bitmask_decode(mask, torch.empty(1000), 1.0, 0.0)
    with pytest.raises(DamagedPlanesError, match="'mask'"):
        cpu.binary_decode(mask, torch.zeros(2), torch.empty(1000))


# --- binary


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.int16])
def test_binary(dtype: torch.dtype, isa: str) -> None:
    pairs = torch.tensor([0, -(1 << (8 * dtype.itemsize - 1)), 7, -1]).to(SIGNED[dtype.itemsize]).view(dtype)
    for (i, j), n in itertools.chain(
        itertools.product([(0, 1)], TAILS), itertools.product(itertools.permutations(range(4), 2), [100, 4097])
    ):
        pair = pairs[[i, j]]
        x = reference.bits_of(pair)[torch.randint(2, (n,), generator=generator(n))].view(dtype)
        mask, mismatches = cpu.binary_encode(x, pair)
        expected, none = reference.binary_encode(x, pair)
        assert same(mask, expected) and same(mismatches, none) and int(mismatches) == 0
        for offset in (0, 1):
            out, untouched = poisoned(n, dtype, offset)
            cpu.binary_decode(mask, pair, out)
            assert same(out, x) and untouched()


@pytest.mark.parametrize("dtype", FLOATS)
def test_binary_counts_mismatches(dtype: torch.dtype, isa: str) -> None:
    for n in (1, 63, 64, 65, 127, 300, 4097):
        x = contents(n, dtype, seed=n, offset=1)
        pair = torch.tensor([0.0, -0.0], dtype=dtype)
        planes, expected = cpu.binary_encode(x, pair), reference.binary_encode(x, pair)
        assert same(planes[0], expected[0]) and same(planes[1], expected[1])
        assert n < 300 or int(planes[1]) > 0


# --- ZVC


def check_zvc(x: Tensor, out_offset: int = 0) -> None:
    planes = cpu.zvc_encode(x)
    case = x.numel(), x.storage_offset(), out_offset, f"{planes[2].numel()} not zero"
    for plane, expected in zip(planes, reference.zvc_encode(x), strict=True):
        assert same(plane, expected), case
        assert plane.untyped_storage().nbytes() == plane.numel() * plane.element_size(), case
    out, untouched = poisoned(x.numel(), x.dtype, out_offset)
    cpu.zvc_decode(*planes, out)
    assert same(out, x) and untouched(), case


@pytest.mark.parametrize("dtype", FLOATS)
def test_zvc_tails(dtype: torch.dtype, isa: str) -> None:
    for n in [*TAILS, *AROUND_CHUNKS]:
        check_zvc(contents(n, dtype, seed=n))
    for n, offset in itertools.product((1, 64, 100, 4096, 4200), (1, 2, 7)):
        check_zvc(contents(n, dtype, seed=n, offset=offset), out_offset=offset)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.int16, torch.complex64])
def test_zvc_densities(dtype: torch.dtype, isa: str) -> None:
    bits = {2: torch.float16, 4: torch.float32, 8: torch.float64}[dtype.itemsize]
    for n, density in itertools.product((130, 3 * ZVC_CHUNK + 77), (0.0, 0.001, 0.1, 0.9, 1.0)):
        check_zvc(contents(n, bits, density).view(dtype))


@SETTINGS
@given(
    runs=st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), max_size=12),
    dtype=st.sampled_from(FLOATS),
    offset=st.integers(0, 3),
)
def test_zvc_runs(runs: list[tuple[bool, int]], dtype: torch.dtype, offset: int) -> None:
    bits = torch.cat([torch.zeros(offset), *(torch.full((n,), float(on)) for on, n in runs)]).to(dtype)
    before = cpu.isa()
    for name in library.ISAS:
        cpu.set_isa(name)
        check_zvc(bits[offset:], out_offset=offset)
    cpu.set_isa(before)


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


def flip(plane: Tensor, index: int, bit: int = 0) -> Tensor:
    damaged = plane.clone()
    damaged[index] ^= 1 << bit
    return damaged


@pytest.mark.parametrize("n", [100, 4096, 4097, 3 * ZVC_CHUNK + 100])
@pytest.mark.parametrize("dtype", FLOATS)
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


def test_zvc_empty() -> None:
    check_zvc(torch.empty(0))
    with pytest.raises(DamagedPlanesError):
        cpu.zvc_decode(
            torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.int64), torch.ones(1), torch.empty(0)
        )


def test_mask_bits_past_the_end_are_ignored(isa: str) -> None:
    x = contents(61, torch.float32)
    mask, offsets, values = cpu.zvc_encode(x)
    mask[-1] |= 0xE0
    out, _ = poisoned(61, torch.float32)
    cpu.zvc_decode(mask, offsets, values, out)
    assert same(out, x)


# --- CSR


def check_csr(x: Tensor, out_offset: int = 0) -> None:
    planes = cpu.csr_encode(x)
    case = x.numel(), x.storage_offset(), out_offset, f"{planes[2].numel()} not zero"
    for plane, expected in zip(planes, reference.csr_encode(x), strict=True):
        assert same(plane, expected), case
        assert plane.untyped_storage().nbytes() == plane.numel() * plane.element_size(), case
    out, untouched = poisoned(x.numel(), x.dtype, out_offset)
    cpu.csr_decode(*planes, out)
    assert same(out, x) and untouched(), case


@pytest.mark.parametrize("dtype", FLOATS)
def test_csr_tails(dtype: torch.dtype, isa: str) -> None:
    for n in [*TAILS, *(k * CSR_ROW + d for k in (1, 2, 8, 16, 17) for d in (-65, -64, -1, 0, 1, 63, 64, 65))]:
        check_csr(contents(n, dtype, seed=n))
    for n, offset in itertools.product((1, 64, 100, 4096, 4200), (1, 2, 7)):
        check_csr(contents(n, dtype, seed=n, offset=offset), out_offset=offset)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.int16, torch.complex64])
def test_csr_densities(dtype: torch.dtype, isa: str) -> None:
    bits = {2: torch.float16, 4: torch.float32, 8: torch.float64}[dtype.itemsize]
    for n, density in itertools.product((130, 300 * CSR_ROW + 77), (0.0, 0.001, 0.1, 0.9, 1.0)):
        check_csr(contents(n, bits, density).view(dtype))


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


@pytest.mark.parametrize("n", [100, 256, 257, 4097, 600 * CSR_ROW + 100])
@pytest.mark.parametrize("dtype", FLOATS)
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


def test_csr_empty() -> None:
    check_csr(torch.empty(0))
    for ops in (cpu, reference):
        with pytest.raises(DamagedPlanesError):
            ops.csr_decode(
                torch.empty(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32), torch.ones(1), torch.empty(0)
            )


# --- fewbit


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


FEWBIT_FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", FEWBIT_FLOATS)
@pytest.mark.parametrize("bits", range(1, 5))
def test_fewbit_tails(bits: int, dtype: torch.dtype, isa: str) -> None:
    for n in [*TAILS, 1023, 1024, 1025, 3000]:
        x = torch.randn(n + 1, generator=generator(n)).to(dtype)
        assert check_fewbit(x[1:], edges(bits), bits, offset=n % 3) == 0
        check_fewbit(contents(n, dtype, density=0.9, seed=n, offset=n % 3), edges(bits), bits)


THRESHOLDS: list[list[float]] = [
    *([], [0.0], [-0.0], [0.1], [-1e-45, 1e-45], [-1e-9, 0.0, 1e-9], [1.0, 1.001, 70000.0], [-3.4e38, 0.3, math.inf])
]


@pytest.mark.parametrize("dtype", FEWBIT_FLOATS)
def test_fewbit_thresholds_between_the_numbers_of_a_dtype(dtype: torch.dtype, isa: str) -> None:
    numbers = torch.tensor([0.0, 0.1, 0.3, 1.0, 1.001, 1e-9, 1e-45, 70000.0, 3.4e38, math.inf]).to(dtype)
    bits = reference.bits_of(numbers)
    largest = torch.iinfo(bits.dtype).max
    near = torch.cat([bits, bits + 1, (bits - 1).clamp(min=0)]).clamp(max=largest)
    x = torch.cat([near, near | torch.iinfo(bits.dtype).min]).view(dtype)
    for thresholds in THRESHOLDS:
        check_fewbit(x, torch.tensor(thresholds).tolist(), 2)


@pytest.mark.parametrize("bits", range(1, 5))
def test_fewbit_every_half(bits: int, isa: str) -> None:
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        assert check_fewbit(x.view(dtype), edges(bits), bits) == int((~x.view(dtype).isfinite()).sum())


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


@pytest.mark.parametrize("wrong", [-1, 1])
def test_fewbit_codes_of_another_size_are_refused(wrong: int) -> None:
    packed = torch.zeros(bytes_for(999, 3) + wrong, dtype=torch.uint8)
    with pytest.raises(DamagedPlanesError, match="'packed'"):
        cpu.fewbit_decode(packed, [0.0] * 8, 3, torch.empty(999))


# --- szp


def check_szp(x: Tensor, error: float, mode: str = "abs", offset: int = 0) -> None:
    grid = Szp(error, mode).grid(x)
    assert same(cpu.szp_range(x), reference.szp_range(x))
    planes = cpu.szp_encode(x, grid)
    for plane, expected in zip(planes, reference.szp_encode(x, grid), strict=True):
        assert same(plane, expected), (x.numel(), error)
        assert plane.untyped_storage().nbytes() == plane.numel() * plane.element_size()
    out, untouched = poisoned(x.numel(), x.dtype, offset)
    again = torch.empty_like(x)
    cpu.szp_decode(*planes, grid[1:2], out)
    reference.szp_decode(*planes, grid[1:2], again)
    assert same(out, again) and untouched()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_szp(dtype: torch.dtype, isa: str) -> None:
    for n in [*TAILS, *AROUND_CHUNKS[:10]]:
        normal = torch.randn(n, generator=generator(n)).to(dtype)
        check_szp(normal, (0.3, 0.01, 1e-4, 1e-7)[n % 4], offset=n % 3)
        check_szp(normal.abs(), (0.01, 0.3)[n % 2], "rel")
        check_szp(contents(n, dtype, density=0.8, seed=n, offset=n % 3), (1e-3, 3.0, 1e-40, 1e30)[n % 4])


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


@pytest.mark.parametrize("n", [1, 100, 4096, 3 * ZVC_CHUNK + 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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


# --- blockquant


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_blockquant(bits: int, dtype: torch.dtype, isa: str) -> None:
    for n, group_size in itertools.product((*TAILS[:40], 255, 257, 4097, 70_000), (16, 256, 4096)):
        stochastic = n % 2 == 0
        for x in (torch.randn(n, generator=generator(n)) * 10, torch.rand(n, generator=generator(n)) * 2**-130):
            planes = cpu.blockquant_encode(x.to(dtype), bits, group_size, stochastic, 7)
            wanted = reference.blockquant_encode(x.to(dtype), bits, group_size, stochastic, 7)
            assert all(same(plane, want) for plane, want in zip(planes, wanted, strict=True)), (n, group_size)
            assert int(planes[2]) == 0
            out, untouched = poisoned(n, dtype, n % 3)
            again = torch.empty(n, dtype=dtype)
            cpu.blockquant_decode(*wanted[:2], bits, group_size, out)
            reference.blockquant_decode(*wanted[:2], bits, group_size, again)
            assert same(out, again) and untouched(), (n, group_size)
        any_bits = contents(n, dtype, 0.7, n)
        refused = cpu.blockquant_encode(any_bits, bits, group_size, stochastic, 0)[2]
        assert same(refused, reference.blockquant_encode(any_bits, bits, group_size, stochastic, 0)[2])


@pytest.mark.parametrize("threads", [2], indirect=True)
def test_blockquant_large(threads: int, isa: str) -> None:
    """Many blocks, and an output large enough for streaming stores, with and without the alignment for them."""
    x = torch.randn(7 << 20, generator=generator())[: (7 << 20) - 3]
    codes, ranges, _ = cpu.blockquant_encode(x, 4, 256, False, 0)
    start = 3 << 16
    assert same(cpu.blockquant_encode(x[start:], 4, 256, False, 0)[0], codes[start // 2 :])
    want = torch.empty_like(x)
    cpu.blockquant_decode(codes, ranges, 4, 256, want)
    for offset in (0, 1):
        out = torch.full((x.numel() + offset + 64,), 3.0)
        cpu.blockquant_decode(codes, ranges, 4, 256, out[offset : x.numel() + offset])
        assert same(out[offset : x.numel() + offset], want)
        assert (out[x.numel() + offset :] == 3).all() and (out[:offset] == 3).all()


# --- dct


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
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


# --- narrow


def check_narrow(x: Tensor, bits: int, base: int, offset: int = 0) -> None:
    packed = cpu.narrow_encode(x, bits, base)
    assert same(packed, reference.narrow_encode(x, bits, base)), (x.numel(), bits, base)
    out, untouched = poisoned(x.numel(), x.dtype, offset)
    expected = torch.empty_like(x)
    cpu.narrow_decode(packed, bits, base, out)
    reference.narrow_decode(packed, bits, base, expected)
    assert same(out, expected) and untouched(), (x.numel(), bits, base)


def integers(n: int, dtype: torch.dtype, seed: int) -> Tensor:
    if dtype is torch.bool:
        return torch.randint(2, (n,), generator=generator(seed)).bool()
    return torch.randint(-(1 << 62), 1 << 62, (n,), generator=generator(seed)).to(dtype)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_narrow_widths(dtype: torch.dtype, isa: str) -> None:
    for n in (0, 1, 7, 8, 9, 31, 64, 1023, 1024, 1025):
        x = integers(n, dtype, n)
        for bits, base in itertools.product(range(1, 33), (0, -5, 1 << 40)):  # what does not fit wraps, in both
            check_narrow(x, bits, base, offset=n % 2)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8, 13, 16, 32])
def test_narrow_tails(bits: int, isa: str) -> None:
    for n in TAILS:
        x = torch.randint(1 << bits, (n + 1,), generator=generator(n))[1:] - 100
        packed = cpu.narrow_encode(x, bits, -100)
        assert same(packed, reference.narrow_encode(x, bits, -100))
        out, untouched = poisoned(n, torch.int64)
        cpu.narrow_decode(packed, bits, -100, out)
        assert same(out, x) and untouched()


@pytest.mark.parametrize("wrong", [-1, 1])
def test_fields_of_another_size_are_refused(wrong: int) -> None:
    packed = torch.zeros(bytes_for(999, 3) + wrong, dtype=torch.uint8)
    with pytest.raises(DamagedPlanesError, match="'packed'"):
        cpu.narrow_decode(packed, 3, 0, torch.empty(999, dtype=torch.int64))
    packed = torch.zeros(50 + wrong, dtype=torch.uint8)
    with pytest.raises(DamagedPlanesError, match="'packed'"):
        cpu.window_decode(packed, 1, [40], [20], [4], [2], [1], [1], torch.empty(200, dtype=torch.int64))


# --- window


def check_window(indices: Tensor, inner: int, geometry: tuple[list[int], ...], offset: int = 0) -> int:
    packed, bad = cpu.window_encode(indices, inner, *geometry)
    expected, expected_bad = reference.window_encode(indices, inner, *geometry)
    assert same(bad, expected_bad) and same(packed, expected)
    out, untouched = poisoned(indices.numel(), torch.int64, offset)
    again = torch.empty_like(indices)
    cpu.window_decode(packed, inner, *geometry, out)
    reference.window_decode(packed, inner, *geometry, again)
    assert same(out, again) and untouched()
    assert int(bad) > 0 or same(out, indices)
    return int(bad)


@st.composite
def poolings(draw: st.DrawFn) -> tuple[list[int], ...]:
    """input, output, kernel, stride, padding and dilation, as torch allows them, windows wider than the input too."""
    fields: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, 3))):
        kernel, stride, dilation = (draw(st.integers(1, 5)) for _ in range(3))
        padding = draw(st.integers(0, kernel // 2))
        reach = (kernel - 1) * dilation + 1
        size = draw(st.integers(max(1, reach - 2 * padding), reach + 12))
        fields.append((size, (size + 2 * padding - reach) // stride + 1, kernel, stride, padding, dilation))
    return tuple(list(field) for field in zip(*fields, strict=True))


def every_window_meets_the_input(geometry: tuple[list[int], ...]) -> bool:
    """Whether no window lies in the padding alone, around the input: of such a one torch's index is no position."""
    return all(
        any(0 <= o * stride - padding + j * dilation < size for j in range(kernel))
        for size, outputs, kernel, stride, padding, dilation in zip(*geometry, strict=True)
        for o in range(outputs)
    )


@SETTINGS
@given(geometry=poolings(), inner=st.integers(1, 5), outer=st.integers(1, 4), seed=st.integers(0, 99))
def test_window(geometry: tuple[list[int], ...], inner: int, outer: int, seed: int) -> None:
    input_size, output_size, kernel, stride, padding, dilation = geometry
    pool = {1: torch.max_pool1d_with_indices, 2: torch.ops.aten.max_pool2d_with_indices}.get(len(kernel))
    pool = pool or torch.ops.aten.max_pool3d_with_indices
    x = torch.rand(outer, inner, *input_size, generator=generator(seed))
    _, indices = pool(x, kernel, stride, padding, dilation, False)
    assert list(indices.shape[2:]) == output_size
    garbage = torch.randint(-9, math.prod(input_size) + 9, (indices.numel(),), generator=generator(seed))
    garbage[::7] *= 1 << 40
    regular = every_window_meets_the_input(geometry)
    before = cpu.isa()
    for name in library.ISAS:
        cpu.set_isa(name)
        assert check_window(indices.flatten(), 1, geometry) == 0 or not regular
        assert check_window(indices.movedim(1, -1).flatten(), inner, geometry, offset=1) == 0 or not regular
        check_window(garbage, inner, geometry)
        check_window(garbage[1:], 1, geometry)
    cpu.set_isa(before)


@pytest.mark.parametrize("kernel", [2, 3])
@pytest.mark.parametrize("inner", [1, 7])
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_window_blocks(kernel: int, inner: int, threads: int, isa: str) -> None:
    """Larger than the blocks that kernels work in (1024 and 65536 elements), so that the walk starts in the middle."""
    x = torch.rand(3, inner, 113, 97, generator=generator(kernel)).repeat(1, 1, 2, 1)
    args = [kernel, kernel], [2, 2], [kernel // 2] * 2, [1, 1]
    _, indices = torch.ops.aten.max_pool2d_with_indices(x, *args)
    geometry = ([226, 97], list(indices.shape[2:]), *args)
    assert check_window(indices.flatten(), 1, geometry) == 0
    assert check_window(indices.movedim(1, -1).flatten(), inner, geometry) == 0
    tall = indices.flatten().repeat(8)[: (1 << 16) + 1030]
    assert check_window(tall, 1, geometry) == 0


def test_window_wider_than_the_input(isa: str) -> None:
    """Two positions of such a window are at the same distance from its origin in the flat input."""
    for sides in itertools.product((2, 5), repeat=3):
        x = torch.rand(5, 4, *sides, generator=generator())
        args = [3] * 3, [1] * 3, [1] * 3, [1] * 3
        _, indices = torch.ops.aten.max_pool3d_with_indices(x, *args)
        assert check_window(indices.flatten(), 1, (list(sides), list(indices.shape[2:]), *args)) == 0


def test_window_more_positions_than_are_tabulated(isa: str) -> None:
    x = torch.rand(2, 3, 100, 80, generator=generator())
    args = [90, 70], [1, 1], [0, 0], [1, 1]
    _, indices = torch.ops.aten.max_pool2d_with_indices(x, *args)
    assert check_window(indices.flatten(), 1, ([100, 80], [11, 11], *args)) == 0


# --- all together


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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mprotect and mmap as Linux has them")
@pytest.mark.parametrize("width", [2, 4, 8])
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
            for bits in (1, 2, 4, 8):
                groups = [at_page_end(plane, keep) for plane in cpu.blockquant_encode(x, bits, 16, True, 0)[:2]]
                cpu.blockquant_decode(*groups, bits, 16, out)
            sizes = 1, 1, n, 1, [3] * 64
            images = [at_page_end(plane, keep) for plane in cpu.dct_encode(x, *sizes)[:4]]
            cpu.dct_decode(*images, *sizes, out)
        for bits in range(1, 5) if width < 8 else ():
            codes = at_page_end(cpu.fewbit_encode(x, edges(bits), bits)[0], keep)
            cpu.fewbit_decode(codes, [1.0] * 2**bits, bits, out)
        integer = at_page_end(reference.bits_of(x).clone(), keep)
        for bits in (1, 2, 4, 5, 8, 16):
            packed = at_page_end(cpu.narrow_encode(integer, bits, 0), keep)
            cpu.narrow_decode(packed, bits, 0, integer)


@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large(dtype: torch.dtype, threads: int, isa: str) -> None:
    """Many blocks, two threads, outputs large enough for streaming stores, with and without the alignment for them."""
    n = (27 << 20) // dtype.itemsize + 4097
    bits = contents(1 << 18, dtype, density=0.95).repeat(n // (1 << 18) + 2)[:n]
    expected = reference.bits_of(bits) != 0
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


@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
def test_large_integers(threads: int, isa: str) -> None:
    x = torch.randint(-8, 8, ((1 << 20) + 33,), generator=generator())
    for bits in (4, 5):
        out = torch.empty_like(x)
        packed = cpu.narrow_encode(x, bits, -8)
        cpu.narrow_decode(packed, bits, -8, out)
        assert torch.equal(out, x)
        # A block starts at a whole byte: what a slice encodes to is a slice of what all encodes to.
        start = 3 << 16
        assert same(cpu.narrow_encode(x[start:], bits, -8), packed[start * bits // 8 :])


# --- minifloat


MINIFLOATS = [
    (f, d) for f in FORMATS for d in (torch.float32, torch.float16, torch.bfloat16) if cpu._takes(FORMATS[f], d)
]
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


@pytest.mark.parametrize(("format", "dtype"), MINIFLOATS, ids=str)
def test_minifloat(format: str, dtype: torch.dtype, isa: str) -> None:
    check_minifloat(numbers(dtype), format)
    for n, offset in [*((n, n % 3) for n in (*TAILS, *WORDS_EDGES))]:
        check_minifloat(contents(n, dtype, 0.9, seed=n, offset=offset), format, offset)


@pytest.mark.parametrize(("format", "dtype"), [(f, d) for f, d in MINIFLOATS if f in SCALED], ids=str)
@pytest.mark.parametrize("group_size", [16, 256, 4096])
def test_minifloat_of_groups(group_size: int, format: str, dtype: torch.dtype, isa: str) -> None:
    every = numbers(dtype)
    for x in (every, every[torch.randperm(every.numel(), generator=generator())], *(every[7 : 7 + n] for n in TAILS)):
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
    for plane, expected in zip(planes, reference.zvc_minifloat_encode(x, format), strict=True):
        assert same(plane, expected), x.numel()
        assert plane.untyped_storage().nbytes() == plane.nbytes
    out, untouched = poisoned(x.numel(), x.dtype, offset)
    decoded = torch.empty_like(x)
    cpu.zvc_minifloat_decode(*planes, format, out)
    reference.zvc_minifloat_decode(*planes, format, decoded)
    assert same(out, decoded) and untouched(), x.numel()


@pytest.mark.parametrize(("format", "dtype"), MINIFLOATS, ids=str)
def test_zvc_minifloat(format: str, dtype: torch.dtype, isa: str) -> None:
    check_zvc_minifloat(numbers(dtype), format)
    for n in [*TAILS, *AROUND_CHUNKS]:
        check_zvc_minifloat(contents(n, dtype, seed=n, offset=n % 3), format, n % 5)
    for density in (0.0, 0.001, 1.0):
        check_zvc_minifloat(contents(40 * ZVC_CHUNK + 77, dtype, density), format)


@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize("at", [(0,), (0, 70_000), (5, 70_000, 199_999), (1, 2, 65_536, 65_537, 140_000)])
def test_words_that_several_blocks_share(at: tuple[int, ...], threads: int, isa: str) -> None:
    """A block of ZVC has 16 chunks; a word of fp10 may have values of three of them."""
    x = torch.zeros(200_000)
    x[list(at)] = torch.arange(1.0, len(at) + 1)
    check_zvc_minifloat(x, "fp10")
    x[65_000:65_600] = torch.arange(600.0) + 1
    check_zvc_minifloat(x, "fp10")


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("room", [0, 70_000])
@pytest.mark.parametrize("format", ["fp8", "fp10"])
def test_codes_that_there_is_no_room_for_are_made_twice(
    format: str, room: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_SCRATCH", room)
    for density in (0.02, 0.5):
        check_zvc_minifloat(contents(40 * ZVC_CHUNK + 77, torch.float32, density), format)


@pytest.mark.parametrize("format", ["fp8", "fp10", "fp16"])
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


@pytest.mark.parametrize("n", [100, 4097, 3 * ZVC_CHUNK + 100])
@pytest.mark.parametrize("format", ["fp8", "fp10"])
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


@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize(("isa", "format"), star(BEST_FIRST, list(FORMATS)), indirect=["isa"])
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


def test_advise_huge_changes_nothing() -> None:
    for n in (0, 10, 3 << 20):
        x = torch.arange(n)
        cpu.advise_huge(x)
        assert torch.equal(x, torch.arange(n))


def test_isa_is_capped_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKSTASH_ISA", "sse9")
    with pytest.raises(ValueError, match="sse9"):
        library.load.__wrapped__()
    assert set(cpu.build_info()) == {"path", "compiler", "openmp", "isa"}
    assert cpu.build_info()["isa"] in library.ISAS


def test_a_library_of_another_version_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(library._SIGNATURES, "bs_of_tomorrow", (None, []))
    of = len(library._SIGNATURES)
    with pytest.raises(OSError, match=rf"bs_of_tomorrow.*1 of {of} are missing.*python setup.py build_native"):
        library.load.__wrapped__()


# -- gradients straight from planes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_mask_select(dtype: torch.dtype, isa: str) -> None:
    for n in (*TAILS, 4096, 70_001):
        x = contents(n, dtype)
        mask = torch.randint(0, 256, (bytes_for(n, 1),), dtype=torch.uint8, generator=generator(n))
        out, intact = poisoned(n, dtype, offset=n % 3)
        assert cpu.mask_select(x, mask, out)
        keep = torch.zeros(n, dtype=torch.bool)
        reference.bitmask_decode(mask, keep, 1.0, 0.0)
        expected = torch.where(keep, x, torch.zeros((), dtype=dtype))
        assert same(out, expected), n
        assert intact(), n
        assert cpu.mask_select(x, mask, x)
        assert same(x, expected), n


def test_mask_select_refuses_other_sizes() -> None:
    x = torch.ones(100)
    with pytest.raises(DamagedPlanesError, match="mask_select asked for 13 elements in the plane 'mask', got 12"):
        cpu.mask_select(x, torch.zeros(12, dtype=torch.uint8), x)
    assert not cpu.mask_select(x.to(torch.uint8), torch.zeros(13, dtype=torch.uint8), x)


SCALES = [-0.0, 1.25, 0.0, -2.0, math.inf, 1e-30, -1e30, 1 / 3, 1.0, -1.0, 5e-324, 2.0, 0.1, -math.inf, 1e-3, 7.0]


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scale_by_codes(dtype: torch.dtype, bits: int, isa: str, threads: int) -> None:
    table = torch.tensor(SCALES[: 2**bits], dtype=dtype)
    for n in (*(TAILS if threads == 1 else ()), 1023, 1024, 1025, 4096, 200_001):
        x = contents(n, dtype, density=0.9)
        packed = torch.randint(0, 256, (bytes_for(n, bits),), dtype=torch.uint8, generator=generator(n))
        expected = reference.scale_by_codes(x, packed, table)
        out, intact = poisoned(n, dtype, offset=n % 3)
        assert cpu.scale_by_codes(x, packed, table, out)
        assert same(out, expected), n
        assert intact(), n
        assert cpu.scale_by_codes(x, packed, table, x)
        assert same(x, expected), n


def test_scale_by_codes_past_the_caches(isa: str) -> None:
    x = contents((24 << 20) // 4 + 77, torch.float32)
    packed = torch.randint(0, 256, (bytes_for(x.numel(), 1),), dtype=torch.uint8, generator=generator())
    table, out = torch.tensor([0.0, 1.25]), torch.full_like(x, math.nan)
    assert cpu.scale_by_codes(x, packed, table, out)
    assert same(out, reference.scale_by_codes(x, packed, table))


def test_scale_by_codes_refuses_other_sizes() -> None:
    x, table = torch.ones(100), torch.ones(4)
    with pytest.raises(DamagedPlanesError, match="scale_by_codes asked for 25 elements in the plane 'packed', got 24"):
        cpu.scale_by_codes(x, torch.zeros(24, dtype=torch.uint8), table, x)
    for values, of in ((0, 2), (1, 2), (3, 2), (5, 4), (32, 16)):
        with pytest.raises(DamagedPlanesError, match=rf"asked for {of} elements in the plane 'table', got {values}"):
            cpu.scale_by_codes(x, torch.zeros(25, dtype=torch.uint8), torch.ones(values), x)
    for dtype in (torch.bfloat16, torch.float16, torch.int32):
        assert not cpu.scale_by_codes(x.to(dtype), torch.zeros(25, dtype=torch.uint8), table.to(dtype), x.to(dtype))
    assert not cpu.scale_by_codes(x, torch.zeros(25, dtype=torch.uint8), table.double(), x)


POOLINGS = {
    "halved": ((4, 3, 12, 10), 2, 2, 0, 1),
    "overlapping": ((3, 5, 13, 11), 3, 2, 1, 1),
    "every position": ((2, 3, 9, 9), 3, 1, 1, 1),
    "dilated": ((2, 4, 15, 14), 3, 2, 1, 2),
    "wide": ((1, 2, 40, 37), 9, 5, 4, 1),
    "gaps": ((2, 3, 20, 20), 2, 5, 0, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", POOLINGS)
def test_window_scatter(name: str, dtype: torch.dtype, isa: str) -> None:
    """The bits of ATen's backward, which adds up in the same order."""
    shape, kernel, stride, padding, dilation = POOLINGS[name]
    for layout, threads in itertools.product((torch.contiguous_format, torch.channels_last), (1, 2)):
        torch.set_num_threads(threads)
        x = torch.randn(shape, generator=generator(), dtype=dtype).to(memory_format=layout)
        y, indices = torch.nn.functional.max_pool2d(x, kernel, stride, padding, dilation, return_indices=True)
        inner = 1 if layout is torch.contiguous_format else shape[1]
        sizes = (list(shape[2:]), list(y.shape[2:]), *([size] * 2 for size in (kernel, stride, padding, dilation)))
        packed, outside = cpu.window_encode(indices.as_strided((indices.numel(),), (1,)), inner, *sizes)
        assert not outside, (layout, threads)
        grad = torch.randn(y.shape, generator=generator(1), dtype=dtype).to(memory_format=layout)
        grad[grad.abs() < 0.1] = -0.0
        expected = torch.ops.aten.max_pool2d_with_indices_backward(
            grad, x, [kernel] * 2, [stride] * 2, [padding] * 2, [dilation] * 2, False, indices
        )
        out, intact = poisoned(x.numel(), dtype)
        assert cpu.window_scatter(packed, (inner, *sizes), grad.as_strided((grad.numel(),), (1,)), out)
        assert same(out, expected.as_strided((x.numel(),), (1,))), (layout, threads)
        assert intact(), (layout, threads)


def test_window_scatter_of_damaged_codes_stays_inside(isa: str) -> None:
    sizes = ([5, 7], [3, 4], [3, 3], [2, 2], [1, 1], [1, 1])
    grad = torch.ones(2 * 3 * 4)
    for seed in range(50):
        packed = torch.randint(0, 256, (bytes_for(grad.numel(), 4),), dtype=torch.uint8, generator=generator(seed))
        out, intact = poisoned(2 * 5 * 7, torch.float32)
        assert cpu.window_scatter(packed, (1, *sizes), grad, out)
        assert intact()
    with pytest.raises(DamagedPlanesError, match="'packed'"):
        cpu.window_scatter(packed[1:], (1, *sizes), grad, out)
    assert not cpu.window_scatter(packed, (1, *sizes), grad.half(), out)

"""Every Triton kernel against the reference, equal bytes: in Triton's interpreter, and on a GPU if there is one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from thinning import only, star, star_of
from torch import Tensor
from triton_checks import DEVICE, FLOATS, bits, contents, expected, filled, on_device, specials

from backstash.codecs import Szp
from backstash.errors import DamagedPlanesError
from backstash.ops import reference
from backstash.ops import triton as launchers
from backstash.ops.formats import FORMATS, SCALED
from backstash.ops.schema import CSR_ROW, ZVC_CHUNK, bytes_for, window_bits
from backstash.saved import Test

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install triton"),
    pytest.mark.usefixtures("backend"),
]

INTEGERS = [torch.int64, torch.int32, torch.int16, torch.uint8]
TAILS = list(range(10))  # bytes hold 8 fields of a bit, and 8 fields of any width fill whole bytes
BLOCK_EDGES = [8 * launchers.BLOCK_BYTES + d for d in (-1, 0, 1)]
CHUNK_EDGES = [ZVC_CHUNK + d for d in (-1, 0, 1)] + [2 * ZVC_CHUNK + 13]
LENGTHS = TAILS + BLOCK_EDGES + CHUNK_EDGES


@pytest.mark.parametrize(("dtype", "test"), star(FLOATS, list(Test)), ids=str)
def test_bitmask_encode(dtype: torch.dtype, test: Test) -> None:
    for n in LENGTHS:
        x = contents(dtype, n)
        for lo, hi in [(0.0, math.inf), (-1.0, 1.0), (0.1, 6.0), (-0.1, math.nan)]:
            mask = launchers.bitmask_encode(on_device(x), test.code, lo, hi)
            assert torch.equal(mask.cpu(), reference.bitmask_encode(x, test.code, lo, hi)), (n, lo, hi)


@pytest.mark.parametrize("test", list(Test), ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bitmask_encode_of_every_special(dtype: torch.dtype, test: Test) -> None:
    x = specials(dtype)
    for lo in x.tolist():
        mask = launchers.bitmask_encode(on_device(x), test.code, lo, 0.1)
        assert torch.equal(mask.cpu(), reference.bitmask_encode(x, test.code, lo, 0.1)), lo


@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool, torch.uint8], ids=str)
def test_bitmask_decode(dtype: torch.dtype) -> None:
    choices = [(1.0, 0.0), (0.0, 1.0)]
    if dtype.is_floating_point:
        choices += [(-0.0, math.inf), (0.1, math.nan)]
    for n in LENGTHS:
        mask = torch.randint(256, (bytes_for(n, 1),), dtype=torch.uint8)  # bits past the last element are set too
        for if_set, if_clear in choices:
            got = filled(n, dtype, launchers.bitmask_decode, mask, if_set=if_set, if_clear=if_clear)
            want = expected(n, dtype, reference.bitmask_decode, mask, if_set=if_set, if_clear=if_clear)
            assert torch.equal(bits(got), bits(want)), (n, if_set, if_clear)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS[:3]], ids=str)
def test_binary(dtype: torch.dtype) -> None:
    numbers = specials(dtype) if dtype.is_floating_point else torch.tensor([0, 1, -7, 9], dtype=dtype)
    for n in LENGTHS:
        for i, j in [(0, 1), (1, 0), (2, -3), (2, 2)]:
            pair = numbers[[i, j]]
            for x in (pair[torch.randint(2, (n,))], numbers[torch.randint(len(numbers), (n,))]):
                mask, strangers = launchers.binary_encode(on_device(x), on_device(pair))
                mask_expected, strangers_expected = reference.binary_encode(x, pair)
                assert torch.equal(mask.cpu(), mask_expected), n
                assert torch.equal(strangers.cpu(), strangers_expected), n
            got = filled(n, dtype, launchers.binary_decode, mask_expected, pair)
            want = expected(n, dtype, reference.binary_decode, mask_expected, pair)
            assert torch.equal(bits(got), bits(want)), n


def zvc_cases(dtype: torch.dtype) -> Iterator[Tensor]:
    """All lengths; and chunks that are full, empty, and empty between full ones."""
    for n in LENGTHS:
        yield contents(dtype, n)
    yield torch.zeros(ZVC_CHUNK + 5, dtype=dtype)
    yield torch.full((2 * ZVC_CHUNK,), -0.0).to(dtype)
    gap = torch.ones(3 * ZVC_CHUNK + 1, dtype=dtype)
    gap[ZVC_CHUNK : 2 * ZVC_CHUNK] = 0
    yield gap


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
def test_zvc(dtype: torch.dtype) -> None:
    for x in zvc_cases(dtype) if dtype.is_floating_point else [torch.arange(-5000, 5000) % 3]:
        planes = launchers.zvc_encode(on_device(x))
        planes_expected = reference.zvc_encode(x)
        for name, got, want in zip(("mask", "offsets", "values"), planes, planes_expected, strict=True):
            assert got.dtype == want.dtype, name
            assert torch.equal(bits(got), bits(want)), (name, x.numel())
        mask, offsets, staging, count = launchers.zvc_encode_staged(on_device(x))
        assert count.shape == (1,)
        assert count.dtype == torch.int64
        assert staging.shape == x.shape
        for got, want in zip((mask, offsets, staging[: int(count)]), planes_expected, strict=True):
            assert torch.equal(bits(got), bits(want)), x.numel()
        decoded = filled(x.numel(), dtype, launchers.zvc_decode, *planes_expected)
        assert torch.equal(bits(decoded), bits(x)), x.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zvc_decode_of_damaged_contents_stays_inside_its_planes(dtype: torch.dtype) -> None:
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


def csr_cases(dtype: torch.dtype) -> Iterator[Tensor]:
    """All lengths; and rows that are full, empty, and empty between full ones."""
    for n in [*LENGTHS, CSR_ROW - 1, CSR_ROW, CSR_ROW + 1]:
        yield contents(dtype, n)
    yield torch.zeros(CSR_ROW + 5, dtype=dtype)
    yield torch.full((20 * CSR_ROW,), -0.0).to(dtype)
    gap = torch.ones(3 * CSR_ROW + 1, dtype=dtype)
    gap[CSR_ROW : 2 * CSR_ROW] = 0
    yield gap


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
def test_csr(dtype: torch.dtype) -> None:
    for x in csr_cases(dtype) if dtype.is_floating_point else [torch.arange(-5000, 5000) % 3]:
        planes = launchers.csr_encode(on_device(x))
        planes_expected = reference.csr_encode(x)
        for name, got, want in zip(("columns", "rows", "values"), planes, planes_expected, strict=True):
            assert got.dtype == want.dtype, name
            assert torch.equal(bits(got), bits(want)), (name, x.numel())
        decoded = filled(x.numel(), dtype, launchers.csr_decode, *planes_expected)
        assert torch.equal(bits(decoded), bits(x)), x.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_csr_decode_of_damaged_contents_stays_inside_its_planes(dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize(("dtype", "width"), star(FLOATS[:3], range(1, 5)), ids=str)
def test_fewbit(dtype: torch.dtype, width: int) -> None:
    edges = torch.linspace(-1.5, 6.0, 2**width - 1).tolist()
    values = torch.linspace(-3.1, 2.7, 2**width).tolist()
    for thresholds in (edges, [-0.0], []):
        thresholds = torch.tensor(thresholds).tolist()
        for n in (*TAILS, 8 * launchers.BLOCK_BYTES // width + 9, launchers.BLOCK + 1):
            x = contents(dtype, n)
            packed, nonfinite = launchers.fewbit_encode(on_device(x), thresholds, width)
            packed_expected, nonfinite_expected = reference.fewbit_encode(x, thresholds, width)
            assert torch.equal(packed.cpu(), packed_expected), n
            assert torch.equal(nonfinite.cpu(), nonfinite_expected), n
            got = filled(n, dtype, launchers.fewbit_decode, packed_expected, values, width)
            want = expected(n, dtype, reference.fewbit_decode, packed_expected, values, width)
            assert torch.equal(bits(got), bits(want)), n


def takes(format: str, dtype: torch.dtype) -> bool:
    return FORMATS[format].bits < 8 * dtype.itemsize


def numbers_of(dtype: torch.dtype, n: int) -> Tensor:
    """:func:`contents` of all sizes, with what rounds to even, up to the smallest normal number, and over the top."""
    x = contents(dtype, n) * torch.tensor(2.0).pow(torch.randint(-24, 18, (n,))).to(dtype)
    edges = torch.tensor([1 + k / 64 for k in range(64)]) * 2.0 ** torch.randint(-18, 17, (64,))
    return torch.where(torch.rand(n) < 0.2, edges.to(dtype)[torch.randint(64, (n,))], x)


MINIFLOATS = [(f, d) for f in FORMATS for d in FLOATS[:3] if takes(f, d)]


@pytest.mark.parametrize(("format", "dtype"), star_of(MINIFLOATS), ids=str)
def test_minifloat(format: str, dtype: torch.dtype) -> None:
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    some = (patterns.int() << 16 | 0x8000).view(dtype) if dtype == torch.float32 else patterns.view(dtype)
    for x in [some, *(numbers_of(dtype, n) for n in (*TAILS, launchers.BLOCK - 1, launchers.BLOCK, 3073, 4097))]:
        for nonzero in (False, True):
            codes = launchers.minifloat_encode(on_device(x), format, nonzero)
            want = reference.minifloat_encode(x, format, nonzero)
            assert codes.dtype == want.dtype
            assert torch.equal(codes.cpu(), want), x.numel()
        got = filled(x.numel(), dtype, launchers.minifloat_decode, want, format)
        decoded = expected(x.numel(), dtype, reference.minifloat_decode, want, format)
        assert torch.equal(bits(got), bits(decoded)), x.numel()


@pytest.mark.parametrize(("format", "dtype"), star_of((f, d) for f, d in MINIFLOATS if f in SCALED), ids=str)
def test_minifloat_of_groups(format: str, dtype: torch.dtype) -> None:
    for n, group_size in itertools.product((*TAILS, 255, 256, 257, 4097), (16, 256, 4096)):
        x = numbers_of(dtype, n)
        planes = launchers.minifloat_scaled_encode(on_device(x), format, group_size)
        wanted = reference.minifloat_scaled_encode(x, format, group_size)
        for got, want in zip(planes, wanted, strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(bits(got), bits(want)), (n, group_size)
        got = filled(n, dtype, launchers.minifloat_scaled_decode, *wanted, format, group_size)
        want = expected(n, dtype, reference.minifloat_scaled_decode, *wanted, format, group_size)
        assert torch.equal(bits(got), bits(want)), (n, group_size)


@pytest.mark.parametrize(("format", "dtype"), star_of(MINIFLOATS), ids=str)
def test_zvc_minifloat(format: str, dtype: torch.dtype) -> None:
    for x in zvc_cases(dtype):
        planes = launchers.zvc_minifloat_encode(on_device(x), format)
        wanted = reference.zvc_minifloat_encode(x, format)
        for got, want in zip(planes, wanted, strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(bits(got), bits(want)), x.numel()
        got = filled(x.numel(), dtype, launchers.zvc_minifloat_decode, *wanted, format)
        want = expected(x.numel(), dtype, reference.zvc_minifloat_decode, *wanted, format)
        assert torch.equal(bits(got), bits(want)), x.numel()
    mask, offsets, values = wanted
    none = filled(x.numel(), dtype, launchers.zvc_minifloat_decode, mask, offsets + 2**62, values, format)
    assert not bits(none).any(), "values out of nowhere"


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy, of infinities, in the interpreter
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_szp(dtype: torch.dtype) -> None:
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
        got = filled(x.numel(), dtype, launchers.szp_decode, *wanted, grid[1:2])
        want = expected(x.numel(), dtype, reference.szp_decode, *wanted, grid[1:2])
        assert torch.equal(bits(got), bits(want)), x.numel()
    mask, offsets, words = wanted
    for planes in ((mask, offsets + 2**62, words), (mask, offsets - 1, words), (mask, offsets, words | 0x3F3F3F3F)):
        filled(x.numel(), dtype, launchers.szp_decode, *planes, grid[1:2])


GROUPS = (16, 256, 4096)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy, of infinities, in the interpreter
@pytest.mark.parametrize(("dtype", "width"), star(FLOATS[:3], [1, 2, 4, 8]), ids=str)
def test_blockquant(dtype: torch.dtype, width: int) -> None:
    tails = zip(TAILS, itertools.cycle(GROUPS), strict=False)  # within a group, whatever its size
    for n, size in (*tails, *itertools.product((255, 257), GROUPS), (256, 16), (256, 256), (4097, 256), (4097, 4096)):
        options = width, size, n % 2 == 0, 2**32 - 1 - n
        refused = launchers.blockquant_encode(on_device(contents(dtype, n)), *options)[2]
        assert refused.dtype == torch.int64
        for x in ((torch.randn(n) * 10).to(dtype), (torch.randn(n) * 2.0**-20).to(dtype)):
            planes, wanted = (
                launchers.blockquant_encode(on_device(x), *options),
                reference.blockquant_encode(x, *options),
            )
            for name, got, want in zip(("codes", "ranges", "refused"), planes, wanted, strict=True):
                assert got.dtype == want.dtype, name
                assert torch.equal(bits(got), bits(want)), (name, n, size)
            got = filled(n, dtype, launchers.blockquant_decode, *wanted[:2], width, size)
            want = expected(n, dtype, reference.blockquant_decode, *wanted[:2], width, size)
            assert torch.equal(bits(got), bits(want)), (n, size)
    x = torch.zeros(1000, dtype=dtype)
    x[[3, 700]] = torch.tensor([math.inf, math.nan], dtype=dtype)
    assert int(launchers.blockquant_encode(on_device(x), width, 16, True, 0)[2]) == 2
    extreme = torch.tensor([-1.0, 1.0]) * torch.finfo(dtype).max
    refused = launchers.blockquant_encode(on_device(extreme.to(dtype)), width, 16, True, 0)[2]
    assert int(refused) == (dtype != torch.float16)


@pytest.mark.parametrize("width", only((1, 3, 8, 13, 16, 31, 32), range(1, 33)))
def test_narrow(width: int) -> None:
    for dtype in INTEGERS:
        info = torch.iinfo(dtype)
        base = max(info.min, -3)
        span = min(2**width, info.max - base + 1)
        for n in (*TAILS, 8 * launchers.BLOCK_BYTES // width + 9) if dtype == torch.int64 else (launchers.BLOCK + 1,):
            x = (torch.randint(span, (n,)) + base).to(dtype)
            packed = launchers.narrow_encode(on_device(x), width, base)
            assert torch.equal(packed.cpu(), reference.narrow_encode(x, width, base)), (dtype, n)
            got = filled(n, dtype, launchers.narrow_decode, packed, width, base)
            assert torch.equal(got, x), (dtype, n)


def test_narrow_of_bool_and_of_what_does_not_fit() -> None:
    for n in (*TAILS, *BLOCK_EDGES):
        x = torch.rand(n) < 0.5
        packed = launchers.narrow_encode(on_device(x), 1, 0)
        assert torch.equal(packed.cpu(), reference.narrow_encode(x, 1, 0)), n
        assert torch.equal(filled(n, torch.bool, launchers.narrow_decode, packed, 1, 0), x), n
    x = torch.tensor([300, -1, 2**40 + 5, 0])
    assert torch.equal(launchers.narrow_encode(on_device(x), 3, 2**33).cpu(), reference.narrow_encode(x, 3, 2**33))
    two = torch.tensor([0b11], dtype=torch.uint8)
    assert torch.equal(filled(2, torch.bool, launchers.narrow_decode, two, 1, 1), torch.tensor([True, True]))


def pool(shape: list[int], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    """The indices of a real max-pool, ties and NaN included."""
    x = torch.randint(-2, 3, shape).float()
    x[torch.rand(shape) < 0.02] = math.nan
    max_pool = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[len(kernel)]
    return max_pool(x, kernel, stride, padding, dilation, ceil_mode=True, return_indices=True)[1]


def check_window(indices: Tensor, *geometry: Any) -> int:
    """Compare both directions with the reference; returns how many indices are in no window."""
    packed, strays = launchers.window_encode(on_device(indices), *geometry)
    packed_expected, strays_expected = reference.window_encode(indices, *geometry)
    assert torch.equal(packed.cpu(), packed_expected)
    assert torch.equal(strays.cpu(), strays_expected)
    n = indices.numel()
    got = filled(n, torch.int64, launchers.window_decode, packed_expected, *geometry)
    assert torch.equal(got, expected(n, torch.int64, reference.window_decode, packed_expected, *geometry))
    if not strays_expected:
        assert torch.equal(got, indices)
    return int(strays_expected)


WINDOWS = [
    ([2, 3, 41], [2], [2], [0], [1]),
    ([2, 2, 700], [7], [3], [3], [2]),
    ([2, 3, 20, 17], [2, 2], [2, 2], [0, 0], [1, 1]),
    ([2, 5, 19, 33], [3, 3], [2, 2], [1, 1], [1, 1]),
    ([1, 2, 19, 33], [3, 2], [1, 2], [1, 0], [3, 2]),
    ([1, 1, 9, 9], [1, 1], [1, 1], [0, 0], [1, 1]),
    ([1, 2, 40, 40], [16, 17], [5, 4], [8, 8], [1, 1]),
    ([2, 2, 8, 10, 12], [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1]),
    ([1, 3, 7, 10, 9], [3, 3, 3], [1, 2, 3], [1, 1, 0], [1, 2, 1]),
]


@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_window(case: tuple[list[int], ...]) -> None:
    shape, *windows = case
    indices = pool(shape, *windows)
    input_size, output_size = shape[2:], list(indices.shape[2:])
    contiguous = indices.reshape(-1).clone()
    assert not check_window(contiguous, 1, input_size, output_size, *windows)
    channels_last = indices.movedim(1, -1).reshape(-1).clone()
    assert not check_window(channels_last, shape[1], input_size, output_size, *windows)
    strange = contiguous.clone()
    where = torch.rand(strange.shape) < 0.3
    strange[where] += torch.randint(-40, 40, (int(where.sum()),))
    strange[::11] = torch.tensor([-1, 2**31, 2**32 + 1, -(2**32), 2**62])[torch.arange(len(strange[::11])) % 5]
    assert check_window(strange, 1, input_size, output_size, *windows)
    for n in TAILS:
        check_window(contiguous[:n].clone(), 1, input_size, output_size, *windows)


def test_window_of_more_elements_than_32_bits_count() -> None:
    n = 3000
    pairs = torch.arange(n) * 2 + torch.randint(2, (n,))
    assert not check_window(pairs, 1, [2**31], [2**30], [2], [2], [0], [1])
    rows = torch.randint(3, (n,)) * 2**30  # the last one begins at 2**31
    assert not check_window(rows + pairs, 1, [3, 2**30], [1, 2**29], [3, 2], [3, 2], [0, 0], [1, 1])


def test_planes_of_wrong_size_are_refused() -> None:
    def plane(n: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.zeros(n, dtype=dtype, device=DEVICE)

    out = plane(20, torch.float32)
    offsets = plane(1, torch.int64)
    pool2 = (1, [40], [20], [2], [2], [0], [1])
    for size in (0, 2, 4):
        with pytest.raises(DamagedPlanesError, match="'mask'"):
            launchers.bitmask_decode(plane(size), out, 1.0, 0.0)
        with pytest.raises(DamagedPlanesError, match="'mask'"):
            launchers.binary_decode(plane(size), out[:2], out)
        with pytest.raises(DamagedPlanesError, match="'mask'"):
            launchers.zvc_decode(plane(size), offsets, out, out)
        with pytest.raises(DamagedPlanesError, match="'mask'"):
            launchers.szp_decode(plane(size), offsets, offsets.int(), out[:1], out)
        with pytest.raises(DamagedPlanesError, match="'rows'"):
            launchers.csr_decode(plane(3), plane(size + 1, torch.int32), out[:3], out)
        with pytest.raises(DamagedPlanesError, match="'columns'"):
            launchers.csr_decode(plane(size), plane(2, torch.int32), out[:3], out)
        with pytest.raises(DamagedPlanesError, match="'packed'"):
            launchers.fewbit_decode(plane(size), [1.0, 2.0], 1, out)
        with pytest.raises(DamagedPlanesError, match="'codes'"):
            launchers.blockquant_decode(plane(size), out[:4], 1, 16, out)
        with pytest.raises(DamagedPlanesError, match="'packed'"):
            launchers.narrow_decode(plane(size), 1, 0, plane(20, torch.int64))
        with pytest.raises(DamagedPlanesError, match="'packed'"):
            launchers.window_decode(plane(size), *pool2, plane(20, torch.int64))
    with pytest.raises(DamagedPlanesError, match="'codes'"):
        launchers.minifloat_decode(plane(19), "fp8", out)
    with pytest.raises(DamagedPlanesError, match="'scales'"):
        launchers.minifloat_scaled_decode(plane(20), plane(1, torch.float32), "float8_e5m2", 16, out)
    with pytest.raises(DamagedPlanesError, match="at most 20 values in 7 words, got 8"):
        launchers.zvc_minifloat_decode(plane(3), offsets, plane(8, torch.int32), "fp10", out)
    with pytest.raises(DamagedPlanesError, match="'pair'"):
        launchers.binary_decode(plane(3), out[:1], out)
    with pytest.raises(DamagedPlanesError, match="'offsets'"):
        launchers.zvc_decode(plane(3), plane(2, torch.int64), out, out)
    with pytest.raises(DamagedPlanesError, match="at most 20 values"):
        launchers.zvc_decode(plane(3), offsets, plane(21, torch.float32), out)
    with pytest.raises(DamagedPlanesError, match=f"at most {launchers.szp.SLOT} words"):
        launchers.szp_decode(plane(3), offsets, plane(launchers.szp.SLOT + 1, torch.int32), out[:1], out)
    with pytest.raises(DamagedPlanesError, match="at most 20 values"):
        launchers.csr_decode(plane(21), plane(2, torch.int32), plane(21, torch.float32), out)


def test_fields_and_bytes_that_share_bits() -> None:
    for width in range(1, 33):
        begins = range(0, 8 * width, width)
        bytes_of = [{bit // 8 for bit in range(begin, begin + width)} for begin in begins]
        fields_of = [sum(byte in some for some in bytes_of) for byte in range(width)]
        assert max(map(len, bytes_of)) == launchers._bytes_per_field(width)
        assert max(fields_of) == launchers._fields_per_byte(width)
        assert window_bits([2**width]) == width

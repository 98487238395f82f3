"""Error-bounded, predicted and entropy-coded values: equal bytes from the reference and Triton.

Chunks are small here, for the interpreter's sake: blocks are whatever the caller says. The C++ kernels are compared
with the reference in ``tests/codecs/test_codec_sz.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from native_checks import FLOATS, reference
from thinning import star
from torch import Tensor
from triton_checks import DEVICE, bits, expected, filled, half_zeros, launchers, on_device, triton_test

from backstash.codecs import Codec, Signed, Sz
from backstash.codecs.sz import coding as sz
from backstash.codecs.sz.reference import check as checksum
from backstash.errors import DamagedPlanesError
from backstash.ops import backends
from backstash.ops.bits import bits_of


def examples(n: int, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of this family's kernels for ``n`` elements."""
    x, blocks = (torch.arange(n) % 3).to(dtype), [4, 16, 16, 65536]
    table = torch.tensor([125, 6, 62, 63], dtype=torch.int16)
    planes = reference.sz_encode(x, table, 0.5, 0.25, [2, 0, 1], blocks)
    return {
        "sz_range": (x,),
        "sz_survey": (x, 0.5, 0.25, 0, blocks),
        "sz_encode": (x, table, 0.5, 0.25, [2, 0, 1], blocks),
        "sz_encode_within": (x, table, 0.5, 0.25, [2, 0, 1], blocks, [n, n // 2, n // 2]),
        "sz_decode_flagged": (table, *planes, 0.5, [2, 0, 1], blocks, torch.empty_like(x)),
        "sz_decode": (table, *planes, 0.5, [2, 0, 1], blocks, torch.empty_like(x)),
    }


NAMES = ("stream", "index", "places", "values")
INTERPRETED = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
"""For numpy, in Triton's interpreter."""

BLOCKS = [5, 20, 60, 240]
"""Of a tensor [..., 3, 4, 5], four of these in a chunk."""

Planes = tuple[Tensor, Tensor, Tensor, Tensor]


def relu(dtype: torch.dtype, n: int) -> Tensor:
    """What a relu leaves, and a few outliers."""
    x = torch.randn(n).relu()
    x[::97] = torch.tensor([math.nan, 1e4, -math.inf])[torch.arange(len(x[::97])) % 3]
    return x.to(dtype)


def modelled(
    x: Tensor, step: float, bound: float, low: int, axes: int, blocks: list[int], offset: float
) -> tuple[Tensor, int]:
    """The table and the base for ``x`` along ``axes``; the launcher's survey is compared with the reference's."""
    counts = reference.sz_survey(x, step, bound, low, blocks, offset)
    assert torch.equal(launchers.sz_survey(on_device(x), step, bound, low, blocks, offset).cpu(), counts)
    row = sz.AXES.index(axes) if axes in sz.AXES else 0
    model = sz.model(counts.view(-1, sz.BINS)[row : row + 1].numpy(), step, low, 8 * x.element_size())
    return torch.from_numpy(model.table), model.base


def check(x: Tensor, bound: float, low: int, axes: int, blocks: list[int], offset: float = 0.0) -> Planes:
    """Compare both directions with the reference; returns the planes."""
    step = 2 * bound
    table, base = modelled(x, step, bound, low, axes, blocks, offset)
    parameters = [base, low, axes], blocks
    planes = launchers.sz_encode(on_device(x), on_device(table), step, bound, *parameters, offset)
    wanted = reference.sz_encode(x, table, step, bound, *parameters, offset)
    for name, got, want in zip(NAMES, planes, wanted, strict=True):
        assert got.dtype == want.dtype, name
        assert torch.equal(bits(got), bits(want)), (name, x.numel(), bound, parameters, offset)
    arguments = table, *wanted, step, *parameters
    got = filled(x.numel(), x.dtype, lambda *given: launchers.sz_decode(*given, offset), *arguments)
    want = expected(x.numel(), x.dtype, lambda *given: reference.sz_decode(*given, offset), *arguments)
    assert torch.equal(bits(got), bits(want)), (x.numel(), bound, parameters, offset)
    return wanted


@triton_test
@INTERPRETED
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_range_on_triton(dtype: torch.dtype) -> None:
    for x in (half_zeros(dtype, 3), relu(dtype, 300), half_zeros(dtype, 1)[:0]):
        got = launchers.sz_range(on_device(x))
        assert got.dtype == torch.float64
        assert torch.equal(got.cpu(), reference.sz_range(x))


@triton_test
@INTERPRETED
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_lengths_and_axes_on_triton(dtype: torch.dtype) -> None:
    for i, n in enumerate((0, 1, 31, 33, 63, 239, 240, 241, 505)):
        planes = check(relu(dtype, n), (0.3, 0.02)[i % 2], (0, 1, 0, 3)[i % 4], (3 * i) % 8, BLOCKS, (0.0, 0.5)[i % 2])
        assert planes[0].numel() > 0 or n < 239 or dtype != torch.float32


BOUNDS = (0.125, 1e-320, 1e-9, 2.0**-8, 0.3, 1e4, 1e300)


@triton_test
@INTERPRETED
@pytest.mark.parametrize(("dtype", "bound"), star(FLOATS[:3], BOUNDS), ids=str)
def test_any_numbers_on_triton(dtype: torch.dtype, bound: float) -> None:
    """Bounds of all sizes: what is an outlier, rounds to even, or to 16 bits, is so in the same places."""
    patterns = torch.randint(-(2**31), 2**31, (80,)).to(torch.int32 if dtype == torch.float32 else torch.int16)
    ties = (torch.arange(-40, 40) / 8).to(dtype)
    x = torch.cat([half_zeros(dtype, 80), patterns.view(dtype), ties])
    axes = BOUNDS.index(bound)
    check(x[torch.randperm(240)], bound, 0, axes, BLOCKS, (0.0, 0.5)[axes % 2])


@triton_test
@INTERPRETED
@pytest.mark.parametrize("axes", range(8))
def test_low_bits_and_escapes_on_triton(axes: int) -> None:
    """A walk, of which every axis leaves something else, and numbers that are far apart."""
    x = torch.cat([torch.randn(480).cumsum(0), 1e3 * torch.randn(20)])
    stream, *_ = check(x, 1e-2, (0, 1, 4, 12)[(axes + axes // 4) % 4], axes, [20, 100, 300, 300])
    assert stream.numel() > 64 or axes not in sz.AXES  # a model of other axes is no good one


@triton_test
@INTERPRETED
@pytest.mark.parametrize("sizes", [[7, 5, 3], [3000], [2, 1500], [2, 3, 1100], [1200, 3], [1], [33, 40, 2]], ids=str)
def test_sums_undo_the_prediction_on_triton(sizes: list[int]) -> None:
    """Of lines that are longer than one program takes at once, next to each other and not, and cut off at the end."""
    *blocks, _ = sz.blocks(sizes)
    codes = torch.randint(-(2**27), 2**27, (2 * math.prod(sizes) + 11,))
    for stride, block in zip([1, *blocks], blocks, strict=False):
        less = codes.clone()
        for first in range(0, less.numel(), block):
            part = codes[first : first + block]
            less[first : first + block] -= torch.cat([part.new_zeros(stride), part])[: part.numel()]
        for damaged, want in ((0, codes), (1, less)):
            flag = torch.tensor([damaged], dtype=torch.int32, device=DEVICE)
            got = filled(less.numel(), torch.int32, summed(less.int(), flag, stride, block))
            assert torch.equal(got, want.int()), (stride, block, damaged)


def summed(codes: Tensor, damaged: Tensor, stride: int, block: int) -> Callable[[Tensor], None]:
    def decode(out: Tensor) -> None:
        out.copy_(codes)
        launching._sum(out, damaged, stride, block)

    return decode


@triton_test
@INTERPRETED
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_planes_with_room_on_triton(dtype: torch.dtype) -> None:
    """With room enough they decode to the same; without, nothing is written past a plane's end, and sizes are told."""
    x = torch.cat([relu(dtype, 470), torch.tensor([math.inf] * 10).to(dtype)])
    table = torch.tensor([125, 6, 62, 63], dtype=torch.int16)
    arguments = 0.5, 0.25, [2, 0, 1], BLOCKS
    wanted = reference.sz_encode(x, table, *arguments)
    sizes = [wanted[at].numel() for at in (0, 2, 3)]
    for more in (0, 7, -3):
        rooms = [max(0, size + more) for size in sizes]
        *found, told = launchers.sz_encode_within(on_device(x), on_device(table), *arguments, rooms)
        assert told.tolist() == sizes
        if more >= 0:
            stream, index, places, values = found
            planes = stream[: sizes[0]], index, places[: sizes[1]], values[: sizes[2]]
            for name, got, want in zip(NAMES, planes, wanted, strict=True):
                assert torch.equal(bits(got), bits(want)), (name, more)


@triton_test
@INTERPRETED
def test_places_past_32767_on_triton() -> None:
    n, flag = 40000, torch.zeros(1, dtype=torch.int32, device=DEVICE)
    x = torch.zeros(n)
    x[[5, 32768, 39999]] = torch.tensor([math.inf, math.nan, 1e9])
    staging, index = torch.ones(1, 2 * n, dtype=torch.int16), torch.tensor([0, 64, 3, 3, 0]).to(DEVICE)
    planes = [torch.empty(size, dtype=dtype) for size, dtype in ((64, torch.int16), (3, torch.int16), (3, x.dtype))]
    stream, places, values = (plane.to(DEVICE) for plane in planes)
    given = on_device(x), 0.2, 0.1, [1, 1, 1, sz.CHUNK], 0.0, staging.to(DEVICE), index
    launching.sz_collect(*given, stream, places, values)
    assert (places.cpu().int() & 0xFFFF).tolist() == [5, 32768, 39999]
    assert torch.equal(bits(values), bits(x[[5, 32768, 39999]]))
    assert index[4].cpu() == checksum(0, *(plane.cpu() for plane in (stream, places, values)))

    def decode(out: Tensor) -> None:
        out.zero_()
        launching._check_chunks(stream, places, values, index, flag, n, sz.CHUNK, verify=True)
        words = bits_of(values), flag, bits_of(out)
        launch(sz_outliers_kernel, 1, index, places, *words, n, sz.CHUNK, BLOCK=launching.PIECE)

    assert torch.equal(bits(filled(n, x.dtype, decode)), bits(x))
    assert not flag.item()


@triton_test
@INTERPRETED
def test_a_table_of_wrong_size_is_refused_on_triton() -> None:
    for count in (0, 1, 33):
        with pytest.raises(ValueError, match=f"2 to 32 symbols, got {count} frequencies"):
            launchers.sz_encode(torch.zeros(3), torch.ones(count, dtype=torch.int16), 0.2, 0.1, [0, 0, 0], BLOCKS)


@triton_test
@INTERPRETED
def test_survey_of_runs_on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sz, "SURVEYED", 8 * sz.RUN)
    modelled(torch.randn(3001).cumsum(0), 0.2, 0.1, 0, 0, [7, 70, 700, 65100], 0.0)


if launchers is not None:
    import triton
    import triton.language as tl

    from backstash.codecs.sz import triton as launching
    from backstash.codecs.sz.triton.decoding import sz_outliers_kernel
    from backstash.codecs.sz.triton.encoding import run_start
    from backstash.ops.triton.launching import launch

    @triton.jit
    def starts_kernel(out_ptr, numel, surveyed: tl.constexpr, run: tl.constexpr):
        tl.store(out_ptr + tl.program_id(0), run_start(numel, surveyed, run))


@triton_test
@INTERPRETED
@pytest.mark.parametrize("n", [sz.SURVEYED + 1, 2**31, 2**40 + 12345])
def test_where_runs_begin_on_triton(n: int) -> None:
    begins, run = sz.starts(n)
    out = torch.empty(len(begins), dtype=torch.int64, device=DEVICE)
    starts_kernel[(len(begins),)](out, n, surveyed=sz.SURVEYED, run=run)
    assert out.tolist() == begins


@triton_test
@INTERPRETED
@pytest.mark.parametrize(("dtype", "nonzero"), star([torch.float32, torch.bfloat16], [False, True]), ids=str)
def test_codecs_on_these_kernels_on_triton(dtype: torch.dtype, nonzero: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    codec: Codec = Signed(Sz(0.05, nonzero=True)) if nonzero else Sz(0.02, "rel")
    x = relu(dtype, 600).view(2, 3, 10, 10).nan_to_num(0.5, 3.0, 1.0)
    monkeypatch.setattr(backends, "serving", lambda device: reference)
    want = codec.encode(x)
    decoded, declined = codec.decode(want), codec.declines(x)
    monkeypatch.setattr(backends, "serving", lambda device: launchers)
    got = codec.encode(on_device(x.flatten()).view(x.shape))
    assert codec.declines(on_device(x.flatten())) == declined
    assert got.meta == want.meta
    assert got.planes.keys() == want.planes.keys()
    for name, plane in want.planes.items():
        assert torch.equal(bits(got.planes[name]), bits(plane)), name
    assert torch.equal(bits(codec.decode(got)), bits(decoded))


class Stash:
    """Planes of three chunks, one of them dense and two with outliers."""

    blocks: ClassVar[list[int]] = [5, 20, 60, 480]
    step: ClassVar[float] = 0.5

    def __init__(self, dtype: torch.dtype, low: int = 0, axes: int = 1) -> None:
        x = relu(dtype, 1400)
        x[480:960] = torch.randn(480) * 1e5
        x[961] = 1000.0 if low else x[961]
        table, base = modelled(x, self.step, 0.25, low, axes, self.blocks, 0.0)
        self.n, self.dtype, self.parameters = x.numel(), dtype, ([base, low, axes], self.blocks)
        stream, index, places, values = reference.sz_encode(x, table, self.step, 0.25, *self.parameters)
        self.planes = {"table": table, "stream": stream, "index": index, "places": places, "values": values}

    def with_checksums(self, planes: dict[str, Tensor]) -> dict[str, Tensor]:
        """The planes with checksums that are right for what is there."""
        index, nothing = planes["index"].clone(), planes["values"][:0]
        index[0] = checksum(-1, planes["table"], nothing, nothing)
        begin = [0, 0, 0]
        for i in range((index.numel() - 1) // 4):
            ends = index[1 + 4 * i : 4 + 4 * i].tolist()
            parts = [planes[name][a:b] for name, a, b in zip(("stream", "places", "values"), begin, ends, strict=True)]
            index[4 + 4 * i] = checksum(i, *parts)
            begin = ends
        return {**planes, "index": index}

    def decode(self, planes: dict[str, Tensor]) -> Tensor:
        """By the launcher."""
        arguments = *planes.values(), self.step, *self.parameters
        return filled(self.n, self.dtype, launchers.sz_decode, *arguments)

    def reference(self, planes: dict[str, Tensor]) -> Tensor:
        """Likewise, by the reference."""
        return expected(self.n, self.dtype, reference.sz_decode, *planes.values(), self.step, *self.parameters)


@triton_test
@INTERPRETED
def test_damage_is_found_before_anything_is_written_on_triton() -> None:
    stash, dtype = Stash(torch.float16), torch.float16
    assert torch.equal(bits(stash.decode(stash.planes)), bits(stash.reference(stash.planes)))
    out = torch.full((stash.n,), 7.0, dtype=dtype)
    target = on_device(out)

    def found(planes: dict[str, Tensor]) -> None:
        moved = [on_device(plane) for plane in planes.values()]
        with pytest.raises(DamagedPlanesError, match="compute the step again"):
            launchers.sz_decode(*moved, stash.step, *stash.parameters, target)
        assert torch.equal(target.cpu(), out)

    for name, plane in stash.planes.items():
        for place in {0, plane.nbytes // 3, plane.nbytes - 1} | {8 * i for i in range(0, 13, 3) if name == "index"}:
            other = plane.clone()
            other.view(torch.uint8)[place] ^= 1 << place % 8
            found({**stash.planes, name: other})
        for other in (plane[: plane.numel() // 2], torch.cat([plane, plane.new_ones(1)])):
            found({**stash.planes, name: other})
    index = stash.planes["index"]
    for place, value in ((1, -1), (1, 2**62), (5, 2**40), (6, -(2**62)), (7, 2**31), (9, 0)):
        other = index.clone()
        other[place] = value
        found({**stash.planes, "index": other})
    swapped = index[[0, 1, 2, 3, 8, 5, 6, 7, 4, 9, 10, 11, 12]]
    found({**stash.planes, "index": swapped})


@triton_test
@INTERPRETED
@pytest.mark.parametrize("low", [0, 3])
def test_damage_behind_right_checksums_stays_inside_the_planes_on_triton(low: int) -> None:
    """Whatever the words are, decoding ends, writes to nothing but its output, and raises where the reference does."""
    stash = Stash(torch.float32, low)
    verdicts = set()
    for i in range(8):
        planes = {name: plane.clone() for name, plane in stash.planes.items()}
        name = ("stream", "table", "values", "stream")[i % 4]
        view = planes[name].view(torch.int16)
        where = torch.randint(view.numel(), (1 + i,))
        view[where] = torch.randint(-(2**15), 2**15, where.shape).to(torch.int16)
        if i == 3:
            planes["stream"].zero_()
        planes = stash.with_checksums(planes)
        results: list[Any] = []
        for decode in (stash.decode, stash.reference):
            try:
                results.append(decode(planes))
            except DamagedPlanesError:
                results.append(None)
        got, want = results
        assert (got is None) == (want is None), name
        assert got is None or torch.equal(bits(got), bits(want))
        verdicts.add(got is None)
    assert verdicts == {True, False}

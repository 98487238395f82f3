"""sz: its layout, its bound where rounding is hardest, what it keeps apart, and damage.

The file is long because damage is tried on each plane of the same few tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backstash.codecs import Encoded, ErrorBound, Sz
from backstash.codecs.sz import coding as sz
from backstash.codecs.sz.reference import check, predicted, restored
from backstash.errors import CodecRefusedError, DamagedPlanesError
from backstash.ops.backends import kernels
from backstash.ops.cpu import library
from backstash.saved import TensorSpec
from backstash.testing import equal_bits

reference = kernels("reference")
cpu = kernels("native") if library.available() else reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
BLOCKS = [1, 1, 1, sz.CHUNK]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def activations(*shape: int, zeros: float = 0.5, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a relu leaves of normal numbers, of which a share is below zero."""
    noise = torch.randn(shape, generator=generator(seed))
    return (noise - math.sqrt(2) * torch.erfinv(torch.tensor(2 * zeros - 1.0))).relu().to(dtype)


def limit(codec: Sz, x: Tensor) -> float:
    finite = x[x.isfinite()].double()
    return codec.error if codec.mode == "abs" else codec.error * float(finite.max() - finite.min())


def back(codec: Sz, x: Tensor) -> tuple[Encoded, Tensor]:
    """Encode and decode, and look at what is always true."""
    encoded = codec.encode(x)
    y = codec.decode(encoded)
    finite = x.isfinite()
    assert equal_bits(x[~finite], y[~finite])
    if finite.any():
        assert float((x.double() - y.double())[finite].abs().max()) <= limit(codec, x)
    assert not y[x == 0].count_nonzero()
    return encoded, y


def test_arguments() -> None:
    for error in (0.0, -1e-3, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"Sz was asked for error=.*, but that is how far .*: a positive finite"):
            Sz(error)
    with pytest.raises(ValueError, match=r"mode='relative', but there are 'abs' and 'rel'"):
        Sz(0.1, "relative")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"min_saving=1.0, but it is a share"):
        Sz(0.1, min_saving=1.0)
    assert Sz(0.1).bound == ErrorBound(abs=0.1)
    assert Sz(0.1, "rel").bound == ErrorBound(rel=0.1)
    assert Sz(1e-3, "rel").label == "sz+rel0.001"


def test_what_it_refuses() -> None:
    with pytest.raises(CodecRefusedError, match="it takes float32, bfloat16 and float16 only, not float64"):
        Sz().encode(torch.zeros(3, dtype=torch.float64))
    assert Sz().accepts(TensorSpec((3,), (1,), torch.bfloat16, torch.device("cuda"), 6)) is None
    assert Sz().declines(torch.zeros(0)) == "it is empty"
    assert "of its bits" in str(Sz(1e-30).declines(torch.randn(4096, generator=generator())))
    assert Sz(0.1).declines(activations(4096)) is None


def test_layout_of_one_symbol() -> None:
    """33 elements in one chunk: the coder of lane 0 has two, the others one; a symbol of all slots changes no state."""
    table = torch.tensor([0, 1, 255], dtype=torch.int16)
    x = torch.full((200,), 3.0)
    stream, index, places, values = reference.sz_encode(x, table, 1.0, 0.5, [3, 0, 0], BLOCKS)
    # Six steps of all lanes and one of 8: state -> state // 255 * 256 + state % 255 + 1.
    states = []
    for lane in range(sz.LANES):
        state = sz.LEAST
        for _ in range(7 if lane < 8 else 6):
            state = state // 255 * 256 + state % 255 + 1
        states += [state & 0xFFFF, state >> 16]
    assert (stream.int() & 0xFFFF).tolist() == states
    assert index[1:4].tolist() == [64, 0, 0]
    assert places.numel() == values.numel() == 0
    weights = 2 * np.arange(64, dtype=np.uint64) + 1
    with np.errstate(over="ignore"):
        seed = np.uint64(0x9E3779B97F4A7C15)
        sums = np.uint64(2) * seed + (weights * np.array(states, dtype=np.uint64)).sum()
        assert index.numpy().view(np.uint64)[4] == sums
        assert index.numpy().view(np.uint64)[0] == seed + np.uint64(3 * 1 + 5 * 255)


def test_layout_of_words() -> None:
    """An escape's two words lie before those that made room for it; the first step's are the last ones."""
    table = torch.tensor([255, 1], dtype=torch.int16)
    x = torch.zeros(512)
    x[1], x[40] = 70000.0, -2.0
    stream, *_ = reference.sz_encode(x, table, 1.0, 0.5, [0, 0, 0], BLOCKS)
    # An escape has one slot of 256: a state of at least 2**23 makes room first; 16 zeros leave it below that.
    assert (stream.int() & 0xFFFF)[64:].tolist() == [65534, 65535, 70000 & 0xFFFF, 70000 >> 16]


def test_layout_of_outliers_and_dense_chunks() -> None:
    x = torch.cat([activations(sz.CHUNK), torch.randn(100, generator=generator()) * 1e30, torch.zeros(0)])
    x[65535] = math.nan
    encoded, _ = back(Sz(0.1), x)
    words, places, values = (encoded.planes[name] for name in ("stream", "places", "values"))
    assert (places.int() & 0xFFFF).tolist() == [65535]
    assert equal_bits(values, x[65535:])  # all of the second chunk
    assert encoded.planes["index"][5:8].tolist() == [words.numel(), 1, 101]
    assert encoded.nbytes <= Sz(0.1).nbytes_bound(encoded.spec)


@pytest.mark.parametrize("low", [0, 3])
@pytest.mark.parametrize("axes", sz.AXES)
@pytest.mark.parametrize("sizes", [[7, 5, 3], [300, 300, 2], [70000, 3], [3, 5, 20000], [257], []])
def test_prediction_is_undone(sizes: list[int], axes: int, low: int) -> None:
    blocks = sz.blocks(sizes)
    row, plane, tile, chunk = blocks
    assert plane % row == tile % plane == chunk % tile == 0 and chunk <= sz.CHUNK < 2 * chunk
    codes = torch.randint(-(1 << 27), 1 << 27, (2 * math.prod(sizes) + 1,), generator=generator())
    less = predicted(codes, axes, blocks)
    assert torch.equal(restored(less, axes, blocks), codes)
    assert less.abs().max() <= 1 << 30
    for begin in range(0, codes.numel(), chunk):  # chunks know nothing of each other
        assert torch.equal(predicted(codes[begin : begin + chunk], axes, blocks), less[begin : begin + chunk])


def test_lorenzo_prediction_is_chosen_where_it_pays() -> None:
    t = torch.linspace(0, 6, 128)
    plane = torch.sin(t)[:, None] * torch.cos(1.3 * t) + 0.2 * t
    smooth = torch.stack([plane * (1 + 0.05 * k) for k in range(16)])
    assert Sz(1e-4).encode(smooth).meta["parameters"][2] == 7
    rows = torch.sin(t)[:, None] * torch.randn(1, 128, generator=generator())
    assert Sz(1e-3).encode(rows).meta["parameters"][2] == 2  # type: ignore[index]
    assert Sz(1e-3).encode(torch.randn(1 << 16, generator=generator()).cumsum(0)).meta["parameters"][2] == 1  # type: ignore[index]
    assert Sz(1e-2, "rel").encode(activations(4, 8, 32, 32)).meta["parameters"][2] == 0  # type: ignore[index]
    back(Sz(1e-4), smooth), back(Sz(1e-3), rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("error", [1e-1, 1e-2, 1e-3])
@pytest.mark.parametrize("zeros", [0.5, 0.8])
def test_ratio_is_near_the_entropy(zeros: float, error: float, dtype: torch.dtype) -> None:
    x = activations(8, 16, 64, 64, zeros=zeros, dtype=dtype)
    codec = Sz(error, "rel")
    encoded, _ = back(codec, x)
    codes = torch.round(x.double() / (2 * limit(codec, x))).long()
    shares = codes.unique(return_counts=True)[1].double() / x.numel()
    entropy = float(-(shares * shares.log2()).sum())
    share = 0.95 if dtype is torch.float32 else 0.9
    assert entropy / (8 * encoded.nbytes / x.numel()) >= share


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_numbers(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    tiny = info.smallest_normal
    x = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, info.max, info.min, tiny, -tiny, tiny / 4, 1.0, -1.0])
    x = torch.cat([x.to(dtype), torch.zeros(5000, dtype=dtype)])
    x.view(BITS[dtype])[12] = -1  # a NaN with a payload
    for codec in (Sz(1e-3), Sz(tiny / 64), Sz(1e300), Sz(5e-324), Sz(0.1, "rel"), Sz(1e300, "rel"), Sz(1e-300, "rel")):
        back(codec, x)
        back(codec, x[5:])
    for same in (x[:0], x[:1], x[2:5], x[5:6], x[9:10], torch.full((100,), 0.3, dtype=dtype)):
        for codec in (Sz(1e-9), Sz(0.1, "rel")):
            y = back(codec, same)[1]
            assert codec.mode == "abs" or torch.equal(same.nan_to_num(2.0), y.nan_to_num(2.0))
    assert Sz(0.1, "rel").encode(torch.full((1 << 16,), 0.3, dtype=dtype)).nbytes < 300


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_are_no_outliers(dtype: torch.dtype) -> None:
    """Numbers just between two multiples of the step are half a step from both, and that is the bound."""
    x = (torch.arange(-512, 512) / 8).to(dtype)
    for error in (0.125, 0.25, 0.5, 1.0):
        encoded, y = back(Sz(error), x)
        assert encoded.planes["places"].numel() == 0
        assert float((x - y).abs().max()) == error or error == 0.125


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_16_bits_is_within_the_bound(dtype: torch.dtype) -> None:
    """Numbers of all exponents, with bounds around the dtype's own steps."""
    x = torch.arange(-(1 << 15), 1 << 15, 7).to(torch.int16).view(dtype)
    for exponent in range(-14, 10, 5):
        for factor in (0.5, 0.51, 0.7, 0.99, 1.0, 1.01, 1.5):
            back(Sz(factor * 2.0**exponent), x)


def test_alternating_signs_and_smooth_and_constant() -> None:
    n = 20001
    for x in (torch.ones(n), torch.arange(n) * 1e-3, 1.0 - 2.0 * (torch.arange(n) % 2), torch.arange(n) % 7 * 1.0):
        for codec in (Sz(1e-4), Sz(1e-3, "rel")):
            encoded, _ = back(codec, x)
            assert encoded.nbytes * 4 < x.nbytes


def test_memory_order_is_kept() -> None:
    x = activations(4, 24, 20, 20).to(memory_format=torch.channels_last)
    encoded, y = back(Sz(1e-2), x)
    assert y.stride() == x.stride()
    same, _ = back(Sz(1e-2), x.permute(0, 2, 3, 1))
    assert all(equal_bits(plane, same.planes[name]) for name, plane in encoded.planes.items())


def values(draw: st.DrawFn, dtype: torch.dtype, n: int) -> Tensor:
    seed = draw(st.integers(0, 2**32))
    kind = draw(st.sampled_from(["normal", "relu", "heavy", "integers", "walk", "bits"]))
    x = torch.randn(n, generator=generator(seed))
    if kind == "relu":
        x = (x - draw(st.floats(-1, 2))).relu()
    elif kind == "heavy":
        x = x * torch.exp(5 * torch.randn(n, generator=generator(seed + 1)))
    elif kind == "integers":
        x = (4 * x).round() / draw(st.sampled_from([1, 2, 3, 8]))
    elif kind == "walk":
        x = x.cumsum(0)
    elif kind == "bits":
        info = torch.iinfo(BITS[dtype])
        return torch.randint(info.min, info.max, (n,), generator=generator(seed)).to(BITS[dtype]).view(dtype)
    x = x.to(dtype)
    for place, value in draw(st.lists(st.tuples(st.integers(0, max(0, n - 1)), st.floats(width=16)), max_size=5)):
        if n:
            x[place] = value
    return x


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, list[int], float, float, int]:
    """Elements, blocks, step, bound, low bits."""
    sizes = draw(
        st.one_of(
            st.lists(st.integers(1, 12), max_size=4),
            st.integers(0, 200).map(lambda n: [n]),
            st.sampled_from([[300, 300], [13, 17, 40], [65536, 2], [65535], [5, 20000], [40, 60, 70]]),
        )
    )
    x = values(draw, draw(st.sampled_from(DTYPES)), math.prod(sizes))
    bound = draw(st.one_of(st.sampled_from([2.0**-8, 0.25, 0.5]), st.floats(1e-9, 10.0), st.floats(1e-320, 1e300)))
    step = draw(st.sampled_from([2 * bound, sz.truncated(2 * bound, 2), bound / 3 or bound]))
    return x, sz.blocks(sizes), step, bound, draw(st.sampled_from([0, 0, 1, 4, 12]))


@pytest.fixture(params=library.ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if not library.available():
        pytest.skip("the native kernels are not built")
    before = library.isa()
    if library.set_isa(request.param) != request.param:
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    library.set_isa(before)


@given(case=cases(), axes=st.integers(0, 7), offset=st.sampled_from([0.0, 0.5]))
@settings(max_examples=25)
def test_native_planes_are_the_reference_s(
    case: tuple[Tensor, list[int], float, float, int], axes: int, offset: float
) -> None:
    if not library.available():
        pytest.skip("the native kernels are not built")
    x, blocks, step, bound, low = case
    assert torch.equal(cpu.sz_range(x), reference.sz_range(x))
    counts = reference.sz_survey(x, step, bound, low, blocks, offset)
    model = sz.model(counts.view(-1, sz.BINS).numpy(), step, low, 8 * x.element_size())
    table = torch.from_numpy(model.table)
    parameters = [model.base, low, axes], blocks
    expected = reference.sz_encode(x, table, step, bound, *parameters, offset)
    decoded = torch.empty_like(x)
    reference.sz_decode(table, *expected, step, *parameters, decoded, offset)
    finite = x.isfinite()
    assert equal_bits(x[~finite], decoded[~finite])
    assert not (x.double() - decoded.double())[finite].abs().gt(bound).any()
    before = library.isa()
    try:
        for name in library.ISAS:
            library.set_isa(name)
            assert equal_bits(cpu.sz_survey(x, step, bound, low, blocks, offset), counts), name
            planes = cpu.sz_encode(x, table, step, bound, *parameters, offset)
            assert all(equal_bits(*pair) for pair in zip(planes, expected, strict=True)), name
            memory = torch.full((x.numel() + 128,), 7.0, dtype=x.dtype)
            out = memory[64 : 64 + x.numel()]
            cpu.sz_decode(table, *planes, step, *parameters, out, offset)
            assert equal_bits(out, decoded), name
            assert bool((memory[:64] == 7).all()) and bool((memory[64 + x.numel() :] == 7).all())
    finally:
        library.set_isa(before)


@pytest.mark.parametrize(
    ("row", "axes", "zeros"),
    [(5, 3, 0.05), (7, 2, 0.05), (14, 2, 0.7), (33, 3, 0.05), (56, 3, 0.7), (56, 1, 0.05), (16, 7, 0.7)],
)
def test_native_rows_in_many_chunks_are_the_reference_s(row: int, axes: int, zeros: float) -> None:
    """Chunks enough to be coded two and four at a time, a last one that is shorter, and rows that fill no register."""
    if not library.available():
        pytest.skip("the native kernels are not built")
    blocks = sz.blocks([row, row, 4096])
    n = 5 * blocks[3] + 3 * row + 2
    x = activations(n, zeros=zeros).mul(40.0)
    x[:: n // 50] = torch.tensor([math.nan, 1e30, -math.inf, 700.26, -0.0]).repeat(11)[: len(x[:: n // 50])]
    counts = reference.sz_survey(x, 0.5, 0.25, 0, blocks, 0.0)
    model = sz.model(counts.view(-1, sz.BINS).numpy(), 0.5, 0, 32)
    arguments = torch.from_numpy(model.table), 0.5, 0.25, [model.base, 0, axes], blocks
    expected, decoded = reference.sz_encode(x, *arguments), torch.empty_like(x)
    reference.sz_decode(arguments[0], *expected, 0.5, [model.base, 0, axes], blocks, decoded)
    assert float((x - decoded)[x.isfinite()].abs().max()) <= 0.25
    planes, out = cpu.sz_encode(x, *arguments), torch.full_like(x, 7.0)
    assert all(equal_bits(*pair) for pair in zip(planes, expected, strict=True))
    cpu.sz_decode(arguments[0], *planes, 0.5, [model.base, 0, axes], blocks, out)
    assert equal_bits(out, decoded)


def test_what_has_no_zeros_has_none_after() -> None:
    x = torch.linspace(0.01, 0.99, 40000)
    for sign in (1, -1):
        y = Sz(0.1, nonzero=True).decode(Sz(0.1, nonzero=True).encode(sign * x))
        assert y.abs().unique().tolist() == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
        assert torch.equal(y.sign(), (sign * x).sign())
        assert float((y - sign * x).abs().max()) <= 0.1


@pytest.mark.parametrize("tail", [0, 1, 15, 16, 17, 31, 32, 33, 63])
def test_native_tails(tail: int, isa: str) -> None:
    for n in (tail, 4096 + tail, sz.CHUNK - 32 + tail):
        x = activations(n + 1)[1:]  # off alignment
        table = torch.tensor([120, 70, *[10] * 6, 6], dtype=torch.int16)
        arguments = table, 0.5, 0.25, [0, 0, 0], BLOCKS
        planes = cpu.sz_encode(x, *arguments)
        assert all(equal_bits(*pair) for pair in zip(planes, reference.sz_encode(x, *arguments), strict=True))
        out = torch.empty_like(x)
        cpu.sz_decode(table, *planes, 0.5, [0, 0, 0], BLOCKS, out)
        assert n == 0 or float((x - out).abs().max()) <= 0.25


def test_native_refuses_a_table_that_is_none(isa: str) -> None:
    right = torch.tensor([255, 1], dtype=torch.int16)
    planes = cpu.sz_encode(torch.zeros(3), right, 1.0, 0.5, [0, 0, 0], BLOCKS)
    for frequencies in ([256], [255, 2], [256, 0], [-1, 257], [8] * 33, [254 | 1 << 9, 1, 1], [1, 1, 254 | 8 << 9]):
        table = torch.tensor(frequencies, dtype=torch.int16)
        with pytest.raises(ValueError, match="sz_encode asked for frequencies"):
            cpu.sz_encode(torch.zeros(3), table, 1.0, 0.5, [0, 0, 0], BLOCKS)
        with pytest.raises(DamagedPlanesError):
            cpu.sz_decode(table, *planes, 1.0, [0, 0, 0], BLOCKS, torch.empty(3))


def damaged_once(planes: dict[str, Tensor], place: int, flip: int) -> dict[str, Tensor]:
    """One byte of the planes, seen as one piece of memory, changed."""
    copies = {name: plane.clone() for name, plane in planes.items()}
    for plane in copies.values():
        view = plane.view(torch.uint8)
        if place < view.numel():
            view[place] ^= flip
            break
        place -= view.numel()
    return copies


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flipped_byte_is_found(dtype: torch.dtype) -> None:
    x = activations(3, 300, dtype=dtype)
    x[0, 7], x[2, 9] = math.nan, 1e4
    encoded = Sz(0.1).encode(x)
    total = sum(plane.nbytes for plane in encoded.planes.values())
    for place in range(total):
        broken = replace(encoded, planes=damaged_once(dict(encoded.planes), place, 1 << place % 8 or 1))
        with pytest.raises(DamagedPlanesError, match="compute the step again"):
            Sz(0.1).decode(broken)


def rechecked(encoded: Encoded) -> Encoded:
    """With checksums that are right for what is there, so that decoding goes on to what they protect."""
    planes = dict(encoded.planes)
    index = planes["index"] = planes["index"].clone()
    index[0] = check(-1, planes["table"], planes["values"][:0], planes["values"][:0])
    begin = [0, 0, 0]
    for i in range((index.numel() - 1) // 4):
        ends = index[1 + 4 * i : 4 + 4 * i].tolist()
        parts = (planes[name][a:b] for name, a, b in zip(("stream", "places", "values"), begin, ends, strict=True))
        index[4 + 4 * i] = check(i, *parts)
        begin = ends
    return replace(encoded, planes=planes)


@given(seed=st.integers(0, 2**32), kind=st.integers(0, 3), low=st.booleans(), flips=st.integers(1, 40))
@settings(max_examples=100)
def test_damage_behind_right_checksums_never_crashes(seed: int, kind: int, low: bool, flips: int) -> None:
    """Whatever the words are, decoding reads and writes inside its planes, ends, and returns or raises."""
    draw = generator(seed)
    x = activations(5, 900, seed=seed) if kind else torch.randn(8, 30, 40, generator=draw).cumsum(0)
    x[0, 5] = math.inf
    codec = Sz(1e-6 if low else 0.01)
    encoded = codec.encode(x)
    planes = {name: plane.clone() for name, plane in encoded.planes.items()}
    for _ in range(flips):
        name = ("stream", "stream", "places", "table")[int(torch.randint(4, (1,), generator=draw))]
        bytes_ = planes[name].view(torch.uint8)
        if bytes_.numel():
            bytes_[int(torch.randint(bytes_.numel(), (1,), generator=draw))] = int(
                torch.randint(256, (1,), generator=draw)
            )
    if kind == 2:
        planes["stream"].zero_()
    if kind == 3:
        cut = int(torch.randint(64, 65 + planes["stream"].numel() // 8, (1,), generator=draw))
        planes["stream"] = planes["stream"][:cut].clone()
        planes["index"][1::4].clamp_(max=cut)
    broken = rechecked(replace(encoded, planes=planes))
    with suppress(DamagedPlanesError):
        assert codec.decode(broken).shape == x.shape


def test_planes_of_another_size_are_found() -> None:
    encoded = Sz(0.1).encode(activations(2000))
    for name, plane in encoded.planes.items():
        for other in (plane[:0], plane[: plane.numel() // 2], torch.cat([plane, plane, plane.new_ones(1)])):
            if other.numel() == plane.numel():
                continue
            with pytest.raises(DamagedPlanesError):
                Sz(0.1).decode(replace(encoded, planes={**encoded.planes, name: other.clone()}))


def test_swapped_chunks_are_found() -> None:
    x = activations(4 * sz.CHUNK)
    encoded = Sz(0.1).encode(x)
    index = encoded.planes["index"].clone()
    index[4], index[8] = index[8].clone(), index[4].clone()
    with pytest.raises(DamagedPlanesError):
        Sz(0.1).decode(replace(encoded, planes={**encoded.planes, "index": index}))

from __future__ import annotations

import math

import codec_strategies as tensors
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backstash.codecs import Encoded, Exponents
from backstash.errors import DamagedPlanesError
from backstash.saved import TensorSpec
from backstash.testing import equal_bits

DTYPES = (torch.float32, torch.bfloat16)
EITHER = st.sampled_from([Exponents(), Exponents(3)])
BLOCK = 512


@st.composite
def spread(draw: st.DrawFn) -> Tensor:
    """Floats whose exponents are anywhere in a range, which may be all of them, and differ from block to block."""
    dtype, layout = draw(st.sampled_from(DTYPES)), draw(tensors.layouts())
    n, generator = tensors.needed(layout), torch.Generator().manual_seed(draw(tensors.SEEDS))
    width = draw(st.sampled_from([1, 6, 7, 14, 15, 40, 256]))
    low = torch.randint(0, 257 - width, (n // BLOCK + 1,), generator=generator).repeat_interleave(BLOCK)[:n]
    exponents = low + torch.randint(0, width, (n,), generator=generator)
    shift = 8 * dtype.itemsize - 9
    rest = torch.randint(0, 1 << shift, (n,), generator=generator)
    negative = torch.randint(0, 2, (n,), generator=generator)
    bits = (exponents << shift | rest) - (negative << (8 * dtype.itemsize - 1))  # the sign bit, in two's complement
    return tensors.arranged(bits.to(tensors.BITS[dtype.itemsize]).view(dtype), layout)


@given(st.one_of(tensors.floats(DTYPES), spread(), tensors.two_values().filter(lambda x: x.dtype in DTYPES)), EITHER)
def test_every_bit_comes_back(x: Tensor, codec: Exponents) -> None:
    encoded = codec.encode(x)
    assert encoded.nbytes <= codec.nbytes_bound(encoded.spec)
    assert equal_bits(codec.decode(encoded), x)


def window(exponents: list[int], bits: int) -> int:
    """What the window of a block begins after."""
    width = 2**bits - 2
    lanes = [max(exponents[lane::32]) for lane in range(min(32, len(exponents)))]
    low = min((largest for largest in lanes if largest), default=255)
    bases = [min(max(0, top - width), 255 - width) for top in (max(lanes), low + 2, low + 1, low)]
    return max(bases, key=lambda base: sum(base < each <= base + width for each in exponents))  # the first of several


@given(st.one_of(tensors.floats(DTYPES), spread()), EITHER)
def test_layout(x: Tensor, codec: Exponents) -> None:
    planes, n, bits = codec.encode(x).planes, x.numel(), codec.bits
    words = x.as_strided((n,), (1,)).contiguous().view(tensors.BITS[x.element_size()]).numpy().astype(np.int64)
    words &= 2 ** (8 * x.element_size()) - 1
    tops = words >> (8 * x.element_size() - 16)
    exponents = (tops >> 7 & 255).tolist()
    lower = (words & 0xFFFF).astype("<u2").tobytes() if x.element_size() == 4 else b""
    upper = (tops >> 15 << 7 | tops & 127).astype(np.uint8).tobytes()
    assert planes["fractions"].numpy().tobytes() == lower + upper

    bases = [window(exponents[start : start + BLOCK], bits) for start in range(0, n, BLOCK)]
    assert planes["bases"].tolist() == bases
    stream = np.unpackbits(planes["codes"].numpy(), bitorder="little")
    assert not stream[n * bits :].any()
    codes = (stream[: n * bits].reshape(n, bits) << np.arange(bits)).sum(1).tolist()
    escapes, starts, last = [], [], 2**bits - 1
    for i, (exponent, code) in enumerate(zip(exponents, codes, strict=True)):
        if i % 4096 == 0:
            starts.append(len(escapes))
        above = exponent - bases[i // BLOCK]
        assert code == (0 if exponent == 0 else above if 1 <= above < last else last)
        if code == last:
            escapes.append(exponent)
    assert planes["escapes"].tolist() == escapes
    assert planes["offsets"].tolist() == starts


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_smallest_and_the_largest_size(dtype: torch.dtype) -> None:
    n = 3 * 4096
    fixed = (dtype.itemsize - 1) * n + n // 2 + n // BLOCK + 8 * 3
    zeros = torch.zeros(n, dtype=dtype)
    assert Exponents().encode(zeros).nbytes == fixed
    scattered = torch.ldexp(torch.ones(n), (torch.arange(n) * 16) % 250 - 120).to(dtype)
    encoded = Exponents().encode(scattered)
    assert fixed + 0.8 * n < encoded.nbytes <= Exponents().nbytes_bound(TensorSpec.of(scattered)) == fixed + n
    assert equal_bits(Exponents().decode(encoded), scattered)


@pytest.mark.parametrize("bits", [3, 4])
def test_outliers_cost_no_more_than_themselves(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator).bfloat16()
    before = Exponents(bits).encode(x).planes["escapes"].numel()
    x[:, 3] *= 2.0**20
    x[:, 100] *= 2.0**30
    x[:, 80:90:3] *= 300.0
    x[5, 7], x[9, 9] = math.inf, math.nan
    assert Exponents(bits).encode(x).planes["escapes"].numel() <= before + 6 * 64 + 2


@pytest.mark.parametrize(("bits", "ratio"), [(4, 1.325), (3, 1.39)])
def test_normal_numbers_in_bfloat16(bits: int, ratio: float) -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert x.nbytes / Exponents(bits).encode(x).nbytes > ratio


@given(st.integers(1, 9000), st.sampled_from([-(2**40), -1, 1, 7, 2**40]), st.data())
def test_offsets_that_do_not_fit_are_damage(n: int, wrong: int, data: st.DataObject) -> None:
    encoded = Exponents().encode(_scattered(n))
    offsets = encoded.planes["offsets"].clone()
    offsets[data.draw(st.integers(0, len(offsets) - 1))] += wrong
    with pytest.raises(DamagedPlanesError, match="planes that disagree"):
        Exponents().decode(_with(encoded, offsets=offsets))


@given(st.integers(1, 9000), EITHER, st.data())
def test_another_number_of_escapes_in_the_codes_is_damage(n: int, codec: Exponents, data: st.DataObject) -> None:
    encoded = codec.encode(_scattered(n))
    stream = np.unpackbits(encoded.planes["codes"].numpy(), bitorder="little")
    where = codec.bits * data.draw(st.integers(0, n - 1))
    is_escape = stream[where : where + codec.bits].all()
    stream[where : where + codec.bits] = not is_escape
    codes = torch.from_numpy(np.packbits(stream, bitorder="little"))
    with pytest.raises(DamagedPlanesError, match="planes that disagree"):
        codec.decode(_with(encoded, codes=codes))


@pytest.mark.parametrize("plane", ["fractions", "codes", "bases", "offsets", "escapes"])
def test_a_plane_too_long_is_damage(plane: str) -> None:
    encoded = Exponents().encode(_scattered(5000))
    longer = torch.cat([encoded.planes[plane], encoded.planes[plane][:1]])
    with pytest.raises(DamagedPlanesError, match="compute the step again"):
        Exponents().decode(_with(encoded, **{plane: longer}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("n", [100, 4000, 1_000_000])
def test_declines_what_would_not_get_smaller(n: int, bits: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    codec = Exponents(bits)
    normal = torch.randn(n, generator=generator).to(dtype)
    assert codec.declines(normal) is None
    noise = torch.randint(-(2**15), 2**15, (n,), generator=generator).to(torch.int16).view(torch.bfloat16).to(dtype)
    assert (codec.declines(noise) or "").endswith("of a sample is out of its window of exponents")
    assert Exponents(bits, min_saving=0.4).declines(normal) is not None


def test_a_sample_is_judged_by_the_windows_of_its_places() -> None:
    """Each part has exponents of its own, and together they would not fit into one window."""
    parts = torch.arange(200).repeat_interleave(5120) - 100
    x = torch.ldexp(torch.randn(parts.numel(), generator=torch.Generator().manual_seed(0)), parts)
    assert Exponents().declines(x) is None
    assert x.nbytes / Exponents().encode(x).nbytes > 1.13


def test_empty_is_declined() -> None:
    assert Exponents().declines(torch.empty(0)) == "it is empty"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int16])
def test_what_has_no_exponent_of_8_bits_is_refused(dtype: torch.dtype) -> None:
    reason = Exponents().accepts(TensorSpec.of(torch.zeros(4, dtype=dtype)))
    assert reason == "it takes float32 and bfloat16 only, whose exponents have 8 bits"


def test_parameters_that_mean_nothing() -> None:
    for bits in (2, 5, 8, 0):
        with pytest.raises(ValueError, match="but a code has 3 or 4"):
            Exponents(bits)
    for share in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match="but it is a share"):
            Exponents(min_saving=share)


@pytest.mark.parametrize("bits", [3, 4])
def test_a_draft_is_what_the_encoding_is_if_there_is_room(bits: int) -> None:
    codec, x = Exponents(bits), _scattered(9000)
    encoded = codec.encode(x)
    known = codec.known(encoded)
    assert known == encoded.planes["escapes"].numel()
    draft = codec.draft(x, known)
    judged = draft.judge(draft.numbers.tolist())
    assert judged.refusal is None and judged.known == known and judged.cut is not None
    cut = judged.cut(draft.encoded)
    assert all(equal_bits(plane, encoded.planes[name]) for name, plane in cut.planes.items())
    assert equal_bits(codec.decode(cut), x)
    lacking = codec.draft(x, known // 4)
    assert "room for" in (lacking.judge(lacking.numbers.tolist()).refusal or "")


def _scattered(n: int) -> Tensor:
    """Numbers of which a good part are escapes."""
    return torch.randn(n, generator=torch.Generator().manual_seed(n)) * 2.0 ** (torch.arange(n) % 30).float()


def _with(encoded: Encoded, **planes: Tensor) -> Encoded:
    return Encoded(encoded.codec, encoded.spec, {**encoded.planes, **planes}, encoded.meta)

from __future__ import annotations

import math
from contextlib import nullcontext, suppress

import codec_strategies as tensors
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from backstash import Session, Stash, policies
from backstash.codecs import Encoded, Szp
from backstash.codecs.base import ErrorBound
from backstash.errors import CodecRefusedError, DamagedPlanesError
from backstash.ops.bits import bits_of
from backstash.policies import Rules
from backstash.saved import Mask, Test
from backstash.testing import check_codec

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ERRORS = st.one_of(st.floats(1e-8, 1e3), st.floats(min_value=5e-324, max_value=1.7e308))


def through(codec: Szp, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x))


@given(tensors.floats(FLOATS), ERRORS, st.sampled_from(["abs", "rel"]))
def test_every_element_is_within_the_bound(x: Tensor, error: float, mode: str) -> None:
    if x.numel():
        check_codec(Szp(error, mode), [x])


@given(st.sampled_from(FLOATS), st.floats(-30, 30), st.floats(1e-7, 0.3), st.integers(0, 2**32))
def test_ordinary_numbers_of_any_size(dtype: torch.dtype, exponent: float, error: float, seed: int) -> None:
    x = (torch.randn(5000, generator=torch.Generator().manual_seed(seed)) * 2**exponent).to(dtype)
    x = x[x.isfinite()]
    y = through(Szp(error * 2**exponent), x)
    assert ((x.double() - y.double()).abs() <= error * 2**exponent).all()
    assert torch.equal(x.sign(), y.sign())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("error", [1e-9, 0.001, 0.0999, 1.0, 3.0, 1000.0, 1e5, 1e39])
def test_every_number_of_16_bits(dtype: torch.dtype, error: float) -> None:
    check_codec(Szp(error), [torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)])


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_signs_infinities_and_nans_stay(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal
    x = torch.tensor([0.0, -0.0, tiny, -tiny, 0.3, -0.3, math.inf, -math.inf, math.nan], dtype=dtype)
    x = torch.cat([x, bits_of(x)[-1:].add(1).view(dtype)])  # a payload
    for part in (x, x[:6]):
        y = through(Szp(0.1), part)
        assert y[:2].eq(0).all()
        assert torch.equal(y[:6].sign(), x[:6].sign())
    assert torch.equal(bits_of(through(Szp(0.1), x))[6:], bits_of(x)[6:])


def test_layout() -> None:
    x = torch.zeros(4096 + 40)
    x[3], x[9] = 1.0, -4.5
    x[4096:] = 2.0
    encoded = Szp(0.5).encode(x)
    step = 1 - 2.0**-8
    assert encoded.planes["step"].tolist() == [step]
    assert encoded.planes["mask"][:2].tolist() == [8, 2]
    assert encoded.planes["offsets"].tolist() == [0, 5]
    # 1 and 5 steps: three bits, of which the words have one each, and one of signs.
    assert encoded.planes["words"][:5].tolist() == [64 + 3, 0b11, 0b00, 0b10, 0b10]
    assert encoded.planes["words"][5:].tolist() == [2 + 256 * 2, 0, -1, 0, 0xFF]
    assert Szp(0.5).decode(encoded)[[3, 9, 4100]].tolist() == [step, -5 * step, 2 * step]


def test_what_has_fewer_than_half_a_step_takes_no_words() -> None:
    assert Szp(10.0).encode(torch.ones(4096)).planes["words"].numel() == 32
    assert through(Szp(10.0), torch.ones(3)).tolist() == [5 * (1 - 2.0**-8)] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_16_bits_the_step_is_a_power_of_two(dtype: torch.dtype) -> None:
    for error, step in ((0.5, 1.0), (0.6, 1.0), (1e-3, 2.0**-9)):
        encoded = Szp(error).encode(torch.randn(1000).to(dtype))
        assert encoded.planes["step"].tolist() == [step]


def test_one_block_with_a_nan_is_stored_as_it_is() -> None:
    x = torch.arange(256) % 32 / 48 + 0.6  # up to 1.25, so up to 7 steps of 0.2: three bits in each block
    plain = Szp(0.1).encode(x).nbytes
    x[40] = math.nan
    assert Szp(0.1).encode(x).nbytes == plain + 4 * (32 - 3)


def test_rel_is_a_share_of_the_range_of_what_is_finite() -> None:
    x = torch.tensor([10.0, 10.5, 12.0, math.inf, math.nan])
    y = through(Szp(0.1, "rel"), x)
    assert (x - y)[:3].abs().max() <= 0.2
    assert Szp(0.1, "rel").encode(x).planes["step"].item() == pytest.approx(0.4, rel=0.01)
    constant = torch.full((100,), 0.1)
    assert torch.equal(through(Szp(0.1, "rel"), constant), constant)


@pytest.mark.parametrize("error", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_no_bound(error: float) -> None:
    with pytest.raises(ValueError, match=r"asked for error=.*, but a bound is a finite number above zero"):
        Szp(error)


def test_parameters() -> None:
    with pytest.raises(ValueError, match=r"mode='relative', but there are 'abs', 'rel'"):
        Szp(0.1, "relative")
    assert Szp(0.1).bound == ErrorBound(abs=0.1)
    assert Szp(0.1, "rel").bound == ErrorBound(rel=0.1)
    assert Szp().declines(torch.empty(0)) == "it is empty"


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.complex64])
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(CodecRefusedError, match="takes float32, bfloat16 and float16 only, not "):
        Szp().encode(torch.zeros(4, dtype=dtype))


def test_keeps_tests_against_zero() -> None:
    assert Szp().keeps(Mask(Test.NOT_LE))
    assert Szp().keeps(Mask(Test.GT, 0.0, ternary=True, nan=True))
    assert Szp().keeps(Mask(Test.CLOSED, 0.0, math.inf))
    assert not Szp().keeps(Mask(Test.NONZERO))
    assert not Szp().keeps(Mask(Test.NOT_LE, 0.1))


@given(st.integers(1, 9000), st.sampled_from(["mask", "offsets", "words", "step"]), st.data())
def test_damage(n: int, plane: str, data: st.DataObject) -> None:
    codec = Szp(0.1)
    encoded = codec.encode(torch.randn(n, generator=torch.Generator().manual_seed(n)))
    cut = encoded.planes[plane][: data.draw(st.integers(0, encoded.planes[plane].numel() - 1))]
    for damaged in (cut, torch.cat([encoded.planes[plane], cut, encoded.planes[plane][:1]])):
        with pytest.raises(DamagedPlanesError, match="compute the step again"):
            codec.decode(Encoded(encoded.codec, encoded.spec, {**encoded.planes, plane: damaged}))


@given(st.integers(1, 9000), st.data())
def test_damaged_words_never_crash(n: int, data: st.DataObject) -> None:
    codec = Szp(0.1)
    encoded = codec.encode(torch.randn(n, generator=torch.Generator().manual_seed(n)))
    words = encoded.planes["words"].clone()
    for _ in range(3):
        words[data.draw(st.integers(0, len(words) - 1))] = data.draw(st.integers(-(2**31), 2**31 - 1))
    with suppress(DamagedPlanesError):
        codec.decode(Encoded(encoded.codec, encoded.spec, {**encoded.planes, "words": words}))


def test_one_value_serves_the_relu_and_the_convolution_after_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    x, gradients = torch.randn(4, 3, 24, 24), []
    rules = Rules((("*Convolution*:input", Stash((Szp(1e-3), "zvc"))),), policies.get("lossless"))
    for session in (nullcontext(), Session(rules, min_nbytes=0)):
        model.zero_grad()
        with session:
            loss = model(x).square().sum()
        loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert "szp" in {row.codec for row in session.report().rows}
    for exact, close in zip(*gradients, strict=True):
        assert (exact - close).norm() < 1e-3 * exact.norm()

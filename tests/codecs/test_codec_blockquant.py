from __future__ import annotations

import math

import codec_strategies as tensors
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backstash.codecs import BlockQuant, Encoded
from backstash.codecs.base import ErrorBound
from backstash.errors import CodecRefusedError, DamagedPlanesError
from backstash.ops.backends import kernels
from backstash.ops.bits import unpack_fields
from backstash.testing import check_codec
from backstash.testing.comparison import compare_bounded

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EVERY = [
    BlockQuant(bits, size, rounding)
    for bits in (1, 2, 4, 8)
    for size in (16, 256)
    for rounding in ("stochastic", "nearest")
]


def through(codec: BlockQuant, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x))


@pytest.mark.parametrize("codec", EVERY, ids=str)
@given(x=tensors.floats(FLOATS))
def test_every_element_is_within_the_bound_or_all_is_refused(codec: BlockQuant, x: Tensor) -> None:
    if x.numel():
        check_codec(codec, [x, torch.ones(3)])


@pytest.mark.parametrize("codec", EVERY, ids=str)
@given(st.sampled_from(FLOATS), st.floats(-126, 126), st.floats(-1e4, 1e4), st.integers(0, 2**32))
def test_numbers_of_any_size(codec: BlockQuant, dtype: torch.dtype, exponent: float, mean: float, seed: int) -> None:
    x = (torch.randn(700, generator=torch.Generator().manual_seed(seed)) + mean) * 2**exponent
    x = x.clamp(-torch.finfo(dtype).max / 2, torch.finfo(dtype).max / 2).to(dtype)
    compare_bounded(repr(codec), codec.bound, x, through(codec, x))


def test_layout() -> None:
    x = torch.cat([torch.linspace(-1, 2, 16), torch.full((3,), 7.0)])
    encoded = BlockQuant(2, 16, "nearest").encode(x)
    assert encoded.planes["ranges"].tolist() == [-1, 2, 7, 7]
    codes = unpack_fields(encoded.planes["codes"], 2, 19).tolist()
    assert codes == [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 0, 0, 0]
    assert BlockQuant(2, 16).decode(encoded)[[0, 4, 8, 15, 18]].tolist() == [-1, 0, 1, 2, 7]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_extremes_and_constants_are_exact(bits: int) -> None:
    x = torch.rand(10, 256, generator=torch.Generator().manual_seed(bits))
    x[:, 0], x[:, 1] = -3.0, 5.0
    y = through(BlockQuant(bits), x)
    assert y[:, 0].eq(-3).all() and y[:, 1].eq(5).all()
    assert through(BlockQuant(bits), torch.full((300,), 0.1)).eq(torch.tensor(0.1)).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_stochastic_rounding_is_right_on_average(bits: int, dtype: torch.dtype) -> None:
    """The mean of what 40,000 equal elements become is within 4.5 standard errors of what they were."""
    levels, groups = 2**bits - 1, 160
    for share in (0.01, 0.1, 0.3, 0.5, 0.77, 0.999):
        x = torch.full((groups, 256), share * levels).to(dtype)
        x[:, 0], x[:, 1] = 0.0, levels
        for seed in range(3):
            y = through(BlockQuant(bits, seed=seed), x)[:, 2:].double()
            was = float(x[0, 2])
            fraction = was % 1
            error = math.sqrt(max(fraction * (1 - fraction), 1e-4) / y.numel())
            assert abs(float(y.mean()) - was) < 4.5 * error, (share, seed)
            assert y.unique().numel() <= 2


def test_stochastic_rounding_of_neighbours_groups_and_seeds_is_independent() -> None:
    x = torch.full((400, 256), 0.5)
    x[:, 0] = 0.0
    x[:, 1] = 1.0 + torch.arange(400) / 1000  # groups of other ranges
    up = [(through(BlockQuant(1, seed=seed), x)[:, 2:] > 0).double() - 0.5 / x[:, 1:2] for seed in (0, 1)]
    limit = 4.5 * 0.25 / math.sqrt(up[0].numel())
    assert abs(float((up[0] * up[1]).mean())) < limit
    for a in up:
        assert abs(float((a[:, 1:] * a[:, :-1]).mean())) < limit
        assert abs(float((a[1:] * a[:-1]).mean())) < limit
        assert abs(float((a[:, 8:] * a[:, :-8]).mean())) < limit


def test_the_same_tensor_is_rounded_alike_and_another_one_is_not() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    codec = BlockQuant()
    codes = codec.encode(x).planes["codes"]
    assert torch.equal(codes, codec.encode(x.clone()).planes["codes"])
    grown = x * (1 + 2.0**-20)  # the same shares of a range
    assert (codes != codec.encode(grown).planes["codes"]).float().mean() > 0.3
    assert (codes != BlockQuant(seed=1).encode(x).planes["codes"]).float().mean() > 0.3


@pytest.mark.parametrize("strange", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_refused(strange: float) -> None:
    x = torch.randn(1000)
    x[700] = strange
    with pytest.raises(CodecRefusedError, match="got 1 elements or ranges that are infinite or NaN"):
        BlockQuant().encode(x)
    with pytest.raises(CodecRefusedError, match="got 1 elements or ranges"):
        BlockQuant().encode(torch.tensor([-3e38, 3e38]))


def test_parameters() -> None:
    for wrong in ({"bits": 3}, {"bits": 0}, {"group_size": 100}, {"group_size": 8192}, {"rounding": "up"}):
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=f"asked for {name}={value!r}, but the choices are "):
            BlockQuant(**wrong)
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=f"seed={seed}, but a seed is at least 0"):
            BlockQuant(seed=seed)
    assert BlockQuant(8, rounding="nearest").bound == ErrorBound(rel=(1 + 2**-10) / 510, ulps=1, group_size=256)
    assert BlockQuant().label == "blockquant2"


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.complex64])
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(CodecRefusedError, match="takes float32, bfloat16 and float16 only, not "):
        BlockQuant().encode(torch.zeros(4, dtype=dtype))


@pytest.mark.parametrize("plane", ["codes", "ranges"])
def test_damage(plane: str) -> None:
    codec = BlockQuant()
    encoded = codec.encode(torch.randn(1000))
    kept = encoded.planes[plane]
    for damaged in (kept[:-1], kept[:0], torch.cat([kept, kept[:1]])):
        planes = {**encoded.planes, plane: damaged}
        with pytest.raises(DamagedPlanesError, match=f"whose plane '{plane}' has"):
            codec.decode(Encoded(encoded.codec, encoded.spec, planes))
        for ops in (torch.ops.backstash, kernels("reference")):
            with pytest.raises(DamagedPlanesError, match=f"{plane}"):
                ops.blockquant_decode(planes["codes"], planes["ranges"], 2, 256, torch.empty(1000))


def test_a_broken_bound_of_groups_is_caught() -> None:
    bound = ErrorBound(rel=0.1, ulps=1, group_size=2)
    x = torch.tensor([0.0, 100.0, 0.0, 1.0])
    compare_bounded("here", bound, x, torch.tensor([9.0, 100.0, 0.05, 1.0]))
    with pytest.raises(AssertionError, match="in a group 0.1"):
        compare_bounded("here", bound, x, torch.tensor([9.0, 100.0, 0.2, 1.0]))

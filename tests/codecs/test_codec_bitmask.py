"""The tests against Python's own floats, for every mask that a backward formula has."""

from __future__ import annotations

import math

import codec_strategies as tensors
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backstash.codecs import Bitmask
from backstash.errors import DamagedPlanesError
from backstash.saved import Mask, Test
from backstash.testing import equal_bits

MASKS = {
    "relu": Mask(Test.NOT_LE),
    "threshold": Mask(Test.NOT_LE, 0.5, if_set=math.inf, if_clear=0.5),
    "leaky_relu": Mask(Test.GT),
    "hardtanh": Mask(Test.NOT_OUTSIDE, -1.0, 1.0, if_set=0.0, if_clear=-1.0),
    "relu6": Mask(Test.NOT_OUTSIDE, 0.0, 6.0, if_set=3.0, if_clear=0.0),
    "hardsigmoid": Mask(Test.INSIDE, -3.0, 3.0, if_set=0.0, if_clear=3.0),
    "shrink": Mask(Test.CLOSED, -0.5, 0.5, if_set=0.0, if_clear=math.inf),
    "clamp": Mask(Test.CLOSED, -1.0, 2.0, if_set=-1.0, if_clear=math.nan),
    "clamp_min": Mask(Test.CLOSED, 0.0, math.inf, if_set=0.0, if_clear=math.nan),
    "clamp_max": Mask(Test.CLOSED, -math.inf, 0.0, if_set=0.0, if_clear=math.nan),
    "nan_to_num": Mask(Test.INSIDE, -math.inf, math.inf, if_set=0.0, if_clear=math.inf),
    "nansum": Mask(Test.CLOSED, -math.inf, math.inf, if_set=0.0, if_clear=math.nan),
    "nonzero": Mask(Test.NONZERO),
    "rounded bounds": Mask(Test.CLOSED, -0.1, 0.1, if_set=0.0, if_clear=1.0),
}
SIGN = Mask(Test.GT, ternary=True)


def outcome(mask: Mask, value: float, dtype: torch.dtype) -> bool:
    """The test on Python floats, which hold every value of the tensors' dtypes exactly."""
    low, high = (float(torch.tensor(bound, dtype=dtype)) for bound in (mask.lo, mask.hi))
    return {
        Test.NOT_LE: not value <= low,
        Test.GT: value > low,
        Test.INSIDE: low < value < high,
        Test.NOT_OUTSIDE: not (value <= low or value >= high),
        Test.CLOSED: low <= value <= high,
        Test.NONZERO: value != 0 or math.copysign(1.0, value) < 0,
    }[mask.test]


def outcomes(mask: Mask, x: Tensor) -> Tensor:
    values = x.double().contiguous().reshape(-1).tolist()
    return torch.tensor([outcome(mask, value, x.dtype) for value in values], dtype=torch.bool).view(x.shape)


@given(tensors.floats(), st.sampled_from(list(MASKS)))
def test_outcomes_and_stand_ins(x: Tensor, name: str) -> None:
    mask = MASKS[name]
    codec, expected = Bitmask(mask), outcomes(mask, x)
    encoded = codec.encode(x)
    assert torch.equal(codec.decode(encoded, torch.empty_like(x, dtype=torch.bool)), expected)
    chosen = torch.where(expected, torch.tensor(mask.if_set, dtype=x.dtype), torch.tensor(mask.if_clear, dtype=x.dtype))
    assert equal_bits(codec.decode(encoded, torch.empty_like(x)), chosen)


@given(tensors.floats())
def test_sign_of_three_values(x: Tensor) -> None:
    codec = Bitmask(SIGN)
    encoded = codec.encode(x)
    expected = (x > 0).to(x.dtype) - (x < 0).to(x.dtype)
    assert equal_bits(codec.decode(encoded, torch.empty_like(x)), expected)
    assert equal_bits(codec.decode(encoded), expected)


@pytest.mark.parametrize("name", [name for name in MASKS if name != "rounded bounds"])
@pytest.mark.parametrize("dtype", tensors.FLOATS)
def test_stand_ins_pass_or_fail_as_what_they_stand_for(name: str, dtype: torch.dtype) -> None:
    mask = MASKS[name]
    stand_ins = torch.tensor([mask.if_set, mask.if_clear], dtype=dtype)
    assert outcomes(mask, stand_ins).tolist() == [True, False]


@given(tensors.floats())
def test_layout(x: Tensor) -> None:
    bits = np.unpackbits(Bitmask().encode(x).planes["mask"].numpy(), bitorder="little")
    in_memory_order = outcomes(Mask(Test.NOT_LE), x.as_strided((x.numel(),), (1,)))
    assert bits[: x.numel()].astype(bool).tolist() == in_memory_order.tolist()
    assert not bits[x.numel() :].any()


def test_decodes_to_bool_without_out() -> None:
    assert Bitmask().decode(Bitmask().encode(torch.ones(3))).dtype == torch.bool


@pytest.mark.parametrize("plane", ["mask", "negative"])
def test_a_plane_too_long_is_damage(plane: str) -> None:
    encoded = Bitmask(SIGN).encode(torch.ones(64))
    planes = {**encoded.planes, plane: torch.zeros(9, dtype=torch.uint8)}
    damaged = type(encoded)(encoded.codec, encoded.spec, planes)
    with pytest.raises(DamagedPlanesError, match=rf"plane '{plane}' has 8 elements, got 9\. .* compute the step again"):
        Bitmask(SIGN).decode(damaged, torch.empty(64))

from __future__ import annotations

import math

import codec_strategies as tensors
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor

from backstash.codecs import Binary
from backstash.errors import CodecRefusedError
from backstash.testing import equal_bits


@given(tensors.two_values())
def test_every_bit_comes_back(x: Tensor) -> None:
    try:
        encoded = Binary().encode(x)
    except CodecRefusedError:
        assert x.numel() == 0
        return
    assert equal_bits(Binary().decode(encoded), x)


@pytest.mark.parametrize("dtype", tensors.FLOATS)
@pytest.mark.parametrize("pair", [(0.0, -0.0), (math.nan, 1.0), (math.inf, -math.inf), (0.0, 1.25)])
def test_pairs(dtype: torch.dtype, pair: tuple[float, float]) -> None:
    x = torch.tensor(pair, dtype=dtype).repeat(33)
    assert Binary().declines(x) is None
    encoded = Binary().encode(x)
    assert equal_bits(encoded.planes["pair"], x[:2])
    assert equal_bits(Binary().decode(encoded), x)


def test_one_value_is_declined_but_can_be_encoded() -> None:
    x = torch.full((100,), 3.0)
    assert Binary().declines(x) == "a sample has one value"
    assert equal_bits(Binary().decode(Binary().encode(x)), x)


def test_more_values_are_declined() -> None:
    assert Binary().declines(torch.randn(100)) == "a sample has more than two values"


@pytest.mark.parametrize("where", [1, 4095, 50_000, 99_999])
def test_a_third_value_outside_the_sample_is_refused(where: int) -> None:
    x = torch.zeros(100_000)
    x[::2] = 1.0
    x[where] = -0.0
    with pytest.raises(CodecRefusedError, match=r"got \d+ elements with another one\. Use zvc, or Keep\(\)\."):
        Binary().encode(x)


def test_dropout_is_told_by_looking() -> None:
    mask = F.dropout(torch.ones(4096), 0.3)
    assert Binary().declines(mask) is None
    assert Binary().encode(mask).nbytes == 512 + 8


def test_empty_is_declined_for_what_it_is() -> None:
    with pytest.raises(CodecRefusedError):
        Binary().encode(torch.empty(0))

from __future__ import annotations

import codec_strategies as tensors
import pytest
import torch
from hypothesis import given
from torch import Tensor

from backstash.codecs import Shape
from backstash.codecs.shape import stand_in
from backstash.report.meter import CountedPeak
from backstash.saved import TensorSpec


@given(tensors.floats())
def test_holds_nothing_and_decodes_to_zeros(x: Tensor) -> None:
    encoded = Shape().encode(x)
    assert encoded.nbytes == 0
    assert dict(encoded.planes) == {}
    for out in (None, torch.full_like(x, float("nan"))):
        got = Shape().decode(encoded, out)
        assert (got.shape, got.stride(), got.dtype) == (x.shape, x.stride(), x.dtype)
        assert not got.any()


def test_takes_what_is_not_dense() -> None:
    for x in (torch.ones(1).expand(3, 4), torch.ones(4, 6)[::2, 1::2]):
        got = Shape().decode(Shape().encode(x))
        assert (got.shape, got.stride()) == (x.shape, x.stride())


def test_a_stand_in_costs_no_memory_of_torch() -> None:
    spec = TensorSpec.of(torch.empty(1 << 20))
    stand_in(spec)
    with CountedPeak() as counter:
        kept = stand_in(spec)
    assert counter.peak_nbytes < 1024
    assert kept.sum() == 0


def test_stand_ins_outlive_the_growth_of_their_memory() -> None:
    small = stand_in(TensorSpec.of(torch.empty(8)))
    large = stand_in(TensorSpec.of(torch.empty(1 << 22)))
    assert not small.any()
    assert not large[-1]


@pytest.mark.parametrize("dtype", [*tensors.FLOATS, *tensors.INTEGERS, *tensors.OTHERS, torch.bool])
def test_stand_ins_of_every_dtype(dtype: torch.dtype) -> None:
    assert stand_in(TensorSpec.of(torch.empty(2, 3, dtype=dtype))).dtype == dtype

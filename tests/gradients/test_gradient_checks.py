"""The comparison of gradients tells apart what it has to tell apart."""

from __future__ import annotations

import torch
from gradient_checks import bits, difference


def test_bits_helper_tells_zeros_and_nans_apart() -> None:
    zeros = torch.tensor([0.0, -0.0])
    assert bits(zeros).tolist() == [0, -(2**31)]
    assert difference(zeros, -zeros) is not None
    nan = torch.tensor([float("nan")])
    assert difference(nan, nan.clone()) is None

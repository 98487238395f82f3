"""The order in which a library computes a batch norm is found out by its bits, whatever the layout and the dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backstash.ops.layout import Rounding
from backstash.ops.norms.reference import normalized
from backstash.ops.onepass.reference import rounded
from backstash.remake import fused

SHAPES = ((4, 8), (4, 8, 7), (4, 8, 5, 5), (2, 8, 3, 4, 5))


def norm_in(order: Rounding, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A batch norm as a library would compute it that takes this order, its mean and inverse standard deviation."""
    rest = [at for at in range(x.dim()) if at != 1]
    wide = x.double()
    mean = wide.mean(rest).float()
    invstd = (1 / (wide.var(rest, unbiased=False) + 1e-5).sqrt()).float()
    y = normalized(x.float(), mean, invstd, weight, bias, order)
    return rounded(y, x.dtype, 0), mean, invstd


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_channels_last", [False, True])
@pytest.mark.parametrize("order", Rounding)
def test_each_order_is_told_from_the_others(
    order: Rounding, is_channels_last: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "batch_norm_with_statistics", lambda x, weight, bias: norm_in(order, x, weight, bias))
    for shape in SHAPES if dtype is torch.float32 else ((4, 256, 5, 5),):
        assert fused._matching(torch.device("cpu"), shape, is_channels_last, dtype) == order.name


def test_a_library_of_another_order_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, mean, invstd = norm_in(Rounding.SCALED, x, weight, bias)
        return y.nextafter(torch.tensor(torch.inf)), mean, invstd

    monkeypatch.setattr(fused, "batch_norm_with_statistics", other)
    assert fused._matching(torch.device("cpu"), (4, 8, 5, 5), False, torch.float32) == ""

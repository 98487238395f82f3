"""Operations in place on views, whose nodes torch hides behind the view's: their passes settle."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstash as bs
from backstash.bits import equal_bits

STEPS = 14


def _half(x: Tensor) -> Tensor:
    x = x.clone()
    x[..., :32].relu_()
    return x


def _product(x: Tensor) -> Tensor:
    return x.mul_(torch.sigmoid(x.detach().clone()))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: F.relu(x, inplace=True),
    "dropout": lambda x: F.dropout(x, 0.25, True, inplace=True),
    "leaky_relu": F.leaky_relu_,
    "elu": lambda x: F.elu(x, inplace=True),
    "silu": lambda x: F.silu(x, inplace=True),
    "a half": _half,
    "a view of a view": lambda x: x.view(-1, 64)[1:].tanh_(),
    "a product": _product,
    "a sum": lambda x: x.add_(x.detach().clone().exp()).relu_(),
    "a filled mask": lambda x: x.masked_fill_(x.detach() > 1, 0.5),
}


class Block(nn.Module):
    """A linear layer, whose result for three dimensions is a view, and a function in place on it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.norm, self.last = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Rows [batch, length, 32] to numbers."""
        return self.last(self.norm(F.gelu(self.function(self.first(x)))))  # type: ignore[no-any-return]


def _train(function: Callable[[Tensor], Tensor], is_plain: bool) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    model, batch = Block(function), torch.randn(8, 16, 32)
    session = bs.Session("lossless", model=model, min_nbytes=0, stop_if_useless=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    settled = 0
    for _ in range(STEPS):
        optimizer.zero_grad()
        if is_plain:
            loss = model(batch).square().mean()
        else:
            with session:
                loss = model(batch).square().mean()
            settled += session._is_replayed
        loss.backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()], settled


@pytest.mark.cases(100)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_settle(name: str) -> None:
    weights, settled = _train(FUNCTIONS[name], is_plain=False)
    assert all(map(equal_bits, weights, _train(FUNCTIONS[name], is_plain=True)[0]))
    assert settled >= STEPS - 8

"""Ops that draw random numbers, inside and outside a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import difference
from session_checks import assert_same, by_policy, holds_nothing
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from backstash import Policy, Session

RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu_": lambda x: F.rrelu_(x * 1, training=True),
    "rrelu eval": lambda x: F.rrelu(x, training=False),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout inplace": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "dropout 0": lambda x: F.dropout(x, 0.0),
    "dropout 1": lambda x: F.dropout(x, 1.0),
    "dropout eval": lambda x: F.dropout(x, 0.3, training=False),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "dropout1d": lambda x: F.dropout1d(x.view(1, 16, 64), 0.3),
    "dropout2d": lambda x: F.dropout2d(x.view(1, 16, 8, 8), 0.3),
    "dropout3d": lambda x: F.dropout3d(x.view(1, 16, 4, 4, 4), 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "alpha_dropout inplace": lambda x: F.alpha_dropout(x * 1, 0.3, training=True, inplace=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x.view(1, 16, 64), 0.3, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "gumbel_softmax hard": lambda x: F.gumbel_softmax(x, hard=True),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()) * x,
    "normal": lambda x: torch.normal(x, x.exp()),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x.view(1, 4, 16, 16), 2, output_ratio=(0.5, 0.5)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 2, 32, 16)] * 3, dropout_p=0.3),
}


@by_policy
@pytest.mark.parametrize("op", RANDOM.values(), ids=RANDOM)
def test_random_ops(op: Callable[[Tensor], Tensor], policy: str | Policy) -> None:
    def forward() -> Tensor:
        torch.manual_seed(9)
        return op(torch.tanh(x * 2)).exp().sum()

    x = torch.linspace(-2, 2, 1024).reshape(16, 64).requires_grad_()
    expected = torch.autograd.grad(forward(), x)[0]
    with Session(policy, min_nbytes=0) as session:
        loss = forward()
    assert difference(expected, torch.autograd.grad(loss, x)[0]) is None
    del loss
    assert holds_nothing(session)


@by_policy
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
@pytest.mark.parametrize("name", ["rrelu", "rrelu_", "dropout", "alpha_dropout", "attention"])
def test_random_ops_in_a_checkpoint(name: str, reentrant: bool, policy: str | Policy) -> None:
    """rrelu writes its noise after autograd has saved it; in a checkpoint it does so while backward runs."""

    def run(session: Session | None) -> list[Tensor | None]:
        x = torch.linspace(-2, 2, 1024).reshape(16, 64).requires_grad_()
        torch.manual_seed(9)

        with session or nullcontext():
            h = checkpoint(lambda y: RANDOM[name](torch.tanh(y * 2)).exp(), x * 1, use_reentrant=reentrant)
            h.sum().backward()
        return [x.grad]

    assert_same(run, Session(policy, min_nbytes=0))

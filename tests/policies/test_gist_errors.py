"""Reduced numbers under Gist's rules: they go where an error changes the gradients by no more than its own size."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from backstash import Session
from backstash.papers.gist import gist

Loss = Callable[[Tensor], Tensor]


def shifted(x: Tensor) -> Tensor:
    return (x - x.amax(1, keepdim=True)).exp().sum(1).log()


def entropy(x: Tensor) -> Tensor:
    p = F.softmax(x, 1)
    return -(p * p.log())


LOSSES: dict[str, Loss] = {
    "a softmax by hand": shifted,
    "divided by the largest": lambda x: x / x.abs().amax(1, keepdim=True),
    "amax": lambda x: x.amax(1),
    "aminmax": lambda x: torch.aminmax(x, dim=1).max,
    "max": lambda x: x.max(),
    "median": lambda x: x.median(),
    "the largest norm": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=1),
    "the largest distance": lambda x: torch.cdist(x, x.flip(0), p=float("inf")),
    "entropy": entropy,
    "divergence from a target": lambda x: F.kl_div(F.log_softmax(x, 1), F.softmax(x.flip(0), 1), reduction="none"),
    "logarithm of a softmax": lambda x: F.softmax(2 * x, 1).log(),
    "a reciprocal": lambda x: 1.0 / (1e-6 * x.abs() + 1e-9),
    "a power": lambda x: (1e-6 * x.abs() + 1e-9).pow(-1),
}


def gradient(loss: Loss, session: Session | None) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(64, 256, requires_grad=True)
    with session or nullcontext():
        loss(2.0 * x).sum().backward()
    assert x.grad is not None
    return x.grad.double()


@pytest.mark.cases(100)
@pytest.mark.parametrize("format", ["fp16", "fp10", "fp8"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_what_is_compared_and_what_is_divided_by_stays_exact(loss: Loss, format: str) -> None:
    expected = gradient(loss, None)
    found = gradient(loss, Session(gist(format), min_nbytes=4 << 10))
    assert expected.isfinite().all() and expected.any()
    assert (found - expected).norm() <= 0.3 * expected.norm()


def test_a_value_is_reduced_that_one_reader_multiplies_and_none_compares() -> None:
    weight = torch.randn(256, 256, requires_grad=True)
    x = torch.randn(64, 256)
    for loss, is_reduced in ((lambda y: (y @ weight).sum(), True), (lambda y: (y @ weight).sum() + y.amax(), False)):
        with Session("gist_fp16", min_nbytes=4 << 10) as session:
            loss(x * 1.0 + weight[0]).backward()
        codecs = {total.codec for total in session.report().by_codec()}
        assert any("fp16" in codec for codec in codecs) is is_reduced, codecs

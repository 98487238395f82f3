"""Passes that save tensors of other layouts than strided ones settle: these are held as they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from backstash.bits import equal_bits
from backstash.errors import SavedTensorModifiedError

STEPS = 16

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


def adjacency(layout: torch.layout) -> Tensor:
    torch.manual_seed(1)
    found = (torch.rand(24, 24) < 0.2).float() * torch.rand(24, 24)
    return found.to_sparse() if layout is torch.sparse_coo else found.to_sparse_csr()


class Graph(nn.Module):
    """A network whose layers multiply by a sparse matrix, of which the values may be learned."""

    def __init__(self, layout: torch.layout, is_learned: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)
        self.edges = adjacency(layout)
        self.weights = nn.Parameter(torch.rand(self.edges.values().shape if layout is torch.sparse_csr else 1))
        self.is_learned = is_learned

    def forward(self, x: Tensor) -> Tensor:
        """Rows [24, 16] to rows [24, 4]."""
        edges = self.edges * self.weights.sum() if self.is_learned else self.edges
        x = torch.relu(torch.sparse.mm(edges, self.first(x)))
        return torch.sparse.mm(edges, self.second(x))


def train(make: Callable[[], nn.Module], session: AbstractContextManager[object]) -> list[Tensor]:
    torch.manual_seed(0)
    model, found = make(), []
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(STEPS):
        x = torch.randn(24, 16, requires_grad=True)
        optimizer.zero_grad()
        with session:
            loss = model(x).square().mean()
            if step == 12:  # something else comes in between
                loss = loss + model.first(x).tanh().sum()  # type: ignore[operator, union-attr]
        loss.backward()
        found += [loss.detach(), x.grad, *(each.grad for each in model.parameters() if each.grad is not None)]
        optimizer.step()
    return [each.clone() for each in found if each is not None]


@pytest.mark.parametrize("is_learned", [False, True])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_sparse_products_settle(layout: torch.layout, is_learned: bool) -> None:
    if is_learned and layout is torch.sparse_csr:
        pytest.skip("torch has no derivative of this product")

    def make() -> nn.Module:
        return Graph(layout, is_learned)

    session = bs.Session("lossless", min_nbytes=0, stop_if_useless=False)
    runs = []

    class Counting(nullcontext[None]):
        def __enter__(self) -> None:
            session.__enter__()

        def __exit__(self, *error: object) -> None:
            runs.append(session._is_replayed)
            session.__exit__(*error)  # type: ignore[arg-type]

    expected, got = train(make, nullcontext()), train(make, Counting())
    assert len(expected) == len(got) and all(equal_bits(a, b) for a, b in zip(expected, got, strict=True))
    assert sum(runs) >= 6


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_a_sparse_tensor_that_was_changed_since_is_an_error(layout: torch.layout, settled: bool) -> None:
    model, session = Graph(layout, False), bs.Session("lossless", min_nbytes=0, stop_if_useless=False)
    for _ in range(12 if settled else 0):
        with session:
            loss = model(torch.randn(24, 16)).square().mean()
        loss.backward()
    with session:
        loss = model(torch.randn(24, 16)).square().mean()
    assert session._is_replayed == settled
    model.edges.zero_()  # type: ignore[operator, union-attr]
    with pytest.raises(SavedTensorModifiedError, match=r"inplace operation: \[float32 \[24, 24\]\]"):
        loss.backward()


def test_a_settled_pass_that_differs_in_a_sparse_product_goes_on() -> None:
    """The call in which a pass turns out to be another one has saved a sparse tensor, which has no storage."""
    found = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = Graph(torch.sparse_coo, True)
        session = nullcontext() if is_plain else bs.Session("lossless", min_nbytes=0, stop_if_useless=False)
        for step in range(10):
            for weight in (model.weights, model.first.weight):  # the product saves other tensors than before
                weight.requires_grad_(step < 8)
            model.zero_grad()
            with session:
                loss = model(torch.randn(24, 16)).square().mean()
            loss.backward()
        found.append([loss.detach(), *(x.grad for x in model.parameters() if x.grad is not None)])
    assert len(found[0]) == len(found[1]) and all(map(equal_bits, *found))

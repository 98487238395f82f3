"""Backward passes under a Session: several of them, parts of one, hooks, autocast and shared weights."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import Everything, difference, differences
from session_checks import assert_same, by_policy, codecs_used, gradients_of, holds_nothing, images, network, run_step
from torch import Tensor, nn

from backstash import Policy, Session


@by_policy
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_retain_graph(policy: str | Policy, inside: bool) -> None:
    def run(session: Session | None) -> list[Tensor | None]:
        torch.manual_seed(5)
        model = network()
        found = []

        def backward(loss: Tensor) -> None:
            for retain in (True, True, False):
                loss.backward(retain_graph=retain)
                found.extend(gradients_of(model))

        run_step(lambda: model(images()).square().sum(), session, inside, backward)
        return found

    session = Session(policy, min_nbytes=0)
    assert_same(run, session)
    assert {"bitmask", "narrow"} <= codecs_used(session)


@by_policy
def test_backward_twice_without_retain_graph_raises_as_in_plain_torch(policy: str | Policy) -> None:
    x = torch.randn(64, requires_grad=True)
    with Session(policy, min_nbytes=0) as session:
        loss = torch.tanh(F.relu(x * 2) * 3).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()
    del loss
    assert holds_nothing(session)


@by_policy
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_double_backward(policy: str | Policy, inside: bool) -> None:
    """The gradient penalty of a WGAN: only what runs inside the Session is stored in another form."""

    def run(session: Session | None) -> list[Tensor | None]:
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 1))
        for i, parameter in enumerate(model.parameters()):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(i))
        x = images(8).reshape(-1, 6).requires_grad_()

        def penalty(score: Tensor) -> Tensor:
            (slope,) = torch.autograd.grad(score, x, create_graph=True)
            return (slope.norm(dim=1) - 1).square().mean() + score

        run_step(lambda: model(x).sum(), session, inside, lambda score: penalty(score).backward())
        return [x.grad, *gradients_of(model)]

    assert_same(run, Session(policy, min_nbytes=0))


def test_a_saved_tensor_can_be_looked_at() -> None:
    """The program may read ``grad_fn._saved_result`` any number of times before backward."""
    x = torch.randn(64)
    with Session(Everything(), min_nbytes=0):
        y = torch.tanh(x.clone().requires_grad_())
        z = y * 2
        node, expected = y.grad_fn, y.detach().clone()
        del y
    assert difference(expected, node._saved_result.detach()) is None
    assert difference(expected, node._saved_result.detach()) is None
    z.sum().backward()


@by_policy
def test_autocast(policy: str | Policy) -> None:
    def run(session: Session | None) -> list[Tensor | None]:
        torch.manual_seed(7)
        model = network()

        def forward() -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(images()).float().square().sum() + model(images()).float().sum()

        run_step(forward, session)
        return gradients_of(model)

    assert_same(run, Session(policy, min_nbytes=0))


@pytest.mark.parametrize("batch", [32, 64], ids=["narrower", "as many images as features"])
def test_autocast_tells_activations_from_copies_of_weights(batch: int) -> None:
    """Autocast keeps its copies of the weights, and an activation may have the shape of such a copy."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    with Session(Everything(), min_nbytes=0) as session, torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(batch, 64)).sum()
    relus = [row for row in session.report().rows if any("Relu" in key for key in (row.key, *row.shared_by))]
    assert [(row.need, row.codec) for row in relus] == [("VALUE", "zvc")] * 2
    copies = [row for row in session.report().rows if "mat2" in row.key]
    assert copies == []
    loss.backward()


@by_policy
def test_gradient_hooks_and_retained_gradients(policy: str | Policy) -> None:
    def run(session: Session | None) -> list[Tensor | None]:
        x = torch.linspace(-2, 2, 64, requires_grad=True)
        seen: list[Tensor | None] = []

        def forward() -> tuple[Tensor, Tensor]:
            h = x * 2
            h.register_hook(lambda gradient: gradient * 3)
            y = F.relu(h)
            y.retain_grad()
            z = torch.tanh(y)
            z.register_hook(lambda gradient: seen.append(gradient.clone()))
            assert z.grad_fn is not None
            z.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
            return z.exp().sum(), y

        with session or nullcontext():
            loss, y = forward()
        loss.backward()
        return [x.grad, y.grad, *seen]

    assert_same(run, Session(policy, min_nbytes=0))


@by_policy
def test_shared_weights(policy: str | Policy) -> None:
    def run(session: Session | None) -> list[Tensor | None]:
        torch.manual_seed(8)
        embedding, cell = nn.Embedding(20, 16), nn.Linear(16, 16)
        tokens = torch.arange(40).reshape(4, 10) % 20

        def forward() -> Tensor:
            h = embedding(tokens)
            for _ in range(4):
                h = F.relu(cell(h))
            return F.cross_entropy(F.linear(h, embedding.weight).flatten(0, 1), tokens.flatten())

        run_step(forward, session)
        return [*gradients_of(embedding), *gradients_of(cell)]

    assert_same(run, Session(policy, min_nbytes=0))


@by_policy
def test_backward_through_part_of_the_graph(policy: str | Policy) -> None:
    def run(session: Session | None) -> list[Tensor | None]:
        x = torch.linspace(-2, 2, 64, requires_grad=True)

        def forward() -> tuple[Tensor, Tensor]:
            trunk = torch.tanh(F.relu(x * 2))
            return trunk.exp().sum(), torch.sigmoid(trunk).square().sum()

        with session or nullcontext():
            one, two = forward()
        first = torch.autograd.grad(one, x, retain_graph=True)[0]
        two.backward()
        return [first, x.grad]

    assert_same(run, Session(policy, min_nbytes=0))


def test_forward_on_a_graph_that_is_already_freed() -> None:
    """A Session looks for the node that saved a tensor, and meets an older node whose tensors are gone."""
    x, other = torch.randn(6, 4, requires_grad=True), torch.randn(3, 4)
    y = torch.linalg.multi_dot([x, x.t(), x])[torch.tensor([0, 1, 2])]
    y.sum().backward()
    (expected,) = torch.autograd.grad(F.cosine_similarity(y, other).sum(), y)
    with Session(min_nbytes=0):
        loss = F.cosine_similarity(y, other).sum()
    assert difference(expected, torch.autograd.grad(loss, y)[0]) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_compiled_model(backend: str, inside: bool) -> None:
    dynamo = pytest.importorskip("torch._dynamo")
    dynamo.reset()

    def run(session: Session | None, compiled: bool) -> list[Tensor | None]:
        torch.manual_seed(10)
        model = network()
        model[7].p = 0.0  # dropout draws other numbers when it is decomposed
        function = torch.compile(model, backend=backend) if compiled else model
        found: list[Tensor | None] = []
        for _ in range(2):
            run_step(lambda: function(images()).square().sum(), session, inside)
            found += gradients_of(model)
        return found

    expected = run(None, compiled=True)
    dynamo.reset()
    session = Session(Everything(), min_nbytes=0)
    assert not differences(expected, run(session, compiled=True))
    dynamo.reset()

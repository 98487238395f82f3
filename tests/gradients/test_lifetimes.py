"""Lifetimes of what a Session holds, and that it holds nothing after abandoned graphs, errors and deleted models."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fresh import run_fresh
from gradient_checks import Everything, difference, differences
from session_checks import by_policy, gradients_of, holds_nothing, hooks_installed, images, network
from torch import Tensor, nn

from backstash import Policy, Session
from backstash.bits import equal_bits


@by_policy
def test_abandoned_graphs_leave_nothing(policy: str | Policy) -> None:
    model, x = network(), images()
    with Session(policy, min_nbytes=0) as session:
        for _ in range(300):  # each saves nine tensors
            model(x)
        assert session.stores["device"].usage().count < 40
        assert len(session._forward._shapes) < 200
        assert len(session.report().rows) < 200
    assert holds_nothing(session)


def test_abandoned_graph_in_a_cycle() -> None:
    """The garbage collector frees the graph, possibly while another value is being stored."""

    class Holder:
        pass

    x = torch.randn(64, 64, requires_grad=True)
    thresholds = gc.get_threshold()
    session = Session(Everything(), min_nbytes=0)

    def work() -> None:
        with session:
            for _ in range(200):
                holder: Any = Holder()
                holder.loss, holder.self = torch.tanh(F.relu(x * 2)).sum(), holder
                del holder

    worker = threading.Thread(target=work, daemon=True)
    gc.set_threshold(3, 2, 2)
    try:
        worker.start()
        worker.join(60)
    finally:
        gc.set_threshold(*thresholds)
    assert not worker.is_alive(), "deadlock"
    assert holds_nothing(session)


@by_policy
def test_backward_frees_what_it_has_read(policy: str | Policy) -> None:
    """Values are freed layer by layer, as in plain torch, and not at the end of backward."""
    counts = []
    x = torch.randn(64, requires_grad=True)
    with Session(policy, min_nbytes=0) as session:
        h = x
        for _ in range(5):
            h = torch.sigmoid(h * 2)
            h.register_hook(lambda _: counts.append(session._live.saved))
        loss = h.sum()
        del h
    loss.backward()
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] >= 4
    del loss
    assert holds_nothing(session)


class Failure(Exception):  # noqa: N818
    pass


class FailsInside(nn.Module):
    def __init__(self, when: str) -> None:
        super().__init__()
        self.layer, self.when = nn.Linear(8, 8), when

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.layer(x))
        if self.when == "forward":
            raise Failure
        if self.when == "op":
            return y @ y
        return y


@pytest.mark.parametrize("when", ["forward", "op", "pre-hook", "hook", "body"])
def test_exception_in_the_middle_leaves_no_hooks(when: str) -> None:
    module = FailsInside(when)
    outer = nn.Sequential(nn.Linear(8, 8), module, nn.Linear(8, 8))

    def fail(*_: Any) -> None:
        raise Failure

    if when == "pre-hook":
        module.register_forward_pre_hook(fail)
    if when == "hook":
        module.register_forward_hook(fail)
    session = Session(min_nbytes=0)
    with pytest.raises(RuntimeError if when == "op" else Failure), session:
        outer(torch.randn(3, 8))
        if when == "body":
            raise Failure
    assert hooks_installed() == []
    assert holds_nothing(session)
    assert len(session._names.frames) == 1
    with session:  # and it works again
        loss = nn.Sequential(nn.Linear(8, 8), nn.ReLU())(torch.randn(3, 8)).sum()
    loss.backward()


def test_exception_caught_inside_the_session() -> None:
    """A forward pass fails, for want of memory perhaps, and another one runs: names and gradients stay right."""
    model = nn.Sequential(nn.Linear(8, 8), FailsInside("forward"))
    good, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(3, 8)
    good(x).sum().backward()
    expected = gradients_of(good)
    good.zero_grad()
    with Session(min_nbytes=0) as session:
        with pytest.raises(Failure):
            model(x)
        loss = good(x).sum()
    loss.backward()
    assert not differences(expected, gradients_of(good))
    assert any(row.key.startswith("1/Tanh#0") for row in session.report().rows)


def test_exception_in_backward_leaves_the_session_usable() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise Failure

    x = torch.randn(64, requires_grad=True)
    session = Session(Everything(), min_nbytes=0)
    for _ in range(3):
        with session:
            loss = Fails.apply(torch.tanh(x * 2)).exp().sum()
        with pytest.raises(Failure):
            loss.backward()
        del loss
        assert holds_nothing(session)
    (expected,) = torch.autograd.grad(torch.tanh(x * 2).sum(), x)
    with session:
        loss = torch.tanh(x * 2).sum()
    assert difference(expected, torch.autograd.grad(loss, x)[0]) is None


def test_nothing_is_retained_of_the_model() -> None:
    model = network()
    reference = weakref.ref(model)
    with Session(min_nbytes=0) as session:
        loss = model(images()).sum()
    loss.backward()
    del model, loss
    gc.collect()
    assert reference() is None
    assert holds_nothing(session)


def test_a_session_dies_before_its_graph() -> None:
    x = torch.randn(64, requires_grad=True)
    expected = torch.autograd.grad(torch.tanh(F.relu(x * 2)).sum(), x)[0]
    session: Session | None = Session(Everything(), min_nbytes=0)
    with session:
        loss = torch.tanh(F.relu(x * 2)).sum()
    del session
    gc.collect()
    assert difference(expected, torch.autograd.grad(loss, x)[0]) is None


def test_a_session_again_and_again() -> None:
    model, session = network().eval(), Session(min_nbytes=0)
    keys = []
    for step in range(1, 4):
        model(images()).sum().backward()
        expected = gradients_of(model)
        model.zero_grad()
        with session:
            loss = model(images()).sum()
        loss.backward()
        assert not differences(expected, gradients_of(model))
        model.zero_grad()
        assert session.report().steps == step
        keys.append([row.key for row in session.report().rows])
        assert keys[-1] == keys[0]
        assert holds_nothing(session)


def test_several_root_modules_are_one_step() -> None:
    """One module clamps to tensors, so the Session reads the bounds that the node saved while it is still in a step."""

    class Clamps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.clamp(x * 2, torch.full((8,), -1.0), torch.full((8,), 1.0)) * 2

    parts = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()), Clamps(), nn.Sequential(nn.Linear(8, 8), nn.ReLU())]
    with Session(min_nbytes=0) as session:
        h = torch.randn(4, 8)
        for part in parts:
            h = part(h)
    assert session.report().steps == 1
    assert [row.key for row in session.report().rows if "Relu" in row.key] == ["1/Relu#0:result"] * 2


@pytest.mark.parametrize("policy", ["lossless", "lossless_stored", "offload"])
def test_a_storage_that_is_seen_as_two_dtypes_is_read_as_each_of_them(policy: str) -> None:
    """Indices and numbers in the same memory: what one reader decodes would be of the other's dtype."""
    table, weight = torch.randn(64, 8, requires_grad=True), torch.randn(4096, requires_grad=True)

    def gradients(session: Session | None) -> list[Tensor]:
        with session or nullcontext():
            indices = torch.arange(4096, dtype=torch.int32) % 64 * (torch.arange(4096, dtype=torch.int32) % 2)
            loss = F.embedding(indices, table).sin().sum() + (indices.view(torch.float32) * weight).sum()
            del indices
            loss = loss + (table * 1).tanh().sum()
        return list(torch.autograd.grad(loss, (table, weight)))

    session = Session(policy, min_nbytes=0)
    assert all(equal_bits(a, b) for a, b in zip(gradients(None), gradients(session), strict=True))
    assert ["different types" in row.reason for row in session.report().rows].count(True) == 1


FREED = """
import gc
import torch
from torch import nn
import backstash as bs

def train(steps):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 3))
    for _ in range(steps):
        session = bs.Session("lossless", min_nbytes=0)
        with session:
            loss = model(torch.randn(6, 8)).square().mean()
        loss.backward()
    gc.enable()

for steps in (10, 18, 60):
    gc.disable()
    train(steps)
    gc.collect()
print("done")
"""


def test_a_model_is_freed_where_the_collector_was_off_for_many_sessions() -> None:
    """Note: [no callbacks] in stash/parameters.py."""
    run = run_fresh(FREED)
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr

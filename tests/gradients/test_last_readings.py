"""Planes are freed before their last reader runs, and whoever looks again sees what there was."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash import Session, policies
from backstash import session as sessions

STEPS = 10


@pytest.fixture(autouse=True)
def _has_compiled_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "has_compiled", lambda: False)


class Twice(torch.autograd.Function):
    """A product whose backward asks for what it has saved two times, and writes into neither."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, y = ctx.saved_tensors
        other, more = ctx.saved_tensors
        assert x.equal(other) and y.equal(more)
        return grads[0] * more, grads[0] * other


class Writes(Twice):
    """The same, but for a backward that writes into what was saved, as it may if nobody reads that after it."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, y = ctx.saved_tensors
        return grads[0] * y, x.mul_(grads[0])


def looked_at(y: Tensor) -> Tensor:
    """What looks at a node's saved tensors after it has run, and before that."""
    node: Any = y.grad_fn
    seen: list[Tensor] = []
    node.register_prehook(lambda grads: seen.append(node._saved_self.sum()))
    node.register_hook(lambda inputs, grads: seen.append(node._saved_self.sum()))
    return y


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "squared": lambda a: F.relu(a) ** 2,
    "twice": lambda a: (lambda h: h * h)(F.relu(a)),
    "looked at": lambda a: looked_at(F.relu(a) ** 2),
    "own function": lambda a: Twice.apply(F.relu(a), a.sigmoid()),
    "own function, twice the same": lambda a: (lambda h: Twice.apply(h, h))(F.relu(a)),
    "own function, read by others": lambda a: (lambda h: Twice.apply(h, a.sigmoid()) + h * h)(F.relu(a)),
    "many readers": lambda a: (lambda h: h**2 + h.exp() * 0.01 + F.relu(h - 0.5) * h)(F.relu(a)),
    "made from": lambda a: (lambda h: F.relu(h * a.tanh()) * h)(F.relu(a)),
    "parts": lambda a: (lambda h: h[:, :64] * h[:, 64:128])(F.relu(a)).repeat(1, 4),
}


def train(function: Callable[[Tensor], Tensor], context: Any, how: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.Linear(256, 32))
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(512, 32)
        model.zero_grad()
        with context:
            h = model[0](x)
            loss = model[1](function(h)).square().mean()
        if how == "kept":
            loss.backward(retain_graph=True)
        if how == "in parts":
            found += torch.autograd.grad(loss, [model[1].weight], retain_graph=True)
        if how == "of inner values":
            found += torch.autograd.grad(loss, [h], retain_graph=True)
        if how == "differentiated":
            (grad,) = torch.autograd.grad(loss, [model[0].weight], create_graph=True)
            (loss + grad.square().sum()).backward()
        else:
            loss.backward()
        found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
    return found


@pytest.mark.parametrize("how", ["once", "kept", "in parts", "of inner values", "differentiated"])
@pytest.mark.parametrize(
    "policy", ["lossless", "lossless_stored", "gist_lossless", policies.lossless(dense=True)], ids=str
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_have_plains_bits(name: str, policy: Any, how: str) -> None:
    if how == "differentiated" and name.startswith("own function"):
        pytest.skip("its backward is not for that")
    plain = train(FUNCTIONS[name], nullcontext(), how)
    found = train(FUNCTIONS[name], Session(policy, min_nbytes=0), how)
    assert len(plain) == len(found) and all(one.equal(other) for one, other in zip(plain, found, strict=True))


WRITERS: dict[str, Callable[[Tensor], Tensor]] = {
    "alone": lambda a: Writes.apply(F.relu(a) + 0, a.sigmoid()),
    "behind another": lambda a: (lambda h: Writes.apply(h, a.sigmoid()) * h)(F.relu(a) + 0),
    "before another": lambda a: (lambda h: h * Twice.apply(a, Writes.apply(h, a.sigmoid())))(F.relu(a) + 0),
    "before what has made it": lambda a: Writes.apply(F.relu(a).exp(), a.sigmoid()),
    "before a relu": lambda a: Writes.apply(F.relu(a), a.sigmoid()),
}


@pytest.mark.parametrize("how", ["once", "kept"])
@pytest.mark.parametrize("policy", ["lossless", "lossless_stored", policies.lossless(dense=True)], ids=str)
@pytest.mark.parametrize("name", WRITERS)
def test_who_writes_into_what_it_reads_gets_plains_bits_or_plains_error(name: str, policy: Any, how: str) -> None:
    def outcome(context: Any) -> list[Tensor] | None:
        try:
            return train(WRITERS[name], context, how)
        except RuntimeError:  # what was saved has been modified
            return None

    plain, found = outcome(nullcontext()), outcome(Session(policy, min_nbytes=0))
    assert (plain is None) == (found is None)
    assert plain is None or found is None or all(map(torch.equal, plain, found))


def test_planes_are_freed_before_the_reader_runs() -> None:
    session = Session("lossless_stored", min_nbytes=0)
    x = torch.randn(64, 64, requires_grad=True)

    def held_nbytes() -> int:
        return session._live.nbytes + (0 if session._replaying is None else session._replaying.nbytes)

    for _ in range(STEPS):
        with session:
            y = (x.relu() ** 2).sum()
        before, freed = held_nbytes(), list[int]()
        square: Any = y.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        square.register_hook(
            lambda inputs, grads, freed=freed: freed.append(held_nbytes())
        )  # what it saved is there yet
        y.backward()
        assert before > x.nbytes // 3 and freed == [x.numel() // 8]  # a mask is left

"""Idle Sessions, whose tensors are held by hooks in C++, around all that a program may do to saved tensors."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._dynamo import compiled_autograd, convert_frame
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from backstash import Session, interpreter
from backstash import session as session_module
from backstash.errors import SavedTensorFreedError, SavedTensorModifiedError

UNTIL_IDLE = 12


@pytest.fixture(autouse=True)
def nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no Session becomes idle in the process."""
    monkeypatch.setattr(session_module, "has_compiled", lambda: False)


Program = Callable[["_Network", Tensor], Tensor]


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.first, self.second = nn.Linear(4 * 36, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(self.convolution(x)).tanh().flatten(1)
        return self.second(self.first(rows).sigmoid())[:, ::2]


class _Own(Tensor):
    pass


class _Looking(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, x * 2)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        _, double = ctx.saved_tensors
        return gradient * double


def _plainly(network: _Network, x: Tensor) -> Tensor:
    return network(x).square().sum()


def _with_a_leaf(network: _Network, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(network(leaf).exp().sum(), leaf, create_graph=True)
    return gradient.square().sum() + network(x).sum()


def _checkpointed(network: _Network, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(network, x.clone().requires_grad_(), use_reentrant=False).exp().sum()  # type: ignore[no-any-return]


def _checkpointed_anew(network: _Network, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(network, x.clone().requires_grad_(), use_reentrant=True).exp().sum()  # type: ignore[no-any-return]


def _hooks_of_the_program(network: _Network, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda saved: saved * 2, lambda double: double / 2):
        return network(x).exp().sum()


def _without_hooks(network: _Network, x: Tensor) -> Tensor:
    made = network(x)
    try:
        with disable_saved_tensors_hooks("not here"):
            return made.exp().sum()  # type: ignore[no-any-return]
    except RuntimeError:  # plain's hooks are none, so nothing forbids them to be switched off
        return made.exp().sum()  # type: ignore[no-any-return]


def _transformed(network: _Network, x: Tensor) -> Tensor:
    slopes = torch.func.vmap(torch.func.grad(lambda row: network.second(row).exp().sum()))(x.flatten(1)[:, :16])
    return network(x).exp().sum() + slopes.sum()


def _under_a_mode(network: _Network, x: Tensor) -> Tensor:
    with _Looking():
        return network(x).exp().sum()


def _of_a_class(network: _Network, x: Tensor) -> Tensor:
    return (network(x) * torch.ones(8).as_subclass(_Own)).exp().as_subclass(Tensor).sum()


def _complex_and_sparse(network: _Network, x: Tensor) -> Tensor:
    weights = torch.eye(8).to_sparse()
    of_complex = torch.view_as_complex(network(x).exp().view(-1, 4, 2)).abs()
    return of_complex.sum() + torch.sparse.mm(weights, network(x).T).exp().sum()


def _by_a_function(network: _Network, x: Tensor) -> Tensor:
    return _Square.apply(network(x)).exp().sum()  # type: ignore[no-any-return, no-untyped-call]


def _looked_at(network: _Network, x: Tensor) -> Tensor:
    made = network(x).exp()
    assert made.grad_fn._saved_result.equal(made)  # type: ignore[union-attr]
    return made.sum()


def _assigned(network: _Network, x: Tensor) -> Tensor:
    made = network(x)
    grown = made.exp()
    made.data = made.data * 1
    product = made * grown
    made.data = made.data + 1
    network.made = made  # it is there until backward
    return product.sum()


def _overwritten(network: _Network, x: Tensor) -> Tensor:
    made = network(x).mul(2)
    return made.tanh().sum() + made.relu_().square().sum()


PROGRAMS = (
    _plainly,
    _with_a_leaf,
    _checkpointed,
    _checkpointed_anew,
    _hooks_of_the_program,
    _without_hooks,
    _transformed,
    _under_a_mode,
    _of_a_class,
    _complex_and_sparse,
    _by_a_function,
    _looked_at,
    _assigned,
    _overwritten,
)


def _backward(loss: Tensor) -> None:
    loss.backward()


def _twice(loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def _in_a_thread(loss: Tensor) -> None:
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def _compiled(loss: Tensor) -> None:
    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()


WAYS = (_backward, _twice, _in_a_thread)


def _idle_session(network: _Network, x: Tensor) -> Session:
    session = Session("keep", model=network)
    for _ in range(UNTIL_IDLE):
        with session:
            _plainly(network, x).backward()
    return session


def _step(program: Program, backward: Callable[[Tensor], None], session: Session | None, inside: bool) -> list[Any]:
    torch.manual_seed(1)
    network, x = _Network(), torch.randn(8, 1, 8, 8)
    session = None if session is None else _idle_session(network, x)
    network.norm.reset_running_stats()
    network.zero_grad()
    with session or nullcontext():
        assert session is None or interpreter.module is None or session._hooks.stands_in  # type: ignore[union-attr]
        loss = program(network, x)
        if inside:
            backward(loss)
    if not inside:
        backward(loss)
    found = [loss.detach(), *network.norm.buffers(), *(each.grad for each in network.parameters())]
    return [None if each is None else each.clone() for each in found]


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "behind"])
@pytest.mark.parametrize("backward", WAYS, ids=lambda way: way.__name__[1:])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__[1:])
def test_gradients_are_those_of_plain(program: Program, backward: Callable[[Tensor], None], inside: bool) -> None:
    expected = _step(program, backward, None, inside)
    found = _step(program, backward, Session("keep"), inside)
    assert all(a is b if a is None or b is None else a.equal(b) for a, b in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_compiled_autograd_reads_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert_frame, "FRAME_COUNTER", convert_frame.FRAME_COUNTER)  # for tests behind this one
    expected = _step(_plainly, _backward, None, True)
    found = _step(_plainly, _compiled, Session("keep"), True)
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "behind"])
def test_what_the_program_spoils_is_found(inside: bool) -> None:
    torch.manual_seed(1)
    network, x = _Network(), torch.randn(8, 1, 8, 8)
    session = _idle_session(network, x)

    def change(made: Tensor) -> None:
        with torch.no_grad():
            made.mul_(2)

    def free(made: Tensor) -> None:
        made.untyped_storage().resize_(0)

    for spoil, error in ((change, SavedTensorModifiedError), (free, SavedTensorFreedError)):
        with pytest.raises(error):
            with session:
                made = network(x)
                loss = (made * made.sin()).sum()
                if inside:
                    spoil(made)
                    loss.backward()
            spoil(made)
            loss.backward()


def test_a_session_wakes_where_steps_save_something_else() -> None:
    torch.manual_seed(1)
    network, x = _Network(), torch.randn(8, 1, 8, 8)
    session = _idle_session(network, x)
    with session:
        assert session._forward.is_idle
        (_plainly(network, x) + _plainly(network, x)).backward()
    with session:
        assert not session._forward.is_idle


def test_nothing_is_left() -> None:
    torch.manual_seed(1)
    network, x = _Network(), torch.randn(8, 1, 8, 8)
    session = _idle_session(network, x)
    with session:
        loss = _plainly(network, x)
    gone = weakref.ref(session)
    del session
    gc.collect()
    loss.backward()
    del loss, network
    gc.collect()
    assert gone() is None

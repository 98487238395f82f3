"""Saved tensors of a call of a settled pass, in which the program does more than it did before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from backstash import Session
from backstash.capture import learned
from backstash.errors import SavedTensorModifiedError

MIN_NBYTES = 1024
SETTLED = learned.EQUAL_PASSES + 6
STEPS = SETTLED + 4

Doing = Callable[[Callable[[], Tensor], Tensor], Tensor]


class _Inside(TorchFunctionMode):
    """A mode below the one of the Session: what it does for a function happens inside of the call."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.does: Doing | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.does is None or func is not self.function:
            return func(*args, **(kwargs or {}))
        return self.does(lambda: func(*args, **(kwargs or {})), args[0])


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU())
        self.images = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.images(self.rows(x).view(-1, 1, 8, 8)).square().mean()


def _hooks_of_the_program(call: Callable[[], Tensor], _: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda saved: saved.clone(), lambda copy: copy):
        return call()


def _saves_before(call: Callable[[], Tensor], x: Tensor) -> Tensor:
    return call() * (1 + 0 * x.exp().sum())


def _called_twice(call: Callable[[], Tensor], _: Tensor) -> Tensor:
    call()
    return call()


def _drops_what_it_made(call: Callable[[], Tensor], x: Tensor) -> Tensor:
    return call().detach() + 0 * x.sum()


def _reads_what_is_saved(call: Callable[[], Tensor], _: Tensor) -> Tensor:
    made = call()
    for name in dir(made.grad_fn):
        if name.startswith("_saved_"):
            getattr(made.grad_fn, name)
    return made


def _takes_gradients(call: Callable[[], Tensor], _: Tensor) -> Tensor:
    made = call()
    weight = torch.ones(64, 64, requires_grad=True)
    (weight.sin() @ weight).sum().backward()
    return made


def _takes_its_gradients(call: Callable[[], Tensor], x: Tensor) -> Tensor:
    made = call()
    if not x.requires_grad:
        return made
    (gradient,) = torch.autograd.grad(made.square().sum(), x, retain_graph=True)
    return made + 0 * gradient.sum()


def _saves_of_another_thread(call: Callable[[], Tensor], _: Tensor) -> Tensor:
    def train() -> None:
        weight = torch.ones(64, 64, requires_grad=True)
        (weight.sin() @ weight).sum().backward()

    thread = threading.Thread(target=train)
    thread.start()
    made = call()
    thread.join()
    return made


def _without_gradients(call: Callable[[], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        made = call()
    return made + 0 * x.sum()


def _of_a_class(call: Callable[[], Tensor], x: Tensor) -> Tensor:
    class Own(Tensor):
        pass

    weight = torch.ones(64, 64).as_subclass(Own)
    return call() + 0 * (x.sum() * weight).sum().as_subclass(Tensor)


def _double(call: Callable[[], Tensor], x: Tensor) -> Tensor:
    return call() + 0 * (x.double().exp().sum()).float()


DOINGS = (
    _hooks_of_the_program,
    _saves_before,
    _called_twice,
    _drops_what_it_made,
    _reads_what_is_saved,
    _takes_gradients,
    _takes_its_gradients,
    _saves_of_another_thread,
    _without_gradients,
    _of_a_class,
    _double,
)
FUNCTIONS = (F.layer_norm, F.relu, F.linear, F.batch_norm, torch.conv2d)


def _step(block: _Block, x: Tensor) -> list[Tensor | None]:
    block.zero_grad()
    block(x).backward()
    return [None if each.grad is None else each.grad.clone() for each in block.parameters()]


def _are_equal(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    return all(a is b if a is None or b is None else a.equal(b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("does", DOINGS, ids=lambda does: does.__name__[1:])
def test_gradients_are_those_of_plain(does: Doing, function: Any) -> None:
    plain, block, x = _Block(), _Block(), torch.randn(64, 32)
    session = Session("lossless", model=block, min_nbytes=MIN_NBYTES, stop_if_useless=False)
    with _Inside(function) as inside:
        for step in range(STEPS):
            inside.does = does if step in (SETTLED, SETTLED + 2) else None
            if step == SETTLED:
                assert "saves" in session.report().programs()
            expected = _step(plain, x)
            with session:
                found = _step(block, x)
            assert _are_equal(found, expected), f"step {step}"
    assert not session.has_graph


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_what_is_raised_in_the_call_passes(function: Any) -> None:
    plain, block, x = _Block(), _Block(), torch.randn(64, 32)
    session = Session("lossless", model=block, min_nbytes=MIN_NBYTES, stop_if_useless=False)

    def fail(call: Callable[[], Tensor], _: Tensor) -> Tensor:
        call()
        raise KeyError("inside")

    with _Inside(function) as inside:
        for step in range(STEPS):
            inside.does = fail if step in (SETTLED, SETTLED + 2) else None
            with session:
                if inside.does is not None:
                    with pytest.raises(KeyError, match="inside"):
                        _step(block, x)
                    continue
                found = _step(block, x)
            assert _are_equal(found, _step(plain, x)), f"step {step}"
            plain.load_state_dict(block.state_dict())  # the failed steps have counted in running statistics
    assert not session.has_graph


@pytest.mark.parametrize("function", [F.layer_norm, F.linear, torch.conv2d], ids=lambda function: function.__name__)
def test_a_change_in_the_call_is_found(function: Any) -> None:
    block, x = _Block(), torch.randn(64, 32)
    session = Session("lossless", model=block, min_nbytes=MIN_NBYTES, stop_if_useless=False)

    def change(call: Callable[[], Tensor], x: Tensor) -> Tensor:
        made = call()
        with torch.no_grad():
            x.mul_(2)
        return made

    with _Inside(function) as inside:
        for step in range(SETTLED + 1):
            inside.does = change if step == SETTLED else None
            with session:
                if inside.does is None:
                    _step(block, x.clone())
                    continue
                with pytest.raises((SavedTensorModifiedError, RuntimeError), match=r"modified|changed"):
                    _step(block, x.clone().requires_grad_().exp().log())

"""Functions that torch has written in Python offer themselves to a settled pass without torch's way through Python."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from backstash import Session
from backstash.policies import lossless
from backstash.torch_internals import dispatch_to_modes, function_modes
from tests.modes import Seeing
from tests.replay.twins import STEPS


class Model(nn.Module):
    """Functions of all kinds of arguments: by position, by name, several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(64), nn.Linear(64, 64)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        x = F.relu(input=self.norm(x))
        x = F.layer_norm(F.dropout(x, 0.25, training=True), [64])
        if self.fails:
            F.relu(x, nothing=1)  # type: ignore[call-arg]
        x = F.normalize(F.softmax(self.out(x), dim=-1, dtype=torch.float32), p=2.0)
        return F.smooth_l1_loss(x, torch.zeros_like(x), reduction="sum")


def step(model: Model, session: Session | None, *modes: TorchFunctionMode) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    x = torch.randn(64, 64)

    def loss() -> Tensor:
        for mode in modes:
            mode.__enter__()
        try:
            return model(x)  # type: ignore[no-any-return]
        finally:
            for mode in reversed(modes):
                mode.__exit__(None, None, None)

    if session is None:
        loss().backward()
    else:
        with session:
            found = loss()
        found.backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def settled(model: Model) -> Session:
    opened = Session(lossless(), model=model, min_nbytes=0, stop_if_useless=False)
    for _ in range(STEPS):
        step(model, opened)
    assert opened._is_replayed
    return opened


def test_a_settled_pass_goes_past_torchs_function_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    opened, expected = settled(model), step(model, None)
    taken: list[Any] = []
    real = torch.overrides._pop_mode_temporarily
    monkeypatch.setattr(torch.overrides, "_pop_mode_temporarily", lambda: taken.append(1) or real())
    got = step(model, opened)
    assert opened._is_replayed
    assert not taken
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    with opened:
        opened._replaying.abandon()  # type: ignore[union-attr]
        F.relu(torch.ones(3, requires_grad=True))
    assert taken


def test_modes_of_the_program_are_asked_as_ever() -> None:
    model, above = Model(), Seeing()
    opened = settled(model)
    plain = Seeing()
    expected = step(model, None, plain)
    for _ in range(2):
        above.seen.clear()
        got = step(model, opened, above)
        assert above.seen == plain.seen
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_classes_of_tensors_are_asked_as_ever() -> None:
    class Own(Tensor):
        asked: ClassVar[list[Any]] = []

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.asked.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    model = Model()
    opened = settled(model)
    model.zero_grad()
    with opened:
        loss = F.relu(torch.randn(64, 64, requires_grad=True).as_subclass(Own)).sum()
    assert F.relu in Own.asked
    loss.backward()


def test_an_error_is_torchs_and_the_observer_is_back() -> None:
    model = Model()
    opened = settled(model)
    model.fails = True
    with pytest.raises(TypeError, match="nothing"):
        step(model, None)
    with opened:
        before = function_modes()
        with pytest.raises(TypeError, match="nothing"):
            model(torch.randn(64, 64))
        assert function_modes() == before
    model.fails = False
    expected = step(model, None)
    assert all(torch.equal(one, other) for one, other in zip(step(model, opened), expected, strict=True))


def test_torch_has_its_own_function_but_in_a_settled_pass() -> None:
    model, during = Model(), []
    opened = settled(model)
    model.out.register_forward_hook(lambda *_: during.append(F.handle_torch_function))
    expected = step(model, None)
    step(model, opened)
    assert F.handle_torch_function is dispatch_to_modes
    with pytest.raises(KeyError), opened:
        model(torch.randn(64, 64))
        raise KeyError
    assert F.handle_torch_function is dispatch_to_modes
    assert [each is dispatch_to_modes for each in during] == [True, False, False]
    assert all(torch.equal(one, other) for one, other in zip(step(model, opened), expected, strict=True))


def test_threads_do_not_disturb_each_other() -> None:
    models = [Model() for _ in range(2)]
    sessions = [settled(each) for each in models]
    got: list[Any] = [None, None]
    meet = threading.Barrier(2)

    def train(number: int) -> None:
        for _ in range(20):
            meet.wait(60)
            x = torch.randn(64, 64, generator=torch.Generator().manual_seed(number))
            models[number].zero_grad()
            with sessions[number]:
                loss = F.relu(models[number].out(x)).sum()
            loss.backward()
        assert sessions[number]._is_replayed
        got[number] = models[number].out.weight.grad

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for number, found in enumerate(got):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(number))
        models[number].zero_grad()
        F.relu(models[number].out(x)).sum().backward()
        assert torch.equal(found, models[number].out.weight.grad)
    assert F.handle_torch_function is dispatch_to_modes


class Named(Tensor):
    """A class of a program, whose tensors do what others do."""


class Overwriting(Model):
    """What it is given is overwritten by a function in Python."""

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        made = F.relu(x, inplace=True)
        assert isinstance(made, Tensor)
        return super().forward(made.as_subclass(Tensor))


def test_a_call_that_the_interpreter_leaves_to_the_observer_returns_its_result() -> None:
    model = Overwriting()
    opened = settled(model)
    for kind in (Named, Tensor):
        found = []
        for session in (None, opened):
            model.zero_grad()
            torch.manual_seed(3)
            x = torch.randn(64, 64).as_subclass(kind)
            with session or nullcontext():
                loss = model(x)
            loss.backward()
            found.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))

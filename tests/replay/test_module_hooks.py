"""A settled pass has no hooks of modules, and leaves none behind, whatever ends it."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from backstash import Session
from backstash.capture import modules
from tests.replay.twins import STEPS

GLOBAL = nn.modules.module


class Probe(nn.Module):
    """Calls what a test wants to happen inside of a module."""

    def __init__(self, then: Callable[[], object] | None = None) -> None:
        super().__init__()
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        """The tangent."""
        if self.then is not None:
            self.then()
        return x.tanh()


class Model(nn.Module):
    """A module with some in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.probe, self.last = nn.Linear(32, 32), nn.Sequential(Probe()), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        return self.last(self.probe(self.first(x).relu()).tanh()).square().sum()


class Training:
    """A model under a Session that has settled."""

    def __init__(self, opened: bool = True, steps: int = STEPS) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.session = Session("lossless", model=self.model, min_nbytes=0, stop_if_useless=False) if opened else None
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        """Forward and backward."""
        self.model.zero_grad()
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
        if self.session is None:
            self.model(x).backward()
            return
        with self.session:
            loss = self.model(x)
        loss.backward()

    def during(self, happens: Callable[[], object]) -> list[Tensor | None]:
        """Runs a step in which that happens inside of the model; returns the gradients."""
        self.model.probe[0].then = happens
        try:
            self.step()
        finally:
            self.model.probe[0].then = None
        return [parameter.grad for parameter in self.model.parameters()]

    @property
    def is_settled(self) -> bool:
        """Whether the latest pass ran a script."""
        return self.session is not None and self.session._is_replayed


def hooks() -> int:
    """How many hooks modules would call."""
    return len(GLOBAL._global_forward_pre_hooks) + len(GLOBAL._global_forward_hooks)


def nothing_is_left(training: Training) -> bool:
    """Whether no hook is where none was."""
    own = [*training.model._forward_hooks, *training.model._forward_hooks_always_called]
    fused = [kind for kind in modules._FUSED if "__call__" in vars(kind)]
    return not (hooks() or own or fused or GLOBAL._global_forward_hooks_always_called)


def equal(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    """Whether gradients have the same bits."""
    return all(a is not None and b is not None and a.equal(b) for a, b in zip(found, expected, strict=True))


def test_modules_of_a_settled_pass_find_no_hooks() -> None:
    training, seen = Training(), list[int]()
    expected = Training(opened=False).during(lambda: None)
    assert equal(training.during(lambda: seen.append(hooks())), expected)
    assert training.is_settled and seen == [0]
    assert nothing_is_left(training)
    assert training.session is not None
    with training.session:
        assert hooks() == 2
        training.model(torch.randn(32, 32))
        assert hooks() == 2 and not training.model._forward_hooks


def test_modules_of_other_passes_find_them() -> None:
    training, seen = Training(steps=1), list[int]()
    training.during(lambda: seen.append(hooks()))
    assert not training.is_settled and seen == [2]
    assert nothing_is_left(training)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("is_attached", [False, True])
def test_an_error_in_a_settled_pass_is_the_programs_own(error: type[BaseException], is_attached: bool) -> None:
    training = Training()
    assert training.session is not None

    def fail() -> None:
        raise error("the program's own")

    if is_attached:  # the Session stays open over steps
        training.session.__enter__()
        opened, training.session = training.session, None
        try:
            for _ in range(2 * STEPS):
                training.step()
            with pytest.raises(error, match="the program's own"):
                training.during(fail)
            for _ in range(STEPS):
                found = training.during(lambda: None)
        finally:
            opened.__exit__(None, None, None)
    else:
        with pytest.raises(error, match="the program's own"):
            training.during(fail)
        assert nothing_is_left(training)
        found = training.during(lambda: None)
    assert equal(found, Training(opened=False).during(lambda: None))
    training.during(lambda: None)
    assert nothing_is_left(training)


def test_an_error_is_seen_by_hooks_of_the_program_that_are_always_called() -> None:
    training, seen = Training(), list[str]()
    training.model.register_forward_hook(lambda *_: seen.append("root"), always_call=True)
    training.model.probe.register_forward_hook(lambda *_: seen.append("inner"), always_call=True)
    for _ in range(STEPS):
        training.step()
    seen.clear()

    def fail() -> None:
        raise ValueError("the program's own")

    with pytest.raises(ValueError, match="the program's own"):
        training.during(fail)
    assert seen == ["inner", "root"]


def test_an_error_that_the_program_catches_ends_nothing() -> None:
    training = Training()

    def fail() -> None:
        with suppress(ValueError):
            raise ValueError("the program's own")

    found = training.during(fail)
    assert training.is_settled and equal(found, Training(opened=False).during(lambda: None))
    try:
        raise ValueError("a step while an error is handled")
    except ValueError:
        training.step()
    training.step()
    assert nothing_is_left(training)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_that_is_made_inside_works_alone(copied: Callable[[nn.Module], nn.Module]) -> None:
    training, copies = Training(), list[nn.Module]()
    training.during(lambda: copies.append(_copied_without_probes(training.model, copied)))
    assert training.is_settled
    x = torch.randn(32, 32)
    assert copies[0](x).equal(training.model(x))
    training.step()
    assert nothing_is_left(training)


def _copied_without_probes(model: nn.Module, copied: Callable[[nn.Module], nn.Module]) -> nn.Module:
    probe = model.probe[0]
    then, probe.then = probe.then, None
    try:
        return copied(model)
    finally:
        probe.then = then


def teacher() -> nn.Module:
    """A layer that computes by one fused function in evaluation."""
    torch.manual_seed(1)
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()


@pytest.mark.parametrize("calls", [1, 2])
def test_a_fused_layer_in_evaluation_computes_as_ever(calls: int) -> None:
    training, layer, found = Training(), teacher(), list[Tensor]()
    x = torch.randn(2, 8, 32)

    def teach() -> None:
        with torch.no_grad():
            found.append(layer(x))

    for _ in range(calls):
        gradients = training.during(teach)
    with torch.no_grad():
        expected = layer(x)
    assert training.is_settled
    assert all(each.equal(expected) for each in found)
    assert equal(gradients, Training(opened=False).during(lambda: None))
    assert nothing_is_left(training)


def test_a_fused_layer_that_is_trained_finds_no_hooks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), nn.Linear(32, 8))
    opened, seen = Session("lossless", model=model, min_nbytes=0, stop_if_useless=False), list[int]()
    model[0].linear1.register_forward_hook(lambda *_: seen.append(hooks()))
    for _ in range(2 * STEPS):
        with opened:
            loss = model(torch.ones(2, 8, 32)).sum()
        loss.backward()
    assert opened._is_replayed
    assert seen[0] == 2 and seen[-1] == 0


def test_a_session_of_another_thread_hears_of_its_modules() -> None:
    training, rows, seen = Training(), list[list[str]](), list[int]()

    def elsewhere() -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        opened = Session("lossless", min_nbytes=0, stop_if_useless=False)
        with opened:
            loss = model(torch.randn(8, 8)).sum()
        loss.backward()
        rows.append([row.key for row in opened.report().rows])

    def other_thread() -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        seen.append(hooks())

    found = training.during(other_thread)
    assert any(key.startswith("1/Tanh") for key in rows[0])
    assert seen == [2]
    assert equal(found, Training(opened=False).during(lambda: None))
    training.step()
    assert training.is_settled and nothing_is_left(training)


def test_a_module_that_runs_on_another_thread_is_told_in_each_step() -> None:
    training = Training(steps=0)

    def other_thread() -> None:
        thread = threading.Thread(target=lambda: nn.Linear(4, 4)(torch.ones(4)))
        thread.start()
        thread.join()

    for _ in range(2 * STEPS):
        training.during(other_thread)
        assert training.session is not None and training.session._elsewhere


def test_several_sessions_at_once_hear_of_all_modules() -> None:
    training, seen = Training(), list[int]()
    ready, done = threading.Event(), threading.Event()

    def open_another() -> None:
        with Session("lossless"):
            ready.set()
            done.wait(60)

    thread = threading.Thread(target=open_another)
    thread.start()
    try:
        assert ready.wait(60)
        found = training.during(lambda: seen.append(hooks()))
    finally:
        done.set()
        thread.join()
    assert seen == [2] and training.is_settled
    assert equal(found, Training(opened=False).during(lambda: None))
    assert nothing_is_left(training)

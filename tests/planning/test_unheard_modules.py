"""Budgets of programs whose modules are not heard of: they call none, or do so inside of what is compiled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash.capture import modules
from backstash.planning.run import course
from backstash.planning.run.budgeted import Budgeted
from backstash.testing import equal_bits

STEPS = 40
Losses = tuple[list[float], list[Tensor]]


class Functional:
    """Layers of weights, without a module."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.weights = [torch.randn(64, 64, requires_grad=True) for _ in range(6)]

    def loss(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = F.dropout(F.relu(x @ weight / 6), 0.1)
        return x.square().mean()

    def train(self, session: Any, is_around: bool) -> Losses:
        torch.manual_seed(4)
        losses = []
        with session if is_around and session is not None else nullcontext():
            for _ in range(STEPS):
                with nullcontext() if is_around or session is None else session:
                    loss = self.loss(torch.randn(256, 64))
                loss.backward()
                losses.append(loss.item())
        return losses, [weight.grad for weight in self.weights if weight.grad is not None]


@pytest.mark.parametrize("is_around", [False, True])
def test_a_program_without_modules_has_a_plan(is_around: bool) -> None:
    plain = Functional().train(None, is_around)
    session = Budgeted("70%", min_nbytes=0)
    ours = Functional().train(session, is_around)
    assert ours[0] == plain[0] and all(map(equal_bits, ours[1], plain[1]))
    found = session.found
    assert found.plan is not None and 0 < found.reached_nbytes <= found.budget_nbytes, found
    session.close()
    assert modules._hearing == [] and modules._kept == set()


def test_modules_that_come_later_are_heard_of() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    first = torch.ones(8, requires_grad=True)
    with Budgeted("90%", min_nbytes=0) as session:
        first.exp().sum().backward()
        for batch in [64] * STEPS + [32] * 4:
            model(torch.ones(batch, 64)).square().mean().backward()
    assert session.found.plan is not None
    assert {shape for bucket in session.buckets for shape, _ in bucket.signature} == {(64, 64), (32, 64)}


def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """As if nothing had been compiled yet. Returns what says how many graphs there are."""
    import torch._dynamo.convert_frame as frames
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(frames, "FRAME_COUNTER", 0)
    monkeypatch.setattr(course, "PLAIN_STEPS", 2)
    return lambda: int(counters["stats"]["unique_graphs"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.second(F.gelu(self.first(self.norm(x)))), 0.1)


def whole(backend: str) -> tuple[Callable[[Tensor], Tensor], nn.Module]:
    model = nn.Sequential(Block(), Block())
    return torch.compile(lambda x: model(x).square().mean(), backend=backend, fullgraph=True), model


def module(backend: str) -> tuple[Callable[[Tensor], Tensor], nn.Module]:
    model = nn.Sequential(Block(), Block())
    compiled = torch.compile(model, backend=backend)
    return lambda x: compiled(x).square().mean(), model


def regional(backend: str) -> tuple[Callable[[Tensor], Tensor], nn.Module]:
    model = nn.Sequential(Block(), nn.Linear(64, 64), Block())
    for block in (model[0], model[2]):
        block.compile(backend=backend)
    return lambda x: model(x).square().mean(), model


def budget() -> Budgeted:
    """One that is more than plain takes: compiled code leaves nothing to be stored smaller here."""
    return Budgeted("64MiB", min_nbytes=0)


def train_compiled(make: Any, backend: str, sessions: list[Any], graphs: Callable[[], int]) -> tuple[list[Any], int]:
    torch.manual_seed(5)
    loss_of, model = make(backend)
    torch.manual_seed(6)
    seen: list[Any] = []
    for _ in range(14):
        for session in sessions:
            with session:
                loss = loss_of(torch.randn(64, 64))
            loss.backward()
            seen += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
            model.zero_grad()
    return seen, graphs()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # from Dynamo itself
@pytest.mark.parametrize("make", [whole, module, regional])
@pytest.mark.parametrize("others", [1, 2])
def test_what_is_compiled_is_compiled_once(make: Any, others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = fresh_process(monkeypatch)
    plain, expected = train_compiled(make, "aot_eager", [nullcontext()] * others, graphs)
    graphs = fresh_process(monkeypatch)
    ours, found = train_compiled(make, "aot_eager", [budget() for _ in range(others)], graphs)
    assert found == expected
    assert all(map(equal_bits, ours, plain))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_dropout_of_compiled_code_draws_what_it_draws_in_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = train_compiled(whole, "inductor", [nullcontext()], fresh_process(monkeypatch))
    ours, _ = train_compiled(whole, "inductor", [budget()], fresh_process(monkeypatch))
    assert all(map(equal_bits, ours, plain))


class Named(nn.Module):
    """A model that is called by keyword, as trainers do, in one part or in two."""

    def __init__(self, is_broken: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second, self.is_broken = nn.Linear(64, 256), nn.Linear(256, 8), is_broken

    def forward(self, x: Tensor, label: Tensor | None = None) -> Tensor:
        h = self.first(x).relu()
        if self.is_broken:
            torch._dynamo.graph_break()
        return self.second(h).square().mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("is_broken", [False, True])
@pytest.mark.parametrize("compiles", ["nothing", "the module", "a function"])
def test_a_compiled_module_that_is_called_by_keyword(compiles: str, is_broken: bool, by_keyword: bool) -> None:
    """Sessions are exchanged before it is called: Dynamo puts the modes back that were there when a part began."""

    def train(session: Any) -> tuple[list[float], list[Tensor], int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = Named(is_broken)
        called: Any = model
        if compiles != "nothing":
            whole = model if compiles == "the module" else (lambda *args, **kwargs: model(*args, **kwargs))
            called = torch.compile(whole, backend="aot_eager")
        torch.manual_seed(6)
        losses = []
        with nullcontext() if session is None else session:
            for _ in range(24):
                x = torch.randn(128, 64)
                loss = called(x=x) if by_keyword else called(x)
                loss.backward()
                losses.append(loss.item())
                assert session is None or len(torch.overrides._get_current_function_mode_stack()) <= 1
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return losses, gradients, torch._dynamo.utils.counters["stats"]["unique_graphs"]

    plain = train(None)
    ours = train(Budgeted("150%", min_nbytes=0))
    assert ours[0] == plain[0] and all(map(equal_bits, ours[1], plain[1]))
    assert ours[2] <= 2 * max(plain[2], 1)


def test_an_empty_plan_has_nothing_compiled_again() -> None:
    torch._dynamo.reset()
    loss_of, model = module("aot_eager")
    session, graphs = budget(), []
    for _ in range(2 * STEPS):
        with session:
            loss = loss_of(torch.randn(64, 64))
        loss.backward()
        model.zero_grad()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert session.found.plan is not None and session.found.plan.is_empty
    assert graphs == graphs[:1] * len(graphs)


def test_no_step_that_is_timed_alone_is_said_to_save_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "PLAIN_STEPS", 3)
    program, session, notes = Functional(), Budgeted("70%", min_nbytes=0), set()
    for _ in range(STEPS):
        with session:
            loss = program.loss(torch.randn(256, 64))
        loss.backward()
        notes |= set(session.report().notes)
    assert notes and not any("nothing was saved" in note for note in notes), notes

"""A step is recognised from earlier ones, in part or as a whole, and the report counts how much of it.

What is recognised is not worked out again, so a mistake here would show in the gradients: each of these programs is
compared bit by bit with plain PyTorch as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from session_checks import gradients_of
from torch import Tensor, nn

from backstash import Session
from backstash.capture.names import MOST_VARIANTS
from tests.fuzz.execute import check
from tests.fuzz.generate import SMALL, generate
from tests.fuzz.program import to_text

Counts = tuple[int, int]
"""How many saved tensors were recognised, and how many were looked at."""


def counts(session: Session) -> Counts:
    report = session.report()
    return report.recognised, report.named


class Gated(nn.Module):
    """Products of two tensors, whose node is asked for its result's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).sigmoid() * self.second(x).tanh()


class Pyramid(nn.Module):
    """One module that is called on several sizes in each step."""

    def __init__(self, sizes: int = 3) -> None:
        super().__init__()
        self.sizes, self.block = sizes, nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.block(x[: size + 1]).sum() for size in range(self.sizes)])


class Unrolled(nn.Module):
    """A recurrent cell, whose first call differs from the others: nothing needs a gradient of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for _ in range(4):
            state = self.cell(x, state)
        assert state is not None
        return state[0]


class Doubled(torch.autograd.Function):
    """Saves a tensor of its own, of which no formula says what it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x.exp())
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2 + 0 * ctx.saved_tensors[0]


class Custom(nn.Module):
    """A custom function between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Doubled.apply(self.first(x).relu()))  # type: ignore[no-untyped-call]


def train(model: nn.Module, x: Tensor, open_session: Callable[[], Any]) -> list[Tensor]:
    """One step; returns copies of the gradients."""
    model.zero_grad()
    with open_session():
        loss = model(x).square().sum()
    loss.backward()
    return gradients_of(model)


@pytest.mark.parametrize("policy", ["lossless", "lossless_stored", "keep"])
@pytest.mark.parametrize("network", [Gated, Pyramid, Unrolled, Custom])
def test_all_of_a_step_like_an_earlier_one_is_recognised(network: type[nn.Module], policy: str) -> None:
    model, x, session = network(), torch.randn(4, 8), Session(policy, min_nbytes=0)
    expected = train(model, x, nullcontext)
    found = []
    for _ in range(2 if policy == "keep" else 4):  # a Session that keeps everything looks at nothing after that
        got = train(model, x, lambda: session)
        assert all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))
        found.append(counts(session))
    assert found[0][0] < found[0][1]
    assert all(recognised == named > 0 for recognised, named in found[1:])


def test_a_module_on_more_sizes_than_are_remembered_is_worked_out_anew() -> None:
    model, x, session = Pyramid(MOST_VARIANTS + 1), torch.randn(MOST_VARIANTS + 1, 8), Session(min_nbytes=0)
    expected = train(model, x, nullcontext)
    for _ in range(3):
        got = train(model, x, lambda: session)
        assert all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))
    recognised, named = counts(session)
    assert recognised < named


def test_a_module_that_was_replaced_has_the_path_of_its_place() -> None:
    model, session = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), Session(min_nbytes=0)
    for activation in (model[1], nn.Sigmoid(), nn.Tanh()):
        model[1] = activation
        train(model, torch.randn(4, 8), lambda: session)
    assert "1/Tanh#0:result" in [row.key for row in session.report().rows]


def test_a_report_says_how_much_was_recognised() -> None:
    model, session = Gated(), Session(min_nbytes=0)
    for _ in range(2):
        train(model, torch.randn(4, 8), lambda: session)
    recognised, named = counts(session)
    assert f"recognised from earlier steps: {recognised} of {named} saved tensors" in session.report().table()


# -- random programs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(16))
def test_all_of_a_random_program_is_recognised_once_nothing_new_happens(seed: int) -> None:
    """Some of these programs do something in their first steps alone, or in turns.

    A step does not end where its loss is held and never goes backward, so such programs are not asked.
    """
    program = generate(seed, shape=SMALL, changing=False)
    if any(statement.kind == "keep_graph" for statement in program.backward):
        return
    program = replace(program, steps=6, batches=program.batches[:1], sessions="same")
    result = check(program)
    assert result.failure is None, f"{result.failure}\n\n{to_text(program)}"
    if not result.plain_error and not result.skipped:
        assert result.recognised == result.named, to_text(program)


class Changing(nn.Module):
    """A network of which a program changes parts between its steps."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.activations = nn.ModuleList([draw.choice(ACTIVATIONS)() for _ in range(4)])
        self.branch = False

    def forward(self, x: Tensor) -> Tensor:
        for number, (layer, activation) in enumerate(zip(self.layers, self.activations, strict=True)):
            y = activation(layer(x))
            x = y * x if self.branch and number % 2 else y
        return x


ACTIVATIONS = (nn.ReLU, nn.Sigmoid, nn.Tanh, nn.GELU, nn.SiLU, nn.Softplus)


class Steps:
    """A training whose steps differ at random; the same for plain PyTorch and under a Session, by its seed.

    Attributes:
        seen: all that a step's saved tensors depend on, of all steps before this one.
        batches: the batch sizes of all steps before this one.
    """

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.model = Changing(self.draw)
        self.seen: set[object] = set()
        self.batches: set[int] = set()
        self.batch, self.autocast = 3, False

    def change(self) -> None:
        """Changes one thing, or nothing."""
        draw, model = self.draw, self.model
        changed = draw.choice(["nothing", "nothing", "branch", "shape", "autocast", "hook", "freeze", "replace"])
        if changed == "branch":
            model.branch = not model.branch
        elif changed == "shape":
            self.batch = draw.choice([3, 5])
        elif changed == "autocast":
            self.autocast = not self.autocast
        elif changed == "hook":
            trained = [layer for layer in model.layers if layer.weight.requires_grad]
            draw.choice(trained).weight.register_hook(lambda gradient: gradient * 2)
        elif changed == "freeze":
            layer = draw.choice(list(model.layers)[1:])
            layer.requires_grad_(not layer.weight.requires_grad)
        elif changed == "replace":
            model.activations[draw.randrange(4)] = draw.choice(ACTIVATIONS)()

    def look(self) -> object:
        """All that the next step's saved tensors depend on."""
        model = self.model
        frozen = tuple(layer.weight.requires_grad for layer in model.layers)
        return model.branch, self.batch, self.autocast, frozen, tuple(map(type, model.activations))

    def step(self, open_session: Callable[[], Any]) -> list[Tensor | None]:
        """A step on random numbers; returns the gradients."""
        x = torch.randn(self.batch, 6)
        self.model.zero_grad()
        with open_session(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            loss = F.mse_loss(self.model(x).float(), torch.zeros(self.batch, 6))
        loss.backward()
        return [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]


def assert_recognised_as_it_should_be(seed: int, steps: int = 12) -> None:
    """Runs a training both ways: the bits are equal, a step seen before is recognised, and a new batch size is not."""
    expected, under_session = Steps(seed), Steps(seed)
    is_fresh, sessions = bool(seed % 2), [Session("lossless", min_nbytes=0)]
    numbers = torch.Generator().manual_seed(seed)
    for number in range(steps):
        state = torch.randint(1 << 30, (1,), generator=numbers).item()
        results = []
        for training in (expected, under_session):
            if number:
                training.change()
            torch.manual_seed(state)
            if training is under_session and is_fresh:
                sessions.append(Session("lossless", min_nbytes=0))
            results.append(training.step(nullcontext if training is expected else lambda: sessions[-1]))
        for one, other in zip(*results, strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or torch.equal(one, other), f"seed {seed}, step {number}"
        recognised, named = counts(sessions[-1])
        look = under_session.look()
        if look in under_session.seen:
            assert recognised == named, f"seed {seed}, step {number}: {recognised} of {named}"
        # Autocast's copies of frozen weights are saved as well, and are the same at each batch size.
        if under_session.batch not in under_session.batches and not under_session.autocast:
            assert recognised == 0 < named, f"seed {seed}, step {number}: {recognised} of {named}"
        under_session.seen.add(look)
        under_session.batches.add(under_session.batch)


@pytest.mark.parametrize("seed", [*range(12), 332])  # 332: the pass that is written down is the first of its kind
def test_a_training_that_changes_at_random_is_recognised_where_it_was_seen_before(seed: int) -> None:
    assert_recognised_as_it_should_be(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 400, 100))
def test_many_trainings_that_change_at_random_are_recognised(first: int) -> None:
    for seed in range(first, first + 100):
        assert_recognised_as_it_should_be(seed)

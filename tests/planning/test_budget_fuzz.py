"""Random programs under a budget: steps of several passes, losses, models and micro-batches in flight.

Each case draws some models, what a step does with them, where the Session is, and a budget. Losses, gradients and
weights must have the bits of the same program in plain PyTorch. A budget that is refused is refused by its own error.
Where each step does the same, there is one plan for all its passes in the end, which knows all that is saved, and keeps
the budget.

``python -m tests.planning.test_budget_fuzz --seconds 300 --first 1000`` runs other cases for as long as it is told to.
"""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstash as bs
from backstash.bits import equal_bits
from backstash.errors import BudgetError
from backstash.planning.run import course
from tests.drawn_cases import run_for_a_while
from tests.networks.blocks import Attention, Residual

WIDTH, STEPS = 32, 24
DEFAULT_CASES, GROUP = 32, 4
"""How many cases the tests run, and how many a group has."""
FAILED = (2011, 2020, 9066, 9206)
"""Cases that failed once: a graph that is dropped in the middle of a pass, also with values of the same names."""

Open = Callable[[], AbstractContextManager[object]]
"""Opens the Session around a forward pass, where it is to be there."""


class Cell(nn.Module):
    """A cell that is called some times in each call of the module."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.of_input, self.of_state, self.times = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), times

    def forward(self, x: Tensor) -> Tensor:
        state = x
        for _ in range(self.times):
            state = torch.tanh(self.of_input(x) + self.of_state(state))
        return state


def drawn_layer(draw: random.Random) -> nn.Module:
    """A layer of any kind."""
    kind = draw.randrange(5)
    if kind < 2:
        norm = draw.choice((nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d))(WIDTH)
        act = draw.choice((torch.relu, F.gelu, F.silu, torch.tanh))
        return Residual(WIDTH, norm if draw.random() < 0.8 else nn.Identity(), act, draw.choice((0.0, 0.0, 0.1)))
    if kind == 2:
        return Cell(draw.randrange(1, 4))
    return Attention(WIDTH) if kind == 3 else nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())


def loss_of(y: Tensor) -> Tensor:
    return y.square().mean()


@dataclass
class Program:
    """What the kinds of steps need.

    Attributes:
        models: that are trained.
        rows: of a batch.
        times: how many losses, micro-batches or passes a step has.
        draw: draws what differs from step to step.
        opened: opens the Session around a forward pass.
    """

    models: list[Any]
    rows: int
    times: int
    draw: random.Random
    opened: Open

    def batch(self) -> Tensor:
        """A batch, [rows, WIDTH]."""
        return torch.randn(self.rows, WIDTH)

    def through_all(self, x: Tensor) -> Tensor:
        """What one model after the other makes of it."""
        for model in self.models:
            x = model(x)
        return x


def one_loss(program: Program) -> list[Tensor]:
    with program.opened():
        loss = loss_of(program.through_all(program.batch()))
    loss.backward()
    return [loss]


def some_losses(program: Program) -> list[Tensor]:
    models = program.models
    with program.opened():
        losses = [loss_of(models[number % len(models)](program.batch())) for number in range(program.times)]
    for loss in losses:
        loss.backward()
    return losses


def accumulated(program: Program) -> list[Tensor]:
    losses = []
    for _ in range(program.times):
        with program.opened():
            losses.append(loss_of(program.through_all(program.batch())) / program.times)
        losses[-1].backward()
    return losses


def adversarial(program: Program) -> list[Tensor]:
    generator, critic = program.models[0], program.models[-1]
    with program.opened():
        of_critic = loss_of(critic(generator(program.batch()).detach())) + loss_of(critic(program.batch()))
    of_critic.backward()
    with program.opened():
        of_generator = loss_of(critic(generator(program.batch())))
    of_generator.backward()
    return [of_critic, of_generator]


def one_trunk(program: Program) -> list[Tensor]:
    models = program.models
    with program.opened():
        hidden = models[0](program.batch())
        losses = [loss_of(models[(1 + number) % len(models)](hidden)) for number in range(program.times)]
    for number, loss in enumerate(losses):
        loss.backward(retain_graph=number < len(losses) - 1)
    return losses


def penalty(program: Program) -> list[Tensor]:
    with program.opened():
        x = program.batch().requires_grad_()
        y = program.models[0](x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = loss_of(y) + loss_of(slope)
    loss.backward()
    return [loss]


def drawn_passes(program: Program) -> list[Tensor]:
    losses = []
    for _ in range(program.times):
        with program.opened():
            losses.append(loss_of(program.draw.choice(program.models)(program.batch())))
        losses[-1].backward()
        if program.draw.random() < 0.3:
            break
    return losses


def in_flight(program: Program) -> list[Tensor]:
    """Each backward pass comes after the forward pass of the next micro-batch."""
    losses: list[Tensor] = []
    waiting: deque[Tensor] = deque()
    for _ in range(program.times + 2):
        with program.opened():
            waiting.append(loss_of(program.models[0](program.batch())))
        if len(waiting) > 1:
            losses.append(waiting.popleft())
            losses[-1].backward()
    losses.append(waiting.popleft())
    losses[-1].backward()
    return losses


KINDS: dict[str, Callable[[Program], list[Tensor]]] = {
    "one loss": one_loss,
    "some losses": some_losses,
    "accumulated": accumulated,
    "adversarial": adversarial,
    "one trunk": one_trunk,
    "penalty": penalty,
    "drawn passes": drawn_passes,
    "in flight": in_flight,
}


@dataclass(frozen=True)
class Case:
    """A program and a budget.

    Attributes:
        seed: what it was drawn from.
        kind: of its steps.
        layers: seeds of the layers of each model.
        times, rows: as in Program.
        budget, min_nbytes: of the Session.
        place: what it is around.
        adam, to_none: the optimizer, and how gradients are taken away.
    """

    seed: int
    kind: str
    layers: tuple[tuple[int, ...], ...]
    times: int
    rows: int
    budget: str
    min_nbytes: int
    place: str
    adam: bool
    to_none: bool

    @classmethod
    def draw(cls, seed: int) -> Case:
        """The case of a seed."""
        draw = random.Random(seed)
        depth = draw.randrange(1, 4)
        layers = tuple(tuple(draw.randrange(1 << 30) for _ in range(depth)) for _ in range(draw.randrange(1, 4)))
        return cls(
            seed,
            draw.choice(list(KINDS)),
            layers,
            draw.randrange(2, 5),
            draw.choice((64, 256)),
            draw.choice(("97%", "90%", "80%", "70%")),
            draw.choice((0, 0, 1024)),
            draw.choice(("forward", "step", "loop", "model")),
            draw.choice((False, True)),
            draw.choice((False, True)),
        )

    def train(self, session: bs.Budgeted | None, is_wrapped: bool = False) -> list[Tensor]:
        """Trains; returns losses, gradients and weights."""
        torch.manual_seed(self.seed)
        draws = [[random.Random(seed) for seed in layers] for layers in self.layers]
        models = [nn.Sequential(*map(drawn_layer, each), nn.Linear(WIDTH, WIDTH)) for each in draws]
        weights = [weight for model in models for weight in model.parameters()]
        optimizer = torch.optim.Adam(weights, 1e-3) if self.adam else torch.optim.SGD(weights, 0.01)
        if is_wrapped:
            models = [bs.wrap(model, budget=self.budget, min_nbytes=self.min_nbytes) for model in models]

        def around(place: str) -> AbstractContextManager[object]:
            return nullcontext() if session is None or place != self.place else session

        draw = random.Random(self.seed)
        program = Program(models, self.rows, self.times, draw, lambda: around("forward"))
        torch.manual_seed(self.seed)
        found: list[Tensor] = []
        with around("loop"):
            for _ in range(STEPS):
                with around("step"):
                    found += [loss.detach().clone() for loss in KINDS[self.kind](program)]
                found += [weight.grad.clone() for weight in weights if weight.grad is not None]
                optimizer.step()
                optimizer.zero_grad(set_to_none=self.to_none)
        return [*found, *(weight.detach() for weight in weights)]


def check(case: Case) -> str:
    """Runs a case and returns what became of the budget.

    Raises:
        AssertionError: bits are others, or a plan does not know what is saved.
    """
    expected = case.train(None)
    session = None if case.place == "model" else bs.Budgeted(case.budget, min_nbytes=case.min_nbytes)
    try:
        found = case.train(session, session is None)
    except BudgetError:
        return f"{case.kind} refused"
    finally:
        if session is not None:
            session.close()
    same = [equal_bits(one, other) for one, other in zip(expected, found, strict=True)]
    assert all(same), f"{same.count(False)} of {len(same)} tensors have other bits, the first is {same.index(False)}"
    if session is None:
        return f"{case.kind} of a wrapped model"
    reached = session.found
    if reached.plan is None:
        return f"{case.kind} not planned yet"
    # Drawn passes differ from step to step, and two passes of one model by so little that they are taken for one kind.
    if case.kind != "drawn passes" and not (case.kind == "adversarial" and len(case.layers) == 1):
        assert not reached.plan.unknown, f"the plan does not know {reached.plan.unknown[:3]}"
        assert reached.reached_nbytes <= reached.budget_nbytes, f"the budget is not kept: {reached}"
    return f"{case.kind} planned"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("seeds", [FAILED, *(range(at, at + GROUP) for at in range(0, DEFAULT_CASES, GROUP))])
def test_programs_under_a_budget_have_the_bits_of_plain_pytorch(seeds: Sequence[int]) -> None:
    for seed in seeds:
        case = Case.draw(seed)
        try:
            check(case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    course.LEAST = float("inf")  # whatever there is to compute is computed between two steps
    run_for_a_while(__doc__, Case.draw, check)

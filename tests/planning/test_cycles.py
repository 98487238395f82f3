"""Steps of several backward passes: how many there are is found out, and a plan is for all of them together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from backstash.errors import BudgetError
from backstash.planning.run.budgeted import Budgeted
from backstash.planning.run.cycles import MOST_SEEN, PATIENCE, Order
from backstash.report.meter import CountedPeak
from tests.networks.blocks import Residual

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
WIDTH = 64
STEPS = 30

CRITIC = {f"critic {number}" for number in range(10)}
GENERATOR = {f"generator {number}" for number in range(8)}


def cycles_of(passes: Sequence[set[str]]) -> int:
    """How many backward passes make a step, by the values saved before each; 0 if more have to be seen."""
    order = Order()
    for keys in passes:
        order.add(keys)
    return order.first_period()


def found_after(passes: Sequence[set[str]]) -> tuple[int, int]:
    """How many passes a step of such a program has, and after how many that is known."""
    for seen in range(1, 100):
        cycles = cycles_of([passes[index % len(passes)] for index in range(seen)])
        if cycles:
            return cycles, seen
    return 0, 0


@pytest.mark.parametrize(
    ("passes", "cycles"),
    [
        ([CRITIC], 1),
        ([CRITIC | GENERATOR, CRITIC], 2),
        ([CRITIC, CRITIC | GENERATOR, CRITIC], 3),
        ([CRITIC, GENERATOR], 2),
        ([GENERATOR, {"a"}, {"b"}, {"c"}], 4),
    ],
)
def test_a_step_is_what_repeats_itself(passes: list[set[str]], cycles: int) -> None:
    assert found_after(passes) == (cycles, 2 * cycles)


@pytest.mark.parametrize("cycles", [[CRITIC], [CRITIC | GENERATOR, CRITIC], [CRITIC, {"a"}, GENERATOR]])
def test_a_first_pass_that_never_comes_back_is_no_part_of_a_step(cycles: list[set[str]]) -> None:
    for seen in range(1, 100):
        found = cycles_of([{"warm-up"}, *(cycles[index % len(cycles)] for index in range(seen))])
        if found:
            break
    assert found == len(cycles)
    assert seen <= PATIENCE


def test_some_layers_may_be_drawn_anew() -> None:
    passes = [CRITIC, CRITIC - {"critic 3"}]
    assert found_after(passes) == (1, 2)


def test_a_program_that_never_repeats_itself_ends_its_step_with_the_first_value() -> None:
    passes = [{"shared", *(f"{number} {index}" for index in range(5))} for number in range(30)]
    assert found_after(passes) == (1, PATIENCE)
    passes = [{f"{number}"} for number in range(99)]
    assert found_after(passes) == (MOST_SEEN + 1, MOST_SEEN + 1)


def test_a_step_that_begins_after_others_ends_where_nothing_is_held_for_later() -> None:
    """As in the pipeline schedule 1F1B, whose passes in the middle look like steps of one pass each."""
    order, one = Order(), CRITIC
    passes = [one | {f"{key}@2" for key in one}, *[one] * 12, set()]
    found = [0]
    while not found[-1]:
        number = len(order.passes) % len(passes)
        order.add(passes[number], may_be_last=number == len(passes) - 1)
        found.append(order.first_period())
    assert found[-1] == len(passes)


def test_a_program_that_always_holds_something_for_later_has_a_step() -> None:
    order = Order()
    for _ in range(MOST_SEEN):
        order.add(CRITIC, may_be_last=False)
        order.add(set(), may_be_last=False)
    assert order.first_period() == 2


def test_passes_of_a_known_step_may_change() -> None:
    """Then the step has as many passes as before, and not twice as many."""
    order, changed = Order(), {f"{key} changed" for key in CRITIC}
    for one in (CRITIC, changed):
        for number in range(18):
            order.add(one if number % 6 < 5 else CRITIC | GENERATOR)
            phase = number % 6
            if order.pattern and order.is_odd(6, phase) and order.longer_period():
                assert order.longer_period() == 6 and one is changed
                return
        assert order.first_period() == 6
        order.settle(6, 0)
    raise AssertionError("they were not seen to have changed")


def test_a_step_begins_where_nothing_is_held_for_it() -> None:
    """Before the first step of a pipeline's last rank, a pass tells what shapes come."""
    order = Order()
    order.add(GENERATOR)
    for number in range(8):
        order.add(CRITIC if number % 4 == 0 else set(), may_be_last=number % 4 == 3)
    assert order.first_period() == 4
    assert [order.ahead_of(4, phase) for phase in (0, 1, 2, 3)] == [0, 3, 2, 1]


@given(st.lists(st.sets(st.integers(0, 5).map(str)), min_size=1, max_size=6))
def test_every_program_has_an_answer(passes: list[set[str]]) -> None:
    cycles, seen = found_after(passes)
    assert 1 <= cycles < seen or cycles == seen > MOST_SEEN


# -- programs ----------------------------------------------------------------------------------------------------------

Step = Callable[[], None]


def layers(number: int, last: int = WIDTH) -> nn.Sequential:
    blocks: list[nn.Module] = []
    for _ in range(number):
        blocks += [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, last))


def rows() -> Tensor:
    return torch.randn(512, WIDTH)


def noise() -> Tensor:
    """What a generator reads: of another shape than what a critic reads."""
    return torch.randn(512, 16)


def _step_of(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def adversarial(generator: nn.Module, critic: nn.Module, of_generator: Any, of_critic: Any, apart: bool) -> Step:
    """The critic learns from both kinds of images at once, or ``apart``: from real ones first."""

    def step() -> None:
        real = F.softplus(-critic(rows())).mean()
        if apart:
            real.backward()
        made = generator(noise())
        unreal = F.softplus(critic(made.detach())).mean()
        (unreal if apart else unreal + real).backward()
        _step_of(of_critic)
        F.softplus(-critic(made)).mean().backward()
        _step_of(of_generator)

    return step


def two_heads(generator: nn.Sequential, critic: nn.Module, of_generator: Any, of_critic: Any) -> Step:
    """Two losses that share a trunk, whose graph the first of them leaves to the second."""

    def step() -> None:
        shared = generator[1](rows())
        critic(shared).square().mean().backward(retain_graph=True)
        shared.abs().mean().backward()
        _step_of(of_generator)
        _step_of(of_critic)

    return step


PROGRAMS = {
    "two passes": (partial(adversarial, apart=False), 2, 2, "70%"),
    "three passes": (partial(adversarial, apart=True), 3, 3, "70%"),
    "two heads": (two_heads, 2, 1, "98%"),  # what the first pass has made again is held for the second
}
"""Programs, the backward passes of their steps, the forward passes that begin with a module, and budgets."""


def network(program: Callable[..., Step]) -> tuple[Step, list[nn.Parameter]]:
    """A step of new models, and their weights."""
    torch.manual_seed(0)
    generator, critic = nn.Sequential(nn.Linear(16, WIDTH), layers(2)), layers(2, 1)
    optimizers = [torch.optim.SGD(model.parameters(), 0.05) for model in (generator, critic)]
    return program(generator, critic, *optimizers), [*generator.parameters(), *critic.parameters()]


def trained(program: Callable[..., Step], context: AbstractContextManager[Any]) -> list[Tensor]:
    """The weights after some steps."""
    step, weights = network(program)
    with context:
        for _ in range(STEPS):
            step()
    return [weight.detach() for weight in weights]


def plain_peak_of(program: Callable[..., Step]) -> int:
    """The counted peak of a plain step."""
    step, _ = network(program)
    step()
    with CountedPeak() as counted:
        step()
    return counted.peak_nbytes


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_plan_is_for_all_passes_of_a_step(name: str) -> None:
    program, cycles, forwards, budget = PROGRAMS[name]
    run = Budgeted(budget, min_nbytes=1024)
    expected, found = trained(program, contextlib.nullcontext()), trained(program, run)
    run.close()
    assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))
    assert (run.period, run.forwards) == (cycles, forwards)
    assert run.found.plain_nbytes == pytest.approx(plain_peak_of(program), rel=0.25)
    assert run.found.plan is not None and run.found.plan.unknown == ()
    assert 0 < run.found.reached_nbytes <= run.found.budget_nbytes


@pytest.mark.parametrize("budget", ["90%", "80%", "70%"])
def test_each_loss_of_a_step_has_its_own_backward_pass(budget: str) -> None:
    """What is decided on in these passes differs between keeping everything and a plan; what they save does not."""
    losses = 4

    def train(context: AbstractContextManager[Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Residual(WIDTH), Residual(WIDTH), nn.Linear(WIDTH, 20))
        for _ in range(STEPS // 2):
            with context:
                found = [model(x).square().mean() for x in rows().chunk(losses)]
            for loss in found:
                loss.backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    run = Budgeted(budget, min_nbytes=0)
    expected, found = train(contextlib.nullcontext()), train(run)
    run.close()
    assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))
    assert run.period == losses
    assert run.found.plan is not None and run.found.plan.unknown == ()
    assert 0 < run.found.reached_nbytes <= run.found.budget_nbytes


class Recurrent(nn.Module):
    """A recurrent network whose sequences have other lengths in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(8, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of all outputs."""
        return self.layers(x)[0].square().mean()


@pytest.mark.slow
def test_shapes_that_never_come_back_have_the_plan_of_the_largest() -> None:
    def trained_with(context: AbstractContextManager[Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = Recurrent()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with context:
            for length in range(60, 2, -1):
                model(torch.randn(4, length, 8)).backward()
                _step_of(optimizer)
        return [p.detach() for p in model.parameters()]

    run = Budgeted("99%", min_nbytes=0)
    found = trained_with(run)
    largest = run.buckets.largest()
    assert largest is not None and largest.plain_nbytes > 0
    assert len(run.buckets) == 32 and largest in list(run.buckets)
    run.close()
    assert all(torch.equal(x, y) for x, y in zip(trained_with(contextlib.nullcontext()), found, strict=True))


def test_a_loop_that_asks_for_gradients_has_a_plan() -> None:
    def trained_with(context: AbstractContextManager[Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = layers(2)
        weights, last = list(model.parameters()), nn.Linear(WIDTH, 1)
        with context:
            for _ in range(STEPS):
                x = model(rows())
                (slope,) = torch.autograd.grad(torch.tanh(last(x)).sum(), x, create_graph=True)
                gradients = torch.autograd.grad(x.square().mean() + slope.square().mean(), weights)
                with torch.no_grad():
                    for weight, gradient in zip(weights, gradients, strict=True):
                        weight -= 0.1 * gradient
        return [weight.detach() for weight in weights]

    original = torch.autograd.grad
    run = Budgeted("80%", min_nbytes=1024)
    found = trained_with(run)
    run.close()
    assert torch.autograd.grad is original
    assert run.period == 1 and run.found.plan is not None
    assert 0 < run.found.reached_nbytes <= run.found.budget_nbytes
    assert all(torch.equal(x, y) for x, y in zip(trained_with(contextlib.nullcontext()), found, strict=True))


def _two_models(is_first: Callable[[int], bool], steps: int) -> tuple[Budgeted, list[Tensor]]:
    """Steps of two models in turns within a budget; returns the gradients as well."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid())
    second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    session, x, found = Budgeted("100%", min_nbytes=0), torch.randn(WIDTH, WIDTH), list[Tensor]()
    for number in range(steps):
        model = first if is_first(number) else second
        with session:
            loss = model(x).square().sum()
        found += torch.autograd.grad(loss, list(model.parameters()))
    return session, found


def test_a_first_step_of_another_model() -> None:
    session, _ = _two_models(lambda number: number == 0, STEPS)
    assert session.period == 1
    assert session.found.plans > 0


def test_passes_that_never_repeat_themselves() -> None:
    """The step is long then, and that is no error."""
    torch.manual_seed(0)
    session, x = Budgeted("100%", min_nbytes=0), torch.randn(WIDTH, WIDTH)
    for number in range(MOST_SEEN + 4):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2)))
        for depth in range(number):
            model = nn.Sequential(model, nn.Tanh()) if depth % 2 else nn.Sequential(nn.Sigmoid(), model)
        with session:
            loss = model(x).square().sum()
        loss.backward()


@pytest.mark.parametrize("steps", range(1, 8))
def test_backward_passes_of_others_are_none_of_a_step(steps: int) -> None:
    """A model that trains without the Session goes on training, whatever its neighbour's budget is."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)), torch.randn(WIDTH, WIDTH)
    session = Budgeted("30%", min_nbytes=0)
    for _ in range(steps):
        with session:
            loss = model(x).square().sum()
        with contextlib.suppress(BudgetError):
            loss.backward()
    cycles = session.cycles
    other = nn.Linear(8, 8)
    for _ in range(8):
        other(torch.randn(4, 8)).square().sum().backward()
        torch.autograd.grad(other(torch.randn(4, 8)).sum(), other.weight)
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.zeros(2).sum().backward()
    assert session.cycles == cycles


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_backward_passes_that_a_compiler_writes_down_are_none_of_a_step() -> None:
    """It goes backward to learn a graph, and would write the notes of the profiler into it."""
    dynamo = pytest.importorskip("torch._dynamo")

    def train(session: Budgeted | None) -> list[Tensor]:
        dynamo.reset()
        torch.manual_seed(0)
        part = torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), backend="aot_eager")
        model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), part, nn.Sigmoid()), torch.randn(WIDTH, WIDTH)
        found: list[Tensor] = []
        for _ in range(12):
            with session or contextlib.nullcontext():
                loss = model(x).square().sum()
            found += torch.autograd.grad(loss, list(model.parameters()))
        return found

    session = Budgeted("100%", min_nbytes=0)
    assert all(map(torch.equal, train(None), train(session)))
    assert session.period == 1
    assert session.found.plans > 0

"""One step that takes what no other does decides about no budget, whichever of the first steps it is."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstash as bs
from backstash.errors import BudgetError
from backstash.planning.run import budgeted, course
from backstash.planning.run.budgeted import Budgeted
from backstash.planning.run.within import Within
from tests.planning.test_budgeted import assert_nothing_is_left

MORE = 1 << 21
"""Elements of what the program takes once, far more than a step."""

STEPS, EARLY = 90, 12


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(4)]
    return nn.Sequential(nn.Linear(16, 64), *layers, nn.Linear(64, 8))


def found_with(budget: str | int, happens: str, at: int) -> Within:
    """What a budget has found for a loop in one step of which something happens that does not come again."""
    model, kept = network(), list[Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    session = Budgeted(budget, min_nbytes=1024)
    session.is_hurried = True
    for step in range(STEPS):
        optimizer.zero_grad()
        with session:
            out = model(torch.randn(128, 16))
            if step == at and happens == "a cache is filled in forward":
                kept.append(torch.zeros(MORE))
            loss = F.cross_entropy(out, torch.randint(8, (128,)))
        if step == at and happens == "a pass is not differentiated":
            kept.append(loss)
            continue
        if step == at and happens == "something is logged":
            kept.append(torch.zeros(MORE))
        loss.backward()
        optimizer.step()
    found = session.found
    session.close()
    assert_nothing_is_left()
    return found


@pytest.fixture(scope="module")
def usual() -> Within:
    with pytest.MonkeyPatch.context() as patch:  # as compiles_nothing does, for each test
        for module in (course, budgeted):
            patch.setattr(module, "may_compile", lambda: False)
        return found_with("60%", "nothing", -1)


@pytest.mark.filterwarnings("ignore:the plan .* was asked for")  # of the values of two forward passes, if one runs
@pytest.mark.parametrize("at", range(EARLY))
@pytest.mark.parametrize("budget", [lambda usual: "60%", lambda usual: usual.budget_nbytes], ids=["share", "bytes"])
@pytest.mark.parametrize(
    "happens", ["a cache is filled in forward", "something is logged", "a pass is not differentiated"]
)
def test_one_step_decides_about_no_budget(
    happens: str, budget: Callable[[Within], str | int], at: int, usual: Within, compiles_nothing: None
) -> None:
    found = found_with(budget(usual), happens, at)
    assert found.plan is not None and not found.trouble
    assert 0 < found.reached_nbytes <= found.budget_nbytes <= 1.1 * usual.budget_nbytes
    assert found.plain_nbytes == pytest.approx(usual.plain_nbytes, rel=0.1)


def test_steps_that_always_differ_have_a_plan(compiles_nothing: None) -> None:
    """Where every second step takes much more than the one behind it, no two agree, and some are taken."""
    model = network()
    held: list[Tensor] = []
    session = Budgeted(8 * MORE, min_nbytes=1024)
    session.is_hurried = True
    for step in range(STEPS):
        with session:
            loss = model(torch.randn(128, 16)).square().mean()
        held.append(torch.zeros(MORE if step % 2 else 1))
        loss.backward()
        held.clear()
        model.zero_grad()
    assert session.found.plan is not None, session.found
    session.close()
    assert_nothing_is_left()


def test_a_budget_error_names_a_budget_that_is_kept() -> None:
    """All that lowers the peak is to let go of a pooling's input, of which backward reads the shape alone."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 1), nn.AdaptiveAvgPool2d(1)
    )
    x = torch.randn(8, 4, 16, 16)

    def step() -> None:
        model(x).square().mean().backward()

    step()
    large = 100_000
    profile = bs.profile(step, model, min_nbytes=large, allow=("lossless",))
    plain = profile.plain_peak_nbytes
    named = set()
    for budget in (plain // 8, plain // 2, 3 * plain // 4):
        with pytest.raises(bs.errors.BudgetError) as refused:
            bs.plan(profile, budget, allow=("lossless",))
        named.add(refused.value.smallest_nbytes)
    (smallest,) = named
    assert smallest < plain
    plan = bs.plan(profile, smallest, allow=("lossless",))
    assert not plan.is_empty and all(decision.kind == "keep" for decision in plan.decisions)
    session = bs.Session(plan, model=model, min_nbytes=large)

    def planned() -> None:
        with session:
            loss = model(x).square().mean()
        loss.backward()

    assert bs.measure(planned).peak_nbytes <= smallest
    assert bs.plan(profile, plain, allow=("lossless",)).is_empty


class Standardised(nn.Linear):
    """A layer that makes its weight anew in each step, between two readers of its input."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(input, weight / (self.weight.std(1, keepdim=True) + 1e-5), self.bias)


def test_a_refused_loop_names_a_budget_that_is_kept(compiles_nothing: None) -> None:
    """The leanest plan takes more than it predicts here."""

    def trained(budget: int | str) -> bs.Budgeted:
        torch.manual_seed(0)
        layers = (layer for _ in range(5) for layer in (Standardised(128, 128), nn.ReLU()))
        model, budgeted = nn.Sequential(*layers, nn.Linear(128, 10)), bs.Budgeted(budget, min_nbytes=1024)
        for _ in range(80):
            model.zero_grad()
            with budgeted:
                loss = F.cross_entropy(model(torch.randn(128, 128)), torch.randint(10, (128,)))
            loss.backward()
        return budgeted

    with pytest.raises(BudgetError, match=r"But pass \d+ bytes: a step under the leanest plan has reached") as refused:
        trained("1%")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = trained(refused.value.smallest_nbytes).found
    assert 0 < found.reached_nbytes <= found.budget_nbytes == refused.value.smallest_nbytes

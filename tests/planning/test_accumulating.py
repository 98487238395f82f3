"""Loops that accumulate gradients over passes of different sizes: what is planned for is the pass that was surveyed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backstash.errors import BudgetError
from backstash.planning.measure.profiling import profile_of
from backstash.planning.measure.survey import Survey
from backstash.planning.measure.timeline import Timeline
from backstash.planning.model.problem import StepProfile
from backstash.planning.run import course
from backstash.planning.run.budgeted import Budgeted
from backstash.testing import equal_bits
from backstash.torch_internals import profiler_runs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(3):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers)


def trained(session: Any, sizes: Sequence[int], steps: int) -> list[Tensor]:
    """The gradients of all steps, each of which adds up those of batches of these sizes."""
    model, found = network(), list[Tensor]()
    for _ in range(steps):
        model.zero_grad()
        for size in sizes:
            with session:
                loss = model(torch.randn(size, 3, 16, 16)).square().mean() / len(sizes)
            loss.backward()
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return found


@pytest.mark.parametrize("sizes", [(8, 8, 4), (4, 8, 8), (4, 8), (8, 4, 4, 8)], ids=str)
def test_a_profile_is_of_the_pass_that_was_surveyed(sizes: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    profiled: list[int] = []

    def noted(line: Timeline, survey: Survey, *others: Any) -> StepProfile:
        assert line.born.keys() == survey.found.keys()
        assert list(line.trials) == list(range(survey.trials))
        together = sum(found.nbytes for found in survey.found.values())
        assert together <= max(position.most_nbytes for position in line.positions) < 2 * together
        profiled.append(together)
        return profile_of(line, survey, *others)

    monkeypatch.setattr(course, "profile_of", noted)
    session = Budgeted("70%")
    found = trained(session, sizes, 20)
    expected = trained(nullcontext(), sizes, 20)
    assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))
    assert len(profiled) == len(set(profiled)) == session.found.shapes == 2
    assert not session.found.trouble


@pytest.mark.parametrize("sizes", [(8, 4), (8, 8, 4), (4, 8), (4, 8, 2)], ids=str)
@pytest.mark.parametrize("is_whole", [False, True], ids=["plain", "a checkpoint around the model"])
def test_a_budget_is_a_share_of_a_step_no_smaller_than_the_first(sizes: Sequence[int], is_whole: bool) -> None:
    """A Session below a checkpoint's hooks stays open, and is that of the size before."""
    model, session = network(), Budgeted("100%", min_nbytes=0)
    for number, size in enumerate(sizes * 64):  # slices take as many steps as the machine needs
        if number >= 8 * len(sizes) and any(bucket.plan is not None for bucket in session.buckets):
            break
        x = torch.randn(size, 3, 16, 16, requires_grad=True)
        with session:
            y = checkpoint(model, x, use_reentrant=False) if is_whole else model(x)
            loss = torch.tanh(torch.relu(y)).square().mean()
        loss.backward()
        model.zero_grad()
    first = next(bucket for bucket in session.buckets if bucket.planner is not None)
    assert first.signature[0][0][0] >= sizes[0]
    assert first.planner is not None and first.planner.profile.values
    assert session.found.budget_nbytes == first.plain_nbytes


class Branches(nn.Module):
    """A convolution and a batch norm, or another branch, or both."""

    def __init__(self) -> None:
        super().__init__()
        convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.first = nn.Sequential(convolution, nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(8, 8, 1))
        self.second = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GELU(), nn.Conv2d(8, 8, 1), nn.Tanh())
        self.takes = "both"

    def forward(self, x: Tensor) -> Tensor:
        taken = {"first": [self.first], "second": [self.second], "both": [self.first, self.second]}[self.takes]
        return torch.stack([branch(x) for branch in taken]).sum(0)


class OwnError(Exception):
    """An error of the program's own."""


def fail(*_: Any) -> None:
    """A hook that raises."""
    raise OwnError


@dataclass
class Pass:
    """A pass of a random program; ``happens`` tells what is unusual about it."""

    model: int
    size: int
    takes: str
    happens: str
    seed: int


def passes_at_random(draw: random.Random, steps: int) -> list[list[Pass]]:
    """The passes of each step."""
    sizes = draw.choice([(8, 8, 4), (4, 8), (8,), (4, 8, 2), (2, 4, 6, 8)])
    count, is_ordered = draw.choice([0, 1, 2, 3, 5]), draw.random() < 0.6
    models, trouble = draw.choice([1, 1, 2]), draw.choice([0.0, 0.05, 0.2])
    takes = draw.choice([["both"], ["both"], ["first", "second", "both"]])
    strange = ["is left", "raises in forward", "raises in backward", "is evaluated", "runs twice", "asks for gradients"]
    found: list[list[Pass]] = []
    for step in range(steps):
        found.append([])
        for number in range(count or draw.randint(1, 5)):
            model = draw.choice([0, step % models, models - 1])
            size = sizes[number % len(sizes)] if is_ordered else draw.choice(sizes)
            happens = draw.choice(strange) if draw.random() < trouble else ""
            found[-1].append(Pass(model, size, draw.choice(takes), happens, draw.randrange(1 << 30)))
    return found


def run(models: Sequence[Branches], each: Pass, session: Any, calls: bool) -> Tensor | None:
    """Runs a pass."""
    model = models[each.model]
    model.takes = each.takes
    torch.manual_seed(each.seed)

    def forward() -> Tensor:
        x = torch.randn(each.size, 3, 12, 12)
        if calls and isinstance(session, Budgeted):
            return session.step(model, x)  # type: ignore[no-any-return]
        with session:
            return model(x)  # type: ignore[no-any-return]

    hooks: list[Any] = []
    try:
        if each.happens == "is evaluated":
            with torch.no_grad():
                return forward()
        if each.happens == "raises in forward":
            hooks = [branch[1].register_forward_hook(fail) for branch in (model.first, model.second)]
        y = forward()
        if each.happens == "is left":
            return y.detach()
        loss = (y + forward() if each.happens == "runs twice" else y).square().mean()
        if each.happens == "asks for gradients":
            found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
            return torch.stack([x.sum() for x in found if x is not None])
        if each.happens == "raises in backward":
            hooks = [next(branch.parameters()).register_hook(fail) for branch in (model.first, model.second)]
        loss.backward()
    except OwnError:
        model.zero_grad()  # of which part is there
    finally:
        for hook in hooks:
            hook.remove()
    return None


def assert_bits(seed: int, steps: int) -> None:
    """Runs a random program plainly and within a budget."""

    def outcome(session: Any) -> list[Tensor]:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        models, found = [Branches(), Branches()], list[Tensor]()
        weights = [weight for model in models for weight in model.parameters()]
        optimizer = torch.optim.SGD(weights, 0.01, momentum=0.9) if draw.random() < 0.5 else None
        is_none, calls = draw.random() < 0.7, draw.random() < 0.3
        for passes in passes_at_random(draw, steps):
            for each in passes:
                try:
                    made = run(models, each, session, calls)
                except BudgetError:
                    made = None if each.happens != "asks for gradients" else torch.zeros(0)
                found += [] if made is None else [made]
            found += [weight.grad.clone() for weight in weights if weight.grad is not None]
            if optimizer is not None:
                optimizer.step()
            for weight in weights:
                weight.grad = None if is_none or weight.grad is None else torch.zeros_like(weight)
        return [*found, *(x for model in models for x in model.state_dict().values())]

    draw = random.Random(-seed)
    session = Budgeted(draw.choice(["100%", "90%", "70%", "40%"]), min_nbytes=draw.choice([0, 1024]))
    expected, found = outcome(nullcontext()), outcome(session)
    session.close()
    assert not profiler_runs()
    pairs = zip(expected, found, strict=True)
    assert all(y.numel() == 0 or (x.shape == y.shape and equal_bits(x, y)) for x, y in pairs)


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_have_the_bits_of_plain_ones(seed: int) -> None:
    assert_bits(seed, 12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 48))
def test_more_random_programs_have_the_bits_of_plain_ones(seed: int) -> None:
    assert_bits(seed, 24)

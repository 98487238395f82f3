"""Models that train one after the other in one program: each training has a plan of its own, and keeps the budget."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from backstash.planning.run.buckets import Bucket
from backstash.planning.run.trainings import MOST_TRAININGS, SURE, Trainings
from backstash.report.meter import CountedPeak

COUNTED = 12
"""How many steps of a training are counted."""

pytestmark = pytest.mark.usefixtures("compiles_nothing")


def images(width: int) -> nn.Module:
    torch.manual_seed(0)
    sides = [4, width, width, width]
    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise(sides):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3))


def trained(model: nn.Module, steps: int, shape: tuple[int, ...], budgeted: bs.Budgeted | None) -> list[int]:
    """Trains a model, and returns the peaks of the last steps: in those before them the profiler is the budget's."""
    generator = torch.Generator().manual_seed(1)
    taken = []
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for step in range(steps):
        x = torch.randn(shape, generator=generator)
        with CountedPeak() if step >= steps - COUNTED else nullcontext() as counted, budgeted or nullcontext():
            model(x).square().mean().backward()
        taken += [] if counted is None else [counted.peak_nbytes]
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.01 * parameter.grad
                parameter.grad.zero_()
    return taken


@pytest.mark.parametrize("small", [0, 1, 8, 12, 40])
@pytest.mark.parametrize("shape", [(8, 4, 24, 24), (8, 4, 16, 16)], ids=["alike", "smaller before"])
def test_a_larger_model_behind_a_small_one_keeps_the_budget(shape: tuple[int, ...], small: int) -> None:
    plain = max(trained(images(32), 3, (8, 4, 24, 24), None))
    budget = int(0.8 * plain)
    budgeted = bs.Budgeted(budget)
    trained(images(4), small, shape, budgeted)
    model, other = images(32), images(32)
    taken = trained(model, 60, (8, 4, 24, 24), budgeted)
    trained(other, 60, (8, 4, 24, 24), None)
    assert max(taken) <= budget
    assert budgeted.found.plan is not None and 0.9 * max(taken) <= budgeted.found.reached_nbytes <= budget
    assert all(x.equal(y) for x, y in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.filterwarnings("ignore:the plan .* knows no such value")  # in the first steps of another width
def test_a_search_over_widths_has_a_plan_for_each() -> None:
    shape = 8, 4, 24, 24
    peaks = {width: max(trained(images(width), 3, shape, None)) for width in (24, 28, 32)}
    budget = int(0.9 * peaks[24])
    budgeted = bs.Budgeted(budget)
    for width in peaks:
        assert max(trained(images(width), 60, shape, budgeted)) <= budget
        gc.collect()


def layers(*sides: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(side, side) for side in sides])


def test_copies_are_one_model_and_models_in_turn_one_training() -> None:
    trainings = Trainings()
    for _ in range(3 * SURE):
        assert not trainings.has_ended_with(layers(2))
    critic, generator = layers(3), layers(4)
    for _ in range(SURE):
        for each in (critic, critic, generator, layers(2)):
            assert not trainings.has_ended_with(each)
    assert [trainings.has_ended_with(layers(5)) for _ in range(2 * SURE)] == [False] * (SURE - 1) + [True] + [
        False
    ] * SURE
    assert not any(trainings.has_ended_with(layers(5)) for _ in range(SURE))


def test_models_that_change_all_the_time_are_one_training_in_the_end() -> None:
    trainings = Trainings()
    found = [trainings.has_ended_with(layers(side)) for side in range(1, 2 * SURE * MOST_TRAININGS)]
    assert found.count(True) == MOST_TRAININGS - 1 and not any(found[-SURE:])


@pytest.mark.parametrize("make", [lambda: nn.LazyLinear(3), lambda: nn.Sequential(nn.LazyConv2d(3, 3), nn.ReLU())])
def test_weights_without_shapes_tell_nothing(make: Callable[[], nn.Module]) -> None:
    trainings = Trainings()
    assert not trainings.has_ended_with(layers(2))
    lazy = make()
    assert not any(trainings.has_ended_with(lazy) for _ in range(2 * SURE))
    first: Tensor = torch.ones(1, 3, 4, 4)
    lazy(first)
    assert [trainings.has_ended_with(lazy) for _ in range(SURE)][-1]


def test_inputs_are_told_in_words() -> None:
    assert Bucket((((8, 64), "int64"), ((), "float32"))).inputs == "int64 [8, 64], float32 []"
    assert Bucket((((4,), "float32"), ((), "autocast torch.bfloat16"))).inputs == "float32 [4], autocast torch.bfloat16"
    assert Bucket().inputs == "no tensors"

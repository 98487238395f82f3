"""The profile of a step: true bytes for each choice, positions that add up, and nothing left behind."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from backstash.errors import MeasureError
from backstash.planning.measure.profiling import profile
from backstash.planning.measure.survey import KeepForSurvey
from backstash.planning.model.problem import StepProfile
from backstash.planning.search.planner import Planner

BATCH = torch.randn(8, 3, 16, 16)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(BATCH).square().mean()
    return loss


@pytest.fixture(scope="module")
def found() -> StepProfile:
    model = network()
    return profile(lambda: loss_of(model).backward(), model, min_nbytes=1024)


def test_every_choice_holds_fewer_bytes_than_the_value(found: StepProfile) -> None:
    names = set()
    for value in found.values:
        assert value.choices[0].held_nbytes == value.nbytes
        assert all(choice.held_nbytes < value.nbytes for choice in value.choices[1:])
        names |= {choice.name for choice in value.choices}
    assert {"keep", "recompute", "bitmask", "narrow"} <= names


def test_a_value_is_remade_from_values_of_the_step(found: StepProfile) -> None:
    by_key = {value.key: value for value in found.values}
    norm = by_key["1/NativeBatchNorm#0:input"]  # made by a convolution of the batch, which the program holds anyway
    assert next(choice for choice in norm.choices if choice.kind == "recompute").parents == ()
    later = by_key["5/NativeBatchNorm#0:input"]
    (parent,) = next(choice for choice in later.choices if choice.kind == "recompute").parents
    assert found.values[parent].key == "4/Convolution#0:input"


def test_with_everything_kept_the_bytes_add_up_to_what_was_measured(found: StepProfile) -> None:
    assert found.rehearse is not None
    measured = found.rehearse(KeepForSurvey())
    assert len(measured) == len(found.positions)
    for number, (base, most) in enumerate(zip(found.base_nbytes, measured, strict=True)):
        held = sum(value.nbytes for value in found.values if value.born <= number <= value.reads[-1])
        assert base + held >= most
    peak = max(
        base + sum(value.nbytes for value in found.values if value.born <= number <= value.reads[-1])
        for number, base in enumerate(found.base_nbytes)
    )
    assert peak == max(measured)


def test_nothing_is_left_behind() -> None:
    model = network()
    loss_of(model).backward()
    before = copy.deepcopy(model.state_dict())
    gradients = [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    state = torch.get_rng_state()
    with_plan = profile(lambda: loss_of(model).backward(), min_nbytes=1024)
    assert with_plan.rehearse is not None
    with_plan.rehearse(KeepForSurvey())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    for parameter, (gradient, numbers) in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, numbers)
    assert torch.equal(torch.get_rng_state(), state)
    assert not nn.modules.module._global_forward_pre_hooks


def test_a_model_may_have_scripted_parts() -> None:
    torch.manual_seed(0)
    scripted = torch.jit.script(nn.Sequential(nn.Linear(32, 32), nn.Tanh()))
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), scripted, nn.Linear(32, 4))
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(64, 32)

    def step() -> None:
        model(x).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)

    found = profile(step, model, min_nbytes=1024)
    assert any(value.module.startswith("1") for value in found.values)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_a_profile_survives_a_file(found: StepProfile) -> None:
    again = StepProfile.from_json(found.to_json())
    assert again == found
    assert again.rehearse is None


def test_a_step_without_backward_is_an_error() -> None:
    model = network()
    with pytest.raises(MeasureError, match="backward"):
        profile(lambda: loss_of(model), model)


def test_another_device_is_an_error() -> None:
    with pytest.raises(MeasureError, match="meta"):
        profile(lambda: None, device="meta")


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_in_the_step_does_not_keep_values_from_being_remade(
    optimizer: type[torch.optim.Optimizer],
) -> None:
    """It changes weights when backward has read all that would have been made from them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    optimizer_of_model = optimizer(model.parameters(), 0.01)  # type: ignore[call-arg]
    x = torch.randn(128, 64)

    def backward() -> None:
        optimizer_of_model.zero_grad()
        model(x).square().mean().backward()

    def step() -> None:
        backward()
        optimizer_of_model.step()

    remade = [
        {value.key for value in taken.values if any(choice.kind == "recompute" for choice in value.choices)}
        for taken in (profile(step, model, min_nbytes=1024), profile(backward, model, min_nbytes=1024))
    ]
    assert remade[0] == remade[1] and "1/Gelu#0:self" in remade[0]


@pytest.mark.parametrize("rows", [256, 1024])
def test_what_a_survey_tries_is_none_of_the_step(rows: int) -> None:
    """A plan's model says what the plan takes; what a codec was decoded into had counted as the step's."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(256, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 512), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(512, 10))
    x, y = torch.randn(rows, 256), torch.randint(0, 10, (rows,))
    found = profile(lambda: nn.functional.cross_entropy(model(x), y).backward(), model)
    plan = Planner(found).at_most(0)
    assert found.rehearse is not None
    reached = max(found.rehearse(plan))
    assert reached <= plan.peak_nbytes <= 1.02 * reached

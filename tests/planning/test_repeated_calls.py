"""Plans of steps in which a module is called several times, or which have several backward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash import Session
from backstash.bits import equal_bits
from backstash.errors import BudgetError
from backstash.planning.measure.profiling import profile
from backstash.planning.measure.record import record
from backstash.planning.measure.survey import KeepForSurvey
from backstash.planning.model.plan import Plan
from backstash.planning.search.planner import Planner
from backstash.remake import calls
from backstash.remake.calls import call_of

BATCHES = torch.randn(2, 256, 64, generator=torch.Generator().manual_seed(0))


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Softplus())


def called_three_times(model: nn.Module) -> None:
    model(model(model(BATCHES[0]))).square().mean().backward()


def accumulates(model: nn.Module) -> None:
    for batch in BATCHES:
        model(batch).square().mean().backward()


def in_turns(model: nn.Module) -> None:
    made = model[0](BATCHES[0])
    model[1](made.detach()).square().mean().backward()
    model[1](made).abs().mean().backward()


STEPS: list[tuple[Callable[[nn.Module], None], Callable[[], nn.Module]]] = [
    (called_three_times, block),
    (accumulates, block),
    (in_turns, lambda: nn.ModuleList([block(), block()])),
]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("step", "make"), STEPS)
def test_every_value_of_the_step_is_known_to_its_plan(
    step: Callable[[nn.Module], None], make: Callable[[], nn.Module]
) -> None:
    model, plain = make(), make()
    for _ in range(3):
        step(plain)
    found = profile(lambda: step(model), model, min_nbytes=1024)
    planner = Planner(found)
    with pytest.raises(BudgetError) as refused:
        planner.plan(1)
    plan = planner.plan(refused.value.smallest_nbytes)
    assert plan.peak_nbytes <= refused.value.smallest_nbytes < found.plain_peak_nbytes
    session = Session(Plan.from_json(plan.to_json()))
    for _ in range(2):
        with session:
            step(model)
    reached = record(lambda: step(model), session, warmup=0).peak_nbytes
    assert isinstance(session.policy, Plan)
    assert session.policy.unknown == ()
    assert reached <= plan.peak_nbytes
    assert all(equal_bits(a, b) for a, b in zip(gradients(model), gradients(plain), strict=True))


def test_values_of_several_calls_have_keys_of_their_own() -> None:
    model = block()
    found = profile(lambda: called_three_times(model), model, min_nbytes=1024)
    keys = {value.key for value in found.values}
    assert {"1/Tanh#0:result", "1@2/Tanh#0:result", "1@3/Tanh#0:result"} <= keys
    assert found.cycles == 1


def test_values_of_several_passes_have_keys_of_their_own() -> None:
    model = block()
    found = profile(lambda: accumulates(model), model, min_nbytes=1024)
    assert {"1/Tanh#0:result", "1+1/Tanh#0:result"} <= {value.key for value in found.values}
    assert found.cycles == 2


@pytest.mark.parametrize("around", ["step", "pass", "training"])
def test_a_session_knows_which_pass_of_a_step_it_sees(around: str) -> None:
    model = block()
    found = profile(lambda: accumulates(model), model, min_nbytes=1024)
    with pytest.raises(BudgetError) as refused:
        Planner(found).plan(1)
    plan = refused.value.plan
    assert isinstance(plan, Plan)
    session = Session(plan)
    seen = []
    hook = model.register_forward_hook(lambda *_: seen.append(session._names.frames[0].label))
    if around == "training":
        with session:
            for _ in range(2):
                accumulates(model)
    for _ in range(2):
        if around == "step":
            with session:
                accumulates(model)
        elif around == "pass":
            for batch in BATCHES:
                with session:
                    loss = model(batch).square().mean()
                loss.backward()
    hook.remove()
    assert seen == ["", "+1", "", "+1"]


def test_a_session_that_keeps_everything_takes_no_more_than_plain_in_a_second_backward_pass() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(4, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.Mish(), nn.Conv2d(32, 48, 3, padding=1), nn.CELU()
    model, images = nn.Sequential(*layers), torch.randn(2, 4, 32, 32)

    def step() -> None:
        found = model(images)
        found.amax((2, 3)).sum().backward(retain_graph=True)
        found.square().mean().backward()

    step()
    assert record(step, "keep").peak_nbytes == record(step).peak_nbytes


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"slope": 0.2}, ["leaky_relu"]),
        ({"follows": True}, ["linear"]),
        ({"batch": 32}, ["linear", "mul", "leaky_relu"]),
        ({"cast": True}, ["linear", "mul", "leaky_relu"]),
    ],
    ids=str,
)
def test_a_proven_call_is_noted_by_its_pattern_unless_it_differs(
    options: dict[str, Any], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where any call may be made again: another shape, argument, autocast or followed argument is looked at anew."""
    everything = ["linear", "mul", "leaky_relu"]
    looked: list[str] = []

    def look(function: Callable[..., object], *rest: Any) -> Any:
        if function.__name__ in everything:
            looked.append(function.__name__)
        return call_of(function, *rest)

    monkeypatch.setattr(calls, "call_of", look)
    linear, scale, session = nn.Linear(64, 64), torch.ones(64), Session(KeepForSurvey(), min_nbytes=128)
    linear.weight.requires_grad_(False)

    def step(batch: int = 64, slope: float = 0.1, cast: bool = False, follows: bool = False) -> list[str]:
        looked.clear()
        x = BATCHES[0, :batch].clone().requires_grad_(follows)
        with session, torch.autocast("cpu", torch.bfloat16, enabled=cast):
            y = F.leaky_relu(linear(x) * scale, slope)
            loss = y.float().square().mean()
        loss.backward()
        return sorted(set(looked), key=everything.index)

    assert step() == everything
    assert step(**options) == expected


class Squares(nn.Module):
    """A model whose own operations are those of the loss: their values have the path of the model, which is empty."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList((nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, width)))

    def forward(self, x: Tensor) -> Tensor:
        """Of shape [:, width]."""
        for layer in self.layers[:-1]:
            x = layer(x).pow(2)
        made: Tensor = self.layers[-1](x)
        return made


class Around(nn.Module):
    """Calls a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """What the model returns."""
        made: Tensor = self.model(x)
        return made


@pytest.mark.parametrize("width", [8, 32, 128])  # 32: a value of the loss is as large as one of the model
@pytest.mark.parametrize("passes", [1, 2])
def test_values_of_the_model_and_of_the_loss_have_keys_of_their_own(width: int, passes: int) -> None:
    found = []
    for around in (lambda model: model, Around):
        model, x = around(Squares(width)), torch.randn(512, 16)

        def step(model: nn.Module = model, x: Tensor = x) -> None:
            for _ in range(passes):
                model(x).pow(2).mean().backward()

        profiled = profile(step, model, min_nbytes=1024)
        with pytest.raises(BudgetError) as refused:
            Planner(profiled).plan(1)
        plan = Planner(profiled).plan(refused.value.smallest_nbytes)
        session = Session(plan, min_nbytes=1024)

        def planned(model: nn.Module = model, x: Tensor = x, session: Session = session) -> None:
            for _ in range(passes):
                with session:
                    loss = model(x).pow(2).mean()
                loss.backward()

        for _ in range(3):
            planned()
        assert plan.unknown == ()
        found.append((profiled.plain_peak_nbytes, len(profiled.values), refused.value.smallest_nbytes))
    assert found[0] == found[1]
    assert found[0][1] >= 3 * passes

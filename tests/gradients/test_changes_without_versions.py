"""Functions that change arguments without a new version: nothing is made again from what was there before."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import Remake, differences
from torch import Tensor, nn

from backstash import Session
from backstash.capture.side_effects import SideEffect, side_effect_of

CHANNELS, BATCH, STEPS = 512, 64, 16
LATER = 12
"""From which step on memory changes: passes are settled by then."""


def operators() -> list[Any]:
    """All operators of ATen that the dispatcher knows."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            base, _, overload = name.removeprefix("aten::").partition(".")
            found.append(getattr(getattr(torch.ops.aten, base), overload or "default"))
    return found


def written(operator: Any) -> bool:
    arguments = [each for each in operator._schema.arguments if not each.is_out and "Tensor" in str(each.type)]
    return any(each.alias_info is not None and each.alias_info.is_write for each in arguments)


NOTHING = {"retain_grad", "requires_grad_", "record_stream"}
"""Operators that say that they change a tensor, and leave its memory as it is."""


def test_an_operator_that_changes_an_argument_has_an_effect() -> None:
    changing = [each for each in operators() if written(each)]
    assert len(changing) > 300
    for operator in changing:
        name = operator._schema.name.removeprefix("aten::")
        for function in (operator, getattr(torch, name, None), getattr(Tensor, name, None)):
            if function is not None:
                assert (side_effect_of(function, (), {}) is SideEffect.NONE) == (name in NOTHING), function


def test_whoever_is_given_running_statistics_may_change_them() -> None:
    reads = ("backward", "functional", "no_update", "no_training", "_out")
    for operator in operators():
        schema = operator._schema
        is_given = any(each.name.startswith("running_") and not each.is_out for each in schema.arguments)
        if is_given and not schema.overload_name.endswith("out") and not any(part in schema.name for part in reads):
            assert side_effect_of(operator, (), {}) is SideEffect.CHANGES_STATISTICS, operator


def observe(x: Tensor, statistics: list[Tensor]) -> None:
    ones = torch.tensor([1])
    torch.fused_moving_avg_obs_fake_quant(x.T, ones, ones, *statistics, 0.5, 0, 255, 0, True)  # type: ignore[call-arg]


def normalise(x: Tensor, statistics: list[Tensor]) -> None:
    torch._native_batch_norm_legit(x, None, None, *statistics[:2], True, 0.5, 1e-5)


def update(x: Tensor, statistics: list[Tensor]) -> None:
    torch.batch_norm_update_stats(x, *statistics[:2], 0.5)


def step_with(make: Callable[..., torch.optim.Optimizer]) -> Callable[[Tensor, list[Tensor]], None]:
    def step(x: Tensor, statistics: list[Tensor]) -> None:
        changed = nn.Parameter(statistics[1])
        changed.grad = x.amax(0) - 1
        make([changed]).step()

    return step


def unscale(x: Tensor, statistics: list[Tensor]) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_([statistics[1]], torch.zeros(1), torch.tensor(0.5))


CHANGES: dict[str, Callable[[Tensor, list[Tensor]], None]] = {
    "an observer": observe,
    "a norm": normalise,
    "statistics": update,
    "SGD": step_with(lambda of: torch.optim.SGD(of, lr=0.5, fused=True)),
    "Adam": step_with(lambda of: torch.optim.Adam(of, lr=0.5, fused=True)),
    "SGD by an operator": lambda x, statistics: torch.ops.aten._fused_sgd_.default(
        [statistics[1]],
        [x.amax(0) - 1],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=0.5,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    ),
    "a scaler": unscale,
}


@pytest.mark.parametrize("function", CHANGES.values())
def test_the_functions_give_no_version(function: Callable[[Tensor, list[Tensor]], None]) -> None:
    """Else they would be told by it, and the tests below would prove nothing."""
    statistics = [torch.zeros(CHANNELS), torch.ones(CHANNELS), torch.ones(CHANNELS), torch.zeros(CHANNELS).int()]
    function(torch.rand(BATCH, CHANNELS) + 1, statistics)
    assert not torch.equal(statistics[1], torch.ones(CHANNELS)) and statistics[1]._version == 0


class Adding(nn.Module):
    """Adds statistics, of which autograd saves nothing, to the results of two norms, and changes them in between."""

    def __init__(self, change: Callable[[Tensor, list[Tensor]], None]) -> None:
        super().__init__()
        self.change = change
        self.first, self.second = nn.Linear(8, CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.norms = nn.ModuleList([nn.BatchNorm1d(CHANNELS) for _ in range(2)])
        for name, value in (("low", 0.0), ("high", 1.0), ("scale", 1.0)):
            self.register_buffer(name, torch.full((CHANNELS,), value))
        self.register_buffer("zero", torch.zeros(CHANNELS, dtype=torch.int32))

    def forward(self, x: Tensor, changed: int | None) -> Tensor:
        y = self.second(F.relu(self.norms[0](self.first(x)) + self.high))
        if changed is not None:
            numbers = torch.ones(BATCH, CHANNELS)
            numbers[:, changed] += torch.arange(BATCH)
            with torch.no_grad():
                self.change(numbers, [self.low, self.high, self.scale, self.zero])
        return self.second(F.relu(self.norms[1](y) + self.high)).square().mean()


@pytest.mark.parametrize("since", [0, LATER])
@pytest.mark.parametrize("policy", ["lossless", "remake"])
@pytest.mark.parametrize("change", CHANGES)
def test_one_channel_of_a_buffer_changes(change: str, policy: str, since: int) -> None:
    """A sample of a remade value looks at one channel in a step, if the batch is a multiple of its size."""

    def train(session: Session | None) -> list[Tensor | None]:
        torch.manual_seed(0)
        model, found = Adding(CHANGES[change]), []
        for step in range(STEPS):
            model.zero_grad()
            with nullcontext() if session is None else session:
                loss = model(torch.randn(BATCH, 8), 5 if step >= since else None)
            loss.backward()
            found += [loss.detach(), *(parameter.grad for parameter in model.parameters())]
        return found

    ours = train(Session("lossless" if policy == "lossless" else Remake(), min_nbytes=0, stop_if_useless=False))
    assert differences(train(None), ours) == []


@pytest.mark.parametrize("since", [0, LATER])
def test_a_fused_optimizer_steps_on_a_value(since: int) -> None:
    def train(session: Session | None) -> list[Tensor | None]:
        torch.manual_seed(0)
        first, second = nn.Linear(8, 64), nn.Linear(64, 64)
        found: list[Tensor | None] = []
        for step in range(STEPS):
            with nullcontext() if session is None else session:
                given = first(torch.randn(CHANNELS, 8))
                memory = given.detach().tanh()
                if step >= since:
                    parameter = nn.Parameter(memory)
                    parameter.grad = torch.zeros(CHANNELS, 64)
                    parameter.grad[5] = 1.0
                    torch.optim.SGD([parameter], lr=0.5, fused=True).step()
                    del parameter
                given = given * memory
                del memory
                loss = second(given).square().mean()
            found += torch.autograd.grad(loss, [*first.parameters(), *second.parameters()])
        return found

    assert differences(train(None), train(Session(Remake(), min_nbytes=0, stop_if_useless=False))) == []

"""Models that run inside a transform of torch.func, with parameters of it, under a budget."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

import backstash as bs
from backstash.planning.run import course

STEPS = 24


class Ensemble(nn.Module):
    """Holds one layer, and the weights of three."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        self.stacked = nn.ParameterDict(
            {name.replace(".", "_"): each.detach().expand(3, *each.shape) * 1.5 for name, each in self._each()}
        )

    def _each(self) -> Any:
        return self.layer.named_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Of all three."""
        given = {name: self.stacked[name.replace(".", "_")] for name, _ in self._each()}
        made: Tensor = vmap(lambda own: functional_call(self.layer, own, (x,)))(given)
        return made

    def slope(self, x: Tensor) -> Tensor:
        """The derivative of the layer by its weights, towards the first of the three."""
        own = dict(self._each())
        towards = {name: self.stacked[name.replace(".", "_")][0] for name in own}
        slope: Tensor = jvp(lambda given: functional_call(self.layer, given, (x,)), (own,), (towards,))[1]
        return slope


WAYS: dict[str, Callable[[Ensemble, Tensor], Tensor]] = {
    "as a module": lambda model, x: model(x),
    "by itself": lambda model, x: model.forward(x),
    "a derivative": lambda model, x: model.slope(x),
    "beside others": lambda model, x: model.layer(x) + model(x).sum(0),
    "before others": lambda model, x: model.forward(x).sum(0) + model.layer(x),
}


@pytest.mark.parametrize("is_around", [False, True])
@pytest.mark.parametrize("way", list(WAYS))
def test_transforms_in_steps_with_a_budget(way: str, is_around: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "PLAIN_STEPS", 2)  # in which another Session is opened in a pass

    def trains(budget: AbstractContextManager[Any]) -> list[Tensor]:
        around, each = (budget, nullcontext()) if is_around else (nullcontext(), budget)
        model, found = Ensemble(), []
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with around:
            for step in range(STEPS):
                x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
                with each:
                    loss = WAYS[way](model, x).sin().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.detach())
        return [*found, *(weight.detach().clone() for weight in model.parameters())]

    expected, found = trains(nullcontext()), trains(bs.Budgeted("1GiB"))
    assert all(x.equal(y) for x, y in zip(expected, found, strict=True))


def _pulled_back(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    value, back = vjp(f, x)
    made: Tensor = back(torch.ones_like(value))[0]
    return made


FIRST: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "grad": lambda f, x: grad(f)(x),
    "vjp": _pulled_back,
    "jacrev": lambda f, x: jacrev(f)(x),
    "hessian": lambda f, x: hessian(f)(x[0]).sum(0),
    "jvp": lambda f, x: jvp(f, (x,), (x,))[1],
    "vmap": lambda f, x: vmap(f)(x).unsqueeze(1),
}
"""Transforms inside of which a step calls its first module. The first four switch saved-tensor hooks off."""


@pytest.mark.cases(12)
@pytest.mark.parametrize("is_around", [False, True])
@pytest.mark.parametrize("name", list(FIRST))
def test_a_step_begins_with_a_module_inside_a_transform(
    name: str, is_around: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course, "PLAIN_STEPS", 2)

    def trains(budget: AbstractContextManager[Any]) -> list[Tensor]:
        around, each = (budget, nullcontext()) if is_around else (nullcontext(), budget)
        torch.manual_seed(0)
        layers = [each for _ in range(4) for each in (nn.Linear(64, 64), nn.GELU())]
        model, found = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), *layers, nn.Linear(64, 8)), []
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with around:
            for step in range(STEPS):
                x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
                with each:
                    slope = FIRST[name](lambda part: model[0](part).tanh().sum(), x)
                    loss = model(x + 0.1 * slope).sin().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.detach())
        return [*found, *(weight.detach().clone() for weight in model.parameters())]

    expected, plenty = trains(nullcontext()), bs.Budgeted("1GiB", min_nbytes=0)
    assert all(x.equal(y) for x, y in zip(expected, trains(plenty), strict=True))
    least, plain = plenty.buckets.largest().planner.at_most(0).peak_nbytes, plenty.found.plain_nbytes
    assert least < plain or name == "jvp"  # which holds more than what comes after it
    between = bs.Budgeted((least + plain) // 2, min_nbytes=0)
    assert all(x.equal(y) for x, y in zip(expected, trains(between), strict=True))
    assert between.found.plan is not None and between.found.plan.is_empty is (least == plain)
    assert 0 < between.found.reached_nbytes <= between.found.budget_nbytes


def test_steps_whose_modules_all_run_inside_a_transform_have_no_plan_and_plain_bits() -> None:
    def trains(budget: AbstractContextManager[Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model, found = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)), []
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        for step in range(STEPS):
            x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
            with budget:
                slopes = grad(lambda own, x=x: functional_call(model, own, (x,)).square().mean())(weights)
            weights = {name: weight - 0.01 * slopes[name] for name, weight in weights.items()}
            found.append(weights["0.weight"])
        return found

    budget = bs.Budgeted("1GiB")
    expected, found = trains(nullcontext()), trains(budget)
    assert all(x.equal(y) for x, y in zip(expected, found, strict=True))
    assert budget.found.plan is None

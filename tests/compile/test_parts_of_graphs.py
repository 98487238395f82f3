"""Parts of graphs that few models have: branches and loops, regions compiled once, inputs that a graph writes to."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from backstash import compile_backend
from tests.compile.compiled_steps import compare, differences, gradients

pytestmark = pytest.mark.filterwarnings("ignore")


class Branching(nn.Module):
    """One of two functions, which the data choose."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.first(x))
        hidden = torch.cond(hidden.sum() > 0, lambda y: functional.relu(self.second(y)), torch.sin, (hidden,))
        return self.last(functional.relu(hidden)).square().mean()  # type: ignore[no-any-return]


@torch.compiler.nested_compile_region  # type: ignore[untyped-decorator]
def _region(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.relu(functional.linear(x, weight, bias)).sin()


class Repeated(nn.Module):
    """One region, compiled once and called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = _region(x, layer.weight, layer.bias)
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(("model", "width"), [(Branching, 8), (Repeated, 16)])
def test_functions_in_a_graph_under_a_budget(model: Callable[[], nn.Module], width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, width)
    compare(model(), lambda net: net(x), budget=1000)


class Averaging(nn.Module):
    """Divides by a running average, and moves it on, as many normalisations and codebooks do."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("average", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.first(x))
        scaled = hidden * self.average.clone()
        with torch.no_grad():
            self.average.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        return self.last(functional.relu(scaled / self.average.clone())).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("budget", ["60%", "25%"])
def test_a_buffer_that_the_graph_writes_to_is_not_read_again(budget: str) -> None:
    torch.manual_seed(0)
    model, x = Averaging(), torch.randn(16, 8)
    # Compiled plain computes the copy again, from what the buffer holds then: its gradients are not those of eager.
    expected = [gradients(model, lambda net: net(x)) for _ in range(2)]
    model.average.fill_(1.0)
    compiled = torch.compile(model, backend=compile_backend("lossless", budget=budget, min_nbytes=0))
    for step in expected:
        assert differences(model, step, gradients(model, lambda net: net(x), compiled)) == []


class Writing(nn.Module):
    """Writes to its input, whose gradient is asked for, when it has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.first(x.clone()))
        x.mul_(2).clamp_(min=0)
        return (self.last(functional.relu(hidden * 2)) + x.sum()).square().mean()  # type: ignore[no-any-return]


def test_an_input_that_is_written_to_after_the_graph_has_run_is_not_read_again() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 8, requires_grad=True)

    def forward(net: Any) -> Tensor:
        return net(x * 1)  # type: ignore[no-any-return]

    compare(Writing(), forward, budget=1000)


class Selecting(nn.Module):
    """Goes on with some of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.first(x))
        chosen = hidden[hidden.sum(-1) > hidden.sum(-1).mean()]
        return self.last(functional.gelu(chosen)).square().sum()  # type: ignore[no-any-return]


@pytest.mark.slow
def test_an_estimate_says_that_it_does_not_count_what_depends_on_the_data() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        ours = compare(Selecting(), lambda net: net(x), budget=1 << 20)
        (note,) = ours.report().notes
    assert re.search(r"budget: .* [1-9]\d* values whose sizes depend on the data are not counted", note)
    (note,) = compare(Repeated(), lambda net: net(torch.ones(4, 16)), budget=1 << 20).report().notes[-1:]
    assert "not counted" not in note


class Recurrent(nn.Module):
    """What Dynamo leaves to Python as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0]  # type: ignore[no-any-return]


def test_a_model_that_dynamo_leaves_to_python_is_not_said_to_have_yet_to_run() -> None:
    ours = compile_backend("lossless", min_nbytes=0)
    torch.compile(Recurrent(), backend=ours)(torch.ones(3, 2, 4)).sum().backward()
    (note,) = ours.report().notes
    assert "If it has run, torch.compile has left the model to Python" in note

"""Torch compiles no function of a Session, wherever below a compiled extent torch calls it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from backstash.papers.comet import comet

STEPS = 14


def _rows() -> nn.Module:
    layers = [nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.3), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 2)]
    return nn.Sequential(*layers)


def _images() -> nn.Module:
    first = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    then = [nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 36, 2)]
    return nn.Sequential(*first, *then)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "rows": (_rows, (6, 16)),
    "images": (_images, (4, 3, 16, 16)),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (4, 6, 16)),
}

CONTEXTS: dict[str, Callable[[nn.Module], Any]] = {
    "keep": lambda model: bs.Session("keep", model=model, min_nbytes=0),
    "lossless": lambda model: bs.Session("lossless", model=model, min_nbytes=0),
    "lossless_stored": lambda model: bs.Session("lossless_stored", model=model, min_nbytes=0),
    "offload": lambda model: bs.Session("offload", model=model, min_nbytes=0),
    "quantized": lambda model: bs.Session("quantized", model=model, min_nbytes=0),
    "checked": lambda model: bs.Session("quantized", model=model, min_nbytes=0, check=3, check_limit=10.0),
    "comet": lambda model: bs.Session(comet(every=3), model=model, min_nbytes=0),
    "offload_hidden": lambda model: bs.Session("offload_hidden", model=model, min_nbytes=0),
    "budget": lambda model: bs.Budgeted("1GiB", min_nbytes=0),
}


PACKAGE = str(Path(bs.__file__).parent) + os.sep


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files and names of functions that torch compiles on their own."""
    import torch._dynamo.convert_frame as convert_frame

    found: list[str] = []
    compile_frame = convert_frame._compile

    def noted(code: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(f"{code.co_filename}: {code.co_name}")
        return compile_frame(code, *args, **kwargs)

    monkeypatch.setattr(convert_frame, "_compile", noted)
    torch._dynamo.reset()
    return found


def trained(network: str, extent: str, context: str | None) -> list[Tensor]:
    make, shape = NETWORKS[network]
    torch.manual_seed(0)
    model = make()
    inside = nullcontext() if context is None else CONTEXTS[context](model)
    if extent == "module":  # of torch.nn, whose frames Dynamo passes over: what they call runs below its callback
        model.compile(backend="aot_eager")

    def step(x: Tensor) -> Tensor:
        with inside:
            loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss.detach()

    if extent == "step":
        step = torch.compile(step, backend="aot_eager")  # type: ignore[assignment]
    found = []
    for _ in range(STEPS):
        found.append(step(torch.randn(shape)))
        for parameter in model.parameters():
            found.append(parameter.grad.clone())  # type: ignore[union-attr]
            parameter.grad = None
    return found


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("extent", ["module", "step"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_no_function_of_a_session_is_compiled(context: str, extent: str, network: str, compiled: list[str]) -> None:
    found = trained(network, extent, context)
    assert [each for each in compiled if each.startswith(PACKAGE)] == []
    assert extent == "module" or any(each.startswith(__file__) for each in compiled)  # the program's own are seen
    if context not in ("quantized", "checked", "comet"):
        expected = trained(network, extent, None)
        assert all(torch.equal(own, plain) for own, plain in zip(found, expected, strict=True))


ROUNDS: dict[str, Callable[[], Callable[[], Any]]] = {
    "a Session": lambda: repeated(bs.Session("lossless", min_nbytes=0)),
    "a Session for each step": lambda: partial(bs.Session, "lossless", min_nbytes=0),
    "a budget": lambda: repeated(bs.Budgeted("64MiB", min_nbytes=0)),
    "a budget after another one": lambda: (used_up(), repeated(bs.Budgeted("64MiB", min_nbytes=0)))[1],
}


def repeated(context: Any) -> Callable[[], Any]:
    return lambda: context


def used_up() -> None:
    """A budget of its own kept a training before."""
    model, budget = _rows(), bs.Budgeted("64MiB", min_nbytes=0)
    for _ in range(3):
        with budget:
            loss = model(torch.randn(6, 16)).sum()
        loss.backward()
    budget.close()


@pytest.mark.parametrize("way", ["in place", "forward", "whole"])
@pytest.mark.parametrize("rounds", ROUNDS)
def test_what_is_compiled_runs_in_each_step(rounds: str, way: str) -> None:
    """Torch gives up compiling after eight times, and Inductor's dropout has other numbers than eager mode's."""
    counts = {"compiled": 0, "ran": 0}

    def backend(graph: Any, _: Any) -> Callable[..., Any]:
        counts["compiled"] += 1

        def run(*args: Any) -> Any:
            counts["ran"] += 1
            return graph.forward(*args)

        return run

    torch._dynamo.reset()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.last(torch.relu(self.first(x)))

    model = nn.Sequential(Block(), nn.Linear(16, 4))
    run = model
    if way == "in place":
        model[0].compile(backend=backend)
    elif way == "forward":
        model[0].forward = torch.compile(model[0].forward, backend=backend)
    else:
        run = torch.compile(model, backend=backend)  # type: ignore[assignment]
    context = ROUNDS[rounds]()
    for step in range(20):
        with context():
            loss = run(torch.randn(8, 16)).square().mean()
        loss.backward()
        assert counts["ran"] == step + 1
    assert counts["compiled"] <= 3

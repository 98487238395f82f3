"""Tracers of operations inside a Session, and modes that put other operations in the place of those called."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import Remake, differences
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from backstash import Session

DETACHED = "aten.detach", "aten.alias"
POLICIES = ["keep", "lossless", "lossless_stored", Remake()]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, 5),
    )


def images() -> Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def gradients(
    session: Session | None,
    inside: Callable[[nn.Module], object] = lambda model: None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Tensor]:
    """Of four steps; ``inside`` runs in the middle of each forward pass, and ``around`` around each."""
    model, x, found = network(), images(), []
    for _ in range(4):
        model.zero_grad()
        with around(), session or nullcontext():
            hidden = model[:4](x)
            inside(copy.deepcopy(model).eval())
            loss = model[4:](hidden).square().mean()
        loss.backward()
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return found


def traced_by_jit(model: nn.Module) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, images())  # which traces twice, and compares
    assert torch.equal(traced(images()), model(images()))
    return "\n".join(node.kind() for node in traced.inlined_graph.nodes())


def written_by_make_fx(model: nn.Module) -> str:
    graph = make_fx(lambda x: model(x).relu().sum())(images())
    assert torch.equal(graph(images()), model(images()).relu().sum())
    # What autograd saves is detached, and torch 2.15 writes that down as an alias.
    called = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    return " ".join(name for name in called if not name.startswith(DETACHED))


def exported(model: nn.Module) -> str:
    program = torch.export.export(model, (images(),))
    return "\n".join(str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("trace", [traced_by_jit, written_by_make_fx, exported])
def test_what_is_traced_inside_is_what_is_traced_outside(trace: Callable[[nn.Module], str], policy: Any) -> None:
    found: list[str] = []
    expected = gradients(None, lambda model: found.append(trace(model)))
    outside = found.copy()
    found.clear()
    assert not differences(expected, gradients(Session(policy, min_nbytes=0), lambda model: found.append(trace(model))))
    assert found == outside


class Functions(TorchFunctionMode):
    """Computes another activation than the one that is called."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return F.silu(*args) if func is F.gelu else func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """The same, below autograd: backward is still that of the activation that is called."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return F.silu(*args) if func is torch.ops.aten.gelu.default else func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", [Functions, Operations, lambda: FlopCounterMode(display=False)])
def test_a_call_that_a_mode_may_replace_is_not_repeated(mode: Callable[[], Any], policy: Any) -> None:
    """Backward runs without the mode. Before, the calls were proven without it."""
    expected = gradients(None, around=mode)
    assert not differences(gradients(None), gradients(Session(policy, min_nbytes=0)))
    assert not differences(expected, gradients(Session(policy, min_nbytes=0), around=mode))


def test_calls_under_a_default_device_are_repeated() -> None:
    torch.set_default_device("cpu")
    try:
        session = Session("lossless", min_nbytes=0)
        gradients(session)
        assert "recompute" in {row.codec for row in session.report().rows}
    finally:
        torch.set_default_device(None)

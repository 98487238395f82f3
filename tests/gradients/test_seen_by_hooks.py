"""Hooks of the program, wherever they hang, see ordinary tensors with plain's numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradient_checks import Everything
from torch import Tensor, nn

from backstash import Session
from backstash.policies.base import Policy
from backstash.redeem import accumulation, table

Seen = list[Any]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if small gradients and values were large: they are put off, and claimed."""
    monkeypatch.setattr(accumulation, "LARGE", 1 << 12)
    monkeypatch.setattr(accumulation, "CHUNK", 1 << 12)
    monkeypatch.setattr(accumulation, "ROWS", 8)
    monkeypatch.setattr(table, "LARGE", 64)
    monkeypatch.setattr(table, "TINY", 16)
    monkeypatch.setattr(table, "CHEAP_CLAIM", 64)


def look(x: Any) -> Any:
    """What a program may find out about what a hook was given."""
    if isinstance(x, (tuple, list)):
        return [look(item) for item in x]
    if x is None:
        return None
    numbers = x.detach().contiguous().view(-1).view(torch.uint8).tolist() if x.numel() else []
    return type(x), x.__class__, x.data_ptr() != 0, x.untyped_storage().nbytes(), tuple(x.shape), x.dtype, numbers


def accumulator(parameter: Tensor) -> Any:
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


def walk(root: Any) -> list[Any]:
    found, waiting = [], [root]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.append(node)
            waiting += [following for following, _ in node.next_functions]
    return found


def saved_by(node: Any) -> list[Any]:
    """The tensors that a node has saved, as Python sees them: under any saved-tensor hooks a Parameter is a Tensor."""
    found = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    return [(type(x) in (Tensor, nn.Parameter), x.data_ptr() != 0) for x in found if isinstance(x, Tensor)]


class Custom(torch.autograd.Function):
    """Looks at what it has saved and at the gradient."""

    seen: Seen

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        Custom.seen.append(look([*ctx.saved_tensors, *grads]))
        return grads[0] * 2


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(
        *(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64, bias=False), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 48))
    )
    for parameter in layers.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    return layers


WAYS: dict[str, Callable[[nn.Sequential, Any, Seen], object]] = {}


def way(function: Callable[[nn.Sequential, Any, Seen], object]) -> Callable[[nn.Sequential, Any, Seen], object]:
    WAYS[function.__name__] = function
    return function


@way
def prehook_of_accumulator(layers: nn.Sequential, root: Any, seen: Seen) -> object:
    return [node.register_prehook(lambda g: seen.append(look(g))) for node in walk(root) if hasattr(node, "variable")]


@way
def hook_of_accumulator(layers: nn.Sequential, root: Any, seen: Seen) -> object:
    nodes = [node for node in walk(root) if hasattr(node, "variable")]
    return [node.register_hook(lambda i, o: seen.append(look([i, o]))) for node in nodes]


@way
def hooks_of_all_nodes(layers: nn.Sequential, root: Any, seen: Seen) -> object:
    return [node.register_hook(lambda i, o: seen.append(look([i, o]))) for node in walk(root)]


@way
def prehooks_of_all_nodes(layers: nn.Sequential, root: Any, seen: Seen) -> object:
    return [node.register_prehook(lambda g: seen.append(look(g))) for node in walk(root)]


@way
def hooks_that_look_at_what_is_saved(layers: nn.Sequential, root: Any, seen: Seen) -> object:
    for node in walk(root):
        node.register_prehook(lambda g, node=node: seen.append(saved_by(node)))


@way
def hook_of_parameter(layers: nn.Sequential, root: Any, seen: Seen) -> object:
    return [parameter.register_hook(lambda g: seen.append(look(g))) for parameter in layers.parameters()]


@way
def post_accumulate(layers: nn.Sequential, root: Any, seen: Seen) -> object:
    def hook(parameter: Tensor) -> None:
        seen.append(look(parameter.grad))

    return [parameter.register_post_accumulate_grad_hook(hook) for parameter in layers.parameters()]


@way
def multi_grad(layers: nn.Sequential, root: Any, seen: Seen) -> object:
    return torch.autograd.graph.register_multi_grad_hook(list(layers.parameters()), lambda g: seen.append(look(g)))


@way
def any_grad(layers: nn.Sequential, root: Any, seen: Seen) -> object:
    parameters = list(layers.parameters())
    return torch.autograd.graph.register_multi_grad_hook(parameters, lambda g: seen.append(look(g)), mode="any")


@way
def hook_that_a_bias_adds(layers: nn.Sequential, root: Any, seen: Seen) -> object:
    nodes = {id(node.variable): node for node in walk(root) if hasattr(node, "variable")}

    def add(bias: Tensor) -> None:
        nodes[id(layers[0].weight)].register_prehook(lambda g: seen.append(look(g)))

    return layers[0].bias.register_post_accumulate_grad_hook(add)


@way
def node_hook_that_a_bias_adds(layers: nn.Sequential, root: Any, seen: Seen) -> object:
    nodes = {id(node.variable): node for node in walk(root) if hasattr(node, "variable")}

    def add(grads: Any) -> None:
        layers[0].weight.register_hook(lambda g: seen.append(look(g)))

    return nodes[id(layers[0].bias)].register_prehook(add)


def run(session: Any, register: Callable[[nn.Sequential, Any, Seen], object], early: bool) -> list[Any]:
    """What hooks see in two steps, and the gradients; hooks are registered before or after the forward pass is left."""
    layers = model()
    seen: Seen = []
    Custom.seen = seen
    for step in range(2):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        with session:
            loss = Custom.apply(layers(x)).square().mean()
            keep = register(layers, loss.grad_fn, seen) if early else None
        keep = keep or register(layers, loss.grad_fn, seen)
        loss.backward(retain_graph=True)
        try:
            seen.append(look(torch.autograd.grad(loss, list(layers.parameters()))))
        except RuntimeError as error:  # torch's, of a multi-grad hook
            seen.append(str(error))
        del keep
    return [*seen, look([parameter.grad for parameter in layers.parameters()])]


@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
@pytest.mark.parametrize("policy", ["lossless", Everything()], ids=["lossless", "everything"])
@pytest.mark.parametrize("register", WAYS.values(), ids=WAYS)
def test_hooks_see_ordinary_tensors(
    register: Callable[[nn.Sequential, Any, Seen], object], policy: str | Policy, early: bool
) -> None:
    expected = run(torch.enable_grad(), register, early)
    got = run(Session(policy, min_nbytes=0), register, early)
    assert len(expected) == len(got)
    for number, (one, other) in enumerate(zip(expected, got, strict=True)):
        assert one == other, number


def test_without_hooks_gradients_are_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks that ask whether there are hooks leave none behind."""
    added: list[int] = []
    original = accumulation._Product.add_to
    monkeypatch.setattr(
        accumulation._Product, "add_to", lambda self, out: (added.append(out.numel()), original(self, out))[1]
    )
    layers = model()
    with Session("lossless", min_nbytes=0):
        for _ in range(2):
            loss = layers(torch.randn(4, 64)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
    assert len(added) >= 4 and len(added) % 4 == 0


@pytest.mark.parametrize("seed", range(40))
def test_random_hooks(seed: int) -> None:
    """Hooks at random places; each tells what it was given."""

    def attach(layers: nn.Sequential, root: Any, seen: Seen) -> None:
        draw = random.Random(seed)
        for node in walk(root):
            if draw.random() < 0.3:
                node.register_prehook(lambda g: seen.append(look(g)))
            if draw.random() < 0.3:
                node.register_hook(lambda i, o: seen.append(look([i, o])))
            if draw.random() < 0.2:
                node.register_hook(lambda i, o, node=node: seen.append(saved_by(node)))
        for parameter in layers.parameters():
            if draw.random() < 0.2:
                parameter.register_hook(lambda g: seen.append(look(g)))
            if draw.random() < 0.2:
                parameter.register_post_accumulate_grad_hook(lambda p: seen.append(look(p.grad)))

    early = bool(seed % 2)
    policy: Any = Everything() if seed % 3 == 0 else "lossless"
    assert run(torch.enable_grad(), attach, early) == run(Session(policy, min_nbytes=0), attach, early)

"""Arguments that are not what torch's kernels see: other people's classes, at any depth, and what may change later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gradient_checks import Everything, Remake, differences
from session_checks import holds_nothing
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from backstash import Policy, Session
from tests.fuzz.pieces import Counting, Doubled, Wrapped

POLICIES: dict[str, str | Policy] = {
    "lossless": "lossless",
    "everything": Everything(),
    "remake": Remake(),
    "quantized": "quantized",
}
WIDTH = 32


class Box:
    """A duck: no tensor, and torch functions of it are functions of the tensor inside."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_unboxed(args), **_unboxed(kwargs or {}))

    def __bool__(self) -> bool:
        raise TypeError("a Box is neither true nor false")

    def __eq__(self, other: object) -> bool:
        raise TypeError("a Box is compared with nothing")

    __hash__ = None  # type: ignore[assignment]


class Scaled(Box):
    """A duck whose functions read other numbers than those that it holds."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = (_unboxed(tree, lambda box: box.tensor * 0.5) for tree in (args, kwargs or {}))
        return func(*args, **kwargs)


class Pretending(Box):
    """A duck that says that it is a tensor."""

    __class__ = property(lambda self: Tensor)  # type: ignore[assignment]


class Quiet(Box):
    """A duck whose functions no mode sees."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return func(*_unboxed(args), **_unboxed(kwargs or {}))


class Boxes(list):  # type: ignore[type-arg]
    """A container that is a list and a duck."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(sum(arg) if type(arg) is Boxes else arg for arg in args), **(kwargs or {}))


class Halving(Tensor):
    """A subclass whose functions read half of what they are given."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            plain = tree_map_only(Halving, lambda x: x.as_subclass(Tensor), (args, kwargs or {}))
            args, kwargs = tree_map_only(Tensor, lambda x: x * 0.5 if x.is_floating_point() else x, plain)
            return func(*args, **kwargs)


class Metre(float):
    """A number that is a duck."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(float(arg) * 2 if type(arg) is Metre else arg for arg in args), **(kwargs or {}))


def _unboxed(tree: Any, read: Callable[[Any], Tensor] = lambda box: box.tensor) -> Any:
    if issubclass(type(tree), Box):
        return read(tree)
    if type(tree) in (list, tuple):
        return type(tree)(_unboxed(item, read) for item in tree)
    return {key: _unboxed(item, read) for key, item in tree.items()} if type(tree) is dict else tree


DUCKS: dict[str, Callable[[Tensor], Any]] = {
    "box": Box,
    "scaled": Scaled,
    "pretending": Pretending,
    "quiet": Quiet,
    "boxes": lambda x: Boxes([x, x]),
    "counting": lambda x: x.as_subclass(Counting),
    "halving": lambda x: x.as_subclass(Halving),
    "masked": lambda x: torch.masked.masked_tensor(x, torch.ones_like(x, dtype=torch.bool)),
}

FUNCTIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "gelu": lambda duck, x: F.gelu(duck),
    "tanh": lambda duck, x: torch.tanh(duck),
    "mul": lambda duck, x: torch.mul(x, duck),
    "add named": lambda duck, x: torch.add(x, other=duck, alpha=0.5),
    "where": lambda duck, x: torch.where(x > 0, duck, x),
    "cat": lambda duck, x: torch.cat([x, duck], 1)[:, :WIDTH] * 1.5,
    "stack in a tuple": lambda duck, x: torch.stack((duck, x)).sum(0),
    "layer norm": lambda duck, x: F.layer_norm(duck, (WIDTH,)),
    "softmax": lambda duck, x: F.softmax(duck, dim=1),
    "dropout": lambda duck, x: F.dropout(duck, 0.5),
    "matmul": lambda duck, x: torch.matmul(duck, x[:, :WIDTH].t()) @ x,
    "var mean": lambda duck, x: torch.var_mean(duck, 1, keepdim=True)[0] * x,
    "attention": lambda duck, x: F.scaled_dot_product_attention(duck, x, x),
    "multi-head": lambda duck, x: _attention(duck, x),
}


def _attention(duck: Any, x: Tensor) -> Tensor:
    weight, bias = torch.eye(3 * WIDTH, WIDTH), torch.zeros(3 * WIDTH)
    return F.multi_head_attention_forward(
        duck, x, x, WIDTH, 2, weight, bias, None, None, False, 0.0, torch.eye(WIDTH), None
    )[0]  # type: ignore[return-value]


def run(session: Any, forward: Callable[[Tensor], Any], steps: int = 3) -> list[Tensor | None]:
    """The gradients of all steps; each has a session of the same policy, so that later steps repeat what is known."""
    torch.manual_seed(0)
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    found: list[Tensor | None] = []
    for _ in range(steps):
        x = torch.randn(48, WIDTH)
        with session:
            value = forward(first(x).relu() * 1.25)
            value = value.to_tensor(0.0) if isinstance(value, torch.masked.MaskedTensor) else value
            loss = (last(torch.sigmoid(value.as_subclass(Tensor) * 2)).tanh() * 3).square().mean()
        del value
        loss.backward()
        found += [loss.detach(), *[parameter.grad.clone() for parameter in (*first.parameters(), *last.parameters())]]
    return found


def check(forward: Callable[[Tensor], Any], policy: str | Policy) -> None:
    """Plain's bits under a policy, or what plain raises; of a policy with an error plain's loss."""
    try:
        expected = run(torch.enable_grad(), forward)
    except (TypeError, RuntimeError, ValueError, AttributeError) as error:  # torch has no such function of this duck
        with pytest.raises(type(error)):
            run(Session(policy, min_nbytes=0), forward)
        return
    session = Session(policy, min_nbytes=0)
    got = run(session, forward)
    if policy == "quantized":
        assert not differences(expected[:1], got[:1])
        assert all(torch.isfinite(x).all() for x in got if x is not None)
    else:
        assert not differences(expected, got)
    assert holds_nothing(session)


by_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.cases(30)
@by_policy
@pytest.mark.parametrize("duck", DUCKS.values(), ids=DUCKS)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_ducks(function: Callable[[Any, Tensor], Any], duck: Callable[[Tensor], Any], policy: str | Policy) -> None:
    check(lambda h: function(duck(h * 1.5), h), policy)


UNUSUAL: dict[str, Callable[[Tensor], Any]] = {
    "a number that is a duck": lambda h: torch.mul(h, Metre(0.75)),
    "a number of numpy": lambda h: torch.sigmoid(h * np.float32(0.5)) * np.float64(1.5),
    "an array of numpy": lambda h: h[np.arange(47, -1, -1)] * 2,
    "an array in a tuple": lambda h: h[(np.arange(47, -1, -1), slice(None))] * 2,
    "a nested list": lambda h: torch.tensordot(h, torch.ones(WIDTH, WIDTH), dims=([1], [0])),
    "tensors two deep": lambda h: h[[torch.arange(48), [torch.tensor(1)] * 48]].unsqueeze(1) * h,
    "a slice between tensors": lambda h: F.pad(h[torch.tensor(1) : torch.tensor(40)], (0, 0, 4, 5)) * h,
}


@by_policy
@pytest.mark.parametrize("forward", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_arguments(forward: Callable[[Tensor], Any], policy: str | Policy) -> None:
    check(forward, policy)


def _changed_list(h: Tensor) -> Tensor:
    rows = list(range(48))
    value = torch.sigmoid(h[rows] * 2)
    rows.reverse()
    return value


def _changed_box(h: Tensor) -> Tensor:
    box = Box(h * 2)
    value = torch.sigmoid(F.softplus(box))  # type: ignore[arg-type]
    box.tensor = torch.zeros_like(h)
    return value


CHANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "a list": _changed_list,
    "what a box holds": _changed_box,
}


@by_policy
@pytest.mark.parametrize("forward", CHANGED.values(), ids=CHANGED)
def test_an_argument_that_the_program_changes_afterwards(
    forward: Callable[[Tensor], Tensor], policy: str | Policy
) -> None:
    check(forward, policy)


class Taking(Tensor):
    """A subclass with memory of its own class."""


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "a function of a box": lambda t: torch.relu_(Box(t)),  # type: ignore[arg-type]
    "a box that no mode sees": lambda t: torch.relu_(Quiet(t)),  # type: ignore[arg-type]
    "out": lambda t: torch.add(t, 1, out=Box(t)),  # type: ignore[call-overload]
    "a list": lambda t: torch._foreach_mul_([Box(t)], 2),
    "a subclass": lambda t: t.as_subclass(Taking).mul_(2),
    "a subclass that sees functions": lambda t: t.as_subclass(Counting).mul_(2),
    "a subclass that runs ops": lambda t: Wrapped(t).mul_(2),
    "another one that runs ops": lambda t: Doubled(t).relu_(),
    "an array of a subclass": lambda t: np.multiply(
        t.as_subclass(Counting).numpy(), 2, out=t.as_subclass(Taking).numpy()
    ),
    "data of a subclass": lambda t: t.as_subclass(Counting).data.mul_(2),
    "data of one that runs ops": lambda t: Wrapped(t).data.mul_(2),
    "set item": lambda t: torch.Tensor.__setitem__(Box(t), slice(0, 3), 1.0),  # type: ignore[arg-type]
}


@by_policy
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_recipe_begins_from_changes_through_a_duck(
    change: Callable[[Tensor], object], policy: str | Policy
) -> None:
    """The value of a sigmoid is remade from ``held``, which nobody has saved and the program still holds."""

    def forward(h: Tensor) -> Tensor:
        held = (h.detach() * 1.5).contiguous()
        value = torch.sigmoid(held + h)
        value = value * torch.tanh(held * 0.5 + value)
        kept = value.sin() * value  # by now the values before this one are remade
        kept = kept.cos()
        for _ in range(12):
            torch.zeros(1) + 1
        change(held)
        return kept + held

    check(forward, policy)

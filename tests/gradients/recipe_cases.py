"""Values that are dense or remade, and recipes of all kinds, for tests of what backward reads."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backstash.errors import BackstashError
from backstash.numerics import settings
from backstash.saved import Need, SavedTensor, TensorSpec
from backstash.stash.accounts import Account
from backstash.stash.calls import INPUT, Call, Held, Leaf, View
from backstash.stash.live import Live
from backstash.stash.recipes import Recipe
from backstash.stash.value import Saved, Value


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def facts_of(x: Tensor) -> SavedTensor:
    return SavedTensor("model/Exp#0:result", "Exp", "result", "model", TensorSpec.of(x), Need.VALUE)


class World:
    """A Session's totals, with values that are dense or remade, and everything that has to stay alive."""

    def __init__(self) -> None:
        self.live = Live()
        self.live.stashed_nbytes = 1 << 20
        self.alive: list[Any] = []
        self.pressed = False

    def value(self, recipe: Recipe | None = None) -> Value:
        storage = torch.empty(1).untyped_storage()
        made = Value(storage, Account(facts_of(torch.empty(1)), 4, ""), self.live)
        made.storage, made.recipe, made.buffers = None, recipe, self.live.buffers
        self.alive.append(made)
        return made

    def saved(self, x: Tensor, of: Value | None = None) -> Saved:
        saved = Saved(x, self.live)
        saved.spec, saved.value, saved.builtin, saved.tensor = TensorSpec.of(x), of, True, facts_of(x)
        saved.offset = int(x.storage_offset())
        if of is not None:
            of.members.append(weakref.ref(saved))
        self.alive.append((saved, x))
        return saved

    def leaf(self, x: Tensor) -> Leaf:
        """A leaf that is held dense."""
        made = self.value()
        made.guard = self.saved(x, made)
        return Leaf(made, TensorSpec.of(x), int(x.storage_offset()))

    def remade_leaf(self, x: Tensor) -> Leaf:
        """A leaf that has to be remade itself, and which a saved tensor will read."""
        made = self.value(recipe("exp", torch.exp, (INPUT,), {}, [held(x)], x.exp()))
        self.saved(x.exp(), made).dense = None
        return Leaf(made, TensorSpec.of(x), 0)


def held(x: Tensor) -> Held:
    return Held(x, x._version)


def recipe(
    name: str, function: Any, args: Any, kwargs: dict[str, Any], given: list[Any], result: Tensor, **more: Any
) -> Recipe:
    views: list[Any] = [each if isinstance(each, Held) else None for each in given]
    spec = TensorSpec.of(result)
    call = Call(name, function, args, kwargs, tuple(views), spec, False, more.pop("settings", settings("cpu")), **more)
    return Recipe(call, tuple(given))


def inner(made: Recipe, x: Tensor) -> tuple[Recipe, View]:
    """A recipe as an argument of another one, which sees its result like ``x``."""
    return made, View(None, TensorSpec.of(x), int(x.storage_offset()))  # type: ignore[arg-type]


def normed(world: World, with_relu: bool = True) -> Recipe:
    x, weight, bias = numbers(4, 3, 8, 8), numbers(3, seed=1), numbers(3, seed=2)
    y, mean, invstd = torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    kwargs: dict[str, Any] = dict.fromkeys(("running_mean", "running_var"))
    kwargs |= {"input": INPUT, "weight": INPUT, "bias": INPUT, "training": True, "momentum": 0.1, "eps": 1e-5}
    given = [world.leaf(x), held(weight), held(bias)]
    statistics = held(mean), held(invstd)
    norm = recipe("batch_norm", F.batch_norm, (), kwargs, given, y, statistics=statistics)
    return recipe("relu", torch.relu, (INPUT,), {}, [inner(norm, y)], y) if with_relu else norm


def under_other_settings() -> Recipe:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    other = settings("cpu")
    torch.set_num_threads(before)
    assert other is not settings("cpu")
    x = numbers(4, 5)
    inside = recipe("neg", torch.neg, (INPUT,), {}, [held(x)], x)
    return recipe("sin", torch.sin, (INPUT,), {}, [inner(inside, x)], x, settings=other)


def summed(x: Tensor, y: Tensor) -> Recipe:
    return recipe("add", torch.add, (INPUT, INPUT), {"alpha": 2}, [held(x), held(y)], x)


X, Y = numbers(6, 4, seed=3), numbers(6, 4, seed=4)

RECIPES: dict[str, Callable[[World], Recipe]] = {
    "held": lambda world: recipe("relu", torch.relu, (INPUT,), {}, [held(X)], X),
    "dense leaf": lambda world: recipe("tanh", torch.tanh, (INPUT,), {}, [world.leaf(numbers(7, 5)[1:, ::2])], Y),
    "remade leaf": lambda world: recipe("tanh", torch.tanh, (INPUT,), {}, [world.remade_leaf(X)], X),
    "twice": lambda world: recipe("mul", torch.mul, (INPUT, INPUT), {}, [world.remade_leaf(X), world.leaf(Y)], X),
    "written over": lambda world: recipe("relu", torch.relu, (INPUT,), {}, [inner(summed(X, Y), X)], X),
    "written over with an argument": lambda world: recipe(
        "leaky_relu", F.leaky_relu, (INPUT, 0.5, False), {}, [inner(summed(X, Y), X)], X
    ),
    "of another layout": lambda world: recipe("relu", torch.relu, (INPUT,), {}, [inner(summed(X, Y), X[2:, 1:])], X),
    "by its name": lambda world: recipe("relu", torch.relu, (), {"input": INPUT}, [inner(summed(X, Y), X)], X),
    "list": lambda world: recipe(
        "cat", torch.cat, ([INPUT, INPUT], 1), {}, [held(X), world.leaf(Y)], torch.cat([X, Y], 1)
    ),
    "tuple": lambda world: recipe("stack", torch.stack, ((INPUT, INPUT),), {"dim": 1}, [held(X), held(Y)], X),
    "named": lambda world: recipe(
        "layer_norm", F.layer_norm, (INPUT, (4,)), {"weight": INPUT, "bias": None}, [held(X), held(Y[0])], X
    ),
    "one of several": lambda world: recipe("var_mean", torch.var_mean, (INPUT, 0), {}, [held(X)], X[0], output=1),
    "drawn": lambda world: recipe(
        "dropout", F.dropout, (INPUT, 0.5), {}, [held(X)], X, random_state=torch.Generator().manual_seed(7).get_state()
    ),
    "cast": lambda world: recipe(
        "linear", F.linear, (INPUT, INPUT), {}, [held(X), held(Y)], X.bfloat16(), autocast=("cpu", torch.bfloat16)
    ),
    "under other settings": lambda world: under_other_settings(),
    "fused": normed,
    "not fused": lambda world: normed(world).unfused(),
    "from statistics": lambda world: normed(world, False).using_statistics(),
}


def bits(x: Tensor | None) -> Any:
    return (
        None if x is None else (x.view(-1).view(torch.uint8).tolist() if x.is_contiguous() else x.tolist(), x.stride())
    )


def state(world: World) -> list[Any]:
    """Everything that reading may have changed."""
    live = world.live
    found: list[Any] = [
        live.saved,
        live.nbytes,
        live.remade_nbytes,
        live.buffers.nbytes,
        sorted(live.distrusted, key=str),
    ]
    for each in world.alive:
        if isinstance(each, Value):
            found.append(
                (each.round, each.unread, bits(each.remade), each.account.decodes, each.account.decode_seconds > 0)
            )
        else:
            found.append((each[0].round, each[0].dense is None, each[0].version))
    return found


def outcome(read: Callable[[], Tensor], world: World) -> Any:
    try:
        found = bits(read())
    except (BackstashError, RuntimeError) as error:
        found = type(error), str(error)
    return found, state(world)

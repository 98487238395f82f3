"""The factors by which a recipe multiplies the errors of the values that it begins from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from backstash.remake.calls import Held, Leaf
from backstash.remake.fused import fills

if TYPE_CHECKING:
    from backstash.remake.recipes import Recipe
    from backstash.stash.value import Value


def gains(recipe: Recipe) -> dict[Value, Tensor] | None:
    """By how much an error in each value that the recipe begins from is multiplied, by channel: [C] or [1].

    The errors of several values add up. The gains are known for batch norm with the statistics that it has saved, for
    relu, for sums, and for concatenations along the channels. For anything else the result is None.
    """
    call, inputs = recipe.call, recipe.inputs
    if call.name == "relu" and len(inputs) == 1:
        return _gains_through(recipe, 0)
    if call.name == "batch_norm" and call.statistics is not None:
        factor = call.statistics[1].get()
        weight = call.named_input("weight")
        if isinstance(weight, Held):
            factor = factor * weight.get().detach().to(factor.dtype)
        return _scaled(_gains_through(recipe, 0), factor.abs())
    if call.name == "add" and len(inputs) == 2 == len(call.args) and not call.kwargs:
        first, second = _gains_through(recipe, 0), _gains_through(recipe, 1)
        if first is None or second is None:
            return None
        for value, gain in second.items():
            first[value] = first[value] + gain if value in first else gain
        return first
    if call.name == "cat" and (call.args[1:] == (1,) or call.kwargs == {"dim": 1}):
        return _gains_of_concatenation(recipe)
    return None


def _gains_of_concatenation(recipe: Recipe) -> dict[Value, Tensor] | None:
    """The gains of a concatenation: each part has errors in its own channels only."""
    total: dict[Value, Tensor] = {}
    begin, spec = 0, recipe.call.spec
    for index, given in enumerate(recipe.inputs):
        part = _gains_through(recipe, index, except_dim=1)
        if part is None or isinstance(given, Held):
            return None
        end = begin + (given.spec if isinstance(given, Leaf) else given[1].spec).shape[1]
        for value, gain in part.items():
            channels = total.setdefault(value, torch.zeros(spec.shape[1], dtype=torch.float32, device=spec.device))
            channels[begin:end] += gain
        begin = end
    return total


def _gains_through(recipe: Recipe, index: int, except_dim: int | None = None) -> dict[Value, Tensor] | None:
    """The gains on the way to one input, which has to have the result's shape, but perhaps in one dimension."""
    given, spec = recipe.inputs[index], recipe.call.spec
    if isinstance(given, Held):
        return None
    shape = (given if isinstance(given, Leaf) else given[1]).spec.shape
    if len(shape) != len(spec.shape):
        return None
    if any(a != b for dim, (a, b) in enumerate(zip(shape, spec.shape, strict=True)) if dim != except_dim):
        return None
    if isinstance(given, Leaf):
        return {given.value: torch.ones(1, dtype=torch.float32, device=spec.device)}
    return gains(given[0]) if fills(given) else None


def _scaled(given: dict[Value, Tensor] | None, factor: Tensor) -> dict[Value, Tensor] | None:
    return None if given is None else {value: gain * factor for value, gain in given.items()}

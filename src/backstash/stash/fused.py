"""Batch norm, a sum and relu made again in one pass over memory, from the statistics that batch norm has saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from backstash.ops import backends
from backstash.ops.layout import images, per_channel
from backstash.saved import TensorSpec
from backstash.stash.calls import Held, Leaf, Memory, View

if TYPE_CHECKING:
    from backstash.stash.recipes import Recipe


def affine(recipe: Recipe, fetch: Callable[[Leaf], Tensor], out: Memory | None) -> Tensor | None:
    """``[relu](batch_norm(x) [+ y])`` in one pass; None where the recipe has another form or no kernel takes it.

    Args:
        recipe: what makes the value.
        fetch: returns the tensor that a leaf stands for.
        out: makes memory for the result.
    """
    relu = recipe.call.name == "relu"
    inner = _only_input(recipe) if relu else recipe
    if inner is None:
        return None
    norm, residual = _norm_and_residual(inner)
    spec = recipe.call.spec
    if norm.call.statistics is None or isinstance(residual, Held) or not backends.serves("affine", spec.device.type):
        return None
    source = norm.inputs[0]
    if spec.dtype is not torch.float32 or norm.call.autocast is not None or recipe.call.autocast is not None:
        return None
    if not isinstance(source, Leaf):
        return None
    y = None  # It is fetched before x: if it is made from other values, these would lie beside x.
    if residual is not None:
        y = fetch(residual) if isinstance(residual, Leaf) else residual[0].run(fetch)
        if y.dtype is not torch.float32 or y.stride() != spec.stride or y.shape != spec.shape:
            return None
    x = fetch(source)
    if x.dtype is not torch.float32 or x.stride() != spec.stride or x.shape != spec.shape:
        return None
    mean, invstd = (held.get() for held in norm.call.statistics)
    held_weight, held_bias = norm.call.named_input("weight"), norm.call.named_input("bias")
    weight = held_weight.get() if isinstance(held_weight, Held) else None
    bias = held_bias.get() if isinstance(held_bias, Held) else None
    layout = images(x)
    if layout is None or not per_channel(x.shape[1], mean, invstd, weight, bias):
        return None
    result = out() if out is not None else None
    if result is None or TensorSpec.of(result) != spec:  # the memory is for what a later call converts the result to
        result = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    backends.serving(spec.device.type).affine(x, mean, invstd, weight, bias, y, relu, *layout, result)
    return result


def _norm_and_residual(recipe: Recipe) -> tuple[Recipe, Leaf | Held | tuple[Recipe, View] | None]:
    """Batch norm's recipe and what is added to its result; where nothing is added, the recipe itself and None."""
    call, inputs = recipe.call, recipe.inputs
    if call.name == "add" and len(inputs) == 2 == len(call.args) and not call.kwargs:
        first, second = inputs
        if isinstance(first, tuple) and _is_norm(first):
            return first[0], second
        if isinstance(second, tuple) and _is_norm(second):
            return second[0], first
    return recipe, None


def _is_norm(given: tuple[Recipe, View]) -> bool:
    return given[0].call.name == "batch_norm" and fills(given)


def _only_input(recipe: Recipe) -> Recipe | None:
    """The recipe of the only input, where that input is all of what this recipe makes."""
    given = recipe.inputs[0] if len(recipe.inputs) == 1 else None
    return given[0] if isinstance(given, tuple) and fills(given) else None


def fills(given: tuple[Recipe, View]) -> bool:
    """Whether the view shows all of what its recipe makes."""
    recipe, view = given
    return view.offset == 0 and view.spec == recipe.call.spec

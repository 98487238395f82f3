"""The values that a recipe may begin from: its leaves.

Note: [what a recipe begins from]
    A value is remade from others, its leaves. If a leaf were changed in between, the remade value would be another one,
    where plain PyTorch, which kept the value itself, goes on as ever. So a leaf is one of these:

    * stored in a form of its own, or held by autograd alone: nobody else can reach it;
    * small, a parameter or a buffer: a copy was made when the function was called;
    * anything else that the program holds: the Session watches it. Before a function changes it or hands its memory on,
      and when the Session is left, what is remade from it is remade and stored.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from backstash.codecs.masks.codec import Bitmask
from backstash.remake.calls import Leaf, View
from backstash.remake.recipes import Recipe
from backstash.saved import Need, TensorSpec, Test
from backstash.stash.value import Value, guard_with, holder


def find_leaf(view: View, root: Value, max_depth: int, within: frozenset[str] | None) -> Leaf | str | None:
    """The stored value that holds what a recipe for ``root`` would begin from; None without one, or why it may not.

    It is exact, or has the errors of no values but those ``within``; None for any.
    """
    if view.content.escaped:
        return "an input's memory was handed to something that may change it unseen"
    value = view.content.value() if view.content.value is not None else None
    if value is None or value is root or value.content is not view.content:
        return None
    dtype: torch.dtype | None = None
    if within is not None and not value.state.errors <= within:
        return None
    if value.state.recipe is not None:
        if value.state.depth + root.dependents.height >= max_depth:
            return f"it would begin from a chain of {value.state.depth} recomputed values"
        dtype = value.state.recipe.call.spec.dtype
    elif value.state.form is not None:
        if Need.VALUE in value.state.form.codec.preserves:
            dtype = value.state.form.spec.dtype
    elif value.dependents.guard is None or value.dependents.guard.origin.version == view.content.version:
        member = holder(value)
        if member is not None and member.dense is not None and member.dense._version == view.content.version:
            dtype = member.dense.dtype
    if dtype is None:
        return None
    return Leaf(value, view.spec, view.offset) if dtype is view.spec.dtype else "its storage is seen as different types"


def count_moved(begins_from: Iterable[Value]) -> int:
    """Returns how many values in other stores, or that may yet be moved there, are read to make these available."""
    seen: set[Value] = set()
    waiting = list(begins_from)
    moved = 0
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.state.recipe is not None:
            waiting += value.state.recipe.leaves
        elif value.state.form is not None:
            moved += value.state.form.tag is not None
        else:
            moved += value.facts is None  # nothing is decided on it yet
    return moved


def guard_leaf(value: Value) -> None:
    """Make sure that a value that is held dense stays as long as a recipe begins from it."""
    if value.dependents.guard is not None or value.state.form is not None or value.state.recipe is not None:
        return
    member = holder(value)
    assert member is not None and member.dense is not None
    guard_with(value, member.dense)
    assert value.dependents.guard is not None
    value.dependents.guard.place = member.place


def keeps_signs(recipe: Recipe, value: Value, whole: Tensor) -> bool:
    """Whether every sign reader of this value can read one bit per element, clear where the relu returned zero."""
    masks = {saved.mask for saved in value.saved() if saved.need is Need.SIGN and saved.dense is not None}
    if not masks:
        return True
    mask = masks.pop()
    if masks or mask is None or mask.test not in (Test.NOT_LE, Test.GT) or mask.lo != 0.0:
        return False
    return recipe.call.name == "relu" and Bitmask(mask).accepts(TensorSpec.of(whole)) is None

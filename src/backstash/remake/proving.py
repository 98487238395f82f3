"""The proof of a recipe: it is run, and its result is compared with the value that it is to replace."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from backstash.ops.bits import bits_of
from backstash.remake.calls import Leaf
from backstash.remake.gains import gains
from backstash.remake.making import fetch
from backstash.remake.recipes import Recipe
from backstash.saved import TensorSpec
from backstash.stash.value import holder
from backstash.torch_internals import in_filled_memory


def prove(recipe: Recipe, whole: Tensor) -> str:
    """How the recipe makes the bits of ``whole``: "fused", "plain" (call by call), or "" if it does not."""

    def ways() -> str:
        for way, candidate in (("fused", recipe), ("plain", recipe.unfused())):
            if equals(candidate.run(fetch_unguarded), whole):
                return way
        return ""

    return in_filled_memory(whole.device.type, ways)


def differing(recipe: Recipe, way: str, whole: Tensor) -> Tensor | None:
    """Which bits of ``whole`` the recipe does not make in a way that has made them before. The host does not wait.

    Args:
        recipe: the recipe.
        way: what :func:`prove` has answered.
        whole: the value.

    Returns:
        A bool for each element, [n]; None if what it makes is not even as large.
    """
    repeated = recipe if way == "fused" else recipe.unfused()
    result = in_filled_memory(whole.device.type, lambda: repeated.run(fetch_unguarded))
    return None if not _as_large(result, whole) else torch.ne(*(bits_of(_flat(x, whole)) for x in (result, whole)))


def equals(result: Tensor, whole: Tensor) -> bool:
    """Whether what a recipe has made is all of a value, bit for bit."""
    return _as_large(result, whole) and torch.equal(*(bits_of(_flat(x, whole)) for x in (result, whole)))


def _as_large(result: Tensor, whole: Tensor) -> bool:
    return result.dtype == whole.dtype and result.untyped_storage().nbytes() == whole.untyped_storage().nbytes()


def _flat(x: Tensor, whole: Tensor) -> Tensor:
    return x.as_strided((whole.numel(),), (1,), 0)


def prove_within(recipe: Recipe, whole: Tensor) -> str:
    """Whether the recipe makes ``whole`` as precisely as its leaves' bounds and rounding allow: "within", or ""."""
    off = off_by(recipe)
    if off is None:
        return ""
    result = recipe.run(fetch_unguarded)
    if TensorSpec.of(result) != recipe.call.spec:
        return ""
    error = (result - whole.as_strided(result.shape, result.stride(), 0)).abs_()
    by_channel = error.amax([dim for dim in range(result.dim()) if dim != 1])
    return "within" if bool((by_channel <= off * 1.001 + rounding(result)).all()) else ""


def tolerance(recipe: Recipe, sample: Tensor) -> float:
    """How far elements that the recipe makes may lie from those of a sample, [n], of the value that it replaced."""
    off = off_by(recipe)
    return math.inf if off is None else 1.001 * float(off.max()) + 128 * rounding(sample)  # others may be larger


def rounding(whole: Tensor) -> float:
    """How far apart the results of two ways to compute the same numbers may lie."""
    return float(8 * torch.finfo(whole.dtype).eps * whole.abs().max())


def off_by(recipe: Recipe) -> Tensor | None:
    """The largest error that the recipe's result may have, by channel: [C] or [1]; None where it is not known."""
    found = gains(recipe)
    if found is None:
        return None
    total = torch.zeros(1, dtype=torch.float32, device=recipe.call.spec.device)
    for leaf, gain in found.items():
        off: Tensor | None
        if leaf.state.recipe is not None and leaf.state.recipe.from_statistics:
            off = off_by(leaf.state.recipe)
        else:
            bound = leaf.state.form.codec.bound if leaf.state.form is not None and leaf.state.recipe is None else None
            off = torch.zeros(1, dtype=torch.float32, device=total.device)
            if bound is not None:
                off = None if bound.abs is None else off + bound.abs
        if off is None:
            return None
        total = total + gain * off
    return total


def fetch_unguarded(leaf: Leaf) -> Tensor:
    """As :func:`decode.fetch`, at a time when nothing guards the leaf yet."""
    value = leaf.value
    if not value.is_dense or value.dependents.guard is not None:
        return fetch(leaf)
    member = holder(value)
    assert member is not None and member.dense is not None
    return member.dense.as_strided(leaf.spec.shape, leaf.spec.stride, leaf.offset)

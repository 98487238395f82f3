"""Values saved in the place of those that a policy would round if it knew what an error in them does.

Torch's partitioner saves what computes the most at the least bytes. Of an attention in full that is the scores before
the softmax, since an exponential costs nothing. But nobody can round scores: a masked one is as large as a number gets,
and an error in any is a factor of its weight. The softmax's result has as many bytes, is computed in the forward pass
anyway, and the gradients are linear in it. Of a cross entropy it is the logits, which the backward pass makes the
probabilities of. These are saved instead: the forward pass then computes them, and the backward pass does not.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from backstash.compile.graph.effect import effect_of
from backstash.compile.graph.reading import is_elementwise, is_view, readers
from backstash.compile.graph.values import SavedValue, Split, is_tensor_node, spec_of
from backstash.saved import Effect, Need

_ORDER = [Effect.LINEAR, Effect.NORMALISED, Effect.SENSITIVE]
"""The effects that are known, the mildest first."""

_MOST_NODES = 64
"""No value is looked at from which more operators than this are computed again."""


def substitutes(split: Split, kept: Collection[SavedValue], gradients: set[fx.Node]) -> dict[str, str]:
    """For values of which the policy keeps every bit, what may be saved instead, by names of nodes.

    Args:
        split: the graphs, not treated.
        gradients: the nodes of the backward graph that depend on an incoming gradient.

    Returns:
        For the name of a value's node the name of another node of the forward graph, of no more bytes, through which
        alone the backward pass reads the value, and an error in which has a known effect.
    """
    found = {}
    for value in kept:
        if len(value.members) != 1 or value.members[0].node is not value.base:
            continue
        placeholder = value.members[0].placeholder
        serve = [
            (_ORDER.index(effect), node not in split.twins, node.name)
            for node in _computed_from(placeholder, gradients) or ()
            if (effect := _effect(split, value, node, gradients)) in _ORDER and _is_passed(placeholder, node, gradients)
        ]
        if serve:
            found[value.base.name] = min(serve, key=lambda each: each[:2])[-1]
    return found


def _computed_from(value: fx.Node, gradients: set[fx.Node]) -> list[fx.Node] | None:
    """What backward computes from a value without a gradient, in order; None if that is too much."""
    found: dict[fx.Node, None] = {}
    waiting = [value]
    while waiting:
        node = waiting.pop(0)
        for user in node.users:
            if user.op == "output":
                return None
            if user not in gradients and user not in found:
                found[user] = None
                waiting.append(user)
        if len(found) > _MOST_NODES:
            return None
    return list(found)


def _effect(split: Split, value: SavedValue, node: fx.Node, gradients: set[fx.Node]) -> Effect:
    """The worst effect of an error in a node that is saved instead; UNKNOWN if it cannot be."""
    if is_view(node) or not is_tensor_node(node) or not _is_cheap(split, node):
        return Effect.UNKNOWN
    if spec_of(node.meta["val"]).nbytes > value.spec().nbytes:
        return Effect.UNKNOWN
    effects = [effect_of(reader, gradients).effect for reader in readers(node) if reader.need is Need.VALUE]
    if not effects or Effect.UNKNOWN in effects:
        return Effect.UNKNOWN
    return max(effects, key=_ORDER.index)


def _is_cheap(split: Split, node: fx.Node) -> bool:
    """Whether the forward pass computes the node, or can compute it by elementwise operators from what it computes."""
    waiting, seen = [node], {node}
    while waiting:
        each = waiting.pop()
        if each in split.twins:
            continue
        if each.op != "call_function" or not (is_elementwise(each) or is_view(each)):
            return False
        new = set(each.all_input_nodes) - seen
        seen |= new
        waiting += new
    return True


def _is_passed(value: fx.Node, through: fx.Node, gradients: set[fx.Node]) -> bool:
    """Whether whatever depends on a gradient reads the value through that node alone."""
    seen, waiting = {value}, [value]
    while waiting:
        for user in waiting.pop().users:
            if user in gradients:
                return False
            if user is not through and user not in seen:
                seen.add(user)
                waiting.append(user)
    return True

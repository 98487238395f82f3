"""Elementwise values that a backward graph computes again, once for each kernel that reads them.

A value of several readers is stored by Inductor if it is computed from more than a few tensors, and what is stored for
a call of a library is read from there by everybody else. So the result of a batch norm that is computed again for the
gradient of a convolution's weight would be held until a mask is made of it, after the convolution's other gradient.
But what it is computed from, the batch norm's input, is there for that kernel anyway. Computed once more inside of it
the value takes no memory, and the bits are the same, because each element is computed by the same operations.
"""

from __future__ import annotations

from torch import fx

from backstash.compile.graph.effect import gradient_nodes
from backstash.compile.graph.emit import GraphEmitter
from backstash.compile.graph.reading import RANDOM, is_elementwise, is_view, operator_name, reads_fused
from backstash.compile.graph.values import is_tensor_node, spec_of

LEAST_NBYTES = 64 << 10
"""Smaller values are held."""

_SLOW = frozenset(
    f"aten::{name}"
    for name in ("exp", "expm1", "log", "log10", "log1p", "log2", "sigmoid", "tanh", "erf", "erfc", "sin", "cos", "tan")
) | frozenset(f"aten::{name}" for name in ("pow", "atan2", "atan", "asin", "acos", "sinh", "cosh", "lgamma", "erfinv"))
"""Functions that take longer than it takes to read their result."""

_MOST_NODES = 16
"""Of a longer chain the result is held."""


def is_light(node: fx.Node) -> bool:
    """Whether an operator is computed as fast as its result is read."""
    return is_elementwise(node) and is_tensor_node(node) and operator_name(node) not in _SLOW | RANDOM


def repeat_for_readers(graph: fx.Graph, min_nbytes: int = LEAST_NBYTES) -> int:
    """Lets kernels of a backward graph compute such values for themselves; returns how many readers do so.

    The first reader and calls of a library read the value as it is. A later reader computes it where all that it is
    computed from is read still later, or small.
    """
    gradients = gradient_nodes(graph)
    place = {node: number for number, node in enumerate(graph.nodes)}
    count = 0
    for node in list(graph.nodes):
        if node in gradients or len(node.users) < 2 or not is_light(node) or _nbytes(node) < min_nbytes:
            continue
        chain = dict.fromkeys(sorted(_chain(node, gradients), key=place.__getitem__))
        sources = {argument for each in chain for argument in each.all_input_nodes if argument not in chain}
        if len(chain) > _MOST_NODES or not sources:
            continue
        until = min((_last_read(each, chain, place) for each in sources if _nbytes(each) >= min_nbytes), default=-1)
        _, *later = sorted((reader for reader in node.users if reader in place), key=place.__getitem__)
        for reader in later:
            if reads_fused(reader) and not is_view(reader) and place[reader] <= until:
                _compute_before(reader, node, chain)
                count += 1
    return count


def _chain(node: fx.Node, gradients: set[fx.Node]) -> set[fx.Node]:
    """The node and the elementwise ones that it is computed from."""
    found = set[fx.Node]()
    waiting = [node]
    while waiting and len(found) <= _MOST_NODES:
        each = waiting.pop()
        found.add(each)
        large = [argument for argument in each.all_input_nodes if _nbytes(argument) >= _nbytes(node)]
        waiting += [argument for argument in large if is_light(argument) and argument not in gradients]
    return found


def _last_read(node: fx.Node, chain: dict[fx.Node, None], place: dict[fx.Node, int]) -> int:
    """The place of the last reader outside of the chain; views are looked through."""
    found = -1
    for reader in node.users:
        if reader not in chain:
            found = max(found, _last_read(reader, chain, place) if is_view(reader) else place.get(reader, -1))
    return found


def _compute_before(reader: fx.Node, node: fx.Node, chain: dict[fx.Node, None]) -> None:
    emit = GraphEmitter(node.graph, reader, node.meta["val"].fake_mode, {"autograd_backward": True})
    made: dict[fx.Node, fx.Node] = {}
    for each in chain:
        args, kwargs = fx.map_arg((each.args, each.kwargs), lambda argument: made.get(argument, argument))
        made[each] = emit(each.target, *args, **kwargs)  # type: ignore[arg-type]
    reader.replace_input_with(node, made[node])


def _nbytes(node: fx.Node) -> int:
    return spec_of(node.meta["val"]).nbytes if is_tensor_node(node) else 0

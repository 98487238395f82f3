"""How many bytes a pair of graphs holds at its peak, and what recomputing and encoding cost, estimated before it runs.

The estimate takes a graph's nodes in their order, and each memory as alive from the node that computes it to the last
node that reads it. What a compiler fuses is never in memory: an elementwise result that only elementwise operators and
reductions read does not count where ``fuses`` is true.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from backstash.integrations.compile.choose import Choice
from backstash.integrations.compile.reading import is_view, name_of
from backstash.integrations.compile.values import SavedValue, Split, hint, is_tensor, spec_of, storage_of

BYTES_PER_SECOND, FLOPS_PER_SECOND = 10e9, 50e9
"""Of two cores with AVX-512. Only their ratio matters: it says how many bytes a recomputed product is worth."""

_REDUCTIONS = frozenset({"aten::sum", "aten::mean", "aten::amax", "aten::amin", "aten::var_mean", "aten::any"})

Plan = Mapping[fx.Node, tuple[SavedValue, Choice]]
"""The value and its form, by the value's base."""


@dataclass(frozen=True)
class _Life:
    """Some memory, alive from the position of one node to that of another."""

    nbytes: int
    born: int
    dies: int


def peak_nbytes(split: Split, plan: Plan, fuses: bool) -> int:
    """The most bytes that forward and backward hold at once, inputs of the forward graph excluded.

    Args:
        split: the graphs, before anything is rewritten.
        plan: what is to be done with each saved value.
        fuses: whether the compiler fuses elementwise operators.
    """
    return max(_peak(_forward(split, plan, fuses)), _peak(_backward(split, plan, fuses)))


def held_nbytes(value: SavedValue, choice: Choice) -> int:
    """Bytes between forward and backward, by the numbers that symbolic sizes stood for."""
    spec = value.spec()
    if choice.is_kept:
        return spec.nbytes
    tests = sum(-(-spec_of(node.meta["val"]).numel // 8) for node in choice.tests)
    return tests + (0 if choice.codec is None else choice.codec.nbytes(spec.shape, spec.dtype))


def seconds(split: Split, plan: Plan) -> float:
    """Time for what backward computes again, and for encodings; of use for comparisons only."""
    again = {node for node in split.twins if node.op == "call_function" and not is_view(node)}
    encoded = sum(
        2 * value.spec().nbytes + 2 * held_nbytes(value, choice)
        for value, choice in plan.values()
        if not choice.is_kept
    )
    return encoded / BYTES_PER_SECOND + sum(map(_seconds, again))


def _seconds(node: fx.Node) -> float:
    moved = sum(_nbytes(each) for each in (node, *node.all_input_nodes) if is_tensor(each))
    from torch.utils.flop_counter import flop_registry  # it imports triton

    count: Any = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return moved / BYTES_PER_SECOND
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    flops = count(*args, **kwargs, out_val=node.meta["val"])
    return moved / BYTES_PER_SECOND + hint(flops) / FLOPS_PER_SECOND


def _nbytes(node: fx.Node) -> int:
    return spec_of(node.meta["val"]).nbytes


def _forward(split: Split, plan: Plan, fuses: bool) -> Iterable[_Life]:
    order, last = _positions(split.forward.graph)
    end = len(order)
    results = {storage_of(node) for node in split.results if is_tensor(node)}
    treated = {storage_of(base): item for base, item in plan.items() if not item[1].is_kept}
    for storage, base in _computed(split.forward.graph, fuses):
        dies = last[storage]
        if storage in treated:
            yield _Life(held_nbytes(*treated[storage]), dies, end)
        elif storage in results:
            dies = end
        yield _Life(_nbytes(base), order[base], dies)


def _backward(split: Split, plan: Plan, fuses: bool) -> Iterable[_Life]:
    graph = split.backward.graph
    order, last = _positions(graph)
    (output,) = graph.find_nodes(op="output")
    results = {storage_of(node) for node in output.all_input_nodes if is_tensor(node)}
    for value, choice in plan.values():
        users = [order[user] for member in value.members for user in member.placeholder.users]
        first, final = min(users, default=0), max([last.get(storage_of(m.placeholder), 0) for m in value.members])
        if choice.is_kept:
            yield _Life(value.spec().nbytes, 0, final)
            continue
        yield _Life(held_nbytes(value, choice), 0, first)
        readers = [reader.node for reader in value.readers()]
        if choice.codec is not None and not (fuses and all(map(_fuses, readers))):
            yield _Life(value.spec().nbytes, first, final)
    for storage, base in _computed(graph, fuses):
        yield _Life(_nbytes(base), order[base], len(order) if storage in results else last[storage])


def _positions(graph: fx.Graph) -> tuple[dict[fx.Node, int], dict[int, int]]:
    """The position of each node, and for each memory that of the last node that reads it."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    last: dict[int, int] = {}
    for node, position in order.items():
        for each in (node, *node.all_input_nodes):
            if is_tensor(each) and node.op != "output":
                last[storage_of(each)] = position
    return order, last


def _computed(graph: fx.Graph, fuses: bool) -> Iterable[tuple[int, fx.Node]]:
    """Each memory that the graph computes, with the node that does."""
    seen: set[int] = set()
    for node in graph.nodes:
        if not is_tensor(node) or storage_of(node) in seen:
            continue
        seen.add(storage_of(node))
        if node.op == "call_function" and not is_view(node) and not (fuses and _is_never_stored(node)):
            yield storage_of(node), node


def _is_never_stored(node: fx.Node) -> bool:
    return _is_elementwise(node) and all(map(_fuses, node.users))


def _fuses(node: fx.Node) -> bool:
    if is_view(node):
        return all(map(_fuses, node.users))
    return _is_elementwise(node) or name_of(node) in _REDUCTIONS


def _is_elementwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or name_of(node) == "prims::convert_element_type"


def _peak(lives: Iterable[_Life]) -> int:
    changes: dict[int, int] = {}
    for life in lives:
        changes[2 * life.born] = changes.get(2 * life.born, 0) + life.nbytes
        changes[2 * life.dies + 1] = changes.get(2 * life.dies + 1, 0) - life.nbytes
    alive = peak = 0
    for moment in sorted(changes):
        alive += changes[moment]
        peak = max(peak, alive)
    return peak

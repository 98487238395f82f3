"""Inputs of convolutions that a graph saves, such as weights, without a second copy of each.

For a convolution on a CPU Inductor copies weights and images to channels last. What it saves for the backward pass then
is the copy, so that each weight is in memory twice from its forward to its backward use. An input that is saved as a
matrix, which is a view of it, is saved itself, and the copy is made anew where the backward pass reads it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx

from backstash.compile.forms.rewrite import UNCHECKED
from backstash.compile.graph.emit import GraphEmitter
from backstash.compile.graph.reading import operator_name, written_inputs
from backstash.compile.graph.values import Split, is_tensor_node
from backstash.torch_internals import hide_from_dynamo, lays_out_images, view_with_version

_LIBRARY = torch.library.Library("backstash_graph", "FRAGMENT")
# An operator of our own, because a view of Inductor's has no version: autograd would not notice that the input was
# written to between the passes.
_LIBRARY.define("matrix(Tensor(a) x) -> Tensor(a)")
_ops: Any = torch.ops.backstash_graph


def copied_inputs(graph: fx.Graph) -> set[fx.Node]:
    """The inputs of a graph that Inductor copies for the convolutions that read them, or what is computed from them."""
    found: set[fx.Node] = set()
    if not lays_out_images(graph):
        return found
    written = written_inputs(graph)
    waiting = [node for node in graph.nodes if operator_name(node) == "aten::convolution"]
    seen = set(waiting)
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node in seen or operator_name(node) == "aten::bmm":
                continue
            seen.add(node)
            waiting.append(node)
            if node.op == "placeholder" and node not in written and _is_copied(node):
                found.add(node)
    return found


def save_as_matrices(split: Split) -> list[fx.Node]:
    """Lets the forward graph save its inputs themselves where Inductor would save a copy.

    Returns:
        What the backward graph reads in the place of these copies.
    """
    copied = copied_inputs(split.forward.graph)
    (output,) = split.forward.graph.find_nodes(op="output")
    results = list(output.args[0])
    placeholders = {node.name: node for node in split.backward.graph.find_nodes(op="placeholder")}
    found = []
    for position, node in enumerate(results):
        if position < split.outputs or node not in copied or node.name not in placeholders:
            continue
        value = node.meta["val"]
        matrix = GraphEmitter(split.forward.graph, output, value.fake_mode)(_ops.matrix.default, node)
        matrix.meta |= {name: mark for name, mark in node.meta.items() if name == UNCHECKED}
        results[position] = matrix
        found.append(_read_as_matrix(split, placeholders[node.name], matrix))
    output.args = (tuple(results),)
    return found


def _read_as_matrix(split: Split, placeholder: fx.Node, matrix: fx.Node) -> fx.Node:
    graph, value = split.backward.graph, placeholder.meta["val"]
    with graph.inserting_before(placeholder):
        node = graph.placeholder(matrix.name)
        node.target = node.name
        node.meta = copy.copy(placeholder.meta) | {"val": matrix.meta["val"]}
    split.twins[node] = matrix
    if placeholder.users:
        first = next(node for node in graph.nodes if node in placeholder.users)
        emit = GraphEmitter(graph, first, value.fake_mode, {"autograd_backward": True})
        placeholder.replace_all_uses_with(emit(torch.ops.aten.view.default, node, list(value.shape)))
    split.twins.pop(placeholder, None)
    graph.erase_node(placeholder)
    return node


def _is_copied(node: fx.Node) -> bool:
    if not is_tensor_node(node):
        return False
    value = node.meta["val"]
    has_numbers = all(isinstance(size, int) for size in value.shape)
    if type(value).__name__ != "FakeTensor" or value.device.type != "cpu" or value.dim() != 4 or not has_numbers:
        return False
    return value.is_contiguous() and not value.is_contiguous(memory_format=torch.channels_last)


def _matrix(x: Tensor) -> Tensor:
    return view_with_version(x, (x.shape[0], -1))


hide_from_dynamo(_matrix, and_all_below=True)
_LIBRARY.impl("matrix", _matrix, "CompositeExplicitAutograd")
torch.library.register_fake("backstash_graph::matrix", lambda x: x.view(x.shape[0], -1), lib=_LIBRARY)

"""Layers in a graph: where a backward graph computes the gradient of a layer's weight from the layer's saved input.

A policy that chooses error bounds from gradients, as Comet does, watches the autograd nodes of layers. A compiled graph
has none. What it has of a layer is found here, and :class:`Node` stands for the node when the graph runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from backstash.compile.graph.reading import Reader, arguments_of, is_view, operator_name
from backstash.compile.graph.values import Split, hint, is_tensor_node, module_path

_PRODUCT, _CONVOLUTION = "Mm", "Convolution"

ROLES = {_PRODUCT: "self", _CONVOLUTION: "input"}
"""The autograd nodes of layers, and the role in which each saves its input."""

ForwardHook = Callable[[Any, Any], None]


@dataclass(frozen=True)
class Layer:
    """A layer whose input is saved.

    Attributes:
        kind: the autograd node that the layer would have.
        path: path of the module that computes it, as Dynamo noted it.
        reader: the operator of the backward graph that computes the weight's gradient.
        weight: the input of the forward graph that is the weight.
        weight_gradient: the node of the backward graph that computes the weight's gradient.
        gradient: the node of the gradient of the layer's output.
        settings: of a convolution, by the names that its autograd node has for them.
        is_transposed: whether the two gradients are transposes of those that the autograd node would see.
    """

    kind: str
    path: str
    reader: Reader
    weight: fx.Node
    weight_gradient: fx.Node
    gradient: fx.Node
    settings: tuple[tuple[str, Any], ...] = ()
    is_transposed: bool = False


class Node:
    """What stands for a layer's autograd node in a policy's ``watch()``: its parameter, its settings, and its hooks.

    Args:
        parameter: returns the weight.
        settings: attributes, such as ``_saved_stride``.
    """

    def __init__(self, parameter: Callable[[], Tensor], settings: Sequence[tuple[str, Any]]) -> None:
        self._parameter = parameter
        self.hooks: list[ForwardHook] = []
        for name, value in settings:
            setattr(self, name, value)

    @property
    def parameter(self) -> Tensor:
        """The layer's weight."""
        return self._parameter()

    def register_hook(self, hook: ForwardHook) -> None:
        """The hook is called once, with the gradients of the weight's layer, when backward has computed them."""
        self.hooks.append(hook)


KINDS: dict[str, type[Node]] = {kind: type(kind, (Node,), {}) for kind in ROLES}
"""The classes have the nodes' names, by which policies know what a node computes."""


def layer_of_split(split: Split, reader: Reader) -> Layer | None:
    """The layer whose weight's gradient an operator computes from its input; None if it does something else.

    The gradient has to go to an input of the graph and nowhere else, as that of a shared weight does not.
    """
    name, node = operator_name(reader.node), reader.node
    if name == "aten::convolution_backward" and reader.argument == "input":
        return _convolution(split, reader)
    if name != "aten::mm" or reader.argument not in ("self", "mat2"):
        return None
    other = node.args[1 if reader.argument == "self" else 0]
    weight = _input_of(split, node)
    if weight is None or not isinstance(other, fx.Node):
        return None
    transposed = reader.argument == "mat2"
    return Layer(_PRODUCT, module_path(node), reader, weight, node, other, is_transposed=transposed)


def _convolution(split: Split, reader: Reader) -> Layer | None:
    named = arguments_of(reader.node)
    found = [user for user in reader.node.users if user.target is operator.getitem and user.args[1] == 1]
    weight = _input_of(split, found[0]) if len(found) == 1 else None
    gradient = named["grad_output"]
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    settings = tuple((f"_saved_{name}", named[name]) for name in names)
    if weight is None or any(isinstance(value, fx.Node) for _, value in settings):
        return None
    return Layer(_CONVOLUTION, module_path(reader.node), reader, weight, found[0], gradient, settings)


def _input_of(split: Split, gradient: fx.Node) -> fx.Node | None:
    """The input of the forward graph of which a node of the backward graph is the gradient."""
    (output,) = split.backward.graph.find_nodes(op="output")
    inputs, results = list(split.forward.graph.find_nodes(op="placeholder")), list(output.args[0])
    node = gradient
    while len(node.users) == 1:
        (user,) = node.users
        if user is output:
            places = [place for place, result in enumerate(results) if result is node]
            weight = inputs[places[0]] if len(places) == 1 and places[0] < len(inputs) else None
            same = weight is not None and is_tensor_node(weight) and _sizes(weight) == _sizes(node)
            return weight if same else None
        if not (is_view(user) or operator_name(user) in ("prims::convert_element_type", "aten::_to_copy")):
            return None
        node = user
    return None


def _sizes(node: fx.Node) -> list[int]:
    return [hint(size) for size in node.meta["val"].shape]

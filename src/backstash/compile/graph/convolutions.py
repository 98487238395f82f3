"""Convolutions of a graph: the images that they read, and those computed again, in the forward pass's memory format.

Inductor lays out images of convolutions in channels last on a CPU, whatever the program's order is. Planes lie by
channel, so what a compiler writes to decode them in the loops of a batch norm's backward reads bytes that lie far
apart, several times each. One call of a kernel is faster.

Note: [memory formats]
    The gradients of a convolution may have other bits in another memory format; those with groups do. On a CPU Inductor
    uses channels last for all images of a graph that has a convolution, and leaves the others' as they come. A backward
    graph has none, unless one is computed again there. So that everything else of the graph stays in the format that it
    has without a budget, such a convolution becomes an operator of our own, which Inductor does not know. It copies its
    operands to channels last if Inductor does so in the forward graph, and then has the bits of the forward pass.
    What the forward pass saves itself, in the place of Inductor's copy in channels last, is copied for each reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from backstash.compile.graph.emit import GraphEmitter
from backstash.compile.graph.layout import have_same_sizes
from backstash.compile.graph.values import Split
from backstash.torch_internals import hide_from_dynamo, lays_out_images

_aten = torch.ops.aten
_LIBRARY = torch.library.Library("backstash_graph", "FRAGMENT")
_TYPES = "Tensor x, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed"
_ARGUMENTS = f"({_TYPES}, SymInt[] output_padding, SymInt groups) -> Tensor"
_FREE = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)
_FIXED = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
_LIBRARY.define(f"convolution{_ARGUMENTS}", tags=_FIXED)
_LIBRARY.define(f"convolution_in_channels_last{_ARGUMENTS}", tags=_FREE)
_LIBRARY.define("in_channels_last(Tensor x) -> Tensor", tags=_FREE)
_ops: Any = torch.ops.backstash_graph


def convolves(graph: fx.Graph) -> bool:
    """Whether a convolution is among the operators of a graph, which decides on the format of all images there."""
    return bool(graph.find_nodes(op="call_function", target=_aten.convolution.default))


def convolved_images(graph: fx.Graph) -> list[Tensor]:
    """What convolutions on a CPU have read, and the gradients of what they have returned, in a backward graph."""
    calls = graph.find_nodes(op="call_function", target=_aten.convolution_backward.default)
    read: list[Any] = [argument for node in calls for argument in node.args[:2]]
    found = [x for argument in read if (x := argument.meta["val"]).device.type == "cpu"]
    return list({tuple(map(str, x.shape)): x for x in found}.values())


def looks_convolved(x: Tensor, images: Iterable[Tensor]) -> bool:
    """Whether it has the sizes of one of these images."""
    return x.dim() == 4 and any(have_same_sizes(image.shape, x.shape) for image in images)


def keep_formats(split: Split) -> None:
    """Lets Inductor lay out a backward graph as if no convolution were computed again there."""
    graph, in_channels_last = split.backward.graph, lays_out_images(split.forward.graph)
    for node in graph.find_nodes(op="call_function", target=_aten.convolution.default):
        image: Any = node.args[0]
        is_moved = in_channels_last and image.meta["val"].dim() == 4
        node.target = (_ops.convolution_in_channels_last if is_moved else _ops.convolution).default


def copy_saved_inputs(graph: fx.Graph, matrices: Sequence[fx.Node], place: int) -> None:
    """Copies to channels last what convolutions' gradients read of inputs that are saved as matrices.

    Args:
        matrices: the placeholders of these inputs.
        place: 1 for the images, 2 for the weights.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.convolution_backward.default):
        read: Any = node.args[place]
        if _origin(read) in matrices:
            emit = GraphEmitter(graph, node, read.meta["val"].fake_mode, {"autograd_backward": True})
            node.update_arg(place, emit(_ops.in_channels_last.default, read))


def _origin(node: fx.Node) -> fx.Node:
    while node.target in (_aten.view.default, _ops.after.default):
        (node, *_) = node.all_input_nodes
    return node


def _in_channels_last(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.channels_last)


def _convolution(x: Tensor, weight: Tensor, *settings: Any) -> Tensor:
    found: Tensor = _aten.convolution.default(x, weight, *settings)
    return found


def _convolution_in_channels_last(x: Tensor, weight: Tensor, *settings: Any) -> Tensor:
    last = torch.channels_last
    return _convolution(x.contiguous(memory_format=last), weight.contiguous(memory_format=last), *settings)


for _name, _run in (
    ("convolution", _convolution),
    ("convolution_in_channels_last", _convolution_in_channels_last),
    ("in_channels_last", _in_channels_last),
):
    hide_from_dynamo(_run, and_all_below=True)
    _LIBRARY.impl(_name, _run, "CPU")
    torch.library.register_fake(f"backstash_graph::{_name}", _run, lib=_LIBRARY)

"""Puts an encoding into the forward graph and its decoding into the backward graph, in the place of a saved value.

The encoding stands after the last operator of the forward graph that reads the value, the decoding in front of the
first operator of the backward graph that does. The planes take the place of the value among the forward graph's results
and among the backward graph's inputs, so the order of both, which AOTAutograd relies on, stays as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from backstash.compile.forms.bounded import GraphSzp
from backstash.compile.forms.bounds import emit_gradients
from backstash.compile.forms.choose import FormChoice
from backstash.compile.forms.codecs import Bits
from backstash.compile.forms.kernels import decode_by_kernel, encode_by_kernel
from backstash.compile.graph.convolutions import convolved_images, looks_convolved
from backstash.compile.graph.emit import GraphEmitter, GraphValue
from backstash.compile.graph.layout import have_same_sizes, in_memory_order, is_identity, like_original, memory_order
from backstash.compile.graph.reading import is_view, operator_name, reads_fused
from backstash.compile.graph.values import Member, SavedValue, Split, after_last_use, hint

_aten = torch.ops.aten
UNCHECKED = "saved_tensor_with_no_vc_check"
"""The mark of tensors at the end of the results, whose version autograd does not compare."""


def rewrite(
    split: Split, value: SavedValue, choice: FormChoice, fuses: bool = False, is_apart: bool = False
) -> list[fx.Node]:
    """Carries a choice out on both graphs.

    Args:
        choice: its form; the value is not kept.
        fuses: whether the compiler of the graphs fuses elementwise operators.
        is_apart: whether it is decoded for each call of a library that reads it, so that it is not held in between.

    Returns:
        The planes in the forward graph.
    """
    planes, tests = _encode(split, value, choice, fuses)
    members = value.members
    first = members[0]
    mark = bool(first.node.meta.get(UNCHECKED, False))
    flat = [*planes, *(plane for _, plane in tests)]
    for plane in flat:
        if mark:
            plane.meta[UNCHECKED] = True
    _replace_results(split, value, flat)
    inputs = _replace_inputs(split, members, flat)
    outcomes = list(zip((node for node, _ in tests), inputs[len(planes) :], strict=True))
    _decode(split, value, choice, inputs[: len(planes)], outcomes, fuses, is_apart)
    for member in members:
        split.backward.graph.erase_node(member.placeholder)
    _show_gradients(split, value, choice)
    return flat


def planes_nbytes(planes: Sequence[fx.Node]) -> int:
    """Bytes of planes, with hints in the place of symbols."""
    return sum(_nbytes(plane.meta["val"]) for plane in planes)


def _nbytes(x: torch.Tensor) -> int:
    total = x.element_size()
    for size in x.shape:
        total *= hint(size)
    return total


def _encode(
    split: Split, value: SavedValue, choice: FormChoice, fuses: bool
) -> tuple[list[fx.Node], list[tuple[fx.Node, fx.Node]]]:
    """The planes in the forward graph, and for each comparison of the backward graph the plane of its outcome."""
    base, graph = value.base, split.forward.graph
    inputs = {twin for node in choice.tests for twin in _inputs(split, node)}
    emit = GraphEmitter(graph, after_last_use(value, inputs), value.fake_mode, fuses=fuses)
    ordered: GraphValue = None
    planes: list[fx.Node] = []
    if choice.codec is not None:
        ordered = in_memory_order(emit, base)
        planes = list(encode_by_kernel(emit, choice.codec, ordered) or choice.codec.encode(emit, ordered))
    tests = []
    for node in choice.tests:
        result = _in_forward(split, emit, node)
        (plane,) = Bits().encode(emit, in_memory_order(emit, result))
        tests.append((node, plane))
    # A plane that is a view of the value would keep it alive.
    return [_own(emit, plane, value) for plane in planes], tests


def _inputs(split: Split, node: fx.Node) -> Iterator[fx.Node]:
    """The nodes of the forward graph from which a node of the backward graph can be computed there."""
    if node in split.twins:
        yield split.twins[node]
        return
    for argument in node.all_input_nodes:
        yield from _inputs(split, argument)


def _in_forward(split: Split, emit: GraphEmitter, node: fx.Node) -> fx.Node:
    """A node of the forward graph that has the value of a node of the backward graph."""
    if node in split.twins:
        return split.twins[node]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: _in_forward(split, emit, argument))
    return emit(node.target, *args, **kwargs)  # type: ignore[arg-type]


def _own(emit: GraphEmitter, plane: fx.Node, value: SavedValue) -> fx.Node:
    storage = plane.meta["val"].untyped_storage()._cdata
    if storage != value.tensor.untyped_storage()._cdata:
        return plane
    return emit(_aten.clone.default, plane)


def _replace_results(split: Split, value: SavedValue, planes: Sequence[fx.Node]) -> None:
    """The planes stand where the first member stood; the other members are no results any more."""
    (output,) = split.forward.graph.find_nodes(op="output")
    results, descriptions = list(output.args[0]), list(output.meta.get("desc") or ())
    traces = list(output.meta.get("output_stack_traces") or ())
    gone = {member.node for member in value.members}
    kept: list[int | fx.Node] = []
    placed = False
    for position, result in enumerate(results):
        if position < split.outputs or result not in gone:
            kept.append(position)
        elif not placed:
            placed = True
            kept.extend(planes)
    output.args = (tuple(results[item] if isinstance(item, int) else item for item in kept),)
    sample = next(position for position, result in enumerate(results) if position >= split.outputs and result in gone)
    if descriptions:
        output.meta["desc"] = [descriptions[item if isinstance(item, int) else sample] for item in kept]
    if traces:
        output.meta["output_stack_traces"] = [traces[item] if isinstance(item, int) else None for item in kept]


def number_results(split: Split) -> None:
    """Has the descriptions of saved results carry their number among these, when all values have been rewritten."""
    (output,) = split.forward.graph.find_nodes(op="output")
    descriptions = [copy.copy(description) for description in output.meta.get("desc") or ()]
    for number, description in enumerate(descriptions[split.outputs :]):
        if hasattr(description, "idx"):
            object.__setattr__(description, "idx", number)
    if descriptions:
        output.meta["desc"] = descriptions


def _replace_inputs(split: Split, members: Sequence[Member], planes: Sequence[fx.Node]) -> list[fx.Node]:
    """Inputs of the backward graph for the planes, in front of the first member's."""
    graph = split.backward.graph
    inputs = []
    with graph.inserting_before(members[0].placeholder):
        for plane in planes:
            node = graph.placeholder(plane.name)
            # The generated code names its arguments by target: one that is another node's name would be overwritten.
            node.target = node.name
            node.meta["val"] = plane.meta["val"]
            if plane.meta.get(UNCHECKED):
                node.meta[UNCHECKED] = True
            inputs.append(node)
            split.twins[node] = plane
    return inputs


def _decode(
    split: Split,
    value: SavedValue,
    choice: FormChoice,
    planes: Sequence[fx.Node],
    tests: Sequence[tuple[fx.Node, fx.Node]],
    fuses: bool,
    is_apart: bool,
) -> None:
    """Decodes in front of the first reader, and lets every reader read what was decoded."""
    graph, fake_mode = split.backward.graph, value.fake_mode
    meta = {"autograd_backward": True}
    for node, plane in tests:
        emit = GraphEmitter(graph, node, fake_mode, meta, fuses)
        original = node.meta["val"]
        order = memory_order(original)
        assert order is not None
        sizes = original.permute(order)
        outcome = like_original(emit, Bits().decode(emit, (plane,), sizes), original)
        node.replace_all_uses_with(outcome)
        _erase(node)
    if choice.codec is None:
        return
    order = memory_order(value.tensor)
    assert order is not None
    users = {user for member in value.members for user in member.placeholder.users}
    ordered_users = [node for node in graph.nodes if node in users]
    calls = [user for user in ordered_users if is_apart and not (reads_fused(user) or is_view(user))]
    others = [user for user in ordered_users if user not in calls]
    may_be_image = value.tensor.dim() == 4 and is_identity(order)
    is_whole = all(have_same_sizes(member.node.meta["val"].shape, value.tensor.shape) for member in value.members)
    is_image = may_be_image and is_whole and fuses and not any(map(is_view, ordered_users))
    is_image = is_image and looks_convolved(value.tensor, convolved_images(graph))
    for readers in filter(None, (others, *([call] for call in calls))):
        first = readers[0]
        emit = GraphEmitter(graph, first, fake_mode, meta, fuses)
        like, ordered = value.tensor.permute(order), None
        if first in calls or is_image:
            channels_last = is_image or (may_be_image and operator_name(first) == "aten::convolution_backward")
            ordered = decode_by_kernel(emit, choice.codec, planes, like, channels_last)
        if ordered is None:
            ordered = choice.codec.decode(emit, planes, like)
        for member in value.members:
            if any(user in readers for user in member.placeholder.users):
                view = _view(emit, ordered, member.node.meta["val"], value.tensor)
                member.placeholder.replace_all_uses_with(view, delete_user_cb=set(readers).__contains__)
                split.twins[view] = member.node


def _show_gradients(split: Split, value: SavedValue, choice: FormChoice) -> None:
    """Behind each layer whose gradients the policy is shown, a call that shows them."""
    if not choice.layers:
        return
    order = {node: place for place, node in enumerate(split.backward.graph.nodes)}
    for number, layer in enumerate(choice.layers):
        assert isinstance(choice.codec, GraphSzp)
        last = max(layer.weight_gradient, layer.gradient, key=lambda node: order[node])
        emit = GraphEmitter(split.backward.graph, last.next, value.fake_mode, {"autograd_backward": True})
        emit_gradients(emit, layer, number, choice.codec.place)


def _erase(node: fx.Node) -> None:
    """Removes a node that nobody uses, and what was computed for it alone."""
    arguments = node.all_input_nodes
    node.graph.erase_node(node)
    for argument in arguments:
        if not argument.users and argument.op == "call_function":
            _erase(argument)


def _view(emit: GraphEmitter, ordered: GraphValue, view: torch.Tensor, whole: torch.Tensor) -> GraphValue:
    """A member: the decoded value with the member's sizes, strides and offset."""
    covers = hint(view.storage_offset()) == 0 and _nbytes(view) == _nbytes(whole)
    if covers and memory_order(view) is not None:
        return like_original(emit, ordered, view)
    return emit(_aten.as_strided.default, ordered, list(view.shape), list(view.stride()), view.storage_offset())

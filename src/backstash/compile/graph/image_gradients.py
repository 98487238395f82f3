"""A convolution's two gradients by two calls, so that its images are gone before the images' gradient is there.

``convolution_backward`` computes the gradients of the weight and of the images together: it holds the images, which may
have been decoded or computed again for it alone, beside their gradient of the same size. On a CPU the library computes
one after the other anyway, so two calls give the same bits. Of what only the other gradient depends on a call reads the
sizes and the order in memory: it is given zeros that take no memory.
"""

from __future__ import annotations

import copy
import mmap
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from backstash.compile.graph.emit import GraphEmitter
from backstash.compile.graph.reading import arguments_of
from backstash.compile.graph.values import is_tensor_node, spec_of
from backstash.torch_internals import hide_from_dynamo

_aten = torch.ops.aten
_LIBRARY = torch.library.Library("backstash_graph", "FRAGMENT")
_TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)
_LIBRARY.define("unread_images(Tensor images) -> Tensor", tags=_TAGS)
_LIBRARY.define("unread_weight(Tensor weight, Tensor images) -> Tensor", tags=_TAGS)
_LIBRARY.define("after(Tensor(a) x, Tensor other) -> Tensor(a)", tags=_TAGS)
_ops: Any = torch.ops.backstash_graph


def split_convolutions(graph: fx.Graph) -> int:
    """Splits every such call for images on a CPU in a backward graph; returns how many there are."""
    found = list(graph.find_nodes(op="call_function", target=_aten.convolution_backward.default))
    calls = [node for node in found if is_split(node)]
    for node in calls:
        arguments: Any = node.args
        gradient, images, weight, *settings, mask = arguments
        mode = gradient.meta["val"].fake_mode
        emit = GraphEmitter(graph, node, mode, _facts(node))
        unread = emit(_ops.unread_images.default, images)
        no_weight = emit(_ops.unread_weight.default, weight, images)
        call: Any = node.target
        of_weight = emit(call, gradient, images, no_weight, *settings, [False, *mask[1:]])
        parts = {place: emit(operator.getitem, of_weight, place) for place in (1, 2)}
        # Otherwise a compiler would copy the weight to channels last while the images are still there.
        late = emit(_ops.after.default, weight, parts[1])
        of_images = emit(call, gradient, unread, late, *settings, [True, False, False])
        parts[0] = emit(operator.getitem, of_images, 0)
        for reader in list(node.users):
            reader.replace_all_uses_with(parts[reader.args[1]])
            graph.erase_node(reader)
        graph.erase_node(node)
        if not parts[2].users:
            graph.erase_node(parts[2])
    return len(calls)


def is_split(node: fx.Node) -> bool:
    """Whether a call is split: images on a CPU of which both gradients are asked for."""
    if (
        node.target is not _aten.convolution_backward.default
        or len(node.args) != 11
        or not is_tensor_node(node.args[0])
    ):
        return False
    named = arguments_of(node)
    parts = all(reader.target is operator.getitem for reader in node.users)
    value = named["grad_output"].meta["val"]
    return parts and all(named["output_mask"][:2]) and value.device.type == "cpu" and value.dim() == 4


def scratch_nbytes(node: fx.Node) -> int:
    """Bytes that the library holds during a call of a split one beside operands and results, copied weights excluded.

    For the gradient of a weight, which is computed when the call is, these are oneDNN's own result, the same in the
    order of the program, and as a tensor; a fourth one was counted on networks. For that of images, which is computed
    when its result is, it is the weight. The images of a depthwise convolution are not in channels last (see
    :func:`is_in_rows`): oneDNN copies them and the gradient, and orders its result by another copy.
    """
    if is_split(node):
        named = arguments_of(node)
        operands = ("input", "grad_output") if is_in_rows(node) else ()
        times = 4 if _is_reordered(node) else 1
        return times * _nbytes(named["weight"]) + sum(_nbytes(named[name]) for name in operands)
    call = node.args[0] if node.target is operator.getitem else None
    if isinstance(call, fx.Node) and node.args[1] == 0 and is_split(call) and _is_reordered(call):
        return _nbytes(arguments_of(call)["weight"]) + (_nbytes(node) if is_in_rows(call) else 0)
    return 0


def is_in_rows(node: fx.Node) -> bool:
    """Whether Inductor lays out images and gradient of a call contiguously, as it does for depthwise convolutions."""
    named = arguments_of(node)
    weight = named["weight"].meta["val"]
    return bool(named["groups"] != 1) and weight.dim() == 4 and weight.shape[1] == 1


def _nbytes(node: fx.Node) -> int:
    return spec_of(node.meta["val"]).nbytes


def _is_reordered(node: fx.Node) -> bool:
    """Whether the library changes the order of a weight; of one pixel with a step of one it multiplies matrices."""
    named = arguments_of(node)
    sizes = named["weight"].meta["val"].shape[2:]
    return not all(size == 1 for size in (*sizes, *named["stride"], *named["dilation"]))


def _facts(node: fx.Node) -> dict[str, Any]:
    return {name: copy.copy(fact) for name, fact in node.meta.items() if name not in ("val", "tensor_meta")}


def _unread_images(images: Tensor) -> Tensor:
    return unread(images, images.shape, images.stride())


def _unread_weight(weight: Tensor, images: Tensor) -> Tensor:
    like = _weight_like(torch.empty_strided(weight.shape, weight.stride(), device="meta"), images)
    return unread(weight, like.shape, like.stride())


def unread(x: Tensor, sizes: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Zeros of a tensor's dtype that take no memory as long as nobody reads them."""
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if x.numel() else 0
    pages = mmap.mmap(-1, (last + 1) * x.element_size())
    return torch.frombuffer(pages, dtype=x.dtype).as_strided(sizes, strides)


def _images_like(images: Tensor) -> Tensor:
    return torch.empty_strided(images.shape, images.stride(), dtype=images.dtype, device=images.device)


def _weight_like(weight: Tensor, images: Tensor) -> Tensor:
    """In channels last where the images are, because the library would copy it to that."""
    last = torch.channels_last
    in_order = images.is_contiguous() or not images.is_contiguous(memory_format=last)
    if in_order or weight.is_contiguous(memory_format=last):
        return torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device)
    return torch.empty_like(weight, memory_format=last)


def _after(x: Tensor, other: Tensor) -> Tensor:
    """A view of ``x`` that is not there before the other one is."""
    # A view of the same sizes may change the strides of dimensions of one element.
    view: Tensor = torch.ops.aten.alias.default(x)
    return view


hide_from_dynamo(_after, and_all_below=True)
_LIBRARY.impl("after", _after, "CompositeExplicitAutograd")
torch.library.register_fake("backstash_graph::after", _after, lib=_LIBRARY)

for _name, _run, _like in (
    ("unread_images", _unread_images, _images_like),
    ("unread_weight", _unread_weight, _weight_like),
):
    hide_from_dynamo(_run, and_all_below=True)
    _LIBRARY.impl(_name, _run, "CPU")
    torch.library.register_fake(f"backstash_graph::{_name}", _like, lib=_LIBRARY)

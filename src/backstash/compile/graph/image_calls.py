"""A convolution's two gradients by two calls with the operands, and the bits, that Inductor's one call has.

:mod:`backstash.compile.graph.image_gradients` splits the call in the graph. But Inductor decides on the layout of
operands when it lowers the call, from all of them, and a convolution with groups has other bits in another layout.
Under an exact policy the graph therefore keeps the call, with a mark, and it is split once the operands are laid out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from backstash.compile.graph.image_gradients import is_split, unread
from backstash.torch_internals import (
    format_of,
    hide_from_dynamo,
    in_rows,
    inductor_lowerings,
    lowered_call,
    lowered_convolutions,
)

_aten = torch.ops.aten
_MARK = "backstash_two_calls"
_LIBRARY = torch.library.Library("backstash_graph", "FRAGMENT")
_SETTINGS = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups"
)
_LIBRARY.define(
    f"gradient_of_images(Tensor gradient, Tensor weight, Tensor after, SymInt[] sizes, SymInt[] strides, {_SETTINGS}) "
    "-> Tensor"
)
_ops: Any = torch.ops.backstash_graph


def can_call_twice() -> bool:
    """Whether this torch lays out the operands before it calls the library. Imports Inductor."""
    return lowered_convolutions() is not None


def call_twice(graph: fx.Graph) -> int:
    """Lets Inductor make two calls of each such node of a backward graph; returns how many there are."""
    found = graph.find_nodes(op="call_function", target=_aten.convolution_backward.default)
    calls = [node for node in found if is_split(node)]
    if not calls or not can_call_twice():
        return 0
    lowered = lowered_convolutions()
    if not hasattr(lowered.aten_convolution_backward_fallback, "is_ours"):
        lowered.aten_convolution_backward_fallback = _in_two_calls(lowered.aten_convolution_backward_fallback)
    for node in calls:
        node.meta[_MARK] = True
    return len(calls)


def _in_two_calls(once: Callable[..., Any]) -> Callable[..., Any]:
    """What Inductor calls when it has laid out the operands."""

    def call(gradient: Any, images: Any, weight: Any, biases: Any, *settings: Any) -> Any:
        node, (_, unordered, *_) = lowered_call()
        if not node.meta.get(_MARK):
            return once(gradient, images, weight, biases, *settings)
        *rest, mask = settings
        if _is_copied(images, weight):
            images = in_rows(unordered)
        of_weight = once(gradient, images, weight, biases, *rest, [False, *mask[1:]])
        handler = inductor_lowerings().fallback_handler(_ops.gradient_of_images.default, add_to_fallback_set=False)
        of_images = handler(gradient, weight, of_weight[1], images.get_size(), images.get_stride(), *rest)
        return of_images, *of_weight[1:]

    call.is_ours = True  # type: ignore[attr-defined]
    return call


def _is_copied(images: Any, weight: Any) -> bool:
    """Whether the library copies the images to a contiguous tensor, because they have neither of its two formats."""
    rows = torch.contiguous_format
    if (
        not format_of(images.get_size(), images.get_stride())
        == format_of(weight.get_size(), weight.get_stride())
        == rows
    ):
        return False
    return not torch.empty_strided(
        [int(size) for size in images.get_size()], [int(stride) for stride in images.get_stride()], device="meta"
    ).is_contiguous()


def _gradient_of_images(
    gradient: Tensor, weight: Tensor, after: Tensor, sizes: list[int], strides: list[int], *settings: Any
) -> Tensor:
    """The gradient of images that have these sizes and strides, computed after another result."""
    return _call(gradient, unread(gradient, sizes, strides), weight, settings)


def _like_it(
    gradient: Tensor, weight: Tensor, after: Tensor, sizes: list[int], strides: list[int], *settings: Any
) -> Tensor:
    return _call(gradient, gradient.new_empty_strided(sizes, strides), weight, settings)


def _call(gradient: Tensor, images: Tensor, weight: Tensor, settings: Any) -> Tensor:
    of_images: Tensor
    of_images, _, _ = _aten.convolution_backward.default(
        gradient, images, weight, None, *settings, [True, False, False]
    )
    return of_images


hide_from_dynamo(_gradient_of_images, and_all_below=True)
_LIBRARY.impl("gradient_of_images", _gradient_of_images, "CPU")
torch.library.register_fake("backstash_graph::gradient_of_images", _like_it, lib=_LIBRARY)

"""Values of the forward pass that the backward graph reads, but not before it needs them.

A compiler may decode a value, or compute it again, as soon as what it is computed from is there, which for saved values
is at once: its scheduler fuses that with an earlier kernel that reads the same value, or puts it before a kernel that
frees memory. Under a budget every such value waits for the gradient that is there before its reader runs: it is read
through a view that an operator of ours returns, which has that gradient among its arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from backstash.integrations.compile.effect import gradient_nodes
from backstash.integrations.compile.emit import GraphEmitter
from backstash.integrations.compile.reading import is_view, name_of, reads_fused
from backstash.integrations.compile.values import is_tensor, spec_of
from backstash.torch_internals import hide_from_dynamo

_LIBRARY = torch.library.Library("backstash_graph", "FRAGMENT")
_LIBRARY.define(
    "after(Tensor(a) x, Tensor gradient) -> Tensor(a)",
    tags=(torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag),
)
AFTER: Any = torch.ops.backstash_graph.after.default
"""Returns a view of its first argument when the second one is there."""

_LEAST_NBYTES = 64 << 10
"""Values that are smaller may be read at any time."""


def wait_for_gradients(graph: fx.Graph) -> int:
    """Lets what a backward graph reads for values that depend on no gradient wait; returns how many views there are.

    Args:
        graph: computes every such value in front of its first reader.
    """
    gradients = gradient_nodes(graph)
    latest: fx.Node | None = None
    found: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node in gradients:
            if _is_stored(node):
                latest = node
            continue
        if latest is None:
            continue
        for source in node.all_input_nodes:
            if source.op != "placeholder" or source in gradients or not _is_large(source):
                continue
            view = found.get((source, latest))
            if view is None:
                emit = GraphEmitter(graph, node, source.meta["val"].fake_mode, {"autograd_backward": True})
                view = found[source, latest] = emit(AFTER, source, latest)
            node.replace_input_with(source, view)
    return len(found)


def _is_stored(node: fx.Node) -> bool:
    """Whether a compiler stores a value whoever reads it."""
    if not is_tensor(node) or is_view(node):
        return False
    is_read_twice = len(node.users) > 1 and any(name_of(user) == "aten::convolution_backward" for user in node.users)
    return is_read_twice or not reads_fused(node)


def _is_large(node: fx.Node) -> bool:
    return is_tensor(node) and spec_of(node.meta["val"]).nbytes >= _LEAST_NBYTES


def _after(x: Tensor, gradient: Tensor) -> Tensor:
    # A view of the same sizes may change the strides of dimensions of one element.
    view: Tensor = torch.ops.aten.alias.default(x)
    return view


hide_from_dynamo(_after, and_all_below=True)
_LIBRARY.impl("after", _after, "CompositeExplicitAutograd")
torch.library.register_fake("backstash_graph::after", _after, lib=_LIBRARY)

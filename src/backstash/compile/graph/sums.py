"""Sums of a product and another value, which Inductor computes by one call of a library, in the other value's memory.

Inductor turns ``product + value`` into ``addmm(value, ...)``: the library copies the value to a third memory and adds
the product there. So the product's operands are held until the value is there, together with the value and its copy. A
word embedding that is also the last layer has the largest such sum: the operands are the logits' gradient and the
hidden states, and the value is the gradient of the embedding, which comes last in a backward pass. The same call of the
library without the copy gives the same bits, because the library itself copies first and then adds to the copy.

Where bits need not be kept, because a policy rounds anyway, a product that takes less memory than its operands may be
computed as soon as these are there, and added later.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import Tensor, fx

from backstash.compile.graph.effect import gradient_nodes
from backstash.compile.graph.emit import GraphEmitter
from backstash.compile.graph.layout import have_same_sizes, memory_order
from backstash.compile.graph.reading import is_elementwise, is_view, operator_name
from backstash.compile.graph.values import is_tensor_node, spec_of
from backstash.torch_internals import adds_products_by_library, hide_from_dynamo, inductor_lowerings

_LIBRARY = torch.library.Library("backstash_graph", "FRAGMENT")
_LIBRARY.define("add_product_(Tensor(a!) total, Tensor left, Tensor right) -> ()")
_ops: Any = torch.ops.backstash_graph

_LEAST_NBYTES = 64 << 10
"""Below this a copy takes less time than a call of an operator of ours takes longer than one of a library."""


def added_product(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The product and the other summand, if Inductor makes one call of a library of the product and this addition."""
    if operator_name(node) != "aten::add" or len(node.args) != 2 or node.kwargs:
        return None
    for other, product in (node.args, node.args[::-1]):  # of two products Inductor adds the second to the first
        if not is_tensor_node(other) or not isinstance(product, fx.Node) or not isinstance(other, fx.Node):
            continue
        if operator_name(product) != "aten::mm" or len(product.users) != 1:
            continue
        value, found = other.meta["val"], product.meta["val"]
        is_fused = value.device.type == "cpu" or any(user.op == "output" for user in node.users)
        if is_fused and value.dtype == found.dtype and have_same_sizes(value.shape, found.shape):
            return product, other
    return None


def reused_summand(node: fx.Node, min_nbytes: int = _LEAST_NBYTES) -> fx.Node | None:
    """The summand in whose memory an addition of a product is computed; None if it is not, or is no such addition.

    The summand is computed inside the graph, nobody else reads it, and it lies in memory as the sum does.
    """
    found = added_product(node)
    if found is None or not adds_products_by_library():
        return None
    _, other = found
    is_own = other.op == "call_function" and not is_view(other) and len(other.users) == 1
    # A constant has no memory of its own: whoever reads it fills it in.
    if not is_own or operator_name(other) == "aten::full" or spec_of(node.meta["val"]).nbytes < min_nbytes:
        return None
    rows = (0, 1)
    return other if memory_order(other.meta["val"]) == memory_order(node.meta["val"]) == rows else None


def add_products_in_place(graph: fx.Graph, min_nbytes: int = _LEAST_NBYTES) -> int:
    """Lets every such sum be computed in the memory of its summand; returns how many there are.

    Inductor sees a call that writes to a memory, and copies that memory before if somebody needs it after all.
    """
    count = 0
    for node in list(graph.nodes):
        total = reused_summand(node, min_nbytes)
        found = added_product(node)
        if total is None or found is None:
            continue
        product, _ = found
        left, right = product.args
        emit = GraphEmitter(graph, node, node.meta["val"].fake_mode, {"autograd_backward": True})
        operands: dict[str, Any] = {"left": left, "right": right, "_total_base_index": 0, "_all_bases": [total]}
        call = emit(torch.ops.higher_order.auto_functionalized_v2, _ops.add_product_.default, **operands)
        result = emit(operator.getitem, call, 1)
        result.meta = copy.copy(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        graph.erase_node(product)
        count += 1
    return count


def early_products(graph: fx.Graph) -> frozenset[fx.Node]:
    """The sums whose product takes less memory than a gradient that it is computed from."""
    gradients = gradient_nodes(graph)
    found = set[fx.Node]()
    for node in graph.nodes:
        pair = added_product(node)
        if pair is None:
            continue
        operands = [each for each in pair[0].all_input_nodes if each in gradients and each.op == "call_function"]
        nbytes = spec_of(node.meta["val"]).nbytes
        if nbytes >= _LEAST_NBYTES and any(spec_of(each.meta["val"]).nbytes > nbytes for each in operands):
            found.add(node)
    return frozenset(found)


def stored_sums(graph: fx.Graph) -> list[fx.Node]:
    """The elementwise results of several readers that are computed from a sum of gradients.

    A residual connection has one in each block. Inductor would leave the sum to each of its readers, among them the sum
    of the block below, and hold all summands until the last of these.
    """
    gradients = gradient_nodes(graph)
    found = []
    for node in graph.nodes:
        if node not in gradients or len(node.users) < 2 or not is_tensor_node(node) or not is_elementwise(node):
            continue
        spec = spec_of(node.meta["val"])
        # What is stored in half precision is rounded, which a fused sum is not: the bits would be others.
        if spec.nbytes >= _LEAST_NBYTES and spec.dtype.itemsize >= 4 and _adds(node, gradients):
            found.append(node)
    return found


def _adds(node: fx.Node, gradients: set[fx.Node]) -> bool:
    sizes = node.meta["val"].shape
    waiting = [node]
    while waiting:
        node = waiting.pop()
        among = [each for each in node.all_input_nodes if each in gradients and is_tensor_node(each)]
        among = [each for each in among if have_same_sizes(each.meta["val"].shape, sizes)]
        if operator_name(node) == "aten::add" and len(among) == 2:
            return True
        waiting += [each for each in among if len(each.users) == 1 and is_elementwise(each)]
    return False


def _stored(value: Any) -> Any:
    value.realize()
    return value


def store_sums(graph: fx.Graph) -> None:
    """Has Inductor store what :func:`stored_sums` finds."""
    lowerings = inductor_lowerings()
    if _ops.stored.default not in lowerings.lowerings:
        lowerings.register_lowering(_ops.stored.default, type_promotion_kind=None)(_stored)
    for node in stored_sums(graph):
        stored = GraphEmitter(graph, node.next, node.meta["val"].fake_mode, {"autograd_backward": True})
        readers = set(node.users)
        result = stored(_ops.stored.default, node)
        node.replace_all_uses_with(result, delete_user_cb=readers.__contains__)


def take_apart(graph: fx.Graph) -> None:
    """Has Inductor compute the products of :func:`early_products` and their sums by calls of their own.

    The sum is written as a difference from the negative, which is the same number. Inductor fuses no such product.
    """
    for node in early_products(graph):
        pair = added_product(node)
        assert pair is not None
        product, other = pair
        emit = GraphEmitter(graph, node, node.meta["val"].fake_mode, {"autograd_backward": True})
        result = emit(torch.ops.aten.sub.Tensor, other, emit(torch.ops.aten.neg.default, product))
        result.meta = copy.copy(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    with torch.no_grad():
        torch.addmm(total, left, right, out=total)


_LIBRARY.define("stored(Tensor(a) x) -> Tensor(a)")
_LIBRARY.impl("stored", lambda x: x.view(x.shape), "CompositeExplicitAutograd")
torch.library.register_fake("backstash_graph::stored", lambda x: x.view(x.shape), lib=_LIBRARY)
hide_from_dynamo(_add_product_, and_all_below=True)
_LIBRARY.impl("add_product_", _add_product_, "CompositeExplicitAutograd")
torch.library.register_fake("backstash_graph::add_product_", lambda *_: None, lib=_LIBRARY)

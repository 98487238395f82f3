"""A joint graph as a planner sees it: what each value is computed from, its bytes, and the time to compute it again.

Views are not values of their own: whoever reads a view reads the value behind it. Values are numbered in the order of
the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from backstash.integrations.compile.effect import gradient_nodes
from backstash.integrations.compile.reading import is_view, name_of
from backstash.integrations.compile.values import hint, is_tensor, spec_of

BYTES_PER_SECOND, FLOPS_PER_SECOND = 10e9, 100e9
"""Of two cores with AVX-512. Only their ratio matters: it says how many bytes a recomputed product is worth."""

_SECONDS_PER_RANDOM_NUMBER = 5e-9

PRODUCTS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::convolution",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
    }
)
"""Operators for which a compiler calls a library, the same one in forward and backward."""

MOVES = frozenset(
    {
        *(f"aten::{name}" for name in ("clone", "_to_copy", "cat", "constant_pad_nd", "index", "gather", "embedding")),
        *(f"aten::{name}" for name in ("index_select", "_unsafe_index", "slice_scatter", "select_scatter", "flip")),
        *(f"aten::{name}" for name in ("roll", "repeat", "full", "full_like", "arange", "scalar_tensor", "avg_pool2d")),
        *(f"aten::{name}" for name in ("zeros_like", "ones_like", "empty", "empty_like", "new_zeros", "new_full")),
        *(f"aten::{name}" for name in ("max_pool2d_with_indices", "reflection_pad2d", "replication_pad2d")),
        *("prims::iota", "prims::convert_element_type", "prims::_low_memory_max_pool_with_offsets"),
        "prims::_low_memory_max_pool_offsets_to_indices",
    }
)
"""Operators that copy or pick elements, so that no order of additions changes their bits."""

RANDOM = frozenset({"prims::inductor_random", "prims::inductor_randint"})
"""Random numbers that a seed determines, each from its place in the tensor."""

_REDUCTIONS = frozenset({"aten::sum", "aten::mean", "aten::amax", "aten::amin", "aten::var_mean", "aten::any"})


class Joint:
    """A joint graph, with its values numbered.

    Attributes:
        graph: the graph.
        compiler_fuses: whether the compiler fuses elementwise operators.
        nodes: the node of each value.
        reads: for each value the values that it is computed from.
        nbytes: bytes of each value; 0 for inputs, for what is no tensor, and for calls with several results.
        seconds: estimated time to compute each value.
        is_gradient: whether it depends on an incoming gradient.
        is_forward: whether a result of the forward pass depends on it.
        is_input: whether it is an input of the graph.
        fuses: whether a compiler computes it inside the kernel of whoever reads it.
        is_shared: whether several operators read it.
        reads_fused: whether a compiler reads others' results without their ever being stored.
        results: the values that the forward pass returns to the program.
        gradients: the values that the backward pass returns.

    Args:
        graph: the joint graph.
        outputs: how many results of the graph are the forward pass's.
        fuses: whether the compiler fuses elementwise operators.
    """

    def __init__(self, graph: fx.Graph, outputs: int, fuses: bool) -> None:
        self.graph = graph
        self.compiler_fuses = fuses
        self.nodes: list[fx.Node] = []
        self.reads: list[tuple[int, ...]] = []
        self._numbers: dict[fx.Node, int] = {}
        dependent = gradient_nodes(graph)
        for node in graph.nodes:
            if node.op == "output":
                continue
            if _is_alias(node):
                behind = self.number(node.args[0])
                if behind is not None:
                    self._numbers[node] = behind
                    continue
            if _is_number(node):
                continue
            self._numbers[node] = len(self.nodes)
            self.nodes.append(node)
            self.reads.append(tuple(dict.fromkeys(self._all(node.all_input_nodes))))
        (output,) = graph.find_nodes(op="output")
        returned = list(output.args[0])
        self.results = frozenset(self._all(returned[:outputs]))
        self.gradients = frozenset(self._all(returned[outputs:]))
        self.is_gradient = [node in dependent for node in self.nodes]
        self.is_input = [node.op in ("placeholder", "get_attr") for node in self.nodes]
        self.nbytes = [
            0 if is_input else _nbytes(node) for is_input, node in zip(self.is_input, self.nodes, strict=True)
        ]
        self.reads_fused = [fuses and _reads_fused(node) for node in self.nodes]
        # A constant is filled in by the kernel that reads it, or is the memory that an index_put writes to.
        constants = {"aten::full"} if fuses else set()
        self.nbytes = [
            0 if name_of(node) in constants else nbytes for node, nbytes in zip(self.nodes, self.nbytes, strict=True)
        ]
        self.is_shared = [len(node.users) > 1 for node in self.nodes]
        self.fuses = [fuses and is_elementwise(node) for node in self.nodes]
        self.is_forward = [False] * len(self.nodes)
        for number in self.ancestors(number for number in self.results if not self.is_gradient[number]):
            self.is_forward[number] = True
        self.seconds = [self._seconds(number) for number in range(len(self.nodes))]
        self._repeats: list[bool] = []
        for number, node in enumerate(self.nodes):
            whole = self._repeats[self.reads[number][0]] if node.target is operator.getitem else True
            self._repeats.append(whole and (self.is_input[number] or repeats(node, fuses)))

    def number(self, node: Any) -> int | None:
        """The number of the value that a node returns or views; None if it is no tensor."""
        return self._numbers.get(node)

    def must_be_saved(self, number: int) -> bool:
        """Whether the backward pass cannot compute the value again, whatever is saved."""
        return not self._repeats[number]

    def ancestors(self, numbers: Iterable[int]) -> set[int]:
        """The values, and all that they are computed from."""
        found: set[int] = set()
        waiting = list(numbers)
        while waiting:
            number = waiting.pop()
            if number not in found:
                found.add(number)
                waiting += self.reads[number]
        return found

    def _all(self, nodes: Iterable[Any]) -> Iterator[int]:
        for node in nodes:
            number = self.number(node) if isinstance(node, fx.Node) else None
            if number is not None:
                yield number

    def _seconds(self, number: int) -> float:
        node = self.nodes[number]
        if self.is_input[number] or node.target is operator.getitem:
            return 0.0
        if name_of(node) in RANDOM:
            return spec_of(node.meta["val"]).numel * _SECONDS_PER_RANDOM_NUMBER
        if self.fuses[number]:  # it is computed where its result is read
            return 0.5 * self.nbytes[number] / BYTES_PER_SECOND
        moved = sum(_nbytes(each) for each in (node, *node.all_input_nodes))
        return moved / BYTES_PER_SECOND + _flops(node) / FLOPS_PER_SECOND


def repeats(node: fx.Node, fuses: bool) -> bool:
    """Whether an operator gives the same bits when it is called again with the same arguments.

    Under a compiler that fuses, a sum may be added up in another order inside another kernel.
    """
    if node.target is operator.getitem:
        return True
    schema, tags = getattr(node.target, "_schema", None), getattr(node.target, "tags", ())
    if schema is None or schema.is_mutable or torch.Tag.nondeterministic_seeded in tags:
        return False
    name = name_of(node)
    if name.partition("::")[0] not in ("aten", "prims"):
        return False
    return not fuses or is_elementwise(node) or is_view(node) or name in PRODUCTS | MOVES | RANDOM


def is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the result is computed from the arguments' elements at the same place."""
    made = {"prims::convert_element_type", "aten::full", "prims::iota"} | RANDOM
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or name_of(node) in made


def _reads_fused(node: fx.Node) -> bool:
    return is_elementwise(node) or name_of(node) in _REDUCTIONS or name_of(node) in MOVES


def _is_alias(node: fx.Node) -> bool:
    return is_view(node) and isinstance(node.args[0], fx.Node)


def _is_number(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def is_write(node: fx.Node) -> bool:
    """Whether an operator writes to its first argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _nbytes(node: fx.Node) -> int:
    return spec_of(node.meta["val"]).nbytes if is_tensor(node) and not is_write(node) else 0


def _flops(node: fx.Node) -> int:
    from torch.utils.flop_counter import flop_registry  # it imports triton

    count: Any = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    return hint(count(*args, **kwargs, out_val=node.meta["val"]))

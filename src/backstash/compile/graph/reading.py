"""The backward graph's need of a saved value, found by a walk over the operators that read it.

In a compiled graph there are no autograd nodes. The rows of :mod:`backstash.formulas` name the operators that read the
same; those that a graph has besides are here. Every one is proven by tests/compile/test_reading.py: the operator is
given what the row allows, and adversarial values for all the rest.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from backstash.formulas import OPERATORS, function_of, mask_of_formula
from backstash.saved import Mask, Need

RANDOM = frozenset({"prims::inductor_random", "prims::inductor_randint"})
"""Random numbers that a seed determines, each from its place in the tensor."""

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

_REDUCTIONS = frozenset({"aten::sum", "aten::mean", "aten::amax", "aten::amin", "aten::var_mean", "aten::any"})

SUMS = frozenset(f"aten::{name}" for name in ("sum", "mean", "var_mean", "var", "prod", "cumsum", "cumprod"))
"""Reductions whose bits depend on the order in which they take their elements."""

LIKE = frozenset(f"aten::{name}_like" for name in ("zeros", "ones", "full", "empty")) | frozenset(
    f"aten::{name}" for name in ("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
)
"""Operators that read sizes, strides, dtype and device of a tensor to make another one like it."""

SIZES = frozenset(f"aten::sym_{name}" for name in ("size", "stride", "numel", "storage_offset"))
"""Operators that return one of a tensor's numbers."""

_COMPARISONS = ("le", "lt", "ge", "gt", "eq", "ne")
TESTS = frozenset(
    getattr(getattr(torch.ops.aten, name), overload) for name in _COMPARISONS for overload in ("Scalar", "Tensor")
)
"""Comparisons, whose result takes a bit per element wherever it is computed."""


@dataclass(frozen=True)
class Reader:
    """One operator of the backward graph that reads a saved value, as it is or through views.

    Attributes:
        through: the node that it reads: the value's placeholder, or the last of the views between.
        argument: the name of the argument; ``"?"`` for an operator without a schema.
        need: how much it reads.
        mask: the bits that it reads, if ``need`` is SIGN.
        function: the function whose derivative alone it reads.
    """

    node: fx.Node
    through: fx.Node
    argument: str
    need: Need
    mask: Mask | None = None
    function: str | None = None

    @property
    def op(self) -> str:
        """The operator's name without its namespace."""
        return operator_name(self.node).removeprefix("aten::")


def operator_name(node: fx.Node) -> str:
    """``aten::mm`` for a call of that operator; the function's name for other calls."""
    schema = getattr(node.target, "_schema", None)
    return str(schema.name) if schema is not None else getattr(node.target, "__name__", str(node.target))


def is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the result is computed from the arguments' elements at the same place."""
    made = {"prims::convert_element_type", "aten::full", "aten::scalar_tensor", "prims::iota"} | RANDOM
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or operator_name(node) in made


def reads_fused(node: fx.Node) -> bool:
    """Whether a compiler that fuses computes what the operator reads where it reads it."""
    return is_elementwise(node) or operator_name(node) in _REDUCTIONS or operator_name(node) in MOVES


def is_view(node: fx.Node) -> bool:
    """Whether the call returns a view of its first argument, which shares its memory."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        parent = node.args[0]
        return isinstance(parent, fx.Node) and is_view(parent)
    schema = getattr(node.target, "_schema", None)
    return (
        schema is not None
        and bool(schema.returns)
        and all(found.alias_info is not None and not found.alias_info.is_write for found in schema.returns)
    )


def is_write(node: fx.Node) -> bool:
    """Whether an operator writes to its first argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def written_inputs(graph: fx.Graph) -> set[fx.Node]:
    """The inputs of a graph that it writes to, or that are written to with one of its results when it has run.

    Note: [inputs that are written to].
    """
    inputs = graph.find_nodes(op="placeholder")
    found = {node.args[0] for node in graph.nodes if is_write(node)}
    (output,) = graph.find_nodes(op="output")
    described = {node.meta["desc"]: node for node in inputs if "desc" in node.meta}
    for description in output.meta.get("desc") or ():
        if type(description).__name__ == "InputMutationAOTOutput":
            source = described.get(description.mutated_input)
            found |= set(inputs) if source is None else {source}
    return {node for node in inputs if node in found}


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of an operator, by name, with the defaults of those that were left out."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {}
    found = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    found.update(zip((argument.name for argument in schema.arguments), node.args, strict=False))
    return found | dict(node.kwargs)


def readers(value: fx.Node) -> Iterator[Reader]:
    """All operators that read a value of the backward graph; views are looked through.

    Args:
        value: a node, such as the placeholder of what the forward graph saved.
    """
    for node in value.users:
        if is_view(node):
            yield from readers(node)
            continue
        named = arguments_of(node)
        names = [name for name, argument in named.items() if _mentions(argument, value)]
        for name in names or ["?"]:
            yield _read(node, value, name, named)


def _read(node: fx.Node, through: fx.Node, argument: str, named: dict[str, Any]) -> Reader:
    name, dtype = operator_name(node), through.meta["val"].dtype
    formula = OPERATORS.get((name, argument))
    if (formula is not None and formula.need is Need.SHAPE) or (argument == "self" and name in LIKE | SIZES):
        return Reader(node, through, argument, Need.SHAPE)
    mask = None if formula is None else mask_of_formula(formula, named.__getitem__, dtype)
    if mask is not None:
        return Reader(node, through, argument, Need.SIGN, mask)
    function = None if formula is None else function_of(formula, named.__getitem__)
    need = Need.VALUE if dtype.is_floating_point or function is not None else Need.INDEX
    return Reader(node, through, argument, need, function=function)


def _mentions(argument: Any, value: fx.Node) -> bool:
    if isinstance(argument, (list, tuple)):
        return any(_mentions(item, value) for item in argument)
    return argument is value

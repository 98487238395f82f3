"""The integers that a node of the forward graph can hold, proven from the operator that computes it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from backstash.compile.graph.reading import arguments_of, is_view, operator_name

_PASS = frozenset({"aten::clone", "aten::_to_copy", "prims::convert_element_type", "aten::detach", "aten::index"})
"""Operators whose result holds integers of their first argument only, in another place, type or number."""


def limit_of(node: fx.Node) -> int | None:
    """A number above every integer that the node can hold, none of which is negative; None if that is not proven."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.dtype.is_floating_point or val.dtype.is_complex:
        return None
    if val.dtype == torch.bool:
        return 2
    if node.op != "call_function":
        return None
    if is_view(node) or operator_name(node) in _PASS:
        source = node.args[0]
        return limit_of(source) if isinstance(source, fx.Node) else None
    index, call = (node.args[1], node.args[0]) if node.target is operator.getitem else (0, node)
    if not isinstance(call, fx.Node) or call.op != "call_function":
        return None
    return _limit(operator_name(call), int(index), call, arguments_of(call))  # type: ignore[arg-type]


def _limit(name: str, index: int, call: fx.Node, named: dict[str, Any]) -> int | None:
    source = named.get("self")
    sizes = source.meta["val"].shape if isinstance(source, fx.Node) and "val" in source.meta else ()
    if name in ("aten::topk", "aten::sort", "aten::max", "aten::min", "aten::median", "aten::mode") and index == 1:
        return _fixed(sizes[named["dim"]]) if len(sizes) and named.get("dim") is not None else None
    if name in ("aten::argmax", "aten::argmin", "aten::argsort"):
        if named.get("dim") is not None:
            return _fixed(sizes[named["dim"]]) if len(sizes) else None
        return _fixed_product(sizes)
    if name in ("aten::max_pool2d_with_indices", "aten::adaptive_max_pool2d") and index == 1:
        return _fixed_product(sizes[-2:])
    if name in ("aten::max_pool3d_with_indices", "aten::adaptive_max_pool3d") and index == 1:
        return _fixed_product(sizes[-3:])
    if name == "prims::_low_memory_max_pool_with_offsets" and index == 1:
        kernel = named["kernel_size"]
        return _fixed_product(kernel)
    if name == "aten::arange" and "end" in named and not named.get("start"):
        return _fixed(named["end"])
    return None


def _fixed(size: Any) -> int | None:
    return size if type(size) is int and size > 0 else None


def _fixed_product(sizes: Any) -> int | None:
    total = 1
    for size in sizes:
        if _fixed(size) is None:
            return None
        total *= size
    return total

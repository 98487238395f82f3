"""Calls of operators, put into a graph or run at once: what encodings in a graph are written with.

An encoding in a graph is a function of an *emitter* and of values. Given a :class:`GraphEmitter`, the values are nodes
and each call adds a node. Given :func:`run_now`, the values are tensors and each call runs, so that tests compare the
same function with the codec that it stands for. Facts that an operator of ours needs are in its call as a text.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from backstash.torch_internals import size_nodes

GraphValue = Any
"""A node of a graph, or a tensor."""

Emitter = Callable[..., GraphValue]
"""``emitter(op, *arguments, **keywords)`` returns the value of a call."""


def run_now(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs the operator on tensors."""
    return op(*args, **kwargs)


def tensor_of(value: GraphValue) -> torch.Tensor:
    """The tensor itself, or the fake tensor that tells a node's shape, strides, dtype and device."""
    found: torch.Tensor = value.meta["val"] if isinstance(value, fx.Node) else value
    return found


def sizes_of(value: GraphValue) -> list[Any]:
    """Sizes of a value, as integers or symbolic integers."""
    return list(tensor_of(value).shape)


def is_multiple(size: Any, of: int) -> bool:
    """Whether a size is known to be a multiple, whatever the symbols in it stand for."""
    return bool(size % of == 0) if isinstance(size, int) else bool(statically_known_true(size % of == 0))


class GraphEmitter:
    """Adds calls to a graph in front of one of its nodes, and runs each on fake tensors to know its result's facts.

    Args:
        before: the node in front of which calls are added.
        fake_mode: the mode of the graph's fake tensors.
        meta: what each new node carries beside its fake result.
        fuses: whether the compiler of the graph makes one loop of elementwise operators, in whose middle nothing is
            stored; an attribute as well.
    """

    def __init__(
        self,
        graph: fx.Graph,
        before: fx.Node,
        fake_mode: Any,
        meta: dict[str, Any] | None = None,
        fuses: bool = False,
    ) -> None:
        self.fuses = fuses
        self._graph = graph
        self._before = before
        self._fake_mode = fake_mode
        self._meta = meta or {}

    def __call__(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Adds a call, and calls that compute the symbolic sizes among its arguments."""
        args = tuple(self._with_size_nodes(argument) for argument in args)
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(op, args, kwargs)
        self._note(node)
        return node

    def _with_size_nodes(self, argument: Any) -> Any:
        """The argument with every symbolic integer replaced by a node that computes it from the graph's inputs."""
        if isinstance(argument, (list, tuple)):
            return type(argument)(self._with_size_nodes(item) for item in argument)
        if not isinstance(argument, torch.SymInt):
            return argument
        with self._graph.inserting_before(self._before):
            size, added = size_nodes(self._graph, argument)
        for node in added:
            self._note(node)
        return size

    def _note(self, node: fx.Node) -> None:
        values = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
        with self._fake_mode:
            node.meta["val"] = node.target(*values[0], **values[1])  # type: ignore[operator]
        node.meta.update(self._meta)


def is_fusing(emit: Emitter) -> bool:
    """Whether what is computed on the way from one value to another is never stored."""
    return isinstance(emit, GraphEmitter) and emit.fuses


def product(sizes: Sequence[Any]) -> Any:
    """The product of sizes, which may be symbolic."""
    total: Any = 1
    for size in sizes:
        total = total * size
    return total


def to_text(facts: Any) -> str:
    """Facts as a text that is an argument of an operator of a graph, from what json can write.

    Inductor writes it into C++ as it is where it is asked for a wrapper in C++, so it holds no quotes and no
    backslashes: it is of letters, digits, ``-``, ``_`` and ``=``.
    """
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(facts).encode())).decode()


def from_text(text: str) -> Any:
    """The facts that a text holds, with lists for tuples."""
    return json.loads(zlib.decompress(base64.urlsafe_b64decode(text)))

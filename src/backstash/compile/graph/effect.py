"""The effect of an error in a saved value on the gradients, followed through the backward graph.

A backward graph is decomposed into small operators, so no table of layers would do. A value is followed through what is
computed of it until a gradient is multiplied with it. On the way it is noted whether a statistic is subtracted, which
makes the error count in units of a deviation; whether a curved function is taken, which magnifies it; and whether
anything else happens, of which the effect is not known.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from backstash.compile.graph.reading import TESTS, Reader, arguments_of, is_view, operator_name
from backstash.formulas import OPERATORS
from backstash.saved import Effect

_MOST_NODES = 64
"""A value that more operators than this are computed from is not followed."""

AFFINE = frozenset({"aten::add", "aten::sub", "aten::neg", "aten::mul", "aten::div", "prims::convert_element_type"})
COPIES = frozenset(
    {"aten::clone", "aten::_to_copy", "prims::convert_element_type", "aten::constant_pad_nd", "aten::relu"}
)
CURVED = frozenset({"aten::erf", "aten::tanh", "aten::sigmoid", "aten::sin", "aten::cos"})


@dataclass(frozen=True)
class _State:
    """What has happened to a value on its way.

    Attributes:
        is_normalised: a statistic was subtracted, or it was scaled by one.
        is_curved: a curved function was taken of it.
        is_square: it is a square times a factor below zero, whose exponential is bounded.
        statistics: the dimensions that the statistics are taken over.
    """

    is_normalised: bool = False
    is_curved: bool = False
    is_square: bool = False
    statistics: tuple[int, ...] = ()

    @property
    def effect(self) -> Effect:
        if self.is_curved:
            return Effect.SENSITIVE
        return Effect.NORMALISED if self.is_normalised else Effect.LINEAR


@dataclass(frozen=True)
class Influence:
    """What is found behind a reader.

    Attributes:
        effect: the worst effect on any gradient.
        statistics: the dimensions over which statistics are taken, of the value as its reader sees it.
        tests: comparisons whose outcome an error could turn. They count for nothing in the effect, because their
            outcomes are stored beside the value.
    """

    effect: Effect
    statistics: tuple[int, ...] = ()
    tests: frozenset[fx.Node] = frozenset()


UNKNOWN, NONE = Influence(Effect.UNKNOWN), Influence(Effect.LINEAR)


def effect_of(reader: Reader, gradients: set[fx.Node]) -> Influence:
    """How an error in what a reader reads changes the gradients.

    Args:
        reader: the operator that reads the value.
        gradients: the nodes of the backward graph that depend on an incoming gradient.
    """
    walk = _Walk(gradients)
    found = walk.read(reader.node, reader.through, reader.argument, _State())
    return replace(found, tests=frozenset(walk.tests))


class _Walk:
    def __init__(self, gradients: set[fx.Node]) -> None:
        self._gradients = gradients
        self._visited = 0
        self.tests: set[fx.Node] = set()

    def follow(self, value: fx.Node, state: _State) -> Influence:
        """The worst effect over all that reads a value which was computed."""
        self._visited += 1
        if self._visited > _MOST_NODES:
            return UNKNOWN
        found: Influence | None = None
        for node in value.users:
            if node.op == "output":
                return UNKNOWN
            names = [name for name, argument in arguments_of(node).items() if argument is value]
            for name in names or ["?"]:
                found = worse(found, self.follow(node, state) if is_view(node) else self.read(node, value, name, state))
        return found or UNKNOWN

    def read(self, node: fx.Node, value: fx.Node, argument: str, state: _State) -> Influence:
        """The effect of an error in ``value``, which ``node`` reads as ``argument``."""
        name, named = operator_name(node), arguments_of(node)
        if node.target in TESTS and node not in self._gradients:
            if not forward_can_compute(node):
                return UNKNOWN
            self.tests.add(node)
            return NONE
        formula = OPERATORS.get((name, argument))
        kind = None if formula is None else formula.effect
        if kind is Effect.NORMALISED:
            return Influence(kind if not state.is_curved else Effect.SENSITIVE, _row_dimensions(node, named))
        if kind is Effect.SENSITIVE or ("attention" in name and argument in ("query", "key", "value", "out")):
            return Influence(Effect.SENSITIVE)
        if kind is Effect.LINEAR:
            others = [other for other in node.all_input_nodes if other is not value]
            if any(other in self._gradients for other in others):
                return Influence(state.effect, state.statistics)
            return self.follow(node, _State(True, True))
        if name in COPIES or (name == "aten::where" and argument != "condition"):
            return UNKNOWN if node in self._gradients else self.follow(node, state)
        if name == "aten::mul":
            return self._product(node, value, named, state)
        if name == "prims::fma":
            return self._multiply_add(node, value, state)
        if name in AFFINE and not (name == "aten::div" and argument == "other"):
            return self._affine(node, value, named, state)
        if name == "aten::pow" and named.get("exponent") in (2, 3):
            return self.follow(node, _State(True, True, named["exponent"] == 2))
        if name in CURVED or (name == "aten::exp" and state.is_square):
            return self.follow(node, _State(True, True))
        return UNKNOWN

    def _product(self, node: fx.Node, value: fx.Node, named: dict[str, Any], state: _State) -> Influence:
        other = named["other"] if named["self"] is value else named["self"]
        if other is value:
            return self.follow(node, _State(True, True, True))
        if not isinstance(other, fx.Node):
            keeps = isinstance(other, (int, float)) and math.isfinite(other)
            return (
                self.follow(node, _State(state.is_normalised, state.is_curved, state.is_square)) if keeps else UNKNOWN
            )
        if other in self._gradients:
            # A factor that is broadcast would have the same error in every term of a sum.
            is_whole = value.meta["val"].numel() == node.meta["val"].numel()
            return Influence(state.effect, state.statistics) if is_whole else UNKNOWN
        return self._affine(node, value, named, state)

    def _multiply_add(self, node: fx.Node, value: fx.Node, state: _State) -> Influence:
        """A product of the first two arguments plus the third one."""
        first, second, added = node.args
        if value is added:
            return UNKNOWN if node in self._gradients else self.follow(node, _State(True, True))
        found = self._product(node, value, {"self": first, "other": second}, state)
        # Of what is added to a product without a gradient it is not known whether it has the same error.
        return (
            found
            if second in self._gradients or first in self._gradients
            else worse(found, Influence(Effect.SENSITIVE))
        )

    def _affine(self, node: fx.Node, value: fx.Node, named: dict[str, Any], state: _State) -> Influence:
        other = named.get("other") if named.get("self") is value else named.get("self")
        if isinstance(other, fx.Node) and isinstance(other.meta.get("val"), torch.Tensor):
            if other in self._gradients:
                return UNKNOWN  # a sum of a value and a gradient is no formula that is known
            mine, theirs = value.meta["val"], other.meta["val"]
            if mine.numel() != node.meta["val"].numel():
                return UNKNOWN
            if theirs.numel() != mine.numel():
                rows = _broadcast_dimensions(theirs, mine)
                return self.follow(node, _State(True, state.is_curved, False, state.statistics or rows))
            # Two values as large as each other: what the other one is computed of is not looked at.
            return self.follow(node, _State(True, True))
        return self.follow(node, state)


def forward_can_compute(node: fx.Node) -> bool:
    """Whether the forward graph can compute what a node of the backward graph has, from what it hands over."""
    waiting, seen = [node], set[fx.Node]()
    while waiting:
        each = waiting.pop()
        if each in seen or each.op == "placeholder":
            continue
        seen.add(each)
        is_plain = each.op == "call_function" and (callable_tags(each) is not None or each.target is operator.getitem)
        if not is_plain or torch.Tag.nondeterministic_seeded in (callable_tags(each) or ()):
            return False
        waiting += each.all_input_nodes
    return True


def callable_tags(node: fx.Node) -> Any:
    """The tags of an operator; None for a call of anything else."""
    return getattr(node.target, "tags", None) if hasattr(node.target, "_schema") else None


def worse(first: Influence | None, second: Influence) -> Influence:
    """The effect that asks for more care."""
    order = [Effect.LINEAR, Effect.NORMALISED, Effect.SENSITIVE, Effect.UNKNOWN]
    if first is None or order.index(second.effect) > order.index(first.effect):
        return second
    return first


def gradient_nodes(backward: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on an incoming gradient, which AOTAutograd names tangents."""
    found: set[fx.Node] = set()
    for node in backward.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or any(argument in found for argument in node.all_input_nodes):
            found.add(node)
    return found


def _broadcast_dimensions(small: torch.Tensor, large: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of the large tensor along which the small one is repeated."""
    missing = large.dim() - small.dim()
    return tuple(
        dim
        for dim in range(large.dim())
        if dim < missing or (isinstance(small.shape[dim - missing], int) and small.shape[dim - missing] == 1)
    )


def _row_dimensions(node: fx.Node, named: dict[str, Any]) -> tuple[int, ...]:
    """The dimensions over which a norm takes its statistics that neighbours in memory may differ in."""
    dims = node.all_input_nodes[0].meta["val"].dim()
    shape = named.get("normalized_shape")
    return tuple(range(dims - len(shape), dims)) if shape is not None else tuple(range(2, dims))

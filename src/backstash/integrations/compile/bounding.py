"""The values of a graph that may be held within a bound, and the facts by which a policy sets the bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from backstash.integrations.compile.bounds import BoundedValue, as_layer, facts_of
from backstash.integrations.compile.graph_bounded import GraphSzp
from backstash.integrations.compile.layers import Layer, layer_of_split
from backstash.integrations.compile.layout import memory_order
from backstash.integrations.compile.reading import TESTS, Reader
from backstash.integrations.compile.values import SavedValue, Split
from backstash.policies.base import Policy
from backstash.saved import Need, SavedTensor

BITS = (4, 8)
"""The widths of the codes of a value that is held within a bound."""


@dataclass
class Bounding:
    """Gives the values of one graph that are held within bounds their places.

    Attributes:
        policy: is asked.
        loop: the name of the Loop that the graph asks.
        graph: a name for the graph.
        bits: of a code.
        split: the graphs.
    """

    policy: Policy
    loop: str
    graph: str
    bits: int
    split: Split
    _numbers: Counter[tuple[str, str]] = field(default_factory=Counter)

    def named(self, readers: Sequence[Reader], facts: list[SavedTensor]) -> tuple[list[SavedTensor], dict[int, Layer]]:
        """The readers as a Session names them where the policy may bound what they read, and their layers by number.

        Args:
            readers: those of one value.
            facts: what each of them reads, named by the operators of the backward graph.
        """
        found = {number: layer_of_split(self.split, reader) for number, reader in enumerate(readers)}
        layers = {number: layer for number, layer in found.items() if layer is not None}
        # The outcome of a comparison is stored beside a rounded value, so it reads no more than a bit of each element.
        tests = [reader.node.target in TESTS for reader in readers]
        named = [replace(fact, need=Need.SIGN) if test else fact for fact, test in zip(facts, tests, strict=True)]
        for number, layer in layers.items():
            place = layer.path, layer.kind
            named[number] = as_layer(facts[number], layer, self._numbers[place])
            self._numbers[place] += 1
        return (named, layers) if layers and self.policy.may_bound(named) else (facts, {})

    def form(
        self,
        saved: SavedTensor,
        readers: Sequence[SavedTensor],
        layers: dict[int, Layer],
        value: SavedValue,
        comparisons: int,
    ) -> GraphSzp:
        """The codec for a value within a bound, beside which so many outcomes of comparisons are saved."""
        order = memory_order(value.tensor) or ()
        facts = facts_of(saved, readers, list(layers.items()), order, self.bits, comparisons)
        weights = tuple(layer.weight for layer in layers.values())
        return GraphSzp(self.bits, BoundedValue(self.loop, self.graph, facts.text(), weights))

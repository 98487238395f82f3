"""The backward passes that belong to steps: those of results computed while a Session was open.

Autograd numbers the nodes of a thread in the order in which they are made, so that what was made between two moments is
told by its numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from backstash.torch_internals import next_sequence_number, nodes_behind

_MOST = 64
"""How many spans are remembered."""

_OF_LEAVES = 1 << 63
"""Nodes that add to the gradients of leaves are numbered from here on."""


class Spans:
    """The spans in which a Session was open, by the numbers of the nodes that were made there."""

    def __init__(self) -> None:
        self._spans: deque[range] = deque(maxlen=_MOST)
        self._begun: int | None = None

    def begin(self) -> None:
        """A Session was opened."""
        self._begun = next_sequence_number()

    def end(self) -> None:
        """It is closed."""
        if self._begun is not None:
            self._spans.append(range(self._begun, next_sequence_number()))
        self._begun = None

    def include(self, tensors: Any) -> bool:
        """Whether a backward pass from these tensors, or this tensor, reaches what was made in a span.

        Where it cannot be told what it begins from, it does. From a tensor that no function has made, it reaches
        nothing.
        """
        waiting = list(_nodes(tensors))
        if not waiting:
            return not all(isinstance(each, Tensor) for each in _listed(tensors))
        for node in nodes_behind(waiting):
            number = node._sequence_nr()
            is_open = self._begun is not None and self._begun <= number < _OF_LEAVES
            if is_open or any(number in span for span in self._spans):
                return True
        return False


def _listed(tensors: Any) -> tuple[Any, ...]:
    return tuple(tensors) if isinstance(tensors, (list, tuple)) else (tensors,)


def _nodes(tensors: Any) -> Iterator[Any]:
    for each in _listed(tensors):
        node = each.node if isinstance(each, GradientEdge) else getattr(each, "grad_fn", None)
        if node is not None:
            yield node

"""One program may train models one after the other: where a training ends, all that was measured is of other steps.

Note: [another training]
    A search over widths, a model that is trained before another one, or an agent behind its environment's model run in
    one loop, and often with inputs of the same shapes. Models are told apart by the shapes of their weights, so the
    copies of a cross-validation are one model. Where several steps in a row begin with models that no step before them
    has begun with, another training has begun, and everything is measured anew, in plain steps, as in the beginning.
    Models whose steps come in turn, as those of a critic and a generator, belong to one training.
"""

from __future__ import annotations

import weakref

from torch import nn
from torch.nn.parameter import is_lazy

SURE = 4
"""How many steps in a row begin with other models until another training is taken to have begun."""

MOST_TRAININGS = 16
"""How many are told apart. Where there are more, models change all the time, as those of a search for architectures."""

Weights = tuple[tuple[tuple[int, ...], object], ...]
"""Shape and dtype of each weight of a model."""


class Trainings:
    """Tells where one training ends and another one begins."""

    def __init__(self) -> None:
        self._begun = 1
        self._weights: weakref.WeakKeyDictionary[nn.Module, Weights] = weakref.WeakKeyDictionary()
        self._known: set[Weights] = set()
        self._others: list[Weights] = []  # of the latest steps, whose models are of no step before

    def has_ended_with(self, model: nn.Module) -> bool:
        """A step begins with a model. Returns whether it is one of another training."""
        if self._begun >= MOST_TRAININGS:
            return False
        weights = self._weights.get(model)
        if weights is None:
            weights = weights_of(model)
            if weights is None:
                return False
            self._weights[model] = weights
        if not self._known or weights in self._known:
            self._known.update(self._others, [weights])
            self._others.clear()
            return False
        self._others.append(weights)
        if len(self._others) < SURE:
            return False
        self._begun += 1
        self._known = set(self._others)
        self._others.clear()
        return True


def weights_of(model: nn.Module) -> Weights | None:
    """What tells a model from others; None as long as shapes of its weights are not known."""
    weights = list(model.parameters())
    if any(is_lazy(weight) for weight in weights):
        return None
    return tuple((tuple(map(int, weight.shape)), weight.dtype) for weight in weights)

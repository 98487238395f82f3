"""Layrub's migration (TACO 2018).

Ours stores nothing smaller than the paper does, and fetches one value ahead (``ahead = 1``), because it is a baseline
of our own policies. There is a single difference: Layrub waits for a transfer to end before the next layer runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from backstash.codecs import Bitmask, Raw, Shape
from backstash.policies import Action, Keep, Outcome, Policy, Stash
from backstash.policies.base import LOSSES
from backstash.saved import Need, SavedTensor


@dataclass
class Layrub(Policy):
    """Layrub's migration (TACO 2018): all but the first and the last two layers' inputs are moved, as they are.

    If backward only reads a relu's mask, the mask is moved; Layrub's takes a byte per element, ours a bit. A tensor of
    which backward only reads the shape takes no memory here, and Layrub gives its memory to the next layer. The tensors
    that a loss saves stay. Layrub's other half, gradients in the memory of activations, is done under every policy
    (``redeem/exclusive.py``).

    The policy learns in the first step which layers are the first and the last. That step moves their inputs too. An
    input that the program holds itself, such as the batch, is neither moved nor counted.

    Args:
        store: name of the store that the values are moved to.

    Source: Layrub (TACO 2018).
    """

    store: str = "host"

    recomputes = False
    ahead = 1

    _seen: list[str] = field(default_factory=list, init=False, repr=False)  # keys of layers' inputs, in order
    _ends: frozenset[str] = field(default=frozenset(), init=False, repr=False)

    def begin_step(self) -> None:
        """Take the layers at the ends from the step before."""
        if self._seen:
            self._ends = frozenset((self._seen[0], *self._seen[-2:]))
            self._seen = []

    def decide(self, saved: SavedTensor) -> Action:
        """Returns the action that moves the tensor, or Keep."""
        if saved.need is Need.SHAPE:
            return Stash(Shape())
        if saved.op in LOSSES:
            return Keep("Layrub does not move what a loss saves")
        if saved.key in self._ends:
            return Keep("Layrub does not move the first and the last two layers")
        mask = (Bitmask(saved.mask),) if saved.need is Need.SIGN and saved.mask is not None else ()
        return Stash((*mask, Raw()), self.store)

    def observe(self, outcome: Outcome) -> None:
        """Note the order of the layers."""
        if outcome.saved.need in (Need.VALUE, Need.INDEX) and outcome.saved.op not in LOSSES:
            self._seen.append(outcome.saved.key)


def layrub(store: str = "host") -> Layrub:
    """Returns the policy :class:`Layrub`."""
    return Layrub(store)

"""vDNN and cDMA, which move saved tensors to another memory, as they are or without their zeros.

Ours fetch one value ahead (``ahead = 1``), as the papers do, and store nothing smaller than the papers do, because they
are the baselines of our own policies. There is a single difference: vDNN waits for a transfer to end before the next
layer runs, and ours does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from backstash import codecs
from backstash.codecs import Deflate, Raw, Rle, Zvc
from backstash.policies import Action, Keep, Outcome, Policy, Stash
from backstash.policies.base import LOSSES
from backstash.saved import SavedTensor

Rule = Literal["none", "conv", "all"]
"""Which tensors vDNN moves."""

_CLASSIFIER = frozenset({"Addmm", "Mm"}) | LOSSES
_RULES = get_args(Rule)


def _moves(rule: Rule, saved: SavedTensor) -> bool:
    if rule == "conv":
        return saved.op == "Convolution" and saved.role == "input"
    return rule == "all" and saved.op not in _CLASSIFIER


@dataclass(frozen=True)
class Vdnn(Policy):
    """vDNN's static rules (MICRO 2016): feature maps are moved as they are.

    ``"all"`` moves every tensor that the layers in front of the classifier save, ``"conv"`` the inputs of convolutions,
    ``"none"`` nothing. The tensors that the classifier saves, fully connected layers and losses, stay. A tensor that
    stays is kept as it is.

    If several layers read a value, the rule is applied to the reader that reads most of it, and to the first of these
    if there are several.

    Args:
        rule: ``"all"``, ``"conv"`` or ``"none"``.
        store: name of the store that the values are moved to.

    Raises:
        ValueError: there is no such rule.

    Source: vDNN (MICRO 2016).
    """

    rule: Rule = "all"
    store: str = "host"

    is_fixed = True
    recomputes = False
    ahead = 1

    def __post_init__(self) -> None:
        if self.rule not in _RULES:
            raise ValueError(f"Vdnn was asked for the rule {self.rule!r}, but there are {', '.join(_RULES)}.")

    def decide(self, saved: SavedTensor) -> Action:
        """Returns the action that moves the tensor, or Keep."""
        if _moves(self.rule, saved):
            return Stash(Raw(), self.store)
        return Keep(f"vDNN's rule {self.rule!r} does not move it")


@dataclass
class VdnnDyn(Policy):
    """vDNN's dynamic rule (MICRO 2016): it moves as little as a budget allows.

    The first step moves everything, and counts the bytes. Each later step moves nothing if everything fits into
    ``budget``; or else the inputs of convolutions if the other tensors fit; or else everything. Twice the largest moved
    value counts as well, for the values that are under way. vDNN also chooses the algorithms of convolutions, which
    PyTorch does itself.

    Args:
        budget: bytes of saved tensors that may stay on the device.
        store: name of the store that the values are moved to.

    Raises:
        ValueError: ``budget`` is negative.

    Source: vDNN (MICRO 2016).
    """

    budget: int
    store: str = "host"

    recomputes = False
    ahead = 1

    _rule: Rule = field(default="all", init=False, repr=False)
    _seen: list[tuple[int, bool]] = field(default_factory=list, init=False, repr=False)  # bytes; moved by "conv"

    def __post_init__(self) -> None:
        if self.budget < 0:
            raise ValueError(f"VdnnDyn was asked for budget={self.budget}, but it is a number of bytes: 0 or more.")

    def begin_step(self) -> None:
        """Choose the rule by the bytes that the step before saved."""
        seen, self._seen = self._seen, []
        if not seen:
            return
        largest = max((nbytes for nbytes, moves in seen if moves), default=0)
        if sum(nbytes for nbytes, _ in seen) <= self.budget:
            self._rule = "none"
        elif sum(nbytes for nbytes, moves in seen if not moves) + 2 * largest <= self.budget:
            self._rule = "conv"
        else:
            self._rule = "all"

    def decide(self, saved: SavedTensor) -> Action:
        """Returns the action of the static rule that was chosen for this step."""
        return Vdnn(self._rule, self.store).decide(saved)

    def observe(self, outcome: Outcome) -> None:
        """Count the bytes. Nothing is compressed, so the bytes that are held are those that were saved."""
        self._seen.append((outcome.nbytes, _moves("conv", outcome.saved)))


@dataclass(frozen=True)
class Cdma(Policy):
    """cDMA's compression on the way (HPCA 2018): vDNN's rule ``"all"``, with zeros left out of the transfers.

    A tensor that the codec cannot make smaller is moved as it is; cDMA would send its mask along.

    Args:
        codec: ``"zvc"``, ``"rle"`` or ``"deflate"``.
        store: name of the store that the values are moved to.

    Raises:
        ValueError: the codec is another one.

    Source: cDMA (HPCA 2018).
    """

    codec: str = "zvc"
    store: str = "host"

    is_fixed = True
    recomputes = False
    ahead = 1

    def __post_init__(self) -> None:
        ids = (Zvc.id, Rle.id, Deflate.id)
        if self.codec not in ids:
            raise ValueError(f"Cdma was asked for the codec {self.codec!r}, but it compares {', '.join(ids)}.")

    def decide(self, saved: SavedTensor) -> Action:
        """Returns the action that compresses and moves the tensor, or Keep."""
        if _moves("all", saved):
            return Stash((codecs.get(self.codec, min_saving=0.0), Raw()), self.store)
        return Keep("cDMA moves what vDNN does, and that does not move it")


def vdnn(rule: Literal["all", "conv", "dyn"] = "all", store: str = "host", budget: int | None = None) -> Vdnn | VdnnDyn:
    """Returns the policy :class:`Vdnn`, or for ``"dyn"``, which needs a ``budget`` in bytes, :class:`VdnnDyn`.

    Raises:
        ValueError: there is no such rule, a budget was given to a rule that takes none, or ``"dyn"`` has none.
    """
    if (rule == "dyn") is not (budget is not None):
        raise ValueError(
            f"vdnn was asked for the rule {rule!r} and budget={budget}, but 'dyn' takes a budget, the bytes that may "
            f"stay on the device, and no other rule does."
        )
    return Vdnn(rule, store) if rule != "dyn" else VdnnDyn(budget or 0, store)


def cdma(codec: str = "zvc", store: str = "host") -> Cdma:
    """Returns the policy :class:`Cdma`."""
    return Cdma(codec, store)

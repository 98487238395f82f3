"""Policies of published systems that move what autograd saves to another memory: vDNN, cDMA, Layrub.

They differ in what they move, and in the form. All of them fetch one value ahead (``ahead``), as their papers do, and
store nothing smaller than the papers do, so that they are what ours is compared with. None of them waits for a transfer
to end before the next layer runs, which vDNN and Layrub do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from backstash import codecs
from backstash.codecs import Bitmask, Deflate, Raw, Rle, Shape, Zvc
from backstash.policy import Action, Keep, Outcome, Stash
from backstash.saved import Need, SavedTensor

Rule = Literal["none", "conv", "all"]
"""What vDNN moves."""

LOSSES = frozenset({"LogSoftmax", "NllLoss", "NllLoss2D"})
"""Autograd nodes of losses."""

_CLASSIFIER = frozenset({"Addmm", "Mm"}) | LOSSES
_RULES = get_args(Rule)


def _moves(rule: Rule, saved: SavedTensor) -> bool:
    if rule == "conv":
        return saved.op == "Convolution" and saved.role == "input"
    return rule == "all" and saved.op not in _CLASSIFIER


@dataclass(frozen=True)
class Vdnn:
    """vDNN's static rules (MICRO 2016): feature maps are moved as they are.

    ``"all"`` moves whatever the layers that extract features save, ``"conv"`` the inputs of convolutions, ``"none"``
    nothing. What the classifier saves, fully connected layers and losses, stays. What stays is kept as it is.

    A value that a convolution and another layer read counts as the first one's of those that read most of it.

    Args:
        rule: ``"all"``, ``"conv"`` or ``"none"``.
        store: name of the store that the values are moved to.

    Raises:
        ValueError: there is no such rule.
    """

    rule: Rule = "all"
    store: str = "host"

    recomputes: ClassVar[bool] = False
    ahead: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.rule not in _RULES:
            raise ValueError(f"Vdnn was asked for the rule {self.rule!r}, but there are {', '.join(_RULES)}.")

    def decide(self, saved: SavedTensor) -> Action:
        """Move it or keep it."""
        if _moves(self.rule, saved):
            return Stash(Raw(), self.store)
        return Keep(f"vDNN's rule {self.rule!r} does not move it")

    def observe(self, outcome: Outcome) -> None:
        """Learns nothing."""


@dataclass
class VdnnDyn:
    """vDNN's dynamic rule (MICRO 2016): as little is moved as a budget allows.

    The first step moves all, and counts. Every later one moves nothing if all fits into ``budget``, else the inputs of
    convolutions if the rest fits, else all. What is under way counts too: twice the largest value. vDNN also chooses
    the algorithms of convolutions; PyTorch does that itself.

    Args:
        budget: bytes of what is saved that may stay on the device.
        store: name of the store that the values are moved to.

    Raises:
        ValueError: ``budget`` is negative.
    """

    budget: int
    store: str = "host"

    recomputes: ClassVar[bool] = False
    ahead: ClassVar[int] = 1

    _rule: Rule = field(default="all", init=False, repr=False)
    _seen: list[tuple[int, bool]] = field(default_factory=list, init=False, repr=False)  # bytes; moved by "conv"

    def __post_init__(self) -> None:
        if self.budget < 0:
            raise ValueError(f"VdnnDyn was asked for budget={self.budget}, but it is a number of bytes: 0 or more.")

    def begin_step(self) -> None:
        """Choose the rule by what the step before saved."""
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
        """As the rule in force does."""
        return Vdnn(self._rule, self.store).decide(saved)

    def observe(self, outcome: Outcome) -> None:
        """Counts the bytes: nothing is compressed, so they are those that were saved."""
        self._seen.append((outcome.nbytes, _moves("conv", outcome.saved)))


@dataclass(frozen=True)
class Cdma:
    """cDMA's compression on the way (HPCA 2018): what vDNN's rule ``"all"`` moves, with its zeros left out.

    What the codec cannot make smaller is moved as it is; cDMA would send its mask along.

    Args:
        codec: ``"zvc"``, ``"rle"`` or ``"deflate"``.
        store: name of the store that the values are moved to.

    Raises:
        ValueError: it is another codec.
    """

    codec: str = "zvc"
    store: str = "host"

    recomputes: ClassVar[bool] = False
    ahead: ClassVar[int] = 1

    def __post_init__(self) -> None:
        ids = (Zvc.id, Rle.id, Deflate.id)
        if self.codec not in ids:
            raise ValueError(f"Cdma was asked for the codec {self.codec!r}, but it compares {', '.join(ids)}.")

    def decide(self, saved: SavedTensor) -> Action:
        """Compress and move it, or keep it."""
        if _moves("all", saved):
            return Stash((codecs.get(self.codec, min_saving=0.0), Raw()), self.store)
        return Keep("cDMA moves what vDNN does, and that does not move it")

    def observe(self, outcome: Outcome) -> None:
        """Learns nothing."""


@dataclass
class Layrub:
    """Layrub's migration (TACO 2018): all but the first and the last two layers' inputs are moved, as they are.

    Of a relu that nothing else is read of, its mask is moved: Layrub's has a byte per element, ours a bit. What is read
    for its shape only takes no memory, as Layrub gives it to the next layer; what a loss saves stays. Layrub's other
    half, gradients in the memory of activations, is what backstash.consumers does under every policy.

    Which layers are the first and the last ones is known from the second step on; the first one moves them too. An
    input that the program holds itself, such as the batch, is not moved and not counted.

    Args:
        store: name of the store that the values are moved to.
    """

    store: str = "host"

    recomputes: ClassVar[bool] = False
    ahead: ClassVar[int] = 1

    _seen: list[str] = field(default_factory=list, init=False, repr=False)  # keys of layers' inputs, in order
    _ends: frozenset[str] = field(default=frozenset(), init=False, repr=False)

    def begin_step(self) -> None:
        """Learn which layers are at the ends."""
        if self._seen:
            self._ends = frozenset((self._seen[0], *self._seen[-2:]))
            self._seen = []

    def decide(self, saved: SavedTensor) -> Action:
        """Move it, or keep it."""
        if saved.need is Need.SHAPE:
            return Stash(Shape())
        if saved.op in LOSSES:
            return Keep("Layrub does not move what a loss saves")
        if saved.key in self._ends:
            return Keep("Layrub does not move the first and the last two layers")
        mask = (Bitmask(saved.mask),) if saved.need is Need.SIGN and saved.mask is not None else ()
        return Stash((*mask, Raw()), self.store)

    def observe(self, outcome: Outcome) -> None:
        """Notes the order of the layers."""
        if outcome.saved.need in (Need.VALUE, Need.INDEX) and outcome.saved.op not in LOSSES:
            self._seen.append(outcome.saved.key)

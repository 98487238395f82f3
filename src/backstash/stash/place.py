"""A place in a model's step at which autograd saves a tensor, and what was learned there in earlier steps.

Training repeats itself: the same node of the same module saves a tensor like that of the step before. What was worked
out about it once - its name, its need, what the policy says, when the program lets go of it - is kept with its place
and used again, as long as everything that it was worked out from is still the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from backstash.codecs.base import is_dense
from backstash.saved import SavedTensor, TensorSpec

if TYPE_CHECKING:
    from backstash.policies.base import Action
    from backstash.remake.roots import Root
    from backstash.stash.looking import Looked


SETTLED = 16
"""After how many such times it is found out anew whether the program lets go earlier, which no look can tell."""

MOST_PROOFS = 8
"""Of how many recipes it is known in one place how they make its value."""


class Proven(NamedTuple):
    """A recipe that was proven, and what came of it (Note: [proven recipes] in remaking.py).

    Attributes:
        tree: of the patterns of its calls, which also say under which settings these run.
        spec: of the value.
        own: what proofs within bounds are kept under; None for a proof of bits.
        way: how the recipe makes the value.
        text: the recipe as text.
    """

    tree: tuple[Any, ...]
    spec: TensorSpec
    own: object | None
    way: str
    text: str


class Place:
    """What is known of the tensor that one node of the model saves under one role.

    Attributes:
        facts: about the tensor.
        claimable: whether a kernel of the package redeem reads it.
        is_dense: whether its elements lie in memory without gaps.
        action: what the policy said; None where it was not asked yet, or may say something else next time.
        answer: what a policy that is not fixed said, with its revision and the facts that it was asked about.
        releases: whether the policy lets go of a tensor of which only the shape is read; None where it was not asked.
        declined: the action whose codecs have all declined the value, and why; None where one has taken it.
        spared: how many times that is taken for granted before the codecs look at the value again.
        looked: what is known of its codecs on an accelerator (looking.py); None where nothing is.
        told: a policy's revision, and the bytes of the value that it was told of under it (Policy.observes_changes).
        proofs: what the latest proven recipes were like, and how these make the value, the last one first. Of a module
            that is called again and again there is one for each of its calls that are unlike.
        proven: the same of the tree of the last recipe's patterns; None where a pattern is not known.
        tolerance: how far elements that the recipe made within bounds could be off, with the policy's revision.
        uses: how often that proof was used.
        delay: how many torch functions after the save the storage is looked at first.
        held, gone: the most functions after which it was seen to be held, and those after which it was seen to be let
            go of, in the latest steps; 0 where that is not known.
        settled: how many times it was let go of after exactly as many functions as were expected.
        root: whether its value is the root of others (Note: [exact roots] in roots.py); None where that is not known.
        made_seconds: how long the function took that made the value, if it can be repeated; 0.0 where that is unknown.
    """

    __slots__ = (
        "action",
        "answer",
        "claimable",
        "declined",
        "delay",
        "facts",
        "gone",
        "held",
        "is_dense",
        "looked",
        "made_seconds",
        "proofs",
        "proven",
        "releases",
        "root",
        "settled",
        "spared",
        "told",
        "tolerance",
        "uses",
    )

    def __init__(self, facts: SavedTensor, claimable: bool = False) -> None:
        self.facts, self.claimable = facts, claimable
        self.is_dense = is_dense(facts.spec.shape, facts.spec.stride)
        self.action: Action | None = None
        self.answer: tuple[object | None, tuple[SavedTensor, ...], Action] | None = None
        self.releases: bool | None = None
        self.declined: tuple[Action, str] | None = None
        self.looked: Looked | None = None
        self.proofs: list[tuple[tuple[object, ...], str]] = []
        self.proven: Proven | None = None
        self.tolerance: tuple[object | None, float] | None = None
        self.root: Root | None = None
        self.told: tuple[object, int] | None = None
        self.spared = self.uses = 0
        self.delay = 1
        self.held = self.gone = self.settled = 0
        self.made_seconds = 0.0

    def proof_of(self, facts: tuple[object, ...]) -> str | None:
        """How a recipe that is like that makes the value; None where none was proven."""
        for known, way in self.proofs:
            if known == facts:
                return way
        return None

    def prove(self, facts: tuple[object, ...], way: str) -> None:
        """Notes how a recipe that is like that makes the value."""
        self.proofs = [(facts, way), *(each for each in self.proofs if each[0] != facts)][:MOST_PROOFS]

    def still_held(self, age: int) -> int:
        """Notes that the program holds the storage so many functions after the save.

        Returns:
            The age at which it was let go of before, to be looked at next; 0 if that is not known, or was before.
        """
        self.held = max(self.held, age)
        return self.gone if self.gone > age else 0

    def let_go(self, age: int) -> None:
        """Notes that the program has let go of the storage when it was looked at, so many functions after the save."""
        self.settled = self.settled + 1 if age == self.gone == self.held + 1 else 0
        if age <= self.held or self.settled == SETTLED:  # it was held for longer in an earlier step, or perhaps was
            self.held = self.settled = 0
        self.gone = age
        self.delay = max(1, self.held + (age - self.held + 1) // 2)

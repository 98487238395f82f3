"""A place in a model's step at which autograd saves a tensor, and what was learned there in earlier steps.

Training repeats itself: the same node of the same module saves a tensor like that of the step before. What was worked
out about it once - its name, its need, what the policy says, when the program lets go of it - is kept with its place
and used again, as long as everything that it was worked out from is still the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backstash.saved import SavedTensor

if TYPE_CHECKING:
    from backstash.policies.base import Action
    from backstash.stash.roots import Root


class Place:
    """What is known of the tensor that one node of the model saves under one role.

    Attributes:
        facts: about the tensor.
        claimable: whether a kernel of the package backward reads it.
        action: what the policy said; None where it was not asked yet, or may say something else next time.
        answer: what a policy that is not fixed said, with its revision and the facts that it was asked about.
        releases: whether the policy lets go of a tensor of which only the shape is read; None where it was not asked.
        declined: the action whose codecs have all declined the value, and why; None where one has taken it.
        spared: how many times that is taken for granted before the codecs look at the value again.
        proof: what the last proven recipe was like, with all settings that its bits depend on, and how it makes the
            value.
        tolerance: how far elements that the recipe made within bounds could be off, with the policy's revision.
        uses: how often that proof was used.
        delay: how many torch functions the program held the storage for, when this was found out last.
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
        "made_seconds",
        "proof",
        "releases",
        "root",
        "spared",
        "tolerance",
        "uses",
    )

    def __init__(self, facts: SavedTensor, claimable: bool = False) -> None:
        self.facts, self.claimable = facts, claimable
        self.action: Action | None = None
        self.answer: tuple[object | None, tuple[SavedTensor, ...], Action] | None = None
        self.releases: bool | None = None
        self.declined: tuple[Action, str] | None = None
        self.proof: tuple[tuple[object, ...], str] | None = None
        self.tolerance: tuple[object | None, float] | None = None
        self.root: Root | None = None
        self.spared = self.uses = 0
        self.delay = 1
        self.made_seconds = 0.0

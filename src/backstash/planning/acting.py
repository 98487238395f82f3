"""What a Session has to do for a plan's decision about a value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backstash.codecs import Raw, Shape
from backstash.codecs.base import label
from backstash.policies import Action, Keep, Lossless, Recompute, Stash
from backstash.saved import SavedTensor

if TYPE_CHECKING:
    from backstash.planning.decision import Decision

LOSSLESS = Lossless()
_STORED = Lossless(recompute=False)
EXACT = (Shape(), Raw())


def action_of(decision: Decision, saved: SavedTensor, is_empty: bool) -> Action:
    """Returns what a Session has to do for a decision."""
    stored = _STORED.decide(saved)
    if decision.kind == "recompute":
        return Recompute(stored if isinstance(stored, (Keep, Stash)) else Keep(), any_producer=True)
    if decision.kind == "encode":
        if isinstance(stored, Stash) and any(label(codec) == decision.choice for codec in stored.codecs):
            return stored
        return Stash(decision.choice)
    if decision.kind == "offload":
        return Stash((*(stored.codecs if isinstance(stored, Stash) else ()), Raw()), "host")
    return Keep("the plan says so: the plain step fits" if is_empty else "the plan says so")

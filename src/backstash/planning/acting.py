"""The action that a Session takes for a plan's decision about a value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from backstash.codecs import Raw
from backstash.codecs.base import label
from backstash.planning.rounding import codec_named
from backstash.policies import Action, Keep, Lossless, Recompute, Stash
from backstash.saved import SavedTensor

if TYPE_CHECKING:
    from backstash.planning.decision import Decision

LOSSLESS = Lossless()
"""Decides on values that a plan does not know."""

_STORED = Lossless(recompute=False)


def action_of(decision: Decision, saved: SavedTensor, store: str, is_empty: bool) -> Action:
    """Returns what a Session has to do for a decision.

    Args:
        decision: what a plan says of the value.
        saved: the strongest use of the value.
        store: name of the store that values are moved to.
        is_empty: whether the plan keeps everything.
    """
    stored = _STORED.decide(saved)
    if decision.kind == "recompute":
        return Recompute(stored if isinstance(stored, (Keep, Stash)) else Keep(), any_producer=True)
    if decision.kind == "encode":
        if isinstance(stored, Stash) and any(label(codec) == decision.choice for codec in stored.codecs):
            return stored
        codec = codec_named(decision.choice)
        assert codec is not None  # a Plan is made of known names only
        exact = stored.codecs if isinstance(stored, Stash) and codec.bound is not None else ()
        return Stash((codec, *exact))  # if an element is infinite or NaN, an exact codec may take it
    if decision.kind == "offload":
        return Stash((*(stored.codecs if isinstance(stored, Stash) else ()), Raw()), store)
    return Keep("the plan says so: the plain step fits" if is_empty else "the plan says so")


def serves_decision(decision: Decision, saved: SavedTensor) -> bool:
    """Whether what was decided of a value may be done with one of another shape in its place, such as a last batch.

    An error was predicted for the profiled numbers only, a codec of another dtype may refuse the value, and what is
    larger was not meant to be kept.
    """
    dtypes = {spec.partition(" ")[0] for spec in (decision.spec, str(saved.spec))}
    return len(dtypes) == 1 and not decision.error and (decision.kind != "keep" or saved.spec.nbytes <= decision.nbytes)


def fetches_of(decisions: Iterable[Decision]) -> dict[str, tuple[str, ...]] | None:
    """Returns, by the key of a value, which moved values are asked for when it is read first; None if none moves."""
    moved = [decision for decision in decisions if decision.kind == "offload"]
    found: dict[str, tuple[str, ...]] = {}
    for decision in moved:
        for key in decision.fetched_with:
            found[key] = (*found.get(key, ()), decision.key)
    return found if moved else None

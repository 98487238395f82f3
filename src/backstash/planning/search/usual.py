"""The policy lossless as one of the ways to hold a step's values that a budget tries."""

from __future__ import annotations

import re
from collections.abc import Sequence

from backstash.planning.model.problem import Choice, StepProfile
from backstash.repeatable import CHEAP

_CHEAP = frozenset(CHEAP.values())


def like_lossless(profile: StepProfile) -> tuple[int, ...]:
    """Returns for each value the index of the choice that comes closest to what ``lossless`` does with it."""
    return tuple(_index(value.choices) for value in profile.values)


def _index(choices: Sequence[Choice]) -> int:
    """Of one bit per element, being made again by cheap functions, and an exact codec, the first that there is."""
    exact = [(number, choice) for number, choice in enumerate(choices) if not choice.error]
    ranks = [(rank, number) for number, choice in exact if (rank := _rank(choice)) is not None]
    return min(ranks, default=(0, 0))[1]


def _rank(choice: Choice) -> int | None:
    if choice.kind == "encode":
        return 0 if choice.name == "bitmask" else 2
    functions = set(re.findall(r"\w+", choice.reason)) if choice.kind == "recompute" else set()
    return 1 if functions and functions <= _CHEAP else None

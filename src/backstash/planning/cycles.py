"""How many backward passes make a step: after how many of them a program saves the same values again.

Note: [steps of several passes]
    The critic of an adversarial pair runs in each of a step's passes, and the generator in one of them. So it is not
    enough that a value comes back: the passes of two whole steps are compared, one by one. Where all passes of a
    program differ, as with a depth that is drawn anew, a step ends when the first value comes back. Where none of the
    first pass comes back, as after a warm-up of another model, the latest passes are compared.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

MOST_CYCLES = 4
"""Of a step that repeats itself pass by pass."""

MOST_SEEN = 24
"""After how many backward passes one that shares no value with the first is no longer waited for."""

ALIKE = 0.75
"""The share of values that two passes have in common if they are the same pass of two steps: some layers are drawn."""


def cycles_of(passes: Sequence[Set[str]]) -> int:
    """Returns how many backward passes make a step; 0 if more of them have to be seen.

    Args:
        passes: the keys of the values that were saved before each backward pass, from the first one on.
    """
    seen = len(passes)
    if repeated := _repeated(passes):
        return repeated
    if seen < 2 * MOST_CYCLES:
        return 0
    back = next((index for index in range(1, seen) if passes[0] & passes[index]), 0)
    return back or _repeated(passes[::-1]) or (seen if seen > MOST_SEEN else 0)


def _repeated(passes: Sequence[Set[str]]) -> int:
    """After how many passes the first ones come again, one by one; 0 if they do not."""
    for cycles in range(1, min(len(passes) // 2, MOST_CYCLES) + 1):
        if all(_are_alike(passes[index], passes[index + cycles]) for index in range(cycles)):
            return cycles
    return 0


def _are_alike(one: Set[str], other: Set[str]) -> bool:
    return len(one & other) >= ALIKE * len(one | other)

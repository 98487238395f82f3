"""The calls of a forward pass that have to be noted, because a value is made again by them.

Note: [calls that count]
    To note a call takes ten microseconds: its arguments, and the contents that it has read. Where any function may be
    repeated it takes some hundred, with the question whether it repeats itself. A policy makes some values again, and a
    plan few, and they are the same ones in each step. So the calls of a model have places, as its saved tensors have:
    the path of the module, the function, and its number in there. A call is noted no more if no recipe has used it in
    the first passes in which it was noted.

    All that a recipe can lack by that is a call, and then its value is stored in another way. So bits never depend on
    it, and bytes only in a pass that differs from those before: after such a pass every call is noted anew.

Note: [calls of a plan]
    To prove a call takes memory: its result once more. A plan says which calls its recipes make, so that others are
    neither noted nor proven, not even in the first pass. If a recipe lacks one, the pass is another one than was
    planned, and all calls are noted.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from backstash.capture.learned import Limit
from backstash.remake.calls import CallPlace
from backstash.remake.recipes import Recipe

PASSES = 2
"""In how many passes a call is noted at least before it is known that nothing is made by it."""

MANY_PLACES, MOST_PLACES = 20_000, 1 << 19
"""How many places are known at most: see Limit."""

MOST_SURPRISES = 8
"""After so many passes that lacked a call, all calls are noted for good: the program's passes differ too much."""


class Noting:
    """What is known of the calls of one model under one policy.

    Args:
        expected: names of the places of the only calls that have to be noted (Note: [calls of a plan]); None for all.

    Attributes:
        passes: how many forward passes are over.
        copied: parameters and buffers of an accelerator that were copied for recipes since the last time that all of
            them were copied together (Note: [copied together] in contents.py), by their ids.
    """

    __slots__ = (
        "_expected",
        "_failing",
        "_has_skipped",
        "_has_used",
        "_limit",
        "_places",
        "_surprises",
        "_unexpected",
        "copied",
        "passes",
    )

    def __init__(self, expected: frozenset[str] | None = None) -> None:
        self._expected = expected
        self._unexpected: set[tuple[str, object, int]] = set()
        self._places: dict[tuple[str, object, int], CallPlace] = {}
        self._limit = Limit(MANY_PLACES, MOST_PLACES)
        self.passes = 0
        self.copied: dict[int, weakref.ref[Tensor]] = {}
        self._has_skipped = False  # in this pass
        self._has_used = False  # else there is no policy that makes anything again, but one that asks whether it could
        self._surprises = 0
        self._failing: dict[str, str] = {}  # why values have no recipe although all calls were noted, by their keys

    def end_pass(self) -> None:
        """A forward pass is over."""
        self.passes += 1
        self._has_skipped = False

    def place(self, label: str, function: object, number: int) -> CallPlace | None:
        """Returns the place of a call that has to be noted; None for a call that nothing is made by.

        Args:
            label: of the call of the module that runs.
            function: the function that is called; or what is done inside of one, in words.
            number: how many calls of it there were before, in this call of the module.
        """
        index = label, function, number
        if index in self._unexpected:
            self._has_skipped = True
            return None
        place = self._places.get(index)
        if place is None:
            called = function if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)
            name = f"{label} {called} {number}"
            if self._expected is not None and name not in self._expected:
                self._unexpected.add(index)
                self._has_skipped = True
                return None
            if self._limit.is_reached(len(self._places), self.passes):
                self._forget()
            place = self._places[index] = CallPlace(name)
        elif place.is_used:
            return place
        elif place.passes >= PASSES and place.latest != self.passes and self._may_skip():
            self._has_skipped = True
            return None
        if place.latest != self.passes:
            place.latest = self.passes
            place.passes += 1
        return place

    def use(self, key: str, recipe: Recipe) -> None:
        """The value with that key is made again by a recipe: its calls count from now on."""
        self._has_used = True
        if self._failing:
            self._failing.pop(key, None)
        _use(recipe)

    def lack(self, key: str, reason: str) -> str:
        """The value with that key was to be made again, and has no recipe.

        Args:
            key: of the value.
            reason: why it has none now.

        Returns:
            Why it had none when all calls were noted, where that is known: now the call may be missing that tells.
        """
        if not self._has_skipped:
            self._failing[key] = reason
        elif key not in self._failing:
            self._surprises += 1
            self._forget()
        return self._failing.get(key, reason)

    def _may_skip(self) -> bool:
        return self._has_used and self._surprises < MOST_SURPRISES

    def _forget(self) -> None:
        self._expected = None
        self._unexpected.clear()
        self._places.clear()
        self._failing.clear()
        self._has_skipped = False


def _use(recipe: Recipe) -> None:
    if recipe.call.place is not None:
        recipe.call.place.is_used = True
    for given in recipe.inputs:
        if type(given) is tuple:
            _use(given[0])

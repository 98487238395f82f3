"""The times of steps under plans, taken in turns with plain steps while the profile can still run the step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from backstash.planning.model.problem import Choice, StepProfile
from backstash.planning.search.exact import Solution
from backstash.policies import Policy
from backstash.repeatable import CHEAP

LEAST = 0.1
"""The least share of the time that the model says a plan adds that may be found in steps: the rest is noise."""

NOISE = 0.02
"""By what share a step has to be faster than the one that is predicted to be the fastest, to be taken instead."""


class Timings:
    """The times of the solutions of one profile."""

    def __init__(self, profile: StepProfile) -> None:
        self._plain = profile.seconds
        self._clock: Callable[[Policy], float] | None = profile.clock
        self._timed: dict[Solution, float] = {}
        self._said: list[tuple[int, float]] = []

    def fastest(
        self, kept: Iterable[Solution], policy: Callable[[Solution], Policy], usual: Solution | None = None
    ) -> Solution | None:
        """Times the solution that is predicted to be the fastest, and returns the fastest of those that were timed."""
        kept = list(kept)
        best = min(kept, key=lambda found: found.seconds, default=None)
        if best is None or self._clock is None:
            return best
        for found in (best, usual):
            if found is not None and found in kept and found not in self._timed:
                least = self._plain + LEAST * (found.seconds - self._plain)
                self._timed[found] = max(least, self._plain * self._clock(policy(found)))
        timed = [found for found in kept if found in self._timed]
        return min(timed, key=lambda found: self._timed[found] * (1.0 if found is best else 1.0 + NOISE))

    def adds(self, found: Solution) -> float:
        """Returns what a solution adds to a plain step, as a share of it: as it was timed, or as the model says."""
        return (self._timed.get(found, found.seconds) - self._plain) / self._plain

    def predict(self, budget: int, found: Solution) -> float:
        """Returns the time that a plan for a budget predicts: what was timed, else what the model says.

        Times vary by some percent. So that no plan for a larger budget is said to be slower, a time that was taken is
        moved between those of the plans for smaller and larger budgets that were made before.
        """
        if found not in self._timed:
            return found.seconds
        floor = max((said for other, said in self._said if other >= budget), default=self._plain)
        most = min((said for other, said in self._said if other <= budget), default=float("inf"))
        seconds = min(max(self._timed[found], floor), most)
        self._said.append((budget, seconds))
        return seconds

    def frontier(self, found: Solution, seconds: float, solutions: Iterable[Solution]) -> tuple[tuple[int, float], ...]:
        """Returns peak and time of ``found`` and of all that is smaller or faster, stretched to its ``seconds``."""
        added = found.seconds - self._plain
        scale = (seconds - self._plain) / added if found in self._timed and added > 0.0 else 1.0
        others = {
            each for each in solutions if (each.peak_nbytes < found.peak_nbytes) == (each.seconds > found.seconds)
        }
        return tuple(
            (each.peak_nbytes, seconds if each is found else self._plain + scale * (each.seconds - self._plain))
            for each in sorted({*others, found}, key=lambda each: each.peak_nbytes)
        )


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

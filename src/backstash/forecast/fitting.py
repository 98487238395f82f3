"""The largest batch or text that fits on a card in each way of training, and the time of a step there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from backstash.forecast.cards import Card
from backstash.forecast.costs import Clock
from backstash.forecast.profiles import TracedValues, profile_on
from backstash.forecast.sizes import SizedSteps
from backstash.planning.model.problem import StepProfile
from backstash.planning.search.planner import Planner
from backstash.telling import note_progress

CONTEXT = 600 << 20
"""Bytes of a card that CUDA's context and its libraries take."""

LEFT = 0.04
"""The share of a card's memory that is left free: the allocator holds blocks that fit nothing, and libraries take
room."""

MOST = 1 << 32
"""The largest size that is looked for, in units."""

PLANS = 8
"""Sizes for which plans are made, on each card."""

FURTHER = 4
"""How many times the largest known size the next may be: where an optimizer's step is the peak, sizes hardly count."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What one way of training takes on a card.

    Attributes:
        way: its name.
        units: the size, in units; 0 where not even one fits.
        peak_nbytes: bytes that are alive at most, parameters and all; of the smallest size where not even that fits.
    """

    way: str
    units: int
    peak_nbytes: int
    seconds: float


class Fits:
    """What fits on a card.

    Attributes:
        room: bytes that may be alive on the card.
    """

    def __init__(self, steps: SizedSteps, card: Card, allow: Sequence[str]) -> None:
        self.steps, self.card, self.allow = steps, card, tuple(allow)
        self.clock = Clock(card)
        self.room = int((card.memory_nbytes - CONTEXT) * (1 - LEFT))
        self.planner = cache(self._planner)  # of a size

    def all(self) -> list[Fit]:
        """Returns what each way takes at the largest size that it makes possible."""
        plain = self._largest("plain")
        found = [self._fit("plain", plain)]
        most = plain
        if self.steps.traces[0].checkpoint is not None:
            recomputed = self._largest("checkpoint")
            found.append(self._fit("checkpoint", recomputed))
            most = max(most, recomputed)
        if self.steps.traces[0].dropped is None:
            return found
        planned = self._largest_planned(max(1, most), plain)
        if 0 < most < planned:
            found.append(self._planned(most, f"plan, {'as checkpoint' if most > plain else 'as plain'}"))
        return [*found, self._planned(planned, "plan")]

    def _largest(self, way: str) -> int:
        if not self.steps.has_size:
            return int(self.steps.peak_nbytes(way, 1) <= self.room)
        return _largest(lambda units: self.steps.peak_nbytes(way, units) <= self.room)

    def _fit(self, way: str, units: int) -> Fit:
        step = getattr(self.steps.at(max(1, units)), way)
        dropped = self.steps.traces[0].dropped
        hooked = len(dropped.uses) if way == "checkpoint" and dropped is not None else 0
        return Fit(way, units, step.peak_nbytes, self.clock.step(step.works, hooked))

    # -- plans ---------------------------------------------------------------------------------------------------------

    def _planner(self, units: int) -> Planner:
        note_progress(f"plans on {self.card.name} for a size of {units}")
        return Planner(self.profile(units), self.allow)

    def profile(self, units: int) -> StepProfile:
        """Returns the profile of a step at a size on this card."""
        traced = self.steps.at(units)
        assert traced.dropped is not None
        return profile_on(traced, TracedValues(traced.dropped), self.clock)

    def _lowest(self, units: int) -> int:
        """Returns the least bytes that are alive at most under a plan."""
        planner = self.planner(units)
        return planner.profile.held_nbytes + planner.solutions[0].peak_nbytes

    def _largest_planned(self, least: int, plain: int) -> int:
        """Returns the largest size for which there is a plan, looked for by a line through the last two sizes."""
        if self._lowest(least) > self.room:
            return 0 if least == 1 else self._largest_planned(plain if plain < least else 1, plain)
        if not self.steps.has_size:
            return 1
        fits, fails = least, MOST
        below = max(1, least // 2) if least > 1 else 2
        known = {least: self._lowest(least), below: self._lowest(below)}
        if known[below] <= self.room:
            fits = max(fits, below)
        else:
            fails = below
        for _ in range(PLANS):
            (low, low_nbytes), (high, high_nbytes) = sorted(known.items())[-2:]
            slope = max(1.0, (high_nbytes - low_nbytes) / (high - low))
            guess = min(fails - 1, FURTHER * high, max(fits + 1, high + int((self.room - high_nbytes) // slope)))
            if guess <= fits or guess >= fails:
                break
            known[guess] = self._lowest(guess)
            fits, fails = (guess, fails) if known[guess] <= self.room else (fits, guess)
            if fails - fits == 1 or known[guess] <= self.room < known[guess] + slope:
                break
        return fits

    def _planned(self, units: int, way: str) -> Fit:
        planner = self.planner(max(1, units))
        held = planner.profile.held_nbytes
        found = planner.at_most(self.room - held)
        host = planner.profile.session_seconds + planner.profile.seconds
        seconds = max(found.seconds, host) if found.decisions else self._fit("plain", units).seconds
        return Fit(way, units, held + found.peak_nbytes, seconds)


def _largest(fits: Callable[[int], bool]) -> int:
    """Returns the largest number that fits, 0 if one does not, by bisection."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high < MOST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

"""A plan's decision about one value, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from backstash.planning.problem import LARGEST, Kind


@dataclass(frozen=True, slots=True)
class Decision:
    """What a plan does with one value.

    Attributes:
        key, module, op, spec, nbytes: as in PlannedValue.
        choice, kind, held_nbytes, error, reason, reserve_nbytes: name and facts of the choice, as in Choice.
        seconds: time that the choice adds to a step.
        has_room: whether its readers may hold it until they are done, because the peak lies elsewhere.
        spare: its number among those that are remade, in this order, when a step holds more than planned (Note: [spare
            ways] in spare.py); 0 if it is not among them.
        in_flight_nbytes: how many bytes of values may be held beside their planes from where it is decided on to where
            the next value is (Note: [drafts] in stash/drafts.py).
        fetched_with: for a value that is moved, the keys of values with whose first reading it is asked for.
    """

    key: str
    module: str
    op: str
    spec: str
    nbytes: int
    choice: str
    kind: Kind
    held_nbytes: int
    seconds: float
    error: float
    reason: str
    has_room: bool = False
    fetched_with: tuple[str, ...] = ()
    reserve_nbytes: int = 0
    spare: int = 0
    in_flight_nbytes: int = 0

    def flaw(self) -> str | None:
        """Returns what is wrong with the decision by itself, or None."""
        sizes = self.nbytes, self.held_nbytes, self.reserve_nbytes, self.spare, self.in_flight_nbytes
        if min(sizes) < 0 or max(sizes) > LARGEST:
            return "a number of bytes is negative, or larger than any memory"
        if not all(0.0 <= number < math.inf for number in (self.seconds, self.error)):
            return "a time or an error is negative or not finite"
        return "only a value that is moved is fetched" if self.fetched_with and self.kind != "offload" else None

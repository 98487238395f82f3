"""Values that may be remade in place of kept ones, without a higher peak, when a step holds more than planned.

Note: [spare ways]
    A value that is remade instead of kept frees its bytes in forward, and may cause a peak of its own in backward: what
    it is made from has to be there at that moment, and a chain of remade values is made all at once. So the planner
    says for which of the largest values this is safe, in an order: with the first of them remade, however many, no
    position takes more than before and more than the plan's peak. Plans for the smallest budgets have no such values,
    because nothing is left to be remade.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backstash.planning.model.peak import PeakModel

MOST = 64
"""How many values are looked at, the largest ones: each of them takes an evaluation of the model."""


def spare_ways(model: PeakModel, choices: Sequence[int], peak_nbytes: int) -> list[int]:
    """Returns the indices of values that may be remade as well, in their order (Note: [spare ways])."""
    values, now = model.profile.values, list(choices)
    kept = [at for at, index in enumerate(now) if values[at].choices[index].kind == "keep"]
    most = np.maximum(model.evaluate(now).live, peak_nbytes)
    found: list[int] = []
    for at in sorted(kept, key=lambda at: -values[at].nbytes)[:MOST]:
        remade = next((number for number, each in enumerate(values[at].choices) if each.kind == "recompute"), None)
        if remade is None:
            continue
        tried = [*now[:at], remade, *now[at + 1 :]]
        if (model.evaluate(tried).live <= most).all() and not model.remakes_what_has_an_error(tried):
            now = tried
            found.append(at)
    return found

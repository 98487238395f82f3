"""Values remade from others that are stored within bounds, and how small these bounds have to be for it.

If a batch norm, a relu or a sum computed a value from bounded values, the remade value is off by their errors times
some factors, the gains. A remade value takes a bit per element at most, for the relu. But each value that it is remade
from has to be stored within a bound that serves its readers too, and each halving of a bound costs a bit per element
there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CollectedValue:
    """A value as the last collection saw it.

    Attributes:
        share: the share of elements that are not zero.
        spread: root mean square of these elements.
        bound: the error bound that the readers need; None if the value is exact.
        gains: the values that it could be remade from, by key, each with the factor by which its error is multiplied
            (root mean square over the elements).
    """

    numel: int
    share: float
    spread: float
    bound: float | None
    gains: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Allotment:
    """Which values are stored, within which bounds, and which values are remade.

    Attributes:
        bounds: the bound of each stored value, by key.
        within: for each remade value, by key, the keys of the stored values whose errors it has.
    """

    bounds: Mapping[str, float] = field(default_factory=dict)
    within: Mapping[str, frozenset[str]] = field(default_factory=dict)


def allot(values: Mapping[str, CollectedValue]) -> Allotment:
    """Decides for one value after the other whether remaking it takes fewer bytes than storing it.

    Args:
        values: by key. A value comes after the values that it could be remade from.

    Example:
        >>> norm = CollectedValue(1000, 1.0, 1.0, bound=0.1)
        >>> convolution = CollectedValue(1000, 0.5, 1.0, bound=0.1, gains={"norm": 2.0})
        >>> allot({"norm": norm, "convolution": convolution})
        Allotment(bounds={'norm': 0.05}, within={'convolution': frozenset({'norm'})})
    """
    bounds = {key: value.bound for key, value in values.items() if value.bound is not None}
    remade: dict[str, dict[str, float]] = {}  # by key, the gains of the stored values that it begins from
    for key, value in values.items():
        if value.bound is None or not value.gains:
            continue
        squares: defaultdict[str, float] = defaultdict(float)
        for source, gain in value.gains.items():
            for origin, further in remade.get(source, {source: 1.0}).items():
                squares[origin] += (gain * further) ** 2
        gains = {origin: math.sqrt(square) for origin, square in squares.items() if origin in bounds}
        if not gains:  # everything that it is remade from is exact
            del bounds[key]
            remade[key] = gains
            continue
        needed = _bounds_needed(value.bound, gains, bounds)
        cost = sum(values[origin].numel * math.log2(bounds[origin] / bound) for origin, bound in needed.items())
        # A stored element that is not zero takes about the entropy of a normal number in steps of the bound, in bits:
        # log2(spread / bound).
        saving = value.numel * value.share * math.log2(max(value.spread / value.bound, 1.0))
        if saving > cost:
            del bounds[key]
            remade[key] = gains
            bounds.update(needed)
    return Allotment(bounds, {key: frozenset(gains) for key, gains in remade.items() if gains})


def _bounds_needed(bound: float, gains: Mapping[str, float], bounds: Mapping[str, float]) -> dict[str, float]:
    """Returns bounds of the origins with which the remade value's error is at most ``bound``.

    Errors of independent origins add up as their squares do. Each origin may have an equal part of the square. An
    origin that needs less, because its present bound is small enough, leaves the rest of its part to the others.
    """
    left, needed = bound**2, {origin: bounds[origin] for origin in gains}
    by_size = sorted(gains, key=lambda origin: bounds[origin] * gains[origin])
    for number, origin in enumerate(by_size):
        fair = math.sqrt(left / (len(by_size) - number))
        error = bounds[origin] * gains[origin]
        if error > fair:
            needed[origin], error = fair / gains[origin], fair
        left -= error**2
    return needed

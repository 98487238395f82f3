"""Which values are made again from others that are stored within bounds, and how small these have to be for it.

A value that a batch norm, a relu or a sum made of bounded ones is off by their errors times some gains. Made again, it
takes a bit per element at most, for the relu; but what it is made of has to be stored to within a bound that serves its
readers too, and each halving costs a bit per element there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Value:
    """A value as the last collection saw it.

    Attributes:
        numel: its elements.
        share: of them that are not zero.
        spread: root mean square of these.
        bound: what those who read it ask for; None: it is exact.
        gains: by how much errors of the values are multiplied that it could be made from; in the root mean square.
    """

    numel: int
    share: float
    spread: float
    bound: float | None
    gains: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is stored within which bound, and what is made again.

    Attributes:
        bounds: of the values that are stored, by key.
        within: of those that are made again, from the errors of which others.
    """

    bounds: Mapping[str, float] = field(default_factory=dict)
    within: Mapping[str, frozenset[str]] = field(default_factory=dict)


def plan(values: Mapping[str, Value]) -> Plan:
    """Take one value after the other, and have it made again where that takes less.

    Args:
        values: by key; what a value could be made from comes before it.

    Example:
        >>> norm = Value(1000, 1.0, 1.0, bound=0.1)
        >>> convolution = Value(1000, 0.5, 1.0, bound=0.1, gains={"norm": 2.0})
        >>> plan({"norm": norm, "convolution": convolution})
        Plan(bounds={'norm': 0.05}, within={'convolution': frozenset({'norm'})})
    """
    bounds = {key: value.bound for key, value in values.items() if value.bound is not None}
    origins: dict[str, dict[str, float]] = {}
    for key, value in values.items():
        if value.bound is None or not value.gains:
            continue
        squares: defaultdict[str, float] = defaultdict(float)
        for source, gain in value.gains.items():
            for origin, further in origins.get(source, {source: 1.0}).items():
                squares[origin] += (gain * further) ** 2
        gains = {origin: math.sqrt(square) for origin, square in squares.items() if origin in bounds}
        if not gains:  # made again of exact values
            del bounds[key]
            origins[key] = gains
            continue
        asked = _allotted(value.bound, gains, bounds)
        cost = sum(values[origin].numel * math.log2(bounds[origin] / bound) for origin, bound in asked.items())
        # What is not zero takes a step's entropy, by which a normal number's half is coded: log2(spread / bound).
        saving = value.numel * value.share * math.log2(max(value.spread / value.bound, 1.0))
        if saving > cost:
            del bounds[key]
            origins[key] = gains
            bounds.update(asked)
    return Plan(bounds, {key: frozenset(gains) for key, gains in origins.items() if gains})


def _allotted(bound: float, gains: Mapping[str, float], bounds: Mapping[str, float]) -> dict[str, float]:
    """Bounds by which errors, which add up as their squares do, come to no more than ``bound``.

    Each may have the same part of it, and those that need less leave it to the others.
    """
    left, asked = bound**2, {origin: bounds[origin] for origin in gains}
    by_size = sorted(gains, key=lambda origin: bounds[origin] * gains[origin])
    for number, origin in enumerate(by_size):
        fair = math.sqrt(left / (len(by_size) - number))
        error = bounds[origin] * gains[origin]
        if error > fair:
            asked[origin], error = fair / gains[origin], fair
        left -= error**2
    return asked

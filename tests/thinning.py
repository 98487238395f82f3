"""Chooses the parameters' combinations that ``make test`` runs, where all combinations would take too long."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def star(*axes: Sequence[Any]) -> list[ParameterSet]:
    """Returns every combination of the axes' values, in the order of ``itertools.product``.

    The star consists of the combination of all first values, its centre, and of the combinations that differ from the
    centre in one axis. So it has every value of every axis. Combinations outside the star are marked slow.
    """
    return star_of(product(*axes))


def star_of(combinations: Iterable[Sequence[Any]]) -> list[ParameterSet]:
    """Likewise, of combinations that are no whole product; the first combination is the centre of the star."""
    combinations = [tuple(combination) for combination in combinations]
    return [
        pytest.param(*combination, marks=[pytest.mark.slow] if _distance(combinations[0], combination) > 1 else [])
        for combination in combinations
    ]


def only(quick: Iterable[Any], values: Iterable[Any]) -> list[ParameterSet]:
    """Returns every value, marked slow unless it is in ``quick``."""
    quick = list(quick)
    return [pytest.param(value, marks=[] if value in quick else [pytest.mark.slow]) for value in values]


def _distance(first: Sequence[Any], second: Sequence[Any]) -> int:
    return sum(not _same(a, b) for a, b in zip(first, second, strict=True))


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))

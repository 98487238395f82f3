"""Fewer cases for ``make test``, where every pair of two parameters' values would cost more than it finds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def star(*axes: Sequence[Any]) -> list[ParameterSet]:
    """Every combination of values, in the order of itertools.product; marked slow unless it is in the star.

    The star has the first value of each axis, and what differs from these in one axis only: so every value of every
    axis. ``make test-all`` runs the other combinations.
    """
    return star_of(product(*axes))


def star_of(combinations: Iterable[Sequence[Any]]) -> list[ParameterSet]:
    """Likewise, of combinations that are not a whole product; the first one is the middle of the star."""
    combinations = [tuple(combination) for combination in combinations]
    return [
        pytest.param(*combination, marks=[pytest.mark.slow] if _distance(combinations[0], combination) > 1 else [])
        for combination in combinations
    ]


def only(quick: Iterable[Any], values: Iterable[Any]) -> list[ParameterSet]:
    """Every value, marked slow unless it is one of ``quick``."""
    quick = list(quick)
    return [pytest.param(value, marks=[] if value in quick else [pytest.mark.slow]) for value in values]


def _distance(one: Sequence[Any], other: Sequence[Any]) -> int:
    return sum(not _same(a, b) for a, b in zip(one, other, strict=True))


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))

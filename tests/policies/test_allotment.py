"""Values that are stored, the bounds within which they are, and the values that are remade from them."""

from __future__ import annotations

import math

import pytest

from backstash.papers.comet.allotment import Allotment, CollectedValue, allot


def norm(bound: float | None = 0.1, numel: int = 1000) -> CollectedValue:
    return CollectedValue(numel, 1.0, 1.0, bound)


def convolution(gains: dict[str, float], bound: float | None = 0.1, numel: int = 1000) -> CollectedValue:
    return CollectedValue(numel, 0.5, 4.0, bound, gains)


def test_a_single_bound_serves_both_values() -> None:
    allotment = allot({"y": norm(), "z": convolution({"y": 0.5})})
    assert allotment == Allotment({"y": 0.1}, {"z": frozenset({"y"})})
    allotment = allot({"y": norm(), "z": convolution({"y": 2.0})})
    assert allotment.bounds == {"y": pytest.approx(0.05)}


def test_a_value_is_stored_if_remaking_it_costs_more() -> None:
    """Remaking z saves about 5.3 bits for each of its 500 non-zeros, and costs 4 bits for each of 1,000 elements."""
    values = {"y": norm(), "z": convolution({"y": 16.0})}
    assert allot(values) == Allotment({"y": 0.1, "z": 0.1}, {})
    assert allot(values | {"y": norm(numel=100)}).within == {"z": frozenset({"y"})}


def test_exact_values_and_values_remade_from_them_are_left_out() -> None:
    assert allot({"y": norm(None), "z": convolution({"y": 1.0})}) == Allotment()
    assert allot({"y": norm(), "z": convolution({"y": 1.0}, bound=None)}) == Allotment({"y": 0.1}, {})
    assert allot({"z": convolution({"elsewhere": 1.0})}) == Allotment()
    values = {"y": norm(None), "z": convolution({"y": 1.0}), "u": norm(), "v": convolution({"z": 1.0, "u": 1.0})}
    assert allot(values) == Allotment({"u": 0.1}, {"v": frozenset({"u"})})


def test_a_gain_of_zero_adds_no_error() -> None:
    assert allot({"y": norm(), "z": convolution({"y": 0.0})}) == Allotment({"y": 0.1}, {"z": frozenset({"y"})})


def test_the_errors_of_several_origins_add_up_to_the_bound() -> None:
    """The first origin needs less than its part, and leaves the rest to the other two."""
    values = {"a": norm(0.01), "b": norm(), "c": norm(), "z": convolution({"a": 1.0, "b": 1.0, "c": 2.0})}
    bounds = allot(values).bounds
    assert bounds["a"] == 0.01
    assert bounds["b"] == pytest.approx(2 * bounds["c"])
    assert math.hypot(bounds["a"], bounds["b"], 2 * bounds["c"]) == pytest.approx(0.1)


def test_a_chain_begins_from_stored_values() -> None:
    values = {"y": norm(), "z": convolution({"y": 1.0}), "u": norm(), "v": convolution({"z": 1.0, "u": 2.0})}
    allotment = allot(values)
    assert allotment.within == {"z": frozenset({"y"}), "v": frozenset({"y", "u"})}
    assert math.hypot(allotment.bounds["y"], 2 * allotment.bounds["u"]) <= 0.1 * (1 + 1e-9)


def test_a_chain_may_begin_from_a_value_that_could_be_remade() -> None:
    values = {"y": norm(), "z": convolution({"y": 1e6}), "u": norm(), "v": convolution({"z": 1.0, "u": 1.0})}
    allotment = allot(values)
    assert allotment.within == {"v": frozenset({"z", "u"})}
    assert math.hypot(allotment.bounds["z"], allotment.bounds["u"]) == pytest.approx(0.1)

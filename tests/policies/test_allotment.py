"""What is stored within which bound, and what is made again from it."""

from __future__ import annotations

import math

import pytest

from backstash.policies.comet.allotment import Allotment, Value, allot


def norm(bound: float | None = 0.1, numel: int = 1000) -> Value:
    return Value(numel, 1.0, 1.0, bound)


def convolution(gains: dict[str, float], bound: float | None = 0.1, numel: int = 1000) -> Value:
    return Value(numel, 0.5, 4.0, bound, gains)


def test_one_bound_serves_both() -> None:
    made = allot({"y": norm(), "z": convolution({"y": 0.5})})
    assert made == Allotment({"y": 0.1}, {"z": frozenset({"y"})})
    made = allot({"y": norm(), "z": convolution({"y": 2.0})})
    assert made.bounds == {"y": pytest.approx(0.05)}


def test_it_has_to_pay() -> None:
    """Of 500 numbers about 5.3 bits each would be saved, and 1,000 would take 4 more."""
    values = {"y": norm(), "z": convolution({"y": 16.0})}
    assert allot(values) == Allotment({"y": 0.1, "z": 0.1}, {})
    assert allot(values | {"y": norm(numel=100)}).within == {"z": frozenset({"y"})}


def test_what_is_exact_or_made_of_exact_values_is_not_planned() -> None:
    assert allot({"y": norm(None), "z": convolution({"y": 1.0})}) == Allotment()
    assert allot({"y": norm(), "z": convolution({"y": 1.0}, bound=None)}) == Allotment({"y": 0.1}, {})
    assert allot({"z": convolution({"elsewhere": 1.0})}) == Allotment()
    values = {"y": norm(None), "z": convolution({"y": 1.0}), "u": norm(), "v": convolution({"z": 1.0, "u": 1.0})}
    assert allot(values) == Allotment({"u": 0.1}, {"v": frozenset({"u"})})


def test_no_gain_is_no_error() -> None:
    assert allot({"y": norm(), "z": convolution({"y": 0.0})}) == Allotment({"y": 0.1}, {"z": frozenset({"y"})})


def test_errors_of_several_add_up_to_what_is_wanted() -> None:
    """One of them needs less than its part, which the other two have then."""
    values = {"a": norm(0.01), "b": norm(), "c": norm(), "z": convolution({"a": 1.0, "b": 1.0, "c": 2.0})}
    bounds = allot(values).bounds
    assert bounds["a"] == 0.01
    assert bounds["b"] == pytest.approx(2 * bounds["c"])
    assert math.hypot(bounds["a"], bounds["b"], 2 * bounds["c"]) == pytest.approx(0.1)


def test_a_chain_begins_from_what_is_stored() -> None:
    values = {"y": norm(), "z": convolution({"y": 1.0}), "u": norm(), "v": convolution({"z": 1.0, "u": 2.0})}
    made = allot(values)
    assert made.within == {"z": frozenset({"y"}), "v": frozenset({"y", "u"})}
    assert math.hypot(made.bounds["y"], 2 * made.bounds["u"]) <= 0.1 * (1 + 1e-9)


def test_a_value_that_is_stored_may_be_begun_from_as_well() -> None:
    values = {"y": norm(), "z": convolution({"y": 1e6}), "u": norm(), "v": convolution({"z": 1.0, "u": 1.0})}
    made = allot(values)
    assert made.within == {"v": frozenset({"z", "u"})}
    assert math.hypot(made.bounds["z"], made.bounds["u"]) == pytest.approx(0.1)

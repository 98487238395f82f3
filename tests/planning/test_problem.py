"""Profiles of steps: what they must be like, and their way through JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from backstash.errors import PlanError
from backstash.planning.model.problem import Choice, PlannedValue, Position, StepProfile, children_first

POSITIONS = tuple(Position(f"op{n}", "block", n >= 3, 0.5) for n in range(6))
MASK = Choice("bitmask", "encode", 4, 100, 0, 0.1)
REMAKE = Choice("recompute", "recompute", 0, parents=(0,), workspace_nbytes=8, seconds=0.2)


def value(key: str = "a", **changes: Any) -> PlannedValue:
    fitting = {"born": 1, "reads": (3, 4), "choices": (Choice.keep(100), MASK)}
    return PlannedValue(key, "block", "Relu", "float32 [25]", 100, **{**fitting, **changes})


def profile(*values: PlannedValue, **changes: Any) -> StepProfile:
    return replace(
        StepProfile(POSITIONS, (10,) * 6, values or (value(),), 310, 7, "a machine", {"torch": "2"}), **changes
    )


def test_a_profile_comes_back_from_json() -> None:
    first = profile(value(), value("b", choices=(Choice.keep(100), REMAKE)))
    assert StepProfile.from_json(first.to_json()) == first
    assert first.seconds == 3.0


@pytest.mark.parametrize(
    ("changes", "flaw"),
    [
        ({"choices": (MASK,)}, "first choice is not"),
        ({"choices": ()}, "first choice is not"),
        ({"choices": (Choice.keep(99),)}, r"first choice is not Choice.keep\(100\)"),
        ({"choices": (Choice.keep(100), MASK, MASK)}, "the same name"),
        ({"reads": ()}, "not one or more ascending"),
        ({"reads": (4, 3)}, "not one or more ascending"),
        ({"reads": (2, 3)}, "not positions of backward"),
        ({"reads": (3, 6)}, "not positions of backward"),
        ({"born": 4}, "born at 4"),
        ({"born": -1}, "born at -1"),
        ({"choices": (Choice.keep(100), replace(REMAKE, parents=(7,)))}, "not all among the values"),
        ({"choices": (Choice.keep(100), replace(REMAKE, parents=(0,)))}, "remade from itself"),
        ({"choices": (Choice.keep(100), replace(REMAKE, held_nbytes=1))}, "holds nothing"),
        ({"choices": (Choice.keep(100), replace(REMAKE, decode_seconds=1.0))}, "neither encoded nor decoded"),
        ({"choices": (Choice.keep(100), replace(MASK, parents=(0,)))}, "only a value that is remade"),
        ({"choices": (Choice.keep(100), replace(MASK, held_nbytes=-1))}, "negative"),
        ({"choices": (Choice.keep(100), replace(MASK, encode_seconds=float("nan")))}, "not finite"),
        ({"choices": (Choice.keep(100), replace(MASK, kind="melt"))}, "'melt' is none of keep, encode"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(changes: dict[str, Any], flaw: str) -> None:
    with pytest.raises(PlanError, match=f"StepProfile was asked for .*the value 'a'.*{flaw}|{flaw}.*Take the profile"):
        profile(value(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"base_nbytes": (1, 2)},
        {"positions": (), "base_nbytes": ()},
        {"plain_peak_nbytes": -1},
        {"held_nbytes": -1},
        {"positions": (*POSITIONS[:5], replace(POSITIONS[5], seconds=float("inf")))},
    ],
)
def test_a_profile_that_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="StepProfile was asked for .* Take the profile of the step again"):
        profile(**changes)


def test_values_that_are_remade_from_each_other_are_refused() -> None:
    first = value(choices=(Choice.keep(100), replace(REMAKE, parents=(1,))))
    second = value("b", choices=(Choice.keep(100), REMAKE))
    with pytest.raises(PlanError, match="remade from itself"):
        profile(first, second)
    with pytest.raises(PlanError, match="two values have this key"):
        profile(value(), value())


def test_children_come_before_what_they_are_remade_from() -> None:
    values = (value("a"), value("b", choices=(Choice.keep(100), REMAKE)))
    assert children_first(values) == [1, 0]


def test_the_fingerprint_is_of_what_a_plan_must_fit() -> None:
    first = profile()
    slower = profile(positions=(*POSITIONS[:5], replace(POSITIONS[5], seconds=9.0)))
    quick = replace(MASK, encode_seconds=0.0)
    assert (
        slower.fingerprint() == profile(value(choices=(Choice.keep(100), quick))).fingerprint() == first.fingerprint()
    )
    others = [profile(value("b")), profile(value(choices=(Choice.keep(100),))), profile(device="cuda")]
    assert len({first.fingerprint(), *(other.fingerprint() for other in others)}) == 4


def test_a_damaged_document_is_refused() -> None:
    text = profile().to_json()
    for changed in [text.replace("100", "101", 1), text[:-9], "[]", "{}", text.replace("StepProfile", "Plan")]:
        with pytest.raises(PlanError, match="a StepProfile was asked for from a JSON text, but .*[.]$"):
            StepProfile.from_json(changed)
    document = json.loads(text)
    document["version"] = 99
    with pytest.raises(PlanError, match="version 99"):
        StepProfile.from_json(json.dumps(document))


def resealed(text: str, *path: Any, to: Any) -> str:
    """The document with a value changed, and with a checksum that fits again."""
    from backstash.planning.model.sealed import seal

    content = json.loads(text)["content"]
    inside = content
    for name in path[:-1]:
        inside = inside[name]
    if to is None:
        del inside[path[-1]]
    else:
        inside[path[-1]] = to
    return seal("StepProfile", content)


@pytest.mark.parametrize(
    ("path", "to", "flaw"),
    [
        (("device",), None, r"lacks \['device'\]"),
        (("colour",), 3, r"has \['colour'\]"),
        (("held_nbytes",), 1.5, "held_nbytes was asked for as <class 'int'>, but got 1.5"),
        (("held_nbytes",), True, "but got True"),
        (("positions", 0, "seconds"), "fast", "seconds was asked for as <class 'float'>"),
        (("values", 0, "choices", 1, "kind"), "melt", "but got 'melt'"),
        (("values", 0), 3, "which has no fields"),
        (("values", 0, "reads"), [4, 3], "not one or more ascending"),
        (("versions",), [], "versions was asked for as dict"),
    ],
)
def test_a_document_of_another_shape_is_refused(path: tuple[Any, ...], to: Any, flaw: str) -> None:
    with pytest.raises(PlanError, match=flaw):
        StepProfile.from_json(resealed(profile().to_json(), *path, to=to))

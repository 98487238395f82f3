"""Actions: what they take and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from backstash.codecs import Binary, Zvc
from backstash.policies import Keep, Recompute, Stash


@pytest.mark.parametrize("wrong", [{"max_depth": 0}, {"otherwise": Recompute()}, {"otherwise": Zvc()}])
def test_recompute_refuses_wrong_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Recompute was asked for .*, but it takes a depth of 1 or more"):
        Recompute(**wrong)


def test_stash_takes_names_and_codecs_and_several_of_them() -> None:
    assert Stash("zvc") == Stash(Zvc()) == Stash((Zvc(),))
    assert Stash(["binary", Zvc(0.5)]).codecs == (Binary(), Zvc(0.5))
    assert Stash("zvc").store == "device"
    assert Stash("zvc", store="host") != Stash("zvc")
    assert hash(Stash("zvc")) == hash(Stash(Zvc()))


@pytest.mark.parametrize("wrong", [3, None, (Zvc(), 3), Zvc])
def test_stash_refuses_an_object_that_is_no_codec(wrong: object) -> None:
    with pytest.raises(TypeError, match="codec"):
        Stash(wrong)  # type: ignore[arg-type]


def test_actions_are_frozen() -> None:
    for action in (Keep(), Stash("zvc")):
        with pytest.raises(AttributeError):
            action.store = "host"  # type: ignore[misc,union-attr]

"""A Session refuses arguments that it cannot use, with an error that says what to pass instead."""

from __future__ import annotations

from typing import Any

import pytest

from backstash import Session
from backstash.stores import HostStore


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"min_nbytes": "a"}, TypeError, r"asked for min_nbytes='a', but that is a number of bytes\. Pass an int"),
        ({"min_nbytes": 1.5}, TypeError, r"asked for min_nbytes=1.5, but"),
        ({"min_nbytes": -1}, ValueError, r"asked for min_nbytes=-1, but there are no fewer than 0 bytes\. Pass 0"),
        ({"model": "abc"}, TypeError, r"model='abc', but that is no nn\.Module\. Pass the module"),
        ({"stores": {"x": 3}}, TypeError, r"stores=\{'x': 3\}, but .* Pass one such as HostStore\(\)"),
        ({"stores": {"x": HostStore}}, TypeError, r"stores=\{'x': <class .* Pass one such as HostStore\(\)"),
        ({"stores": {3: HostStore()}}, TypeError, r"stores=\{3: .* a name is a str"),
        ({"stores": 3}, TypeError, r"stores=3, but that is no mapping\. Pass stores by their names"),
        (
            {"check": "a"},
            ValueError,
            r"asked for check='a', but the only check that has a name is 'full'",
        ),
        ({"check": 1.5}, TypeError, r"asked for check=1\.5, but that is a number of steps\. Pass an int, 0 or more"),
        (
            {"overwrite_gradients": 1},
            TypeError,
            r"asked for overwrite_gradients=1, but that is a switch\. Pass True",
        ),
        ({"check": True}, TypeError, r"asked for check=True, but"),
        ({"check": -1}, ValueError, r"asked for check=-1, but there are no fewer than 0 steps\. Pass 0 or more"),
        ({"check_limit": "a"}, TypeError, r"asked for check_limit='a', but that is a relative error\. Pass a number"),
        ({"check_limit": 0.0}, ValueError, r"asked for check_limit=0.0, but .* Pass a number above 0"),
        ({"check_limit": float("nan")}, ValueError, r"asked for check_limit=nan, but .* Pass a number above 0"),
    ],
)
def test_unusable_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Session("lossless", **arguments)


def test_usable_arguments_are_accepted() -> None:
    store = HostStore()
    session = Session("lossless", model=None, stores={"other": store}, min_nbytes=0, check=0, check_limit=1)
    assert session.stores["other"] is store

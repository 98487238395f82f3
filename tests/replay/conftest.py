"""Tests of scripts run where the interpreter is, as if nothing had been compiled in this process."""

from __future__ import annotations

import pytest

from backstash import session
from backstash.capture import modules
from backstash.replay import replaying


@pytest.fixture(autouse=True)
def passes_may_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ran before in this process: where something was compiled modules keep their hooks."""
    if replaying.native is None:
        pytest.skip("nothing is replayed: run 'python setup.py build_native' beside this torch")
    for each in (session, modules):
        monkeypatch.setattr(each, "has_compiled", lambda: False)

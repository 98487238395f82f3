"""A fixture for tests of budgets, which holds whatever ran before in their process."""

from __future__ import annotations

import pytest

from backstash import session
from backstash.planning.run import budgeted, course


@pytest.fixture
def compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing had been compiled, as other tests may have done: then no step would run without hooks."""
    monkeypatch.setattr(course, "may_compile", lambda: False)
    monkeypatch.setattr(budgeted, "may_compile", lambda: False)
    monkeypatch.setattr(session, "has_compiled", lambda: False)

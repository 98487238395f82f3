"""Checks after every test of gradients that no Session has left anything installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from session_checks import hooks_installed


@pytest.fixture(autouse=True)
def _nothing_is_left_installed() -> Iterator[None]:
    before = hooks_installed()
    yield
    assert hooks_installed() == before

"""Stores for tests of gradients, and a check after every test that no Session has left anything installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from session_checks import hooks_installed

from backstash.stores import DiskStore, HostStore, Store
from bench.link import LinkStore


@pytest.fixture(autouse=True)
def _nothing_is_left_installed() -> Iterator[None]:
    before = hooks_installed()
    yield
    assert hooks_installed() == before


@pytest.fixture(params=["host", "disk", "link"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "host":
        yield HostStore()
    elif request.param == "disk":
        with DiskStore(tmp_path) as disk:
            yield disk
    else:
        yield LinkStore(HostStore(), 1e9, 1e-5)

"""Tests of the fake device run in a process of their own, which registers it before anything else: see fake.py."""

from __future__ import annotations

import sys
from pathlib import Path


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves the tests out where the device is not registered. There ``tests/test_on_a_device.py`` runs them."""
    is_test = collection_path.name.startswith("test_")
    return True if is_test and "tests.device.fake" not in sys.modules else None

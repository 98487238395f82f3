"""Every test begins with the same random numbers, and leaves none of its own behind."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch


def pytest_collection_finish() -> None:
    """Takes what collecting has made out of the garbage collector's sight: many tests collect, and wait for it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    random.seed(0)
    np.random.seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield

"""Every test begins with the same random numbers and on one thread, and leaves neither behind."""

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
    torch.set_num_threads(1)  # before any fixture: what a kernel allocates depends on it


def pytest_sessionfinish() -> None:
    """Lets what was frozen be collected when the process ends: some extensions complain about what is left."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed() -> Iterator[None]:
    """Threads of small tensors wait for each other longer than they work where other tests run beside."""
    random.seed(0)
    np.random.seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    torch.set_num_threads(1)

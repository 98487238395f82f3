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


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed() -> Iterator[None]:
    """Threads of small tensors wait for each other longer than they work where other tests run beside."""
    random.seed(0)
    np.random.seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    torch.set_num_threads(threads)

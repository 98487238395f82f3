"""Every test begins with the same random numbers and on one thread, and leaves neither behind."""

from __future__ import annotations

import gc
import math
import os
import random
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings

from backstash.planning.run import course
from backstash.proofs import proofs

FEW_EXAMPLES = 15
"""Of hypothesis, where the cases of tests are thinned out too."""

settings.register_profile(
    "backstash",
    settings.get_profile("ci" if "CI" in os.environ else "default"),
    max_examples=60,
    deadline=None,  # the first call of an op costs more than all the others, and no test depends on the machine
)
settings.load_profile("backstash")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--cases``."""
    parser.addoption(
        "--cases",
        type=int,
        default=0,
        metavar="N",
        help="run N cases of each test that has more (its mark `cases` may ask for others); 0, the default, runs all",
    )


@pytest.hookimpl(trylast=True)  # after the marks have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out cases of tests that have more of them than ``--cases`` asks for.

    The first case stays, which is the simplest one in most tests. The others are drawn by a checksum of their names, so
    that every run and every worker draws the same, and a new case changes little about which of the old ones are drawn.
    """
    most = config.getoption("cases")
    if not most:
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen: set[pytest.Item] = set()
    for first, *others in cases.values():
        mark = first.get_closest_marker("cases")
        wanted = most if mark is None else mark.args[0]
        chosen |= {first, *sorted(others, key=lambda item: zlib.crc32(item.nodeid.encode()))[: wanted - 1]}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_configure(config: pytest.Config) -> None:
    """Silences torch's profiler, and makes ``torch.manual_seed`` cheap on machines without an accelerator.

    With ``--cases``, hypothesis makes fewer examples as well.

    For each kind of device that is not there torch notes the seed together with a formatted stack trace, which takes
    1 ms below pytest's deep stack. Tens of thousands of calls spent a quarter of the suite's time on that.
    """
    if config.getoption("cases"):
        settings.register_profile("backstash", settings.get_profile("backstash"), max_examples=FEW_EXAMPLES)
        settings.load_profile("backstash")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    for module in (torch.cuda, torch.xpu, torch.mtia):
        if not module.is_available():
            module.manual_seed_all = _seed_no_device  # type: ignore[assignment]


def _seed_no_device(seed: int) -> None:
    pass


def pytest_collection_finish() -> None:
    torch.set_num_threads(1)  # before any fixture: what a kernel allocates depends on it


def pytest_sessionfinish() -> None:
    """Lets frozen objects be collected when the process ends; some extensions complain about objects that are left."""
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def _old_objects_are_not_searched_for_garbage() -> None:
    """Hides everything that is older than a module's tests from the garbage collector.

    Many tests collect garbage to see what a Session still holds. A collection takes half a second when it has to visit
    all objects of the test collection and of earlier modules.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed() -> Iterator[None]:
    """Gives a test one thread, because small tensors' threads wait for each other while other tests run."""
    random.seed(0)
    np.random.seed(0)
    proofs.forget()  # tests break what was proven, and count what is proven for the first time
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _a_course_needs_as_few_steps_as_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a course time no plain steps, try all choices in one step, and compute all that it can between two steps."""
    monkeypatch.setattr(course, "PLAIN_STEPS", 0)
    monkeypatch.setattr(course, "MOST_TRIED", 0)
    monkeypatch.setattr(course, "LEAST", math.inf)

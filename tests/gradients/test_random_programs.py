"""Random training programs, as tests/fuzz makes them, and programs that once went wrong.

Whatever a program does, all that it can observe has the bits of plain torch under every policy, it raises where plain
torch raises and nowhere else, and nothing is left afterwards. A program that fails is minimised by
``python -m tests.fuzz --program FILE``, where FILE has the text that the failing test prints.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fuzz.execute import check
from tests.fuzz.generate import POLICIES, SMALL, generate
from tests.fuzz.kinds import COMMON, FEATURES
from tests.fuzz.program import Program, parse, to_text

LARGE = (4, 8, 32, 96)
"""384 KiB: decoded into buffers that are used again."""

NAMED = sorted((Path(__file__).parents[1] / "fuzz" / "programs").glob("*.txt"))
OPTIONAL = [name for name in FEATURES if name not in COMMON]
BY_FEATURE, MIXED, LARGE_MIXED = 8, 100, 12
"""How many programs have each optional feature alone, and a random few of them."""


@pytest.fixture(autouse=True, scope="module")
def _collecting_garbage_is_quick() -> Iterator[None]:
    """What was there before these tests is not searched for garbage after each of them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def assert_no_failure(program: Program) -> None:
    failure = check(program).failure
    assert failure is None, f"{failure.kind}: {failure.detail}\n\n{to_text(program)}"


@pytest.mark.parametrize("seed", range(BY_FEATURE))
@pytest.mark.parametrize("feature", OPTIONAL)
def test_program_with_feature(feature: str, seed: int) -> None:
    policy = POLICIES[seed % len(POLICIES)]
    assert_no_failure(generate(1000 * (1 + OPTIONAL.index(feature)) + seed, features=[feature], policy=policy))


@pytest.mark.parametrize("seed", range(MIXED))
def test_program_with_mixed_features(seed: int) -> None:
    assert_no_failure(generate(seed, shape=SMALL))


@pytest.mark.parametrize("seed", range(LARGE_MIXED))
def test_large_program(seed: int) -> None:
    assert_no_failure(generate(MIXED + seed, shape=LARGE, length=10))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("path", NAMED, ids=lambda path: path.stem)
def test_named_program(path: Path, policy: str) -> None:
    assert_no_failure(replace(parse(path.read_text()), policy=policy))

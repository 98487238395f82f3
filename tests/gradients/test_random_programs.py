"""Random training programs from tests/fuzz, and programs that once went wrong, behave as under plain torch.

Under every policy, everything that a program can observe has the bits of plain torch, the program raises an error
exactly where plain torch raises it, and nothing is left afterwards. To minimise a program that fails, save the text
that the failing test prints, and run ``python -m tests.fuzz --program FILE``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backstash import Policy
from tests.fuzz.execute import check
from tests.fuzz.generate import BY_NAME, POLICIES, SMALL, generate
from tests.fuzz.kinds import COMMON, FEATURES
from tests.fuzz.program import Program, parse, to_text

LARGE = (4, 8, 32, 96)
"""384 KiB: decoded into buffers that are used again."""

NAMED = sorted((Path(__file__).parents[1] / "fuzz" / "programs").glob("*.txt"))
OPTIONAL = [name for name in FEATURES if name not in COMMON]
BY_FEATURE, MIXED, CHANGING, LARGE_MIXED = 8, 100, 60, 12
"""How many programs have one optional feature; a few; a few and steps that differ; a few and large values."""

RAISES = """\
settings(seed=1)
with forward():
    v0 = leaf()
    v1 = tanh(v0)
    loss0 = loss(v1)
with backward():
    halve_(v1)
    backward(loss0, retain=False)
"""
"""Plain torch raises an error, because what tanh saved is changed before backward."""


class _NeverRaises(torch.autograd.graph.saved_tensors_hooks):
    """Stands for a Session that overlooks changes of saved tensors: it saves copies and compares no versions."""

    def __init__(self, policy: Policy, min_nbytes: int) -> None:
        super().__init__(lambda x: x.detach().clone(), lambda x: x)


def assert_no_failure(program: Program) -> None:
    failure = check(program).failure
    assert failure is None, f"{failure.kind}: {failure.detail}\n\n{to_text(program)}"


@pytest.mark.cases(208)
@pytest.mark.parametrize("seed", range(BY_FEATURE))
@pytest.mark.parametrize("feature", OPTIONAL)
def test_program_with_feature(feature: str, seed: int) -> None:
    policy = POLICIES[seed % len(POLICIES)]
    assert_no_failure(generate(1000 * (1 + OPTIONAL.index(feature)) + seed, features=[feature], policy=policy))


@pytest.mark.cases(30)
@pytest.mark.parametrize("seed", range(MIXED))
def test_program_with_mixed_features(seed: int) -> None:
    assert_no_failure(generate(seed, shape=SMALL, changing=False))


@pytest.mark.cases(10)
@pytest.mark.parametrize("seed", range(CHANGING))
def test_program_that_changes_from_step_to_step(seed: int) -> None:
    assert_no_failure(generate(seed, shape=SMALL, changing=True))


@pytest.mark.parametrize("seed", range(LARGE_MIXED))
def test_large_program(seed: int) -> None:
    assert_no_failure(generate(MIXED + seed, shape=LARGE, length=10, changing=False))


CHANGED_AFTERWARDS = (
    "batch_norm_weight_changed_before_backward",
    "changed_after_deleting_a_loss",
    "changed_after_the_first_of_two_losses",
    "norm_weight_changed_before_backward",
)
"""Programs that change what a costly call is repeated from after the Session was left: an error, as the hazards say."""


@pytest.mark.cases(200)
@pytest.mark.parametrize("policy", BY_NAME)
@pytest.mark.parametrize("path", NAMED, ids=lambda path: path.stem)
def test_named_program(path: Path, policy: str) -> None:
    if policy == "remake" and path.stem in CHANGED_AFTERWARDS:
        failure = check(replace(parse(path.read_text()), policy=policy)).failure
        assert failure is not None and failure.kind == "Session raises"
        return
    assert_no_failure(replace(parse(path.read_text()), policy=policy))


def test_a_session_that_does_not_raise_where_plain_torch_raises_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    program = parse(RAISES)
    assert check(program).plain_error == "RuntimeError"
    assert_no_failure(program)
    monkeypatch.setattr("tests.fuzz.execute.Session", _NeverRaises)
    with pytest.raises(AssertionError, match="plain raises: the Session raises nothing, plain RuntimeError"):
        assert_no_failure(program)

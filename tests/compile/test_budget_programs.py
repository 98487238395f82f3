"""Random small models under budgets: the bits of compiled plain, and peaks within the budget.

``python -m tests.compile.budget_programs --minutes 30`` runs more of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compile.budget_programs import IMAGES, TOKENS, Program, failures

pytestmark = pytest.mark.filterwarnings("ignore")
SLOW, FUSED = (0, 2, 6), (2,)
"""Seeds of programs under aot_eager, and of one under Inductor."""


@pytest.mark.slow
def test_a_short_program_under_two_budgets() -> None:
    none = frozenset[int]()
    program = Program(0, "tokens", ("gated",), none, none, False, False, False, True, (0.8, 0.001))
    assert failures(program, "aot_eager") == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW)
def test_a_program_under_two_budgets(seed: int) -> None:
    program = Program.random(seed)
    assert failures(program, "aot_eager") == [], program


@pytest.mark.slow
@pytest.mark.parametrize("seed", FUSED)
def test_a_program_that_inductor_compiles_under_two_budgets(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    program = Program.random(seed)
    assert failures(program, "inductor") == [], program


def test_programs_differ_in_everything_that_they_can() -> None:
    found = [Program.random(seed) for seed in range(60)]
    assert {name for program in found for name in program.blocks} == set(TOKENS) | set(IMAGES)
    for name in ("autocast", "channels_last", "dynamic", "train"):
        assert {getattr(program, name) for program in found} == {False, True}
    assert any(program.checkpointed for program in found)
    assert any(program.broken for program in found)
    assert Program.random(5) == Program.random(5)

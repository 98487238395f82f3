"""Trainings of modules whose steps change at random have the bits that they have without Sessions."""

from __future__ import annotations

import pytest

from backstash import Session
from tests.fuzz import trainings
from tests.fuzz.trainings import difference, main


@pytest.mark.parametrize("seed", range(6))
def test_a_training_that_changes_at_random_has_the_same_bits(seed: int) -> None:
    assert not difference(seed)


def test_other_bits_are_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(trainings.Sessions, "__call__", lambda self, policy: Session("quantized", min_nbytes=0))
    assert main(["--trainings", "1", "--minutes", "1"]) == 1
    assert "step 0 has other bits, after no change" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 160, 20))
def test_many_trainings_that_change_at_random_have_the_same_bits(first: int) -> None:
    assert not [failure for seed in range(first, first + 20) if (failure := difference(seed))]

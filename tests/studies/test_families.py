"""Every family of transformers trains to the same bits under an exact policy, and the program says if one does not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
from studies import families
from tests.networks.families import FAMILIES, TINY

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("family", ["GPT-2", "ConvNeXt"])
def test_a_family_gives_the_same_bits(family: str) -> None:
    row = families.compare(family, TINY, min_nbytes=0)
    assert row.losses_equal and row.gradients_equal
    assert row.ratio > 1.2
    assert row.peak_nbytes > 0
    assert row.stash_nbytes < row.saved_nbytes


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"GPT-2", "ConvNeXt"}))
def test_every_family_gives_the_same_bits(family: str) -> None:
    row = families.compare(family, TINY, min_nbytes=0)
    assert row.losses_equal and row.gradients_equal
    assert row.ratio > 1


def test_the_program_writes_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "families.json"
    assert families.main(["--tiny", "--only", "ViT", "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["families"]
    assert row["family"] == "ViT"
    assert "same bits" in capsys.readouterr().out


def test_a_difference_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    good = families.compare("ViT", TINY)
    monkeypatch.setattr(families, "compare", lambda *_: dataclasses.replace(good, gradients_equal=False))
    assert families.main(["--tiny", "--only", "ViT"]) == 1


def test_a_session_around_the_call_has_the_peak_of_one_around_the_step() -> None:
    plain, call, loss, step = families.windows(dataclasses.replace(TINY, tokens=64), 512, min_nbytes=0)
    assert call.saved_nbytes < loss.saved_nbytes
    assert call.peak_nbytes < plain.peak_nbytes
    assert call.peak_nbytes <= 1.01 * min(loss.peak_nbytes, step.peak_nbytes)

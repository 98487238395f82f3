"""The benchmark of whole steps runs on a small network, and does not time a candidate whose gradients are wrong."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import steptime
from bench.cases import QUICK, Case
from bench.rounds import Effort, Summary
from studies.published import results as published
from studies.published.steps import step_overhead
from tests.networks.transformers_vision import VISION

SMALL = QUICK[0]


@pytest.mark.slow
def test_one_round_of_a_small_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(steptime, "CASES", QUICK)
    out = tmp_path / "steptime-cpu-2026-01-02.json"
    assert steptime.main(["--touch-gib", "0.01", "--rounds", "1", "--only", SMALL.name, "--json", str(out)]) == 0
    (network,) = json.loads(out.read_text())["networks"]
    assert network["case"]["name"] == SMALL.name and network["status"] == "measured" and network["saved"] > 10
    rows = {row["candidate"]: row for row in network["rows"]}
    assert list(rows) == list(steptime.candidates())
    assert rows["plain"]["times_plain"]["median"] == 1.0
    assert all(row["times_plain"]["median"] > 0 and row["seconds"]["count"] == 1 for row in rows.values())
    assert rows["keep"]["ratio"] == 1.0 and rows["plain again"]["ratio"] is None
    assert rows["lossless"]["ratio"] > 1.0
    assert rows["lossless"]["stash_nbytes"] == rows["lossless, new Session"]["stash_nbytes"]
    assert "lossless, new Session" in capsys.readouterr().out
    monkeypatch.setattr(published, "FOLDER", tmp_path)
    assert f"(results:{out.name})" in step_overhead() and "| vgg_small, batch 4 | " in step_overhead()


def test_a_resumed_run_measures_what_has_too_few_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(case: Case, effort: Effort) -> steptime.Measured:
        measured.append(case.name)
        seconds = Summary(1.0, 1.0, 1.0, 1.0, 2 if measured == ["first"] else 7)
        return steptime.Measured(case, "measured", rows=(steptime.Row("plain", seconds, seconds, 1.0, 8, 4, 2.0),))

    monkeypatch.setattr(steptime, "CASES", (Case("first", "vgg", 1, 8), Case("second", "vgg", 1, 8)))
    monkeypatch.setattr(steptime, "measure", measure)
    arguments = ["--touch-gib", "0.01", "--json", str(tmp_path / "steptime.json")]
    for expected in (["first", "second"], ["first", "second", "first"], ["first", "second", "first"]):
        assert steptime.main([*arguments, "--resume"]) == 0
        assert measured == expected
        found = json.loads((tmp_path / "steptime.json").read_text())["networks"]
        assert [network["case"]["name"] for network in found] == ["first", "second"]


def test_the_table_says_that_nothing_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "FOLDER", tmp_path)
    assert step_overhead() == "Not measured yet. The command is `backstash bench steptime`."


def test_wrong_gradients_are_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def double(x: Tensor) -> Tensor:
        return 2 * x if x.is_floating_point() else x  # pooling would read outside of its input with doubled indices

    def doubling() -> AbstractContextManager[object]:
        return torch.autograd.graph.saved_tensors_hooks(lambda x: x, double)

    plain = steptime.candidates()["plain"]
    wrong = {"plain": plain, "doubled": steptime.Candidate(doubling)}
    monkeypatch.setattr(steptime, "candidates", lambda: wrong)
    monkeypatch.setattr(steptime, "CASES", (SMALL,))
    assert steptime.main(["--touch-gib", "0", "--rounds", "1"]) == 1
    assert "vgg_small, batch 4, 32x32: FAILED: doubled was to compute the gradients" in capsys.readouterr().out


def test_a_network_whose_package_is_missing_is_skipped() -> None:
    found = steptime.measure(Case("small", "vgg_small", 4, 32, needs="no_such_package"), Effort(1))
    assert (found.status, found.reason, found.rows) == ("skipped", "no_such_package is not installed", ())


@pytest.mark.parametrize(
    ("name", "parameters"), [("convnext_tiny", 28_589_128), ("vit_b16", 86_567_656), ("swin_tiny", 28_288_354)]
)
def test_networks_of_transformers_have_the_published_sizes(name: str, parameters: int) -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = VISION[name]()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model.training

"""The study of what plans take to make: its steps are counted, its budgets kept, its table printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.cases import Case
from studies import plan_times


def test_a_small_network_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_times, "CASES", (Case("small", "vgg_small", 2, 32),))
    out = tmp_path / "plan-times.json"
    assert plan_times.main(["--rounds", "1", "--json", str(out)]) == 0
    (network,) = json.loads(out.read_text())["networks"]
    assert network["profiled"]["steps"] >= 5 and network["values"] > 5
    for row in network["budgets"]:
        assert row["differing"] == []
        assert row["smallest_nbytes"] or row["reached_nbytes"] <= row["predicted_nbytes"] <= row["nbytes"]
    assert "predicted x" in capsys.readouterr().out
    assert plan_times.main(["--rounds", "1", "--json", str(out), "--resume"]) == 0

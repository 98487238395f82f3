"""The benchmark of single backward nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backstash.stash.buffers import release_buffers
from bench import nodes
from bench.rounds import Effort


def test_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "CASES", {"dropout": nodes.CASES["dropout"]})
    assert nodes.main(["--images", "1", "--rounds", "2", "--json", str(tmp_path / "nodes.json")]) == 0
    (row,) = json.loads((tmp_path / "nodes.json").read_text())["rows"]
    assert row["nbytes"] == 4 << 20
    assert row["plain"]["count"] == 2 and row["times_plain"]["median"] > 0


def test_a_norm_writes_over_its_gradient() -> None:
    release_buffers()  # which count, and may be another test's
    row = nodes.measure("batch_norm", 1, Effort(1))
    assert row.ours_peak_nbytes <= 2 * row.nbytes  # a third one would be the norm's own

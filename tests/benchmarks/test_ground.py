from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import ground


def test_it_measures_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ground, "SHAPE", (1, 8, 64, 64))
    assert ground.main(["--rounds", "2", "--json", str(tmp_path / "ground.json")]) == 0
    rows = json.loads((tmp_path / "ground.json").read_text())["rows"]
    assert len(rows) == 5
    assert all(row["median"] > 0 for row in rows.values())

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from studies import ground


def test_it_measures_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ground, "SHAPE", (1, 8, 64, 64))
    monkeypatch.setattr(ground, "HEAD", (64, 16, 100))
    assert ground.main(["--rounds", "2", "--json", str(tmp_path / "ground.json")]) == 0
    rows = json.loads((tmp_path / "ground.json").read_text())["rows"]
    assert len(rows) == 7 + hasattr(torch.nn.functional, "linear_cross_entropy")
    assert all(row["median"] > 0 for row in rows.values())

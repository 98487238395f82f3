"""The benchmark of sz runs, and its JSON is complete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from studies import sz_table


@pytest.mark.slow
def test_everything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sz.json"
    assert sz_table.main(["--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["codecs"]
    ours = [row for row in rows if row["codec"] == "sz"]
    assert len(ours) == 4 * len(sz_table.BOUNDS)
    assert all(0.8 < row["ratio"] / row["entropy_ratio"] < 1.02 for row in ours if row["values"].startswith("float32"))
    assert {"zlib 1"} <= {row["codec"] for row in rows}
    assert "entropy's" in capsys.readouterr().out

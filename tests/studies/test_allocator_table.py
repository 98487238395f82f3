"""The benchmark of allocators, on a small network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from studies import allocator


@pytest.mark.slow
def test_every_candidate_has_a_process_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "allocator.json"
    arguments = ["--cases", "vgg_small", "--settings", "default", "--turns", "1", "--rounds", "1", "--allocators", ""]
    assert allocator.main([*arguments, "--json", str(file)]) == 0
    rows = {row["candidate"]: row for row in json.loads(file.read_text())["cases"]["vgg_small"]}
    assert {"plain", "lossless", "plan, smallest budget"} <= set(rows)
    assert rows["plan, smallest budget"]["peak_nbytes"] < rows["plain"]["peak_nbytes"]
    assert "plan, smallest budget" in capsys.readouterr().out


def test_a_case_that_is_not_there_is_refused() -> None:
    assert allocator.find("llama", 3).batch == 3
    with pytest.raises(ValueError, match="the case 'lama' was asked for; there is no such case; use one of"):
        allocator.find("lama", 0)

"""The benchmark of bounds that follow the gradients: it runs, and its JSON holds what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import comet


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads of many small steps would wait for each other where other tests run beside."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore:comet. with the input:UserWarning")
def test_everything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    file = tmp_path / "comet.json"
    assert comet.main(["--quick", "--seconds", "20", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert [one["variant"] for one in result["trainings"]] == list(comet.VARIANTS)
    by_variant = {one["variant"]: one for one in result["trainings"]}
    assert by_variant["plain"]["ratio"] == 1.0
    assert by_variant["lossless"]["loss"] == by_variant["plain"]["loss"]
    assert by_variant["comet-szp"]["conv_ratio"] > by_variant["lossless"]["conv_ratio"]
    assert all(variant in capsys.readouterr().out for variant in ["comet-sz"])

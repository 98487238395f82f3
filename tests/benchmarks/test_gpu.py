"""The benchmark of steps on a GPU, on a CPU and with a small network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import gpu


@pytest.fixture(autouse=True)
def _not_deterministic_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


@pytest.mark.slow
def test_every_way_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu.json"
    assert gpu.main(["--device", "cpu", "--quick", "--rounds", "1", "--json", str(file)]) == 0
    (network,) = json.loads(file.read_text())["networks"]
    rows = {row["way"]: row for row in network["rows"]}
    assert {"plain", "plain again", "checkpoint", "save_on_cpu", "keep", "lossless", "offload"} <= rows.keys()
    assert any(name.startswith("plan, ") for name in rows)
    assert rows["lossless"]["peak_nbytes"] < rows["plain"]["peak_nbytes"]
    assert not any(row["differing"] for row in rows.values()) and not network["failed"]
    assert "plan, " in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_has_to_be_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "torch finds no CUDA device; use --device cpu" in capsys.readouterr().err

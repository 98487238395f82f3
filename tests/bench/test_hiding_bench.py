"""Movement that hides behind a link, in simulated time: a small network here, and the file with the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench import hiding
from studies.published.results import load

MEASURED: dict[str, Any] = {
    "name": "small",
    "rows": [
        {"way": "plain", "peak_nbytes": 3 << 30, "seconds": {"median": 0.05}},
        {"way": "offload", "peak_nbytes": 1 << 30, "seconds": {"median": 0.3}},
    ],
}


def small() -> tuple[nn.Module, Any]:
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU()) for _ in range(12)]
    model, x = nn.Sequential(*layers), torch.randn(16, 32)

    def loss() -> Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]

    return model, loss


def check(rows: list[Any]) -> None:
    by_way = {row["way"]: row for row in rows}
    assert all(row["exact"] for row in rows)
    plain = by_way["lossless"]["seconds"]
    assert by_way["offload"]["seconds"] <= 1.1 * by_way["offload"]["floor"]
    hidden = by_way["offload_hidden"]
    assert hidden["seconds"] <= 1.002 * plain and hidden["moved_nbytes"] > 0
    assert hidden["held_nbytes"] < by_way["lossless"]["held_nbytes"]
    for gib in hiding.GIB:
        row = by_way[f"offload_hidden, {gib} GiB"]
        assert row["seconds"] <= 1.03 * row["floor"]
    for row in rows:
        if row["predicted"] is not None:
            assert row["seconds"] <= 1.001 * row["predicted"]


def test_a_small_network_waits_for_no_more_than_it_must(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hiding, "NETWORKS", {"small": ("Small", small, 8, 4)})
    measured = tmp_path / "measured.json"
    measured.write_text(json.dumps({"networks": [MEASURED]}))
    monkeypatch.setattr(hiding, "MEASURED", measured)
    path = tmp_path / "hiding.json"
    assert hiding.main(["--json", str(path)]) == 0
    (network,) = json.loads(path.read_text())["networks"]
    assert network["forward_seconds"] + network["backward_seconds"] == pytest.approx(4 * 0.05)
    check(network["rows"])
    assert "Small, batch 32" in capsys.readouterr().out


def test_the_results_are_near_the_floor() -> None:
    networks = load("hiding")["networks"]
    assert [network["title"] for network in networks] == ["ResNet-50", "GPT-2, 4 layers"]
    for network in networks:
        check(network["rows"])


def test_a_link_needs_a_speed() -> None:
    with pytest.raises(SystemExit, match="bytes per second, but it takes more"):
        hiding.main(["--bytes-per-second", "0"])

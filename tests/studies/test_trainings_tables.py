"""Tables of long trainings are made of whatever their results files hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from studies.published import claims, compiled_models, results, trainings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    return tmp_path


def write(folder: Path, kind: str, **found: Any) -> None:
    (folder / f"{kind}-2030-01-01.json").write_text(json.dumps({"machine": None, **found}))


def outcome(variant: str, seed: int, score: float) -> dict[str, Any]:
    ratio = None if variant == "plain" else 8.0
    return {
        **{"network": "alexnet", "variant": variant, "seed": seed, "steps": 2500, "score": score},
        **{"losses": [2.0, 1.0], "ratio": ratio, "resumed": []},
    }


def test_what_is_not_there_is_said(folder: Path) -> None:
    for table in trainings.TABLES.values():
        assert table().startswith("Not measured yet: `python -m studies.")
    write(folder, "accuracy-alexnet-cpu", outcomes=[])
    assert trainings.accuracy().startswith("Not measured yet")


def test_accuracies_are_compared_with_plain_of_the_same_seeds(folder: Path) -> None:
    partial = [outcome("plain", 1, 0.88), outcome("comet-1", 1, 0.87), outcome("plain", 2, 0.90)]
    write(folder, "accuracy-alexnet-cpu", outcomes=partial)
    rows = trainings.accuracy().splitlines()
    assert "| AlexNet | plain | 2,500 | 2 | 89.00 \u00b1 1.41 |  |  | 1.000 |" in rows
    assert "| AlexNet | comet-1 | 2,500 | 1 | 87.00 | -1.00 | 8.00 | 1.000 |" in rows
    (folder / "accuracy-alexnet-cpu-2030-01-01.png").touch()
    assert "](results:accuracy-alexnet-cpu-2030-01-01.png)" in trainings.accuracy()


def test_densities_of_a_training(folder: Path) -> None:
    looks = [
        {"step": step, "layer": layer, "nonzero": nonzero, "ratio": ratio, "nbytes": 100}
        for step, nonzero, ratio in ((0, 0.5, 2.0), (500, 0.25, 4.0))
        for layer in ("a", "b")
    ]
    trained = {"network": "alexnet", "steps": 500, "accuracy": 0.9, "densities": looks}
    write(folder, "cdma-training-cpu", networks=[trained])
    assert "| AlexNet | 0.01 | 500 | 90.0 | 50%, 2.00x | 50%, 2.00x | 50%, 2.00x | 75%, 4.00x | 75%, 4.00x |" in (
        trainings.densities()
    )
    assert "| AlexNet | `a` | 50%, 2.00x | 75%, 4.00x |" in trainings.layers()
    assert claims._densities() == "ratio (and accuracy) at the end: AlexNet 4.00 (90.0 %)"


def test_of_a_network_trained_twice_the_better_training_is_shown(folder: Path) -> None:
    looks = [{"step": 0, "layer": "a", "nonzero": 0.5, "ratio": 2.0, "nbytes": 100}]
    trained = {"network": "nin", "steps": 9, "accuracy": 0.1, "densities": looks}
    again = {**trained, "accuracy": 0.8, "rate": 0.003, "densities": [{**looks[0], "ratio": 3.0}]}
    sparse = {**trained, "network": "spiking", "accuracy": 0.99}
    write(folder, "cdma-training-cpu", networks=[trained])
    write(folder, "cdma-training-rate-cpu", networks=[again, sparse])
    assert "| NiN | 0.01 | 9 | 10.0 |" in trainings.densities()
    assert "| NiN | 0.003 | 9 | 80.0 |" in trainings.densities()
    assert trainings.layers().count("NiN") == 1
    assert claims._densities() == "ratio (and accuracy) at the end: NiN 3.00 (80.0 %)"


def test_of_a_budget_measured_twice_the_times_of_more_rounds_are_shown(folder: Path) -> None:
    def row(candidate: str, peak: int, times: float, rounds: int) -> dict[str, object]:
        quartiles = {"median": times, "q1": times, "q3": times, "low": times, "count": rounds}
        return {"candidate": candidate, "peak_nbytes": peak << 20, "times_plain": quartiles, "error": 0.0}

    case = {"name": "resnet50", "network": "resnet50", "batch": 8, "channels_last": False}
    plain = row("compiled", 100, 1.0, 5)
    for kind, measured in (
        ("compile-frontier-a-cpu", [plain, row("lossless, budget 0.5", 50, 1.5, 7)]),
        ("compile-frontier-b-cpu", [plain, row("lossless, budget 0.5", 51, 1.2, 5), row("again", 99, 1.1, 5)]),
    ):
        write(folder, kind, cases=[case], frontier={"resnet50": measured})
    lines = compiled_models.frontiers().splitlines()[-4:]
    assert [line.split("|")[2].strip() for line in lines] == ["---", "compiled", "again", "lossless, budget 0.5"]
    assert "| 50 | 50 | 1.50 (1.50 to 1.50) |" in lines[-1]

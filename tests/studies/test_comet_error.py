"""The whole error of every weight gradient, beside its prediction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from studies import comet_error

TINY = ["--network", "small_inception", "--steps", "6", "--every", "2", "--batch", "16", "--size", "12"]


@pytest.mark.slow
def test_every_layer_has_its_whole_error_near_the_predicted_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "error.json"
    assert comet_error.main([*TINY, "--json", str(path)]) == 0
    results = json.loads(path.read_text())
    layers = [comet_error.Layer(**layer) for layer in results["layers"]]
    assert results["ratio"] > 4
    assert {layer.kind for layer in layers} == {"convolution", "batch norm"}
    ratios = sorted(layer.measured / layer.predicted for layer in layers)
    assert 0.6 < ratios[len(ratios) // 2] < 1.6
    assert all(layer.cosine > 0.9 for layer in layers)
    assert "whole, measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(["--steps", "4", "--every", "4"], "no value would have a bound"), (["--sigma", "nan"], "above zero")],
)
def test_what_cannot_be_measured_is_refused(wrong: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        comet_error.main(wrong)

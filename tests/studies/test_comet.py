"""The benchmark of bounds that follow the gradients runs, and its JSON agrees with what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from backstash.redeem.table import LARGE
from studies import comet


@pytest.mark.slow
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
    for name in ("comet-szp", "comet-1", "comet-10", "quantized-2"):
        assert by_variant[name]["conv_ratio"] > by_variant["lossless"]["conv_ratio"]
        # The network is so small that its values are decoded whole instead of being claimed.
        assert by_variant[name]["peak_nbytes"] < by_variant["plain"]["peak_nbytes"] + LARGE
    assert by_variant["comet-1"]["conv_ratio"] > by_variant["comet-szp"]["conv_ratio"]
    assert {part["codec"] for part in by_variant["comet-1"]["parts"]} >= {"signed sz"}
    assert len(result["equations"]) == 4
    assert all(0.8 < row["measured"] < 1.25 for row in result["equations"])
    shown = capsys.readouterr().out
    assert all(variant in shown for variant in comet.VARIANTS)


def test_steps_that_collect_are_told_apart() -> None:
    overheads = [1.1, 1.1, 1.6, 1.2, 1.1, 1.1, 1.1, 1.9]
    ordinary, collection = comet._ordinary(overheads, {-3, 3, 8})
    assert ordinary is not None and (ordinary.count, ordinary.median) == (5, pytest.approx(1.1))
    assert collection == pytest.approx(0.6)  # that of the last step has not come to its end
    ordinary, collection = comet._ordinary(overheads, {3, 4})
    assert ordinary is not None and ordinary.count == 5 and collection == pytest.approx((0.5 + 0.1 + 0.0) / 2)
    assert comet._ordinary(overheads, set())[1] is None
    assert comet._ordinary([1.5], {1}) == (None, None)


@pytest.mark.parametrize("network", ["alexnet", "vgg16", "resnet18", "resnet50"])
def test_the_papers_networks_are_there(network: str) -> None:
    model = comet.NETWORKS[network]()
    size = comet.SCHEDULES[network].size
    assert model(torch.zeros(2, 1, size, size)).shape == (2, 10)


def test_unknown_variants() -> None:
    with pytest.raises(SystemExit, match="comet-2 some are unknown; there are plain, lossless"):
        comet.main(["--variants", "comet-2"])

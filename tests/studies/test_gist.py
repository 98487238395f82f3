"""Gist's benchmark runs, its JSON is complete, its gate and its fitted line are right, and its command works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from backstash import Keep, Stash
from backstash.cli import benching, commands
from backstash.codecs import Zvc
from backstash.policies.base import Action, Outcome
from backstash.saved import SavedTensor
from bench.peers import Plain
from bench.rounds import Effort, Summary
from bench.training import Schedule
from studies import batch_table, gist, layer_table
from studies.batch_table import Question
from studies.gist import STAGES, Batch, Stage

# ---- the whole of it -----------------------------------------------------------------------------


@pytest.mark.slow
def test_quick_run_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "new" / "gist.json"
    assert gist.main(["--quick", "--seconds", "1", "--networks", "vgg_small", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    printed = capsys.readouterr().out
    assert result["complete"] and result["quick"] and result["seconds"] > 0
    assert {"cpu", "cores", "kernels", "commit"} <= result["machine"].keys()
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert all(f"== {section} ==" in printed for section in gist.SHARES)
    (network,) = result["networks"]
    check_network(network)
    assert "batch 4, 32x32, not the paper's 64: quick" in printed
    assert [mean["stage"] for mean in result["means"]] == [stage.name for stage in STAGES]
    assert result["means"][0]["ratio"] == pytest.approx(network["rows"][1]["ratio"])
    (layers,) = result["layers"]
    check_layers(layers)
    (deep,) = result["deep"]
    check_deep(deep)


def check_network(network: dict[str, Any]) -> None:
    assert network["case"]["status"] == "measured" and network["batch"] == 4
    plain, *rows = network["rows"]
    assert (plain["ratio"], plain["mfr_static"], plain["mfr_dynamic"], plain["peak_ratio"]) == (1, 1, 1, 1)
    for row, stage in zip(rows, STAGES, strict=True):
        assert row["stage"] == stage.name
        assert row["ratio"] == pytest.approx(row["saved_nbytes"] / row["stash_nbytes"]) and row["ratio"] > 1
        assert row["mfr_dynamic"] > row["mfr_dynamic_all"] and row["mfr_static"] > 1
        assert row["times_plain"]["count"] >= 1
        if stage.exact:
            assert row["exact"] and row["gradient_error"] == 0
        else:
            assert not row["exact"] and 0 < row["gradient_error"] < 0.1
    ratios = {row["stage"]: row["ratio"] for row in rows}
    assert ratios["gist_lossless"] < ratios["gist_fp16"] < ratios["gist_fp10"] < ratios["gist_fp8"]
    errors = {row["stage"]: row["gradient_error"] for row in rows}
    assert errors["gist_fp16"] < errors["gist_fp10"] < errors["gist_fp8"]


def check_layers(layers: dict[str, Any]) -> None:
    assert layers["training"]["steps"] >= 1 and set(layers["ratios"]) == {stage.name for stage in STAGES}
    assert len(layers["rows"]) == 9
    for row in layers["rows"]:
        assert 0 < row["zero_share"] < 1
        assert row["csr_ratio"] == pytest.approx(row["nbytes"] / row["csr_nbytes"])
        assert row["zvc_ratio"] < row["zvc_fp8_ratio"]
        assert set(row["chosen"]) == set(row["stash_nbytes"]) == set(layers["ratios"])
    by_key = {row["key"]: row for row in layers["rows"]}
    bits, values = by_key["features.3/Relu#0:result"], by_key["features.2/Convolution#0:input"]
    assert bits["chosen"]["gist_lossless"] == "bitmask" and bits["nbytes"] == 32 * bits["stash_nbytes"]["gist_lossless"]
    assert values["chosen"]["gist_fp8"] == "zvc+fp8"
    assert values["stash_nbytes"]["gist_fp8"] == values["zvc_fp8_nbytes"]


def check_deep(deep: dict[str, Any]) -> None:
    budget = deep["question"]["budget_nbytes"]
    plain, *rows = deep["rows"]
    assert plain["name"] == "plain" and plain["ratio"] == plain["speed"] == 1
    assert [row["name"] for row in rows] == [*gist.DEEP_STAGES, "plan"]
    for row in (plain, *rows):
        assert row["step_nbytes"] <= budget < row["step_nbytes"] + 3 * row["nbytes_per_image"]
        assert abs(row["batch"] - row["predicted"]) <= 0.25 * row["predicted"] and row["error"] < 0.02
    assert plain["batch"] < rows[0]["batch"] < rows[-1]["batch"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--networks", "alexnet,vgg17"], "the network 'vgg17' was asked for; there is no such network; use some of"),
        (["--only", "speed"], "the section 'speed' was asked for; there is no such section; use some of networks"),
        (["--batch", "0"], "at least 1"),
    ],
)
def test_wrong_arguments_are_explained(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gist.main(arguments)
    assert message in capsys.readouterr().err


def test_batches_are_the_papers_or_say_why_not() -> None:
    asked = gist.parse([])
    assert asked.names == ("alexnet", "nin", "overfeat", "vgg16", "googlenet")
    for name in asked.names:
        batch = asked.batch_of(name)
        assert (batch.size == gist.PAPER["minibatch"]) == (batch.why == "")
    assert gist.parse(["--batch", "64"]).batch_of("vgg16") == Batch(64)
    assert gist.parse(["--batch", "5"]).batch_of("vgg16") == Batch(5, "asked for")


def test_without_matplotlib_there_is_no_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = gist._draw([], tmp_path / "gist.png", "")
    assert "matplotlib is not installed; run: pip install 'backstash[plot]'" in said


# ---- networks ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HalvingOne:
    """A policy that halves one activation when it stores it."""

    def decide(self, saved: SavedTensor) -> Action:
        return Stash(Halving()) if saved.key == "features.7/Convolution#0:input" else Keep()

    def observe(self, outcome: Outcome) -> None:
        pass


@dataclass(frozen=True)
class Halving(Zvc):
    def encode(self, x: torch.Tensor) -> Any:
        return super().encode(x / 2)


def test_an_exact_stage_that_is_not_exact_fails() -> None:
    result = gist.measure("vgg_small", gist.QUICK_BATCH, (Stage(HalvingOne()),), Effort(1))
    assert result.case.status == "failed" and result.rows == ()
    assert "1 of 19 differ (features.7.weight)" in result.case.reason and "FAILED" in gist.show(result)
    assert gist.means([result]) == []


def test_a_failed_gate_fails_the_run() -> None:
    arguments = ["--quick", "--networks", "vgg_small", "--only", "networks"]
    assert gist.main(arguments, (Stage(HalvingOne()),)) == 1


def test_the_error_of_a_gradient_is_relative_to_all_of_it() -> None:
    result = gist.measure("vgg_small", gist.QUICK_BATCH, (Stage(HalvingOne(), exact=False),), Effort(1))
    _, row = result.rows
    workload = gist.build(result.case.case, "cpu")
    torch.manual_seed(gist.SEED)
    torch.autograd.backward([workload.loss()])
    squares = {name: float(p.grad.double().square().sum()) for name, p in workload.model.named_parameters()}
    expected = (squares["features.7.weight"] / 4 / sum(squares.values())) ** 0.5
    assert not row.exact and row.gradient_error == pytest.approx(expected, rel=1e-4)


def test_means_are_geometric() -> None:
    def one(ratio: float) -> gist.NetworkResult:
        times = Summary(ratio, ratio, ratio, ratio, 1)
        row = gist.StageRow("gist_fp8", False, 0.1, 8, 4, ratio, ratio, ratio, ratio, ratio, 4, ratio, times)
        plain = replace(row, stage="plain")
        return gist.NetworkResult("n", 1, "", None, (plain, row))  # type: ignore[arg-type]

    (mean,) = gist.means([one(2.0), one(8.0)])
    assert mean.stage == "gist_fp8" and mean.networks == 2
    assert (mean.ratio, mean.mfr_static, mean.times_plain) == pytest.approx((4, 4, 4))
    shown = gist.show_means([mean, replace(mean, stage="gist_lossless"), replace(mean, stage="lossless")])
    fp8, exact, ours = shown.splitlines()[3:6]
    assert "1.8, up to 2" in fp8 and "up to 4.1" in fp8
    assert exact.count("not available") == 3 and "not available" not in ours and "1.8" not in ours


# ---- layers --------------------------------------------------------------------------------------


def test_what_is_weighed_is_what_the_codecs_take() -> None:
    found = layer_table.measure("vgg_small", {"zvc": "lossless_stored"}, Schedule(1, 2, 28), image_size=28)
    row = next(row for row in found.rows if row.key == "features.2/Convolution#0:input")
    assert row.spec == "float32 [2, 64, 28, 28]" and row.chosen == {"zvc": "zvc"}
    nonzeros = round((1 - row.zero_share) * 2 * 64 * 28 * 28)
    numel = 2 * 64 * 28 * 28
    assert row.zvc_nbytes == numel // 8 + 8 * -(-numel // 4096) + 4 * nonzeros == row.stash_nbytes["zvc"]
    assert row.csr_nbytes == 5 * nonzeros + 4 * (-(-numel // 256) + 1)


# ---- the largest batch ---------------------------------------------------------------------------


def test_the_line_is_that_of_the_points() -> None:
    assert batch_table.line({2: 7.0, 4: 11.0, 8: 19.0}) == pytest.approx((2.0, 3.0))


def test_a_batch_that_takes_more_than_predicted_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(question: Question, peer: Any, batch: int) -> tuple[int, float]:
        return 0, 100.0 + 10 * batch + (25 if batch > 4 else 0)

    monkeypatch.setattr(batch_table, "_count", count)
    found = batch_table._largest(Question("any", 32, 303, small=(2, 4)), Plain())
    assert (found.predicted, found.batch, found.step_nbytes) == (20, 17, 295)


def test_a_peak_that_a_larger_batch_lowers_ends_in_a_batch_that_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def count(question: Question, peer: Any, batch: int) -> tuple[int, float]:
        counted.append(batch)
        return 0, 10.0 * batch if batch < 30 else 4.0 * batch

    monkeypatch.setattr(batch_table, "_count", count)
    found = batch_table._largest(Question("any", 32, 402, small=(24, 40)), Plain())
    assert (found.batch, found.step_nbytes) == (100, 400) and min(counted) == 24


@pytest.mark.parametrize("budget", [350, 1000, 5000])
@pytest.mark.parametrize("power", [0.8, 1.0, 1.3])
def test_the_largest_batch_is_found_in_a_few_tries(monkeypatch: pytest.MonkeyPatch, power: float, budget: int) -> None:
    counted: list[int] = []

    def count(question: Question, peer: Any, batch: int) -> tuple[int, float]:
        counted.append(batch)
        return 0, 100.0 + 3.0 * batch**power

    monkeypatch.setattr(batch_table, "_count", count)
    found = batch_table._largest(Question("any", 32, budget, small=(4, 8)), Plain())
    largest = int(((budget - 100) / 3) ** (1 / power))
    assert largest * 0.99 - 1 <= found.batch <= largest and len(counted) < 12


@pytest.mark.slow
def test_a_smallest_plan_is_made_once_for_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    smallest = gist._smallest

    def counted(workload: Any) -> Any:
        made.append(workload.case.batch)
        return smallest(workload)

    monkeypatch.setattr(gist, "_smallest", counted)
    found = batch_table._largest(Question("resnet_cifar20", 32, 24 * 2**20, (2, 4)), gist.SmallestPlan("plan"))
    plain = batch_table._largest(Question("resnet_cifar20", 32, 24 * 2**20, (2, 4)), Plain())
    assert made == [4] and found.batch > plain.batch


def test_a_budget_that_nothing_fits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"resnet_cifar20 in 1.0 MiB was asked for; plain takes .* larger budget"):
        next(batch_table.measure(Question("resnet_cifar20", 32, 2**20, small=(1, 2)), (Plain(),), lambda _: Effort(1)))


# ---- the command ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_runs_the_benchmark_where_it_is_given(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "backstash", "bench", "gist", "--quick", "--only", "layers", "--json", "g.json"]
    for folder in benching.FOLDERS:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "gist.py").write_text("raise SystemExit('the wrong one')\n")
    source = Path(benching.__file__).parents[2]
    done = subprocess.run(
        [*command, "--networks", "resnet_cifar20", "--seconds", "1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "== layers ==" in done.stdout and json.loads((tmp_path / "g.json").read_text())["complete"]


@pytest.mark.slow
def test_the_command_passes_arguments_and_the_exit_code_on(capfd: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(commands.app, ["bench", "gist", "--batch", "0", "--help"])
    assert result.exit_code == 0 and "python -m studies.gist" in capfd.readouterr().out
    result = CliRunner().invoke(commands.app, ["bench", "gist", "--batch", "0"])
    assert result.exit_code == 2 and "--batch 0 was asked for" in capfd.readouterr().err


def test_an_unknown_benchmark_names_the_known_ones() -> None:
    result = CliRunner().invoke(commands.app, ["bench", "speed"])
    assert result.exit_code == 2
    known = (
        "gist, run, peak, kernels, density, gist_accuracy, allocator, snapshot, disk, layrub, cdma, comet, nodes, gpu"
    )
    known += ", hostcost, steptime, frontier, heldout_plans, planner, compile, families, sz_table, zoo"
    assert result.stderr == f"backstash: benchmark 'speed' was asked for, but there are {known}.\n"
    root = Path(benching.__file__).parents[3]
    paths = [f"{name}{end}" for name in benching.BENCHES for end in (".py", "/__main__.py")]
    there = [root / folder / path for folder in benching.FOLDERS for path in paths]
    assert sum(each.is_file() for each in there) == len(benching.BENCHES)


def test_outside_a_clone_the_command_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benching, "__file__", str(tmp_path / "site" / "backstash" / "cli" / "benching.py"))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(commands.app, ["bench", "gist"])
    assert result.exit_code == 2
    assert "benchmark 'gist' was asked for, but there is no bench/gist.py or studies/gist.py in" in result.stderr
    assert "clone the repository and run this in it" in result.stderr

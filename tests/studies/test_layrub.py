"""Layrub's benchmark runs on small networks, and its JSON is complete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backstash.cli import benching, commands
from studies import deep, layrub
from studies.deep import Asked


@pytest.fixture(autouse=True)
def _memory_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layrub.allocator, "keep_memory", lambda: True)  # it cannot be undone


@pytest.mark.slow
def test_networks_and_schedules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "layrub.json"
    arguments = ["--quick", "--only", "networks,prefetch", "--rounds", "1", "--json", str(file)]
    assert layrub.main(arguments) == 0
    found = json.loads(file.read_text())
    (network,) = found["networks"]
    rows = {row["policy"]: row for row in network["rows"]}
    assert list(rows) == ["plain", *layrub.POLICIES]
    assert rows["plain"]["transfer"] is None and rows["lossless"]["transfer"] is None
    assert rows["plain"]["cut"] == 0 < rows["lossless"]["cut"] < rows["offload"]["cut"] < 1
    for name in ("vdnn", "layrub", "offload"):
        transfer = rows[name]["transfer"]
        assert transfer["out_nbytes"] > 0 and transfer["back_nbytes"] > 0
        assert transfer["seconds"] == pytest.approx((transfer["out_nbytes"] + transfer["back_nbytes"]) / layrub.PCIE)
        assert transfer["hidden"] == pytest.approx(1 - transfer["stall_seconds"] / transfer["seconds"])
        assert rows[name]["peak_nbytes"] < rows["plain"]["peak_nbytes"]
        assert rows[name]["stash_nbytes"] < rows["plain"]["stash_nbytes"]
    assert rows["offload"]["transfer"]["out_nbytes"] < rows["vdnn"]["transfer"]["out_nbytes"]
    (schedules,) = found["prefetch"]
    assert [(row["schedule"], row["busy"]) for row in schedules["rows"]] == [
        (schedule, busy) for schedule in layrub.SCHEDULES for busy in layrub.BUSY
    ]
    printed = capsys.readouterr().out
    assert "of limit" in printed and "stored, by room" in printed


@pytest.mark.slow
def test_a_network_that_its_memory_does_not_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "deep.json"
    assert layrub.main(["--quick", "--only", "deep", "--steps", "2", "--json", str(file)]) == 0
    (found,) = json.loads(file.read_text())["deep"]
    assert found["layers"] == 68 and found["equal"]
    plain, limited, disk, counted, link = found["runs"]
    assert "allocate" in limited["failure"] or "MemoryError" in limited["failure"]
    for run in (disk, link, counted):
        assert run["failure"] == ""
        assert (run["losses"], run["weights"]) == (plain["losses"], plain["weights"])
    assert len(plain["losses"]) == 2 and len(set(plain["losses"])) == 2
    assert disk["limit_nbytes"] - disk["virtual_nbytes"] == deep.QUICK.budget_nbytes < plain["peak_nbytes"]
    assert disk["virtual_peak_nbytes"] <= disk["limit_nbytes"]
    assert 0.5 < found["cut"] == pytest.approx(1 - counted["peak_nbytes"] / plain["peak_nbytes"])
    assert "RuntimeError" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_dies_says_how() -> None:
    wrong = Asked(deep.QUICK, "no such way", 1)  # type: ignore[arg-type]
    run = deep.run(wrong)
    assert run.failure.startswith("it ended with 1: ")


def test_layers_are_counted_as_papers_do() -> None:
    assert (deep.RESNET1517.layers, deep.RESNET15170.layers) == (1517, 15170)


@pytest.mark.slow
def test_what_is_not_there() -> None:
    with pytest.raises(SystemExit, match="the network 'vgg17' was asked for; use some of alexnet"):
        layrub.main(["--networks", "vgg17"])
    with pytest.raises(SystemExit):
        layrub.main(["--only", "speed"])
    assert "layrub" in benching.BENCHES
    result = CliRunner().invoke(commands.app, ["bench", "layrub", "--only", "speed"])
    assert result.exit_code == 2

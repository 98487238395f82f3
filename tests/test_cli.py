"""The command line runs, prints and writes what it should, and ends with the right exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from backstash import cli, codecs
from backstash.cli.commands import app
from backstash.codecs.base import Codec
from backstash.report import machine, plot
from backstash.report.compare import Comparison
from backstash.report.watch import Observed

TRAINING = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
print("arguments", sys.argv[1:])
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(512, 64)).square().mean()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(TRAINING)
    return str(path)


def failing(tmp_path: Path) -> str:
    path = tmp_path / "failing.py"
    path.write_text(TRAINING + "raise ValueError('after the last step')\n")
    return str(path)


def invoke(*args: str) -> Any:
    return CliRunner().invoke(app, list(args), catch_exceptions=False)


# -- run ---------------------------------------------------------------------------------------------------------------


def test_run_passes_arguments_on_and_reports(script: str, tmp_path: Path) -> None:
    result = invoke("run", "--report-json", str(tmp_path / "report.json"), script, "--policy", "none", "--help", "-x")
    assert result.exit_code == 0
    assert "arguments ['--policy', 'none', '--help', '-x']" in result.stdout
    assert "policy Lossless" in result.stdout
    assert "bitmask" in result.stdout
    assert json.loads((tmp_path / "report.json").read_text())["ratio"] > 1


def test_run_reports_on_a_script_that_fails(tmp_path: Path) -> None:
    written = tmp_path / "report.json"
    result = invoke("run", "--policy", "keep", "--report-json", str(written), failing(tmp_path))
    assert result.exit_code == 1
    assert "policy KeepAll" in result.stdout
    assert "ValueError: after the last step" in result.stderr
    assert written.exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("run", "--policy", "fastest", "{script}"), "backstash: policy 'fastest' was asked for, but there are"),
        (("run", "not-there.py"), "backstash: the training script 'not-there.py' was asked for, but there is no"),
        (("run", "--report-json", "no/such/report.json", "{script}"), "the folder no/such is not there"),
        (
            ("compare", "--policies", "plain,fastest", "{script}"),
            "policy 'fastest' was asked for, but there are cdma",
        ),
        (("compare", "not-there.py"), "backstash: the training script 'not-there.py' was asked for, but there is no"),
        (("compare", "--out", "{script}", "{script}"), "is a file"),
    ],
)
def test_what_was_asked_wrongly_is_refused_before_the_script_starts(
    script: str, args: tuple[str, ...], message: str
) -> None:
    result = invoke(*(arg.format(script=script) for arg in args))
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert "arguments" not in result.stdout


def test_it_runs_as_a_module(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import sys\nprint(__name__, sys.argv[1:])\ndef f():\n    raise SystemExit(7)\nf()\n")
    done = subprocess.run(
        [sys.executable, "-m", "backstash", "run", str(path), "--steps", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7
    assert done.stdout.startswith("__main__ ['--steps', '2']\n")
    advice = "page faults"  # on a machine where these cost much
    assert [line for line in done.stderr.splitlines() if advice not in line] == []


# -- compare -----------------------------------------------------------------------------------------------------------


def test_compare_measures_every_policy_and_writes_its_results(script: str, tmp_path: Path) -> None:
    out = tmp_path / "results"
    result = invoke("compare", script, "--depth", "3", "--policies", "plain,lossless", "--out", str(out), "--", "--out")
    assert result.exit_code == 0, result.output
    assert "losses and weights" in result.stdout
    assert sorted(file.name for file in out.iterdir()) == ["comparison.json", "comparison.png", "comparison.svg"]
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (out / "comparison.svg").read_text()
    comparison = json.loads((out / "comparison.json").read_text())
    assert comparison["args"] == ["--depth", "3", "--out"]
    assert comparison["machine"]["cores"] > 0
    plain, lossless = comparison["rows"]
    assert (plain["policy"], lossless["policy"], comparison["baseline"]) == ("plain", "lossless", "plain")
    assert lossless["losses_equal"] and lossless["weights_equal"]
    assert plain["final_loss"] == lossless["final_loss"]
    assert lossless["stash_nbytes"] < lossless["saved_nbytes"] == plain["stash_nbytes"]
    assert min(row["peak_nbytes"] for row in comparison["rows"]) > 0
    assert all(len(run["losses"]) == 5 and len(run["step_seconds"]) == 3 for run in comparison["runs"])


def test_compare_of_a_script_that_fails_shows_why_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "results"
    result = invoke("compare", "--out", str(out), failing(tmp_path))
    assert result.exit_code == 1
    assert "failing.py was to be measured under plain, but it ended with exit code 1" in result.stderr
    assert "ValueError: after the last step" in result.stderr
    assert "launcher.py" not in result.stderr
    assert not out.exists()


def test_compare_says_that_a_script_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "greedy.py"
    path.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    result = invoke("compare", "--out", str(tmp_path / "results"), str(path))
    assert result.exit_code == 1
    assert "under plain, but it was killed by SIGKILL, which is also how Linux ends a process when" in result.stderr


def test_compare_needs_steps(tmp_path: Path) -> None:
    path = tmp_path / "idle.py"
    path.write_text("print('[/no markup] and no step')\n\nprint()\n")
    result = invoke("compare", "--out", str(tmp_path / "results"), str(path))
    assert result.exit_code == 1
    assert "made 0 optimizer steps under plain. Let it make at least 3" in result.stderr


def observed(policy: str, **changes: Any) -> Observed:
    report = None if policy == "plain" else {"saved_nbytes": 8000, "stash_nbytes": 2000}
    facts = {
        "policy": policy,
        "device": "cpu",
        "kernels": "native",
        "steps": 4,
        "step_seconds": [0.5, 0.25],
        "losses": [(1.0).hex(), (0.1).hex()],
        "weights": "aa",
        "peak_nbytes": 10_000,
        "resident_nbytes": 20_000,
        "report": report,
    }
    return Observed(**{**facts, **changes})


def compared(*runs: Observed) -> Comparison:
    return Comparison("train.py", ("--batch", "[/8]"), machine.describe(), runs)


def test_rows_are_medians_over_the_runs() -> None:
    runs = (observed("plain"), observed("lossless"), observed("plain", peak_nbytes=12_000, step_seconds=[0.75]))
    plain, lossless = compared(*runs).rows()
    assert (plain.peak_nbytes, plain.step_seconds, plain.final_loss) == (11_000, 0.5, 0.1)
    assert (plain.saved_nbytes, plain.stash_nbytes, lossless.stash_nbytes) == (8000, 8000, 2000)


def test_a_single_bit_of_a_single_loss_is_a_difference() -> None:
    off = [(1.0).hex(), (0.1 + 2**-56).hex()]
    _, keep, lossless = compared(observed("plain"), observed("keep", losses=off), observed("lossless")).rows()
    assert (keep.losses_equal, lossless.losses_equal) == (False, True)
    (plain,) = compared(observed("plain"), observed("plain", losses=off)).rows()
    assert plain.losses_equal is False


def test_scripts_without_losses_are_compared_by_their_weights() -> None:
    runs = observed("keep", losses=[], resident_nbytes=None), observed("lossless", losses=[], weights="bb")
    keep, lossless = compared(*runs).rows()
    assert (keep.losses_equal, keep.final_loss, keep.resident_nbytes) == (None, None, None)
    assert (keep.weights_equal, lossless.weights_equal) == (True, False)


def test_the_machine_line_tells_settings_that_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1048576")
    line = compared(observed("plain")).made_on
    assert "MALLOC_MMAP_THRESHOLD_=1048576" in line
    assert line.endswith("; native kernels")


def test_equal_comparisons_give_equal_charts(tmp_path: Path) -> None:
    comparison = compared(observed("plain"), observed("lossless", resident_nbytes=None), observed("keep", losses=[]))
    for name in ("a", "b"):
        plot.save(comparison, tmp_path / f"{name}.png", tmp_path / f"{name}.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


# -- doctor and the rest -----------------------------------------------------------------------------------------------


def test_doctor_finds_everything_in_order() -> None:
    result = invoke("doctor")
    assert result.exit_code == 0, result.stdout
    for subject in ("versions", "kernels on cpu", "compiler", "huge pages", "resident peak", "codec zvc on cpu"):
        assert f"ok    {subject}: " in result.stdout


def test_doctor_finds_a_codec_that_loses_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    zvc: type[Codec] = type(codecs.get("zvc"))
    monkeypatch.setattr(zvc, "decode", lambda self, encoded, out=None: out.zero_() if out is not None else None)
    monkeypatch.setattr(codecs, "names", lambda: ("zvc",))
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "WRONG codec zvc on cpu: " in result.stdout


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_the_command_line_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("backstash.cli.commands", "backstash.cli.comparison"):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match=rf"{missing} is not installed. Run: pip install 'backstash\[cli\]'"):
        cli.main()


def test_compare_says_what_to_install(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "backstash.report.plot")
    monkeypatch.delattr("backstash.report.plot")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("compare", script)
    assert result.exit_code == 1
    assert "pip install 'backstash[cli,plot]'" in result.stderr


def test_the_library_needs_no_command_line_and_no_charts() -> None:
    code = "import sys, backstash; print({'typer', 'rich', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

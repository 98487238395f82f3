"""``backstash compare`` and ``choose`` measure scripts in processes of their own, and say what is true of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from backstash import policies
from backstash.cli.comparing import names_of as comparing_names
from backstash.integrations import allocator as allocators
from backstash.integrations.allocator import Allocator
from backstash.report import compare as comparing
from backstash.report import machine, plot
from backstash.report.choose import recommend
from backstash.report.compare import Comparison
from backstash.report.watch import MeasureRequest, Observed
from backstash.stash.ledger import Entry, Report

Invoke = Callable[..., Any]


@pytest.mark.usefixtures("in_this_process")
def test_compare_measures_every_policy_and_writes_its_results(script: str, tmp_path: Path, invoke: Invoke) -> None:
    out = tmp_path / "results"
    result = invoke("compare", script, "--depth", "3", "--policies", "plain,lossless", "--out", str(out), "--", "--out")
    assert result.exit_code == 0, result.output
    assert re.search(r"bits equal to plain +yes", result.stdout)
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("lossless: ")]
    assert "on the device; peak " in line and "step " in line
    assert "arguments" not in result.stdout  # what the script prints is shown beside the bar
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


def test_compare_of_a_policy_that_is_not_exact_tells_by_how_much(
    script: str, tmp_path: Path, invoke: Invoke, in_this_process: list[tuple[MeasureRequest, Mapping[str, str]]]
) -> None:
    result = invoke(
        *("compare", "--policies", "plain,gist_fp8", "--quiet", "--min-nbytes", "1KiB", "--out", str(tmp_path), script)
    )
    assert (result.exit_code, result.stdout) == (0, "")
    assert [order.min_nbytes for order, _ in in_this_process] == [1024, 1024]
    plain, lossy = json.loads((tmp_path / "comparison.json").read_text())["rows"]
    assert (plain["is_exact"], lossy["is_exact"]) == (True, False)
    assert plain["gradient_error"] is None and plain["loss_drift"] == 0
    assert 0 < lossy["gradient_error"] < 0.5 and 0 < lossy["loss_drift"] < 0.5


@pytest.mark.usefixtures("in_this_process")
def test_compare_of_a_script_that_fails_shows_why_and_writes_nothing(
    failing: str, tmp_path: Path, invoke: Invoke
) -> None:
    out = tmp_path / "results"
    result = invoke("compare", "--out", str(out), failing)
    assert result.exit_code == 1
    assert "failing.py was to be measured under plain, but it ended with exit code 1" in result.stderr
    assert "ValueError: after the last step" in result.stderr
    assert "launcher.py" not in result.stderr
    assert not out.exists()


@pytest.mark.slow
def test_compare_says_that_a_script_was_killed(tmp_path: Path, invoke: Invoke) -> None:
    path = tmp_path / "greedy.py"
    path.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    result = invoke("compare", "--out", str(tmp_path / "results"), str(path))
    assert result.exit_code == 1
    assert "under plain, but it was killed by SIGKILL, which is also how Linux ends a process when" in result.stderr


@pytest.mark.usefixtures("in_this_process")
def test_compare_needs_steps(tmp_path: Path, invoke: Invoke) -> None:
    path = tmp_path / "idle.py"
    path.write_text("print('[/no markup] and no step')\n\nprint()\n")
    result = invoke("compare", "--out", str(tmp_path / "results"), str(path))
    assert result.exit_code == 1
    assert "but it made 0 training steps. Let it make at least 3" in result.stderr


@pytest.mark.slow
def test_a_measured_process_prints_nothing_of_the_profiler(script: str, tmp_path: Path) -> None:
    code = (
        "import os; from backstash.report import compare\n"
        f"order = compare.MeasureRequest({script!r}, [], 'lossless', {str(tmp_path / 'result.json')!r})\n"
        "print(compare.run_in_child('watch', order, {**compare.QUIET_LOGS, **os.environ}, print))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("arguments []\n(0, '')\n")


def test_plain_runs_under_the_same_allocator_and_under_its_own(
    script: str,
    tmp_path: Path,
    invoke: Invoke,
    monkeypatch: pytest.MonkeyPatch,
    in_this_process: list[tuple[MeasureRequest, Mapping[str, str]]],
) -> None:
    fast = Allocator("fastalloc", "/opt/libfastalloc.so", {"FAST": "1"})
    monkeypatch.setattr(allocators, "choose_allocator", lambda asked: fast)
    monkeypatch.setenv("FAST", "2")
    result = invoke("compare", "--out", str(tmp_path), script)
    assert result.exit_code == 0, result.stderr
    asked = [(order.policy, order.allocator, env.get("LD_PRELOAD")) for order, env in in_this_process]
    assert asked[0][:2] == ("plain", "system") and "fastalloc" not in (asked[0][2] or "")
    assert asked[1:] == [(policy, "fastalloc", "/opt/libfastalloc.so") for policy in ("plain", "lossless")]
    assert in_this_process[1][1]["FAST"] == "2"  # a setting of the user's own stays
    comparison = json.loads((tmp_path / "comparison.json").read_text())
    assert comparison["baseline"] == "plain, fastalloc"
    labels = ["plain, system", "plain, fastalloc", "lossless, fastalloc"]
    assert [row["label"] for row in comparison["rows"]] == labels
    assert "measuring under fastalloc" in result.stdout and "bits equal to plain, fastalloc" in result.stdout


# -- choose ------------------------------------------------------------------------------------------------------------


def test_choose_tries_the_policies_on_a_few_steps(
    script: str, tmp_path: Path, invoke: Invoke, in_this_process: list[tuple[MeasureRequest, Mapping[str, str]]]
) -> None:
    text = Path(script).read_text()
    Path(script).write_text(text.replace("range(5)", "range(1000)"))
    result = invoke("choose", "--steps", "1", "--exact", script)
    assert result.exit_code == 0, result.output
    candidates = [one.name for one in policies.descriptions() if one.is_candidate and one.is_exact]
    assert [order.policy for order, _ in in_this_process] == ["plain", *candidates]
    assert "recommended: " in result.stdout and "counted peak" in result.stdout


def test_choose_goes_on_where_a_policy_fails(script: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_child(
        module: str, order: MeasureRequest, environment: Mapping[str, str], printed: Callable[[str], None]
    ) -> tuple[int, str]:
        if order.policy in ("plain", "sliced"):
            return -9, ""
        assert order.steps == 3
        Path(order.result).write_text(json.dumps(vars(observed(order.policy))))
        return 0, ""

    monkeypatch.setattr(comparing, "run_in_child", in_child)
    result = invoke("choose", script)
    assert result.exit_code == 0, result.output
    assert "plain could not be measured: " in result.stdout and "killed by SIGKILL" in result.stdout
    assert "recommended: lossless, peak 9.8 KiB; plain PyTorch could not be measured" in result.stdout
    monkeypatch.setattr(comparing, "run_in_child", lambda *_: (-9, ""))
    result = invoke("choose", script)
    assert result.exit_code == 1 and "killed by SIGKILL" in result.stderr


def test_choose_shows_the_error_of_a_script_that_fails_without_backstash(
    failing: str, invoke: Invoke, in_this_process: list[tuple[MeasureRequest, Mapping[str, str]]]
) -> None:
    Path(failing).write_text("raise ValueError('there is no data set')\n")
    result = invoke("choose", failing)
    assert result.exit_code == 1
    assert "failing.py was to be measured under plain, but it ended with exit code 1" in result.stderr
    assert "ValueError: there is no data set" in result.stderr
    assert [order.policy for order, _ in in_this_process] == ["plain"]


@pytest.mark.parametrize(
    "errors",
    ["MemoryError", "torch.OutOfMemoryError: CUDA out of memory.", "DefaultCPUAllocator: can't allocate memory"],
)
def test_choose_goes_on_where_plain_lacks_memory(
    errors: str, script: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_child(module: str, order: MeasureRequest, *_: Any) -> tuple[int, str]:
        if order.policy == "plain":
            return 1, errors
        Path(order.result).write_text(json.dumps(vars(observed(order.policy))))
        return 0, ""

    monkeypatch.setattr(comparing, "run_in_child", in_child)
    assert "recommended: lossless, peak 9.8 KiB; plain PyTorch could not" in invoke("choose", script).stdout


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("steps", "args", "told"),
    [
        (2, ("compare",), "made only 2 training steps, and none of them was timed, so these numbers are not settled."),
        (3, ("choose", "--quiet", "--exact"), "made only 3 training steps, and 1 of them was timed"),
        (
            4,
            ("choose", "--exact", "--steps", "5"),
            "and 2 of them were timed, so these numbers are not settled. Let it",
        ),
        (5, ("compare",), ""),
        (4, ("choose", "--exact", "--steps", "2"), ""),
    ],
)
def test_numbers_of_too_few_steps_are_not_shown_without_a_word(
    steps: int, args: tuple[str, ...], told: str, script: str, tmp_path: Path, invoke: Invoke
) -> None:
    Path(script).write_text(Path(script).read_text().replace("range(5)", f"range({steps})"))
    out = ("--out", str(tmp_path)) if args[0] == "compare" else ()
    shown = " ".join(invoke(*args, *out, script).stdout.split())
    if told:
        assert told in shown
        assert f"make {7 if '5' in args else 5} or more: the memory of step 2 is counted, what follows" in shown
    else:
        assert "settled" not in shown


def lines(*runs: Observed) -> list[str]:
    return [line.partition(";")[0] for line in recommend(compared(*runs))]


def test_what_is_recommended() -> None:
    plain = observed("plain", step_seconds=[1.0])
    lossless = observed("lossless", peak_nbytes=6000, step_seconds=[1.02])
    offload = observed("offload", peak_nbytes=3000, step_seconds=[1.5])
    lossy = observed("quantized", peak_nbytes=1000, step_seconds=[1.1])
    assert lines(plain, lossless) == ["recommended: lossless"]
    assert lines(plain, lossless, offload) == ["recommended: lossless", "for less memory: offload"]
    assert lines(plain, offload) == ["recommended: offload, which takes time"]
    assert lines(plain, lossless, lossy)[1] == "if gradients may change: quantized, gradient error unknown"
    wild = observed("quantized", peak_nbytes=1000)
    assert wild.report is not None
    wild.report["gradient_error"] = [{"error": 0.9}]
    assert lines(plain, lossless, wild) == ["recommended: lossless"]
    useless = observed("lossless", peak_nbytes=9900)
    assert lines(plain, useless)[0].startswith("recommended: plain PyTorch, because no exact policy lowers the peak")
    assert offload.report is not None
    offload.report["device_nbytes"] = 0  # moved to the host's memory, which is where a CPU computes
    assert lines(plain, lossless, offload) == ["recommended: lossless"]
    broken = observed("lossless", peak_nbytes=1000, losses=[(9.0).hex(), (9.0).hex()])
    (told,) = lines(plain, broken)
    assert told.startswith(
        "recommended: plain PyTorch, because losses under lossless differ from those of plain, which"
    )
    (told,) = lines(plain, broken, plain)
    assert told.startswith(
        "recommended: plain PyTorch, because losses under lossless differ from those of plain, whose"
    )
    keep = observed("keep", peak_nbytes=7000, step_seconds=[1.0])
    assert lines(plain, broken, plain, keep) == ["recommended: keep"]


def test_a_script_that_does_not_repeat_itself_gets_a_recommendation_by_peak() -> None:
    first, second, third = (observed("plain", losses=[(loss).hex()]) for loss in (1.0, 2.0, 3.0))
    lossless = observed("lossless", peak_nbytes=6000, losses=[(4.0).hex()])
    for others in ((second,), (second, third), (first, second)):
        told = lines(first, lossless, *others)
        assert told[0] == "recommended: lossless"
        assert told[1].startswith(
            "note: bits could not be compared, because the losses of plain PyTorch differ between"
        )
    useless = observed("lossless", peak_nbytes=9900, losses=[(4.0).hex()])
    assert "lowers the peak by 5%" in lines(first, useless, second)[0]


def test_choose_runs_plain_again_where_bits_differ(
    script: str, invoke: Invoke, in_this_process: list[tuple[MeasureRequest, Mapping[str, str]]]
) -> None:
    Path(script).write_text(f"import torch\n{Path(script).read_text()}".replace("manual_seed(0)", "seed()"))
    assert "torch.seed()" in Path(script).read_text()
    result = invoke("choose", "--steps", "1", "--exact", script)
    assert result.exit_code == 0, result.output
    assert [order.policy for order, _ in in_this_process].count("plain") == 2
    shown = " ".join(result.stdout.split())
    assert "Seed the script" in shown and "`backstash verify` compares the step itself" in shown


def test_names_in_a_list() -> None:
    assert comparing_names("plain, lossless,plain") == ["plain", "lossless"]
    assert comparing_names("all") == ["plain", *(one.name for one in policies.descriptions())]


# -- rows and charts ---------------------------------------------------------------------------------------------------


def observed(policy: str, **changes: Any) -> Observed:
    report = None
    if policy != "plain":
        row = Entry("a", "VALUE", "float32 [2000]", 8000, 2000, "zvc")
        report = json.loads(Report(policy, 2, (row,), 0, 2000).to_json())
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
    return Comparison("train.py", ("--batch", "[/8]"), machine.describe_machine(), runs)


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


def test_compare_says_what_to_install(script: str, monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    monkeypatch.delitem(sys.modules, "backstash.report.plot")
    monkeypatch.delattr("backstash.report.plot")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("compare", script)
    assert result.exit_code == 1
    assert "pip install 'backstash[cli,plot]'" in result.stderr


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="ends processes by signals of POSIX")
@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP"])
def test_a_signal_that_ends_it_ends_the_script_as_well(tmp_path: Path, number: str) -> None:
    script = tmp_path / "endless.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    folder = tmp_path / "temporary"
    folder.mkdir()
    code = f"""
import signal
from backstash.report.compare import Program, _run
signal.signal(signal.{number}, signal.SIG_DFL)  # which nohup has the tests ignore
_run(Program({str(script)!r}, ()), "plain", None, lambda line: print(line, flush=True))
"""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        child = next(int(line) for line in process.stdout if line.strip().isdigit())
        process.send_signal(getattr(signal, number))
        assert process.wait() == 128 + getattr(signal, number)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert list(folder.iterdir()) == []

"""``backstash run`` shows a script what Python shows it, and its user what was saved, or why nothing was."""

from __future__ import annotations

import json
import os
import py_compile
import signal
import subprocess
import sys
import zipapp
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backstash import cli
from backstash.integrations import allocator as allocators
from backstash.integrations.allocator import Allocator
from backstash.stash.ledger import Report

Invoke = Callable[..., Any]


def test_run_passes_arguments_on_and_reports(script: str, tmp_path: Path, invoke: Invoke) -> None:
    files = "--report-json", str(tmp_path / "report.json"), "--report-html", str(tmp_path / "report.html")
    result = invoke("run", *files, script, "--policy", "none", "--help", "-x")
    assert result.exit_code == 0
    assert "arguments ['--policy', 'none', '--help', '-x']" in result.stdout
    assert f"backstash: {script}, 5 steps\nactivations " in result.stdout
    assert "under Lossless" in result.stdout and "bitmask" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= max(100, len(script) + 30)
    assert json.loads((tmp_path / "report.json").read_text())["ratio"] > 1
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_the_written_report_is_the_report(script: str, tmp_path: Path, invoke: Invoke) -> None:
    written = tmp_path / "report.json"
    invoke("run", "--report-json", str(written), script)
    found = json.loads(written.read_text())
    assert json.loads(Report.from_json(found).to_json()) == found


def test_run_prints_every_value_if_it_is_asked_to(script: str, invoke: Invoke) -> None:
    short, full = invoke("run", script).stdout, invoke("run", "--full", script).stdout
    assert "1/Relu#0:result" not in short and "1/Relu#0:result" in full and "still held" in full


@pytest.mark.parametrize(
    "args",
    [
        ("--help",),
        ("fit", "--help"),
        ("policies",),
        ("policies", "--json"),
        ("run", "--full", "{script}"),
        ("plan", "--budget", "90%", "{script}"),
        ("estimate", "--budget", "90%", "{script}"),
        ("fit", "--device", "t4", "{script}"),
    ],
    ids=lambda args: " ".join(args[:2]),
)
def test_a_reader_who_closes_the_pipe_ends_a_command_without_a_traceback(
    args: tuple[str, ...], script: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = Path(script).read_text().replace("range(5)", "range(12)")
    Path(script).write_text(text.replace("print(", "(lambda *_: None)("))  # what that cannot print is its own matter
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(sys, "argv", ["tests", *(arg.format(script=script) for arg in args)])
    with open(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)  # for what is left to be written
    monkeypatch.undo()
    assert ended.value.code == 141
    assert "Traceback" not in capfd.readouterr().err


def test_a_quiet_run_prints_what_the_script_prints(script: str, invoke: Invoke) -> None:
    result = invoke("run", "--quiet", script)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "arguments []\n", "")


def test_the_smallest_size_is_an_option(script: str, invoke: Invoke) -> None:
    assert "bitmask" not in invoke("run", "--min-nbytes", "10MiB", script).stdout
    result = invoke("run", "--min-nbytes", "10 apples", script)
    assert result.exit_code == 2
    assert "'10 apples' is no size in bytes" in " ".join(result.stderr.replace("│", " ").split())


def test_what_is_known_of_a_script_that_fails_is_one_line_above_its_traceback(
    failing: str, tmp_path: Path, invoke: Invoke
) -> None:
    written = tmp_path / "report.json"
    result = invoke("run", "--policy", "keep", "--report-json", str(written), failing)
    assert result.exit_code == 1
    first, second, *_, last = result.stderr.splitlines()
    assert first.startswith(f"backstash: {failing} ended with ValueError, 5 steps; activations ")
    assert second.startswith("Traceback") and last == "ValueError: after the last step"
    assert "still held" not in result.stdout
    assert written.exists()


def test_a_budget_that_nothing_fits_has_its_message_below_the_script_s_own_line(script: str, invoke: Invoke) -> None:
    text = Path(script).read_text()
    Path(script).write_text(text.replace("range(5)", "range(9999)"))  # until it is known that nothing fits
    result = invoke("run", "--min-nbytes", "0", "--budget", "1KiB", script)
    assert result.exit_code == 1
    told, *lines = result.stderr.splitlines()
    assert told.startswith(f"backstash: {script} ended with BatchTooLargeError")
    assert [line.split(",")[0] for line in lines if line.startswith("  File")] == [f'  File "{script}"']
    assert lines[-2] == "    loss.backward()" and "Pass that budget" in lines[-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('no step')", "nothing was saved: no forward pass with grad mode ran"),
        (
            "import threading, torch\nmodel = torch.nn.Linear(64, 64)\n"
            "thread = threading.Thread(target=lambda: model(torch.ones(64, 64)).sum().backward())\n"
            "thread.start(); thread.join()",
            "a module ran with grad mode on another thread",
        ),
    ],
    ids=["no step", "another thread"],
)
def test_a_script_that_saves_nothing_is_told_why_in_one_line(
    text: str, message: str, tmp_path: Path, invoke: Invoke
) -> None:
    path = tmp_path / "idle.py"
    path.write_text(text)
    result = invoke("run", str(path))
    assert result.exit_code == 0
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("backstash")]
    assert message in line and "stored as" not in result.stdout


@pytest.mark.parametrize(
    ("ending", "code"), [("import sys; sys.exit(3)", 3), ("raise KeyboardInterrupt", 130), ("import os; os.abort", 0)]
)
def test_the_exit_code_is_the_script_s(ending: str, code: int, tmp_path: Path, invoke: Invoke) -> None:
    path = tmp_path / "ending.py"
    path.write_text(ending)
    assert invoke("run", str(path)).exit_code == code


def package(folder: Path) -> Path:
    inside = folder / "pkg"
    inside.mkdir()
    (inside / "__init__.py").write_text("")
    (inside / "sizes.py").write_text("WIDTH = 64\n")
    (inside / "train.py").write_text(
        "import sys\nimport torch\nfrom .sizes import WIDTH\nfrom . import sizes\n"
        "print(__name__, __package__, __spec__.name, sys.argv[1:], sys.argv[0] == __file__, sys.path[0])\n"
        "model = torch.nn.Linear(WIDTH, 1)\nmodel(torch.randn(512, WIDTH).requires_grad_()).relu().sum().backward()\n"
    )
    (inside / "__main__.py").write_text("from . import train\n")
    return inside


def test_a_module_runs_as_under_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    package(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("pkg", "pkg.sizes", "pkg.train"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    expected = f"__main__ pkg pkg.train ['--lr', '3'] True {tmp_path}\n"  # as `python -m pkg.train --lr 3` prints
    result = invoke("run", "-m", "pkg.train", "--lr", "3")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(expected) and "activations" in result.stdout
    for name in ("pkg", "pkg.sizes", "pkg.train"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert "pkg.train pkg pkg.train" in invoke("run", "-m", "pkg").stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("run", "--policy", "losless", "{script}"), "Did you mean 'lossless'?"),
        (("run", "not-there.py"), "backstash: the training script 'not-there.py' was asked for, but there is no"),
        (("run", "-m", "no_such.module"), "but Python finds no module named 'no_such'"),
        (("run", "-m", "pkg/train.py"), "Give the name without .py and with dots"),
        (("run", "--report-json", "no/such/report.json", "{script}"), "the folder no/such is not there"),
        (("plan", "--budget", "90%", "--out", "no/plan.json", "{script}"), "the folder no is not there"),
        (("plan", "--budget", "90%", "--page", "no/plan.html", "{script}"), "the folder no is not there"),
        (("profile", "--out", ".", "{script}"), ". is a folder"),
        (("fit", "--device", "t4", "--out", "no/fit.json", "{script}"), "the folder no is not there"),
        (("fit", "--device", ",", "{script}"), "no card is named"),
        (("fit", "--device", "t4", "--allow", "bounded", "{script}"), "bounded changes gradients"),
        (("plan", "--budget", "90%", "--out", "a", "--page", "./a", "{script}"), "a is written by --out already"),
        (("run", "--report-json", "a", "--report-html", "a", "{script}"), "a is written by --report-json already"),
        (("run", "--plan", "{script}", "{script}"), "train.py': "),  # which names the file that is no plan
        (("run", "--budget", "60%", "--policy", "offload", "{script}"), "a plan decides in the place of a policy"),
        (("run", "--budget", "6 gigs", "{script}"), "budget '6 gigs', but that is no number with a unit"),
        (("plan", "--budget", "6 gigs", "{script}"), "budget '6 gigs', but that is no number with a unit"),
        (("estimate", "--budget", "0", "{script}"), "every step takes some memory"),
        (("estimate", "--budget", "\u00b2", "{script}"), "that is no number with a unit"),
        (("run", "--min-nbytes", "\u0663KiB", "{script}"), "is no size in bytes"),
        (("run", "--budget", "60%", "--error-limit", "0.1", "{script}"), "has nothing that makes an error"),
        (("run", "--allow", "losless", "{script}"), "Did you mean 'lossless'?"),
        (("run", "--budget", "50%", "--allow", "", "{script}"), "--allow is empty"),
        (("run", "--allow", "bounded", "{script}"), "it says how a plan is made, and none is made: give --budget too"),
        (("run", "--error-limit", "0.1", "{script}"), "--error-limit: it says how a plan is made, and none is made"),
        (("run", "--offload-to", ".", "{script}"), "--offload-to: it says how a plan is made, and none is made"),
        (("run", "--budget", "60%", "--offload-to", ".", "{script}"), "as --allow is 'lossless,recompute': add"),
        (("profile", "--offload-to", ".", "{script}"), "nothing is moved to '.'"),
        (("plan", "--budget", "60%", "--offload-to", ".", "{script}"), "nothing is moved to '.'"),
        (("estimate", "--budget", "60%", "--offload-to", ".", "{script}"), "nothing is moved to '.'"),
        (("profile", "--allow", "losless", "{script}"), "Did you mean 'lossless'?"),
        (("plan", "--budget", "60%", "--allow", "losless", "{script}"), "Did you mean 'lossless'?"),
        (("estimate", "--budget", "60%", "--allow", "losless", "{script}"), "Did you mean 'lossless'?"),
        (("fit", "--device", "t4", "--allow", "losless", "{script}"), "Did you mean 'lossless'?"),
        (
            ("profile", "--allow", "offload", "--offload-to", "no/folder", "{script}"),
            "no/folder would be in no, which is not there. Name a folder",
        ),
        (("compare", "--policies", ",", "{script}"), "no policy is named"),
        (
            ("compare", "--allocator", "tcmallok", "{script}"),
            "the allocator 'tcmallok' was asked for, but that file does",
        ),
        (("choose", "--allocator", "{script}", "{script}"), "but that file is no shared library"),
        (("compare", "--policies", "plain,fastest", "{script}"), "policy 'fastest' was asked for, but there are cdma"),
        (("compare", "not-there.py"), "backstash: the training script 'not-there.py' was asked for, but there is no"),
        (("compare", "--out", "{script}", "{script}"), "is a file"),
        (("choose", "not-there.py"), "backstash: the training script 'not-there.py' was asked for, but there is no"),
    ],
)
def test_what_was_asked_wrongly_is_refused_before_the_script_starts(
    script: str, args: tuple[str, ...], message: str, invoke: Invoke
) -> None:
    result = invoke(*(arg.format(script=script) for arg in args))
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert "arguments" not in result.stdout


def test_options_of_the_environment_may_be_for_other_commands(
    script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, invoke: Invoke
) -> None:
    for name, value in (("OFFLOAD_TO", str(tmp_path)), ("ALLOW", "lossless"), ("ERROR_LIMIT", "0.1")):
        monkeypatch.setenv(f"BACKSTASH_{name}", value)
    assert "activations" in invoke("run", script).stdout
    monkeypatch.delenv("BACKSTASH_ERROR_LIMIT")
    assert invoke("profile", "--quiet", script).exit_code == 0


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


def test_only_a_process_of_its_own_is_started_again(
    script: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[Any, ...]] = []
    monkeypatch.setattr(allocators, "choose_allocator", lambda asked: Allocator("fast", "/opt/libfast.so"))
    monkeypatch.setattr(os, "execve", lambda *asked: started.append(asked))
    assert invoke("run", script).exit_code == 0 and not started
    for program in ("/usr/bin/backstash", "/usr/lib/python/backstash/__main__.py"):
        monkeypatch.setattr(sys, "argv", [program])
        result = invoke("run", script)
        assert "backstash: starting under fast (/opt/libfast.so)" in result.stderr
        assert started.pop()[2]["LD_PRELOAD"].startswith("/opt/libfast.so")


SPAWNING = """
import multiprocessing, sys

class Task:
    number = 20

def double(task):
    return 2 * task.number, len(sys.argv)

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [Task()]))
"""


@pytest.mark.slow
def test_a_script_may_spawn_processes(tmp_path: Path) -> None:
    path = tmp_path / "spawning.py"
    path.write_text(SPAWNING)
    command = [sys.executable, "-m", "backstash", "run", str(path), "--lr", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[(40, 3)]\n")


@pytest.mark.slow
def test_ctrl_c_ends_a_training_as_it_does_without_backstash(script: str) -> None:
    text = Path(script).read_text().replace("range(5)", "range(2000)")
    Path(script).write_text(text + "    print(step, flush=True)\n")
    command = [sys.executable, "-m", "backstash", "run", script]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, preexec_fn=_hear_ctrl_c, **pipes) as child:
        assert child.stdout is not None and child.stderr is not None
        while child.stdout.readline() != "3\n":
            pass
        child.send_signal(signal.SIGINT)
        child.stdout.read()
        errors = child.stderr.read()
        assert child.wait() == 130
    first, *_, last = [line for line in errors.splitlines() if line]
    assert first.startswith(f"backstash: {script} ended with KeyboardInterrupt, ") and "activations" in first
    assert last == "KeyboardInterrupt"


def _hear_ctrl_c() -> None:
    """A process that a shell has started in the background ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_the_command_line_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("backstash.cli.")]:
        monkeypatch.delitem(sys.modules, module)
        monkeypatch.delattr(cli, module.rpartition(".")[2])
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match=rf"{missing} is not installed. Run: pip install 'backstash\[cli\]'"):
        cli.main()


@pytest.mark.slow
def test_the_library_needs_no_command_line_and_no_charts() -> None:
    code = "import sys, backstash; print({'typer', 'rich', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_reports_go_where_the_command_was_started(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Invoke
) -> None:
    (tmp_path / "elsewhere").mkdir()
    with open(script, "a") as file:
        file.write("import os\nos.chdir('elsewhere')\n")
    monkeypatch.chdir(tmp_path)
    reports = "--report-json", "report.json", "--report-html", "report.html"
    assert invoke("run", *reports, "train.py").exit_code == 0
    monkeypatch.chdir(tmp_path)
    assert (tmp_path / "report.json").is_file()
    assert (tmp_path / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending", ["sys.stdout.close()", "sys.stdout = None", "sys.stderr.close()", "sys.stderr = None"]
)
def test_a_script_may_close_what_it_prints_to(ending: str, script: str) -> None:
    with open(script, "a") as file:
        file.write(ending)
    ran = subprocess.run(
        [sys.executable, "-m", "backstash", "run", "--allocator", "system", script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr.count("Error")) == (0, 0)
    assert ("train.py, 5 steps" in ran.stdout) != (ending == "sys.stdout.close()")


@pytest.mark.slow
def test_what_runs_after_the_last_line_finds_what_the_script_has_defined(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """
import atexit, pickle, threading, time

class Kept:
    pass

def keep():
    print(type(pickle.loads(pickle.dumps(Kept()))))

def later():
    time.sleep(0.3)
    keep()

atexit.register(keep)
threading.Thread(target=later).start()
"""
    )
    ran = subprocess.run(
        [sys.executable, "-m", "backstash", "run", "--allocator", "system", "--quiet", script],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (ran.stdout, ran.stderr) == ("<class '__main__.Kept'>\n" * 2, "")


def _run(script: object, *options: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "backstash", "run", "--allocator", "system", *options, str(script), "one", "two"]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


@pytest.mark.slow
def test_what_runs_after_the_last_line_imports_and_is_called_as_the_script(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "late.py").write_text("number = 3")
    (tmp_path / "scripts" / "train.py").write_text(
        """
import atexit, sys, threading, time

def later():
    time.sleep(0.5)
    import late
    print("thread", late.number, sys.argv[1:])

def at_the_end():
    import late
    print("end", late.number, sys.argv)

atexit.register(at_the_end)
threading.Thread(target=later).start()
"""
    )
    ran = _run("scripts/train.py", "--quiet", folder=tmp_path)
    said = "thread 3 ['one', 'two']\nend 3 ['scripts/train.py', 'one', 'two']\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, said, "")


@pytest.mark.slow
@pytest.mark.parametrize("flushes", ["def flush(self): pass", "def flush(self): self.file.flush()", "other = 1"])
def test_a_stream_of_the_scripts_that_can_no_longer_be_used(tmp_path: Path, flushes: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import sys

class Tee:
    def __init__(self, file): self.file = file
    def write(self, text): return self.file.write(text)
    {flushes}

with open({str(tmp_path / "log")!r}, "w") as file:
    sys.stdout = Tee(file)
    print("trained")
"""
    )
    ran = _run(script)
    assert (ran.returncode, ran.stderr.count("Error")) == (0, 0), ran.stderr
    assert (tmp_path / "log").read_text() == "trained\n" and "train.py" in ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "archive", "compiled"])
def test_what_python_runs_that_is_no_source_file(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "helper.py").write_text("number = 5")
    (folder / "__main__.py").write_text(
        "import sys\nimport helper\nprint(__name__, helper.number, sys.argv[1:], __package__ or None)\n"
    )
    program = folder
    if kind == "archive":
        program = tmp_path / "app.pyz"
        zipapp.create_archive(folder, program)
    elif kind == "compiled":
        program = folder / "program.pyc"
        py_compile.compile(str(folder / "__main__.py"), cfile=str(program))
    plain = subprocess.run(
        [sys.executable, str(program), "one", "two"], capture_output=True, text=True, check=True
    ).stdout
    ran = _run(program, "--quiet")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, plain, "")
    assert plain.startswith("__main__ 5 ['one', 'two']")


FORKING = """
import os, sys
import torch
from torch import nn

torch.set_num_threads(1)  # GNU's OpenMP has no threads left in a forked process, and waits for them
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))

def train():
    for step in range(3):
        loss = model(torch.randn(512, 64)).square().mean()
        loss.backward()
        model.zero_grad()
    return loss.item()

train()
sys.stdout.flush()
child = os.fork()
if child == 0:
    train()
    print("the child has trained")
    sys.exit(4)
print("the child has ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
train()
"""


@pytest.mark.slow
@pytest.mark.parametrize("asked", [(), ("--budget", "100%")], ids=["a policy", "a budget"])
def test_a_forked_process_trains_and_leaves_the_report_to_the_first(asked: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "forking.py"
    path.write_text(FORKING)
    command = [
        sys.executable,
        "-m",
        "backstash",
        "run",
        "--allocator",
        "system",
        "--min-nbytes",
        "0",
        *asked,
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "the child has trained\nthe child has ended with 4\n" in done.stdout
    assert done.stdout.count("forking.py, 6 steps") == 1
    assert done.stdout.count("steps\n") == 1


def test_the_steps_of_a_budget_are_counted_once(script: str, invoke: Invoke) -> None:
    text = Path(script).read_text()
    for steps in (2, 3, 4, 5, 6, 9):
        Path(script).write_text(text.replace("range(5)", f"range({steps})"))
        result = invoke("run", "--min-nbytes", "0", "--budget", "100%", script)
        assert f"train.py, {steps} steps" in result.stdout

"""Long commands say what they do on a terminal, are silent elsewhere, and Ctrl-C leaves what was found."""

from __future__ import annotations

import json
import os
import pty
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backstash.cli import planning as planning_commands
from backstash.planning.model.plan import Plan
from backstash.planning.search.planner import Planner
from backstash.report import compare as comparing
from backstash.report import verified
from backstash.report.watch import Observed

Invoke = Callable[..., Any]

WAITING = """
import time
from backstash.cli.waiting import waiting
from backstash.telling import note_progress
with waiting() as say:
    say("the first steps of train.py")
    for step in range(1, 4):
        note_progress("timing steps", step, 3)
        time.sleep(0.15)
    print("of the script")
print("the result")
"""


def on_a_terminal(program: str, **variables: str) -> tuple[str, str]:
    """Runs a program whose stderr is a terminal. Returns its stdout and what the terminal was sent.

    It runs in a fork, because a new process takes seconds to import what it needs.
    """
    leader, follower = pty.openpty()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.dup2(writing, 1)
            os.dup2(follower, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            for name in ("CI", "NO_COLOR"):
                os.environ.pop(name, None)
            os.environ.update({"TERM": "xterm", **variables})
            exec(program, {"__name__": "__main__"})
            sys.stdout.flush()
            sys.stderr.flush()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(follower)
    os.close(writing)
    shown = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(leader)
    with open(reading) as pipe:
        out = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, shown.decode()
    return out, shown.decode()


def test_a_terminal_shows_what_is_done_and_how_long() -> None:
    out, shown = on_a_terminal(WAITING)
    assert out == "of the script\nthe result\n", "what goes to a pipe is not taken to the terminal"
    assert "the first steps of train.py: timing steps 3 of 3" in shown
    assert "0:00:00" in shown and "left" in shown


@pytest.mark.parametrize("variables", [{"CI": "true"}, {"TERM": "dumb"}])
def test_nothing_moves_where_nobody_looks_on(variables: dict[str, str]) -> None:
    out, shown = on_a_terminal(WAITING, **variables)
    assert (out, shown) == ("of the script\nthe result\n", "")


@pytest.fixture
def interrupted_run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The second run of a comparison ends with Ctrl-C. Returns the policies that were run."""
    ran: list[str] = []
    original = comparing._run

    def run(program: Any, policy: str, *others: Any) -> Observed:
        ran.append(policy)
        if len(ran) > 1:
            raise KeyboardInterrupt
        return original(program, policy, *others)

    monkeypatch.setattr(comparing, "_run", run)
    return ran


@pytest.mark.usefixtures("in_this_process", "interrupted_run")
def test_compare_leaves_what_it_has_measured(script: str, tmp_path: Path, invoke: Invoke) -> None:
    pytest.importorskip("matplotlib")
    done = invoke("compare", "--out", str(tmp_path / "out"), script)
    assert done.exit_code == 130
    assert "counted peak" in done.stdout
    assert "interrupted; this is what was found by then: 1 runs" in done.stderr
    written = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert written["is_interrupted"] and [row["policy"] for row in written["rows"]] == ["plain"]


@pytest.mark.usefixtures("in_this_process", "interrupted_run")
def test_choose_recommends_from_what_it_has_measured(script: str, invoke: Invoke) -> None:
    done = invoke("choose", script)
    assert done.exit_code == 130
    assert "recommended: plain PyTorch" in done.stdout


def test_ctrl_c_before_anything_was_measured(script: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: Any) -> Observed:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparing, "_run", run)
    done = invoke("choose", script)
    assert done.exit_code == 130 and "recommended" not in done.stdout


TRAINING = """
import torch
from torch import nn
torch.manual_seed(0)
layers = [nn.Conv2d(3, 8, 3, padding=1)]
for _ in range(4):
    layers += [nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 32 * 32, 10))
for _ in range(8):
    model.zero_grad()
    model(torch.randn(4, 3, 32, 32)).square().mean().backward()
"""


@pytest.mark.slow
def test_plan_leaves_a_plan_that_fits(tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes once the search has found something."""
    script, out = tmp_path / "train.py", tmp_path / "plan.json"
    script.write_text(TRAINING)

    def plan(planner: Planner, budget: Any) -> Plan:
        for _ in planner.search():
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr(planning_commands.Planner, "plan", plan)
    done = invoke("plan", "--budget", "85%", "--out", str(out), str(script))
    assert done.exit_code == 130, done.output
    assert "interrupted; this is what was found by then: a plan that fits" in done.stderr
    found = Plan.from_json(out.read_text())
    assert found.peak_nbytes <= found.budget


def test_ctrl_c_before_a_plan_was_found(tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)

    def plan(planner: Planner, budget: Any) -> Plan:
        raise KeyboardInterrupt

    monkeypatch.setattr(planning_commands.Planner, "plan", plan)
    done = invoke("plan", "--budget", "90%", str(script))
    assert done.exit_code == 130 and "backstash:" not in done.stdout


DIFFERING = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Tanh())
for step in range(3):
    x = torch.randn(8, 16, requires_grad=True)
    checkpoint(model, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
"""


@pytest.mark.slow
def test_verify_leaves_its_verdict(tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text(DIFFERING)
    original = verified._run

    def run(program: Any, name: str, *others: Any) -> Any:
        if name == "closer look":
            raise KeyboardInterrupt
        return original(program, name, *others)

    monkeypatch.setattr(verified, "_run", run)
    done = invoke("verify", str(script))
    assert done.exit_code == 130, done.output
    assert "differ" in done.stdout and "without a closer look" in done.stderr

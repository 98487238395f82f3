"""Fixtures of the command line's tests."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from backstash.cli.commands import app
from backstash.report import compare as comparing
from backstash.report import watch
from backstash.report.watch import MeasureRequest

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
    """A script that trains for five steps and prints its arguments."""
    path = tmp_path / "train.py"
    path.write_text(TRAINING)
    return str(path)


@pytest.fixture
def failing(tmp_path: Path) -> str:
    """The same, with an error after the last step."""
    path = tmp_path / "failing.py"
    path.write_text(TRAINING + "raise ValueError('after the last step')\n")
    return str(path)


@pytest.fixture
def invoke() -> Callable[..., Any]:
    """Runs a command in this process, as a shell would."""

    def run(*args: str) -> Any:
        return CliRunner().invoke(app, list(args), catch_exceptions=False)

    return run


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[tuple[MeasureRequest, Mapping[str, str]]]:
    """Runs are made in the process of the tests, because a new one takes seconds. Returns what was asked for."""
    asked = []

    def carry_out(
        module: str, order: MeasureRequest, environment: Mapping[str, str], printed: Callable[[str], None]
    ) -> tuple[int, str]:
        asked.append((order, environment))
        output, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(output), redirect_stderr(errors):
            exit_code = watch.carry_out(order)
        for line in output.getvalue().splitlines():
            printed(line)
        return exit_code, errors.getvalue()

    monkeypatch.setattr(comparing, "run_in_child", carry_out)
    return asked


@pytest.fixture(autouse=True)
def _nothing_of_this_machine_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No allocator is preloaded, which would start the tests anew, and no pyproject.toml is found but a test's own."""
    for name in ("POLICY", "POLICIES", "QUIET", "MIN_NBYTES", "REPEATS", "OUT", "STEPS", "EXACT"):
        monkeypatch.delenv(f"BACKSTASH_{name}", raising=False)
    monkeypatch.setenv("BACKSTASH_ALLOCATOR", "system")
    monkeypatch.setenv("COLUMNS", "100")
    folder = tmp_path / "empty"
    folder.mkdir()
    folder.joinpath("pyproject.toml").touch()
    monkeypatch.chdir(folder)

"""A notebook's cell runs under a Session, and its report is shown below it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from backstash.stash.ledger import Report

interactive = pytest.importorskip("IPython.core.interactiveshell")

TRAIN = "model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())\nx = torch.ones(512, 64)\n"
TRAIN += "loss = model(x).sum()\nloss.backward()\nloss.item() > 0"


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A shell with the extension. What cells display is in ``shell.displayed``."""
    shell = interactive.InteractiveShell(history_length=0)
    shell.user_ns["torch"] = torch
    shell.displayed = []
    monkeypatch.setattr("IPython.display.display", lambda *shown: shell.displayed.extend(shown))
    shell.run_line_magic("load_ext", "backstash")
    yield shell
    shell.history_manager.end_session()
    interactive.InteractiveShell.clear_instance()


def test_a_cell_runs_under_a_session_and_shows_its_report(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell(f"%%backstash lossless --min-nbytes 64 -o report\n{TRAIN}")
    (report,) = shell.displayed
    assert isinstance(report, Report) and report is shell.user_ns["report"]
    assert report.ratio > 1 and report._repr_html_().count("<table>") == 2
    assert shell.user_ns["model"] is not None and "True" in capsys.readouterr().out  # the cell's last value is shown


def test_a_cell_that_fails_shows_its_traceback_alone(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell(f"%%backstash\n{TRAIN}\n1 / 0")
    assert shell.displayed == [] and "ZeroDivisionError" in capsys.readouterr().out
    torch.ones(3, requires_grad=True).exp().sum().backward()  # the Session is left


@pytest.mark.parametrize(
    ("line", "message"),
    [("fastest", "policy 'fastest' was asked for"), ("--size 3", "usage: %%backstash"), ("a b", "usage: %%backstash")],
)
def test_what_the_magic_does_not_take_is_told(
    line: str, message: str, shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_cell(f"%%backstash {line}\nran = True")
    assert message in capsys.readouterr().out and "ran" not in shell.user_ns


def test_the_extension_can_be_unloaded(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_line_magic("unload_ext", "backstash")
    shell.run_cell("%%backstash\npass")
    assert "Cell magic `%%backstash` not found" in capsys.readouterr().err

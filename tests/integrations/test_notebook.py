"""A notebook's cell runs under a Session, and its report is shown below it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from backstash import Session
from backstash.stash.ledger import Report

interactive = pytest.importorskip("IPython.core.interactiveshell")
UsageError = pytest.importorskip("IPython.core.error").UsageError

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
    assert shell.display_formatter.formatters["text/plain"](report) == str(report)  # in a terminal
    assert shell.user_ns["model"] is not None and "True" in capsys.readouterr().out  # the cell's last value is shown


ERRORS = [
    ("1 / 0", ZeroDivisionError),
    ("print(((", SyntaxError),
    ("  y = 1\n x = 2", IndentationError),
    ("raise KeyboardInterrupt", KeyboardInterrupt),
    ("import sys; sys.exit(3)", SystemExit),
    ("model(torch.ones(2, 3))", RuntimeError),
    ("raise SystemError('inside')", SystemError),
    ("undefined_name", NameError),
]


@pytest.mark.filterwarnings("ignore:To exit")
@pytest.mark.parametrize("options", ["", "--budget 60%", "lossless -o report"])
@pytest.mark.parametrize(("line", "error"), ERRORS)
def test_a_cell_that_fails_does_so_as_without_the_magic(
    line: str, error: type[BaseException], options: str, shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = line if error in (SyntaxError, IndentationError) else f"{TRAIN}\n{line}"
    plain = shell.run_cell(cell)
    told = capsys.readouterr()
    done = shell.run_cell(f"%%backstash {options}\n{cell}")
    shown = capsys.readouterr()
    assert type(done.error_in_exec) is error and type(plain.error_in_exec or plain.error_before_exec) is error
    assert not done.success and shell.displayed == []
    for stream in ("out", "err"):
        name = error.__name__
        assert (name in getattr(told, stream)) == (name in getattr(shown, stream))
    assert shown.out.count("Traceback (most recent call last)") == told.out.count("Traceback (most recent call last)")
    if error is ZeroDivisionError:
        assert line in shown.out  # the line of the cell is in the traceback
    with Session():  # the magic's Session is left
        torch.ones(3, requires_grad=True).exp().sum().backward()
    assert ("report" in shell.user_ns) == ("report" in options)
    assert shell.run_cell("1 / 0").error_in_exec is not None and "ZeroDivisionError" in capsys.readouterr().out


def test_a_handler_of_errors_is_called_once(shell: Any) -> None:
    handled: list[str] = []
    shell.set_custom_exc((ZeroDivisionError,), lambda shell, kind, error, trace, **options: handled.append(str(error)))
    assert not shell.run_cell("%%backstash\n1 / 0").success
    assert handled == ["division by zero"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("fastest", "policy 'fastest' was asked for"),
        ("--size 3", "usage: %%backstash"),
        ("a b", "usage: %%backstash"),
        ("--min-nbytes many", "usage: %%backstash"),
        ("--min 3", "usage: %%backstash"),
        ("--budget nothing", "no number with a unit"),
        ("gist_fp8 --budget 60%", "together with policy"),
        ("-o 3x", "'3x' is no name"),
        ("-o class", "'class' is no name"),
        ("'lossless", "No closing quotation"),
        ("--min-nbytes -3", "Pass 0 or more"),
    ],
)
def test_what_the_magic_does_not_take_fails_the_cell(
    line: str, message: str, shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    done = shell.run_cell(f"%%backstash {line}\nran = True")
    assert isinstance(done.error_in_exec, UsageError) and not done.success
    shown = capsys.readouterr()
    assert message in shown.err and "Traceback" not in shown.err + shown.out and "ran" not in shell.user_ns


def test_the_extension_can_be_unloaded(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_line_magic("unload_ext", "backstash")
    shell.run_cell("%%backstash\npass")
    assert "Cell magic `%%backstash` not found" in capsys.readouterr().err

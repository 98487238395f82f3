"""The study of versions of torch reads what pytest says, and its table says what the file has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from backstash.torch_internals import TESTED
from studies import torch_versions
from studies.published import frameworks
from studies.torch_versions import PARTS, ROOT, counts, python_of, try_version

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="passes"/><testcase classname="a" name="fails"><failure/></testcase>
<testcase classname="b" name="breaks"><error/></testcase><testcase classname="b" name="waits"><skipped/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_counted(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert counts(tmp_path / "report.xml") == {"passed": 1, "failed": ["a.fails", "b.breaks"], "skipped": 1}


def test_the_files_are_there() -> None:
    assert all((ROOT / file).exists() for files in PARTS.values() for file in files)


def test_this_torch_is_tried_here() -> None:
    assert python_of(torch.__version__.partition("+")[0]) == sys.executable
    assert python_of("0.0.1") is None


def test_a_version_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_versions, "PARTS", {"names": ("tests/test_buffers.py",)})
    found = try_version(sys.executable)
    assert found["torch"] == torch.__version__ and found["problem"] is None
    assert found["parts"]["names"]["passed"] > 0 and found["parts"]["names"]["failed"] == []


def test_an_unfit_python_is_told(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no torch here >&2; exit 1\n")
    python.chmod(0o755)
    assert try_version(str(python)) == {"problem": "no torch here", "parts": {}}


def test_the_table_has_a_row_for_each_version_and_says_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"passed": 5, "failed": [], "skipped": 1}
    tried = {"torch": "2.11.0", "answered": [], "problem": None, "parts": {"plans": part}}
    failing = {**tried, "torch": "2.15.0", "answered": ["x"], "parts": {"plans": {**part, "failed": ["a.b"]}}}
    found = {
        "started": "2030-01-31T00:00:00",
        "machine": {"commit": "0123456789abcdef"},
        "versions": {"2.11.0": tried, "2.15.0": failing},
    }
    monkeypatch.setattr(frameworks, "load", lambda kind: found)
    lines = frameworks.torch_versions().splitlines()
    assert lines[-2] == "| 2.11.0 | all 5 pass | does not ask |"
    assert lines[-1] == "| 2.15.0 | 1 of 6 fail | asks whether hooks are respected; the Session answers |"


def test_every_version_that_we_name_was_tried_and_failed_nothing() -> None:
    versions = frameworks.load("torch-versions")["versions"]
    assert tuple(versions) == TESTED
    assert {
        name: part["failed"] for found in versions.values() for name, part in found["parts"].items() if part["failed"]
    } == {}

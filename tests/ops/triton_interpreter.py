"""Collects the files it is given, and runs the tests that it is told to: conftest.py starts it to interpret kernels.

Reads node ids from standard input and writes how each test failed or was skipped, "" if it passed; both as JSON, one a
line.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import TextIO

import pytest
import triton.language as tl
from triton.runtime import interpreter


class OnDemand:
    """A plugin that runs tests in the order in which they are asked for."""

    def __init__(self, requests: TextIO, answers: TextIO) -> None:
        self.requests, self.answers = requests, answers
        self.failures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self.failures.append(report.longrepr[2])  # which begins with "Skipped: "
        elif not report.passed:
            self.failures.append(report.longreprtext)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        tests = {item.nodeid: item for item in session.items}
        for line in self.requests:
            test = tests[json.loads(line)]
            test.ihook.pytest_runtest_protocol(item=test, nextitem=None)
            print(json.dumps("\n".join(self.failures)), file=self.answers, flush=True)
            self.failures.clear()
        return True


def _interpret_from_now_on() -> None:
    """Wraps Triton's language for its interpreter, once.

    The interpreter does so for each kernel and each function that a kernel calls, and around what it has wrapped
    before, so that each call makes the next ones slower.
    """
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    nothing = interpreter._LangPatchScope()
    interpreter._patch_lang = lambda function: nothing


if __name__ == "__main__":
    _interpret_from_now_on()
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what pytest prints is not an answer
    options = ["-o", "addopts=", *(f"-pno:{plugin}" for plugin in ("terminal", "cacheprovider", "xdist"))]
    sys.exit(pytest.main([*options, *sys.argv[1:]], [OnDemand(requests, answers)]))

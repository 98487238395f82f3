"""Instruction sets and threads for the tests of the C++ kernels; where the tests of the Triton kernels run.

Whether Triton interprets a kernel or compiles it is decided by an environment variable when it is imported, for the
whole process. So each process of tests keeps another one that interprets, and hands it one test at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backstash.ops.cpu import library

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() and not INTERPRETING else []


@pytest.fixture(params=["interpreter", *ON_GPU])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """What runs the kernels; every ``torch.empty`` is filled with NaN or the largest integer."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.manual_seed(0)
    yield request.param
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=library.ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The instruction set that the C++ kernels use in the test."""
    if not library.available():
        pytest.skip("the native kernels are not built: run 'python setup.py build_native'")
    before = library.isa()
    if library.set_isa(request.param) != request.param:
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    library.set_isa(before)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> int:
    """The number of torch's threads in the test; tests/conftest.py sets it back to one."""
    torch.set_num_threads(request.param)
    return int(request.param)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Has one case of each interpreted test stay where ``--cases`` thins them out: an interpreter takes seconds."""
    for item in items:
        if "backend" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.cases(1))


class Interpreter:
    """A process that runs tests with Triton's interpreter; it starts with the first one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.process: subprocess.Popen[str] | None = None

    def run(self, test: str) -> str:
        """Returns how the test of this node id failed, or an empty string."""
        if self.process is None:
            files = [str(path) for path in sorted(Path(__file__).parent.glob("test_*.py"))]
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("triton_interpreter.py")), *files],
                cwd=self.root,
                env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(test) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            code = self.process.wait()
            self.process = None
            return f"the process with Triton's interpreter ended with {code}"
        return str(json.loads(answer))

    def close(self) -> None:
        """Ends the process."""
        if self.process is not None:
            self.process.communicate()


INTERPRETER = pytest.StashKey[Interpreter]()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Hands over what is for the interpreter, unless this is the process that interprets."""
    parameters: dict[str, Any] = (getattr(pyfuncitem, "callspec", None) and pyfuncitem.callspec.params) or {}
    if INTERPRETING or parameters.get("backend") != "interpreter":
        return None
    config = pyfuncitem.config
    interpreter = config.stash.setdefault(INTERPRETER, Interpreter(config.rootpath))
    failure = interpreter.run(pyfuncitem.nodeid)
    if failure.startswith("Skipped: "):
        pytest.skip(failure)
    if failure:
        pytest.fail(failure, pytrace=False)
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the process, if there is one."""
    if INTERPRETER in config.stash:
        config.stash[INTERPRETER].close()

"""Runs the tests in ``tests/device``, each file in a process with a fake accelerator; looks for CUDA in the sources.

By hand: ``python -m pytest -p tests.device.fake tests/device``.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from sources import MODULES, ROOT, SOURCE, nodes_of

FILES = sorted((ROOT / "tests" / "device").glob("test_*.py"))
COMPILER = os.environ.get("CXX", "g++")

OF_CUDA_ALONE = {
    "numerics.py": "torch's settings of CUDA's libraries",
    "ops/backends.py": "Triton's kernels serve CUDA",
    "ops/triton": "Triton's kernels",
    "remake/onepass.py": "the bits of a NaN that NVIDIA's instruction rounds",
    "ops/cuda": "kernels in CUDA C++",
    "ops/onepass/cuda.py": "kernels in CUDA C++",
    "forecast": "cards that are CUDA's, which are not here",
}
"""The sources that may name CUDA, and why."""


@pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason=f"no C++ compiler {COMPILER!r} to build the fake device with"
)
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_on_the_fake_device(file: Path, which: str, request: pytest.FixtureRequest) -> None:
    arguments = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tests.device.fake", "--color=no", "-m", which)
    cases = f"--cases={request.config.getoption('cases')}"
    unset = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, cases, str(file)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    nothing_is_chosen = ran.returncode == pytest.ExitCode.NO_TESTS_COLLECTED and which == "slow"
    assert ran.returncode == 0 or nothing_is_chosen, f"{ran.stdout}\n{ran.stderr}"


def _uses_of_cuda(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Yields the lines that name CUDA: ``"cuda"`` as a value, ``torch.cuda`` and ``is_cuda``."""
    for node in nodes:
        is_text = isinstance(node, ast.Constant) and node.value in ("cuda", "CUDA")
        if is_text or (isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda")):
            yield node.lineno


def test_sources_ask_for_an_accelerator_and_not_for_cuda() -> None:
    found = {}
    for path in MODULES:
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith(tuple(OF_CUDA_ALONE)):
            found[name] = list(_uses_of_cuda(nodes_of(path)))
    named = {name: lines for name, lines in found.items() if lines}
    assert not named, "ask backstash.accelerator instead, or whether a device is something other than the CPU"

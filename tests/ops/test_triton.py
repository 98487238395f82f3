"""The Triton kernels against the reference: under Triton's interpreter everywhere, on the GPU where there is one.

The cases are in triton_cases*.py, which a process of its own runs: whether Triton interprets or compiles is decided by
an environment variable when it is imported, for the whole process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

CASES = [str(Path(__file__).with_name(name)) for name in ("triton_cases.py", "triton_cases_sz.py")]

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install triton")


def run(*arguments: str, interpret: bool) -> subprocess.CompletedProcess[str]:
    """Run Python with Triton interpreting or compiling."""
    env = {**os.environ, "TRITON_INTERPRET": str(int(interpret)), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "interpret",
    [
        pytest.param(True, id="interpreter"),
        pytest.param(
            False,
            id="cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")],
        ),
    ],
)
def test_kernels_equal_the_reference(interpret: bool) -> None:
    done = run("-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", *CASES, interpret=interpret)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_importing_the_launchers_imports_no_triton_and_starts_no_cuda() -> None:
    script = (
        "import sys, torch; before = 'triton' in sys.modules\n"
        "from backstash.ops import triton\n"
        "assert triton.available()\n"
        "assert before or 'triton' not in sys.modules\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    done = run("-c", script, interpret=False)
    assert done.returncode == 0, done.stderr

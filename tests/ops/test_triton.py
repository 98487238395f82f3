"""What importing the launchers of the Triton kernels does, and what it leaves to the first call."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install triton")


def test_importing_the_launchers_imports_no_triton_and_starts_no_cuda() -> None:
    script = (
        "import sys, torch; before = 'triton' in sys.modules\n"
        "from backstash.ops import triton\n"
        "assert triton.available()\n"
        "assert before or 'triton' not in sys.modules\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

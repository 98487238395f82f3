"""Keeping freed memory avoids page faults, which are counted in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from backstash.integrations.allocator import Usage

SCRIPT = """
import json, sys, torch
from backstash.integrations.allocator import Usage, keep_memory
kept = sys.argv[1] == "keep" and keep_memory()
torch.ones(48 << 20, dtype=torch.uint8)
before = Usage.now()
for _ in range(20):
    torch.ones(48 << 20, dtype=torch.uint8)
print(json.dumps([kept, Usage.now().since(before).page_faults]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_kept_memory_is_not_paged_in_again() -> None:
    found = {}
    for how in ("keep", "default"):
        run = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
        found[how] = json.loads(run.stdout)
    if not found["keep"][0]:
        pytest.skip("this C library has no mallopt")
    assert found["keep"][1] * 4 < found["default"][1]


def test_advice() -> None:
    assert Usage(9.5, 0.5, 1000).advice() is None
    assert Usage(0.0, 0.0, 0).advice() is None
    advice = Usage(8.0, 2.0, 123_456).advice()
    assert advice is not None
    assert advice.startswith("20% of the processor time went to the system, with 123,456 page faults")

"""``BACKSTASH_KERNELS=reference``: no native kernel runs, in forward or backward, and the bits are the same."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys

import pytest

STEP = """
import hashlib
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from backstash import Session
from backstash.ops.cpu import library

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
    nn.MaxPool2d(2), nn.Dropout(0.5), nn.Flatten(), nn.Linear(16 * 16, 64), nn.GELU(), nn.Dropout(0.5),
    nn.Linear(64, 10),
)
x, y = torch.randn(4, 3, 8, 8), torch.arange(4) % 10
for _ in range(2):
    with Session("lossless", min_nbytes=0):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
bits = b"".join(p.grad.numpy().tobytes() for p in model.parameters())
maps = Path("/proc/self/maps")
loaded = "libbackstash_native" in maps.read_text() if sys.platform == "linux" else library.available()
print(hashlib.sha256(bits).hexdigest(), loaded)
"""


@pytest.mark.slow
def test_the_reference_serves_alone_and_gives_the_same_bits() -> None:
    """Runs the step with the reference in a process of its own, and in this one with the kernels that serve here."""
    run = subprocess.run(
        [sys.executable, "-c", STEP],
        env={**os.environ, "BACKSTASH_KERNELS": "reference", "OMP_NUM_THREADS": "1"},  # as this process has
        capture_output=True,
        text=True,
        check=True,
    )
    digest, is_loaded = run.stdout.split()
    assert is_loaded == "False"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(STEP, {})
    assert printed.getvalue().split()[0] == digest

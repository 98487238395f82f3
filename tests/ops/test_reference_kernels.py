"""``BACKSTASH_KERNELS=reference``: no native kernel runs, in forward or backward, and the bits are the same."""

from __future__ import annotations

import os
import subprocess
import sys

STEP = """
import hashlib
import torch
import torch.nn.functional as F
from torch import nn
from backstash import Session
from backstash.ops.cpu import library

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
    nn.MaxPool2d(2), nn.Dropout(0.5), nn.Flatten(), nn.Linear(16 * 64, 64), nn.GELU(), nn.Dropout(0.5),
    nn.Linear(64, 10),
)
x, y = torch.randn(8, 3, 16, 16), torch.arange(8) % 10
for _ in range(2):
    with Session("lossless", min_nbytes=0):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
bits = b"".join(p.grad.numpy().tobytes() for p in model.parameters())
loaded = "libbackstash_native" in open("/proc/self/maps").read() if sys.platform == "linux" else library.available()
print(hashlib.sha256(bits).hexdigest(), loaded)
"""


def step(**variables: str) -> list[str]:
    run = subprocess.run(
        [sys.executable, "-c", f"import sys{STEP}"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.split()


def test_the_reference_serves_alone_and_gives_the_same_bits() -> None:
    reference = step(BACKSTASH_KERNELS="reference")
    assert reference[1] == "False"
    assert step(BACKSTASH_KERNELS="auto")[0] == reference[0]

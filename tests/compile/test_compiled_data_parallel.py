"""A compiled model under DistributedDataParallel in two processes: gradients as those of compiled plain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import backstash

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
torch.set_num_threads(1)

def gradients(backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(), nn.Dropout(0.5), nn.Linear(32, 4))
    parallel = DistributedDataParallel(torch.compile(model, backend=backend))
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        parallel(torch.randn(8, 16)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]

plain = gradients("aot_eager")
for budget in (None, 1000):
    ours = backstash.compile_backend("lossless", min_nbytes=0, budget=budget)
    treated = gradients(ours)
    assert all(map(torch.equal, plain, treated))
    assert "bits" in {row.codec for row in ours.report().rows}, str(ours.report())
    assert budget is None or "operators computed again" in str(ours.report().notes)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    script, meeting = tmp_path / "train.py", tmp_path / "meeting"
    script.write_text(SCRIPT)
    processes = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(meeting)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors

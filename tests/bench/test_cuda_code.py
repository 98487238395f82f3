"""The code that Inductor writes for CUDA, obtained without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import backstash as bs
from bench import cuda_code


@pytest.mark.slow  # Inductor is imported, and writes four graphs
def test_a_treated_graph_moves_no_more_than_plain_and_its_planes() -> None:
    module = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    images, labels = torch.randn(32, 3, 18, 18), torch.zeros(32, dtype=torch.long)
    made = module, lambda: functional.cross_entropy(module(images), labels)
    plain = cuda_code.codes(made, None)
    treated = cuda_code.codes(made, bs.compile_options("lossless", min_nbytes=0))
    for graph, code in treated.items():
        assert "@triton.jit" in code.text and "device='cuda:0'" in code.text
        assert code.nbytes <= plain[graph].nbytes + plain["forward"].saved_nbytes
        assert sum(kernel.is_written for kernel in code.kernels) <= sum(k.is_written for k in plain[graph].kernels) + 1
    assert treated["forward"].saved_nbytes < plain["forward"].saved_nbytes
    announced = [kernel for kernel in treated["forward"].kernels if "backstash_graph" in kernel.name]
    assert [(kernel.nbytes, kernel.is_written) for kernel in announced] == [(0, False)]
    assert not any(kernel.name == "full" for kernel in treated["forward"].kernels)
    found = {row.graph: row for row in cuda_code.rows(treated, plain)}
    assert found["backward"].suspects == ()
    assert not torch.cuda.is_available() or torch.cuda.device_count(), "nobody believes in CUDA afterwards"

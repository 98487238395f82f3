"""Inductor's code for a network with a norm that keeps statistics, whose loops it gathers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import backstash as bs


@pytest.mark.filterwarnings("ignore")
def test_what_a_graph_saves_is_told_behind_its_loops() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))
    x = torch.randn(8, 3, 4, 4)
    model(x).square().sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    options = bs.compile_options("lossless", min_nbytes=0)
    torch.compile(model, options=options)(x).square().sum().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None and grad is not None
        assert torch.allclose(parameter.grad, grad, atol=1e-5)
    assert options.report().rows

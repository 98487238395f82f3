"""A Session around a compiled model takes no more than the compiled model alone."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backstash import Session, policies
from backstash.report.meter import CountedPeak

STEPS = 9
SLACK = 64 << 10


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(6)), nn.Linear(128, 8))


def train(compiled: str, backend: str, context: Any, how: str) -> tuple[list[int], list[Tensor]]:
    """The peaks of some steps, and their gradients."""
    torch._dynamo.reset()
    model = network()
    if compiled == "blocks":
        for block in model.children():
            block.compile(backend=backend)
    run = torch.compile(model, backend=backend) if compiled == "whole" else model
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    peaks, found = [], []
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(2048, 128)
        with CountedPeak() as counted:
            with context:
                loss = run(x).square().mean()
            if how == "twice":
                loss.backward(retain_graph=True)
            loss.backward()
        peaks.append(counted.peak_nbytes)
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return peaks, found


@pytest.mark.parametrize("how", ["once", "twice"])
@pytest.mark.parametrize("compiled", ["whole", "blocks"])
@pytest.mark.parametrize(
    "policy", ["lossless", "lossless_stored", "gist_lossless", policies.lossless(dense=True)], ids=str
)
def test_no_step_takes_more_than_the_compiled_model_alone(policy: Any, compiled: str, how: str) -> None:
    plain, expected = train(compiled, "aot_eager", nullcontext(), how)
    peaks, found = train(compiled, "aot_eager", Session(policy, min_nbytes=0), how)
    assert all(map(torch.equal, expected, found))
    if how == "once":  # a graph that is read again keeps its planes
        assert max(peaks[1:]) <= max(plain[1:]) + SLACK, [each - max(plain[1:]) for each in peaks]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lossless", "quantized"])
def test_no_step_takes_more_than_inductors_code(policy: str) -> None:
    plain, expected = train("whole", "inductor", nullcontext(), "once")
    peaks, found = train("whole", "inductor", Session(policy, min_nbytes=0), "once")
    assert policy != "lossless" or all(map(torch.equal, expected, found))
    assert max(peaks[1:]) <= max(plain[1:]) + SLACK, [each - max(plain[1:]) for each in peaks]


@pytest.mark.parametrize("compiled", ["whole", "none"])
def test_a_report_says_that_a_compiled_function_reads_everything_at_once(compiled: str) -> None:
    session = Session("lossless", min_nbytes=0)
    train(compiled, "aot_eager", session, "once")
    told = [note for note in session.report().notes if "compiled functions have saved" in note]
    assert len(told) == (compiled == "whole") and all("compile_options" in note for note in told)

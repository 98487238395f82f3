"""``verify`` on an accelerator: checksums stay on the device until a backward pass has ended, and equal the CPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import backstash as bs
from backstash.verifying.checksum import checksum
from backstash.verifying.watch import WatchedRun
from tests.device import fake

assert fake.device.type == "fake"


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(32, 1)).to("fake")


def run(net: nn.Module, x: Tensor, **options: Any) -> Tensor:
    for layer in net:
        x = checkpoint(layer, x, use_reentrant=False, **options)
    return x.sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(7,), (300, 401), (65, 33), (0, 3)])
def test_a_checksum_is_that_of_the_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 3).to(dtype)
    found = checksum(x.to("fake"))
    assert isinstance(found, Tensor) or not x.numel()
    assert int(found) == checksum(x)
    assert int(checksum(x.to("fake").t())) == checksum(x.t())


def test_a_watched_step_waits_once() -> None:
    net, x = network(), torch.randn(16, 32).to("fake")
    with WatchedRun():
        run(net, x).backward()
    with fake.counting() as plain:
        run(net, x).backward()
    watch = WatchedRun()
    with watch:
        run(net, x)  # so that weights of checksums are on the device
        with fake.counting() as counts:
            run(net, x).backward()
    assert watch.log.values and not watch.log.differing
    # Where a pass begins, its result is noted; where it ends, values and then gradients are.
    assert counts.waits - plain.waits <= 4, counts.lines("waits")


def test_faults_are_found() -> None:
    net, x = network(), torch.randn(16, 32).to("fake")
    assert bs.verify(lambda: run(net, x).backward()).is_equal
    found = bs.verify(lambda: run(net, x, preserve_rng_state=False).backward())
    assert found.first is not None and found.first.cause.kind == "generator", str(found)


def test_a_value_on_another_device_is_found() -> None:
    net, x = network(), torch.randn(16, 32).to("fake")

    def step() -> None:
        with saved_tensors_hooks(lambda y: y.detach().cpu(), lambda y: y + 0 if y.dim() != 2 else y.to("fake") * 2):
            loss = (net(x) * 2).sum()
        loss.backward()

    found = bs.verify(step)
    assert found.verdict == "differs", str(found)

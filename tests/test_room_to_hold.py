"""Values remade for several readers are held between them, as long as that does not raise the step's peak."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import backstash as bs
from backstash.papers.comet import comet
from backstash.report.meter import CountedPeak
from backstash.stash.live import Live
from tests import networks


def test_nothing_is_held_before_backward_has_freed_something() -> None:
    live = Live()
    live.add(100)
    live.stashed_nbytes = 100
    assert not live.has_room(1)
    live.add(-40)
    assert live.has_room(40) and not live.has_room(41)
    live.add_remade(20)
    assert live.has_room(20) and not live.has_room(21)


def _last_peak() -> tuple[int, int]:
    """The counted peak of the last of some steps, and how many values were decoded or made again in it."""
    torch.manual_seed(0)
    model, x = networks.build("resnet18"), torch.randn(8, 3, 96, 96)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    policy = comet("conv+norm", 0.01, 2, "szp", optimizer)
    session = bs.Session(policy, model=model, min_nbytes=1024, stop_if_useless=False)
    for _ in range(6):
        with CountedPeak() as counted:
            with session:
                loss = functional.cross_entropy(model(x), torch.arange(len(x)))
            loss.backward()
            del loss
        optimizer.step()
    return counted.peak_nbytes, sum(account.decodes for account in session.accounts.accounts)


def test_what_is_held_raises_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    held, decodes = _last_peak()
    monkeypatch.setattr(Live, "has_room", lambda self, nbytes: False)
    alone, more_decodes = _last_peak()
    assert held <= alone and decodes <= more_decodes


@pytest.mark.parametrize("policy", ["lossless", "quantized"])
def test_what_a_segment_has_read_is_gone_when_the_segment_is(policy: str) -> None:
    """The input of a checkpointed segment is decoded for it, and no longer held when the one before it runs again."""
    torch.manual_seed(0)

    def block(inputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))

    head = nn.Sequential(nn.Flatten(), nn.Linear(64 * 256, 4))
    segments, x = nn.ModuleList((block(3), block(64), head)), torch.randn(8, 3, 64, 64)
    for parameter in segments.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def peaks(session: bs.Session) -> list[int]:
        found = []
        for _ in range(12):  # the last ones run a script
            with CountedPeak() as counted:
                with session:
                    y = x
                    for segment in segments:
                        y = checkpoint(segment, y, use_reentrant=False)
                    loss = y.square().mean()
                    del y
                loss.backward()
                del loss
            found.append(counted.peak_nbytes)
        return found

    session = bs.Session(policy, stop_if_useless=False)
    assert max(peaks(session)) <= 1.02 * max(peaks(bs.Session("keep")))
    assert session._is_replayed


def _relu(rows: int) -> tuple[nn.Module, torch.Tensor]:
    """A relu of 512 bytes a row, which a product and the relu itself read."""
    return nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 4)), torch.randn(rows, 8)


def _dropout(rows: int) -> tuple[nn.Module, torch.Tensor]:
    """A dropout of 16 KiB a row, which is read first, and a wide layer whose gradients are the peak."""
    layers = nn.Linear(2048, 256), nn.Tanh(), nn.Linear(256, 4096), nn.Dropout(0.5), nn.Linear(4096, 8)
    return nn.Sequential(*layers), torch.randn(rows, 2048)


@pytest.mark.parametrize("min_nbytes", [0, None])
@pytest.mark.parametrize(
    ("make", "rows"), [(_relu, 64), (_relu, 384), (_relu, 511), (_relu, 1024), (_dropout, 16), (_dropout, 56)]
)
def test_small_values_take_no_more_than_plain(
    make: Callable[[int], tuple[nn.Module, torch.Tensor]], rows: int, min_nbytes: int | None
) -> None:
    """No buffer waits below a peak, and planes and what was decoded from them do not lie side by side at one."""

    def peaks(session: AbstractContextManager[object], model: nn.Module, x: torch.Tensor) -> list[int]:
        found = []
        for _ in range(8):
            model.zero_grad()
            with CountedPeak() as counted:
                with session:
                    loss = model(x).square().mean()
                loss.backward()
                del loss
            found.append(counted.peak_nbytes)
        return found

    torch.manual_seed(0)
    model, x = make(rows)
    plain = max(peaks(nullcontext(), model, x))
    chosen = {} if min_nbytes is None else {"min_nbytes": min_nbytes}
    session = bs.Session("lossless", model=model, stop_if_useless=False, **chosen)  # type: ignore[arg-type]
    assert max(peaks(session, model, x)[1:]) <= plain + 2048  # proofs on first use take more

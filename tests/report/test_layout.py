"""What channels last would give a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from backstash import Session
from backstash.errors import MeasureError, RewriteError
from backstash.report.layout import LayoutGain, layout_gain


def network() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(16, 8, 3)), torch.randn(4, 3, 32, 32)


@pytest.mark.parametrize("policy", [None, "lossless"])
def test_both_layouts_are_measured_and_the_model_stays(policy: str | None) -> None:
    model, images = network()

    def step() -> None:
        model.zero_grad(set_to_none=False)
        model(images).square().mean().backward()

    strides = [x.stride() for x in model.parameters()]
    numbers = [x.detach().clone() for x in model.parameters()]
    session = None if policy is None else Session(policy, model=model)
    gain = layout_gain(model, step, session=session, rounds=1)
    assert gain.convolutions == 3 and gain.distance < 3e-4
    assert gain.peak_nbytes > 0 and gain.peak_nbytes_after > 0 and gain.seconds > 0 and gain.seconds_after > 0
    assert [x.stride() for x in model.parameters()] == strides
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), numbers, strict=True))


def test_the_line_says_what_to_do() -> None:
    gain = LayoutGain(600 << 20, 400 << 20, 1.0, 0.9, 2e-6, 3)
    assert gain.is_worth_it
    assert str(gain) == (
        "channels last: peak 400.0 MiB instead of 600.0 MiB, step time x0.90, numbers 2e-06 apart; "
        "use backstash.rewrites.channels_last"
    )
    assert not replace(gain, seconds_after=1.2).is_worth_it
    assert "would not help" in str(replace(gain, peak_nbytes_after=600 << 20))


def test_what_cannot_be_measured_is_an_error() -> None:
    model, images = network()
    with pytest.raises(MeasureError, match="repeats=0"):
        layout_gain(model, lambda: model(images).sum().backward(), rounds=0)
    with pytest.raises(RewriteError, match="no convolution"):
        layout_gain(nn.Linear(2, 2), lambda: None)

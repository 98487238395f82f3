from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from backstash import Session
from backstash.papers.comet import BatchSize
from backstash.report.meter import Measurement


@pytest.mark.parametrize(
    ("nbytes", "batch", "expected"),
    [(100, 10, 64), (100, 1, 8), (95, 1, 8), (950, 1, 1), (1, 1, 512), (100, 3, 16), (118.75, 1, 8), (118.8, 1, 4)],
)
def test_the_largest_power_of_two_that_fits(nbytes: float, batch: int, expected: int) -> None:
    size = BatchSize(limit=1000, maximum=1000)
    assert size.after(nbytes, batch) == expected
    assert expected * nbytes / batch <= 950


def test_no_more_than_the_maximum() -> None:
    assert BatchSize(limit=10**9, maximum=100).after(1, 1) == 64
    assert BatchSize(limit=10**9, maximum=128).after(1, 1) == 128


def test_fixed_bytes_do_not_grow() -> None:
    assert BatchSize(limit=1000, maximum=64, fixed=550).after(100, 4) == 16


def test_from_a_measurement_and_a_session() -> None:
    measurement = Measurement(peak_nbytes=200, resident_nbytes=None, seconds=0.1, repeats=1, device="cpu")
    assert BatchSize(limit=1000, maximum=64).after(measurement, 4) == 16
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    with Session("keep", min_nbytes=0) as session:
        loss = model(torch.randn(8, 64, requires_grad=True)).sum()
    loss.backward()
    per_sample = session.report().stash_nbytes / 8
    assert BatchSize(limit=int(40 * per_sample), maximum=64).after(session, 8) == 32


@pytest.mark.parametrize(("nbytes", "batch"), [(0, 1), (-5, 1), (math.nan, 1), (math.inf, 1), (10, 0)])
def test_a_measurement_of_nothing_is_refused(nbytes: float, batch: int) -> None:
    with pytest.raises(ValueError, match=r"tell nothing of a sample's"):
        BatchSize(1000, 64).after(nbytes, batch)


def test_a_sample_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a sample takes 2000 bytes, but only 950 are left"):
        BatchSize(1000, 64).after(2000, 1)


@pytest.mark.parametrize("wrong", [{"maximum": 0}, {"free": 1.0}, {"free": -0.1}, {"fixed": 950}, {"limit": 0}])
def test_wrong_sizes_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"BatchSize\(.* was asked for, but it takes"):
        BatchSize(**({"limit": 1000, "maximum": 64} | wrong))

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from torch import nn

from backstash import measure
from backstash.errors import MeasureError
from backstash.report import meter
from backstash.report.meter import CountedPeak, Measurement

MB = 1_000_000


def allocate(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def test_a_known_pattern_is_counted_exactly() -> None:
    held = allocate(3 * MB)
    with CountedPeak() as counter:
        first = allocate(10 * MB)
        second = allocate(5 * MB)
        del first
        third = allocate(4 * MB)
        del second, third
    assert counter.peak_nbytes == 15 * MB
    assert [nbytes for _, nbytes in counter.timeline] == [10 * MB, 15 * MB, 5 * MB, 9 * MB, 4 * MB, 0]
    times = [when for when, _ in counter.timeline]
    assert times == sorted(times)
    del held


def test_freeing_what_was_alive_before_is_not_counted() -> None:
    held = allocate(3 * MB)
    with CountedPeak() as counter:
        del held
        allocate(2 * MB)
    assert counter.peak_nbytes == 2 * MB
    assert [nbytes for _, nbytes in counter.timeline] == [2 * MB, 0]


def test_freeing_what_an_earlier_count_saw_made_is_not_counted() -> None:
    with CountedPeak():
        held = allocate(3 * MB)
    with CountedPeak() as counter:
        del held
        allocate(2 * MB)
    assert counter.peak_nbytes == 2 * MB
    assert [nbytes for _, nbytes in counter.timeline] == [2 * MB, 0]


def test_nothing_allocated_is_a_peak_of_zero() -> None:
    with CountedPeak() as counter:
        pass
    assert (counter.peak_nbytes, counter.timeline) == (0, [])


def test_an_error_inside_passes_through() -> None:
    with pytest.raises(KeyError), CountedPeak() as counter:
        raise KeyError("inside")
    assert counter.peak_nbytes == 0
    with CountedPeak() as again:
        allocate(MB)
    assert again.peak_nbytes == MB


def test_measure_a_step() -> None:
    calls = []

    def step() -> None:
        calls.append(1)
        first = allocate(2 * MB)
        allocate(MB).add_(first[:MB])

    found = measure(step, repeats=2, warmup=3, device="cpu")
    assert len(calls) == 3 + 2 * 2
    assert found.peak_nbytes == 3 * MB
    assert (found.repeats, found.device) == (2, "cpu")
    assert found.seconds > 0


def test_measure_a_training_step() -> None:
    model = nn.Linear(256, 256)
    x = torch.randn(1000, 256)

    def step() -> None:
        model.zero_grad(set_to_none=False)
        model(x).square().sum().backward()

    found = measure(step, repeats=1)
    assert found.peak_nbytes >= 2 * 1000 * 256 * 4
    assert found.peak_nbytes == measure(step, repeats=1).peak_nbytes


@pytest.mark.skipif(not meter.reset_resident_peak(), reason="this system does not let a process reset its peak")
def test_the_resident_peak_sees_what_is_touched() -> None:
    def touch() -> None:
        with mmap.mmap(-1, 64 * MB) as fresh:  # not malloc: it may hand out pages that are resident already
            torch.frombuffer(fresh, dtype=torch.uint8).fill_(1)

    found = measure(touch, repeats=1)
    assert found.resident_nbytes is not None
    assert 48 * MB < found.resident_nbytes < 256 * MB
    assert found.notes == ()


@pytest.mark.parametrize("missing", ["_STATUS", "_CLEAR"])
def test_a_system_without_a_resident_peak_says_so(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(meter, missing, Path("/nonexistent/of/course"))
    found = measure(lambda: allocate(MB), repeats=1)
    assert found.resident_nbytes is None
    assert found.peak_nbytes == MB
    assert len(found.notes) == 1
    assert found.notes[0].startswith("resident peak: this system (")
    if missing == "_STATUS":
        assert meter.resident_nbytes() is None
        assert meter.resident_peak_nbytes() is None
    else:
        assert not meter.reset_resident_peak()


@pytest.mark.parametrize("counts", [{"repeats": 0}, {"repeats": -1}, {"warmup": -1}])
def test_counts_that_make_no_sense(counts: dict[str, int]) -> None:
    with pytest.raises(MeasureError, match=r"asked for repeats=.* but it needs repeats >= 1 and warmup >= 0"):
        measure(lambda: None, **counts)


def test_devices_that_are_not_there() -> None:
    with pytest.raises(MeasureError, match="asked for device='tpu'"):
        measure(lambda: None, device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(MeasureError, match=r"an accelerator where one is \(none here\)"):
            measure(lambda: None, device="cuda")


def test_a_measurement_is_a_value() -> None:
    assert Measurement(1, None, 0.5, 1, "cpu") == Measurement(1, None, 0.5, 1, "cpu", ())


def test_resident_peaks_are_known_before_and_after_a_moment() -> None:
    if not meter.reset_resident_peak():
        pytest.skip("this system does not let a process reset its high-water mark")
    peaks = meter.ResidentPeaks()
    # Pages of their own: an allocator may have as much left over, resident, from what ran before.
    large = mmap.mmap(-1, 64 * MB)
    large.write(bytes(64 * MB))
    large.close()
    peaks.separate()
    small = allocate(16 * MB).fill_(1)
    peaks.end()
    assert peaks.before is not None and peaks.after is not None
    assert peaks.before >= peaks.after + 40 * MB
    again = peaks.before
    peaks.separate()  # there is one moment alone
    assert peaks.before == again
    del small


def test_resident_peaks_without_a_moment_are_that_of_all_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "resident_peak_nbytes", lambda: 7)
    monkeypatch.setattr(meter, "reset_resident_peak", lambda: False)
    peaks = meter.ResidentPeaks()
    peaks.separate()
    peaks.end()
    assert (peaks.before, peaks.after) == (None, 7)

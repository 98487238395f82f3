"""The programs of bench/gpu on the fake accelerator: that they run, survive a full memory, and go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import __main__ as command
from bench.gpu import device, filling, steps
from bench.gpu.networks import NETWORKS, Training
from bench.gpu.ways import PLANS, WAYS, Way, budgeted
from tests.device import fake

LITTLE = 32 << 20
"""Bytes of a memory that the small networks can fill."""


def _run(program: str, folder: Path, *only: str, options: tuple[str, ...] = (), expected: int = 0) -> dict[str, Any]:
    """Runs some parts of a program and returns what the file then has."""
    file = folder / f"{program}.json"
    arguments = [program, "--device", "fake", "--small", "--rounds", "1", "--json", str(file), *options]
    for text in only:
        arguments += ["--only", text]
    assert command.main(arguments) == expected
    assert (folder / f"{program}.txt").read_text().startswith(f"{program}: fake")
    parts: dict[str, Any] = json.loads(file.read_text())["parts"]
    return parts


def test_g1_tells_what_the_host_does(tmp_path: Path) -> None:
    parts = _run("g1", tmp_path, "unet/counts/plain", "unet/counts/save_on_cpu", "unet/host", "calls", "link")
    (plain, _), (moved, _) = (parts[f"unet/counts/{of}"]["result"] for of in ("plain", "save_on_cpu"))
    assert plain["waits"] == 0 < moved["waits"] and plain["launches"] < moved["launches"]
    assert parts["unet/host"]["result"]["save_on_cpu"]["seconds"]["count"] == 1
    assert parts["calls"]["result"] and parts["link"]["result"]["1 MiB"]


def test_g2_compares_and_times_steps(tmp_path: Path) -> None:
    ways = ("plain", "plain again", "checkpoint", "lossless", "plan, 50%", "times")
    parts = _run("g2", tmp_path, *(f"unet/steps/{way}" for way in ways))
    rows = {way: parts[f"unet/steps/{way}"]["result"] for way in ways}
    assert not any(rows[way]["differing"] for way in ways[:-1])
    assert rows["plan, 50%"]["peak_nbytes"] < rows["lossless"]["peak_nbytes"] < rows["plain"]["peak_nbytes"]
    assert set(rows["times"]) == set(ways[:-1])


@pytest.mark.parametrize("way", ["lossless", pytest.param("budget of the memory", marks=pytest.mark.slow)])
def test_g2_fills_the_memory(tmp_path: Path, way: str) -> None:
    ways = ("plain", way)
    options = ("--memory", str(LITTLE / 2**30))
    parts = _run("g2", tmp_path, *(f"unet/filling/{part}" for part in (*ways, "throughput")), options=options)
    plain, own = (parts[f"unet/filling/{each}"]["result"] for each in ways)
    assert plain["failed"] > plain["size"], "a size was tried that does not fit"
    assert plain["size"] < own["size"]
    assert all(0.7 * LITTLE < row["peak_nbytes"] < LITTLE for row in (plain, own))
    assert set(parts["unet/filling/throughput"]["result"]) == set(ways)


def test_a_size_that_does_not_fit_after_all_is_lowered() -> None:
    training = Training(NETWORKS["unet"], device.find("fake"), small=True)
    plain = Way(training)
    plain.step()
    training.resize(8)
    peak = training.device.peaks(plain.step)
    with training.device.limited(torch.accelerator.memory_allocated() + peak):
        found = filling.throughput(training, {"plain": (8, plain), "more": (16, Way(training))}, rounds=2)
    assert found["plain"].size == 8 and not found["plain"].lowered
    assert found["more"].size <= 8 and found["more"].lowered > 0


def test_g3_finds_the_formulas_with_the_bits_of_the_kernels(tmp_path: Path) -> None:
    parts = _run("g3", tmp_path, "bits", "repeats", "speed/bfloat16")
    for norm in ("batch norm/float32/contiguous", "group norm/float32/contiguous", "layer norm/float32"):
        differing = parts[f"bits/{norm}"]["result"]["differing"]
        others = [count for formula, count in differing.items() if formula != "again"]
        assert differing["again"] == 0 and min(others) == 0 < max(others)
    assert parts["repeats/float32"]["result"] and "zvc_encode" in parts["speed/bfloat16"]["result"]


def test_g4_captures_steps_with_sessions_inside(tmp_path: Path) -> None:
    exact = ("plain", "checkpoint", "lossless", "offload")
    parts = _run("g4", tmp_path, *(f"gpt2/{way}" for way in (*exact, "quantized, 4 bits", "times")))
    assert not any(parts[f"gpt2/{way}"]["result"]["differing"] for way in exact)
    assert {"plain, eager", "quantized, 4 bits", *exact} == set(parts["gpt2/times"]["result"])


def test_g5_moves_so_many_bytes(tmp_path: Path) -> None:
    ways = ("plain", "0.25 GiB", "1.0 GiB")
    parts = _run("g5", tmp_path, "copy/0.25 GiB", *(f"gpt2/{way}" for way in ways), "gpt2/times")
    peaks = [parts[f"gpt2/{way}"]["result"]["peak_nbytes"] for way in ways]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3
    assert not any(parts[f"gpt2/{way}"]["result"]["differing"] for way in ways)
    assert parts["copy/0.25 GiB"]["result"]["hidden"]["count"] == 1


@pytest.mark.slow
def test_g6_compiles(tmp_path: Path) -> None:
    ways = ("plain", "lossless", "lossless, budget 60%")
    parts = _run("g6", tmp_path, *(f"gpt2/steps/{way}" for way in (*ways, "times")))
    rows = {way: parts[f"gpt2/steps/{way}"]["result"] for way in ways}
    assert not any(row["differing"] for row in rows.values())
    assert rows["lossless, budget 60%"]["peak_nbytes"] < rows["plain"]["peak_nbytes"]


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = _run("g1", tmp_path, "calls", "link", options=("--seconds", "0"))
    assert late == {} and "no time was left for 2 parts" in capsys.readouterr().out
    file = tmp_path / "g1.json"
    found = json.loads(file.read_text())
    summary = {"median": 1.0, "q1": 1.0, "q3": 1.0, "low": 1.0, "count": 7}
    found["parts"] = {"calls": {"result": {"of another time": summary}}, "link": {"attempts": 2}}
    file.write_text(json.dumps(found))
    with pytest.raises(SystemExit, match="was to be resumed"):
        _run("g1", tmp_path, "calls", options=("--resume",))
    assert command.main([*found["command"][3:], "--resume"]) == 1
    parts = json.loads(file.read_text())["parts"]
    assert parts["calls"]["result"] == {"of another time": summary}
    assert parts["link"]["error"] == "the process ended in this part"


def test_a_lost_device_ends_the_process_before_other_parts_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr("bench.gpu.g1._calls", lost)
    monkeypatch.setattr(device.Device, "wait", lost)
    with pytest.raises(SystemExit, match="--resume goes on"):
        _run("g1", tmp_path, "calls", "link")
    parts = json.loads((tmp_path / "g1.json").read_text())["parts"]
    assert list(parts) == ["calls"] and "illegal memory access" in parts["calls"]["error"]


@pytest.mark.parametrize("way", ["checkpoint", "save_on_cpu"])
def test_torchs_own_ways_have_the_bits_of_plain(way: str) -> None:
    """With dropout: a checkpoint has to find the device's generator."""
    training = Training(NETWORKS["gpt2"], device.find("fake"), small=True)
    expected = steps.gradients(Way(training))
    assert not steps.differing(steps.gradients(WAYS[way](training)), expected)


@pytest.mark.parametrize("way", ["lossless", "plan, 70%", "budget of the memory"])
def test_ways_are_made_with_the_usual_limits_too(way: str) -> None:
    training = Training(NETWORKS["unet"], device.find("fake"), small=True)
    training.min_nbytes = None
    expected = steps.gradients(Way(training))
    make = {**WAYS, **PLANS, "budget of the memory": lambda training: budgeted(training, 1 << 30)}[way]
    assert not steps.differing(steps.gradients(make(training)), expected)


def test_an_error_for_want_of_memory_leaves_nothing_behind() -> None:
    training = Training(NETWORKS["unet"], device.find("fake"), small=True)
    way = Way(training)
    way.step()
    training.device.clean()
    before = torch.accelerator.memory_allocated()
    with fake.limited(before + (1 << 16)):
        assert not device.survives(way.step)
    training.device.clean()
    assert torch.accelerator.memory_allocated() == before
    assert device.survives(way.step)

"""The benchmark harness runs, its JSON is complete, and its gate catches a wrong gradient."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from backstash import Encoded, Keep, Need, Stash
from backstash.codecs import Zvc
from backstash.codecs.base import EXACT, ErrorBound
from backstash.policies.base import Action, Outcome
from backstash.saved import SavedTensor, TensorSpec
from bench import cases, codec_table, rounds, run, step_table
from bench.peers import Absent, Plain, Stashing, codec_peers


def only_rounds(count: int) -> step_table.Plan:
    return step_table.Plan(rounds.Effort(count), resident=False, quick=True)


# ---- the whole of it -----------------------------------------------------------------------------


@pytest.mark.slow
def test_quick_run_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--quick", "--seconds", "20", "--out", str(tmp_path)]) == 0
    (file,) = tmp_path.iterdir()
    result = json.loads(file.read_text())
    assert file.name == f"bench-cpu-{result['started'][:10]}-quick.json"
    assert result["complete"] and result["format"] == run.FORMAT and result["seconds"] > 0
    assert result["command"][:3] == ["python", "-m", "bench.run"] and "--quick" in result["command"]
    for key in ("cpu", "cores", "threads", "packages", "kernels", "load", "commit"):
        assert key in result["machine"]
    printed = capsys.readouterr().out
    assert all(f"== {section} ==" in printed for section in run.SECTIONS)
    check_ratios(result["ratios"])
    check_codecs(result["codecs"])
    for case in result["steps"]:
        check_case(case)
        stashed, base = case["candidates"][-1], case["candidates"][0]
        if result["machine"]["kernels"] == "native":  # the reference's temporaries are larger than what it saves
            assert stashed["peak_nbytes"] < base["peak_nbytes"]


def check_ratios(rows: list[dict[str, Any]]) -> None:
    assert {row["state"] for row in rows} == {"initial", "trained"}
    for row in rows:
        assert row["ratio"] == pytest.approx(row["saved_nbytes"] / row["stash_nbytes"])
        assert row["ratio"] > 1
        assert (row["training"] is None) == (row["state"] == "initial")
        assert row["training"] is None or row["training"]["steps"] >= 1


def check_codecs(table: dict[str, Any]) -> None:
    assert table["missing"] == []
    names = {row["codec"] for row in table["rows"]}
    assert {"copy", "zvc", "bitmask", "narrow", "binary"} <= names
    for row in table["rows"]:
        assert row["exact"], (row["key"], row["codec"])
        assert row["ratio"] == pytest.approx(row["nbytes"] / row["encoded_nbytes"])
        assert len(row["encode_seconds"]) == len(row["decode_seconds"]) == row["decode_gb_per_second"]["count"] >= 1
    by_codec = {(row["key"], row["codec"]): row["ratio"] for row in table["rows"]}
    assert by_codec["features.3/Relu#0:result", "bitmask"] == 32
    assert by_codec["features.4/MaxPool2DWithIndices#0:result1", "narrow"] == 32


def check_case(case: dict[str, Any]) -> None:
    assert case["status"] == "measured", case["reason"]
    candidates = {one["name"]: one for one in case["candidates"]}
    assert list(candidates) == ["plain", "checkpoint", "lossless"]
    for one in candidates.values():
        assert one["gate"]["equal"] and one["gate"]["unstable"] == []
        assert len(one["rounds"]) == case["rounds"] == one["seconds"]["count"] >= 1
        assert one["resident"] is not None or one["resident_note"]
        assert one["peak_nbytes"] > one["stash_nbytes"] > 0
        assert all(0 < time["forward_seconds"] < time["seconds"] for time in one["rounds"])
    base, stashed = candidates["plain"], candidates["lossless"]
    assert base["times_plain"]["median"] == base["times_plain_of_medians"] == 1
    assert base["saved_nbytes"] == base["stash_nbytes"] == stashed["saved_nbytes"] > stashed["stash_nbytes"]
    assert {total["codec"] for total in stashed["by_codec"]} >= {"zvc"}


@pytest.mark.slow
def test_one_case_with_a_number_of_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--case", "vgg_small", "--rounds", "2", "--candidates", "lossless", "--skip-resident"]
    assert run.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "2 rounds" in printed and "checkpoint  " not in printed and "no resident peak: not asked for" in printed
    assert run.main([*arguments, "--out", str(tmp_path)]) == 0
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("step-vgg_small-cpu-")
    (case,) = json.loads(file.read_text())["steps"]
    assert [one["name"] for one in case["candidates"]] == ["plain", "lossless"] and case["rounds"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "vgg17"], "the case 'vgg17' was asked for; there is no such case; use one of"),
        (["--only", "ratios,speed"], "the section 'speed' was asked for; there is no such section; use some of"),
        (["--candidates", "magic"], "the candidate 'magic' was asked for"),
        (["--rounds", "0"], "at least 1"),
    ],
)
def test_wrong_arguments_are_explained(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main(arguments)
    assert message in capsys.readouterr().err


def test_cases_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run.main(["--case", "list"])
    assert "vgg16-channels_last: vgg16, batch 8, 224x224, channels_last" in capsys.readouterr().out


# ---- the gate ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damaging:
    """A codec that says it is exact and flips a bit of every number but zero, whose signs and zeros stay as they are.

    So a relu's backward reads what it should, on every machine, and only the convolution's weight gradient is wrong.
    """

    id: ClassVar[str] = "damaging"
    preserves: ClassVar[frozenset[Need]] = EXACT
    bound: ClassVar[ErrorBound | None] = None

    def accepts(self, spec: TensorSpec) -> str | None:
        return Zvc().accepts(spec)

    def declines(self, x: Tensor) -> str | None:
        return None

    def encode(self, x: Tensor) -> Encoded:
        return Zvc().encode(x)

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        out = Zvc().decode(encoded, out)
        bits = out.as_strided((out.numel(),), (1,)).view(torch.int32)
        bits ^= (out.as_strided((out.numel(),), (1,)) != 0).int() << 20  # of the mantissa
        return out

    def nbytes_bound(self, spec: TensorSpec) -> int:
        return Zvc().nbytes_bound(spec)


@dataclass(frozen=True)
class DamageOneLayer:
    """A policy that damages the stored input of one convolution."""

    def decide(self, saved: SavedTensor) -> Action:
        return Stash(Damaging()) if saved.key == "features.7/Convolution#0:input" else Keep()

    def observe(self, outcome: Outcome) -> None:
        pass


def test_the_gate_catches_a_wrong_gradient() -> None:
    case = cases.find("vgg_small", "cpu", quick=True)
    result = step_table.measure(case, "cpu", only_rounds(1), (Plain(), Stashing(DamageOneLayer())))
    assert result.status == "failed" and result.candidates == ()
    assert "damageonelayer was to compute the loss and gradients of vgg_small" in result.reason
    assert "1 of 19 differ (features.7.weight); nothing was timed" in result.reason
    assert "FAILED" in step_table.show(result)


def test_a_candidate_that_need_not_be_exact_is_measured_and_marked() -> None:
    case = cases.find("vgg_small", "cpu", quick=True)
    result = step_table.measure(case, "cpu", only_rounds(1), (Plain(), Stashing(DamageOneLayer(), exact=False)))
    assert result.status == "measured" and result.candidates[1].gate.differing == ("features.7.weight",)
    assert "1 DIFFER" in step_table.show(result)


def test_a_failed_gate_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_candidates", lambda asked: (Plain(), Stashing(DamageOneLayer())))
    assert run.main(["--quick", "--case", "vgg_small", "--rounds", "1"]) == 1


def test_what_plain_pytorch_computes_differently_each_time_is_not_compared() -> None:
    workload = cases.build(cases.find("vgg_small", "cpu", quick=True), "cpu")
    ticks = count()
    next(workload.model.parameters()).register_hook(lambda gradient: gradient + next(ticks))
    peers = {"plain": Plain(), "again": Plain()}
    checks = step_table.check(workload, peers, {name: peer.start(workload) for name, peer in peers.items()})
    assert checks["again"].gate == step_table.Gate(True, (), ("features.0.weight",))


def test_same_bits() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert step_table.same_bits(nan, nan.clone())
    assert not step_table.same_bits(zero, -zero)
    assert not step_table.same_bits(zero, zero.double())
    assert not step_table.same_bits(zero, torch.zeros(2))


# ---- peers and cases -----------------------------------------------------------------------------


@pytest.mark.parametrize(("package", "name"), [("blosc2", "blosc2"), ("numcodecs", "numcodecs zlib")])
def test_an_absent_peer_is_named(package: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert Absent(name, "not installed") in codec_peers("cpu")
    table = codec_table.measure(codec_table.QUICK, "cpu", rounds.Deadline.after(0), rounds=1)
    assert Absent(name, "not installed") in table.absent
    assert not any(row.codec.startswith(name) for row in table.rows)
    assert f"{name}: not installed" in codec_table.show(table)


def test_peers_that_only_run_on_cpu_are_named_on_cuda() -> None:
    assert [peer.reason for peer in codec_peers("cuda") if isinstance(peer, Absent)] == ["compresses on CPU only"] * 2


def test_an_absent_package_skips_its_case() -> None:
    case = cases.Case("one", "gpt2", 1, 8, needs="no_such_package")
    result = step_table.measure(case, "cpu", only_rounds(1))
    assert (result.status, result.reason) == ("skipped", "no_such_package is not installed")
    assert "SKIPPED: no_such_package is not installed" in step_table.show(result)


def test_images_are_noise_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object, **keywords: object) -> None:
        raise ModuleNotFoundError("scikit-learn")

    monkeypatch.setattr(cases.datasets, "load", missing)
    data, images, labels = cases.image_batch(3, 17)
    assert data == "noise 17x17" and images.shape == (3, 3, 17, 17) and labels.shape == (3,)


@pytest.mark.parametrize("name", ["vgg16", "alexnet", "resnet50", "resnet18"])
def test_segments_are_the_whole_network_and_do_not_begin_in_place(name: str) -> None:
    with torch.device("meta"):
        model = cases.networks.build(name)
    parts = cases.segments(model)
    inside = [layer for module, _ in parts for layer in leaves(module)]
    assert [id(layer) for layer in inside] == [id(layer) for layer in leaves(model)]
    recomputed = [module for module, again in parts if again]
    assert len(recomputed) >= 3
    assert not any(isinstance(next(iter(leaves(module))), nn.ReLU) for module in recomputed)


def leaves(module: nn.Module) -> list[nn.Module]:
    return [layer for layer in module.modules() if not list(layer.children())]


# ---- rounds --------------------------------------------------------------------------------------


def test_rounds_take_turns() -> None:
    seen: list[str] = []

    def task(name: str) -> Callable[[], str]:
        return lambda: seen.append(name) or name  # type: ignore[func-returns-value]

    results = rounds.interleave({name: task(name) for name in "abc"}, rounds.Effort(4))
    assert "".join(seen) == "abcbcacabcba"
    assert results == {name: [name] * 4 for name in "abc"}


def test_rounds_end_at_the_deadline_but_one_always_runs() -> None:
    effort = rounds.Effort(50, rounds.Deadline.after(-1))
    assert rounds.interleave({"a": lambda: 1}, effort) == {"a": [1]}


def test_summary() -> None:
    assert rounds.summarise([4.0, 1.0, 2.0, 3.0, 5.0]) == rounds.Summary(3.0, 2.0, 4.0, 1.0, 5)
    assert rounds.summarise([2.0]) == rounds.Summary(2.0, 2.0, 2.0, 2.0, 1)
    assert rounds.spread(rounds.Summary(0.1, 0.05, 0.2, 0.01, 9), 1e3, 0) == "100 [50 200]"

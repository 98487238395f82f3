"""The judgement of other libraries' models finds what differs, survives what crashes, and goes on where it was."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from studies import zoo, zoo_models
from studies.unseen import Program
from studies.zoo_models import LIBRARIES, Entry

SESSION = bs.Session
ENTRY = Entry("", (4, 8), compiled="aot_eager")
MADE = itertools.count(1)


class StandIn(nn.Sequential):
    """With a forward function that torch compiles, other than that of its own class."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)  # type: ignore[no-any-return]


def program(library: str, name: str) -> Program:
    """A stand-in for a model of a library."""
    if name == "crashes":
        os._exit(3)
    if name == "raises":
        raise ValueError("no such size")
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.GELU()]
    model, x = StandIn(*layers), torch.randn(256, 64)
    scale = 1 + next(MADE) / 1024 if name == "varies" else 1.0  # each program's own, and small: none comes to be NaN
    return Program(model.train(), lambda: (model(x) * scale).square().mean().backward())


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("works", "varies", "crashes", "raises")
    monkeypatch.setattr(zoo, "build", program)
    monkeypatch.setattr(zoo, "LIBRARIES", {"json": dict.fromkeys(names, ENTRY)})  # a module that is always there


@pytest.mark.slow
def test_a_model_is_judged_by_all_checks() -> None:
    judged = zoo.judge("json", "works")
    assert judged.flaws == [] and judged.unstable == ()
    assert set(judged.differing or {}) == {"lossless", "lossless, min_nbytes=0", "compiled", "compiled, budget"}
    assert (judged.compiled, judged.treated > 0) == ("aot_eager", True)
    assert [row.budget for row in judged.rows][-1] == "smallest"
    assert all(row.reached_nbytes <= row.budget_nbytes for row in judged.rows if row.reached_nbytes)
    assert not judged.lacks(zoo.CHECKS)


def test_other_bits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lossy = bs.policies.quantized(2)
    monkeypatch.setattr(bs, "Session", lambda policy, **kwargs: SESSION(lossy, **kwargs))
    judged = zoo.judge("json", "works", ("sessions",))
    assert "2.weight.grad#0" not in (judged.differing or {})["lossless, min_nbytes=0"]  # a relu has no weight
    assert any(name.startswith("0.weight") for name in (judged.differing or {})["lossless, min_nbytes=0"])
    assert any(flaw.startswith("lossless, min_nbytes=0: ") for flaw in judged.flaws)


def test_what_plain_pytorch_computes_differently_is_left_out() -> None:
    judged = zoo.judge("json", "varies", ("sessions",))
    assert judged.unstable and judged.flaws == []


def test_a_run_goes_on_where_it_was_and_names_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "zoo.json"
    arguments = ["--library", "json", "--check", "sessions", "--json", str(file)]
    assert zoo_main([*arguments, "--only", "works"]) == 0
    assert zoo_main([*arguments, "--resume"]) == 1
    found = {model["model"]: model for model in json.loads(file.read_text())["models"]}
    assert set(found) == {"works", "varies", "crashes", "raises"}
    assert "exit code 3" in found["crashes"]["error"] and "ValueError: no such size" in found["raises"]["error"]
    assert found["works"]["error"] == "" and "4 models, 2 with flaws" in capsys.readouterr().out


def zoo_main(arguments: list[str]) -> int:
    """The program, whose number of threads does not outlast it."""
    threads = torch.get_num_threads()
    try:
        return zoo.main(arguments)
    finally:
        torch.set_num_threads(threads)


def test_what_other_checks_have_found_is_kept() -> None:
    earlier = zoo.Judged(
        "json", "works", lossless_nbytes=5, differing={"lossless": ()}, compiled="aot_eager", seconds=1
    )
    now = zoo.Judged("json", "works", differing={"compiled": ("a",)}, seconds=2).with_earlier(earlier)
    assert (now.lossless_nbytes, now.seconds, now.differing) == (5, 3, {"lossless": (), "compiled": ("a",)})
    failed = zoo.Judged("json", "works", error="RuntimeError: no")
    assert failed.with_earlier(earlier) is failed and failed.flaws == ["RuntimeError: no"]


def test_a_library_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "LIBRARIES", {"no_such_library": {"model": ENTRY}})
    assert zoo_main([]) == 0


@pytest.mark.parametrize("library", sorted(LIBRARIES))
def test_every_entry_is_well_formed(library: str) -> None:
    entries = zoo_models.LIBRARIES[library]
    assert len(entries) > 40
    for entry in entries.values():
        assert entry.compiled in ("", "aot_eager", "inductor") and entry.task in ("classes", "boxes", "flow")
        assert entry.shape[1] == 3 or library == "transformers"


@pytest.mark.parametrize("name", ["gpt2", "marian", "clip"])
def test_an_architecture_is_made_small_and_the_same_each_time(name: str) -> None:
    pytest.importorskip("transformers")
    programs = [zoo_models.build("transformers", name) for _ in range(2)]
    found = []
    for program in programs:
        torch.manual_seed(0)
        program.step()
        gradients = {key: p.grad for key, p in program.model.named_parameters() if p.grad is not None}
        assert sum(p.numel() for p in program.model.parameters()) < 20_000_000 and gradients
        found.append(gradients)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_what_torch_cannot_compile_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "LIBRARIES", {"json": {"works": Entry("", (4, 8), compiled="no_such_backend")}})
    judged = zoo.judge("json", "works", ("compiled",))
    assert judged.compiled == "no_such_backend: InvalidBackend" and judged.flaws == []
    assert not judged.lacks(("compiled",))

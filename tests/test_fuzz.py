"""The fuzzer is deterministic, reads back the text of its programs, finds a planted defect and minimises it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from backstash import Policy
from backstash.capture import learned, worth
from backstash.codecs import Encoded
from backstash.policies.base import Action, Keep, Outcome, Stash
from backstash.replay import replaying
from backstash.saved import Need, SavedTensor
from tests.fuzz.__main__ import main
from tests.fuzz.execute import FAILURES, check
from tests.fuzz.generate import SHARE_CHANGING, generate
from tests.fuzz.kinds import COMMON, FEATURES, KINDS
from tests.fuzz.minimise import minimise
from tests.fuzz.program import Statement, parse, to_text
from tests.fuzz.render import program_code, standalone
from tests.gradients.gradient_checks import AlwaysZvc

SEEDS = range(200)


@dataclass(frozen=True)
class _Damaged(AlwaysZvc):
    """A codec that damages the first element."""

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        decoded = super().decode(encoded, out)
        if decoded.is_floating_point() and decoded.numel() > 1:
            decoded.view(-1)[0] += 1
        return decoded


@dataclass(frozen=True)
class _DamagesTanh:
    """A policy that damages the tensor that tanh saves, and keeps all other tensors."""

    recomputes: ClassVar[bool] = False

    def decide(self, saved: SavedTensor) -> Action:
        return Stash(_Damaged()) if saved.op == "Tanh" and saved.need is Need.VALUE else Keep()

    def observe(self, outcome: Outcome) -> None:
        pass


@dataclass(frozen=True)
class _KeepsAll:
    recomputes: ClassVar[bool] = False

    def decide(self, saved: SavedTensor) -> Action:
        return Keep()

    def observe(self, outcome: Outcome) -> None:
        pass


DAMAGES_TANH: Policy = _DamagesTanh()

PLANTED = """\
settings(seed=1, steps=2, optimizer="momentum", sessions="each", inside=True)
with setup():
    forward_hook(layer="linear")
with forward():
    v0 = leaf()
    v1 = data()
    v2 = apply_linear(v0, layer="linear")
    with anomaly():
        v3 = abs(v2)
        v4 = tanh(v3)
    halve_(v3)
    v5 = multiply(v4, v1)
    hold_copy(v5)
    drop(v3, v4)
    loss0 = loss(v2, v5)
    drop(v0, v1, v2, v5)
with backward():
    backward(loss0, retain=False)
"""


def test_a_seed_stands_for_one_program() -> None:
    for seed in SEEDS:
        assert generate(seed) == generate(seed)
    assert len({generate(seed) for seed in SEEDS}) == len(SEEDS)


def test_text_is_read_back() -> None:
    for seed in SEEDS:
        program = generate(seed)
        assert parse(to_text(program)) == program


def test_programs_that_change_repeat_some_of_their_steps() -> None:
    for seed in SEEDS:
        program = generate(seed, changing=True)
        assert program.steps == len(program.pattern) >= 4
        assert 1 < len(set(program.pattern)) < program.steps
        assert any(KINDS[statement.kind].feature == "changing" for statement in program.statements())


def test_programs_change_only_if_they_are_asked_to() -> None:
    for seed in SEEDS:
        program = generate(seed, changing=False)
        assert (program.pattern, program.twice, program.before) == ("A", "", ())
        assert not any(KINDS[statement.kind].feature == "changing" for statement in program.statements())
    drawn = sum(generate(seed).pattern != "A" for seed in SEEDS) / len(SEEDS)
    assert SHARE_CHANGING / 2 < drawn < 2 * SHARE_CHANGING


def test_text_that_is_no_program_is_refused() -> None:
    with pytest.raises(ValueError, match="line 1"):
        parse("x = 1")
    with pytest.raises(ValueError, match="line 2"):
        parse("with forward():\n    x = 1 + 1")


def test_programs_and_standalone_files_are_valid_python() -> None:
    for seed in SEEDS:
        program = generate(seed)
        compile(program_code(program), "program", "exec")
    for kind in FAILURES:
        compile(standalone(generate(1), "summary", kind), "standalone", "exec")


@pytest.mark.slow
def test_every_kind_is_generated() -> None:
    programs = (generate(seed, changing=seed % 2 == 0) for seed in range(1500))
    assert {statement.kind for program in programs for statement in program.statements()} == set(KINDS)


def test_passes_are_replayed_where_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for owner, name in ((learned, "EQUAL_PASSES"), (replaying, "PERIOD"), (worth.Worth, "is_open")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # and put back
    given = ["--replay", "--programs", "12", "--seed", "4", "--policy", "lossless", "--failures", str(tmp_path)]
    assert main(given) == 0
    assert "12 programs" in capsys.readouterr().out


def test_features_can_be_chosen_and_switched_off() -> None:
    for seed in SEEDS:
        program = generate(seed, features=["autocast", "hooks"], off=["hooks", "binary"])
        features = {KINDS[statement.kind].feature for statement in program.statements()}
        assert features <= {"base", "autocast", *COMMON} - {"binary"}


def test_every_feature_has_a_kind() -> None:
    assert {kind.feature for kind in KINDS.values()} - {"base"} == set(FEATURES)


def test_a_planted_defect_is_found_and_made_small() -> None:
    program = parse(PLANTED)
    assert check(program, _KeepsAll()).failure is None
    failure = check(program, DAMAGES_TANH).failure
    assert failure is not None and failure.kind == "values differ"
    smallest = minimise(program, lambda smaller: failure.resembles(check(smaller, DAMAGES_TANH).failure))
    assert smallest.steps == 1
    assert smallest.setup == ()
    kinds = [statement.kind for statement in smallest.forward]
    assert "tanh" in kinds and len(kinds) <= 5, kinds
    assert smallest.backward == (Statement("backward", "", ("loss0",), (("retain", False),)),)


def test_exit_status_and_saved_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, failures = tmp_path / "program.txt", tmp_path / "failures"
    text.write_text(PLANTED)
    arguments = ["--program", str(text), "--failures", str(failures), "--minimise-minutes", "0"]
    assert main(arguments, _KeepsAll()) == 0
    assert not list(failures.iterdir())
    assert main(arguments, DAMAGES_TANH) == 1
    assert sorted(path.suffix for path in failures.iterdir()) == [".py", ".txt"]
    assert "1 x values differ" in capsys.readouterr().out


def test_a_program_that_is_not_deterministic_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    program = parse("settings()\nwith forward():\n    v0 = leaf()\n    loss0 = loss(v0)\n    numbers(v0)\n")
    numbers = iter(range(100))
    kind = type(KINDS["hold"])("numbers", "held", "kept.append(next(NUMBERS) + 0 * len({a}))")
    monkeypatch.setitem(KINDS, "numbers", kind)
    monkeypatch.setattr("tests.fuzz.pieces.NUMBERS", numbers, raising=False)
    assert check(program).skipped


@pytest.mark.slow
def test_a_standalone_file_shows_the_failure(tmp_path: Path) -> None:
    """The file runs without the fuzzer, and ends without an error if nothing fails."""
    program = parse(PLANTED)
    file = tmp_path / "standalone.py"
    file.write_text(standalone(program, "nothing is wrong", "values differ"))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no error" in done.stdout


def test_leftover_tensors_of_plain_torch_do_not_matter() -> None:
    """A gradient with a graph of its own (create_graph) and its parameter hold each other until it is cleared."""
    program = parse(
        "settings()\nwith forward():\n    v0 = leaf()\n    v1 = sin(v0)\n    loss0 = loss_squares(v1)\n"
        "with backward():\n    backward_create_graph(loss0, retain=True)\n"
    )
    assert check(program, _KeepsAll()).failure is None
    assert torch.is_grad_enabled()

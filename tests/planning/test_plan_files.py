"""Plans in a folder are a cache: whatever becomes of its files, training goes on (Note: [plans in a folder])."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_plan import PLANNER
from torch import Tensor, nn

from backstash import proofs
from backstash.planning.model.plan import Plan
from backstash.planning.run import buckets, plan_files
from backstash.planning.run.budgeted import Budgeted
from backstash.planning.run.plan_files import ABANDONED, PlanFiles
from backstash.testing import equal_bits

PLAN = PLANNER.plan("50%")
AS_ROOT = getattr(os, "geteuid", lambda: 1)() == 0

Damage = Callable[[Path], object]


def trained(folder: Path | None, damage: Damage = lambda folder: None) -> tuple[list[Tensor], Budgeted]:
    """The gradients of 8 steps, and what kept their budget. The folder is damaged after the first forward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))
    session, x = Budgeted("60%", min_nbytes=256, folder=folder), torch.randn(256, 64)
    for step in range(8):
        with session:
            loss = model(x).square().mean()
        if step == 0 and folder is not None:
            damage(folder)
        loss.backward()
    session.close()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], session


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def put(content: bytes) -> Damage:
    def damage(folder: Path) -> None:
        for file in files_of(folder):
            file.write_bytes(content)

    return damage


def cut(folder: Path) -> None:
    for file in files_of(folder):
        file.write_bytes(file.read_bytes()[:100])


def edit(folder: Path) -> None:
    for file in files_of(folder):
        file.write_text(file.read_text().replace('"budget"', '"budgets"'))


def as_a_folder(folder: Path) -> None:
    for file in files_of(folder):
        file.unlink()
        file.mkdir()


def as_a_pipe(folder: Path) -> None:
    for file in files_of(folder):
        file.unlink()
        os.mkfifo(file)


def vanish(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def into_a_file(folder: Path) -> None:
    vanish(folder)
    folder.write_bytes(b"")


def forbid(folder: Path) -> None:
    for file in files_of(folder):
        file.chmod(0)


def forbid_all(folder: Path) -> None:
    folder.chmod(0)


UNREADABLE: list[Any] = [
    cut,
    edit,
    put(b""),
    put(b"\x00" * 4096),
    put(b"\xff\xfe\x00\xd8 no text"),
    put("{}".encode("utf-16")),
    put(b"[" * 5000),
    put(b'{"backstash": "Plan", "version": 3, "content": ' + b'{"a":' * 5000),
    put(b"1" * 10_000),
    as_a_folder,
    pytest.param(as_a_pipe, marks=pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")),
    pytest.param(forbid, marks=pytest.mark.skipif(AS_ROOT, reason="root may read everything")),
]


@pytest.mark.parametrize("damage", UNREADABLE)
def test_a_plan_that_cannot_be_read_is_warned_of_once_and_made_anew(damage: Damage, tmp_path: Path) -> None:
    expected, _ = trained(tmp_path)
    (file,) = files_of(tmp_path)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found, session = trained(tmp_path, damage)
    told = [str(each.message) for each in warned if "cannot be read" in str(each.message)]
    assert len(told) == 1 and str(file) in told[0] and "planned anew" in told[0]
    assert all(map(equal_bits, found, expected)) and session.found.plans
    if damage is not as_a_folder:  # which cannot be replaced
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert Plan.from_json(file.read_text()) == session.found.plan
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    "damage",
    [vanish, into_a_file, pytest.param(forbid_all, marks=pytest.mark.skipif(AS_ROOT, reason="root may do everything"))],
)
def test_a_folder_that_cannot_be_written_to_is_warned_of_once(damage: Damage, tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    folder.mkdir()
    expected, _ = trained(None)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found, session = trained(folder, damage)
    told = [str(each.message) for each in warned if "cannot be written" in str(each.message)]
    assert len(told) == 1 and str(folder) in told[0] and "Training goes on" in told[0]
    assert all(map(equal_bits, found, expected)) and session.found.plans


@pytest.mark.parametrize("other", ["environment", "threads"])
def test_a_plan_of_another_machine_is_not_used(other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path)
    _, again = trained(tmp_path)
    assert again.found.plans == 1 and again.found.measured_passes < 5  # what the folder has, and nothing is profiled
    if other == "environment":
        monkeypatch.setattr(buckets, "environment", lambda: "another processor")
    else:
        monkeypatch.setattr(buckets.torch, "get_num_threads", lambda: 97)
    trained(tmp_path)
    assert len(files_of(tmp_path)) == 2


def test_a_full_disk_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = PlanFiles(tmp_path)
    files.write("a", PLAN)
    before = (tmp_path / "a.json").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plan_files.os, "fsync", full)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        files.write("a", PLANNER.plan("40%"))
        files.write("b", PLAN)
    assert "No space left on device" in str(warned[0].message)
    assert len(warned) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"] and (tmp_path / "a.json").read_bytes() == before


def test_an_interrupt_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_files.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        PlanFiles(tmp_path).write("a", PLAN)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_behind_is_removed_later(tmp_path: Path) -> None:
    old, new = tmp_path / "a.1.part", tmp_path / "b.2.part"
    for part in (old, new):
        part.write_text("{")
    os.utime(old, (1.0, 1.0))
    PlanFiles(tmp_path).write("a", PLAN)
    assert not old.exists() and new.exists() and ABANDONED > 0


def test_the_folder_stays_the_same_where_the_program_changes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plans").mkdir()
    monkeypatch.chdir(tmp_path)
    files = PlanFiles("plans")
    monkeypatch.chdir("plans")
    files.write("a", PLAN)
    assert (tmp_path / "plans/a.json").is_file() and files.read("a") == PLAN


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_processes_share_a_folder(tmp_path: Path) -> None:
    shared, errors = PlanFiles(tmp_path), []
    children = []
    for _ in range(6):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    for _ in range(20):
                        shared.write("a", PLAN)
                        code = 0 if shared.read("a") == PLAN else 2
                        if code:
                            break
            except BaseException:
                code = 3
            os._exit(code)
        children.append(child)
    errors = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert errors == [0] * 6
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"] and shared.read("a") == PLAN


def test_threads_share_a_folder(tmp_path: Path) -> None:
    shared, found = PlanFiles(tmp_path), []

    def work() -> None:
        for _ in range(20):
            shared.write("a", PLAN)
            found.append(shared.read("a"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [PLAN] * 80
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_kernels_that_cannot_be_read_fit_to_no_proof_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable() -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(proofs, "_kernels_and_processor", unreadable)
    assert proofs.environment.__wrapped__() != proofs.environment.__wrapped__()
    assert Plan.from_json(PLAN.to_json()) == PLAN

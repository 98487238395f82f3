"""The benchmark of host time runs on small programs, and its profile counts each function in one room."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import backstash
from backstash import Session
from bench import hostcost, stages


def test_one_round_of_a_case_and_of_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(hostcost, "EVENTS", 3)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), torch.randn(64, 64)
    monkeypatch.setitem(hostcost.CASES, "tiny", lambda: lambda: model(x).square().mean())
    relus = "relu that is encoded, and its claim"
    out = tmp_path / "hostcost.json"
    try:
        assert hostcost.main(["--rounds", "1", "--only", "tiny", "--only", relus, "--json", str(out)]) == 0
        assert hostcost.main(["--profile", "--only", "tiny"]) == 0
    finally:
        torch.set_num_threads(threads)
    found = json.loads(out.read_text())
    assert [row["candidate"] for row in found["rows"]] == list(hostcost.candidates())
    assert all(row["saved"] == 3 and row["first_times_plain"] > 0 for row in found["rows"])
    events = {row["candidate"]: row for row in found["events"]}
    assert events["keep"]["event"] == relus and {"forward", "backward"} < set(events["keep"])
    printed = capsys.readouterr().out
    assert "us per saved tensor" in printed and "us in backward" in printed and "room" in printed


@pytest.mark.parametrize("name", hostcost.EVENT_CASES)
def test_what_an_event_is_named_after_happens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostcost, "EVENTS", 3)
    loss, session = hostcost.EVENT_CASES[name](), Session("lossless", min_nbytes=hostcost.FLOOR)
    with session:
        loss().sum().backward()
    codecs = [row.codec for row in session.report().rows]
    expected = {
        "torch function that saves nothing": ("kept", 0),
        "small saved tensor": ("kept", 1),  # all small ones are one row
        "saved tensor that is kept after a look": ("kept", 3),
        "relu that is encoded, and its claim": ("bitmask", 3),
        "block of batch norm, relu and convolution, remade": ("recompute", 3),
    }
    codec, number = expected[name]
    assert codecs.count(codec) >= number


def test_a_room_has_every_file_of_the_package_or_is_the_sessions() -> None:
    package = Path(backstash.__file__).parent
    claimed = [begin for begins in stages.ROOMS.values() for begin in begins]
    paths = [path.relative_to(package).as_posix() for path in package.rglob("*.py")]
    assert all(any(path.startswith(begin) for path in paths) for begin in claimed), "a room's file has moved"
    assert stages.room_of(str(package / "capture" / "naming.py")) == "name"
    assert stages.room_of(str(package / "session.py")) == "session and the rest"
    assert stages.room_of(str(package / "codecs" / "masks" / "codec.py")) == "encode"
    assert stages.room_of(str(package / "codecs" / "masks" / "cpu.py")) == "kernels"
    assert stages.room_of(nn.__file__) is None


def test_time_in_c_goes_to_the_room_that_called_it() -> None:
    x = torch.randn(64, 64, requires_grad=True)

    def step() -> Tensor:
        with Session("lossless", min_nbytes=64):
            loss = torch.relu(x * 2).sum()
        loss.backward()
        return loss

    step()
    found = {stage.name: stage for stage in stages.profile(step, steps=2)}
    assert {"pack", "name", "encode", "observe", stages.ELSE} <= set(found)
    assert all(stage.calls > 0 for name, stage in found.items() if name != stages.ELSE)

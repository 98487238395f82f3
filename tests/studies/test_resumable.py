"""Long trainings that are stopped go on where they were, and end with the same weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bench import results
from studies import accuracy, cdma_training
from studies.published import results as published
from studies.resumable import Batch, States, Training
from tests.networks.sparse import Spiking, SpikingNetwork, SquaredReLU, squared_relu_network


def batches() -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        yield (torch.randn(4, 3, generator=generator),)


def training(steps: int = 8) -> Training:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return Training("linear", model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), steps)


class StoppedError(Exception):
    """Stands for a run that is killed."""


def run(one: Training, states: States, stop: int | None = None) -> None:
    def step(batch: Batch, number: int) -> Tensor:
        if number == stop:
            raise StoppedError
        loss = one.model(batch[0]).square().mean()
        loss.backward()
        return loss

    one.run(batches(), step, states, 2, 0.1)


def test_a_stopped_training_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole = training()
    run(whole, States(None))
    states = States(tmp_path / "states")
    with pytest.raises(StoppedError):
        run(training(), states, stop=5)
    resumed = training()
    resumed.resume(states)
    assert resumed.done == 4 and resumed.resumed == [4]
    run(resumed, states)
    assert resumed.losses == whole.losses
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True))
    assert sorted(path.name for path in states.folder.iterdir()) == ["linear.pt"]  # type: ignore[union-attr]
    with pytest.raises(SystemExit, match="was to be trained for 3 steps, but its saved state has 8"):
        training(3).resume(states)


def test_nothing_is_resumed_where_nothing_was_saved(tmp_path: Path) -> None:
    for states in (States(None), States(tmp_path)):
        one = training()
        one.resume(states)
        assert one.done == 0 and one.resumed == []


def test_zeros_are_followed_and_resumed(tmp_path: Path) -> None:
    path = tmp_path / "zeros.json"
    arguments = [
        "--networks",
        "spiking",
        "squared_relu",
        "--steps",
        "4",
        "--every",
        "2",
        "--batch",
        "4",
        "--size",
        "12",
    ]
    arguments += ["--images", "32", "--states", str(tmp_path / "states"), "--json", str(path)]
    assert cdma_training.main(arguments) == 0
    first = json.loads(path.read_text())["networks"]
    steps = {one["step"] for one in first[0]["densities"]}
    assert [one["network"] for one in first] == ["spiking", "squared_relu"] and steps == {0, 2, 4}
    assert all(0.0 <= one["nonzero"] <= 1.0 and one["ratio"] >= 1.0 for one in first[0]["densities"])
    assert cdma_training.main([*arguments, "--resume"]) == 0
    assert json.loads(path.read_text())["networks"] == first


@pytest.mark.slow
def test_accuracies_of_images_and_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "accuracy.json"
    arguments = ["--networks", "resnet18", "gpt2", "--variants", "plain", "comet-1", "--seeds", "1", "--steps", "4"]
    arguments += ["--batch", "4", "--size", "32", "--images", "32", "--tests", "8", "--every", "2", "--width", "32"]
    arguments += ["--layers", "1", "--states", str(tmp_path / "states"), "--json", str(path)]
    assert accuracy.main(arguments) == 0
    first = json.loads(path.read_text())["outcomes"]
    assert [(one["network"], one["variant"]) for one in first] == [
        ("resnet18", "plain"),
        ("resnet18", "comet-1"),
        ("gpt2", "plain"),
        ("gpt2", "comet-1"),
    ]
    assert all(one["steps"] == 4 and len(one["losses"]) == 4 for one in first)
    assert first[1]["ratio"] > 2 and first[0]["ratio"] is None
    assert accuracy.main([*arguments, "--resume"]) == 0
    assert json.loads(path.read_text())["outcomes"] == first
    assert "vs plain" in capsys.readouterr().out


@pytest.mark.parametrize("program", [accuracy, cdma_training])
def test_numbers_below_one_are_refused(program: object) -> None:
    with pytest.raises(SystemExit, match=r"(one of each at least|1 or more)"):
        program.main(["--steps", "0"])  # type: ignore[attr-defined]


def test_squared_relus_and_spikes() -> None:
    x = torch.tensor([-1.0, 0.0, 3.0], requires_grad=True)
    assert SquaredReLU()(x).tolist() == [0.0, 0.0, 9.0]
    currents = torch.tensor([[0.8, 2.0], [0.8, 0.0]])
    assert Spiking()(currents).tolist() == [[0.0, 1.0], [1.0, 0.0]]
    for network in (SpikingNetwork(), squared_relu_network()):
        logits = network(torch.randn(2, 1, 16, 16))
        logits.sum().backward()
        assert logits.shape == (2, 10)
        assert all(parameter.grad is not None for parameter in network.parameters())


def test_a_file_that_other_code_goes_on_with_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "found-2030-01-01.json"
    monkeypatch.setattr(published, "FOLDER", tmp_path)
    machine = results.describe("cpu")
    for commit in ("first", "first", "second"):
        monkeypatch.setattr(results, "describe", lambda device, commit=commit: replace(machine, commit=commit))
        results.Results("any", path, ["--json", "found"], resume=True).write(parts=[1])
    found = json.loads(path.read_text())
    assert found["machine"]["commit"] == "first" and [each["commit"] for each in found["resumed"]] == ["second"]
    assert published.machine_line("found").endswith(f"resumed {found['resumed'][0]['started'][:10]} at `second`.")

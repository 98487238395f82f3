"""The accuracy benchmark runs, its JSON is complete, and variants with one seed differ only as intended."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from backstash.codecs import Encoded, Zvc
from bench import datasets
from studies import gist_accuracy
from studies.gist_accuracy import NETWORKS, QUICK, VARIANTS, Training, Variant


@dataclass(frozen=True)
class Coarse(Zvc):
    """Rounds to multiples of 1/4."""

    def encode(self, x: Tensor) -> Encoded:
        return super().encode((x * 4).round() / 4)


STAND_INS = (Variant("plain"), Variant("exact", stashed=lambda: "lossless"), Variant("all-coarse", computed=Coarse))


@pytest.fixture(scope="module")
def data() -> datasets.Dataset:
    pytest.importorskip("sklearn")
    return datasets.digits(QUICK.size, limit=QUICK.train_images)


def trained(network: str, data: datasets.Dataset, seed: int = 1) -> dict[str, Training]:
    return {one.name: gist_accuracy.train(network, one, data, QUICK, seed) for one in STAND_INS}


@pytest.mark.parametrize("network", NETWORKS)
def test_variants_of_a_seed_differ_in_nothing_else(network: str, data: datasets.Dataset) -> None:
    one, other = trained(network, data), trained(network, data, seed=2)
    assert one["exact"].losses == one["plain"].losses != other["plain"].losses
    assert one["exact"].accuracy == one["plain"].accuracy
    assert one["exact"].ratio is not None and one["exact"].ratio > 1 and one["plain"].ratio is None
    assert one["all-coarse"].losses[0] != one["plain"].losses[0]  # the forward pass itself is another
    assert one["plain"].losses == trained(network, data)["plain"].losses


def test_every_output_is_rounded_and_gradients_pass(data: datasets.Dataset) -> None:
    model = NETWORKS["small_vgg"]()
    outputs: list[Tensor] = []
    with gist_accuracy.rounding(model, Coarse()):
        for module in model.modules():
            if not any(module.children()):
                module.register_forward_hook(lambda module, inputs, output: outputs.append(output.detach().clone()))
        model(data.train_images[:4]).sum().backward()
    assert len(outputs) == len(list(model))
    assert all(torch.equal(output * 4, (output * 4).round()) for output in outputs)
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    count = sum(len(module._forward_hooks) for module in model.modules())
    assert count == len(outputs)  # this test's own


def test_every_image_is_seen_before_one_is_seen_again() -> None:
    schedule = replace(QUICK, steps=10, batch=3)
    chosen = torch.cat(list(gist_accuracy.order_of(10, schedule, seed=1)))
    assert chosen.shape == (30,)
    assert all(sorted(chosen[start : start + 10].tolist()) == list(range(10)) for start in (0, 10, 20))


def test_summary_compares_within_a_seed() -> None:
    def one(variant: str, seed: int, accuracy: float) -> Training:
        return Training("small_vgg", variant, seed, accuracy, (2.0, 1.0), None, 0.5)

    seeds = {1: 0.5, 2: 0.7, 3: 0.9}
    trainings = [one("plain", seed, accuracy) for seed, accuracy in seeds.items()]
    trainings += [one("worse", seed, accuracy - 0.1) for seed, accuracy in seeds.items()]
    plain, worse = gist_accuracy.summarise(trainings)
    assert (plain.mean, plain.low, plain.high) == (pytest.approx(0.7), 0.5, 0.9)
    assert plain.deviation == pytest.approx(0.2) and plain.versus_plain == 0 and plain.count == 3
    assert worse.versus_plain == pytest.approx(-0.1) and worse.last_loss == 1 and worse.step_seconds == 0.25
    assert "-10.00" in gist_accuracy.show([worse])


def test_not_a_number_is_wrong(data: datasets.Dataset) -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full((len(x), 10), torch.nan)

    assert gist_accuracy.right(Broken(), data, 16) == 0


def test_the_steps_fit_the_time(data: datasets.Dataset) -> None:
    assert gist_accuracy.fit(replace(QUICK, steps=50), data, STAND_INS, seconds=0.0).steps == 1
    assert gist_accuracy.fit(QUICK, data, STAND_INS, seconds=1000.0).steps == QUICK.steps


@pytest.mark.slow
def test_quick_run_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    file = tmp_path / "new" / "accuracy.json"
    assert gist_accuracy.main(["--quick", "--json", str(file)], STAND_INS) == 0
    result = json.loads(file.read_text())
    printed = capsys.readouterr().out
    assert result["complete"] and result["quick"] and result["seconds"] > 0
    assert result["data"] in ("fashion_mnist", "digits") and result["about"] in printed
    assert {"cpu", "cores", "kernels", "commit"} <= result["machine"].keys()
    assert len(result["schedule"]["seeds"]) >= 3
    assert len(result["rows"]) == len(NETWORKS) * len(STAND_INS)
    assert len(result["trainings"]) == len(result["rows"]) * len(result["schedule"]["seeds"])
    for row in result["rows"]:
        assert 0 <= row["low"] <= row["mean"] <= row["high"] <= 1 and row["deviation"] >= 0
        assert row["variant"] in printed


def test_the_variants_are_those_that_are_compared(data: datasets.Dataset) -> None:
    names = ["plain", "gist-fp16", "gist-fp10", "gist-fp8", "all-fp10", "all-fp8"]
    assert [one.name for one in VARIANTS] == names
    for variant in VARIANTS[1:]:
        result = gist_accuracy.train("small_vgg", variant, data, QUICK, seed=1)
        assert all(loss == loss for loss in result.losses) and (result.ratio is None) == (variant.stashed is None)

"""Faults that memory savers have had in public are found and named."""

from __future__ import annotations

import pytest
import torch

import backstash as bs
from backstash.redeem import exclusive
from verify.faults import FAULTS, Step


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("make", FAULTS, ids=lambda make: make.__name__)
def test_a_fault_is_found_and_named(make: type[Step]) -> None:
    torch.manual_seed(0)
    kind, place = FAULTS[make]
    found = bs.verify(make())
    assert found.verdict == "differs" and found.exit_code == 1, str(found)
    assert found.first is not None
    assert (found.first.cause.kind, place in found.first.subject) == (kind, True), str(found)
    assert found.first.cause.reason and found.first.cause.reason in " ".join(str(found).split())
    assert found.fixes()


def test_the_corpus_is_large_enough() -> None:
    assert len(FAULTS) >= 25
    assert len({kind for kind, _ in FAULTS.values()}) >= 18


def test_a_difference_has_its_extent_and_its_gradients() -> None:
    torch.manual_seed(0)
    (make,) = [make for make in FAULTS if make.__name__ == "olmo_core_828_dropout_without_generator_state"]
    found = bs.verify(make(), name="dropout")
    assert found.first is not None
    value, region = found.first.value, found.first.region
    assert value is not None and region is not None
    assert (value.shape, value.dtype, value.owner) == ([8, 16], "float32", "checkpoint")
    assert 0 < value.detail["differ"] < value.detail["elements"] == 128
    assert value.detail["ulps"] > 1000 and value.detail["relative"] > 0.1
    assert (region.kind, region.keeps_generators, region.draws) == ("checkpoint(use_reentrant=False)", False, ["cpu"])
    assert found.errors[0].relative > 0.1
    assert {each.name for each in found.errors} >= {"layers.0.lin.weight", "layers.1.lin.weight"}
    text = str(found)
    assert text.startswith("dropout: differs: ") and "layers.1.drop/Mul:other, float32 [8, 16]" in text
    assert "pass preserve_rng_state=True to checkpoint" in text
    assert "fix" not in "\n".join(found.lines())


@pytest.mark.parametrize("layers", [1, 6, 20])
def test_all_values_that_hooks_have_rounded_are_compared(layers: int) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(layers)]), torch.randn(8, 16)

    def step() -> None:
        rounding = torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float())
        with rounding:
            loss = model(x).sum()
        loss.backward()

    found = bs.verify(step, tolerance=0.05)
    assert (found.verdict, [each.cause.kind for each in found.findings]) == ("rounded", ["rounded"])
    assert bs.verify(step, tolerance=1e-5).verdict == "differs"


def test_rounding_hooks_are_meant_within_the_tolerance() -> None:
    (make,) = [make for make in FAULTS if make.__name__ == "offloader_that_keeps_half_the_bits"]
    torch.manual_seed(0)
    found = bs.verify(make(), tolerance=1e-2)
    assert (found.verdict, found.exit_code) == ("rounded", 0), str(found)
    assert found.errors


def test_a_rounding_policy_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exclusive, "_measured", 0)  # so that the Session goes backward by itself, as the first does
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    x = torch.randn(16, 32)

    def step() -> None:
        with bs.Session("quantized", min_nbytes=0):
            loss = model(x).square().sum()
        loss.backward()

    found = bs.verify(step)
    assert (found.verdict, found.exit_code) == ("rounded", 0), str(found)
    assert found.first is not None and "quantized" in found.first.cause.reason

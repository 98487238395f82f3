"""Choices of a plan in a program's own loop: values move to a disk, or are rounded within a limit on the error."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from typer.testing import CliRunner

import backstash as bs
from backstash import gradient_error
from backstash.cli.commands import app
from backstash.errors import PlanError
from backstash.planning.measure.link import Link, Speed
from backstash.planning.run.budgeted import Budgeted
from backstash.planning.run.guard import Guard
from backstash.planning.run.running import ProfiledRun

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

FACTOR = 1.6
"""The real error of a plan that rounds few values and was not rehearsed, over the predicted one, is at most this."""


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A disk whose speed is not measured, in a folder of its own."""

    def measured(device: str, offload_to: object = None) -> Link:
        return Link("disk", str(tmp_path), Speed(0.0, 1e-10, 0.0), Speed(1e-4, 1e-10, 1.0), Speed(1e-4, 1e-10, 1.0))

    monkeypatch.setattr("backstash.planning.measure.link.measured", measured)
    return tmp_path


def network(depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))


def trained(session: Any, width: int, steps: int = 8, make: Any = network) -> list[Tensor]:
    """The gradients of each step; there is no optimizer, so that all of them have the same weights."""
    model = make()
    found = []
    torch.manual_seed(1)
    x, y = torch.randn(4, 3, width, width), torch.randint(0, 2, (4,))
    for _ in range(steps):
        model.zero_grad()
        if session is None:
            nn.functional.cross_entropy(model(x), y).backward()
        else:
            with session:
                loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            del loss
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return found


def off(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


@pytest.mark.slow
def test_rounding_in_a_loop_keeps_the_budget_and_is_off_by_what_is_predicted() -> None:
    run = Budgeted("75%", "bounded", error_limit=0.02, min_nbytes=1024)
    errors = off(trained(run, 32), trained(None, 32))
    found = run.found
    assert found.plan is not None and not found.trouble
    assert {decision.choice for decision in found.plan.decisions if decision.error}
    assert 0 < found.plan.error <= 0.02 == found.plan.error_limit
    assert 0 < found.reached_nbytes <= found.budget_nbytes < found.plain_nbytes
    assert errors[:4] == [0.0] * 4, "the steps that are measured are plain ones"
    assert 0 < errors[-1] <= FACTOR * found.plan.error
    assert f"gradients predicted to be off by {found.plan.error:.2%} of their length" in str(run.report())


def test_a_loop_that_cannot_be_measured_rounds_nothing_and_says_so() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.first = network(), nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Any:
            return self.body(torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False))

    run = Budgeted("90%", ("lossless", "recompute", "bounded"), min_nbytes=1024)
    with pytest.warns(UserWarning, match="codecs that have an error .* nothing is rounded"):
        found = trained(run, 32, 12, Checkpointed)
    errors = off(found, trained(None, 32, 12, Checkpointed))
    assert errors == [0.0] * 12
    assert run.found.plan is not None and run.found.plan.error == 0.0
    assert "nothing is rounded, because what that does to the gradients could not be measured" in str(run.found)


def test_moving_in_a_loop_has_the_bits_of_plain_training_and_leaves_no_file(fast: Path) -> None:
    run = Budgeted("75%", "offload", min_nbytes=1024)
    assert off(trained(run, 96), trained(None, 96)) == [0.0] * 8
    found = run.found
    assert found.plan is not None and found.plan.store == "disk" and found.plan.directory == str(fast)
    assert any(decision.kind == "offload" for decision in found.plan.decisions)
    assert 0 < found.reached_nbytes <= found.budget_nbytes < found.plain_nbytes
    guard = run.policy
    assert isinstance(guard, Guard) and guard.plan is found.plan
    assert guard.escalated == 0 and max(guard.excess, guard.most_excess) <= guard.room, "what has moved is not held"
    assert "to the disk" in str(run.report()) or "disk" in found.plan.explain()
    del run, guard
    gc.collect()
    assert list(fast.iterdir()) == []


@pytest.mark.slow
def test_a_wrapped_model_may_round() -> None:
    def wrapped() -> nn.Module:
        return bs.wrap(network(), budget="75%", allow="bounded", error_limit=0.02, min_nbytes=1024)

    errors = off(trained(None, 32, make=wrapped), trained(None, 32))
    assert errors[:4] == [0.0] * 4 and 0 < errors[-1] <= FACTOR * 0.02


@pytest.mark.slow
def test_a_plan_that_rounds_is_replanned_within_its_own_limit() -> None:
    model = network()
    x, y = torch.randn(4, 3, 32, 32), torch.randint(0, 2, (4,))
    profile = bs.profile(
        lambda: nn.functional.cross_entropy(model(x), y).backward(), model, allow="bounded", min_nbytes=1024
    )
    plan = bs.plan(profile, "75%", allow="bounded", error_limit=0.02)
    assert plan.error > 0
    kept = plan.replanning(min_nbytes=1024)
    assert (kept.error_limit, kept.allow, kept.tries) == (0.02, ("bounded",), ("bounded",))
    exact = plan.__class__.from_json(bs.plan(profile, "90%").to_json())
    assert exact.replanning().error_limit is None
    both = plan.united(bs.plan(profile, "200%"))
    assert math.isclose(both.error, plan.error)


def test_copies_and_kept_plans_know_the_limit(tmp_path: Path) -> None:
    first = Budgeted("50%", "bounded", error_limit=0.02, folder=tmp_path, min_nbytes=1024)
    again = copy.deepcopy(first)
    assert again.error_limit == 0.02 and again.buckets.files is not None and again.buckets.files.folder == tmp_path
    keys = {"0/Convolution#0:input": "float32 [2]"}
    fingerprints = {
        Budgeted("50%", allow, error_limit=limit).buckets.fingerprint(keys)
        for allow, limit in (("bounded", 0.02), ("bounded", 0.01), ("lossless", None))
    }
    assert len(fingerprints) == 3
    same = [Budgeted("50%", "bounded", error_limit=limit).buckets.fingerprint(keys) for limit in (None, 0.01)]
    assert same[0] == same[1], "a hundredth is what is meant if nothing is said"


def test_a_program_is_profiled_with_all_that_is_allowed() -> None:
    run = ProfiledRun(1024, allow=("lossless", "bounded"))
    with pytest.raises(SystemExit):
        trained(run, 32)
    profile = run.profile
    assert profile is not None and profile.tries == ("lossless", "recompute", "bounded")
    assert any(choice.error for value in profile.values for choice in value.choices)


def test_what_means_nothing_is_an_error_before_training(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="nothing that makes an error"):
        Budgeted("50%", error_limit=0.1)
    with pytest.raises(PlanError, match="neither a family of choices nor a codec"):
        Budgeted("50%", "losless")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(PlanError, match="is no folder that can be written to"):
        Budgeted("50%", "offload", device="cpu", offload_to=file / "below")
    with pytest.raises(PlanError, match="'offload' is not among what is allowed"):
        Budgeted("50%", device="cpu", offload_to=tmp_path)
    with pytest.raises(PlanError, match="'offload' is not among what is allowed"):
        bs.profile(lambda: None, device="cpu", offload_to=tmp_path)


@pytest.mark.slow
def test_two_models_in_turns_are_rounded_within_the_limit() -> None:
    def gradients(session: Any) -> list[Tensor]:
        models = network(), nn.Sequential(network(2))
        torch.manual_seed(1)
        x = torch.randn(4, 3, 32, 32)
        found = []
        with session or nullcontext():
            for _ in range(9):
                for model in models:
                    model.zero_grad()
                    model(x).square().mean().backward()
                gradients = [p.grad for model in models for p in model.parameters() if p.grad is not None]
                found.append(torch.cat([each.flatten() for each in gradients]))
        return found

    run = Budgeted("80%", "bounded", error_limit=0.05, min_nbytes=1024)
    errors = off(gradients(run), gradients(None))
    assert run.period == 2 and run.found.plan is not None and run.found.plan.error > 0
    assert 0 < run.found.reached_nbytes <= run.found.budget_nbytes
    assert errors[:4] == [0.0] * 4 and 0 < errors[-1] <= FACTOR * 0.05


@pytest.mark.parametrize("last", range(3, 7))
def test_nothing_is_left_if_training_fails_while_it_is_measured(last: int) -> None:
    run = Budgeted("75%", "bounded", min_nbytes=1024)
    model, fails = network(), False

    def fail(gradient: Tensor) -> None:
        if fails:
            raise ZeroDivisionError

    for number in range(last + 1):
        fails = number == last
        with pytest.raises(ZeroDivisionError) if fails else nullcontext():
            with run:
                loss = model(torch.randn(4, 3, 32, 32, requires_grad=True) * 1.0).square().mean()
                loss.register_hook(fail)
            loss.backward()
    run.close()
    assert not gradient_error._waiting and not torch.autograd._profiler_enabled()
    assert torch.autograd.backward.__module__ == "torch.autograd"


@pytest.mark.slow
def test_a_script_may_be_rounded(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = ["--allow", "bounded", "--error-limit", "0.05", "--budget", "80%", "--min-nbytes", "1024"]
    done = CliRunner().invoke(app, ["run", "--allocator", "system", *words, str(script)])
    assert done.exit_code == 0, done.output
    line = next(line for line in done.output.splitlines() if line.startswith("backstash: budget"))
    assert "gradients predicted to be off by" in line and "above" not in line
    wrong = CliRunner().invoke(app, ["run", "--budget", "80%", "--error-limit", "0.05", str(script)])
    assert wrong.exit_code != 0 and "nothing that makes an error" in wrong.output.replace("\n", " ")


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
for step in range(8):
    model.zero_grad()
    model(torch.randn(4, 3, 32, 32)).square().mean().backward()
"""

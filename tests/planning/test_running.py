"""A program in its own loop stays within a budget: bits are equal, the peak is kept, nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

from backstash import Session
from backstash.cli.commands import app
from backstash.errors import BudgetError, PlanError
from backstash.planning.model.plan import Plan
from backstash.planning.model.problem import StepProfile
from backstash.planning.run.budgeted import Budgeted
from backstash.planning.run.running import ProfiledRun
from backstash.planning.search.planner import Planner, growth
from backstash.report.meter import reset_resident_peak, resident_peak_nbytes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def network() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(4):
        layers += [nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Conv2d(8, 8, 3, padding=1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 10))


def trained(context: AbstractContextManager[Any], steps: int = 9) -> list[Tensor]:
    """The weights after some steps, and the generator's state."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    with context:
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(16, 3, 16, 16)), torch.randint(0, 10, (16,))).backward()
            optimizer.step()
    return [*(p.detach().clone() for p in model.state_dict().values()), torch.get_rng_state()]


def adversarial(context: AbstractContextManager[Any], steps: int = 9) -> list[Tensor]:
    """Two models that take turns, as in a GAN: two backward passes make a step."""
    torch.manual_seed(0)
    first, second = network(), network()
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in (first, second)]
    with context:
        for _ in range(steps):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.randn(16, 3, 16, 16)).square().mean().backward()
                optimizer.step()
    return [p.detach().clone() for model in (first, second) for p in model.parameters()]


LOOPS: dict[str, Callable[..., list[Tensor]]] = {"one model": trained, "two models in turns": adversarial}


@pytest.mark.parametrize("loop", ["one model", pytest.param("two models in turns", marks=pytest.mark.slow)])
def test_training_has_the_bits_of_plain_training_and_keeps_the_budget(loop: str) -> None:
    expected = LOOPS[loop](nullcontext())
    run = Budgeted("60%", min_nbytes=1024)
    assert all(torch.equal(x, y) for x, y in zip(expected, LOOPS[loop](run), strict=True))
    found = run.found
    assert found.plan is not None and not found.plan.is_empty
    assert 0 < found.reached_nbytes <= found.budget_nbytes < found.plain_nbytes
    assert found.plan.unknown == ()
    assert found.seconds > 0
    assert "--budget" not in str(run.report())  # it is not recommended to do what is done


def test_a_step_that_fits_is_left_alone() -> None:
    run = Budgeted("200%", min_nbytes=1024)
    trained(run)
    assert run.found.plan is not None and run.found.plan.is_empty


@pytest.mark.slow
def test_a_budget_that_nothing_fits_says_what_would() -> None:
    with pytest.raises(BudgetError, match="the smallest budget that fits") as caught:
        trained(Budgeted(1000, min_nbytes=1024), 60)
    assert caught.value.smallest_nbytes > 1000
    trained(Session("lossless"), 1)  # nothing is left open


@pytest.mark.parametrize("budget", ["6 gigs", 0, -1, "0%", "", 1.5])
def test_a_budget_that_means_nothing_is_an_error_at_once(budget: Any) -> None:
    with pytest.raises(PlanError, match="budget"):
        Budgeted(budget)


@pytest.mark.slow
def test_nothing_is_left_behind_when_the_loop_fails() -> None:
    backward = torch.autograd.backward

    def fails(context: AbstractContextManager[Any], after: int) -> None:
        model = network()
        with context:
            for number in range(9):
                loss = model(torch.randn(16, 3, 16, 16)).square().mean()
                if number == after:
                    raise KeyError("the loop's own")
                loss.backward()

    for after in (0, 2, 3, 5):
        with pytest.raises(KeyError, match="own"):
            fails(Budgeted("60%", min_nbytes=1024), after)
        assert torch.autograd.backward is backward
        assert not nn.modules.module._global_forward_pre_hooks


def test_a_profile_ends_the_program() -> None:
    run = ProfiledRun(min_nbytes=1024)
    with pytest.raises(SystemExit):
        trained(run)
    assert run.profile is not None
    assert any(choice.kind == "recompute" for value in run.profile.values for choice in value.choices)


def profiled_with_heavy_weights(batch: int) -> StepProfile:
    """A step of a loop that frees the gradients of the step before, which are not small beside what it saves."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)) for _ in range(6)]
    model, run = nn.Sequential(*layers), ProfiledRun(min_nbytes=1024)
    with pytest.raises(SystemExit), run:
        for _ in range(20):
            model.zero_grad()
            model(torch.randn(batch, 64)).square().mean().backward()
    assert run.profile is not None
    return run.profile


def test_a_batch_that_is_estimated_fits() -> None:
    """Freed gradients make room once: taken to grow with the batch, they had promised more than fits."""
    profile = profiled_with_heavy_weights(256)
    budget = profile.plain_peak_nbytes
    times = growth(profile, budget)
    assert times.plain == 1.0 < times.planned
    larger = profiled_with_heavy_weights(int(256 * times.planned))
    assert Planner(larger).solutions[0].peak_nbytes <= budget


# -- commands --------------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
layers = [nn.Conv2d(3, 8, 3, padding=1)]
for _ in range(4):
    layers += [nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 32 * 32, 10))
for step in range({steps}):
    model.zero_grad()
    loss = model(torch.randn(4, 3, 32, 32)).square().mean()
    loss.backward()
print("the loss is", loss.item().hex())
"""


def invoked(tmp_path: Any, *args: str, steps: int = 8) -> Any:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(steps=steps))
    return CliRunner().invoke(app, [*args, str(script)])


@pytest.mark.slow
def test_run_with_a_budget_says_what_was_reached(tmp_path: Any) -> None:
    within = invoked(tmp_path, "run", "--allocator", "system", "--budget", "85%")
    alone = invoked(tmp_path, "run", "--allocator", "system", "--policy", "keep")
    assert within.exit_code == alone.exit_code == 0, within.output
    line = next(line for line in within.output.splitlines() if line.startswith("backstash: budget"))
    assert "planned" in line and "reached" in line and "above" not in line
    assert "resident peak of the process" not in alone.output
    if resident_peak_nbytes() is not None:
        resident = next(line for line in within.output.splitlines() if "resident peak of the process" in line)
        assert "under the plan" in resident or not reset_resident_peak()
    loss = next(line for line in within.output.splitlines() if line.startswith("the loss is"))
    assert loss in alone.output


@pytest.mark.slow
def test_a_plan_is_written_and_run(tmp_path: Any) -> None:
    file = tmp_path / "plan.json"
    made = invoked(tmp_path, "plan", "--budget", "85%", "--out", str(file))
    assert made.exit_code == 0, made.output
    assert "predicted peak" in made.output
    assert not Plan.from_json(file.read_text()).is_empty
    ran = invoked(tmp_path, "run", "--allocator", "system", "--plan", str(file))
    assert ran.exit_code == 0, ran.output
    assert "recompute" in ran.output
    file.write_text(file.read_text().replace('"budget"', '"budgets"'))
    assert "damaged" in invoked(tmp_path, "run", "--allocator", "system", "--plan", str(file)).output
    file.write_bytes(b"\xff\x00")
    done = invoked(tmp_path, "run", "--allocator", "system", "--plan", str(file))
    assert done.exit_code == 2 and "cannot be read" in done.output and "Pass a file that" in done.output


def test_profile_shows_what_modules_save(tmp_path: Any) -> None:
    file = tmp_path / "profile.json"
    found = invoked(tmp_path, "profile", "--out", str(file))
    assert found.exit_code == 0, found.output
    assert "plain step: peak" in found.output and file.is_file()
    assert "NativeBatchNorm" in invoked(tmp_path, "profile", "--full").output


def test_estimate_says_how_much_larger_the_batch_may_be(tmp_path: Any) -> None:
    found = invoked(tmp_path, "estimate", "--budget", "100%")
    assert found.exit_code == 0, found.output
    assert "1.00 times what it is now" in found.output


def test_a_script_that_ends_too_early_is_an_error(tmp_path: Any) -> None:
    found = invoked(tmp_path, "plan", "--budget", "60%", steps=2)
    assert found.exit_code == 1
    assert "five backward passes" in found.output


@pytest.mark.parametrize("budget", ["6 gigs", "0", "-3GiB"])
def test_a_budget_that_means_nothing_ends_a_command(tmp_path: Any, budget: str) -> None:
    found = invoked(tmp_path, "run", "--allocator", "system", f"--budget={budget}")
    assert found.exit_code != 0
    assert "budget" in found.output

"""Watching a training script, with and without a Session, sees its steps and leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers

from backstash import Session
from backstash.report.watch import PLAIN, Observed, Watch


def train(steps: int, losses_per_step: int = 1) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(losses_per_step):
            loss = model(torch.randn(256, 64)).square().mean()
            loss.backward()
            losses.append(loss.item())
            loss.detach().zero_()  # what was seen must not change with it
        optimizer.step()
    return losses


def watched(steps: int, policy: str = PLAIN, losses_per_step: int = 1) -> tuple[Observed, list[float]]:
    if policy == PLAIN:
        with Watch() as watch:
            losses = train(steps, losses_per_step)
    else:
        with Session(policy) as session, Watch(policy, session) as watch:
            losses = train(steps, losses_per_step)
    return watch.observed(), losses


def hooks() -> tuple[object, ...]:
    return (
        torch.autograd.backward,
        dict(optimizers._global_optimizer_pre_hooks),
        dict(optimizers._global_optimizer_post_hooks),
        dict(nn.modules.module._global_forward_pre_hooks),
    )


@pytest.mark.parametrize("policy", [PLAIN, "lossless"])
@pytest.mark.parametrize("losses_per_step", [1, 2])
def test_every_loss_is_seen_once_and_exactly(policy: str, losses_per_step: int) -> None:
    observed, losses = watched(5, policy, losses_per_step)
    assert [float.fromhex(loss) for loss in observed.losses] == losses
    assert (observed.policy, observed.device, observed.steps) == (policy, "cpu", 5)


def test_steps_are_counted_and_timed() -> None:
    observed, _ = watched(5)
    assert len(observed.step_seconds) == 3  # the first warms up, the second is counted
    assert all(seconds > 0 for seconds in observed.step_seconds)
    assert observed.peak_nbytes is not None
    assert observed.peak_nbytes > 256 * 64 * 4  # a batch
    assert observed.report is None


def test_a_session_changes_no_bit_and_is_accounted_for() -> None:
    plain, _ = watched(4)
    lossless, _ = watched(4, "lossless")
    assert plain.losses == lossless.losses
    assert plain.weights == lossless.weights
    assert lossless.report is not None
    assert lossless.report["saved_nbytes"] > lossless.report["stash_nbytes"] > 0
    assert lossless.report["steps"] == 2


def test_other_weights_have_another_digest() -> None:
    assert watched(4)[0].weights != watched(5)[0].weights


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_short_scripts_are_seen_as_far_as_they_go(steps: int) -> None:
    observed, _ = watched(steps)
    assert observed.steps == steps
    assert (observed.peak_nbytes is not None) == (steps >= 2)
    assert len(observed.step_seconds) == max(0, steps - 2)


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_nothing_is_left_behind(steps: int) -> None:
    before = hooks()
    watched(steps)
    assert hooks() == before


def test_nothing_is_left_behind_by_a_script_that_fails() -> None:
    before = hooks()
    with pytest.raises(RuntimeError, match="does not require grad"), Watch():
        torch.ones(1).backward()
    assert hooks() == before

"""A step of any training loop is found: several optimizers, accumulation, steps within backward, none at all."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from backstash import Session
from backstash.errors import MeasureError
from backstash.report.compare import check
from backstash.report.meter import CountedPeak
from backstash.report.watch import PLAIN, Observed, Watch

BATCH, WIDTH = 256, 64


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, WIDTH))


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.randn(BATCH, WIDTH)).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def one_optimizer(steps: int) -> None:
    model = network()
    optimizer = sgd(model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def two_optimizers_in_a_row(steps: int) -> None:
    model = network()
    optimizers = [sgd(layer) for layer in model if list(layer.parameters())]  # type: ignore[attr-defined]
    for _ in range(steps):
        loss_of(model).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def a_gan(steps: int, critics: int = 1) -> None:
    maker, critic = network(), network()
    of_maker, of_critic = sgd(maker), sgd(critic)
    for _ in range(steps):
        for _ in range(critics):
            of_critic.zero_grad()
            critic(maker(torch.randn(BATCH, WIDTH)).detach()).mean().backward()
            of_critic.step()
        of_maker.zero_grad()
        critic(maker(torch.randn(BATCH, WIDTH))).mean().neg().backward()
        of_maker.step()


def a_gan_with_three_critics(steps: int) -> None:
    a_gan(steps, 3)


def accumulation(steps: int) -> None:
    model = network()
    optimizer = sgd(model)
    for _ in range(steps):
        for _ in range(4):
            loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def optimizers_within_backward(steps: int) -> None:
    model = network()
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(steps):
        loss_of(model).backward()


def no_optimizer(steps: int) -> None:
    model = network()
    for _ in range(steps):
        model.zero_grad()
        loss_of(model).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]


def no_module(steps: int) -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward([(torch.randn(BATCH, WIDTH) @ weight).relu().square().mean()])
        optimizer.step()


def two_optimizers_with_closures(steps: int) -> None:
    models = [network(), network()]
    optimizers = [torch.optim.LBFGS(model.parameters(), max_iter=1, lr=0.1) for model in models]

    def closure(model: nn.Module) -> Tensor:
        model.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.step(functools.partial(closure, model))


def evaluation_in_between(steps: int) -> None:
    model = network()
    optimizer = sgd(model)
    for _ in range(steps):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.randn(8 * BATCH, WIDTH))


LOOPS = (
    one_optimizer,
    two_optimizers_in_a_row,
    a_gan,
    a_gan_with_three_critics,
    accumulation,
    optimizers_within_backward,
    no_optimizer,
    no_module,
    two_optimizers_with_closures,
    evaluation_in_between,
)
LOSSES = {two_optimizers_with_closures: 2, a_gan: 2, a_gan_with_three_critics: 4, accumulation: 4}


def watched(loop: Callable[[int], None], steps: int, policy: str = PLAIN) -> Observed:
    torch.manual_seed(0)
    if policy == PLAIN:
        with Watch() as watch:
            loop(steps)
    else:
        with Session(policy, min_nbytes=1024) as session, Watch(policy, session) as watch:
            loop(steps)
    return watch.observed()


def name(loop: Callable[[int], None]) -> str:
    return loop.__name__


@pytest.mark.parametrize("loop", LOOPS, ids=name)
def test_the_stash_of_a_step_is_within_its_peak(loop: Callable[[int], None]) -> None:
    plain, lossless = watched(loop, 6), watched(loop, 6, "lossless")
    for observed in (plain, lossless):
        # In the first iteration of a GAN its second optimizer has not warmed up yet.
        taking_turns = (a_gan, a_gan_with_three_critics, two_optimizers_with_closures)
        assert observed.steps in ((5, 6) if loop in taking_turns else (6,))
        assert len(observed.step_seconds) == observed.steps - 2
        assert len(observed.losses) == 6 * LOSSES.get(loop, 1)
    assert plain.losses == lossless.losses and plain.weights == lossless.weights
    assert lossless.report is not None and plain.peak_nbytes is not None and lossless.peak_nbytes is not None
    check(lossless, "train.py")
    batch = 4 * BATCH * WIDTH
    assert 0 < lossless.report["stash_nbytes"] <= lossless.report["saved_nbytes"] <= plain.peak_nbytes + batch
    # What is looked at is one training step: larger than what it saves, and far smaller than an evaluation is.
    assert plain.peak_nbytes < 1 << 20


def test_the_step_of_a_gan_is_that_of_both_halves() -> None:
    observed, alone = watched(a_gan_with_three_critics, 5, "lossless"), watched(one_optimizer, 5, "lossless")
    assert observed.report is not None and alone.report is not None
    # The maker's half saves the tensors of both networks; a critic's half saves those of one.
    assert observed.report["saved_nbytes"] == alone.report["saved_nbytes"] + 4 * BATCH * 128


def test_an_optimizer_that_is_not_used_any_more_is_not_waited_for() -> None:
    def loop(steps: int) -> None:
        model = network()
        first, second = sgd(model), sgd(model)
        for step in range(steps):
            loss_of(model).backward()
            (first if step < 2 else second).step()

    assert watched(loop, 40).steps >= 3


def test_an_optimizer_that_comes_late_begins_the_measurement_again() -> None:
    def loop(steps: int) -> None:
        model, other = network(), network()
        first, second = sgd(model), sgd(other)
        for step in range(steps):
            loss_of(model).backward()
            first.step()
            if step >= 3:
                loss_of(other).backward()
                second.step()

    observed = watched(loop, 7)
    assert observed.steps == 4 and len(observed.step_seconds) == 2


def test_a_script_is_ended_when_enough_steps_were_timed() -> None:
    seen = []
    with pytest.raises(SystemExit), Watch(is_finished=lambda steps: steps >= 3) as watch:
        model = network()
        optimizer = sgd(model)
        for step in range(100):
            seen.append(step)
            loss_of(model).backward()
            optimizer.step()
    observed = watch.observed()
    assert (len(seen), observed.steps, len(observed.step_seconds)) == (4, 3, 1)


def test_a_result_that_cannot_be_true_is_refused() -> None:
    observed = watched(one_optimizer, 4, "lossless")
    assert observed.report is not None
    row = {"codec": "zvc", "reason": "", "store": "device", "stash_nbytes": 1 << 30}
    wrong = Observed(**{**vars(observed), "report": {**observed.report, "rows": [row]}})
    with pytest.raises(MeasureError, match=r"the peak was .* and the stash 1\.0 GiB, so that was no whole step"):
        check(wrong, "train.py")
    held = {**row, "codec": "kept", "reason": "held by the program, kept by reference"}
    moved = {**row, "store": "host"}
    check(Observed(**{**vars(observed), "report": {**observed.report, "rows": [held, moved]}}), "train.py")


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    before = torch.autograd.backward, dict(nn.modules.module._global_forward_pre_hooks)
    yield
    assert (torch.autograd.backward, dict(nn.modules.module._global_forward_pre_hooks)) == before


def test_garbage_of_an_earlier_count_is_not_freed_in_the_step() -> None:
    class Knot:
        """Only the collector finds it."""

        def __init__(self) -> None:
            self.itself, self.held = self, torch.ones(1 << 16)

    with CountedPeak():
        knot = Knot()
    del knot
    with CountedPeak() as counted:
        gc.collect()
        held = torch.ones(1 << 10)
    assert counted.peak_nbytes == held.nbytes
    assert min(nbytes for _, nbytes in counted.timeline) >= 0

"""A Session that lowers next to nothing, and takes time for it, says so once and is idle from then on."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
from simulated_clock import Clock
from torch import Tensor, nn

from backstash import Session, session
from backstash.capture import worth
from backstash.planning.run.budgeted import Budgeted
from backstash.redeem import table

STEPS = 24
"""More than the comparison takes."""


def network(width: int) -> nn.Module:
    """Tanh layers, whose results are kept, and a relu of that width, whose result becomes a bit per element."""
    deep = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.Tanh())]
    return nn.Sequential(*deep, nn.Linear(128, width), nn.ReLU(), nn.Linear(width, 4))


USELESS, USEFUL = 8, 256
"""Widths with which less than 2 % of the saved bytes are lowered, and much more."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(worth, "clock", found)
    monkeypatch.setattr(session, "has_compiled", lambda: False)  # whatever ran before in this process
    return found


def run(
    session: Session, model: nn.Module, clock: Clock, steps: int = STEPS, slower: float = 1.2, rows: int = 64
) -> list[bool]:
    """Runs steps, of which one that is not idle takes ``slower`` times as long, and returns which were idle."""
    idle = []
    for _ in range(steps):
        with session:
            loss = model(torch.randn(rows, 128)).square().mean()
            idle.append(session._forward.is_idle)
        loss.backward()
        clock.sleep(1.0 if idle[-1] else slower)
    return idle


def test_it_says_so_once_and_is_idle(clock: Clock) -> None:
    session, model = Session("lossless", min_nbytes=256), network(USELESS)
    with pytest.warns(UserWarning, match=r"1\.20 times as long .* nothing is done") as told:
        idle = run(session, model, clock)
    assert len([each for each in told if "nothing is done" in str(each.message)]) == 1
    assert not any(idle[:4]) and all(idle[-6:])
    assert any("stop_if_useless=False" in note for note in session.report().notes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        idle = run(session, model, clock, 140)
    assert idle.count(False) == 2  # it looks again, and is not timed again


def test_what_lowers_more_is_never_timed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth, "clock", lambda: pytest.fail("the time was asked for"))
    session = Session("lossless", min_nbytes=256)
    assert not any(run(session, network(USEFUL), clock, slower=100.0))


def test_what_takes_no_time_goes_on(clock: Clock) -> None:
    session = Session("lossless", min_nbytes=256)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        idle = run(session, network(USELESS), clock, 40, slower=1.04)
    assert idle.count(True) == worth.ROUNDS + 1 and not any(idle[-20:])


def test_sessions_of_one_model_learn_together(clock: Clock) -> None:
    model = network(USELESS)
    with pytest.warns(UserWarning, match="nothing is done"):
        idle = [run(Session("lossless", min_nbytes=256), model, clock, 1)[0] for _ in range(STEPS)]
    assert all(idle[-6:])
    assert not run(Session("lossless", min_nbytes=256, stop_if_useless=False), model, clock, 1)[0]


@pytest.mark.parametrize("stops", [None, True])
def test_other_policies_stop_only_if_they_are_asked_to(stops: bool | None, clock: Clock) -> None:
    session = Session("gist_fp16", min_nbytes=256, stop_if_useless=stops)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        idle = run(session, network(USELESS), clock, slower=3.0)
    share = 1 - session.report().stash_nbytes / session.report().saved_nbytes
    assert idle[-1] == (stops is True and share < 0.02)


def test_a_switch_turns_it_off(clock: Clock) -> None:
    session = Session("lossless", min_nbytes=256, stop_if_useless=False)
    assert not any(run(session, network(USELESS), clock))
    with pytest.raises(TypeError, match="stop_if_useless"):
        Session("lossless", stop_if_useless=1)  # type: ignore[arg-type]


@pytest.mark.slow
def test_steps_that_take_turns_do_not_flap(clock: Clock) -> None:
    """Whatever becomes of it, it is compared less and less often."""
    session, model = Session("lossless", min_nbytes=256), network(USELESS)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(30):
            run(session, model, clock, 16)
            run(session, model, clock, 2, rows=48)
    assert len([each for each in told if "nothing is done" in str(each.message)]) <= 2


def test_the_bits_are_those_of_plain_training(clock: Clock) -> None:
    def trained(session: Session | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = network(USELESS)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(STEPS):
            with session or nullcontext():
                loss = model(torch.randn(64, 128)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            clock.sleep(1.0 + (session is not None and not session._forward.is_idle))
        return [weight.detach() for weight in model.parameters()]

    with pytest.warns(UserWarning, match="nothing is done"):
        found = trained(Session("lossless", min_nbytes=256))
    assert all(torch.equal(x, y) for x, y in zip(trained(None), found, strict=True))


def test_a_budget_is_never_given_up_for_time(clock: Clock) -> None:
    session = Budgeted("99%", min_nbytes=256)
    assert session.session_with(session.policy)._stops_if_useless is False


def test_what_is_freed_early_counts_as_lowered(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution's kernel frees its input before it allocates a gradient, so a kept input may lower the peak."""
    monkeypatch.setattr(table, "LARGE", 1024)
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(2, 2, 1), nn.Tanh())]
    model = nn.Sequential(nn.Unflatten(1, (2, 8, 8)), *layers, nn.Flatten(), *network(USELESS))
    assert not any(run(Session("lossless", min_nbytes=256), model, clock, slower=3.0))


class Held(nn.Module):
    """A model that holds its own batch, which is most of what a step saves."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = torch.randn(64, 128)
        self.layers = nn.Sequential(nn.Linear(128, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        """The layers of the batch."""
        result: Tensor = self.layers(self.batch)
        return result


@pytest.mark.parametrize("held", [False, True])
def test_what_lowers_no_peak_when_freed_early_does_not_count(
    held: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel runs at the peak, so forty equal inputs lower it by a fortieth; what the program holds stays."""
    monkeypatch.setattr(table, "LARGE", 1024)
    monkeypatch.setattr(worth, "clock", lambda: pytest.fail("the time was asked for"))
    deep = [layer for _ in range(40) for layer in (nn.Linear(128, 128), nn.Tanh())]
    idle = run(Session("lossless", min_nbytes=256), Held() if held else nn.Sequential(*deep), clock, slower=3.0)
    assert all(idle[5:])

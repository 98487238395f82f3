"""The policy offload_hidden moves what the link hides, without a wait, and holds the rest: in simulated time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from gradient_checks import differences
from offload_checks import Cnn, Transformer, trained
from simulated_clock import Clock
from torch import Tensor, nn

import backstash as bs
from backstash import Session, policies
from backstash.errors import PlanError
from backstash.planning.measure.link import of_speed
from backstash.planning.run.hidden import OffloadHidden
from backstash.stores import HostStore, Ticket
from bench.link import LinkStore

WIDTH, BATCH, DEPTH = 64, 64, 12
NBYTES = 4 * WIDTH * BATCH
"""Bytes of the result of each tanh below, which backward reads."""


class Slow(nn.Module):
    """A layer that takes a second of a clock in forward, and two in backward, after what it has saved was read."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.linear, self.tanh = nn.Linear(WIDTH, WIDTH), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.tanh(self.linear(x))
        self.clock.sleep(1.0)
        assert y.grad_fn is not None
        y.grad_fn.register_hook(lambda *_: self.clock.sleep(2.0))
        return y


class Counting(LinkStore):
    """Counts what was asked for and what was not there when it was read."""

    def __init__(self, speed: float, clock: Clock) -> None:
        super().__init__(HostStore(), speed, clock=clock, sleep=clock.sleep)
        self.prefetched = self.got = 0

    def prefetch(self, ticket: Ticket) -> None:
        self.prefetched += 1
        super().prefetch(ticket)

    def get(self, ticket: Ticket) -> bs.Encoded:
        self.got += 1
        return super().get(ticket)


@dataclass
class Ran:
    """A step: its seconds, those that it waited, bytes that went out and came back, its gradients."""

    seconds: float
    waited: float
    out: int
    back: int
    gradients: list[Tensor | None]


class Network:
    """A chain of slow layers, under a policy with a link of ``busy`` times the bytes that it can carry."""

    def __init__(self, busy: float, **options: int) -> None:
        torch.manual_seed(0)
        self.clock = Clock()
        self.model = nn.Sequential(*(Slow(self.clock) for _ in range(DEPTH)))
        speed = NBYTES / busy
        self.link = Counting(speed, self.clock)
        self.policy = policies.offload_hidden(link=of_speed(speed), clock=self.clock, **{"smallest": NBYTES, **options})
        self.session = Session(self.policy, stores={"host": self.link}, min_nbytes=0)

    def step(self, session: Session | None, batch: int = BATCH) -> Ran:
        self.model.zero_grad()
        began, out, back = self.clock.now, self.link.out_nbytes, self.link.back_nbytes
        stalled = self.link.usage().stall_seconds
        x = torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(0))
        with session or nullcontext():
            loss = self.model(x).sum()
        loss.backward()
        return Ran(
            self.clock.now - began,
            self.link.usage().stall_seconds - stalled,
            self.link.out_nbytes - out,
            self.link.back_nbytes - back,
            [p.grad for p in self.model.parameters()],
        )


def test_a_fast_link_hides_everything_that_leaves_in_time() -> None:
    network = Network(0.25)
    plain = network.step(None)
    for number in range(5):
        ran = network.step(network.session)
        assert not differences(plain.gradients, ran.gradients)
        if number >= 2:
            assert network.policy.decision is not None
            assert ran.waited == 0.0 and ran.seconds == pytest.approx(plain.seconds)
            assert ran.out == ran.back >= (DEPTH - 2) * NBYTES
    assert "are moved" in network.session.report().notes[-1]


@pytest.mark.parametrize("busy", [1.5, 3.0])
def test_of_what_a_slow_link_hides_in_part_nothing_is_waited_for(busy: float) -> None:
    network = Network(busy)
    plain = network.step(None)
    first = network.step(network.session)
    assert first.out >= DEPTH * NBYTES and first.waited > 0  # everything is moved at first
    network.step(network.session)
    ran = network.step(network.session)
    assert ran.waited == 0.0 and ran.seconds == pytest.approx(plain.seconds)
    # What is left of forward after the first birth, less a tenth, over the time of a value.
    assert ran.out == ran.back >= int((DEPTH - 1) / (1.1 * busy)) * NBYTES
    assert not differences(plain.gradients, ran.gradients)


def test_a_link_that_hides_nothing_moves_nothing() -> None:
    network = Network(1000.0)
    for _ in range(3):
        ran = network.step(network.session)
    assert ran.out == 0 and network.policy.decision is not None and not network.policy.decision.moved
    assert network.session.report().moved_nbytes == 0


def test_so_many_bytes_are_moved_and_the_wait_for_them_is_predicted() -> None:
    network = Network(3.0, nbytes=8 * NBYTES)
    plain = network.step(None)
    for _ in range(4):
        ran = network.step(network.session)
    assert network.policy.decision is not None
    assert ran.out == 8 * NBYTES
    assert 0 < ran.seconds - plain.seconds <= network.policy.decision.found.passage.added + 1e-6
    assert network.policy.decision.found.passage.seconds <= 1.03 * network.policy.decision.found.floor


def test_nothing_is_looked_up_once_it_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(1.5)
    for _ in range(3):
        network.step(network.session)
    assert network.session._live.prefetcher.fetches is not None
    asked: list[str] = []
    decide = OffloadHidden.decide_together

    def counted(self: OffloadHidden, *arguments: object) -> object:
        asked.append("")
        return decide(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(OffloadHidden, "decide_together", counted)
    before = network.link.prefetched, network.link.got
    ran = network.step(network.session)
    count = ran.out // NBYTES
    assert (network.link.prefetched - before[0], network.link.got - before[1]) == (count, count)
    assert not asked


def test_a_batch_of_another_size_is_held_as_lossless_holds_it_and_then_learned() -> None:
    network = Network(0.25)
    for _ in range(3):
        network.step(network.session)
    first = network.policy.decision
    plain = network.step(None, BATCH + 8)
    other = network.step(network.session, BATCH + 8)
    assert other.out == 0 and other.waited == 0.0
    assert not differences(plain.gradients, other.gradients)
    for _ in range(3):
        other = network.step(network.session, BATCH + 8)
    assert network.policy.decision is not first and network.policy.decision is not None
    assert other.out > 0 and other.waited == 0.0
    assert not differences(plain.gradients, other.gradients)


@pytest.mark.parametrize("make", [Cnn, Transformer])
@pytest.mark.parametrize("speed", [1e3, 1e6, 1e12])
def test_gradients_have_the_bits_of_plain_pytorch(make: Callable[[], nn.Module], speed: float) -> None:
    clock = Clock()
    store = LinkStore(HostStore(), speed, clock=clock, sleep=clock.sleep)
    policy = policies.offload_hidden(link=of_speed(speed), smallest=0)
    session = Session(policy, stores={"host": store}, min_nbytes=0)
    assert not differences(trained(make, None, steps=5), trained(make, session, steps=5))
    assert policy.decision is not None and store.usage().count == 0


def test_a_sum_of_what_is_moved_is_not_remade() -> None:
    torch.manual_seed(0)
    session = Session(policies.offload_hidden(smallest=0), min_nbytes=0)
    trained(Cnn, session, steps=4)
    rows = {row.key: row for row in session.report().rows}
    sums = [row for row in rows.values() if "begin from" in row.reason]
    assert sums and all("in other stores" in row.reason for row in sums)


def test_numbers_of_bytes_are_checked() -> None:
    for wrong in ({"nbytes": -1}, {"smallest": -1}):
        with pytest.raises(PlanError, match="offload_hidden was asked for"):
            policies.offload_hidden(**wrong)

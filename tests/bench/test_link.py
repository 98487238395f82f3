"""The simulated link takes the time that it should, by a clock that only moves when something sleeps."""

from __future__ import annotations

import weakref

import pytest
import torch
from simulated_clock import Clock

from backstash.codecs import Encoded
from backstash.report.meter import CountedPeak
from backstash.saved import TensorSpec
from backstash.stores import DeviceStore
from backstash.testing import check_store
from bench.link import FarStore, LinkStore


def value(nbytes: int) -> Encoded:
    plane = torch.zeros(nbytes, dtype=torch.uint8)
    return Encoded("check", TensorSpec.of(plane), {"codes": plane})


def link(clock: Clock, in_flight: int = 1000, latency: float = 0.5) -> LinkStore:
    return LinkStore(DeviceStore(), 100, latency, in_flight=in_flight, clock=clock, sleep=clock.sleep)


def test_a_value_goes_out_before_it_comes_back() -> None:
    clock = Clock()
    store = link(clock)
    ticket = store.put(value(100))
    assert clock.now == 0.0
    store.get(ticket)
    assert clock.now == pytest.approx(1.5 + 1.5)
    store.get(ticket)
    assert clock.now == pytest.approx(4.5)
    assert store.usage().stall_seconds == pytest.approx(4.5)


def test_what_was_fetched_in_time_is_there() -> None:
    clock = Clock()
    store = link(clock)
    tickets = [store.put(value(100)) for _ in range(2)]
    clock.now = 10.0
    for ticket in tickets:
        store.prefetch(ticket)
        store.prefetch(ticket)
    clock.now = 12.0
    store.get(tickets[0])
    assert clock.now == 12.0
    store.get(tickets[1])  # behind the first one on the link, which took a second
    assert clock.now == pytest.approx(12.5)
    assert store.usage().stall_seconds == pytest.approx(0.5)


def test_both_directions_move_at_once() -> None:
    clock = Clock()
    store = link(clock, latency=0.0)
    first = store.put(value(100))
    clock.now = 1.0
    store.put(value(500))
    store.get(first)
    assert clock.now == pytest.approx(2.0)


def test_put_waits_for_room() -> None:
    clock = Clock()
    store = link(clock, in_flight=250)
    for _ in range(2):
        store.put(value(100))
    assert clock.now == 0.0
    store.put(value(100))
    assert clock.now == pytest.approx(1.0)  # the first one has left
    store.put(value(900))  # more than may be in flight: alone
    assert clock.now == pytest.approx(3.0)


def test_it_keeps_the_contract() -> None:
    check_store(LinkStore(DeviceStore(), 1e12))


def test_what_is_on_its_way_out_is_held() -> None:
    clock = Clock()
    store = LinkStore(FarStore(), 100, clock=clock, sleep=clock.sleep)
    tickets = []
    for _ in range(2):
        encoded = value(100)
        tickets.append(store.put(encoded))
    gone = weakref.ref(encoded.planes["codes"])
    del encoded
    clock.now = 1.5
    store.prefetch(tickets[0])
    assert gone() is not None
    clock.now = 2.0
    store.get(tickets[0])
    assert gone() is None
    assert (store.out_nbytes, store.back_nbytes) == (200, 100)


def test_what_is_far_is_not_counted() -> None:
    def held() -> int:
        with CountedPeak() as counter:
            tickets.append(store.put(value(1 << 20)))
        return counter.timeline[-1][1]

    store, tickets = FarStore(), []
    assert held() == 0
    with CountedPeak() as counter:
        store.prefetch(tickets[0])
        encoded = store.get(tickets[0])
    assert counter.timeline[-1][1] == 1 << 20
    assert torch.equal(encoded.planes["codes"], value(1 << 20).planes["codes"])
    check_store(FarStore())


@pytest.mark.parametrize("wrong", [(0.0, 0.0), (-1.0, 0.0), (1.0, -1.0)])
def test_a_link_has_a_speed(wrong: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="LinkStore was asked for"):
        LinkStore(DeviceStore(), *wrong)

"""Values in other stores come back in the order in which backward reads them, ahead of time, if there is room."""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from gradient_checks import differences
from offload_checks import Cnn, chain, step, trained
from simulated_clock import Clock
from torch import Tensor, nn

from backstash import Encoded, Policy, Session, policies
from backstash.saved import TensorSpec
from backstash.stash.prefetch import WINDOW, Prefetcher
from backstash.stores import HostStore, Store, Ticket, Usage
from bench.link import LinkStore


class Recorder(HostStore):
    """A store that notes its calls, by the number that a value has in its step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self.unread: dict[int, int] = {}
        self.peak = self.peak_count = self.largest = 0
        self._first = 0

    def begin(self) -> None:
        self.calls.clear()
        self.peak = self.peak_count = 0
        self._first = next(self._numbers) + 1

    def put(self, encoded: Encoded) -> Ticket:
        ticket = super().put(encoded)
        self.largest = max(self.largest, ticket.nbytes)
        return ticket

    def prefetch(self, ticket: Ticket) -> None:
        self.calls.append(("prefetch", ticket.number - self._first))
        self.unread[ticket.number] = ticket.nbytes
        self.peak = max(self.peak, sum(self.unread.values()))
        self.peak_count = max(self.peak_count, len(self.unread))

    def get(self, ticket: Ticket) -> Encoded:
        self.calls.append(("get", ticket.number - self._first))
        self.unread.pop(ticket.number, None)
        return super().get(ticket)

    def numbers(self, call: str) -> list[int]:
        return [number for called, number in self.calls if called == call]


def test_the_order_of_reading_is_learned() -> None:
    recorder = Recorder()
    session = Session(policies.offload(recompute=False), stores={"host": recorder}, min_nbytes=0)
    model = chain()
    orders = []
    for number in range(3):
        recorder.begin()
        step(session, model, torch.randn(16, 64))
        orders.append(recorder.numbers("get"))
        if number == 0:
            assert not recorder.numbers("prefetch")
        else:
            assert recorder.numbers("prefetch") == orders[1] == list(dict.fromkeys(orders[0]))
            for value in orders[1]:
                assert recorder.calls.index(("prefetch", value)) < recorder.calls.index(("get", value))
            assert 0 < recorder.peak <= (1 + WINDOW) * recorder.largest  # one is read
    assert orders[1] == orders[2]
    assert len(orders[1]) >= 8


def test_what_proves_that_a_value_can_be_made_again_is_not_in_the_order() -> None:
    recorder = Recorder()
    session = Session(policies.offload(), stores={"host": recorder}, min_nbytes=0)
    for number in range(3):
        recorder.begin()
        trained(Cnn, session, steps=1)
        if number:
            assert sorted(recorder.numbers("prefetch")) == sorted(set(recorder.numbers("get")))


def test_one_value_ahead_is_one() -> None:
    recorder = Recorder()
    session = Session(policies.offload(ahead=1), stores={"host": recorder}, min_nbytes=0)
    for _ in range(2):
        recorder.begin()
        trained(Cnn, session, steps=1)
    assert recorder.peak_count == 2  # one is read
    with pytest.raises(ValueError, match="it takes 1 or more"):
        policies.offload(ahead=0)


def test_published_policies_fetch_one_value_ahead() -> None:
    recorder = Recorder()
    session = Session(policies.vdnn(), stores={"host": recorder}, min_nbytes=0)
    for _ in range(2):
        recorder.begin()
        trained(Cnn, session, steps=1)
    assert recorder.numbers("prefetch")
    assert recorder.peak_count == 2  # one is read


def test_what_is_under_way_stays_below_the_peak_but_for_one_value() -> None:
    class Watching(Recorder):
        def prefetch(self, ticket: Ticket) -> None:
            super().prefetch(ticket)
            *others, _ = self.unread.values()
            assert session._live.nbytes + sum(others) <= session._live.peak_nbytes

    session = Session("offload", stores={"host": Watching()}, min_nbytes=0)
    trained(Cnn, session)


def test_prefetching_hides_the_link() -> None:
    clock, nbytes = Clock(), 512 * 128 * 4
    link = LinkStore(HostStore(), nbytes / 0.5, clock=clock, sleep=clock.sleep)
    session = Session(policies.offload(recompute=False), stores={"host": link}, min_nbytes=0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh(), Slow(clock)) for _ in range(8)))
    stalls = []
    for _ in range(3):
        before = link.usage().stall_seconds
        step(session, model, torch.randn(512, 128))
        stalls.append(link.usage().stall_seconds - before)
    assert stalls[0] > 3.5
    assert stalls[1] == stalls[2] <= 1.0  # the first two have nothing to hide behind


class Slow(nn.Module):
    """A layer that takes a second of a clock in forward and in backward."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.sleep(1.0)
        x.register_hook(lambda gradient: self.clock.sleep(1.0))
        return x


def hidden(policy: Policy, widths: list[int], busy: float) -> float:
    """Returns the share of transfer time that a chain of slow layers does not wait for, if the link is ``busy``."""
    clock, batch = Clock(), 64
    speed = batch * 4 * sum(widths) / (busy * len(widths))
    link = LinkStore(HostStore(), speed, clock=clock, sleep=clock.sleep)
    session = Session(policy, stores={"host": link}, min_nbytes=0)
    layers = [
        nn.Sequential(nn.Linear(before, width), nn.Tanh(), Slow(clock)) for before, width in pairwise([8, *widths])
    ]
    for _ in range(2):
        stalled, moved = link.usage().stall_seconds, link.out_nbytes + link.back_nbytes
        step(session, nn.Sequential(*layers), torch.randn(batch, 8))
    stalled, moved = link.usage().stall_seconds - stalled, link.out_nbytes + link.back_nbytes - moved
    assert moved >= 2 * batch * 4 * sum(widths)
    return 1 - stalled / (moved / speed)


@pytest.mark.parametrize("busy", [0.5, 0.8])
@pytest.mark.parametrize("widths", [[64] * 32, [32, 32, 32, 256] * 8], ids=["even", "uneven"])
def test_nine_tenths_of_what_could_be_hidden_is(widths: list[int], busy: float) -> None:
    assert hidden(policies.offload(recompute=False), widths, busy) >= 0.9


def test_one_value_ahead_hides_less_where_values_differ() -> None:
    widths = [32, 32, 32, 256] * 8
    assert hidden(policies.offload(recompute=False, ahead=1), widths, 0.8) < 0.8
    assert hidden(policies.vdnn(), widths, 0.8) < 0.8


def test_a_wrong_guess_costs_time_only() -> None:
    def make(order: list[int], plain: bool) -> tuple[list[Tensor | None], Recorder]:
        recorder = Recorder()
        session = Session("offload", stores={"host": recorder}, min_nbytes=0)
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]
        root = nn.ModuleList(layers)
        found: list[Tensor | None] = []
        for chosen in ([0, 1, 2, 3], order, [0, 1, 2, 3], [*order, *order]):
            root.zero_grad()
            x = torch.randn(16, 32)
            with nullcontext() if plain else session:
                for layer in chosen:
                    x = layers[layer](x)
            x.sum().backward()
            found += [None if p.grad is None else p.grad.clone() for p in root.parameters()]
            del x
            assert recorder.usage().nbytes == session._live.nbytes == 0
        return found, recorder

    for order in ([3, 2, 1, 0], [2], [1, 1, 3], [3, 0, 2, 1]):
        expected, _ = make(order, plain=True)
        got, recorder = make(order, plain=False)
        assert not differences(expected, got)
        assert recorder.numbers("prefetch")


def test_abandoned_graphs_leave_no_bytes(store: Store) -> None:
    session = Session(policies.offload(store="far", recompute=False), stores={"far": store}, min_nbytes=0)
    model, x = chain(), torch.randn(16, 64)
    step(session, model, x)
    for _ in range(2):
        with session:
            middle = model[:8](x)
            loss = model[8:](middle).sum()
        assert store.usage().nbytes > 0
        torch.autograd.grad(loss, middle, retain_graph=True)  # half of backward, with values under way for the rest
        del middle, loss
        gc.collect()
        assert store.usage() == Usage(0, store.usage().peak_nbytes, 0, store.usage().stall_seconds)
        assert session._live.nbytes == session._live.saved == 0
        assert all(moved() is None for moved in session._live.prefetcher._moved.values())
        step(session, model, x)
    assert store.usage().nbytes == 0


def test_a_graph_outlives_its_session(store: Store) -> None:
    session = Session(policies.offload(store="far"), stores={"far": store}, min_nbytes=0)
    model = chain()
    expected = torch.autograd.grad(model(x := torch.ones(16, 64)).sum(), list(model.parameters()))
    step(session, model, x)
    with session:
        loss = model(x).sum()
    del session
    assert not differences(expected, torch.autograd.grad(loss, list(model.parameters())))
    del loss
    assert store.usage().nbytes == 0


def test_waiting_is_metered(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    link = LinkStore(HostStore(), 1e9, latency=2e-3, clock=clock, sleep=clock.sleep)
    session = Session(policies.offload(store="far", recompute=False), stores={"far": link}, min_nbytes=0)
    step(session, chain(), torch.randn(16, 64))
    report = session.report()
    moved = [row for row in report.rows if row.store == "far"]
    assert moved
    assert all(row.stall_seconds >= 2e-3 and row.decode_seconds < row.stall_seconds for row in moved)
    assert not any(row.stall_seconds for row in report.rows if row.store == "device")
    assert report.stall_seconds == pytest.approx(sum(row.stall_seconds for row in moved))
    assert report.stall_seconds >= link.usage().stall_seconds
    assert "stall" in str(report)
    assert "waited" in str(report)
    assert "raw in far" in str(report)


def test_nothing_is_said_of_waiting_where_nothing_was_moved() -> None:
    session = Session("lossless", min_nbytes=0)
    step(session, chain(), torch.randn(16, 64))
    assert session.report().stall_seconds == 0
    assert "stall" not in str(session.report())
    assert "other stores" not in str(session.report())


# -- the prefetcher alone --------------------------------------------------------------------------------------------


class Value:
    """A value of ``nbytes`` in a recorder."""

    def __init__(self, store: Recorder, nbytes: int) -> None:
        plane = torch.zeros(nbytes, dtype=torch.uint8)
        self.store: Store = store
        self.ticket = store.put(Encoded("check", TensorSpec.of(plane), {"codes": plane}))
        self.tag: tuple[str, int] | None = None
        self.planes: Encoded | None = None


def forward(prefetcher: Prefetcher, recorder: Recorder, sizes: dict[str, int]) -> dict[str, Value]:
    prefetcher.begin_step()
    recorder.begin()
    values = {key: Value(recorder, nbytes) for key, nbytes in sizes.items()}
    for key, value in values.items():
        prefetcher.put(value, key[0])
    return values


SIZES = {"a": 100, "b": 100, "c": 100, "d": 300, "e": 100, "f": 100, "g": 100, "h": 900}


def taught(room: int, ahead: int | None = None) -> tuple[Prefetcher, Recorder, dict[str, Value]]:
    """A prefetcher that has seen a to h read in this order, and a forward pass with the same values."""
    prefetcher, recorder = Prefetcher(ahead), Recorder()
    for value in forward(prefetcher, recorder, SIZES).values():
        prefetcher.read(value, room)
    assert not recorder.numbers("prefetch")
    return prefetcher, recorder, forward(prefetcher, recorder, SIZES)


@pytest.mark.parametrize(
    ("room", "ahead", "begun"), [(0, None, 0), (250, None, 2), (650, None, 4), (1 << 30, None, 8), (0, 3, 3)]
)
def test_as_many_as_fit_are_under_way(room: int, ahead: int | None, begun: int) -> None:
    prefetcher, recorder, values = taught(room, ahead)
    prefetcher.advance(room)
    assert recorder.numbers("prefetch") == list(range(begun))
    prefetcher.advance(room)
    assert len(recorder.calls) == begun
    assert len(values) == 8


@pytest.mark.parametrize(
    ("room", "ahead", "calls"),
    [
        (1000, None, "get a, prefetch b, get b"),
        (1000, 1, "get a, prefetch b, get b"),
        (0, None, "get a, prefetch b, prefetch a, get b, prefetch b, get a, get b"),
    ],
)
def test_a_value_that_is_read_twice_stays_if_there_is_room(room: int, ahead: int | None, calls: str) -> None:
    prefetcher, recorder = Prefetcher(ahead), Recorder()
    for _ in range(3):
        values = forward(prefetcher, recorder, {"a": 10, "b": 10})
        for key in "abab":
            assert prefetcher.read(values[key], room)[0].nbytes == 10
        assert not any(value.planes for value in values.values())
    assert [f"{call} {'ab'[number]}" for call, number in recorder.calls] == calls.split(", ")


def test_equal_keys_are_told_apart() -> None:
    prefetcher, recorder = Prefetcher(), Recorder()
    for _ in range(2):
        values = forward(prefetcher, recorder, {"a1": 10, "a2": 10, "a3": 10})
        for key in ("a3", "a2", "a1"):
            prefetcher.read(values[key], 10_000)
    assert recorder.calls == [("get", 2), ("prefetch", 1), ("prefetch", 0), ("get", 1), ("get", 0)]


def test_what_stays_on_the_device_tells_how_far_backward_is() -> None:
    prefetcher, recorder = Prefetcher(), Recorder()
    for _ in range(2):
        values = forward(prefetcher, recorder, SIZES)
        if prefetcher._order:  # backward begins in the middle
            prefetcher.passed("resident", 300)
            assert recorder.numbers("prefetch") == [4, 5, 6]
        for key, value in values.items():
            if key == "e":
                prefetcher.passed("resident", 0)
            prefetcher.read(value, 0)


def test_a_value_that_is_gone_leaves_room_for_others() -> None:
    prefetcher, recorder, values = taught(100)
    prefetcher.advance(100)
    prefetcher.advance(100)
    assert recorder.numbers("prefetch") == [0]
    del values["a"]
    prefetcher.advance(100)
    assert recorder.numbers("prefetch") == [0, 1]


def test_values_of_an_older_step_are_read_like_any_other() -> None:
    prefetcher, recorder, old = taught(1000)
    values = forward(prefetcher, recorder, SIZES)
    encoded, seconds = prefetcher.read(old["c"], 1000)
    assert encoded.nbytes == 100
    assert seconds >= 0
    assert prefetcher._read == []
    assert len(values) == 8


def test_no_memory_for_a_guess_is_no_error() -> None:
    class Full(Recorder):
        def prefetch(self, ticket: Ticket) -> None:
            raise torch.OutOfMemoryError

    prefetcher, recorder = Prefetcher(), Full()
    for _ in range(2):
        for value in (values := forward(prefetcher, recorder, SIZES)).values():
            prefetcher.read(value, 10_000)
    assert len(recorder.numbers("get")) == len(values)

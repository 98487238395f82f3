"""Moving what is saved: gradients stay bit-equal in any store, values come back in the order in which they are read."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import differences
from simulated_clock import Clock
from torch import Tensor, nn

from backstash import Encoded, Policy, Session, policies
from backstash.codecs import Raw
from backstash.errors import UnknownNameError
from backstash.policies.base import Action, Keep, Outcome, Recompute, Stash
from backstash.policies.published import Cdma, Layrub, Vdnn, VdnnDyn
from backstash.saved import Need, SavedTensor, TensorSpec
from backstash.stash.prefetch import WINDOW, Prefetcher
from backstash.stores import DiskStore, HostStore, Store, Ticket, Usage
from benchmarks.link import LinkStore

MAKERS: dict[str, Callable[[str], Policy]] = {
    "offload": lambda store: policies.offload(store=store),
    "offload-stored": lambda store: policies.offload(store=store, recompute=False),
    "offload-deflate": lambda store: policies.offload("deflate", store),
    "vdnn": lambda store: policies.vdnn(store=store),
    "vdnn-conv": lambda store: policies.vdnn("conv", store),
    "vdnn-dyn-0": lambda store: policies.vdnn("dyn", store, budget=0),
    "vdnn-dyn": lambda store: policies.vdnn("dyn", store, budget=300_000),
    "cdma-zvc": lambda store: policies.cdma(store=store),
    "cdma-rle": lambda store: policies.cdma("rle", store),
    "cdma-deflate": lambda store: policies.cdma("deflate", store),
    "layrub": lambda store: policies.layrub(store),
}


# -- models ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two convolutions with a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.second(F.relu(self.first(x)))))


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), Block(8), Block(8))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(8 * 7 * 7, 5))

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(x)), torch.arange(len(x)) % 5)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)))
        self.gelu = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", norm_first=True)
        self.head = nn.Linear(16, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(len(x), -1, 16)
        x = self.gelu(self.blocks(x * 2))
        return F.cross_entropy(self.head(x).flatten(0, 1), torch.arange(x.shape[0] * x.shape[1]) % 7)


def trained(make: Callable[[], nn.Module], session: Session | None, steps: int = 3) -> list[Tensor | None]:
    """Gradients of each step, and the parameters after the last one."""
    torch.manual_seed(3)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found: list[Tensor | None] = []
    for step in range(steps):
        x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        with session or nullcontext():
            loss = model(x)
        loss.backward()
        found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return found + [p.detach().clone() for p in model.parameters()]


@pytest.fixture(params=["host", "disk", "link"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "host":
        yield HostStore()
    elif request.param == "disk":
        with DiskStore(tmp_path) as disk:
            yield disk
    else:
        yield LinkStore(HostStore(), 1e9, 1e-5)


@pytest.mark.parametrize("make", [Cnn, Transformer])
@pytest.mark.parametrize("policy", MAKERS)
def test_gradients_are_bit_equal(store: Store, policy: str, make: type[nn.Module]) -> None:
    session = Session(MAKERS[policy]("far"), stores={"far": store}, min_nbytes=0)
    assert not differences(trained(make, None), trained(make, session))
    assert store.usage().nbytes == session._live.nbytes == 0
    if make is Cnn:
        assert store.usage().peak_nbytes > 0
        assert session.report().moved_nbytes > 0 or policy == "vdnn-dyn"


@pytest.mark.parametrize("policy", ["offload", "vdnn", "vdnn_conv", "cdma", "layrub"])
def test_policies_by_name_move_to_the_store_that_every_session_has(policy: str) -> None:
    session = Session(policy, min_nbytes=0)
    assert not differences(trained(Cnn, None), trained(Cnn, session))
    assert session.stores["host"].usage().peak_nbytes > 0


# -- what is moved ---------------------------------------------------------------------------------------------------


def saved(key: str = "a/Relu#0:result", need: Need = Need.VALUE, dtype: torch.dtype = torch.float32) -> SavedTensor:
    op, role = key.partition("/")[2].replace("#0", "").split(":")
    return SavedTensor(key, op, role, "a", TensorSpec.of(torch.zeros(10, dtype=dtype)), need)


def moves(policy: Policy, one: SavedTensor) -> bool:
    action = policy.decide(one)
    assert isinstance(action, (Stash, Keep))
    return isinstance(action, Stash) and action.store == "host"


@pytest.mark.parametrize(
    ("key", "moved_by"),
    [
        ("a/Convolution#0:input", {"all", "conv"}),
        ("a/Relu#0:result", {"all"}),
        ("a/NativeBatchNorm#0:input", {"all"}),
        ("a/Addmm#0:mat1", set()),
        ("a/LogSoftmax#0:result", set()),
    ],
)
def test_vdnn_moves_feature_maps(key: str, moved_by: set[str]) -> None:
    assert {rule for rule in ("none", "conv", "all") if moves(Vdnn(rule), saved(key))} == moved_by  # type: ignore[arg-type]
    assert moves(Cdma(), saved(key)) is ("all" in moved_by)


def test_vdnn_dyn_moves_as_little_as_the_budget_allows() -> None:
    session_sizes = {}
    for budget in (0, 60_000, 1 << 30):
        session = Session(VdnnDyn(budget), min_nbytes=0)
        trained(Cnn, session, steps=1)
        all_of_it = session.report().moved_nbytes
        trained(Cnn, session, steps=2)
        session_sizes[budget] = session.report().moved_nbytes / all_of_it
    assert session_sizes[0] == 1.0
    assert session_sizes[1 << 30] == 0.0


def test_vdnn_dyn_moves_inputs_of_convolutions_if_that_is_enough() -> None:
    conv, session = Session(Vdnn("conv"), min_nbytes=0), Session(VdnnDyn(1), min_nbytes=0)
    trained(Cnn, conv, steps=1)
    rows = [row for row in conv.report().rows if row.reason != "held by the program, kept by reference"]
    moved = [row.stash_nbytes for row in rows if row.store == "host"]
    needed = sum(row.stash_nbytes for row in rows) - sum(moved) + 2 * max(moved)
    assert needed < sum(row.stash_nbytes for row in rows), "the test's model is too small"
    for budget, same in ((needed, True), (needed - 1, False)):
        session = Session(VdnnDyn(budget), min_nbytes=0)
        trained(Cnn, session, steps=2)
        assert (session.report().moved_nbytes == sum(moved)) is same


def test_vdnn_dyn_needs_a_budget() -> None:
    with pytest.raises(ValueError, match="'dyn' takes a budget"):
        policies.vdnn("dyn")
    with pytest.raises(ValueError, match="no other rule does"):
        policies.vdnn("all", budget=1)
    with pytest.raises(ValueError, match="0 or more"):
        VdnnDyn(-1)
    with pytest.raises(ValueError, match="there are none, conv, all"):
        policies.vdnn("some")  # type: ignore[arg-type]


def test_cdma_compresses_with_one_of_three_codecs() -> None:
    action = Cdma("rle").decide(saved())
    assert isinstance(action, Stash)
    assert [codec.id for codec in action.codecs] == ["rle", "raw"]
    with pytest.raises(ValueError, match="it compares zvc, rle, deflate"):
        policies.cdma("lz4")


def test_layrub_leaves_the_ends_where_they_are() -> None:
    session = Session(Layrub(), min_nbytes=0)
    trained(Cnn, session, steps=1)
    first = {row.key: row.store for row in session.report().rows if row.need in ("VALUE", "INDEX")}
    trained(Cnn, session, steps=2)
    rows = {row.key: row for row in session.report().rows}
    stayed = [key for key, store in first.items() if store == "host" and rows[key].store == "device"]
    assert len(stayed) == 3
    assert all(rows[key].reason == "Layrub does not move the first and the last two layers" for key in stayed)
    assert {row.store for row in rows.values() if row.codec == "bitmask"} <= {"host"}


def test_sums_are_moved_and_not_made_again_of_two_moved_values() -> None:
    session = Session(policies.offload(), min_nbytes=0)
    trained(Cnn, session, steps=1)
    rows = [row for row in session.report().rows if "it would begin from 2 stored values" in row.reason]
    assert rows
    assert all(row.store == "host" for row in rows)
    with pytest.raises(ValueError, match="max_inputs=0"):
        Recompute(max_inputs=0)


def test_what_is_moved_as_it_is_is_not_copied() -> None:
    class Noting(HostStore):
        def put(self, encoded: Encoded) -> Ticket:
            addresses.add(encoded.planes["values"].data_ptr())
            return super().put(encoded)

    addresses: set[int] = set()
    made: list[int] = []
    model = chain()
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: made.append(output.data_ptr()))
    session = Session(policies.vdnn(), stores={"host": Noting()}, min_nbytes=0)
    step(session, model, torch.randn(16, 64))
    assert len(addresses) >= 7
    assert addresses <= set(made)


def test_who_may_write_into_a_value_gets_a_copy() -> None:
    """It cannot damage what is stored; that it has written is an error for the next reader, as in plain PyTorch."""

    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            seen.append(x.clone())
            x.zero_()
            return 2 * grad

    seen: list[Tensor] = []
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    with Session(Moves(), min_nbytes=0) as session:
        loss = Writes.apply(torch.tanh(layer(x))).sum()
    assert session.report().moved_nbytes > 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(retain_graph=True)
    assert not differences([torch.tanh(layer(x)).detach()], seen)
    plain = Writes.apply(torch.tanh(layer(x))).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain.backward(retain_graph=True)


class Moves:
    """Moves everything as it is."""

    recomputes = False

    def decide(self, saved: SavedTensor) -> Action:
        return Stash(Raw(), "host")

    def observe(self, outcome: Outcome) -> None:
        pass


def test_a_store_that_is_not_there_is_named() -> None:
    with pytest.raises(UnknownNameError, match=r"store 'disk' was asked for by .*there are device, host.*stores="):
        trained(Cnn, Session(policies.offload(store="disk"), min_nbytes=0))


# -- in which order values come back ---------------------------------------------------------------------------------


class Recorder(HostStore):
    """Notes what is asked of it, by the number that a value has in its step."""

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


def chain(width: int = 64, depth: int = 8) -> nn.Sequential:
    layers = (layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh()))
    return nn.Sequential(*layers)


def step(session: Session, model: nn.Module, x: Tensor) -> None:
    with session:
        loss = model(x).sum()
    loss.backward()


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
    """Takes a second of a clock, in both directions."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.sleep(1.0)
        x.register_hook(lambda gradient: self.clock.sleep(1.0))
        return x


def hidden(policy: Policy, widths: list[int], busy: float) -> float:
    """The share of the transfers that a chain of such layers does not wait for, where the link is that busy."""
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

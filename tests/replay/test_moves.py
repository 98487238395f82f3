"""A replayed pass moves values as the long way does: the same calls of the store, in the same order, and the same peak.

Each case trains twice, with replaying switched off and on, and everything that can be seen from outside is compared.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backstash as bs
from backstash import Encoded, Session, policies
from backstash.capture import learned
from backstash.codecs import Raw, Zvc
from backstash.errors import DamagedPlanesError, StoreFullError
from backstash.policies import Action, Keep, Policy, Stash
from backstash.proofs import proofs
from backstash.saved import Need, SavedTensor
from backstash.stash import seams
from backstash.stores import DeviceStore, DiskStore, HostStore, Store, Ticket, TierStore
from bench.link import LinkStore
from tests.gradients.offload_checks import Cnn, Transformer

STEPS = learned.EQUAL_PASSES + 3
"""Steps after which a pass is known."""

SEEN = 3
"""Steps after these that are compared."""

Backward = Callable[[Tensor], object]


class Noting:
    """Any store, and what it was asked for in a step; values have the numbers in which they were put."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.calls: list[tuple[str, int]] = []
        self.fails_at = -1
        self._numbers: dict[int, int] = {}

    def begin(self) -> None:
        self.calls.clear()
        self._numbers.clear()

    def _note(self, call: str, ticket: Ticket) -> None:
        self.calls.append((call, self._numbers.get(id(ticket), -1)))

    def put(self, encoded: Encoded) -> Ticket:
        if len(self._numbers) == self.fails_at:
            raise StoreFullError("there is no room")
        ticket = self.store.put(encoded)
        self._numbers[id(ticket)] = len(self._numbers)
        self.calls.append(("put", ticket.nbytes))
        return ticket

    def prefetch(self, ticket: Ticket) -> None:
        self._note("prefetch", ticket)
        self.store.prefetch(ticket)

    def get(self, ticket: Ticket) -> Encoded:
        self._note("get", ticket)
        return self.store.get(ticket)

    def drop(self, ticket: Ticket) -> None:
        self._note("drop", ticket)
        self.store.drop(ticket)

    def usage(self) -> Any:
        return self.store.usage()


@dataclass
class Seen:
    """What was seen of a step from outside."""

    gradients: list[Tensor] = field(default_factory=list)
    calls: list[tuple[str, int]] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    error: str = ""


class Training:
    """A network and its Session, whose passes are replayed or not."""

    def __init__(
        self,
        policy: Policy,
        make: Callable[[], nn.Module] = Cnn,
        store: Store | None = None,
        replays: bool = True,
        name: str = "far",
    ) -> None:
        torch.manual_seed(3)
        self.model = make()
        self.store = Noting(store or HostStore())
        with pytest.MonkeyPatch.context() as patch:
            if not replays:
                patch.setattr(seams, "replays", None)
            self.session = Session(policy, model=self.model, stores={name: self.store}, min_nbytes=0)
        self.number = 0

    @property
    def live_nbytes(self) -> int:
        beside = self.session._live.beside
        return self.session._live.nbytes + (0 if beside is None else beside()[0])

    def step(self, backward: Backward = Tensor.backward, x: Tensor | None = None) -> Seen:
        """A step, of which an error that the library raises is noted."""
        seen = Seen()
        self.store.begin()
        self.model.zero_grad()
        torch.manual_seed(self.number)
        if x is None:
            x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(self.number))
        self.number += 1
        try:
            with self.session:
                loss = self.model(x)
            seen.held.append(self.live_nbytes)
            backward(loss)
        except bs.BackstashError as error:
            seen.error = str(error)
        seen.gradients = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        report = self.session.report()
        loss = None  # type: ignore[assignment]
        gc.collect()
        seen.calls = [call for call in self.store.calls if call[0] != "drop"]
        seen.drops = sorted(number for call, number in self.store.calls if call == "drop")  # of a graph, in any order
        seen.held += [report.peak_stash_nbytes, self.live_nbytes, self.store.usage().nbytes]
        seen.rows = [_facts(row) for row in report.rows]
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
        return seen


def _facts(row: Any) -> tuple[Any, ...]:
    return row.key, row.codec, row.reason, row.saved_nbytes, row.stash_nbytes, row.shared_by, row.decodes, row.store


def compare(
    make_policy: Callable[[], Policy],
    backward: Backward = Tensor.backward,
    *,
    make: Callable[[], nn.Module] = Cnn,
    store: Callable[[], Store] = HostStore,
    prepare: Callable[[Training, int], None] = lambda training, step: None,
    steps: int = STEPS,
    ignores: tuple[str, ...] = (),
) -> Training:
    """Trains on the long way and replayed; returns the latter."""
    trainings = [Training(make_policy(), make, store(), replays) for replays in (False, True)]
    found: list[list[Seen]] = []
    for training in trainings:
        proofs.forget()
        for _ in range(steps):
            training.step()
        runs = training.session._names.learned.passes.runs
        seen = []
        for step in range(SEEN):
            prepare(training, step)
            seen.append(training.step(backward))
        found.append(seen)
        is_replayed = training.session._names.learned.passes.runs > runs
        assert is_replayed == (training is trainings[1]), training.session._names.learned.passes.refusal
    for long, replayed in zip(*found, strict=True):
        assert long.error == replayed.error
        assert len(long.gradients) == len(replayed.gradients)
        assert all(x.equal(y) for x, y in zip(long.gradients, replayed.gradients, strict=True))
        for name in ("calls", "drops", "held", "rows"):
            if name not in ignores:
                assert getattr(long, name) == getattr(replayed, name), name
    return trainings[1]


MAKERS: dict[str, Callable[[], Policy]] = {
    "offload": lambda: policies.offload(store="far"),
    "offload-stored": lambda: policies.offload(store="far", recompute=False),
    "offload-dense": lambda: policies.offload(store="far", recompute=False, dense=True),
    "offload-deflate": lambda: policies.offload("deflate", "far"),
    "offload-ahead": lambda: policies.offload(store="far", ahead=1),
    "vdnn": lambda: policies.vdnn(store="far"),
    "vdnn-conv": lambda: policies.vdnn("conv", "far"),
    "cdma-zvc": lambda: policies.cdma(store="far"),
    "cdma-rle": lambda: policies.cdma("rle", "far"),
}


@pytest.fixture(params=["host", "disk", "link", "tiers"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Opens stores of one kind."""
    disks: list[DiskStore] = []

    def disk() -> DiskStore:
        disks.append(DiskStore(tmp_path))
        return disks[-1]

    kinds: dict[str, Callable[[], Store]] = {
        "host": HostStore,
        "disk": disk,
        "link": lambda: LinkStore(HostStore(), 1e9, 1e-5),
        "tiers": lambda: TierStore([DeviceStore(capacity=8000), HostStore(capacity=4000), disk()]),
    }
    yield kinds[request.param]
    for each in disks:
        each.close()


@pytest.mark.parametrize("make", [Cnn, Transformer])
@pytest.mark.parametrize("policy", MAKERS)
def test_a_replayed_step_moves_what_the_long_way_moves(policy: str, make: type[nn.Module]) -> None:
    if (policy, make) == ("vdnn-conv", Transformer):
        pytest.skip("it moves inputs of convolutions alone, so there is nothing to replay")
    # Two trainings of the transformer differ on the long way as well: when the program lets go of small tensors.
    noisy = ("calls", "drops", "rows", "held") if make is Transformer else ()
    training = compare(MAKERS[policy], make=make, ignores=noisy)
    if make is Cnn:
        assert "Move(far, " in training.session.report().programs()
    assert training.live_nbytes == training.store.usage().nbytes == 0


@pytest.mark.cases(4)
@pytest.mark.parametrize("policy", ["offload", "vdnn"])
def test_whatever_the_store_is(policy: str, opened: Callable[[], Store]) -> None:
    compare(MAKERS[policy], store=opened)


def test_programs_say_what_is_moved_and_when_it_is_fetched() -> None:
    training = Training(policies.offload(store="far"))
    for _ in range(STEPS):
        training.step()
    text = training.session.report().programs()
    assert "Move(far, raw)" in text and "Move(far, bitmask)" in text
    *_, fetched, alone = text.splitlines()
    assert alone == "0 values went the long way alone in the latest pass"
    assert fetched.startswith("fetched in this order: v")
    moved = [line.split()[0] for line in text.splitlines() if "Move(" in line]
    assert set(fetched.removeprefix("fetched in this order: ").split(", ")) == set(moved)


def twice(loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def half(loss: Tensor) -> None:
    """Reads what is saved last, and drops the rest of the graph."""
    loss.grad_fn.next_functions[0][0](torch.ones_like(loss))  # type: ignore[union-attr]


def nothing(loss: Tensor) -> None:
    """Drops the graph."""


@pytest.mark.parametrize("policy", ["offload", "offload-stored", "vdnn"])
@pytest.mark.parametrize("backward", [twice, nothing])
def test_whatever_becomes_of_the_graph(policy: str, backward: Backward) -> None:
    compare(MAKERS[policy], backward)


def test_a_store_that_is_full_is_the_same_error() -> None:
    def fails(training: Training, step: int) -> None:
        training.store.fails_at = 3 if step == 1 else -1

    compare(MAKERS["offload"], prepare=fails, ignores=("calls", "drops", "rows", "held"))


class Damaging(HostStore):
    """Brings back the wrong number of bytes when it is told to."""

    damages = False

    def get(self, ticket: Ticket) -> Encoded:
        if Damaging.damages:
            raise DamagedPlanesError("other bytes came back")
        return super().get(ticket)


def test_damaged_planes_are_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(training: Training, step: int) -> None:
        monkeypatch.setattr(Damaging, "damages", step == 1)

    training = compare(MAKERS["offload"], store=Damaging, prepare=damage, ignores=("calls", "drops"))
    assert training.live_nbytes == training.store.usage().nbytes == 0


def test_a_forward_pass_that_fails_leaves_nothing_in_the_store() -> None:
    class Failing(Cnn):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.features(x)
            if self.fails:
                raise StoreFullError("the program's own error")
            return nn.functional.cross_entropy(self.classifier(x), torch.arange(len(x)) % 5)

    def fail(training: Training, step: int) -> None:
        training.model.fails = step == 1  # type: ignore[assignment]

    training = compare(MAKERS["offload"], make=Failing, prepare=fail, ignores=("rows",))
    assert training.live_nbytes == training.store.usage().nbytes == 0
    assert training.session._replaying.alive == 0


class Choosing(Zvc):
    """Takes a value in some steps and declines it in others."""

    takes = True

    def declines(self, x: Tensor) -> str | None:
        return None if Choosing.takes else "not today"


class OneCodec(Policy):
    """Moves what convolutions read by a codec that may decline it."""

    is_fixed = True

    def decide(self, saved: SavedTensor) -> Action:
        return Stash((Choosing(), Raw()), "far") if saved.need is Need.VALUE else Keep()


def test_a_codec_that_declines_sends_the_value_the_long_way_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Choosing, "takes", True)

    def decline(training: Training, step: int) -> None:
        monkeypatch.setattr(Choosing, "takes", step != 1)

    training = compare(OneCodec, prepare=decline)
    assert training.session._names.learned.passes.misses == 0

    Choosing.takes = False
    training.step()
    assert "10 values went the long way alone" in training.session.report().programs()


def test_a_session_for_each_step_moves_to_its_own_store() -> None:
    torch.manual_seed(0)
    model = Cnn()
    x = torch.randn(4, 3, 16, 16)
    for _ in range(STEPS + 2):
        store = Noting(HostStore())
        each = Session(policies.offload(store="far"), model=model, stores={"far": store}, min_nbytes=0)
        with each:
            loss = model(x)
        loss.backward()
        del loss
        assert store.calls and store.usage().nbytes == 0
    assert each._is_replayed


def test_a_graph_outlives_its_session() -> None:
    training = Training(policies.offload(store="far"))
    for _ in range(STEPS):
        training.step()
    x = torch.randn(4, 3, 16, 16)
    torch.manual_seed(1)
    with training.session as entered:
        loss = training.model(x)
    assert training.session._is_replayed
    torch.manual_seed(1)
    parameters = list(training.model.parameters())
    expected = torch.autograd.grad(training.model(x), parameters, allow_unused=True)
    store = training.store
    del entered
    training.session = None  # type: ignore[assignment]
    gc.collect()
    got = torch.autograd.grad(loss, parameters, allow_unused=True)
    assert all(a is b is None or a.equal(b) for a, b in zip(expected, got, strict=True))  # type: ignore[union-attr]
    del loss
    gc.collect()
    assert store.usage().nbytes == 0


def penalty(loss: Tensor) -> None:
    """A backward pass that is differentiated itself."""
    leaves = [leaf for leaf in _leaves(loss) if leaf.requires_grad]
    gradients = torch.autograd.grad(loss, leaves, create_graph=True)
    (loss + sum(gradient.square().sum() for gradient in gradients)).backward()


def _leaves(loss: Tensor) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        nodes += [] if node is None else [following for following, _ in node.next_functions]
    return list(found.values())


class Smooth(nn.Module):
    """A network that can be differentiated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Sigmoid(), nn.Conv2d(8, 8, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Returns a loss."""
        return self.layers(x).square().mean()


@pytest.mark.parametrize("policy", ["offload-stored", "vdnn"])
def test_a_backward_pass_with_a_graph_holds_what_it_has_read(policy: str) -> None:
    training = compare(MAKERS[policy], penalty, make=Smooth, ignores=("rows",))
    assert training.live_nbytes == training.store.usage().nbytes == 0

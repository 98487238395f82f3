"""Encodings and comparisons of which the host does not know the outcome at once: no bit is lost, no error is silent."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstash as bs
from backstash.codecs import (
    BlockQuant,
    Codec,
    Csr,
    Exponents,
    FewBit,
    Minifloat,
    Narrow,
    Signed,
    Sz,
    Szp,
    Upcast,
    Zvc,
    signed,
)
from backstash.codecs.csr import codec as csr
from backstash.codecs.exponents import codec as exponents
from backstash.codecs.sliced import Sliced
from backstash.codecs.sz.codec import KeptModel
from backstash.codecs.szp import codec as szp
from backstash.codecs.zvc import codec as zvc
from backstash.errors import DamagedPlanesError, RecomputedDifferentlyError
from backstash.remake.remaking import REPEAT
from backstash.replay.replaying import PERIOD
from backstash.saved import SavedTensor
from backstash.stash import comparing, drafts
from tests.device import fake

EXACT: dict[str, Codec] = {
    "zvc": Zvc(),
    "csr": Csr(),
    "exponents": Exponents(3),
    "upcast": Upcast(),
    "upcast exponents": Upcast(Exponents(3)),
    "sliced": Sliced(Zvc(), 3),
}
LOSSY: dict[str, Codec] = {
    "zvc+fp8": Zvc(values=Minifloat("fp8")),
    "zvc+fp10": Zvc(values=Minifloat("fp10")),
    "csr+fp16": Csr(values=Minifloat("fp16")),
    "blockquant": BlockQuant(4),
    "signed": Signed(BlockQuant(4)),
    "signed slices": Sliced(Signed(BlockQuant(4)), 2),
    "szp": Szp(0.01),
}
CODECS = EXACT | LOSSY

SHARES = (0.1, 0.1, 0.1, 0.6, 0.6, 0.05, 0.05, 0.3, 0.0, 0.1)
"""The share of an input's elements that are not zero, step by step: sometimes many more than in the step before."""


class One(bs.Policy):
    """Stores every value that a linear layer reads with one codec."""

    is_fixed = True
    recomputes = False

    def __init__(self, codec: Codec, store: str = "device") -> None:
        self.codec, self.store = codec, store
        self.codecs: dict[str, Codec] = {}

    def decide(self, saved: SavedTensor) -> bs.policies.Action:
        if saved.op == "Mm" and saved.need is bs.Need.VALUE:
            codec = self.codecs.setdefault(saved.key, copy.deepcopy(self.codec))  # each place has its own model
            return bs.policies.Stash(codec, self.store)
        return bs.policies.Keep()


def _given(step: int, share: float) -> Tensor:
    """An input of bfloat16 numbers, of both signs, or of one where the step's number says so."""
    maker = torch.Generator().manual_seed(step)
    x = torch.randn(128, 64, generator=maker).bfloat16().float()
    if step % 3 == 0:
        x = x.abs()
    return torch.where(torch.rand(128, 64, generator=maker) < share, x, 0.0)


class Layers:
    """Some linear layers, each of an input of its own that nobody but autograd holds, and their gradients."""

    def __init__(self, policy: bs.Policy | None, count: int = 3) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 8, bias=False) for _ in range(count)).to("fake")
        self.session = None if policy is None else bs.Session(policy, model=self.layers, min_nbytes=0)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        total = torch.zeros((), device="fake")
        for layer, x in zip(self.layers, inputs, strict=True):
            total = total + layer(x * 1.0).square().sum()
        return total

    def step(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        self.layers.zero_grad()
        with self.session or nullcontext():
            loss = self.forward(inputs)
        loss.backward()
        return [layer.weight.grad for layer in self.layers]  # type: ignore[misc]

    def train(self, late: int | None, shares: Sequence[float] = SHARES) -> list[Tensor]:
        """Returns the gradients of all steps, which run late with that seed."""
        found = []
        for step, share in enumerate(shares):
            inputs = [_given(step + 100 * at, share).to("fake") for at in range(len(self.layers))]
            if late is None:
                found += self.step(inputs)
            else:
                with fake.late(late + step):
                    found += self.step(inputs)
        return [gradient.cpu() for gradient in found]


def _equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("store", ["device", "host"])
@pytest.mark.parametrize("codec", list(EXACT))
def test_values_that_need_more_room_than_was_expected_keep_every_bit(codec: str, store: str) -> None:
    expected = Layers(None).train(None)
    assert _equal(Layers(One(EXACT[codec], store)).train(None), expected)
    for seed in range(4):
        assert _equal(Layers(One(EXACT[codec], store)).train(10 * seed), expected), seed


@pytest.mark.parametrize("store", ["device", "host"])
@pytest.mark.parametrize("codec", list(LOSSY))
def test_what_is_rounded_does_not_depend_on_how_late_the_device_is(codec: str, store: str) -> None:
    expected = Layers(One(LOSSY[codec], store)).train(None)
    for seed in range(3):
        assert _equal(Layers(One(LOSSY[codec], store)).train(10 * seed), expected), seed


@pytest.mark.parametrize("codec", [*CODECS])
def test_drafts_have_the_bits_of_encodings_made_with_a_wait(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = (0.3,) * 5
    found = Layers(One(CODECS[codec])).train(None, shares)[6:]  # both signs come in the second step
    monkeypatch.setattr("backstash.stash.looking.drafting", lambda codec: None)
    assert _equal(found, Layers(One(CODECS[codec])).train(None, shares)[6:])


@pytest.mark.parametrize(
    "codec", ["zvc", "csr", "exponents", "upcast exponents", "sliced", "zvc+fp10", "signed", "signed slices", "szp"]
)
def test_no_value_is_lost_where_there_is_never_room_enough(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (zvc, csr, exponents, signed, szp):
        monkeypatch.setattr(module, "room_for", lambda known, most: max(1, known // 2))
    shares = (0.3,) * 5
    expected = Layers(None).train(None, shares)[3:]  # the first step encodes with a wait, and may round
    for late in (None, 1, 2):
        layers = Layers(One(CODECS[codec]))
        assert _equal(layers.train(late, shares)[3:], expected)
        assert layers.session is not None
        rows = [row for row in layers.session.report().rows if row.codec == "kept" and "Mm" in row.key]
        assert len(rows) == 3 and all("room for" in row.reason or "before it is known" in row.reason for row in rows)


@pytest.mark.parametrize("late", [None, 3])
@pytest.mark.parametrize("codec", ["upcast", "upcast exponents"])
def test_numbers_that_a_place_did_not_have_before_are_kept(codec: str, late: int | None) -> None:
    def train(layers: Layers) -> list[Tensor]:
        found = []
        for step in range(8):
            inputs = [_given(step + 100 * at, 0.5) for at in range(len(layers.layers))]
            if step in (3, 4):
                inputs[1][100, 7] += 1e-6
            with nullcontext() if late is None else fake.late(late + step):
                found += layers.step([x.to("fake") for x in inputs])
        return [gradient.cpu() for gradient in found]

    layers = Layers(One(CODECS[codec]))
    assert _equal(train(layers), train(Layers(None)))


@pytest.mark.parametrize("codec", ["zvc", "sliced", "signed", "szp"])
def test_the_next_draft_has_more_room(codec: str) -> None:
    layers = Layers(One(CODECS[codec]))
    assert layers.session is not None
    kept = []
    for share in (0.1, 0.1, 0.6, 0.6):
        layers.train(None, (share,))
        kept.append(sum(row.codec == "kept" and "Mm" in row.key for row in layers.session.report().rows))
    assert kept == [0, 0, 3, 0]


@pytest.mark.parametrize("codec", [*CODECS])
def test_no_step_waits_once_a_place_is_known(codec: str) -> None:
    layers = Layers(One(CODECS[codec]))
    assert layers.session is not None
    layers.train(None, (0.3,) * 6)
    for step in range(12):
        inputs = [_given(6 + step + 100 * at, 0.3).to("fake") for at in range(len(layers.layers))]
        with fake.counting() as counts:
            layers.step(inputs)
        assert counts.waits == 0, (step, counts.lines("waits"))


def test_slices_of_another_number_keep_every_bit() -> None:
    """A small batch has a slice for each sample, and the next one may have more of them."""
    batches = 128, 2, 128, 5, 1, 3, 64, 128

    def gradients(layers: Layers) -> list[Tensor]:
        found = []
        for step, batch in enumerate(batches):
            inputs = [_given(step + 100 * at, 0.3)[:batch].to("fake") for at in range(len(layers.layers))]
            found += [gradient.cpu() for gradient in layers.step(inputs)]
        return found

    assert _equal(gradients(Layers(One(Sliced(Zvc(), 4)))), gradients(Layers(None)))


@pytest.mark.parametrize("late", [None, 3])
@pytest.mark.parametrize("codec", [BlockQuant(4), Signed(BlockQuant(4)), FewBit("gelu")])
def test_numbers_that_are_not_finite_are_refused_later(codec: Codec, late: int | None) -> None:
    """As they come the value is held as it is; the next one is encoded with a wait, and those after it without."""

    class Curved(One):
        def decide(self, saved: SavedTensor) -> bs.policies.Action:
            return bs.policies.Stash(self.codec) if saved.op == "Gelu" else bs.policies.Keep()

    def gradients(session: bs.Session | None) -> list[Tensor]:
        torch.manual_seed(0)
        found = []
        for step in range(6):
            x = torch.rand(64, 64, requires_grad=True)
            given = (x + 0.5).detach()
            if step == 2:
                given[3, 5] = math.nan
            y = given.to("fake").requires_grad_()
            with fake.late(step + (late or 0)) if late is not None else torch.enable_grad():
                with session or nullcontext():
                    loss = F.gelu(y * 1.0).sum()
                loss.backward()
            assert y.grad is not None
            found.append(y.grad.cpu())
        return found

    plain, session = gradients(None), bs.Session(Curved(codec), min_nbytes=0)
    rounded = gradients(session)
    assert torch.equal(rounded[2].isnan(), plain[2].isnan())
    assert torch.equal(rounded[2].nan_to_num(), plain[2].nan_to_num())
    for step in (0, 1, 3, 4, 5):
        assert not torch.equal(rounded[step], plain[step])


def test_integers_out_of_the_known_range_keep_every_bit() -> None:
    class Integers(bs.Policy):
        is_fixed = True

        def decide(self, saved: SavedTensor) -> bs.policies.Action:
            return bs.policies.Stash(Narrow()) if saved.op == "Gather" else bs.policies.Keep()

    def gradients(session: bs.Session | None, late: bool) -> list[Tensor]:
        found = []
        for step, (low, high) in enumerate([(5, 9), (5, 9), (4, 9), (0, 63), (0, 63), (7, 8)]):
            torch.manual_seed(step)
            x = torch.rand(64, 64).to("fake").requires_grad_()
            index = torch.randint(low, high, (64, 64)).to("fake")
            with fake.late(step) if late else torch.enable_grad():
                with session or nullcontext():
                    loss = x.gather(1, index * 1).square().sum()
                loss.backward()
            assert x.grad is not None
            found.append(x.grad.cpu())
        return found

    for late in (False, True):
        assert _equal(gradients(bs.Session(Integers(), min_nbytes=0), late), gradients(None, False))


def test_dense_values_are_freed_as_soon_as_their_planes_are_known_to_be_whole() -> None:
    layers = Layers(One(Zvc()))
    layers.train(None, (0.1, 0.1))
    assert layers.session is not None
    inputs = [_given(at, 0.1).to("fake") for at in range(3)]
    before = torch.accelerator.memory_allocated()
    with layers.session:
        loss = layers.forward(inputs)
    held = torch.accelerator.memory_allocated() - before
    assert held < 0.5 * sum(x.nbytes for x in inputs)
    loss.backward()


def test_no_more_dense_values_are_held_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Layers(One(Zvc()), count=12)
    layers.train(None, (0.1, 0.1))
    assert layers.session is not None
    value = 128 * 64 * 4
    monkeypatch.setattr(drafts, "IN_FLIGHT", 3 * value)
    most = []
    add = drafts.Drafts.add

    def watched(self: drafts.Drafts, *given: Any) -> None:
        add(self, *given)
        most.append(self._nbytes)

    monkeypatch.setattr(drafts.Drafts, "add", watched)
    with fake.late(0, delay=400.0):
        layers.train(None, (0.1, 0.1))
    assert value < max(most) <= 3 * value


class Counted(One):
    """As One, for which there are so many bytes of dense values."""

    def __init__(self, codec: Codec, in_flight: int) -> None:
        super().__init__(codec)
        self.in_flight = in_flight

    def in_flight_for(self, key: str) -> int:
        return self.in_flight


VALUE = 128 * 64 * 4
"""Bytes of an input of :class:`Layers`."""


@pytest.mark.parametrize("codec", list(CODECS))
def test_what_lacks_room_is_encoded_again_where_bytes_are_counted(codec: str) -> None:
    layers, usual = Layers(Counted(CODECS[codec], 4 * VALUE)), Layers(One(CODECS[codec]))
    assert layers.session is not None and usual.session is not None
    for share in SHARES:
        found, expected = layers.train(None, (share,)), usual.train(None, (share,))
        if codec in EXACT:
            assert _equal(found, expected)
        assert not any("room for" in row.reason for row in layers.session.report().rows)


@pytest.mark.parametrize("in_flight", [VALUE, 2 * VALUE])
@pytest.mark.parametrize("codec", list(EXACT))
def test_no_bit_is_lost_where_bytes_are_counted(codec: str, in_flight: int) -> None:
    expected = Layers(None, count=6).train(None)
    for seed in range(4):
        assert _equal(Layers(Counted(EXACT[codec], in_flight), count=6).train(10 * seed), expected), seed


@pytest.mark.parametrize("in_flight", [0, VALUE - 1, VALUE, 3 * VALUE])
def test_a_policy_that_counts_bytes_says_how_many_are_held(in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Layers(Counted(Zvc(), in_flight), count=8)
    layers.train(None, (0.1, 0.1))
    most = [0]
    add = drafts.Drafts.add

    def watched(self: drafts.Drafts, *given: Any) -> None:
        add(self, *given)
        most.append(self._nbytes)

    monkeypatch.setattr(drafts.Drafts, "add", watched)
    with fake.late(0, delay=400.0):
        layers.train(None, (0.1, 0.1))
    assert max(most) <= in_flight
    assert (len(most) > 1) == (in_flight >= VALUE)  # what is larger is encoded at once


# -- comparisons -------------------------------------------------------------------------------------------------------


def _changed(late: int | None) -> tuple[bs.Session, Any]:
    """Trains with a value that is changed where no observer looks, in the second step."""
    torch.manual_seed(0)
    first, second = nn.Linear(64, 64).to("fake"), nn.Linear(64, 64).to("fake")
    session = bs.Session("lossless", min_nbytes=0)

    def step(number: int, unseen: bool) -> None:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(number)).to("fake")
        with session:
            y = F.gelu(first(x))
            loss = second(y).square().sum()
            if unseen:
                with torch._C.DisableTorchFunction():
                    y.data.clamp_max_(0.1)
            del y
        loss.backward()

    step(0, False)
    step(1, False)
    if late is None:
        step(2, True)
    else:
        with fake.late(late, delay=200.0):
            step(2, True)
    return session, step


def test_what_is_remade_with_other_bits_is_an_error_of_its_pass_where_the_device_is_not_behind() -> None:
    with pytest.raises(RecomputedDifferentlyError, match="mat1 .*do not use those of the backward pass that read it"):
        _changed(None)


@pytest.mark.parametrize("by", ["step", "report"])
def test_it_is_an_error_of_the_next_call_where_the_device_is_behind(by: str) -> None:
    passed = 0
    for seed in range(6):
        try:
            session, step = _changed(seed)
        except RecomputedDifferentlyError:
            continue  # the device was not so late
        passed += 1
        assert session._live.comparisons._outcomes
        with pytest.raises(RecomputedDifferentlyError, match="mat1 .*do not use those of the backward pass"):
            step(3, False) if by == "step" else session.report()
        step(3, False)  # what failed is stored from now on, and said once
        session.report()
    assert passed


def test_a_proof_that_is_repeated_does_not_wait_and_an_error_names_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to("fake")
    session = bs.Session("lossless", model=layer, min_nbytes=0, stop_if_useless=False)

    def step() -> None:
        with session:
            loss = layer(torch.ones(32, 64, device="fake")).square().sum()
        loss.backward()

    for _ in range(4):
        step()
    repeated = []
    check_again = comparing.check_again
    monkeypatch.setattr(
        "backstash.remake.remaking.check_again", lambda *given: (repeated.append(given), check_again(*given))
    )
    for _ in range(REPEAT + PERIOD):  # a replayed pass proves nothing, but one in a period is not replayed
        with fake.counting() as counts:
            step()
        assert counts.waits == 0, counts.lines("waits")
    assert repeated
    value, recipe, different = repeated[0]
    session._live.comparisons.add_different(different, lambda: "unused")  # nothing differs
    with pytest.raises(RecomputedDifferentlyError, match="backward needs"):
        check_again(value, recipe, torch.ones_like(different))


def _sz() -> Layers:
    return Layers(One(Sz(0.01, kept=KeptModel())), count=1)


@pytest.mark.slow  # the reference of sz is a loop over elements
def test_sz_has_the_same_bits_when_the_device_is_late_and_when_there_is_no_room() -> None:
    shares = (0.2, 0.2, 0.5)
    assert _equal(_sz().train(4, shares), _sz().train(None, shares))


@pytest.mark.parametrize("late", [None, 1])
def test_damage_is_an_error_with_the_value_s_name(late: int | None) -> None:
    layers = _sz()
    layers.train(None, (0.3, 0.3))
    session = layers.session
    assert session is not None
    inputs = [_given(0, 0.3).to("fake")]
    with session:
        loss = layers.forward(inputs)
    ((*_, encoded),) = [list(store._values.values()) for store in (session.stores["device"],)]  # type: ignore[attr-defined]
    encoded.planes["stream"][3] ^= 1
    with fake.late(late, delay=200.0) if late is not None else torch.enable_grad():
        with pytest.raises(DamagedPlanesError, match="Mm#0:self: .*checksums agree.*do not use those of"):
            loss.backward()
            layers.step(inputs)
    layers.step(inputs)

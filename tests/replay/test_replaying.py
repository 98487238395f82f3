"""A replayed pass is as one that goes the long way: bits, bytes, reports; one that differs is given back."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstash as bs
from backstash import Session, policies
from backstash.capture import learned
from backstash.codecs import Minifloat, Zvc
from backstash.errors import DamagedPlanesError, RecomputedDifferentlyError, SavedTensorModifiedError
from backstash.ops.cpu import library
from backstash.planning.search.planner import Planner
from backstash.policies import Action, Keep, Policy, Recompute, Stash
from backstash.redeem import accumulation, exclusive, linear, table
from backstash.remake.remaking import REPEAT
from backstash.replay import recorder, replaying
from backstash.replay.program import CallTree
from backstash.saved import Need, SavedTensor
from backstash.stash import seams
from tests.networks import families
from tests.networks.resnet import resnet
from tests.replay.twins import MIN_NBYTES, STEPS, Twin, copy_of, costly

Loss = Callable[[], Tensor]


class Block(nn.Module):
    """Layers whose results are made again, stored as masks, held; the test says what it computes in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])
        self.act: Callable[[Tensor], Tensor] = F.relu

    def forward(self, x: Tensor) -> Tensor:
        """Two layers, a pooling and a sum."""
        x = self.act(self.norms[0](self.first(x)))
        y = self.act(self.norms[1](self.second(x)) + x)
        return F.max_pool2d(y, 2).square().mean()


def images(batch: int = 4, size: int = 16) -> Tensor:
    return torch.randn(batch, 4, size, size, generator=torch.Generator().manual_seed(batch))


@pytest.fixture
def twin() -> Twin:
    torch.manual_seed(0)
    return Twin(Block())


def _of_pictures() -> tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]:
    batch = {"pictures": torch.randn(4, 3, 64, 64), "classes": torch.randint(10, (4,))}
    return (
        resnet(num_classes=10, width=16),
        batch,
        lambda model, given: F.cross_entropy(model(given["pictures"]), given["classes"]),
    )


def _of_text(name: str) -> tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]:
    size = families.Size(layers=2, width=64, tokens=64, image=32, batch=4)
    model, batch = getattr(families, name)(size)
    return model, batch, lambda network, given: network(**given).loss


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
@pytest.mark.parametrize("policy", ["lossless", "lossless_stored", "gist_lossless", "gist_fp8", "quantized"])
@pytest.mark.parametrize("network", ["resnet50", "gpt2", "llama"])
def test_a_replayed_step_is_as_one_that_goes_the_long_way(network: str, policy: str, dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model, batch, loss_of = _of_pictures() if network == "resnet50" else _of_text(network)

    def gradients(session: Any) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        with session, torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = loss_of(model, batch)
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = [grad.clone() for grad in gradients(_nothing())]
    session = Session(policy, model=model, min_nbytes=MIN_NBYTES, stop_if_useless=False)
    is_exact = policies.describe(policy).is_exact
    reports = []
    for _ in range(STEPS + 3):
        found = gradients(session)
        if not is_exact and not session._is_replayed:  # in the first steps it is decided which values are rounded
            expected = [grad.clone() for grad in found]
        assert all(x.equal(y) for x, y in zip(found, expected, strict=True))
        reports.append((session._is_replayed, session.report(), session._live.peak_nbytes))
    if session._forward.is_idle:
        return
    known = [report for is_replayed, report, _ in reports if is_replayed]
    if session._names.learned.passes.refusal:  # it says so, and nothing was lost
        assert not known
        assert session._names.learned.passes.refusal in reports[-1][1].programs()
        return
    assert known
    before = next(report for is_replayed, report, _ in reversed(reports) if not is_replayed)
    for report in known:
        assert [_facts(row) for row in report.rows] == [_facts(row) for row in before.rows]
        assert report.peak_stash_nbytes == before.peak_stash_nbytes
    assert session._replaying.alive == session._replaying.nbytes == 0


def _facts(row: Any) -> tuple[Any, ...]:
    return row.key, row.codec, row.saved_nbytes, row.stash_nbytes, row.shared_by, row.decodes


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def test_programs_are_printed(twin: Twin) -> None:
    assert "until" in twin.session.report().programs()
    twin.settle(images())
    text = twin.session.report().programs()
    assert "Remake(relu(batch_norm))" in text
    assert "Encode(bitmask)" in text
    assert "Hold(" in text


def test_a_session_that_is_asked_settles_in_two_passes(twin: Twin) -> None:
    twin.step(images())
    twin.session.settle_soon()
    twin.step(images())
    assert not twin.session._is_replayed
    twin.step(images())
    assert twin.session._is_replayed
    twin.step(images(batch=6))
    assert twin.passes.needed == learned.EQUAL_PASSES  # and the next ones are waited for


def test_each_shape_settles_by_itself(twin: Twin) -> None:
    batches = (4, 6, 3)
    twin.settle(images())
    twin.step(images(batch=6))
    assert not twin.session._is_replayed
    for number in range(2 * STEPS):
        for batch in batches:
            twin.step(images(batch))
            assert twin.passes.misses == 0
            assert twin.session._is_replayed or (batch != 4 and number <= STEPS)


def test_shapes_that_never_come_back_are_forgotten(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "MOST_KINDS", 4)
    twin.settle(images())
    for batch in range(5, 12):
        twin.step(images(batch))
    twin.step(images())
    assert not twin.session._is_replayed
    twin.settle(images())


def test_few_shapes_have_a_script_at_a_time(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "MOST_SCRIPTS", 2)
    for batch in (4, 6, 3):
        twin.settle(images(batch))
    for batch, is_known in ((3, True), (6, True), (4, False)):
        twin.step(images(batch))
        assert twin.session._is_replayed == is_known


def test_a_pass_that_begins_as_another_one_is_given_back(twin: Twin) -> None:
    twin.settle(images())
    known, before = twin.passes, twin.plain.act
    twin.change(lambda model: setattr(model, "act", torch.sigmoid))
    twin.step(images())
    assert known.misses == 1
    assert not twin.session._is_replayed
    twin.settle(images())
    twin.change(lambda model: setattr(model, "act", before))
    for is_known in (False, True):
        twin.step(images())
        assert twin.session._is_replayed == is_known
    assert twin.passes is known


class Adversaries(nn.Module):
    """A network that makes pictures and another one that judges them, which are trained in turn.

    Attributes:
        is_own: whose pass it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.makes = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.judges = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 1))

    def losses(self, number: int) -> Iterator[Tensor]:
        """The losses of a step, each with a pass of its own."""
        torch.manual_seed(number)
        noise, pictures = torch.randn(128, 64), torch.randn(128, 64)
        with torch.no_grad():
            made = self.makes(noise)
        yield F.softplus(self.judges(made)).mean() + F.softplus(-self.judges(pictures)).mean()
        yield F.softplus(-self.judges(self.makes(noise))).mean()


def test_passes_of_several_modules_settle_each_by_itself() -> None:
    torch.manual_seed(0)
    plain = Adversaries()
    other = copy_of(plain)
    session = Session("lossless", model=other, min_nbytes=MIN_NBYTES, stop_if_useless=False)
    are_replayed = []
    for number in range(2 * STEPS):
        grads = []
        for model in (plain, other):
            model.zero_grad()
            losses = model.losses(number)
            for _ in range(2):
                with session if model is other else nullcontext():
                    loss = next(losses)
                loss.backward()
                if model is other:
                    are_replayed.append(session._is_replayed)
            grads.append([p.grad for p in model.parameters()])
        assert all(x.equal(y) for x, y in zip(*grads, strict=True))
    assert all(are_replayed[-4:])


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "act", torch.sigmoid),
        lambda model: setattr(model, "act", lambda x: F.leaky_relu(x, 0.3)),
        lambda model: setattr(model, "act", lambda x: F.relu(x).sin()),
        lambda model: setattr(model, "act", lambda x: F.relu(x * 0.5)),
        lambda model: setattr(model, "act", lambda x: F.relu(x).clone()),
        lambda model: setattr(model, "act", lambda x: F.relu(x, inplace=True)),
        lambda model: setattr(model.norms[0], "eps", 0.1),
        lambda model: model.norms[1].eval(),
        lambda model: model.first.requires_grad_(False),
        lambda model: model.double().float(),
        lambda model: model.norms.__setitem__(0, nn.BatchNorm2d(8)),
        lambda model: model.to(memory_format=torch.channels_last),
        lambda model: model.second.register_forward_hook(lambda module, args, output: output * 2),
        lambda model: model.second.register_forward_pre_hook(lambda module, args: (args[0].relu(),)),
    ],
)
def test_a_model_that_changes_has_plain_gradients(twin: Twin, change: Callable[[Any], object]) -> None:
    twin.settle(images())
    twin.change(change)
    for _ in range(3):
        twin.step(images())


def test_settings_may_change_between_forward_and_backward(twin: Twin) -> None:
    twin.settle(images())

    def backward(loss: Tensor) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(1 if before != 1 else 2)
        torch.use_deterministic_algorithms(True)
        try:
            loss.backward()
        finally:
            torch.use_deterministic_algorithms(False)
            torch.set_num_threads(before)

    twin.step(images(), backward)


def test_autocast_may_be_switched_on(twin: Twin) -> None:
    twin.settle(images())
    for enabled in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            twin.step(images())


def test_a_backward_pass_may_run_twice_and_may_have_a_graph(twin: Twin) -> None:
    twin.settle(images())

    def backward(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    def penalty(loss: Tensor) -> None:
        parameters = [tensor for tensor in _leaves(loss) if tensor.requires_grad]
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        (loss + sum(gradient.square().sum() for gradient in gradients)).backward()

    twin.step(images(), backward)
    assert twin.session._is_replayed
    twin.step(images(), penalty)
    twin.step(images())


def _leaves(loss: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if hasattr(node, "variable") and all(node.variable is not each for each in found):
            found.append(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return found


def test_what_was_changed_after_it_was_saved_is_an_error(twin: Twin) -> None:
    twin.settle(images())
    for model in (twin.plain, twin.other):
        seen: list[Tensor] = []
        hook = model.second.register_forward_hook(lambda module, args, output: seen.append(args[0]))  # noqa: B023
        with twin.session if model is twin.other else _nothing():
            loss = model(images())
        seen[0].detach().add_(1.0)
        error = SavedTensorModifiedError if model is twin.other else RuntimeError
        with pytest.raises(error, match="modified by an inplace operation"):
            loss.backward()
        hook.remove()


@pytest.mark.parametrize("in_python", [False, True])
def test_what_is_made_again_with_other_bits_is_an_error(monkeypatch: pytest.MonkeyPatch, in_python: bool) -> None:
    off = [0.0]

    def differing(
        call: int, made: int, inside: int, function: Any, as_called: Any, places: Any, *rest: Any
    ) -> CallTree:
        def other(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) + off[0]

        assert places is not None, "the interpreter may call it itself"
        return CallTree(call, made, inside, other, as_called, None if in_python else places, *rest)

    monkeypatch.setattr(recorder, "CallTree", differing)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    session = Session("lossless", model=model, min_nbytes=0, stop_if_useless=False)
    x = torch.randn(16, 64)
    for step in range(STEPS + 3):
        off[0] = float(step == STEPS + 1)
        with session:
            loss = model(x).square().mean()
        if off[0]:
            assert session._is_replayed
            with pytest.raises(RecomputedDifferentlyError, match="1/Gelu|2/Addmm|was to be computed again"):
                loss.backward()
        else:
            loss.backward()
    assert not session._is_replayed, "it is learned anew"


class Curve(nn.Module):
    """A GELU as some language models write it, and a product that autocast would convert, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0))))
        y = torch.matmul(x.view(4, -1, 64).sin(), torch.cat([x[:32], x[:32].neg()]).cos())
        loss: Tensor = self.last(y).square().mean()
        return loss


def test_autocast_in_backward_alone_changes_nothing_that_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    repeat, repeated = replaying._CALLBACKS["repeat"], []

    def counting(*given: Any) -> Any:
        repeated.append(given)
        return repeat(*given)

    monkeypatch.setitem(replaying._CALLBACKS, "repeat", counting)
    torch.manual_seed(0)
    twin = Twin(Curve(), policies.lossless(recompute=True))
    x = torch.randn(64, 64)
    twin.settle(x)

    def backward(loss: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()

    repeated.clear()
    twin.step(x)
    of_lists = len(repeated)  # of torch.cat, which is given a list
    for _ in range(3):
        repeated.clear()
        twin.step(x, backward)
        assert len(repeated) > of_lists, "Python switches autocast off for each call"
    assert twin.session._is_replayed


@pytest.mark.parametrize("stops", [False, True])
def test_a_pass_that_lowers_next_to_nothing_is_replayed_unless_it_may_end_as_useless(stops: bool) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(128, 8), nn.ReLU(), nn.Linear(8, 4))
    session = Session("lossless", min_nbytes=256, model=model, stop_if_useless=stops)
    expected: list[Tensor] = []
    for _ in range(STEPS):
        model.zero_grad()
        with session:
            loss = model(torch.ones(64, 128)).square().mean()
        loss.backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        expected = expected or found
        assert all(x.equal(y) for x, y in zip(expected, found, strict=True))
    assert session._is_replayed is not stops
    if stops:
        assert "may not be worth its time" in session.report().programs()


def test_a_pass_that_fails_leaves_nothing_behind(twin: Twin) -> None:
    twin.settle(images())

    def fail(module: nn.Module, args: Any) -> None:
        raise ZeroDivisionError

    for model in (twin.plain, twin.other):
        hook = model.second.register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError), twin.session if model is twin.other else _nothing():
            model(images())
        hook.remove()
    gc.collect()
    replays = twin.session._replaying
    assert replays is not None
    assert replays.alive == replays.nbytes == 0
    for _ in range(3):
        twin.step(images())


def test_a_graph_without_backward_is_dropped(twin: Twin) -> None:
    twin.settle(images())
    for _ in range(2):
        with twin.session:
            twin.other.norms.eval()
            twin.other.norms.train()
            twin.other(images())
    twin.plain(images())
    twin.plain(images())
    twin.step(images())


def test_bytes_of_graphs_that_are_kept_over_steps_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that go the long way alone share the account of the step that was written down, whose graph is there."""
    monkeypatch.setattr(learned, "EQUAL_PASSES", 0)
    convolution, x = nn.Conv2d(4, 4, 3, padding=1), torch.randn(2, 4, 6, 8, requires_grad=True)
    optimizer = torch.optim.SGD([x, *convolution.parameters()], lr=0.1)
    session = Session("lossless", min_nbytes=0, stop_if_useless=False)
    losses, replayed = [], 0
    for _ in range(5):
        optimizer.zero_grad()
        with session:
            first = x.clone()
            second = F.relu_(convolution(first))
            losses.append(torch.maximum(first, second).square().mean())
        replayed += session._is_replayed
        losses[-1].backward(retain_graph=True)
        with torch.no_grad():
            convolution.bias.add_(0.5)
        optimizer.step()
        del first, second
    assert replayed
    losses.clear()
    gc.collect()
    assert (session._live.saved, session._live.nbytes, session._live.remade_nbytes) == (0, 0, 0)


def test_thousands_of_steps_hold_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU())
    session = Session("lossless", model=model, min_nbytes=0, stop_if_useless=False)
    x = torch.randn(8, 64)
    counts = []
    for step in range(2000):
        with session:
            loss = model(x).square().mean()
        loss.backward()
        del loss
        if step % 500 == 499:
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert session._names.learned.passes.runs > 1500
    assert max(counts[1:]) - min(counts[1:]) < 200, counts
    assert session._replaying is not None
    assert session._replaying.alive == session._replaying.nbytes == 0


def test_recipes_are_proven_again_and_again(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "PERIOD", 8)
    twin.settle(images())
    repeats = 0
    for _ in range(REPEAT + 16):
        with twin.session:
            loss = twin.other(images())
        loss.backward()
        repeats += twin.session.report().repeated_proofs
    assert repeats == 1  # of the one value that is made again, and no report says it twice


def test_a_new_session_for_each_step_replays_as_well(twin: Twin) -> None:
    twin.settle(images())
    before = twin.passes.runs
    for _ in range(3):
        twin.session = Session("lossless", model=twin.other, min_nbytes=MIN_NBYTES, stop_if_useless=False)
        twin.step(images())
        assert twin.session._is_replayed
    assert twin.passes.runs == before + 3


def test_what_cannot_be_replayed_says_why() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    turned = torch.randn(64, 64, dtype=torch.complex64).conj()
    session = Session("lossless", model=model, min_nbytes=MIN_NBYTES, stop_if_useless=False)
    for _ in range(STEPS):
        with session:
            loss = (turned * model(torch.ones(64, 64))).abs().sum()
        loss.backward()
    assert "another class" in session.report().programs()


class Particular(Minifloat):
    """Serves readers of linear layers, and notes how often it is asked."""

    asked = 0

    def refuses_reader(self, saved: SavedTensor) -> str | None:
        """None: it serves everybody, today."""
        Particular.asked += 1
        return None


class OfLinearLayers(Policy):
    """Stores what linear layers read by a codec that asks who reads."""

    is_fixed = True

    def decide(self, saved: SavedTensor) -> Action:
        """A Stash for linear layers."""
        return Stash(Particular("fp16")) if saved.op == "Addmm" and saved.need is Need.VALUE else Keep()


def test_a_codec_that_asks_about_its_readers_is_asked_in_every_pass() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64))
    session = Session(OfLinearLayers(), model=model, min_nbytes=MIN_NBYTES, stop_if_useless=False)
    counts = []
    for _ in range(2 * STEPS):
        before = Particular.asked
        with session:
            loss = model(torch.ones(64, 64)).square().sum()
        loss.backward()
        counts.append(Particular.asked - before)
    assert session._is_replayed
    assert counts[-1] >= 1


def test_a_switch_turns_overwriting_off_in_replayed_passes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "LARGE", 0)
    monkeypatch.setattr(table, "CHEAP_CLAIM", 0)
    asked: list[bool] = []
    original = exclusive.is_alone
    monkeypatch.setattr(exclusive, "is_alone", lambda *args: asked.append(original(*args)) or asked[-1])
    for overwrite in (True, False):
        torch.manual_seed(0)
        twin = Twin(Block(), overwrite_gradients=overwrite)
        twin.settle(images())
        asked.clear()
        twin.step(images())
        assert twin.session._is_replayed
        assert any(asked) is overwrite


def test_sessions_of_one_model_that_were_given_other_sizes_do_not_share_a_script(twin: Twin) -> None:
    twin.settle(images())
    twin.session = Session("lossless", model=twin.other, min_nbytes=1 << 20, stop_if_useless=False)
    twin.step(images())
    assert not twin.session._is_replayed


# -- what plans have made again ----------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Products and norms, which cost something to repeat; the weights are read where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        """Each result is read by the next layer, and made from the one before."""
        for layer in self.layers:
            x = F.gelu(self.norm(layer(x))) + x
        return x.square().mean()


def rows(seed: int = 0) -> Tensor:
    return torch.randn(128, 64, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def deep(policy: Policy | None = None) -> Twin:
    torch.manual_seed(0)
    return Twin(Deep(), policy or costly())


def settled(twin: Twin) -> None:
    """Steps until passes are replayed; costly calls are proven in the first ones."""
    for _ in range(2 * STEPS):
        twin.step(rows())
    assert twin.session._is_replayed, twin.passes.refusal


def test_what_costly_calls_make_is_made_once_for_all_its_readers() -> None:
    twin = deep()
    settled(twin)
    report = twin.session.report()
    assert "Remake(linear)" in report.programs() and "Remake(layer_norm)" in report.programs()
    decodes = [entry.decodes for entry in report.rows if entry.codec == "recompute"]
    assert decodes and set(decodes) == {1}


def test_replayed_chains_hold_what_the_long_way_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = []
    for replays in (True, False):
        with monkeypatch.context() as patch:
            if not replays:
                patch.setattr(seams, "replays", None)
            twin = deep()
            for _ in range(2 * STEPS):
                twin.step(rows())
            assert twin.session._is_replayed == replays
            peaks.append(bs.measure(partial(twin.step, rows()), repeats=1).peak_nbytes)
    assert abs(peaks[0] - peaks[1]) <= 64 * 1024, peaks


def test_a_weight_that_was_changed_before_backward_is_an_error() -> None:
    twin = deep()
    settled(twin)

    def late(loss: Tensor) -> None:
        with torch.no_grad():
            twin.other.layers[1].weight.mul_(2)
        loss.backward()

    with twin.session:
        loss = twin.other(rows())
    assert twin.session._is_replayed
    with pytest.raises(SavedTensorModifiedError):
        late(loss)


def test_a_weight_that_is_changed_in_the_session_is_made_from_before_that() -> None:
    twin = deep()
    settled(twin)
    was = twin.plain.layers[2].weight.detach().clone()

    def change(model: Any) -> None:
        with torch.no_grad():
            model.layers[2].weight.data = model.layers[2].weight * 1.0

    twin.change(change)
    for _ in range(STEPS):
        twin.step(rows())
    assert not twin.plain.layers[2].weight.equal(was)


def test_a_layer_that_is_frozen_is_called_as_it_is_followed() -> None:
    twin = deep()
    settled(twin)
    twin.change(lambda model: model.layers[1].requires_grad_(False))
    for _ in range(STEPS):
        twin.step(rows())
    twin.change(lambda model: model.layers[1].requires_grad_(True))
    for _ in range(STEPS):
        twin.step(rows())


def test_a_graph_of_remade_values_may_be_read_twice_and_dropped() -> None:
    twin = deep()
    settled(twin)

    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    for backward in (twice, lambda loss: torch.autograd.grad(loss, rows(), allow_unused=True), Tensor.backward):
        twin.step(rows(), backward)
    del backward
    gc.collect()
    assert twin.session._replaying.alive == twin.session._replaying.nbytes == 0


class Equilibrium(nn.Module):
    """Calls a layer on a value, and on a leaf of the same numbers in whose graph it solves for the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        """One step of the iteration forward, one backward."""
        with torch.no_grad():
            z = self._next(torch.zeros_like(x), x)
        z = self._next(z, x)
        leaf = z.clone().detach().requires_grad_()
        again = self._next(leaf, x)
        z.register_hook(lambda grad: torch.autograd.grad(again, leaf, grad, retain_graph=True)[0] + grad)
        return z.square().mean()

    def _next(self, z: Tensor, x: Tensor) -> Tensor:
        return self.norm(F.relu(x + self.layer(z)))


def test_a_leaf_is_held_where_codecs_decline_other_values() -> None:
    """A leaf that is no parameter is nobody's to encode, also when the codecs of its place look again."""
    torch.manual_seed(0)
    twin = Twin(Equilibrium(), min_nbytes=0)
    for _ in range(3 * STEPS):
        twin.step(images())
    assert twin.session._is_replayed, twin.passes.refusal


class Revised(bs.policies.Wrapper):
    """Says another thing when it is told to, as a guard does."""

    observes_changes = True
    is_fixed = False

    def __init__(self) -> None:
        self._inner, self.number = costly(), object()
        self.told = 0

    @property
    def inner(self) -> Policy:
        """What it forwards to."""
        return self._inner

    @property
    def revision(self) -> object:
        """Another object whenever it says something else."""
        return self.number

    def observe(self, outcome: Any) -> None:
        """Counts what it is told."""
        self.told += 1


def test_a_policy_with_another_revision_is_asked_again() -> None:
    policy = Revised()
    twin = deep(policy)
    settled(twin)
    told = policy.told
    twin.step(rows())
    assert policy.told == told
    policy._inner, policy.number = bs.policies.get("keep"), object()
    twin.step(rows())
    assert not twin.session._is_replayed and policy.told > told
    assert not any(entry.codec == "recompute" for entry in twin.session.report().rows)
    policy._inner, policy.number = costly(), object()
    settled(twin)
    assert "Remake" in twin.session.report().programs()


def test_a_plan_and_its_guard_are_replayed() -> None:
    torch.manual_seed(0)
    model = Block()
    plan = Planner(bs.profile(lambda: model(images(8, 32)).backward(), model)).at_most(0)
    assert plan.peak_nbytes < 0.92 * plan.plain_peak_nbytes
    for policy in (plan, plan.guarded()):
        twin = Twin(model, policy, min_nbytes=None)
        for _ in range(2 * STEPS):
            twin.step(images(8, 32))
        assert twin.session._is_replayed, twin.passes.refusal
        assert twin.session._live.peak_nbytes <= plan.plain_peak_nbytes


class Watching(Revised):
    """Wants to know what nodes save."""

    def __init__(self) -> None:
        super().__init__()
        self.watched = 0

    def watch(self, saved: SavedTensor, node: Any, x: Tensor) -> None:
        """Counts it."""
        self.watched += 1


def test_a_policy_that_watches_is_told_in_every_step() -> None:
    policy = Watching()
    twin = deep(policy)
    counts = []
    for _ in range(2 * STEPS):
        twin.step(rows())
        counts.append(policy.watched)
    steps = [after - before for before, after in pairwise(counts)]
    assert min(steps) > 0 and steps[-1] == steps[-2]


class Undecided(Policy):
    """Does not say that it says the same whenever it is asked."""

    def decide(self, saved: SavedTensor) -> Action:
        """Keeps all."""
        return Keep()


@pytest.mark.parametrize(
    ("policy", "options", "why"),
    [
        (Undecided(), {}, "Undecided may say something else of a value in each step"),
        ("layrub", {}, "Layrub may say something else"),
        ("lossless", {"check": "full"}, "check='full'"),
    ],
)
def test_it_is_said_why_nothing_is_replayed(policy: Any, options: dict[str, Any], why: str) -> None:
    torch.manual_seed(0)
    twin = Twin(Block(), policy, **options)
    twin.step(images())
    assert twin.session.report().programs().startswith(f"nothing is replayed: {why}")


def test_an_idle_session_says_that_there_is_nothing_to_do() -> None:
    torch.manual_seed(0)
    twin = Twin(Block(), "keep")
    for _ in range(4):
        twin.step(images())
    assert twin.session.report().programs().startswith("nothing is replayed: there is nothing to do")


class Sparse(nn.Module):
    """Linear layers that read the results of relu, of which a share is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(96, 96) for _ in range(3)])
        self.shift = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Some more of them are zero with a shift."""
        for layer in self.layers:
            x = layer(torch.relu(x - self.shift))
        return x.square().mean()


ONLY_ZVC = policies.Rules((("*", Stash((Zvc(),))),), otherwise=policies.get("keep"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [40, 400, 4000])
def test_zvc_is_encoded_as_on_the_long_way(rows: int, dtype: torch.dtype) -> None:
    """The same planes, whatever share of the numbers is zero; and none where a sample has too few zeros."""
    torch.manual_seed(0)
    model, x = Sparse().to(dtype), torch.randn(rows, 96, dtype=dtype)
    replayed, reference = Twin(model, ONLY_ZVC, min_nbytes=0), Twin(copy_of(model), ONLY_ZVC, min_nbytes=0)
    reference.session._replaying = reference.session._forward.replaying = None
    for _ in range(STEPS):
        replayed.step(x)
        reference.step(x)
    assert replayed.session._is_replayed, replayed.passes.refusal
    script = replayed.passes.script
    assert script is not None and sum(value.zvc is not None for value in script.values) == 3
    for shift in (0.0, 0.5, 2.0, -0.5, -10.0):
        found = []
        for twin in (replayed, reference):
            twin.change(lambda model, shift=shift: setattr(model, "shift", shift))  # type: ignore[misc]
            twin.step(x)
            found.append([(row.key, row.codec, row.stash_nbytes) for row in twin.session.report().rows])
        assert replayed.session._is_replayed and found[0] == found[1]
        alone = sum(taken is False for taken in replayed.session._replaying._native.counts())  # type: ignore[union-attr]
        declined = sum(codec == "kept" for key, codec, _ in found[0] if key.endswith("mat1"))
        assert alone - declined in (0, 1), "what is kept in any case is looked at again in some passes"
        assert bool(declined) == (shift == -10.0) or shift == -0.5


def test_planes_of_zvc_that_do_not_fit_together_are_an_error() -> None:
    """The kernel says so; here another one says it in its place, since nobody can reach the planes to damage them."""
    torch.manual_seed(0)
    twin, x = Twin(Sparse(), ONLY_ZVC, min_nbytes=0), torch.randn(40, 96)
    twin.settle(x)
    damaged = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1)
    address = ctypes.cast(damaged, ctypes.c_void_p).value
    replaying.native.configure(
        replaying.scalar_of, lambda name: address if name == "bs_zvc_decode" else library.address_of(name)
    )
    try:
        with twin.session:
            loss = twin.other(x)
        with pytest.raises(DamagedPlanesError, match="zvc_decode asked for the values that the mask"):
            loss.backward()
    finally:
        replaying.native.configure(replaying.scalar_of, library.address_of)
    twin.step(x)


class Mean(nn.Module):
    """The mean of the squares, a loss."""

    def forward(self, x: Tensor) -> Tensor:
        """A number."""
        return x.square().mean()


@pytest.mark.parametrize("policy", ["lossless", "keep"])
def test_inputs_of_large_layers_are_claimed_in_settled_and_idle_steps_too(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    begun = []
    begin = linear.begin
    monkeypatch.setattr(linear, "begin", lambda stashed, node: (begun.append(node), begin(stashed, node)))
    torch.manual_seed(0)
    layers = nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 8)
    model = nn.Sequential(*layers, Mean())
    twin, x = Twin(model, policy, min_nbytes=0), torch.randn(16, 64)

    def counted(least: int) -> int:
        monkeypatch.setattr(accumulation, "LARGE", least)
        begun.clear()
        with twin.session:
            loss = twin.other(x)
        loss.backward()  # adds to the gradients that are there
        return len(begun)

    for _ in range(2 * STEPS):
        twin.step(x)
    assert twin.session._is_replayed or twin.session._forward.is_idle
    found = [counted(least) for least in (64 * 64 * 4, 64 * 96 * 4, 1 << 24)]
    assert found == [3, 2, 0], "of the second layer both matrices are read"


def _look_at_all(loss: Tensor) -> int:
    """Reads all that the nodes behind a loss have saved, as who draws a graph does, and returns how many that were."""
    waiting, seen, found = [loss.grad_fn], set(), 0
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_"):
                found += isinstance(getattr(node, name), Tensor)
    return found


class Transforming(nn.Module):
    """Values that are made again from such as are made again themselves."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (64, 128, 128, 64)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.norms = nn.ModuleList(nn.LayerNorm(size) for size in sizes[1:])
        self.looks: Callable[[Tensor], object] = lambda loss: None

    def forward(self, x: Tensor) -> Tensor:
        """The mean of the squares, at which somebody may look before the pass is over."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(F.gelu(layer(x)))
        loss = x.square().mean()
        self.looks(loss)
        return F.silu(loss)


REMADE = policies.Rules((("*", Recompute(Keep(), any_producer=True)),), otherwise=policies.get("keep"))


@pytest.mark.parametrize(
    ("network", "policy"), [(Transforming, "lossless"), (Transforming, REMADE), (Block, "lossless")]
)
def test_a_known_pass_may_be_looked_at_before_it_is_over(network: type[nn.Module], policy: Any) -> None:
    torch.manual_seed(0)
    twin = Twin(network(), policy, min_nbytes=0)
    x = torch.randn(32, 64) if network is Transforming else images()
    twin.settle(x)
    found: list[int] = []
    for looks in (lambda loss: found.append(_look_at_all(loss)), lambda loss: None) * 2:
        if network is Transforming:
            twin.change(lambda model, looks=looks: setattr(model, "looks", looks))  # type: ignore[misc]
        else:
            act = lambda y, looks=looks: (looks(y), F.relu(y))[1]  # noqa: E731
            twin.change(lambda model, act=act: setattr(model, "act", act))  # type: ignore[misc]
        twin.step(x)
        twin.step(x)
    assert found and min(found) > 3
    assert twin.session._is_replayed, twin.passes.refusal

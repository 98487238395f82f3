"""The compiled twins of what decides about values do what their references in Python do."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from backstash import Session, policies
from backstash import session as sessions
from backstash.capture import forward
from backstash.policies import Policy, Recompute, Stash
from backstash.saved import Need, SavedTensor, TensorSpec
from backstash.stash import compiled, encode, pending, remaking
from backstash.stash.accounts import Account
from backstash.stash.calls import Leaf
from backstash.stash.encode import Encoder
from backstash.stash.live import Live
from backstash.stash.pending import Pending
from backstash.stash.place import Place
from backstash.stash.recipes import Recipe
from backstash.stash.sample import Sample
from backstash.stash.value import NO_ERRORS, Saved, Value

functions = compiled.functions

pytestmark = pytest.mark.skipif(functions is None, reason="nothing is compiled: run 'python setup.py build_native'")


@pytest.fixture(autouse=True)
def _few_objects() -> Iterator[None]:
    """What was there before a test is not looked through for values."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def use_references(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def use() -> None:
        monkeypatch.setattr(forward, "look_at", Pending.look_at)
        monkeypatch.setattr(pending, "decide_if_orphaned", Pending.decide_if_orphaned)
        monkeypatch.setattr(remaking, "decide_if_orphaned", Pending.decide_if_orphaned)
        monkeypatch.setattr(sessions, "encode", Encoder.encode)

    return use


# -- whole steps -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        h = 0.5 * h * (1.0 + torch.tanh(0.8 * (h + 0.04 * torch.pow(h, 3.0))))
        return x + self.down(h)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.other = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(self.other(self.second(x)) + x, inplace=True)
        return F.max_pool2d(x, 2).flatten(1)


def tokens() -> Tensor:
    return torch.randn(4, 6, 24)


def holding(x: Tensor) -> Tensor:
    """Keeps some results for longer than others, views of results, and results that are changed later."""
    kept, halves = [], []
    for number in range(6):
        x = torch.tanh(x * 1.5)
        if number % 2:
            kept.append(x)
        a, b = x.sigmoid().chunk(2, -1)
        halves.append(a.exp() * b)
        x = torch.cat([halves[-1], halves[-1].softmax(-1)], -1) + x.abs()
        if number == 3:
            kept.clear()
        if number == 4:
            x = x.mul(2.0).add_(1.0).relu_()
    return x.square() + sum(each.sum() for each in kept)


def in_a_loop(x: Tensor) -> Tensor:
    """Values that are made by up to so many calls that no recipe makes them all."""
    x = x.sin().cos().sin().cos().sin().cos() * x
    for number in range(9, 15):
        h = x.tanh()
        for _ in range(number):
            h = h + 0.125
        x = F.gelu(h)
    return x


PROGRAMS: dict[str, tuple[Callable[[], Callable[[Tensor], Tensor]], Callable[[], Tensor]]] = {
    "tokens": (lambda: nn.Sequential(Block(), Block(), nn.Linear(24, 8)), tokens),
    "images": (Images, lambda: torch.randn(4, 3, 12, 12)),
    "held": (lambda: holding, lambda: tokens().requires_grad_()),
    "in a loop": (lambda: in_a_loop, tokens),
}

POLICIES: dict[str, Callable[[], str | Policy]] = {
    "lossless": lambda: "lossless",
    "without recipes": lambda: policies.lossless(recompute=False),
    "shallow": lambda: Fixed(Recompute(Stash("zvc"), max_depth=1)),
    "few inputs": lambda: Fixed(Recompute(Stash("zvc"), max_inputs=1)),
    "else kept": lambda: Fixed(Recompute()),
    "quantized": lambda: "quantized",
    "not fixed": lambda: Fixed(Recompute(Stash("zvc")), is_fixed=False),
}


class Fixed(Policy):
    """Says the same of every value."""

    def __init__(self, action: Recompute, is_fixed: bool = True) -> None:
        self.action, self.is_fixed = action, is_fixed

    def __repr__(self) -> str:
        return "Fixed()"

    def decide(self, saved: SavedTensor) -> Recompute | Stash:
        return Stash("bitmask") if saved.need is Need.SIGN and saved.role == "nothing" else self.action


def described(recipe: Recipe | None) -> Any:
    if recipe is None:
        return None
    inner = [
        described(given[0]) if type(given) is tuple else (type(given).__name__, getattr(given, "offset", None))
        for given in recipe.inputs
    ]
    leaves = [leaf.key for leaf in recipe.leaves]
    flags = recipe.fused, recipe.from_statistics, recipe.any_producer, recipe.first_use, recipe.tree is None
    return recipe.call.name, str(recipe), inner, leaves, list(recipe.references), flags


def held_in(session: Session) -> list[Any]:
    """Everything that is known of the values of a Session."""
    rows = []
    for value in gc.get_objects():
        if type(value) is not Value or value.live is not session._live:
            continue
        sample, guard = value.sample, value.guard
        bits = None if sample is None else sample.bits if sample.bits is None else bytes(sample.bits)  # type: ignore[arg-type]
        place = value.place
        assert place is not None
        rows.append(
            (
                (value.key, value.account.saved_nbytes, session._pending.get(value.cdata) is value),
                (value.depth, value.height, value.shares, value.round, value.unread, sorted(value.errors)),
                (value.storage is None, value.form is None, value.otherwise, len(value.members)),
                described(value.recipe),
                None if sample is None else (bits, sample.begin, sample.step, sample.checksum, sample.allows is None),
                None if guard is None else (guard.version, guard.spec, guard.offset, guard.tensor, guard.need),
                [saved.dense is None for saved in value.saved()],
                (value.account.codec, value.account.reason, value.account.store, value.account.stash_nbytes),
                (place.held, place.gone, place.settled, place.delay, place.uses, place.spared, place.declined),
                None if place.proven is None else (place.proven.spec, place.proven.way, place.proven.text),
            )
        )
    return sorted(rows, key=repr)


def trained(program: str, policy: str, full: bool) -> tuple[list[Any], list[Any]]:
    make, given = PROGRAMS[program]
    torch.manual_seed(0)
    model = make()
    session = Session(POLICIES[policy](), min_nbytes=64, check="full" if full else 0)
    seen: list[Any] = []
    gradients: list[Any] = []
    for step in range(6):
        if step == 4:
            for each in gc.get_objects():
                if type(each) is Place:
                    each.uses = 253  # so that recipes are proven again soon
        x = given()
        x = torch.cat([x, x]).detach().requires_grad_() if step == 3 else x.requires_grad_()
        with session:
            y = model(x)
            if step != 2:
                seen.append(held_in(session))
            loss = y.square().sum()
            del y
        seen.append(held_in(session))
        live, noting = session._live, session._names.noting()
        seen.append((live.nbytes, live.saved, live.peak_nbytes, live.needed_nbytes, sorted(noting._failing.items())))
        seen.append([(at[0], at[2], known.is_used, known.passes) for at, known in noting._places.items()])
        loss.backward()
        report = session.report()
        seen.append([(row.key, row.codec, row.reason, row.stash_nbytes, row.decodes) for row in report.rows])
        seen.append((report.proofs, report.repeated_proofs, report.peak_stash_nbytes))
        gradients.append(x.grad)
        for parameter in model.parameters() if isinstance(model, nn.Module) else ():
            gradients.append(parameter.grad)
            parameter.grad = None
    return seen, gradients


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_same_is_decided(program: str, policy: str, full: bool, use_references: Callable[[], None]) -> None:
    trained(program, policy, full)  # so that the process knows all proofs
    seen, gradients = trained(program, policy, full)
    use_references()
    expected, others = trained(program, policy, full)
    for one, other in zip(seen, expected, strict=True):
        assert one == other
    assert all(torch.equal(x, y) for x, y in zip(gradients, others, strict=True))


def test_in_a_settled_step_nothing_is_left_to_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    make, given = PROGRAMS["tokens"]
    model, session = make(), Session("lossless", min_nbytes=64)
    left: list[str] = []

    def noted(kind: type, name: str) -> None:
        reference = getattr(kind, name)

        def call(*args: Any) -> Any:
            left.append(name)
            return reference(*args)

        monkeypatch.setattr(kind, name, call)

    for step in range(12):
        if step == 11:
            for kind, name in ((Encoder, "decide"), (Encoder, "_forget"), (remaking.Remaking, "recipe")):
                noted(kind, name)
        with session:
            loss = model(given().requires_grad_()).sum()
        loss.backward()
    assert sum(row.codec == "recompute" for row in session.report().rows) >= 8
    assert left == []


def test_the_settings_of_a_recipe_are_those_of_its_calls() -> None:
    """A proof holds for the settings under which the calls ran, whatever they are when the value is decided on."""
    session = Session("lossless", min_nbytes=64)

    math, flash = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION

    def step(backend: SDPBackend, backend_then: SDPBackend) -> int:
        x = torch.randn(64, 16, requires_grad=True)
        with session:
            with sdpa_kernel(backend):
                y = F.layer_norm(x.sinh(), (16,)).tanh()
                z = y.exp()
            with sdpa_kernel(backend_then):
                del y
                loss = z.sum()
        loss.backward()
        return session.report().proofs + session.report().repeated_proofs

    assert [step(math, math) > 0, step(math, math), step(math, flash)] == [True, 0, 0]
    assert step(flash, math) > 0  # whose calls are others


# -- when --------------------------------------------------------------------------------------------------------------


def a_value(x: Tensor, known: Place | None) -> tuple[Value, Saved]:
    live = Live()
    value, saved = Value(x.untyped_storage(), Account(None, 256, "kept"), live, known), Saved(x, live)  # type: ignore[arg-type]
    value.members.append(weakref.ref(saved))
    saved.value = value
    return value, saved


def looks(look_at: Any, numbers: random.Random) -> list[Any]:
    """What is known of a place after each of many values that the program holds for some time."""
    spec = TensorSpec.of(torch.zeros(2))
    known = Place(SavedTensor("relu/Relu#0:result", "Relu", "result", "relu", spec, Need.VALUE))
    seen: list[Any] = []
    usual = numbers.randrange(1, 60)
    for _ in range(60):
        waiting = Pending(lambda value: seen.append(("decided", value.born, torch.is_grad_enabled())))
        waiting.clock = numbers.randrange(1000)
        x: Tensor | None = torch.zeros(64)
        assert x is not None
        value, saved = a_value(x, known if numbers.random() < 0.9 else None)
        waiting.add(value)
        held = usual if numbers.random() < 0.8 else numbers.randrange(1, 80)
        for _ in range(400):
            waiting.clock += 1
            if waiting.clock - value.born >= held:
                x = None
            due = waiting.due.pop(waiting.clock, None)
            if due is not None:
                with torch.set_grad_enabled(numbers.random() < 0.5):
                    look_at(waiting, due)
                seen.append((waiting.clock, list(waiting.due), len(waiting._values), value.storage is None))
        seen.append((known.held, known.gone, known.settled, known.delay))
        del saved
    return seen


@pytest.mark.parametrize("seed", range(5))
def test_values_are_looked_at_at_the_same_times(seed: int) -> None:
    expected = looks(Pending.look_at, random.Random(seed))
    found = looks(pending.look_at, random.Random(seed))
    assert found == expected
    assert any(each[0] == "decided" for each in expected)


@pytest.mark.parametrize("decide_if_orphaned", [Pending.decide_if_orphaned, pending.decide_if_orphaned])
@pytest.mark.parametrize("has_graph", [False, True])
def test_an_error_leaves_the_graph_mode_as_it_was(decide_if_orphaned: Any, has_graph: bool) -> None:
    def fail(value: Value) -> None:
        assert not torch.is_grad_enabled()
        raise ZeroDivisionError

    waiting = Pending(fail)
    value, saved = a_value(torch.zeros(64), None)
    waiting.add(value)
    with torch.set_grad_enabled(has_graph):
        with pytest.raises(ZeroDivisionError):
            decide_if_orphaned(waiting, value)
        assert torch.is_grad_enabled() == has_graph
    assert value.storage is not None and saved.dense is not None
    assert not decide_if_orphaned(waiting, value)  # it was decided about once


def test_an_error_of_a_codec_comes_through() -> None:
    class Fails(Fixed):
        def decide(self, saved: SavedTensor) -> Any:
            raise ZeroDivisionError

    x = torch.randn(64, requires_grad=True)
    with pytest.raises(ZeroDivisionError), Session(Fails(Recompute()), min_nbytes=0):
        x.sin().cos().sin()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("wrong", [(), (None,), (None, None), (Pending(print), None), (Pending(print), [], 1)])
def test_other_arguments_are_refused(wrong: tuple[Any, ...]) -> None:
    for function in (functions.look_at, functions.decide_if_orphaned, functions.encode):
        with pytest.raises(TypeError):
            function(*wrong)


# -- what is left behind -----------------------------------------------------------------------------------------------


def test_nothing_is_left_of_many_steps() -> None:
    make, given = PROGRAMS["tokens"]
    model, session = make(), Session("lossless", min_nbytes=64)
    counts = []
    shared = (None, NO_ERRORS, Need.VALUE, Leaf, Recipe, Sample, encode.follow_original, "kept", "recompute", "device")
    for step in range(40):
        with session:
            loss = model(given().requires_grad_()).sum()
        loss.backward()
        del loss
        if step in (19, 39):
            gc.collect()
            kinds = [type(each) for each in gc.get_objects()]
            places = [each for each in gc.get_objects() if type(each) is Place]
            of_places = [
                sys.getrefcount(each) for place in places for each in (place.proven, place.facts, place.action)
            ]
            of_places += [sys.getrefcount(each) for place in places for each in place.proven or ()]
            counts.append(
                (
                    [kinds.count(kind) for kind in (Value, Saved, Recipe, Leaf, Sample, Account)],
                    [sys.getrefcount(each) for each in shared[1:]],
                    of_places,
                )
            )
            del kinds, places, of_places
    assert counts[0][0] == counts[1][0]
    for before, after in zip(counts[0][1] + counts[0][2], counts[1][1] + counts[1][2], strict=True):
        assert abs(after - before) <= 40  # two hundred values were decided on since

"""The compiled twins of what backward reads of saved tensors do what their references in Python do."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_checks import differences
from recipe_cases import RECIPES, World, X, Y, held, numbers, outcome, recipe
from torch import Tensor, nn

from backstash import Session, numerics
from backstash.backward.unpack import unpack
from backstash.numerics import settings
from backstash.saved import TensorSpec
from backstash.stash import compiled, decode, value
from backstash.stash.calls import INPUT
from backstash.stash.held import Reading
from backstash.stash.recipes import Recipe
from backstash.stash.sample import Sample
from backstash.stash.value import Saved, Value

functions = compiled.functions

pytestmark = pytest.mark.skipif(functions is None, reason="nothing is compiled: run 'python setup.py build_native'")


@pytest.fixture
def by_references(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """Runs a function, in which nothing is compiled that these tests are about."""

    def run(function: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(decode, "dense", decode.dense_reference)
            patch.setattr(decode, "fetch", decode.fetch_reference)
            return function()

    return run


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_a_value_is_remade_alike(name: str, ahead: bool, has_room: bool, by_references: Any) -> None:
    def world() -> tuple[World, Value]:
        made = World()
        made.live.stashed_nbytes *= has_room
        wanted = made.value(RECIPES[name](made))
        made.saved(X, wanted)
        return made, wanted

    def reference() -> Any:
        made, wanted = world()
        reads = [outcome(lambda: decode.dense_reference(wanted, ahead, True), made) for _ in range(2)]
        wanted.hold(None)
        return [*reads, outcome(lambda: decode.dense_reference(wanted, ahead, False), made)]

    made, wanted = world()
    reads = [outcome(lambda: functions.dense(wanted, ahead, True), made) for _ in range(2)]
    wanted.hold(None)
    reads.append(outcome(lambda: functions.dense(wanted, ahead, False), made))
    assert reads == by_references(reference)
    assert not isinstance(reads[0][0][0], type)
    assert made.live.lock.acquire(blocking=False)


def is_changed(x: Tensor) -> None:
    with torch.no_grad():
        x.add_(1.0)


def held_is_changed(world: World) -> Recipe:
    x = X.clone()
    made = recipe("exp", torch.exp, (INPUT,), {}, [held(x)], x)
    is_changed(x)
    return made


def held_is_freed(world: World) -> Recipe:
    x = X.clone()
    made = recipe("exp", torch.exp, (INPUT,), {}, [held(x)], x)
    x.untyped_storage().resize_(0)
    return made


def leaf_is_changed(world: World) -> Recipe:
    x = X.clone()
    leaf = world.leaf(x)
    is_changed(x)
    return recipe("exp", torch.exp, (INPUT,), {}, [leaf], x)


def leaf_was_found_changed(world: World) -> Recipe:
    leaf = world.leaf(X.clone())
    assert leaf.value.guard is not None
    leaf.value.guard.dense, leaf.value.guard.modified = None, 3
    return recipe("exp", torch.exp, (INPUT,), {}, [leaf], X)


def cannot_be_called(world: World) -> Recipe:
    return recipe("mm", torch.mm, (INPUT, INPUT), {}, [held(X), world.remade_leaf(Y)], X)


FAILING = [held_is_changed, held_is_freed, leaf_is_changed, leaf_was_found_changed, cannot_be_called]


@pytest.mark.parametrize("name", [*RECIPES, *(each.__name__ for each in FAILING)])
def test_what_cannot_be_trusted_raises_alike(name: str, by_references: Any) -> None:
    makes = {**RECIPES, **{each.__name__: each for each in FAILING}}[name]

    def read(dense: Callable[..., Tensor]) -> Any:
        world = World()
        wanted = world.value(makes(world))
        if name in RECIPES:
            assert wanted.recipe is not None
            spec = wanted.recipe.call.spec
            other = torch.full(spec.shape, 3.25, dtype=spec.dtype)
            wanted.sample, wanted.key = Sample.of(other, 1), "model/Exp#0:result"
        return outcome(lambda: dense(wanted, False, True), world)

    found = read(functions.dense)
    assert found == by_references(lambda: read(decode.dense_reference))
    assert isinstance(found[0][0], type)
    assert (name in RECIPES) == bool(found[1][4])


@pytest.mark.parametrize("changes", [0, 1])
def test_a_sample_is_compared_alike(changes: int, by_references: Any) -> None:
    for length in (0, 1, 63, 64, 65, 4096):
        x = numbers(length, seed=5)

        def read(dense: Callable[..., Tensor], x: Tensor = x) -> Any:
            world = World()
            wanted = world.value(recipe("neg", torch.neg, (INPUT,), {}, [held(x)], x))
            expected = x.neg()
            if x.numel():
                sampled = Sample.of(expected, 2)
                expected[sampled.begin] += changes
            wanted.sample, wanted.key = Sample.of(expected, 2), "key"
            return outcome(lambda: dense(wanted, False, True), world)

        found = read(functions.dense)
        assert found == by_references(lambda read=read: read(decode.dense_reference))
        assert isinstance(found[0][0], type) == (changes == 1 and length > 0)


# -- what backward is given --------------------------------------------------------------------------------------------


def dense_saved(world: World) -> Saved:
    return world.saved(X.clone())


def changed_saved(world: World) -> Saved:
    x = X.clone()
    saved = world.saved(x)
    is_changed(x)
    return saved


def assigned_saved(world: World) -> Saved:
    x = X.clone()
    saved = world.saved(x)
    x.data = Y.clone()
    return saved


def freed_saved(world: World) -> Saved:
    x = X.clone()
    saved = world.saved(x)
    x.untyped_storage().resize_(0)
    return saved


def program_has_let_go(world: World) -> Saved:
    saved = world.saved(X.clone())
    world.alive[-1] = (saved, None)
    return saved


def shape_saved(world: World) -> Saved:
    saved = world.saved(X)
    saved.dense = None
    return saved


def found_changed(world: World) -> Saved:
    saved = shape_saved(world)
    saved.modified = 2
    return saved


def remade_saved(world: World, name: str = "written over") -> Saved:
    wanted = world.value(RECIPES[name](world))
    saved = world.saved(X, wanted)
    saved.dense = None
    return saved


def remade_for_two(world: World) -> Saved:
    saved = remade_saved(world, "remade leaf")
    assert saved.value is not None
    world.saved(X, saved.value).dense = None
    return saved


def remade_as_a_view(world: World) -> Saved:
    saved = remade_saved(world)
    saved.spec, saved.offset = TensorSpec.of(X[1:, ::2]), 4
    return saved


def remade_for_a_writer(world: World) -> Saved:
    saved = remade_saved(world)
    saved.builtin = False
    return saved


def claimable(world: World) -> Saved:
    saved = remade_saved(world)
    saved.claimable = True
    return saved


def shared_saved(world: World) -> Saved:
    saved = remade_saved(world)
    assert saved.value is not None
    saved.value.shares = True
    return saved


SAVED: dict[Callable[[World], Saved], bool] = {  # and whether the reference has to be asked
    dense_saved: False,
    changed_saved: True,
    assigned_saved: True,
    freed_saved: True,
    program_has_let_go: False,
    shape_saved: True,
    found_changed: True,
    remade_saved: False,
    remade_for_two: False,
    remade_as_a_view: False,
    remade_for_a_writer: True,  # the second time
    claimable: False,
    shared_saved: False,
}


@pytest.mark.parametrize("has_graph", [True, False])
@pytest.mark.parametrize("makes", SAVED, ids=lambda makes: makes.__name__)
def test_the_same_is_unpacked(makes: Callable[[World], Saved], has_graph: bool, by_references: Any) -> None:
    def read(reader: Callable[[Saved, World], Tensor]) -> Any:
        with torch.set_grad_enabled(has_graph):
            world = World()
            saved = makes(world)
            return [outcome(lambda: reader(saved, world), world) for _ in range(2)]

    asked = []

    def twin(saved: Saved, world: World) -> Tensor:
        def otherwise(packed: Any) -> Tensor:
            asked.append(packed)
            return unpack(packed, world.live, 0)

        reading = Reading(otherwise, lambda x: x, lambda x: x, ())
        reading.is_simple = True
        tensor: Tensor = functions.read(reading, saved)
        return tensor

    found = read(twin)
    assert found == by_references(lambda: read(lambda saved, world: unpack(saved, world.live, 0)))
    assert bool(asked) == SAVED[makes]


# -- finalizers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_read", [True, False])
def test_both_finalizers_leave_the_same_notes(has_read: bool) -> None:
    def notes(finalizers: tuple[Any, Any]) -> Any:
        world = World()
        saved = remade_for_two(world)
        wanted = saved.value
        assert wanted is not None
        wanted.account.stash_nbytes = 40
        with world.live.lock:
            functions.dense(wanted, False, False)
        if has_read:
            saved.has_read()
        world.live._losses.clear()
        finalizers[0](saved)
        finalizers[1](wanted)
        finalizers[1](world.value())  # of which there is nothing to say
        found = list(world.live._losses), wanted.unread
        return found

    assert (
        notes(value.FINALIZERS)
        == notes((Saved.__del__, Value.__del__))
        == (
            [(1, 0, 0), (0, 40, 96)],
            1,  # it does not read any more, so only the other one is awaited
        )
    )


def test_a_finalizer_of_what_was_not_finished_says_nothing() -> None:
    for kind in (Saved, Value):
        kind.__new__(kind)
    gc.collect()


def test_the_last_saved_tensor_gives_the_buffers_back() -> None:
    world = World()
    world.live.buffers.take(TensorSpec.of(torch.empty(1 << 18)), torch.float32)
    saved = [Saved(X, world.live) for _ in range(3)]
    while saved:
        assert world.live.buffers.nbytes
        saved.pop()
    assert world.live.saved == world.live.buffers.nbytes == 0


# -- settings ----------------------------------------------------------------------------------------------------------


def test_both_compare_settings_alike() -> None:
    for kind in ("cpu", ""):
        readers = numerics.READERS[kind]
        now = settings(kind)
        assert numerics.agree_reference(readers, now) and functions.agree(readers, now)
        for index in range(len(now)):
            other = (*now[:index], "other", *now[index + 1 :])
            assert not functions.agree(readers, other)
        assert not functions.agree(readers, now[:-1])
    with pytest.raises(ZeroDivisionError):
        functions.agree((lambda: 1 // 0,), (1,))
    with pytest.raises(TypeError, match="agree takes"):
        functions.agree([], ())


def test_settings_that_changed_are_seen() -> None:
    before, threads = settings("cpu"), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert settings("cpu") is not before
    finally:
        torch.set_num_threads(threads)
    assert settings("cpu") is before


# -- whole steps -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(96, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        y = 0.5 * y * (1.0 + torch.tanh(0.8 * (y + 0.04 * torch.pow(y, 3.0))))
        z: Tensor = x + F.dropout(self.down(y), 0.2)
        return z


def test_nothing_is_left_behind_by_many_steps() -> None:
    torch.manual_seed(0)
    model, session = nn.Sequential(*(Block() for _ in range(3))), Session("lossless", min_nbytes=256)
    x = torch.randn(8, 16, 32)

    def step(session: Session | None) -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        if session is None:
            model(x).sum().backward()
        else:
            with session:
                loss = model(x).sum()
            loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    def counts() -> list[int]:
        gc.collect()
        shared = [session._live, session._live.lock, INPUT, settings("cpu"), torch.tanh, *model.parameters()]
        return [len(gc.get_objects()), *(sys.getrefcount(each) for each in shared)]

    expected = step(None)
    for _ in range(12):  # until everything has been made that the process makes once, such as its coders
        assert not differences(step(session), expected)
    assert sum(row.decodes for row in session.report().rows) > 10
    before = counts()
    for _ in range(20):
        step(session)
    after = counts()
    assert all(now - then <= 8 for now, then in zip(after, before, strict=True)), (before, after)
    assert session._live.saved == session._live.nbytes == session._live.remade_nbytes == 0


@pytest.mark.parametrize("name", RECIPES)
def test_no_reference_is_kept(name: str) -> None:
    world = World()
    wanted = world.value(RECIPES[name](world))
    made = wanted.recipe
    assert made is not None
    call = made.call
    kept: list[Any] = [wanted, made, call, call.args, call.kwargs, call.spec, call.settings, made.inputs, *made.inputs]

    def counts() -> list[int]:
        return [sys.getrefcount(each) for each in kept]

    for _ in range(3):
        functions.dense(wanted, False, True)
        wanted.hold(None)
    before = counts()
    for _ in range(20):
        functions.dense(wanted, False, True)
        wanted.hold(None)
    assert counts() == before

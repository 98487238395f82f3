"""Values that their recipes make again: after what they begin from, once for all who read them, or for each reader."""

from __future__ import annotations

import time
from functools import partial

from torch import Tensor

from backstash.errors import SavedTensorModifiedError
from backstash.remake import fused
from backstash.remake.calls import Leaf, Memory
from backstash.stash.buffers import new_memory
from backstash.stash.comparing import check_sample, is_other
from backstash.stash.decode import check_version, dense, modified_message, planes, take_memory
from backstash.stash.drafts import make_certain
from backstash.stash.value import Remade, Value


def remade_whole(value: Value, ahead: bool) -> Tensor:
    """Returns the whole of a value that was forgotten (Note: [made ahead] in stash/decode.py)."""
    state, buffers = value.state, value.live.buffers
    if state.shares:
        return shared(value)
    whole = state.made if state.made is not None else buffers.holding(state)
    if whole is not None:
        return whole
    assert isinstance(state, Remade)
    make_certain(state.form)
    value.begin_round()
    started = time.perf_counter()
    whole = remake(value)
    if not ahead or value.live.has_room(whole.untyped_storage().nbytes()):
        value.hold(whole.detach())
    for leaf in state.recipe.leaves:
        if leaf.state.recipe is not None and leaf.state.made is None:
            buffers.shrink()  # there was no room for them
            break
    buffers.filled(state, whole)
    value.account.decode_seconds += time.perf_counter() - started
    value.account.decodes += 1
    return whole


def shared(value: Value) -> Tensor:
    """A value that is made once for all who read it, after everything that it is made from.

    Note: [made once]
        What is made on the way is held for its own readers, and for other values that are yet to be made from it. So a
        chain of costly calls runs once in a backward pass. It runs in a loop, because it may have any length.
    """
    if value.state.made is not None:
        return value.state.made
    waiting = [value]
    whole: Tensor | None = None
    while waiting:
        latest = waiting[-1]
        if latest.state.made is not None and latest is not value:
            waiting.pop()
            continue
        assert latest.state.recipe is not None
        missing = [
            leaf for leaf in dict.fromkeys(latest.state.recipe.leaves) if leaf.state.shares and leaf.state.made is None
        ]
        if missing:
            waiting += missing
            continue
        started = time.perf_counter()
        latest.begin_round()
        latest.live.buffers.shrink(
            latest.live.buffers.nbytes
        )  # what nobody awaits: fresh memory is taken now, none of theirs
        whole = remake(latest, fresh=True)
        group = latest.state.recipe.call.group
        made = [(latest, whole)]
        if group is not None and group.made:  # Note: [saved inside] in repeating.py
            wanted = group.wanted()
            made += [(wanted[number], x) for number, x in group.made.items() if number in wanted]
            group.made = {}
        for each, x in made:
            if each is not latest:
                each.begin_round()
                check_sample(each, x)
            each.hold(x.detach())
            assert each.state.recipe is not None
            for leaf in each.state.recipe.leaves:
                if leaf.state.shares:
                    leaf.let_go()
            each.account.decodes += 1
        latest.account.decode_seconds += time.perf_counter() - started
        waiting.pop()
    assert whole is not None
    return whole


def remake(value: Value, fresh: bool = False) -> Tensor:
    """Computes a value again, in a pooled buffer or in ``fresh`` memory.

    Raises:
        RecomputedDifferentlyError: it has other bits than it had (Note: [samples]).
    """
    state = value.state
    assert isinstance(state, Remade)
    recipe, form = state.recipe, state.form
    encoded = None if form is None else planes(value, form)
    memory = partial(new_memory, recipe.call.spec) if fresh else memory_of(value)
    whole = fused.made(recipe, fetch, memory, encoded)
    if recipe.first_use is not None:
        way = "plain" if state.sample is None or state.sample.differs(whole) else "fused"
        recipe.first_use(way)
        recipe.first_use = None
        if way == "plain":
            state.recipe = recipe = recipe.unfused()
            del whole  # there may be no room for both
            whole = fused.made(recipe, fetch, None, encoded)
    elif recipe.fused:
        if not is_other(value, whole):
            return whole
        state.recipe = recipe = recipe.unfused()  # it was not proven on such numbers: the calls have the last word
        del whole
        whole = fused.made(recipe, fetch, None, encoded)
    check_sample(value, whole)
    return whole


def memory_of(value: Value) -> Memory:
    """What makes memory in the pool of decode buffers for what a value's recipe makes."""
    assert value.state.recipe is not None
    spec = value.state.recipe.call.spec
    return partial(take_memory, value, spec, spec.dtype)


def fetch(leaf: Leaf) -> Tensor:
    """What a recipe begins from."""
    value: Value = leaf.value
    if value.is_dense:
        guard = value.dependents.guard
        assert guard is not None
        if guard.dense is None:
            assert guard.origin.modified is not None
            raise SavedTensorModifiedError(
                modified_message(guard.spec, guard.tensor, guard.origin.modified, guard.origin.version)
            )
        check_version(guard)
        whole = guard.dense
    else:
        whole = dense(value, True, True)
    if whole.shape == leaf.spec.shape and whole.stride() == leaf.spec.stride and whole.storage_offset() == leaf.offset:
        return whole.detach()  # and not the pool's own tensor, which does not tell it that the memory is in use
    return whole.as_strided(leaf.spec.shape, leaf.spec.stride, leaf.offset)

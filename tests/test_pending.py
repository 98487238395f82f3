"""Looks at a saved storage: in the first step and after some more, at once when it is let go of."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

import backstash as bs
from backstash.policies import Keep, Policy
from backstash.saved import Need, SavedTensor, TensorSpec
from backstash.stash.accounts import Account
from backstash.stash.live import Live
from backstash.stash.pending import CROWD, Pending
from backstash.stash.place import SETTLED, Place
from backstash.stash.value import Saved, Value

STEPS = 12


def place() -> Place:
    spec = TensorSpec.of(torch.zeros(2))
    return Place(SavedTensor("relu/Relu#0:result", "Relu", "result", "relu", spec, Need.VALUE))


def decided_after(known: Place, held: int) -> tuple[int, int]:
    """How many functions after the save the value is decided on that the program holds for so many, and the looks."""
    ages: list[int] = []
    pending = Pending(lambda value: ages.append(pending.clock - value.waiting.born))
    live = Live()
    x: torch.Tensor | None = torch.zeros(64)
    assert x is not None
    saved = Saved(x, live)
    value = Value(x.untyped_storage(), Account(None, 256, "kept"), live, known)  # type: ignore[arg-type]

    value.members.append(weakref.ref(saved))
    saved.value = value
    pending.add(value)
    looks = 0
    for _ in range(1000):
        pending.clock += 1
        if pending.clock - value.waiting.born >= held:
            x = None
        due = pending.due.pop(pending.clock, None)
        if due is not None:
            looks += 1
            pending.look_at(due)
        if ages:
            return ages[0], looks
    raise AssertionError("the value was never decided on")


@pytest.mark.parametrize("held", [1, 5, 64, 146, 999])
def test_a_value_of_a_new_place_is_decided_on_at_once(held: int) -> None:
    """The first step of a plan has a promised peak: what is decided on late lies in it for longer than it knows."""
    known = place()
    assert decided_after(known, held)[0] == held
    assert decided_after(known, held) == (held, 1)


def test_a_value_that_was_held_to_the_end_of_a_step_is_looked_at_rarely_in_the_next() -> None:
    known, looks = place(), []
    for _ in range(2):
        pending, x = Pending(lambda value: None), torch.zeros(64)
        kept = Value(x.untyped_storage(), Account(None, 256, "kept"), Live(), known)  # type: ignore[arg-type]
        pending.add(kept)
        number = 0
        for _ in range(400):
            pending.clock += 1
            due = pending.due.pop(pending.clock, [])
            number += len(due)
            pending.look_at(due)
        looks.append(number)
        assert kept.waiting.storage is not None
    assert looks[0] == 400 and looks[1] < 40


def test_many_values_of_new_places_that_wait_at_once_are_looked_at_in_turns() -> None:
    pending, live, values, looks = Pending(lambda value: None), Live(), [], 0
    held = [torch.zeros(64) for _ in range(8 * CROWD)]
    for number in range(1000):
        pending.clock += 1
        due = pending.due.pop(pending.clock, [])
        looks += len(due)
        pending.look_at(due)
        if number < len(held):
            storage = held[number].untyped_storage()
            values.append(Value(storage, Account(None, 256, "kept"), live, place()))  # type: ignore[arg-type]
            pending.add(values[-1])
    assert CROWD / 2 < looks / 1000 < 2 * CROWD
    assert all(value.waiting.storage is not None for value in values)


@pytest.mark.parametrize("held", [1, 2, 3, 7, 20, 63, 200])
def test_a_value_is_decided_on_at_once_after_some_steps_and_never_later_than_before(held: int) -> None:
    known = place()
    found = [decided_after(known, held) for _ in range(STEPS)]
    ages = [age for age, _ in found]
    assert ages == sorted(ages, reverse=True)
    assert found[-1] == (held, 1)  # with a single look
    assert all(looks <= 2 for _, looks in found[1:])


def test_a_program_that_changes_is_followed() -> None:
    known = place()
    for held in (40, 90, 10, 41):
        ages = [decided_after(known, held)[0] for _ in range(SETTLED + STEPS)]
        assert ages[-1] == held
        assert ages == sorted(ages, reverse=True)


def test_the_stash_of_a_step_is_the_same_in_every_later_step() -> None:
    """A value that is decided on late takes its place in the peak, so a plan's peak would differ from step to step."""

    class Peaks(Policy):
        def decide(self, saved: SavedTensor) -> Keep:
            self.decided.append(saved.key)
            return Keep()

        def __init__(self) -> None:
            self.decided: list[str] = []

    policy = Peaks()
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)]
    model = nn.Sequential(nn.Linear(32, 32), *blocks)
    session = bs.Session(policy, model=model, min_nbytes=0)
    orders = []
    for _ in range(STEPS):
        policy.decided.clear()
        with session:
            first = model[0](torch.ones(64, 32))
            x = first
            for block in blocks:
                x = block(x)
            loss = (x + first).square().mean()
            del first, x
        loss.backward()
        orders.append(list(policy.decided))
    assert orders[-1] == orders[-2] == orders[-3]

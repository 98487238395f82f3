"""Storages that autograd has saved and about which nothing is decided yet.

Note: [encode when orphaned]
    A tensor is not encoded when it is saved but when its storage's use count says that only autograd's saves are left.
    Until then encoding gains nothing (the program holds the memory anyway), after that nobody can save or change the
    tensor again. So a storage is never encoded twice, values that the program keeps are kept by reference, buffers that
    an op writes after saving are complete, and no pointer is ever looked up after its memory is gone.

    The count is looked at before a torch function runs. At a place that was never reached before, it is looked at
    before each of them: the peak of a plan's first step is promised before it runs, and with every value that is
    decided on late, the step holds more than the plan knows of. Where many values wait at once, as in a loop that
    collects its outputs, each is looked at before every so many functions, or the looks would take longer than the
    step. In later steps a place says after how many functions its storage was let go of, and it is looked at then.
    Should it be let go of earlier one day, that is found by bisection, one look a step. What the program holds for
    longer than it did is looked at whenever the time beyond that has become a quarter longer, and so is what it never
    let go of, up to the age that it had then.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable

import torch

from backstash.stash.accounts import Account
from backstash.stash.live import Live
from backstash.stash.place import Place
from backstash.stash.value import Value
from backstash.torch_internals import set_grad_mode, storage_use_count

CROWD = 10
"""How many values are looked at before one function at most, of those that are looked at before every one."""


class Pending:
    """The pending values by the address of their storage, and when to look at them.

    Args:
        decide: encodes a value whose storage nobody but autograd holds.

    Attributes:
        clock: how many torch functions and packed tensors there were so far.
        due: the values to look at, by the clock's number.
    """

    __slots__ = ("_decide", "_values", "clock", "due")

    def __init__(self, decide: Callable[[Value], None]) -> None:
        self.clock = 0
        self._decide = decide
        self._values: dict[int, weakref.ref[Value]] = {}
        self.due: dict[int, list[weakref.ref[Value]]] = {}

    def __contains__(self, cdata: int) -> bool:
        return cdata in self._values

    def get(self, cdata: int) -> Value | None:
        """The pending value of the storage at that address."""
        reference = self._values.get(cdata)
        return None if reference is None else reference()

    @property
    def is_waiting(self) -> bool:
        """Whether any value is pending of which the graph still lives."""
        return any(reference() is not None for reference in self._values.values())

    def add(self, value: Value) -> None:
        """Queue a value that was saved just now."""
        self._values[value.waiting.cdata] = reference = weakref.ref(value)
        value.waiting.born = self.clock
        self._look_again(self.clock + (1 if value.place is None else value.place.delay), reference)

    def look_at(self, due: list[weakref.ref[Value]]) -> None:
        """Decide about those of these values that nobody else holds; look at the others later."""
        for look in due:
            value = look()
            if value is None or value.waiting.storage is None:  # its graph is gone, or it was decided on
                continue
            if not self.decide_if_orphaned(value):
                age = self.clock - value.waiting.born
                later = age + max(1, age // 4) if value.place is None else self._next_look(value.place, age)
                self._look_again(value.waiting.born + later, look)

    def _next_look(self, place: Place, age: int) -> int:
        """After how many functions to look again at a value that is held, at a place and an age."""
        later = place.still_held(age)
        if later:
            return later
        wait = (age - place.gone) // 4
        if not place.gone and place.held == age:  # no step has been here before
            wait = min(wait, len(self._values) // CROWD)
        return age + max(1, wait)

    def look_at_all(self) -> None:
        """Decide about every pending value that nobody else holds."""
        for reference in list(self._values.values()):
            value = reference()
            if value is not None and value.waiting.storage is not None:
                self.decide_if_orphaned(value)

    def decide_if_orphaned(self, value: Value) -> bool:
        """Decide about a value if nobody else holds its storage; returns whether that was so."""
        if value.waiting.cdata not in self._values or not is_orphaned(value, _OWN_REFERENCES):
            return False
        del self._values[value.waiting.cdata]  # so it is decided about once
        if value.place is not None:
            value.place.let_go(self.clock - value.waiting.born)
        if torch.is_grad_enabled():
            try:
                set_grad_mode(False)
                self._decide(value)
            finally:
                set_grad_mode(True)
        else:
            self._decide(value)
        value.waiting.storage = None
        return True

    def begin_step(self) -> None:
        """Forget what died."""
        self._values = {cdata: value for cdata, value in self._values.items() if value() is not None}

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()
        self.due.clear()

    def _look_again(self, clock: int, look: weakref.ref[Value]) -> None:
        looks = self.due.get(clock)
        if looks is None:
            self.due[clock] = [look]
        else:
            looks.append(look)


def is_orphaned(value: Value, own_references: int) -> bool:
    """Whether only autograd's saves hold the storage of a value.

    Args:
        value: the value.
        own_references: how many references there are to its storage's Python object where nobody else holds it.
    """
    assert value.waiting.storage is not None  # no variable of its own: it would count
    count = storage_use_count(value.waiting.storage._cdata) - 1  # its Python object
    members = value.members
    if count > len(members):
        return False
    for member in members:
        saved = member()
        if saved is not None and saved.dense is not None:
            count -= 1
    return count == 0 and _references(value) <= own_references  # the program may hold its Python object as well


def _references(value: Value) -> int:
    """How many references there are to the Python object of a value's storage."""
    return sys.getrefcount(value.waiting.storage)


def _references_of_nobody_else() -> int:
    """The same where only the value and torch itself hold it."""
    x = torch.empty(1, device="cpu")
    return _references(Value(x.untyped_storage(), Account(None, 0, ""), Live()))  # type: ignore[arg-type]


_OWN_REFERENCES = _references_of_nobody_else()

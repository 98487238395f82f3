"""Values that are remade from what the program still holds, and what is done before the program changes it.

Note: [what a recipe begins from] in leaves.py says why: before a function changes such memory or hands it on, and when
the Session is left, what is remade from it is remade at once, and stored.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from functools import partial

from backstash.codecs import base
from backstash.policies.base import Stash
from backstash.remake.calls import Held
from backstash.remake.making import remake
from backstash.stash.decode import hold_dense
from backstash.stash.encode import Encoder, without_error
from backstash.stash.pending import Pending
from backstash.stash.value import Form, Remade, Value
from backstash.torch_internals import without_gradients


class Leaning:
    """The values that are remade from what the program still holds.

    Attributes:
        by_storage: by the address of the storage of a leaf, or of a parameter that is read where it is.
    """

    __slots__ = ("by_storage",)

    def __init__(self) -> None:
        self.by_storage: dict[int, list[weakref.ref[Value]]] = {}

    def __bool__(self) -> bool:
        return bool(self.by_storage)

    def __contains__(self, cdata: int) -> bool:
        return cdata in self.by_storage

    def watch(self, value: Value, leaves: Iterable[Value], references: Iterable[Held]) -> None:
        """Note which leaves of a value's recipe the program may still change, and the other tensors that it reads."""
        for leaf in leaves:
            if (leaf.waiting.storage is not None or leaf.waiting.address is not None) and leaf.is_dense:
                self.by_storage.setdefault(leaf.waiting.cdata, []).append(weakref.ref(value))
        for held in references:
            self.by_storage.setdefault(held.tensor.untyped_storage()._cdata, []).append(weakref.ref(value))

    def expect(self, cdata: int) -> None:
        """From now on changes of that storage have to be told: what will be remade may begin from a copy of it."""
        self.by_storage.setdefault(cdata, [])

    def forget(self, cdata: int) -> None:
        """Nobody can change the storage at that address any more."""
        self.by_storage.pop(cdata, None)

    def prune(self) -> bool:
        """Forget values that are gone; returns whether any is left that is to be remade."""
        alive = {cdata: [each for each in values if each() is not None] for cdata, values in self.by_storage.items()}
        self.by_storage = {cdata: values for cdata, values in alive.items() if values}
        found = (each() for values in self.by_storage.values() for each in values)
        return any(value is not None and value.state.recipe is not None for value in found)

    def clear(self) -> None:
        """Forget everything."""
        self.by_storage.clear()

    def store(self, cdata: int, encoder: Encoder, pending: Pending) -> None:
        """Store what is to be remade from the storage at that address: it may change from now on."""
        for reference in self.by_storage.pop(cdata, ()):
            value = reference()
            if value is None:
                continue
            if any(value.saved()):  # else backward has read it, as before an optimizer's step
                value.account.is_exposed = True
            if value.state.recipe is not None:
                without_gradients(partial(_store_instead, value, encoder))
        leaf = pending.get(cdata)
        if leaf is not None and not leaf.key:  # else others lean on it, from when it was held in another form
            leaf.dependents.guard = None

    def store_all(self, encoder: Encoder, pending: Pending, *, costly: bool = False) -> None:
        """The same for the storage of every leaf, because nobody watches from now on.

        What is remade by costly calls stays as it is, unless that is asked for, too. Its leaves are saved tensors and
        parameters, which plain PyTorch reads again as well: a new version of one is plain PyTorch's error, and any
        other change is found by the sample of what is remade from it.
        """
        for cdata in list(self.by_storage):
            values = [value for reference in self.by_storage[cdata] if (value := reference()) is not None]
            if costly or not all(value.state.shares or value.state.recipe is None for value in values):
                self.store(cdata, encoder, pending)


def _store_instead(value: Value, encoder: Encoder) -> None:
    """Remake a value now and hold it in another form."""
    state, facts = value.state, value.facts
    assert isinstance(state, Remade) and facts is not None
    otherwise = state.otherwise
    started = time.perf_counter()
    whole = remake(value, fresh=True)
    readers = [saved for saved in value.saved() if saved.origin.modified is None]  # the others raise when they are read
    form: Form | None = None
    reason = "the policy says so"
    if isinstance(otherwise, Stash):
        if value.dependents.height:  # others are remade from it
            otherwise = without_error(otherwise)
        form, reason = encoder.form(whole, facts, otherwise, readers)
    value.hold(None)
    live = value.live
    live.buffers.forget(state)
    if form is not None:
        form.errors, value.state = state.errors, form
        store = otherwise.store if isinstance(otherwise, Stash) else "device"
        if store != "device":
            live.prefetcher.put(form, facts.key)
        label = base.label(form.codec)
        note = "not recomputed: the program could change what it is made from"
        encoder.release(value, readers, facts, label, form.ticket.nbytes, note, started, store)
        return
    hold_dense(value, whole)
    value.take(whole.untyped_storage().nbytes())
    encoder.keep(value, facts, f"the program could change what it is made from; {reason}")

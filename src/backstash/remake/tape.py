"""The calls of a forward pass, and what may change the memory that they have read: the tape of a Session."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backstash import graphs
from backstash.capture.names import Names
from backstash.capture.naming import tensors_within
from backstash.capture.side_effects import SideEffect, affected
from backstash.interpreter import is_odd
from backstash.ops.bits import bits_of
from backstash.remake.calls import CallPlace, Group, tensors_in
from backstash.remake.contents import Contents, Inside
from backstash.remake.leaning import Leaning
from backstash.remake.noting import Noting
from backstash.repeatable import function_name
from backstash.saved import PLAIN
from backstash.stash import wrapped
from backstash.stash.live import Live
from backstash.stash.parameters import ParameterStorages
from backstash.stash.pending import Pending
from backstash.torch_internals import without_gradients

if TYPE_CHECKING:
    from backstash.stash.encode import Encoder
    from backstash.stash.value import Saved, Value


class CallTape:
    """The calls of a forward pass, by the contents that they have made.

    Args:
        names: which module runs, and what was learned of the model.
        pending: decides about values that nobody holds any more.
        parameters: tells the storages of parameters and buffers.
        live: the running totals, and what is copied where a call reads it because it is smaller.
        remakes_anything: whether costly calls are noted too.
        calls: names of the only ones that are (Note: [calls of a plan] in noting.py); None for all.

    Attributes:
        contents: of the storages that calls have read or filled.
        leaning: the values that are made from what the program may still change.
        noting: returns what is known of the calls of the model.
    """

    __slots__ = (
        "_names",
        "_packed",
        "_packed_before",
        "_pending",
        "_place",
        "contents",
        "leaning",
        "noting",
    )

    def __init__(
        self,
        names: Names,
        pending: Pending,
        parameters: ParameterStorages,
        live: Live,
        remakes_anything: bool,
        calls: frozenset[str] | None = None,
    ) -> None:
        self._names, self._pending = names, pending
        self.leaning, self.contents = Leaning(), Contents(live, parameters)
        # Bound to the tape it would be a cycle, in which the Session stays alive.
        self.noting = partial(_noting, names, calls)
        self.contents.copied, self.contents.noting = self.leaning.expect, self.noting
        self.contents.remakes_anything = remakes_anything
        self._packed: list[tuple[int, Saved]] = []  # in the function in progress, with their order
        self._packed_before = 0
        self._place: CallPlace | None = None  # of the function in progress

    # -- calls ---------------------------------------------------------------------------------------------------

    def begin_function(self, saved: int) -> None:
        """As in the protocol."""
        self._packed, self._packed_before, self._place = [], saved, None

    def counts(self, function: Any, label: str, number: int) -> bool:
        """As in the protocol (Note: [calls that count])."""
        self._place = self.noting().place(label, function, number)
        return self._place is not None

    def saves(self, saved: Saved, number: int) -> None:
        """As in the protocol. What a call that does not count saves nobody asks for."""
        if self._place is not None:
            self._packed.append((number - self._packed_before, saved))

    def made(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, random_state: Tensor | None
    ) -> None:
        """As in the protocol: remember how that content was made."""
        contents, place = self.contents, self._place
        if not contents.remakes_anything:
            if type(result) is Tensor:
                contents.note_call(function, args, kwargs, result, random_state, place=place)
            return
        results = [result] if type(result) is Tensor else result
        # A batch norm is repeated without its running statistics, so it saves other tensors then.
        saved_inside = {} if function is F.batch_norm else self._saved_inside(args, kwargs, results)
        group = Group() if saved_inside else None
        of_result = None if group is None else Inside(group, None, saved_inside)
        for number, each in enumerate(results):
            if type(each) is Tensor:
                output = None if results[0] is result else number
                contents.note_call(function, args, kwargs, each, random_state, output, of_result, place)
        if group is not None:
            for number, x in saved_inside.items():
                inside = Inside(group, number, saved_inside)
                contents.note_call(function, args, kwargs, x, random_state, None, inside, place)

    def cast_inside(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, saves: list[Saved]
    ) -> list[tuple[Saved, Tensor]]:
        """As in the protocol.

        Note: [casts inside]
            Autocast converts what a function is given below the function, where no mode sees it, and the function saves
            the converted copy: three copies of one norm's result for the queries, keys and values of an attention. So
            what is saved in another dtype than an argument, looks like it and is no result of the function is noted as
            the conversion of that argument, if the first time it had the bits of one.
        """
        casts = []
        given = [x for x in tensors_in(args, kwargs) if x.is_floating_point() and not is_odd(x)]
        results = [x for x in tensors_within(result) if type(x) in PLAIN and x.layout is torch.strided]
        outside = {x.untyped_storage()._cdata for x in (*given, *results)}
        for saved in saves:
            dense = saved.dense
            if dense is None or not saved.is_plain or not dense.is_floating_point() or is_odd(dense):
                continue
            found = [x for x in given if x.dtype is not dense.dtype and x.numel() == dense.numel()]
            if len(found) != 1 or dense.untyped_storage()._cdata in outside:
                continue
            (x,) = found
            made = _converted(x, dense)
            if made is None or self.contents.parameters.include(x, x.untyped_storage()):
                continue
            name = f"to in {function_name(function)}"
            label, number = self._names.count_call(name)
            place = self.noting().place(label, name, number)
            if place is not None and _is_cast(place, next(i for i, each in enumerate(given) if each is x), x, made):
                self.contents.note_call(Tensor.to, (x, dense.dtype), {}, made, None, place=place)
                casts.append((saved, x))
        return casts

    def made_by_operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """As in the protocol."""
        place, self._place = self._place, None
        for number, each in enumerate([result] if type(result) is Tensor else result):
            if type(each) is Tensor:
                output = None if type(result) is Tensor else number
                self.contents.note_call(function, args, kwargs, each, None, output, None, place)

    def _saved_inside(self, args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[Any]) -> dict[int, Tensor]:
        """What the function that has returned just now has saved of its own making, by the number of the save."""
        packed, self._packed = self._packed, []
        if not packed:
            return {}
        given = affected(SideEffect.CHANGES, (*args, results), kwargs)
        plain = (x for x in given if type(x) in PLAIN and x.layout is torch.strided and not is_odd(x))
        outside = {x.untyped_storage()._cdata for x in plain}
        found = {}
        for number, saved in packed:
            x = saved.dense if saved.node is not None and saved.is_plain and number >= 0 else None
            if x is None or x.untyped_storage()._cdata in outside:
                continue
            if self.contents.of(x).call is None:  # else it is a conversion of something (Note: [casts inside])
                found[number] = x
        return found

    # -- contents ------------------------------------------------------------------------------------------------

    def before_side_effect(
        self, effect: SideEffect, args: tuple[Any, ...], kwargs: dict[str, Any], encoder: Encoder
    ) -> None:
        """As in the protocol."""
        contents, leaning = self.contents, self.leaning
        has_version = effect not in (SideEffect.ESCAPES, SideEffect.CHANGES_STATISTICS)
        for x in affected(effect, args, kwargs):
            memories = wrapped.memories(x)
            if memories is None:  # it may be the memory of anything
                leaning.store_all(encoder, self._pending, costly=True)
                contents.escape_all()
                return
            for inner in memories:
                is_told = has_version and inner is x  # an op in place on a wrapper gives what it wraps no version
                if is_told and not leaning:
                    continue  # nothing is remade from what the program may change
                if inner.layout is not torch.strided or is_odd(inner):
                    continue
                storage = inner.untyped_storage()
                if storage._cdata in leaning:
                    leaning.store(storage._cdata, encoder, self._pending)
                (contents.change if is_told else contents.escape)(inner, storage)

    def take(self, value: Value, dense: Tensor) -> None:
        """As in the protocol."""
        value.content = self.contents.of(dense)
        value.content.value = weakref.ref(value)

    def move(self, value: Value, whole: Tensor) -> None:
        """As in the protocol."""
        if value.content is not None:
            self.contents.move(value.content, whole)

    def owns(self, cdata: int) -> None:
        """As in the protocol."""
        self.leaning.forget(cdata)

    # -- steps ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """As in the protocol."""
        self.contents.begin_step()

    def begin_backward(self) -> None:
        """As in the protocol."""
        self.contents.forget_dead()

    def end_pass(self) -> None:
        """As in the protocol."""
        self.noting().end_pass()

    def store_all(self, encoder: Encoder) -> None:
        """As in the protocol."""
        self.leaning.store_all(encoder, self._pending)

    def clear(self) -> None:
        """As in the protocol."""
        self._packed, self._place = [], None
        self.leaning.clear()
        self.contents.clear()


def _is_cast(place: CallPlace, number: int, x: Tensor, made: Tensor) -> bool:
    """Whether an argument, the one with that number, was converted there; the bits are compared once."""
    facts = number, x.dtype, made.dtype  # whatever the sizes are: lengths of steps may have no end
    known = place.casts = place.casts or {}
    if facts not in known:
        if graphs.capture() is not None:
            return False
        known[facts] = without_gradients(lambda: torch.equal(bits_of(x.to(made.dtype)), bits_of(made)))
    return known[facts]


def _converted(x: Tensor, saved: Tensor) -> Tensor | None:
    """A saved tensor as the conversion of ``x`` would return it; None where it is laid out otherwise."""
    if saved.shape == x.shape and saved.stride() == x.stride():
        return saved
    if x.is_contiguous() and saved.is_contiguous():  # a linear layer has flattened it
        return saved.view(x.shape)
    return None


def _noting(names: Names, calls: frozenset[str] | None) -> Noting:
    """What is known of the calls of the model whose names these are."""
    learned = names.learned
    if learned.noting is None:
        learned.noting = Noting(calls)
    noting: Noting = learned.noting
    return noting

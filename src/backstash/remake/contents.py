"""The contents of a step's storages, and the calls that made them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from backstash.interpreter import is_odd
from backstash.numerics import settings
from backstash.remake import calls, patterns, repeating
from backstash.remake.calls import CHANGED, Call, CallPlace, Content, Group, Held, View
from backstash.remake.patterns import Pattern, Slot
from backstash.saved import TensorSpec
from backstash.stash.parameters import ParameterStorages
from backstash.torch_internals import autocast_of, without_gradients

if TYPE_CHECKING:
    from backstash.remake.noting import Noting
    from backstash.stash.live import Live

SNAPSHOT_NBYTES = 1 << 20
"""A parameter or buffer up to this size is copied for a recipe of cheap calls; a larger one has none."""

_Index = tuple[Any, ...]
"""What tells apart two looks of a storage: version, offset, shape, strides and dtype."""


class Inside(NamedTuple):
    """One of the tensors that a call has saved inside of the function, or its result, which has no number.

    Attributes:
        group: all that the call has saved inside.
        number: of the save.
        saved: all of them, by their numbers.
    """

    group: Group
    number: int | None
    saved: Mapping[int, Tensor]


class Contents:
    """Contents by the address of their storage; a content knows its storage, because addresses are given away again.

    Args:
        live: of the Session: what is smaller than its ``min_nbytes`` is copied where a call reads it, and no call that
            makes it is noted.
        parameters: tells the storages of parameters and buffers.

    The parameters are an attribute as well.

    Attributes:
        remakes_anything: whether calls of costly functions are noted too, and proven (Note: [proven calls]).
        describes: whether costly calls are described as patterns, so that later ones can be compared with them.
        copied: called with the address of a storage whose memory was copied, and whose changes have to be told.
        noting: returns what is known of the calls of the model; None where nothing is remembered from step to step.
    """

    __slots__ = (
        "__weakref__",
        "_contents",
        "_copied_nbytes",
        "_has_copied",
        "_live",
        "_references",
        "_snapshots",
        "copied",
        "describes",
        "noting",
        "parameters",
        "remakes_anything",
    )

    def __init__(self, live: Live, parameters: ParameterStorages) -> None:
        self.copied: Callable[[int], object] = lambda cdata: None
        self._live = live
        self.parameters = parameters
        self.remakes_anything = self.describes = False
        self._contents: dict[int, Content] = {}
        self.noting: Callable[[], Noting] | None = None
        self._snapshots: dict[int, dict[_Index, tuple[weakref.ref[torch.UntypedStorage], Callable[[], Held | None]]]]
        self._snapshots = {}  # by the address of their storage, as the references are
        self._copied_nbytes = 0  # since what died was forgotten
        self._references: dict[int, dict[_Index, Held]] = {}
        self._has_copied = False  # in this step, what the step before has read

    def __len__(self) -> int:
        return len(self._contents)

    def of(self, x: Tensor) -> Content:
        """What the storage of ``x`` holds now."""
        storage = x.untyped_storage()
        cdata, version = storage._cdata, x._version
        known = self._contents.get(cdata)
        if known is not None and known.version == version and known.storage() is storage:
            return known
        if known is None or known.storage() is not storage:
            content = Content(weakref.ref(storage), version)
        else:
            content = Content(known.storage, version, known if known.version == version - 1 else None)
            content.escaped = known.escaped
        self._contents[cdata] = content
        return content

    def note_call(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Tensor,
        random_state: Tensor | None,
        output: int | None = None,
        inside: Inside | None = None,
        place: CallPlace | None = None,
    ) -> None:
        """Remember how the content of the result's storage was made.

        Args:
            function, args, kwargs: what was called with what.
            result: what it returned, or saved inside.
            random_state: the generator's state before it, where it draws from it.
            output: which of several results it is.
            inside: tells that the function has saved tensors inside, and which of them this is.
            place: where in the model it was called.
        """
        if result.layout is not torch.strided or result.is_complex():
            return
        if not (result.is_floating_point() or self.remakes_anything):
            return
        storage = result.untyped_storage()
        if storage.nbytes() < self._live.min_nbytes or is_odd(result):
            return
        remakes_anything = self.remakes_anything
        is_simple = inside is None and output is None and random_state is None
        is_simple = is_simple and not (remakes_anything and self.describes)
        if place is not None and is_simple:
            like = place.proven if remakes_anything else place.pattern
            again = None if like is None else self._again(place, like, args, kwargs, result, storage)
            if again is not None:
                content = self.of(result)
                content.call = None if content.escaped else again
                return
        known = calls.call_of(function, args, kwargs, result, storage, self._argument, random_state, output)
        content = self.of(result)
        if known is None or content.escaped:
            return
        call, tensors = known
        call.place = place
        if self.describes and self.remakes_anything:
            call.pattern = patterns.pattern_of(args, kwargs, tensors, call)
        if not self.remakes_anything:
            content.call = call
            if place is not None:
                call.pattern = place.pattern = patterns.pattern_of(args, kwargs, tensors, call)
            return
        if not call.in_place and not (call.is_cheap and inside is None):
            call.needs_grad = _followed(tensors)
        if inside is not None and not call.in_place:
            call.group, call.saved = inside.group, inside.number
            call.is_cheap = False
            if inside.number is not None:
                if call.group.proven is None:
                    call.group.proven = repeating.repeats_inside(call, tensors, inside.saved)
                call.is_proven = inside.number in call.group.proven
                content.call = call
                return
        call.is_proven = repeating.is_repeated(call, tensors, result)
        content.call = call
        if place is not None and is_simple:
            place.proven = patterns.pattern_of(args, kwargs, tensors, call) if call.is_proven else None

    def _again(
        self,
        place: CallPlace,
        pattern: Pattern,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Tensor,
        storage: torch.UntypedStorage,
    ) -> Call | None:
        """The call if it is like the one that was noted at its place before, else None."""
        device_type = pattern.result.device.type
        if settings(device_type) is not pattern.call.settings or autocast_of(device_type) != pattern.call.autocast:
            return None
        tensors = patterns.fitting(pattern, args, kwargs, result, storage)
        if tensors is None:
            return None
        inputs = []
        for x, slot in zip(tensors, pattern.slots, strict=True):
            given = self._argument(x, storage, slot)
            if given is None:
                return None
            inputs.append(given)
        like = pattern.call
        if self.remakes_anything and not (like.in_place or like.is_cheap) and _followed(tensors) != like.needs_grad:
            return None
        statistics = None
        if like.name == "batch_norm":
            statistics = calls.statistics_of(like.kwargs, result)
        elif like.name in calls.ROW_NORMS:
            statistics = calls.row_statistics_of(result)
        return like.again(tuple(inputs), statistics, place, None if self.remakes_anything else pattern)

    def move(self, content: Content, x: Tensor) -> None:
        """A content, which was forgotten or encoded, is in the storage of ``x`` from now on."""
        storage = x.untyped_storage()
        content.storage, content.version = weakref.ref(storage), x._version
        self._contents[storage._cdata] = content

    def change(self, x: Tensor, storage: torch.UntypedStorage) -> None:
        """The memory of ``x`` is about to change: no recipe reads again what calls have read there up to now.

        A parameter may have no new version afterwards, where ``x`` is an alias by ``.data``. So its copies go as well.
        """
        self._snapshots.pop(storage._cdata, None)
        for held in self._references.pop(storage._cdata, {}).values():
            held.version = CHANGED

    def escape(self, x: Tensor, storage: torch.UntypedStorage) -> None:
        """Something may change the memory of ``x`` from now on without a new version: no recipe reads it."""
        self.change(x, storage)
        if storage.nbytes() < self._live.min_nbytes:
            return  # it is copied for each call that reads it
        if not self.parameters.include(x, storage):
            content = self.of(x)
            content.escaped, content.call = True, None

    def escape_all(self) -> None:
        """The same of whatever is known up to now, because nobody knows whose memory it was."""
        for content in self._contents.values():
            content.escaped, content.call = True, None
        self._snapshots.clear()
        for held in (held for known in self._references.values() for held in known.values()):
            held.version = CHANGED
        self._references.clear()

    def begin_step(self) -> None:
        """Forget what died, how the rest was made, and all copies of parameters."""
        self._has_copied = False
        self._snapshots.clear()
        self._references.clear()
        self.forget_dead()
        for content in self._contents.values():  # else a running average would remember all of its steps
            content.call = None

    def forget_dead(self) -> None:
        """Forget what died, but for what is made again from it, and so the copies of all that its calls have read."""
        self._copied_nbytes = 0
        self._contents = {cdata: known for cdata, known in self._contents.items() if known.storage() is not None}

    def clear(self) -> None:
        """Forget everything."""
        self._has_copied = False
        self._contents.clear()
        self._snapshots.clear()
        self._references.clear()

    def _argument(self, x: Tensor, made: torch.UntypedStorage, slot: Slot | None = None) -> View | Held | None:
        """A tensor argument of the call that filled ``made``; None where a call that reads it cannot be repeated.

        Args:
            x: the argument.
            made: the storage.
            slot: how it looks, where that is known.
        """
        storage = x.untyped_storage()
        if storage.nbytes() < self._live.min_nbytes or self.parameters.include(x, storage):
            return self._snapshot(x, storage)
        if storage is not made:
            content = self.of(x)
        else:  # an in-place op: it read the content before this one
            after = self.of(x)
            content, after.before = after.before or Content(after.storage, x._version - 1), None
        if slot is not None:
            return View(content, slot.spec, slot.offset)
        return View(content, TensorSpec.of(x), int(x.storage_offset()))

    def _snapshot(self, x: Tensor, storage: torch.UntypedStorage) -> Held | None:
        """A copy of a parameter, a buffer, or something small, as it is now; None if it is large.

        The program may change them before backward (a running average, an average of weights swapped in), also through
        ``.data`` and so without a new version. Where any producer may be repeated, copies of all weights would cost
        what is to be saved: then a large one is read where it is. A new version is an error then, and a change without
        a new version is found by the sample of the remade value (Note: [samples] in sample.py). A weight that was
        gathered after its module was entered may have no memory any more in backward, so it is not read again.
        """
        is_small = x.nbytes < self._live.min_nbytes
        if is_small and (x.is_cpu or not self.parameters.include(x, storage)):
            return self._copy(x)
        index = _index_of(x)
        if not is_small and self.remakes_anything:
            return None if self.parameters.may_be_freed(storage) else self._reference(x, storage, index)
        if x.nbytes > SNAPSHOT_NBYTES:
            return None
        known = self._copy_of(storage, index)
        if known is None:
            if not x.is_cpu:
                self._copy_together(x)
                known = self._copy_of(storage, index)
            if known is None:
                known = self._copy(x)
                self._keep_copy(storage, index, weakref.ref(known) if x.is_cpu else partial(_same, known))
        if self.noting is not None and not x.is_cpu:
            self.noting().copied[id(x)] = weakref.ref(x)
        return known

    def _copy(self, x: Tensor) -> Held:
        """A copy of a tensor. When there are many, what died is forgotten with the copies that it has read."""
        self._copied_nbytes += x.nbytes
        if self._copied_nbytes > SNAPSHOT_NBYTES:
            self.forget_dead()
        copy = x.detach().clone()
        return Held(copy, copy._version)

    def _copy_of(self, storage: torch.UntypedStorage, index: _Index) -> Held | None:
        known = self._snapshots.get(storage._cdata, {}).get(index)
        return known[1]() if known is not None and known[0]() is storage else None

    def _keep_copy(self, storage: torch.UntypedStorage, index: _Index, known: Callable[[], Held | None]) -> None:
        """Has other calls read a copy too: on a CPU while one does, on an accelerator as long as the step lasts."""
        self.copied(storage._cdata)
        self._snapshots.setdefault(storage._cdata, {})[index] = weakref.ref(storage), known

    def _copy_together(self, wanted: Tensor) -> None:
        """Copies the parameters and buffers that the last step has read, once a step and if ``wanted`` is one of them.

        Note: [copied together]
            To copy a vector takes an accelerator as long as to launch the copy, and a network has two vectors for each
            norm. So what was copied one by one in a step is copied by a single operation in the next step, when the
            first of them is read. A copy is used as any copy that several calls share: where the tensor still has the
            version of the copy, and nothing was seen that may have changed its memory without a new version. Where it
            has not, or its memory was gathered since its module was entered, it is copied again for the call.
        """
        if self._has_copied or self.noting is None:
            return
        noting = self.noting()
        known = noting.copied.get(id(wanted))
        if known is None or known() is not wanted:
            return
        self._has_copied = True
        found, noting.copied = [x for reference in noting.copied.values() if (x := reference()) is not None], {}
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, torch.UntypedStorage]]] = {}
        for x in found:
            if x.is_cpu or x.layout is not torch.strided or not 0 < x.nbytes <= SNAPSHOT_NBYTES or is_odd(x):
                continue
            storage = x.untyped_storage()
            if x.is_contiguous() and storage.nbytes() >= x.nbytes and not self.parameters.may_be_freed(storage):
                groups.setdefault((x.device, x.dtype), []).append((x, storage))
        for group in groups.values():
            copies = without_gradients(partial(_copies_of, [x for x, _ in group]))
            for (x, storage), copy in zip(group, copies, strict=True):
                held = Held(copy, copy._version)
                self._keep_copy(storage, _index_of(x), partial(_same, held))

    def _reference(self, x: Tensor, storage: torch.UntypedStorage, index: _Index) -> Held:
        """The memory of ``x`` itself: one object for all calls that read it before it is changed."""
        known = self._references.setdefault(storage._cdata, {})
        held = known.get(index)
        if held is None:
            held = known[index] = Held(x.detach(), x._version, True)
        return held


def _same(held: Held) -> Held:
    return held


def _index_of(x: Tensor) -> _Index:
    return x._version, x.storage_offset(), x.shape, x.stride(), x.dtype


def _copies_of(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of contiguous tensors of one device and dtype, made by one operation."""
    parts = torch.cat([x.detach().view(-1) for x in tensors]).split([x.numel() for x in tensors])
    return [part if x.dim() == 1 else part.view(x.shape) for x, part in zip(tensors, parts, strict=True)]


def _followed(tensors: list[Tensor]) -> tuple[bool, ...]:
    """For each tensor whether autograd follows it; empty where it follows none."""
    followed = tuple([x.requires_grad for x in tensors])
    return followed if True in followed else ()

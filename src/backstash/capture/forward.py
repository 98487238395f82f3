"""The forward pass as a Session sees it: what the observer of torch functions tells, and what autograd saves.

A tensor is *packed* when autograd saves it, and *named* when the op that has saved it has returned: the autograd node
tells the op and the role, the role tells the need. Then its storage is accounted for and queued, until nobody but
autograd holds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from backstash.capture.names import Names
from backstash.capture.naming import find_saved, weight_copies
from backstash.capture.side_effects import SideEffect
from backstash.interpreter import is_odd
from backstash.policies.base import Policy, is_watching
from backstash.saved import PLAIN, Need, SavedTensor
from backstash.stash import held, regions, wrapped
from backstash.stash.accounts import HELD, Account, Step
from backstash.stash.decode import follow_original
from backstash.stash.encode import Encoder
from backstash.stash.live import Live
from backstash.stash.parameters import (
    HeldParameter,
    ParameterStorages,
    StorageReference,
    is_leaf_of_graph,
    is_pinned,
)
from backstash.stash.pending import Pending
from backstash.stash.place import Place
from backstash.stash.seams import Tape
from backstash.stash.value import Saved, Value, version_of
from backstash.torch_internals import (
    any_autocast,
    hide_from_dynamo,
    in_backward,
    is_traced,
    no_torch_function,
)

TIMED_STEPS = 2
"""Steps in which it is noted how long functions take; the first also pays for what they prepare."""


class Forward:
    """Listens to the observer, and takes in what autograd saves.

    Args:
        policy: is told what nodes save, if it wants to know.
        names: names saved tensors.
        live: the running totals.
        tape: is told how tensors are made.
        encoder, pending: of the same Session.
        parameters: tells which storages are parameters and buffers.
        before_save: called before a tensor is taken in, under the lock: a step may begin with it.

    Attributes:
        depth: how many torch functions are in progress.
        differentiates: whether what a backward pass saves is named by what tells of its operations.
        unnamed: what was saved and has no name yet.
        recomputes: whether it is noted how values are made.
        is_timing: whether it is noted how long that took: in the first steps.
        remakes_anything: whether that is noted of costly functions too.
        parameters: tells which storages are parameters and buffers.
        step: the accounts of the step in progress.
        counted: how many tensors were saved in this step, their bytes, and a sum that tells by which nodes.
        is_idle: whether the Session has nothing to do.
        recorder: writes the pass in progress down; None for nobody.
        replaying: watches torch functions in passes that are known; None for nobody.
    """

    __slots__ = (
        "__weakref__",
        "_assigned",
        "_before_save",
        "_call",
        "_counted_before",
        "_encoder",
        "_is_watched",
        "_live",
        "_lock",
        "_made_in",
        "_names",
        "_pending",
        "_policy",
        "_rows",
        "_shapes",
        "_steps",
        "_tape",
        "_waiting",
        "counted",
        "depth",
        "differentiates",
        "is_idle",
        "is_timing",
        "parameters",
        "recomputes",
        "recorder",
        "remakes_anything",
        "replaying",
        "step",
        "unnamed",
    )

    def __init__(
        self,
        policy: Policy,
        names: Names,
        live: Live,
        tape: Tape,
        encoder: Encoder,
        pending: Pending,
        parameters: ParameterStorages,
        before_save: Callable[[], None],
    ) -> None:
        self.depth = 0
        self.differentiates = False
        self.unnamed: list[Saved] = []
        self._counted_before = 0  # of what is counted, before the function in progress has saved anything
        self._waiting: set[int] = set()  # those of them that were there before the operation in progress, by their ids
        self.recomputes = bool(policy.recomputes)
        self.is_idle = False
        self.is_timing = True
        self._steps = 0
        self._made_in: dict[int, float] = {}  # seconds, by the address of what was made
        self.remakes_anything = bool(policy.remakes_anything)
        self.step = Step()
        self.counted = [0, 0, 0]
        self.parameters = parameters
        self._policy = policy
        self._is_watched = is_watching(policy)
        self._names = names
        self._live = live
        self._lock = live.lock
        self._tape = tape
        self._pending = pending
        self._encoder = encoder
        self._before_save = before_save
        self._shapes: dict[int, tuple[StorageReference, Account]] = {}  # where only the shape is read
        self._assigned: list[Tensor] = []
        self.recorder: Any = None
        self.replaying: Any = None
        self._call: regions.RegionCall | None = None  # of a compiled region, whose tensors autograd saves now
        self._rows: dict[int, tuple[regions.RegionCall, int]] = {}  # of its tensors that are not named yet

    def begin_step(self, step: Step) -> None:
        """The accounts of the step that begins."""
        self.step = step
        self.counted[:] = 0, 0, 0
        self._shapes.clear()
        self._assigned.clear()
        self._steps += 1
        self._end_pass()
        self.is_timing = self._steps <= TIMED_STEPS
        self._made_in.clear()

    def clear(self) -> None:
        """Forget what was seen of storages: the Session is left."""
        self._shapes.clear()
        self._end_pass()
        self.unnamed, self._call = [], None
        self._rows.clear()

    def _end_pass(self) -> None:
        self._names.learned.forward_passes += 1
        self._tape.end_pass()

    def ran(self, region: regions.Region) -> None:
        """A compiled region has run, and hands its tensors to autograd."""
        with self._lock:
            self._before_save()
            self._call = regions.RegionCall(region, len(self.step.accounts))
            self.step.calls.append(self._call)

    # -- what the observer tells ---------------------------------------------------------------------------------

    def before_function(self) -> None:
        """A torch function is about to run: encode what nobody holds any more."""
        if self.depth == 0:
            self._counted_before = self.counted[0]
            if self.remakes_anything:
                self._tape.begin_function(self.counted[0])
        pending = self._pending
        pending.clock = clock = pending.clock + 1
        if clock in pending.due:
            self.look_at_due()

    def look_at_due(self) -> None:
        """Encode what nobody holds any more, of what it is time to look at."""
        with no_torch_function(), self._lock:
            self._pending.look_at(self._pending.due.pop(self._pending.clock))

    def after_function(self, result: Any) -> None:
        """A torch function has returned: name what it has saved."""
        with no_torch_function():
            self.name(result)

    def before_backward(self) -> None:
        """Backward is about to begin: encode everything that nobody holds."""
        with no_torch_function(), self._lock:
            self._pending.look_at_all()

    def before_side_effect(self, effect: SideEffect, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A function is about to change its arguments, or to hand their memory on to who changes it unseen."""
        with self._lock:
            self._tape.before_side_effect(effect, args, kwargs, self._encoder)

    def took(self, result: Tensor, seconds: float, is_change: bool) -> None:
        """Remember how long it took to make a tensor. On a GPU nobody knows at this time."""
        if type(result) in PLAIN and result.layout is torch.strided and result.is_cpu and not is_odd(result):
            address = result.untyped_storage()._cdata
            self._made_in[address] = seconds + (self._made_in.get(address, 0.0) if is_change else 0.0)

    def assign_data(self, x: Tensor, assign: Callable[[], Any]) -> Any:
        """Follow a tensor whose ``.data`` is assigned: plain PyTorch has saved that very tensor, not its old memory."""
        if type(x) not in PLAIN or x.layout is not torch.strided or is_leaf_of_graph(x):
            return assign()  # which is held itself
        with no_torch_function():
            storage = x.untyped_storage()
            if storage.nbytes() < self._live.min_nbytes:
                self._assigned.append(x)  # what is held as it is follows when it is read, so ``x`` has to live
            value = self._pending.get(storage._cdata)
            saved = [] if value is None else [each for each in value.saved() if each.is_of(x)]
            self._names.learned.assigns_data |= bool(saved or self._assigned)
        result = assign()
        with no_torch_function(), self._lock:
            for each in saved:
                follow_original(each)
        return result

    def counts(self, function: Any) -> bool:
        """Whether the call of a function that is about to run has to be noted (Note: [calls that count])."""
        return self._tape.counts(function, *self._names.count_call(function))

    def cast_inside(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Sequence[tuple[Saved, Tensor]]:
        """A function under autocast is about to return, and has saved tensors (Note: [casts inside])."""
        with no_torch_function(), self._lock:
            return self._tape.cast_inside(function, args, kwargs, result, self.unnamed)

    def made(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, random_state: Tensor | None
    ) -> None:
        """A function that can be repeated has returned something: remember how that content was made."""
        with self._lock:
            self._tape.made(function, args, kwargs, result, random_state)

    # -- what autograd saves -------------------------------------------------------------------------------------

    def pack(self, x: Tensor) -> held.Packed:
        """What autograd holds in the place of a tensor that it saves."""
        with no_torch_function():
            if is_traced():  # Note: [transforms] in transforms.py
                return held.hold_traced(x)
            counted = self.counted
            counted[0] += 1
            call, row = self._call, None
            if call is not None:
                row = call.next_row(x, self._names.current.fqn)
                if call.is_over:
                    self._call = None
            inner = x if type(x) in PLAIN else wrapped.inner_tensor(x)
            if inner is not None and inner.layout is torch.strided:
                storage = inner.untyped_storage()
                nbytes = storage.nbytes()
                counted[1] += x.nbytes
                if self.parameters.include(x, storage):
                    self.step.parameters[storage._cdata] = nbytes
                    return HeldParameter.of(x, inner)
                if nbytes < self._live.min_nbytes:
                    if row is None:
                        self.step.small[storage._cdata] = nbytes
                    return held.hold(x)
            return self._pack_large(x, inner, None if call is None or row is None else (call, row))

    def read_with_graph(self, value: Value, whole: Tensor) -> None:
        """A backward pass with a graph has read a value, all of which is dense: what it saves of it is the same value.

        So the value is queued once more, and decided on when nobody but autograd holds it.
        """
        storage = whole.untyped_storage()
        if value.waiting.cdata != storage._cdata:
            self._tape.move(value, whole)
        value.waiting.storage, value.waiting.cdata, value.place = storage, storage._cdata, None
        self._pending.add(value)

    def _pack_large(self, x: Tensor, inner: Tensor | None, row: tuple[regions.RegionCall, int] | None) -> Saved:
        with self._lock:
            if not self.step.accounts or self._live.saved == 0:  # else no step can begin
                self._before_save()
            saved = Saved(x if inner is None else inner, self._live)
            saved.origin.pinned = is_pinned(x)
            if inner is not None and inner is not x:
                saved.origin.wrapping = wrapped.Wrapping(x, inner)
            elif saved.origin.pinned and is_leaf_of_graph(x):
                saved.dense = x
            self.unnamed.append(saved)
            if row is not None:
                self._rows[id(saved)] = row
            if self.remakes_anything:
                self._tape.saves(saved, self.counted[0] - 1)
            # Outside any torch function (a custom Function, an extension's op), or inside backward, which is one long
            # torch function: what a reentrant checkpoint recomputes must not wait for its end.
            if self.depth == 0 or in_backward():
                self.before_function()
                if not self.differentiates:
                    self.name(None)
        return saved

    def name(self, result: Any) -> None:
        """Find out what the tensors saved by the op that has just returned are, and take them in.

        Args:
            result: what the op has returned.
        """
        with self._lock:
            unnamed, self.unnamed = self.unnamed, []
            if not unnamed:
                return
            named, others = find_saved(result, unnamed, self.counted[0] - self._counted_before)
            for node, found in named:
                self._take_of_node(node, found)
            for saved in others:
                self._take_of_unknown(saved)

    @property
    def names_operations(self) -> bool:
        """Whether what operations of a backward pass with a graph save is told apart by their names.

        A plan knows values by names that are those of the profiled step, whatever it does with them.
        """
        return self._policy.cycles is not None or (self.recomputes and self.remakes_anything)

    def before_operation(self, results: Sequence[Tensor]) -> None:
        """Name what an operation of a backward pass with a graph has saved, now that the next one is about to run.

        Args:
            results: of the operation, those that are still there.
        """
        with no_torch_function(), self._lock:
            unnamed, self.unnamed = self.unnamed, []
            if not unnamed:
                return
            named, others = find_saved(results, unnamed)
            for node, found in named:
                self._take_of_node(node, found)
            for saved in others:  # which the next operation has saved, if none of those before it
                if id(saved) in self._waiting:
                    self._take_of_unknown(saved)
                else:
                    self.unnamed.append(saved)
            self._waiting = {id(saved) for saved in self.unnamed}

    def after_operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation of a backward pass with a graph has returned something: remember how that was made."""
        if not self.remakes_anything:
            return
        with no_torch_function(), self._lock:
            if not any_autocast() and self.counts(function):
                self._tape.made_by_operation(function, args, kwargs, result)

    def _take_of_node(self, node: Any, found: list[tuple[str, Saved]]) -> None:
        """Take in what a node has saved under which roles."""
        copies = weight_copies(node) if any_autocast() else ()
        places, is_known = self._names.places(node, found)
        builtin = not isinstance(node, torch.autograd.function.BackwardCFunction)
        for (role, saved), place in zip(found, places, strict=True):
            original = saved.origin.tensor() if saved.origin.tensor is not None else None
            if original is not None and original.grad_fn is node:
                saved.origin.tensor = None  # autograd keeps an alias of a node's own result
            del original
            if copies and role in ("weight", "mat2") and sorted(place.facts.spec.shape) in copies:
                saved.view = place.facts.spec, 0
                self.step.parameters[id(saved)] = place.facts.spec.nbytes
                continue
            self.step.named += 1
            self.step.recognised += is_known
            self.counted[2] += hash((id(place),))
            dense = saved.dense if builtin and self._is_watched else None
            self.take(saved, place, node._sequence_nr() if builtin else None)
            if dense is not None:
                self._policy.watch(place.facts, node, dense.detach())
            del dense

    def _take_of_unknown(self, saved: Saved) -> None:
        """Take in what was saved by a node that was not found."""
        place, is_known = self._names.unknown_place(saved)
        self.step.named += 1
        self.step.recognised += is_known
        self.take(saved, place, None)

    def take(self, saved: Saved, place: Place, node: int | None) -> None:
        """Account for a named tensor, and queue its storage for encoding unless backward reads nothing of it.

        Args:
            saved: the tensor.
            place: where in the model it was saved.
            node: the number of the node that has saved it; None where that is not one of torch's own.
        """
        dense, facts = saved.dense, place.facts
        assert dense is not None
        saved.place, saved.node = place, node
        saved.view = facts.spec, int(dense.storage_offset())
        storage = dense.untyped_storage()
        cdata = storage._cdata
        value = self._pending.get(cdata)
        row = self._rows.pop(id(saved), None) if self._rows else None
        if facts.need is Need.SHAPE and self._encoder.releases_shape(place):
            if value is not None:
                value.account.share(facts)
            else:
                account = self._account_of_shape(facts, storage)
                if account is None:
                    self._shapes[cdata] = weakref.ref(storage), self.step.open(facts, storage.nbytes(), "shape")
            saved.origin.counter, saved.dense = version_of(dense), None
            self._encoder.only_keep = False
            return
        if value is None:
            nbytes = storage.nbytes()
            account = self._account_of_shape(facts, storage) if self._shapes else None
            account = account or self.step.open(facts, nbytes, "kept")
            account.codec, account.reason = "kept", HELD
            if row is not None:
                account.is_of_region = True
                row[0].holds(row[1], account)
            value = Value(storage, account, self._live, place)
            value.take(nbytes)
            self._pending.add(value)
            if self.is_timing:
                place.made_seconds = self._made_in.get(cdata, 0.0)
            account.remake_seconds = place.made_seconds
        else:
            value.account.share(facts)
        value.members.append(weakref.ref(saved))
        saved.value = value
        if node is None:
            saved.origin.counter = version_of(dense)  # Note: [reader that writes]
        if saved.origin.pinned:
            value.waiting.address, value.waiting.storage = StorageWeakRef(storage), None
        if saved.origin.wrapping is not None and saved.origin.wrapping.was_changed:
            value.content = None  # its content ended unseen (Note: [versions of a wrapper])
        elif self.recomputes:
            self._tape.take(value, dense)

    def _account_of_shape(self, facts: SavedTensor, storage: torch.UntypedStorage) -> Account | None:
        """The account of a storage of which only the shape was read so far, shared with one more saved tensor."""
        known = self._shapes.get(storage._cdata)
        if known is None or known[0]() is not storage:
            return None
        known[1].share(facts)
        return known[1]


for _function in (
    Forward.before_function,
    Forward.look_at_due,
    Forward._pack_large,
    Forward.after_function,
    Forward.before_side_effect,
    Forward.assign_data,
    Forward.before_backward,
    Forward.cast_inside,
    Forward.counts,
    Forward.made,
    Forward.took,
    Forward.pack,
    Forward.ran,
):
    hide_from_dynamo(_function, and_all_below=True)

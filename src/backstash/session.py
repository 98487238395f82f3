"""The Session: what happens to a tensor from the moment autograd saves it until backward asks for it.

A saved tensor passes through it as the package's top level reads: it is *packed* when autograd saves it, *named* when
the op that saved it has returned (the autograd node tells the op and the role, the role tells the need), *encoded* when
nobody but autograd holds its memory any more, and *unpacked* when backward asks for it. What a cheap function made of
something that is held anyway is not encoded but forgotten, and made again at unpack (producers.py).

The unit that is encoded is a storage: however many saved tensors view it, it is encoded once, under the strongest of
their needs, and what only reads a shape holds nothing at all.

Note: [encode when orphaned]
    A tensor is not encoded when it is saved but when its storage's use count says that only autograd's saves are left.
    Until then encoding gains nothing (the program holds the memory anyway), after that nobody can save or change the
    tensor again. So a storage is never encoded twice, values that the program keeps are kept by reference, buffers that
    an op writes after saving are complete, and no pointer is ever looked up after its memory is gone.

    The count is looked at before the next torch function, and then before every further one that makes the value a
    quarter older: a program that keeps thousands of tensors pays for a few looks at each.

Note: [version guard]
    Hooks switch off autograd's check for in-place changes. What is held by reference is therefore held with its version
    and compared at unpack; of what is held for its shape only, the version is held without the memory.

Note: [ownership]
    Autograd owns the packed object, which owns the value; autograd frees it when its node has run. There is no table of
    everything, and nothing to do at the end of a step.
"""

from __future__ import annotations

import sys
import time
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from backstash import needs, policies
from backstash.arguments import check_arguments
from backstash.backward import accumulation, claims, install, linear, table
from backstash.capture import modules
from backstash.capture.naming import find, packed_by, weight_copies
from backstash.capture.observer import Observer
from backstash.capture.side_effects import SideEffect, tensors_in
from backstash.codecs import base
from backstash.codecs.base import Codec, is_dense
from backstash.codecs.bitmask import Bitmask
from backstash.codecs.shape import Shape, stand_in
from backstash.errors import (
    CodecRefusedError,
    NeedNotMetError,
    SavedTensorModifiedError,
    SessionError,
    UnknownNameError,
)
from backstash.gradient_error import Monitor
from backstash.policy import (
    MAX_DEPTH,
    Action,
    DecidesTogether,
    Keep,
    Outcome,
    Policy,
    Recompute,
    Slice,
    Stash,
    optional,
)
from backstash.saved import PLAIN, Need, SavedTensor, TensorSpec, is_odd
from backstash.stash import calls as producers
from backstash.stash import leaves as recipes
from backstash.stash import parameters, wrapped
from backstash.stash.calls import Content, Held, Leaf, Recipe, View
from backstash.stash.decode import (
    StashedTensor,
    check_version,
    decode,
    follow_original,
    has_direct,
    modified_message,
    remake,
)
from backstash.stash.ledger import Entry, PeakRow, Report, Step
from backstash.stash.live import Live
from backstash.stash.sample import Sample
from backstash.stash.value import Form, Saved, Value, holder, version_of
from backstash.stores import DeviceStore, HostStore, Store
from backstash.torch_internals import (
    hide_from_dynamo,
    in_backward,
    no_torch_function,
    running_node,
    saved_tensor_hooks,
    storage_use_count,
)

MIN_NBYTES = 16 * 1024
"""Tensors smaller than this are kept: naming and encoding them costs more than they hold."""

SNAPSHOT_NBYTES = 1 << 20
"""A parameter or buffer up to this size is copied for a recipe that reads it; a larger one has no recipes."""

REPEAT = 256
"""A recipe is proven again at every so many of its uses, on the numbers of that step; each at another step."""

CHECK_LIMIT = 0.3
"""Relative errors of a gradient above this are warned of: the noise has a tenth of the gradient's energy."""

_Sources = Callable[[], dict[str, Tensor] | None]


class _Proof:
    """What is known of a recipe: how it makes the value ("" for not at all), and how often it was asked for.

    The phase is another number for each recipe, so that they are not all proven again in the same step.
    """

    __slots__ = ("how", "phase", "uses")

    def __init__(self, how: str, phase: int) -> None:
        self.how, self.uses, self.phase = how, 1, phase


class _Frame:
    """A module call in progress: its path and how many nodes of each op it has made."""

    __slots__ = ("counts", "fqn")

    def __init__(self, fqn: str) -> None:
        self.fqn = fqn
        self.counts: defaultdict[str, int] = defaultdict(int)


class Session:
    """Stores what autograd saves inside the ``with`` in the form that a policy chooses.

    Args:
        policy: a policy's name (``"lossless"``) or a Policy.
        model: the module that paths in keys start from; without it, whichever module is called outermost.
        stores: stores by name, beside ``"device"`` and ``"host"``, which are there already.
        min_nbytes: smaller tensors are kept.
        check: in how many steps, from the first one on, the error that the policy makes in the gradient is measured
            (``report().gradient_error``). Such a step keeps exact copies beside what is stored with an error, and two
            more backward passes run before its own, so hooks on tensors and nodes, and custom Functions' backward, run
            three times. The gradients, ``.grad`` and the generators' states are those of any other step. ``"full"``
            measures nothing, and compares in every step a checksum of each value that is remade with the one that it
            had; else a sample of its bits is compared (Note: [samples]).
        check_limit: the relative error above which a warning is given. At 0.3 the gradient's direction has a cosine of
            about 0.96 to the exact one, and a step of the optimizer loses a tenth of its use at most.
        overwrite_gradients: whether backward may write a gradient over one that nobody else holds.

    Raises:
        UnknownNameError: no policy has that name.
        TypeError: an argument is of another type.
        ValueError: a number is out of its range.
        SessionError: on entering, another Session or other saved-tensor hooks are active.

    The backward pass may run inside or outside the ``with``. A Session may be entered again after it was left. It sees
    the thread that entered it; other threads need a Session of their own. On CPU backward decodes into memory that is
    used again from layer to layer, and given back when the last graph made under the Session is gone.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        >>> with Session("lossless", min_nbytes=0) as session:
        ...     loss = model(torch.ones(8, 64)).sum()
        >>> loss.backward()
        >>> session.report().ratio > 1
        True
    """

    def __init__(
        self,
        policy: str | Policy = "lossless",
        *,
        model: nn.Module | None = None,
        stores: Mapping[str, Store] | None = None,
        min_nbytes: int = MIN_NBYTES,
        check: int | Literal["full"] = 0,
        check_limit: float = CHECK_LIMIT,
        overwrite_gradients: bool = True,
    ) -> None:
        install.prepare()
        self.policy = policies.get(policy)
        check_arguments(model, stores, min_nbytes, check, check_limit, overwrite_gradients)
        self.check = check
        self.min_nbytes = min_nbytes
        self.stores: dict[str, Store] = {"device": DeviceStore(), "host": HostStore(), **(stores or {})}
        self.depth = 0
        self.recomputes: bool = optional(self.policy, "recomputes")
        self._model = model
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._parameters = parameters.ParameterStorages()
        self._live = Live(optional(self.policy, "ahead"), overwrite_gradients)
        if isinstance(check, int) and check:
            self._live.monitor = Monitor(check, check_limit, repr(self.policy), packed_by, self._name_of)
        self._step = Step()
        self._steps = 0
        self._elsewhere = False
        self._seen: dict[int, tuple[StorageWeakRef, Entry]] = {}
        self._clock = 0  # torch functions and packed tensors so far
        self._pending: dict[int, weakref.ref[Value]] = {}  # by storage
        self._due: dict[int, list[weakref.ref[Value]]] = {}  # by when to look at them
        self._leaning: dict[int, list[weakref.ref[Value]]] = {}  # by a leaf's storage, what is remade from it
        self._snapshots: dict[tuple[Any, ...], tuple[StorageWeakRef, Tensor]] = {}
        self._unnamed: list[Saved] = []
        self._frames: list[_Frame] = [_Frame("")]
        self._together = self.policy if isinstance(self.policy, DecidesTogether) else None
        self._begun: Callable[[], None] | None = optional(self.policy, "begin_step")
        self._watch: Callable[[SavedTensor, Any, Tensor], None] | None = optional(self.policy, "watch")
        self._trace: Callable[[SavedTensor, list[SavedTensor], _Sources], None] | None = optional(self.policy, "trace")
        self._contents: dict[int, tuple[StorageWeakRef, Content]] = {}
        self._proven: dict[tuple[str, ...], _Proof] = {}
        self._buffers = self._live.buffers
        self._lock = self._live.lock
        self._installed: ExitStack | None = None
        self._peak: tuple[PeakRow, ...] = ()

    # -- entering and leaving ------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        _refuse_other_hooks()
        if self._installed is not None:
            raise SessionError(
                "a Session was entered that is in use already, by another thread. Make a Session for each thread."
            )
        with ExitStack() as installed:
            installed.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack_original))
            installed.enter_context(Observer(self))
            installed.callback(modules.listen(self))
            self._elsewhere = False
            self._installed = installed.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as last:
            last.callback(self._forget)
            last.callback(self._finish)
            installed, self._installed = self._installed, None
            if installed is not None:
                installed.close()

    def _finish(self) -> None:
        """Decide about everything that is pending: from now on nobody watches what the program does to it."""
        self.depth = 0
        del self._frames[1:]
        self._name(None)
        self._sweep()
        with self._lock:
            for cdata in list(self._leaning):
                self._store_leaning(cdata)

    def _forget(self) -> None:
        self._pending.clear()
        self._due.clear()
        self._leaning.clear()
        self._snapshots.clear()
        self._seen.clear()
        self._contents.clear()
        self._parameters.clear()

    def report(self) -> Report:
        """The accounts of the last step that saved anything."""
        with self._lock:
            step = self._step
            notes = []
            if self._elsewhere:
                notes.append(
                    "a module ran with grad mode on another thread, which this Session does not see: open a Session on "
                    "that thread"
                )
            if not step.entries and not step.small.saved_nbytes:
                notes.append(
                    "nothing was saved: no forward pass with grad mode ran inside the Session, on the thread that "
                    "entered it, outside of compiled functions"
                )
            return Report(
                repr(self.policy),
                self._steps,
                step.rows(),
                sum(step.parameters.values()),
                self._live.peak_nbytes,
                self._peak,
                tuple(notes),
                step.proofs,
                step.repeated_proofs,
                tuple(self._live.monitor.found) if self._live.monitor is not None else (),
            )

    def _checks(self) -> bool:
        """Whether the step in progress keeps exact data for measuring the gradient's error."""
        return self._live.monitor is not None and self._live.monitor.is_due

    def _name_of(self, parameter: Tensor) -> str | None:
        for module, name in self._names.items():
            for own, tensor in module._parameters.items():
                if tensor is parameter:
                    return f"{name}.{own}".lstrip(".")
        return None

    # -- which module is running ---------------------------------------------------------------------------------

    def enter_module(self, module: nn.Module) -> None:
        """A module's forward is about to run."""
        if len(self._frames) == 1:
            with no_torch_function():
                self._enter_root(self._model or module)
        name = self._names.get(module)
        if name is None:
            self._learn_names(module, prefix=type(module).__name__)
            name = self._names[module]
        self._frames.append(_Frame(name))

    def leave_module(self) -> None:
        """It has returned or raised."""
        if len(self._frames) > 1:
            self._frames.pop()

    def ran_elsewhere(self) -> None:
        """A module ran with grad mode on a thread that has no Session."""
        self._elsewhere = True

    def _enter_root(self, module: nn.Module) -> None:
        if module not in self._names:
            self._learn_names(module)
        self._parameters.enter(module)
        if self._live.unpacked and torch.is_grad_enabled() and not in_backward():
            self._begin_step()

    def _learn_names(self, module: nn.Module, prefix: str = "") -> None:
        for name, child in module.named_modules(prefix=prefix):
            self._names.setdefault(child, name)

    def _begin_step(self) -> None:
        """A root module is called after a backward: the accounts start afresh."""
        self._live.unpacked = False
        self._live.stashed_nbytes = 0  # there is room for nothing before backward has freed something
        self._steps += 1
        if self._begun is not None:
            self._begun()
        if self._live.monitor is not None:
            self._live.monitor.begin_step(self._steps)
        self._step = Step()
        self._seen.clear()
        self._snapshots.clear()
        self._live.prefetcher.begin_step()
        self._frames[0].counts.clear()
        self._pending = {cdata: value for cdata, value in self._pending.items() if value() is not None}
        self._contents = {cdata: known for cdata, known in self._contents.items() if not known[0].expired()}
        for _, content in self._contents.values():  # else a running average would remember all of its steps
            content.call = None

    # -- what the observer tells ---------------------------------------------------------------------------------

    def before_function(self) -> None:
        """A torch function is about to run: encode what nobody holds any more."""
        self._clock += 1
        due = self._due.pop(self._clock, None)
        if due is not None:
            with no_torch_function(), self._lock:
                self._look_at(due)

    def after_function(self, result: Any) -> None:
        """A torch function has returned: name what it has saved."""
        if self._unnamed and self.depth == 0:
            with no_torch_function():
                self._name(result)

    def before_backward(self) -> None:
        """Backward is about to begin: encode everything that nobody holds."""
        with no_torch_function():
            self._sweep()

    def before_side_effect(self, effect: SideEffect, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A function is about to change its arguments, or to hand their memory on to who changes it unseen."""
        with self._lock:
            for x in tensors_in(args, kwargs):
                if type(x) not in PLAIN or x.layout is not torch.strided or is_odd(x):
                    continue
                storage = x.untyped_storage()
                if storage._cdata in self._leaning:
                    self._store_leaning(storage._cdata)
                if effect is SideEffect.ESCAPES:
                    if self._parameters.include(x, storage):
                        self._snapshots.clear()
                    elif storage.nbytes() >= self.min_nbytes:
                        content = self._content(x)
                        content.escaped, content.call = True, None

    # -- pack ----------------------------------------------------------------------------------------------------

    def _pack(self, x: Tensor) -> Saved | parameters.HeldParameter | tuple[Tensor, int]:
        with no_torch_function():
            return self._pack_unseen(x)

    def _pack_unseen(self, x: Tensor) -> Saved | parameters.HeldParameter | tuple[Tensor, int]:
        inner = wrapped.inner_tensor(x)
        if inner is not None and inner.layout is torch.strided:
            storage = inner.untyped_storage()
            if self._parameters.include(x, storage):
                self._step.parameters[storage._cdata] = storage.nbytes()
                return parameters.HeldParameter.of(x, inner)
            if storage.nbytes() < self.min_nbytes:
                small = self._step.small
                small.saved_nbytes += inner.nbytes
                small.stash_nbytes += inner.nbytes
                return x if parameters.is_leaf_of_graph(x) else x.detach(), x._version
        with self._lock:
            if self._steps == 0:
                self._steps = 1
                if self._begun is not None:
                    self._begun()
                if self._live.monitor is not None:
                    self._live.monitor.begin_step(1)
            if self._step.entries and self._live.saved == 0 and not in_backward():  # the last graph is gone
                self._begin_step()
            saved = Saved(x if inner is None else inner, self._live)
            saved.pinned = parameters.is_pinned(x)
            if inner is not None and inner is not x:
                saved.wrapping = wrapped.Wrapping(x, inner)
            elif parameters.is_leaf_of_graph(x):
                saved.dense = x
            self._unnamed.append(saved)
            # Outside any torch function (a custom Function, an extension's op), or inside backward, which is one long
            # torch function: what a reentrant checkpoint recomputes must not wait for its end.
            if self.depth == 0 or in_backward():
                self.before_function()
                self._name(None)
        return saved

    def _name(self, result: Any) -> None:
        """Find out what the tensors saved by the op that has just returned are, and take them in."""
        with self._lock:
            unnamed, self._unnamed = self._unnamed, []
            large = [saved for saved in unnamed if self._specify(saved)]
            if not large:
                return
            wanted = {id(saved): saved for saved in large}
            for node, found in find(result, wanted):
                op = needs.op_of(node)
                frame = self._frames[-1]
                number = frame.counts[op]
                frame.counts[op] += 1
                specs = {role: saved.spec for role, saved in found if saved.spec is not None}
                builtin = not isinstance(node, torch.autograd.function.BackwardCFunction)
                copies = weight_copies(node) if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled() else ()
                for role, saved in found:
                    assert saved.spec is not None
                    original = saved.original() if saved.original is not None else None
                    if original is not None and original.grad_fn is node:
                        saved.original = None  # autograd keeps an alias of a node's own result
                    del original
                    if role in ("weight", "mat2") and sorted(saved.spec.shape) in copies:
                        self._step.parameters[id(saved)] = saved.spec.nbytes
                        continue
                    reading = needs.read(node, role, saved.spec, specs) if builtin else needs.VALUE
                    if saved.wrapping is not None:
                        reading = saved.wrapping.reading(reading)
                    dense = saved.dense
                    self._take(saved, op, role, number, reading, builtin)
                    if builtin and self._watch is not None and saved.tensor is not None and dense is not None:
                        self._watch(saved.tensor, node, dense.detach())
                    del dense
                    if builtin:
                        saved.node = node._sequence_nr()
                        can_claim = saved.spec is not None and table.can_claim(op, role, saved.spec)
                        saved.claimable = can_claim and saved.wrapping is None
            for saved in wanted.values():
                number = self._frames[-1].counts["?"]
                self._frames[-1].counts["?"] += 1
                self._take(saved, "?", "saved", number, needs.VALUE, False)

    def _specify(self, saved: Saved) -> bool:
        """Fill in the spec; False for what is kept without a further look (and then it is accounted for)."""
        dense = saved.dense
        if dense is None or type(dense) not in PLAIN or dense.layout is not torch.strided or is_odd(dense):
            return False
        saved.spec = TensorSpec.of(dense)
        return True

    def _take(self, saved: Saved, op: str, role: str, number: int, reading: needs.Reading, builtin: bool) -> None:
        """Account for a named tensor, and queue its storage for encoding unless backward reads nothing of it."""
        dense, spec = saved.dense, saved.spec
        assert dense is not None and spec is not None
        fqn = self._frames[-1].fqn
        key = f"{fqn}/{op}#{number}:{role}"
        saved.tensor = SavedTensor(
            key,
            op,
            role,
            fqn,
            spec,
            reading.need,
            reading.mask,
            reading.window,
            reading.function,
            reading.effect,
            reading.row,
        )
        saved.need, saved.mask, saved.builtin = reading.need, reading.mask, builtin
        saved.offset = int(dense.storage_offset())
        storage = dense.untyped_storage()
        entry = self._entry(saved.tensor, storage)
        if reading.need is Need.SHAPE and self._allows(saved.tensor, Shape.id):
            saved.counter, saved.dense = version_of(dense), None
            return
        pending = self._pending.get(storage._cdata)
        value = pending() if pending is not None else None
        if value is None:
            value = Value(storage, entry, self._live, self._clock)
            self._pending[storage._cdata] = reference = weakref.ref(value)
            self._due.setdefault(self._clock + 1, []).append(reference)
            entry.stash_nbytes = entry.saved_nbytes
            entry.reason = "held by the program, kept by reference"
            entry.codec = "kept"
            self._live.add(entry.stash_nbytes)
        value.members.append(weakref.ref(saved))
        saved.value = value
        if saved.pinned:
            value.address, value.storage = StorageWeakRef(storage), None
        if saved.wrapping is not None and saved.wrapping.was_changed:
            value.content = None  # its content ended unseen (Note: [versions of a wrapper])
        elif self.recomputes:
            value.content = self._content(dense)
            value.content.value = weakref.ref(value)

    def _allows(self, saved: SavedTensor, codec: str) -> bool:
        action = self.policy.decide(saved)
        return isinstance(action, Stash) and any(choice.id == codec for choice in action.codecs)

    def _entry(self, saved: SavedTensor, storage: torch.UntypedStorage) -> Entry:
        """The account of a storage; the weak reference keeps its address from being given to another."""
        seen = self._seen.get(storage._cdata)
        if seen is not None:
            entry = seen[1]
            if Need[entry.need].value < saved.need.value:
                entry.shared_by.append(entry.key)
                entry.key, entry.need, entry.spec = saved.key, saved.need.name, str(saved.spec)
            else:
                entry.shared_by.append(saved.key)
            return entry
        entry = Entry(saved.key, saved.need.name, str(saved.spec), storage.nbytes(), codec="shape")
        self._seen[storage._cdata] = (StorageWeakRef(storage), entry)
        self._step.entries.append(entry)
        return entry

    # -- encode --------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Encode every pending storage that only autograd's saves hold (Note: [encode when orphaned])."""
        with self._lock:
            self._look_at(list(self._pending.values()), again=False)

    def _look_at(self, values: list[weakref.ref[Value]], again: bool = True) -> None:
        """Encode those of these values that nobody else holds; look at the others later."""
        for reference in values:
            value = reference()
            if value is None or value.storage is None:  # its graph is gone, or it was encoded
                continue
            if not self._decide_if_orphaned(value) and again:
                later = self._clock + max(1, (self._clock - value.born) // 4)
                self._due.setdefault(later, []).append(reference)

    def _decide_if_orphaned(self, value: Value) -> bool:
        """Encode a value if nobody else holds its storage; returns whether that was so."""
        if value.cdata not in self._pending or not self._is_orphaned(value):
            return False
        del self._pending[value.cdata]  # so it is decided about once
        self._leaning.pop(value.cdata, None)  # nobody can change it any more
        with torch.no_grad():
            self._encode(value)
        value.storage = None
        return True

    def _is_orphaned(self, value: Value) -> bool:
        """Whether only autograd's saves hold the storage of a value."""
        assert value.storage is not None  # no variable of its own: it would count
        count = storage_use_count(value.storage._cdata) - 1  # its Python object
        if count > len(value.members) or count != sum(saved.dense is not None for saved in value.saved()):
            return False
        return _references(value) <= _OWN_REFERENCES  # the program may hold the storage's Python object as well

    def _encode(self, value: Value) -> None:
        fresh = []
        for saved in value.saved():
            follow_original(saved)
            dense = saved.dense
            if saved.value is not value and saved is not value.guard:  # it follows another tensor's memory now
                continue
            if dense is not None and dense._version != saved.version:
                saved.modified, saved.dense = dense._version, None
            elif dense is not None:
                fresh.append(saved)
        if not fresh:
            return
        strongest = max(fresh, key=lambda saved: saved.need.value)
        facts = strongest.tensor
        assert facts is not None and value.storage is not None
        if facts.need is Need.SIGN and any(saved.mask != facts.mask for saved in fresh if saved.need is Need.SIGN):
            facts = SavedTensor(facts.key, facts.op, facts.role, facts.fqn, facts.spec, Need.VALUE)
        whole = _whole(strongest, value.storage)
        entry = value.entry
        if whole is None or any(saved.spec.dtype != facts.spec.dtype for saved in fresh if saved.spec):
            self._kept(value, facts, "its storage is seen as different types")
            return
        value.key, value.facts = facts.key, facts
        readers = [saved.tensor for saved in fresh if saved.tensor is not None]
        if self._trace is not None:
            self._trace(facts, readers, lambda: self._sources(value, strongest))
        if self._together is not None:
            action = self._together.decide_together(facts, readers)
        else:
            action = self.policy.decide(facts)
        value.buffers = self._buffers
        started = time.perf_counter()
        why = ""
        if isinstance(action, Recompute):
            value.otherwise = action.otherwise
            recipe = self._recipe(value, strongest, whole, action)
            if isinstance(recipe, Recipe) and recipe.settled:
                value.errors = frozenset().union(*(leaf.errors for leaf in recipe.leaves()))
                value.form = self._mask(whole, facts, fresh)
            if isinstance(recipe, Recipe):
                if value.errors and self._checks():
                    value.exact = whole.detach()
                value.recipe, value.guard = recipe, None
                for leaf in recipe.leaves():
                    leaf.raise_to(value.height + 1)
                nbytes = 0 if value.form is None else value.form.ticket.nbytes
                label = "recompute within" if recipe.settled else "recompute"
                self._released(value, fresh, facts, label, nbytes, str(recipe), started)
                return
            action, why = action.otherwise, f"; not recomputed: {recipe}"
        if isinstance(action, Keep):
            self._kept(value, facts, action.reason + why)
            return
        if value.height and _has_error(action):  # a recipe that was proven with the exact value begins from it
            action, why = _without_error(action), f"{why}; exact, because others are made again of it"
        if isinstance(action, Slice) and (facts.op, facts.role) == ("Convolution", "input"):
            action = action.sliced()
        form, reason = self._stash(whole, facts, action, fresh)
        if form is None:
            entry.encode_seconds += time.perf_counter() - started
            self._kept(value, facts, reason + why)
            return
        value.form, value.guard = form, None
        if form.codec.bound is not None:
            value.errors = frozenset((facts.key,))
            if self._checks():
                value.exact = whole.detach()
        if action.store != "device":
            self._live.prefetcher.put(form, facts.key)
        label = base.label(form.codec)
        note = why.removeprefix("; ")
        self._released(value, fresh, facts, label, form.ticket.nbytes, note, started, action.store)

    def _released(
        self,
        value: Value,
        fresh: list[Saved],
        facts: SavedTensor,
        codec: str,
        nbytes: int,
        note: str,
        started: float,
        store: str = "device",
    ) -> None:
        """Let go of the dense data, which is stored in another form now."""
        for saved in fresh:
            saved.dense = None
        entry, live = value.entry, value.live
        live.add(-entry.device_nbytes)
        entry.stash_nbytes, entry.codec, entry.reason, entry.store = nbytes, codec, note, store
        live.add(entry.device_nbytes)
        entry.encode_seconds += time.perf_counter() - started
        self.policy.observe(Outcome(facts, codec, nbytes))

    def _kept(self, value: Value, facts: SavedTensor, reason: str) -> None:
        value.entry.codec, value.entry.reason = "kept", reason
        self.policy.observe(Outcome(facts, None, value.entry.stash_nbytes, reason))

    def _stash(self, x: Tensor, facts: SavedTensor, action: Stash, readers: list[Saved]) -> tuple[Form | None, str]:
        """Encode with the first codec of the action that takes ``x``; else None and the last reason."""
        if action.store not in self.stores:
            raise UnknownNameError(
                f"store {action.store!r} was asked for by {self.policy!r}, but there are {', '.join(self.stores)}. "
                f"Pass it to Session(stores=...)."
            )
        reason = "the policy named no codec"
        for codec in action.codecs:
            of_another_test = facts.need is Need.SIGN and base.mask_of(codec) not in (None, facts.mask)
            if facts.need not in codec.preserves or of_another_test:
                raise NeedNotMetError(
                    f"codec {codec.id!r} preserves {{{', '.join(sorted(need.name for need in codec.preserves))}}}, but "
                    f"backward of {facts.op} reads the {facts.need.name} of its {facts.role!r} ({facts.key}, "
                    f"{facts.spec}). Use a codec that preserves it, such as zvc, or Keep()."
                )
            spec = TensorSpec.of(x)
            refusal = codec.accepts(spec) or _misreads(codec, readers) or codec.declines(x)
            if refusal is None:
                try:
                    # Nobody else holds the memory, so it may become the plane: nothing is copied, nothing lives twice.
                    encoded = base.adopt(codec, x)
                except CodecRefusedError as refused:  # only the full pass could tell
                    refusal = str(refused)
                else:
                    mask = facts.mask if facts.need is Need.SIGN else None
                    store = self.stores[action.store]
                    return Form(codec, mask, encoded.spec, store, store.put(encoded)), ""
            reason = f"{base.label(codec)}: {refusal}"
        return None, reason

    # -- recompute -----------------------------------------------------------------------------------------------

    def made(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, random_state: Tensor | None
    ) -> None:
        """Remember how the content of the result's storage was made."""
        if (
            result.layout is not torch.strided
            or not result.is_floating_point()
            or is_odd(result)
            or result.untyped_storage().nbytes() < self.min_nbytes
        ):
            return
        with self._lock:
            call = producers.call_of(function, args, kwargs, result, lambda x: self._argument(x, result), random_state)
            content = self._content(result)
            if call is not None and not content.escaped:
                content.call = call

    def _argument(self, x: Tensor, result: Tensor) -> View | Held | None:
        """A tensor argument of the call that made ``result``."""
        storage = x.untyped_storage()
        cdata = storage._cdata
        if self._parameters.include(x, storage) or storage.nbytes() < self.min_nbytes:
            return self._snapshot(x, storage)
        if cdata != result.untyped_storage()._cdata:
            content = self._content(x)
        else:  # an in-place op: it read the content before this one
            after = self._content(x)
            content, after.before = after.before or Content(x._version - 1), None
        return View(content, TensorSpec.of(x), int(x.storage_offset()))

    def _snapshot(self, x: Tensor, storage: torch.UntypedStorage) -> Held | None:
        """A copy of a parameter, a buffer, or something small, as it is now; None if it is large.

        The program may change them before backward (a running average, an average of weights swapped in), also through
        ``.data`` and so without a new version.
        """
        if x.nbytes < self.min_nbytes:
            copy = x.detach().clone()
            return Held(copy, copy._version)
        if x.nbytes > SNAPSHOT_NBYTES:
            return None
        key = (storage._cdata, x._version, x.storage_offset(), x.shape, x.stride())
        known = self._snapshots.get(key)
        if known is None or known[0].expired():
            self._snapshots[key] = known = StorageWeakRef(storage), x.detach().clone()
        return Held(known[1], known[1]._version)

    def _content(self, x: Tensor) -> Content:
        """What the storage of ``x`` holds now."""
        storage = x.untyped_storage()
        known = self._contents.get(storage._cdata)
        if known is not None and not known[0].expired():
            if known[1].version == x._version:
                return known[1]
            before = known[1] if known[1].version == x._version - 1 else None
        else:
            before = None
        content = Content(x._version, before)
        content.escaped = known is not None and not known[0].expired() and known[1].escaped
        self._contents[storage._cdata] = (StorageWeakRef(storage), content)
        return content

    def _recipe(self, value: Value, strongest: Saved, whole: Tensor, action: Recompute) -> Recipe | str:
        """How to make ``whole`` again; else the reason why it cannot be.

        Note: [proven recipes]
            Whether an op repeats itself bit for bit depends on the device, its library, shapes and layouts, and is
            nowhere documented. So a recipe runs once when it is first used, on the very data, and is trusted only if
            the bits are the same: with fused kernels, or else op by op. One that begins from bounded values has to
            come as near as their bounds allow. The proof is repeated now and then, on the numbers of another step.
        """
        content = value.content
        if content is None or content.version != strongest.version:
            return "what made it is not known"
        recipe = producers.build(content, lambda view: self._find_leaf(view, value, action))
        if isinstance(recipe, str):
            return recipe
        leaves = set(recipe.leaves())
        if action.max_inputs is not None and len(leaves) > action.max_inputs:
            return f"it would begin from {len(leaves)} stored values"
        assert strongest.tensor is not None
        bounded = any(leaf.errors for leaf in leaves)
        if bounded and value.height:
            return "others, which were proven with its exact numbers, are made again of it"
        if bounded and not recipes.keeps_signs(recipe, value, whole):
            return "its sign is read in another way than a relu does"
        key = (strongest.tensor.key, str(recipe), f"{TensorSpec.of(whole)}{' within' * bounded}")
        if key in self._live.distrusted:
            return f"{recipe} has made other bits than the value had"
        how = self._proof(key, recipe, whole, bounded)
        if not how:
            return f"{recipe} does not repeat itself {'within its bounds' if bounded else 'bit for bit'}"
        for leaf in leaves:
            recipes.guard(leaf)
        recipe = recipe.settle() if bounded else recipe if how == "fused" else recipe.unfused()
        self._lean(value, leaves)
        tolerance = None
        if bounded:
            off = recipes.off_by(recipe)
            tolerance = None if off is None else 1.001 * float(off.max()) + recipes.rounding(whole)
        value.proof = key
        value.sample = Sample.of(whole, self._steps, self.check == "full", tolerance)
        return recipe

    def _find_leaf(self, view: View, root: Value, action: Recompute) -> Leaf | str | None:
        """As :func:`recipes.find_leaf`, but nothing begins from a value that is yet to be stored with an error."""
        stored = view.content.value() if view.content.value is not None else None
        if stored is not None and stored is not root and stored.storage is not None:
            self._decide_if_orphaned(stored)  # what is older is decided first, so that it is known with which error
        leaf = recipes.find_leaf(view, root, action.max_depth, action.within)
        if not isinstance(leaf, Leaf):
            return leaf
        value: Value = leaf.value
        held = holder(value) if value.storage is not None and not value.height else None
        if held is not None and held.tensor is not None and _has_error(self.policy.decide(held.tensor)):
            return "it would begin from a value that may be stored with an error"
        return leaf

    def _proof(self, key: tuple[str, ...], recipe: Recipe, whole: Tensor, bounded: bool) -> str:
        """How the recipe makes the value: "fused", "plain", "within", or "" where it does not."""
        proof = self._proven.get(key)
        if proof is not None:
            proof.uses += 1
            if not proof.how or (proof.uses + proof.phase) % REPEAT:
                return proof.how
        how = recipes.prove_within(recipe.settle(), whole) if bounded else recipes.prove(recipe, whole)
        self._buffers.clear()  # of what the recipe begins from nothing is held
        if proof is None:
            self._step.proofs += 1
            self._proven[key] = _Proof(how, zlib.crc32("\n".join(key).encode()))
        else:
            self._step.repeated_proofs += 1
            proof.how = how
        return how

    def _lean(self, value: Value, leaves: set[Value]) -> None:
        """Watch those leaves that the program may still change (Note: [what a recipe begins from])."""
        for leaf in leaves:
            if leaf.is_dense and (leaf.storage is not None or leaf.address is not None):
                self._leaning.setdefault(leaf.cdata, []).append(weakref.ref(value))

    def _store_leaning(self, cdata: int) -> None:
        """Store what is to be remade from the storage at that address: it may change from now on."""
        for reference in self._leaning.pop(cdata, ()):
            value = reference()
            if value is not None and value.recipe is not None:
                with torch.no_grad():
                    self._store_instead(value)
        pending = self._pending.get(cdata)
        leaf = pending() if pending is not None else None
        if leaf is not None:
            leaf.guard = None

    def _store_instead(self, value: Value) -> None:
        """Remake a value now and hold it in another form."""
        recipe, facts, otherwise = value.recipe, value.facts, value.otherwise
        assert recipe is not None and facts is not None and otherwise is not None
        started = time.perf_counter()
        whole = remake(value, fresh=True)
        readers = [saved for saved in value.saved() if saved.modified is None]  # the others raise when they are read
        form, reason = None, "the policy says so"
        if isinstance(otherwise, Stash):
            if value.height:  # others are remade from it
                otherwise = _without_error(otherwise)
            form, reason = self._stash(whole, facts, otherwise, readers)
        value.hold(None)
        self._buffers.forget(value if value.form is None else value.form)
        value.recipe, value.sample, value.form = None, None, form
        if form is not None:
            if isinstance(otherwise, Stash) and otherwise.store != "device":
                self._live.prefetcher.put(form, facts.key)
            label, nbytes = base.label(form.codec), form.ticket.nbytes
            store = otherwise.store if isinstance(otherwise, Stash) else "device"
            note = "not recomputed: the program could change what it is made from"
            self._released(value, readers, facts, label, nbytes, note, started, store)
            return
        for saved in readers:
            assert saved.spec is not None
            saved.dense = whole.as_strided(saved.spec.shape, saved.spec.stride, saved.offset)
            saved.version = saved.dense._version
        if value.height:  # others are remade from it
            recipes.guard_with(value, whole)
        self._live.add(-value.entry.device_nbytes)
        value.entry.stash_nbytes, value.entry.store = whole.untyped_storage().nbytes(), "device"
        self._live.add(value.entry.device_nbytes)
        self._kept(value, facts, f"the program could change what it is made from; {reason}")

    def _mask(self, whole: Tensor, facts: SavedTensor, readers: list[Saved]) -> Form | None:
        """What who reads signs reads, exactly, of a value that is made again within bounds; None where nobody does."""
        mask = next((saved.mask for saved in readers if saved.need is Need.SIGN), None)
        if mask is None:
            return None
        form, _ = self._stash(whole, replace(facts, need=Need.SIGN, mask=mask), Stash(Bitmask(mask)), readers)
        return form

    def _sources(self, value: Value, strongest: Saved) -> dict[str, Tensor] | None:
        """See ``trace`` of :class:`backstash.policy.Policy`."""
        content = value.content
        if content is None or content.version != strongest.version:
            return None
        recipe = producers.build(content, lambda view: recipes.find_leaf(view, value, MAX_DEPTH, None))
        found = producers.gains(recipe) if isinstance(recipe, Recipe) else None
        return None if found is None else {leaf.key: gain for leaf, gain in found.items() if leaf.key}

    # -- unpack --------------------------------------------------------------------------------------------------

    def _unpack_original(self, packed: Saved | parameters.HeldParameter | tuple[Tensor, int]) -> Tensor:
        """What was given to ``_pack``: a parameter with its memory, a wrapper with its inner tensor."""
        with no_torch_function():
            return self._unpack_unseen(packed)

    def _unpack_unseen(self, packed: Saved | parameters.HeldParameter | tuple[Tensor, int]) -> Tensor:
        if isinstance(packed, parameters.HeldParameter):
            parameter = self._unpack((packed.tensor, packed.version))
            if in_backward():  # and not a look at grad_fn._saved_*
                packed.check_memory()
            return parameter
        if isinstance(packed, tuple):
            return self._unpack(packed)
        wrapping = packed.wrapping
        if wrapping is not None:
            wrapping.check_version()
        tensor = self._unpack(packed)
        if packed.dense is not None and packed.spec is not None and in_backward():
            parameters.check_memory(tensor, packed.spec.nbytes, packed.tensor.key if packed.tensor else "")
        return tensor if wrapping is None else wrapping.wrap(tensor)

    def _unpack(self, saved: Saved | tuple[Tensor, int]) -> Tensor:
        live = self._live
        if not live.unpacked and in_backward():  # and not a look at grad_fn._saved_*
            with self._lock:
                self._sweep()
                live.unpacked = True
                live.stashed_nbytes = live.nbytes
                live.prefetcher.begin_backward()
                live.prefetcher.advance(live.below_peak)
        if isinstance(saved, tuple):
            small, version = saved
            if small._version != version:
                raise SavedTensorModifiedError(modified_message(TensorSpec.of(small), None, small._version, version))
            return linear.claim_weight(small) if small.nbytes >= self.min_nbytes else small
        if saved.tensor is not None and not live.prefetcher.idle and not _is_moved(saved):
            with self._lock:
                live.prefetcher.passed(saved.tensor.key, live.below_peak)
        check_version(saved)
        if saved.dense is not None:
            follow_original(saved)
            if saved.claimable and self._is_claimed_dense(saved, saved.dense.nbytes):
                claim = self._claim(saved)
                return saved.dense if claim is None else claim
            if live.monitor is not None and live.monitor.is_measuring and not saved.builtin:
                return saved.dense.clone()
            return saved.dense
        if saved.modified is not None:
            raise SavedTensorModifiedError(modified_message(saved.spec, saved.tensor, saved.modified, saved.version))
        assert saved.spec is not None
        value = saved.value
        if value is None:
            return stand_in(saved.spec)
        op = saved.tensor.op if saved.tensor is not None else ""
        if saved.claimable and table.is_worth_a_claim(op, saved.spec.nbytes, has_direct(value, table.FORMS.get(op))):
            claim = self._claim(saved)
            if claim is not None:
                return claim
        with torch.no_grad(), self._lock:
            return decode(saved, saved.spec, value)

    @staticmethod
    def _is_claimed_dense(saved: Saved, nbytes: int) -> bool:
        op = "" if saved.tensor is None else saved.tensor.op
        large = nbytes >= table.LARGE and op not in table.NEVER_WHOLE
        return large or accumulation.awaits_large_weight()

    def _claim(self, saved: Saved) -> Tensor | None:
        """A claim for a saved tensor, where a kernel of the package backward is going to read it."""
        if torch.is_grad_enabled() or saved.node is None or saved.spec is None or saved.value is None:
            return None
        stashed = StashedTensor(saved, saved.spec, saved.value)
        claim = claims.claim(stashed, saved.spec, saved.node)
        if claim is not None and type(running_node()).__name__ in accumulation.LINEAR:
            linear.begin(stashed, saved.node)
        return claim


def _references(value: Value) -> int:
    """How many references there are to the Python object of a value's storage."""
    return sys.getrefcount(value.storage)


def _references_of_nobody_else() -> int:
    """The same where only the value and torch itself hold it."""
    x = torch.empty(1, device="cpu")
    return _references(Value(x.untyped_storage(), Entry("", "", "", 0), Live()))


_OWN_REFERENCES = _references_of_nobody_else()


def _has_error(action: Action) -> bool:
    """Whether the action may store a value with an error."""
    stash = action.otherwise if isinstance(action, Recompute) else action
    return isinstance(stash, Stash) and any(codec.bound is not None for codec in stash.codecs)


def _without_error(action: Stash) -> Stash:
    """The same action without the codecs that have an error."""
    return Stash(tuple(codec for codec in action.codecs if codec.bound is None), action.store)


def _misreads(codec: Codec, readers: list[Saved]) -> str | None:
    """Why a codec with an error does not do for everybody who reads the value; None where it does."""
    if codec.bound is None:
        return None
    for reader in readers:
        facts = reader.tensor
        assert facts is not None
        if not base.serves(codec, facts.function):
            return f"backward of {facts.op} reads more of it than that derivative"
        if facts.need is Need.SIGN and (facts.mask is None or not base.keeps(codec, facts.mask)):
            return f"backward of {facts.op} reads on which side of a threshold it is"
    return None


def _is_moved(saved: Saved) -> bool:
    value = saved.value
    return value is not None and value.form is not None and value.form.tag is not None


def _whole(saved: Saved, storage: torch.UntypedStorage) -> Tensor | None:
    """Everything in the storage of a saved tensor: the tensor itself where it fills it, else flat, [n]."""
    dense, spec = saved.dense, saved.spec
    assert dense is not None and spec is not None
    itemsize = spec.dtype.itemsize
    if saved.offset == 0 and spec.nbytes == storage.nbytes() and is_dense(spec.shape, spec.stride):
        return dense
    if storage.nbytes() % itemsize:
        return None
    return dense.as_strided((storage.nbytes() // itemsize,), (1,), 0)


def _refuse_other_hooks() -> None:
    if modules.active() is not None:
        raise SessionError(
            "a Session was opened inside another one, but only the innermost hooks of autograd run, so the outer one "
            "would see nothing. Open one Session around the whole forward pass; for different treatment of parts of "
            "the model use backstash.policy.Rules."
        )
    top = saved_tensor_hooks(True)
    if top is not None:
        where = getattr(top[0], "__qualname__", repr(top[0]))
        checkpointed = "checkpoint" in where or "checkpoint" in getattr(top[0], "__module__", "")
        cause = "a checkpointed function" if checkpointed else f"the saved-tensor hooks {where}"
        raise SessionError(
            f"a Session was opened inside {cause}, but only the innermost hooks of autograd run, so it would switch "
            f"them off. Open the Session outside: a checkpoint inside a Session works."
        )


for _function in (
    Session.before_function,
    Session.after_function,
    Session.before_side_effect,
    Session.before_backward,
    Session.made,
    Session._pack,
    Session._unpack_original,
):
    hide_from_dynamo(_function, and_all_below=True)

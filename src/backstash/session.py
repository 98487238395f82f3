"""The Session: what happens to a tensor from the moment autograd saves it until backward asks for it.

A saved tensor passes through it as the package's top level reads: it is *packed* when autograd saves it, *named* when
the op that saved it has returned (capture/), *encoded* when nobody but autograd holds its memory any more, or forgotten
and made again (stash/), and *unpacked* when backward asks for it (backward/). This module connects these rooms, and
knows when a step begins.

The unit that is encoded is a storage: however many saved tensors view it, it is encoded once, under the strongest of
their needs, and what only reads a shape holds nothing at all.

Note: [version guard]
    Hooks switch off autograd's check for in-place changes. What is held by reference is therefore held with its version
    and compared at unpack; of what is held for its shape only, the version is held without the memory.

Note: [ownership]
    Autograd owns the packed object, which owns the value; autograd frees it when its node has run. There is no table of
    everything, and nothing to do at the end of a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from backstash import policies
from backstash.arguments import check_arguments
from backstash.backward import install, table
from backstash.backward.unpack import Packed, unpack
from backstash.capture import hooks, learned
from backstash.capture.names import Names
from backstash.capture.naming import find, packed_by, weight_copies
from backstash.capture.side_effects import SideEffect, tensors_in
from backstash.codecs.shape import Shape
from backstash.errors import SessionError
from backstash.gradient_error import Monitor
from backstash.policies.base import Policy, Stash
from backstash.saved import PLAIN, Need, SavedTensor, is_odd
from backstash.stash import held, parameters, wrapped
from backstash.stash.contents import Contents
from backstash.stash.decode import follow_original
from backstash.stash.encode import Encoder
from backstash.stash.leaning import Leaning
from backstash.stash.ledger import Account, PeakRow, Report, Step
from backstash.stash.live import Live
from backstash.stash.pending import Pending
from backstash.stash.place import Place
from backstash.stash.remaking import Remaking
from backstash.stash.value import Saved, Value, version_of
from backstash.stash.watcher import Watcher
from backstash.stores import DeviceStore, HostStore, Store
from backstash.torch_internals import hide_from_dynamo, in_backward, no_torch_function

MIN_NBYTES = learned.SMALLEST
"""Tensors smaller than this are kept, unless a Session is told otherwise."""

CHECK_LIMIT = 0.3
"""Relative errors of a gradient above this are warned of: the noise has a tenth of the gradient's energy."""


class Session:
    """Stores what autograd saves inside the ``with`` in the form that a policy chooses.

    Args:
        policy: a policy's name (``"lossless"``) or a Policy.
        model: the module that paths in keys start from; without it, whichever module is called outermost.
        stores: stores by name, beside ``"device"`` and ``"host"``, which are there already.
        min_nbytes: smaller tensors are kept. By default that is 16 KiB, but for the policy ``lossless`` the first step
            decides, between 16 and 256 KiB: small tensors are kept as far as they hold no more than 2 % of the bytes,
            or half of them where the whole step saves less than 64 MiB (Note: [sizes that matter] in
            capture/learned.py).
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
        min_nbytes: int | None = None,
        check: int | Literal["full"] = 0,
        check_limit: float = CHECK_LIMIT,
        overwrite_gradients: bool = True,
    ) -> None:
        install.prepare()
        self.policy = policies.get(policy)
        check_arguments(model, stores, min_nbytes, check, check_limit, overwrite_gradients)
        self.check = check
        if min_nbytes is None:
            min_nbytes = self.policy.min_nbytes
        self.min_nbytes = MIN_NBYTES if min_nbytes is None else min_nbytes
        self._chooses_min_nbytes = min_nbytes is None
        self.stores: dict[str, Store] = {"device": DeviceStore(), "host": HostStore(), **(stores or {})}
        self.depth = 0
        self.recomputes = self.policy.recomputes
        self._names = Names(model, table.can_claim)
        self._live = Live(self.policy.ahead, overwrite_gradients)
        if isinstance(check, int) and check:
            name_of = self._names.parameter_name
            self._live.monitor = Monitor(check, check_limit, repr(self.policy), packed_by, name_of)
        self._parameters = parameters.ParameterStorages()
        self._contents = Contents(self.min_nbytes, self._parameters)
        self._leaning = Leaning()
        self._pending = Pending(self._encode)
        self._remaking = Remaking(
            self.policy, self._live, self._leaning, check == "full", self._pending.decide_if_orphaned
        )
        self._encoder = Encoder(self.policy, self.stores, self._live, self._remaking)
        self._is_watched = not self.policy.is_fixed
        self._step = Step()
        self._steps = 0
        self._elsewhere = False
        self._shapes: dict[
            int, tuple[parameters.StorageReference, Account]
        ] = {}  # of storages of which only the shape is read
        self.unnamed: list[Saved] = []
        self._assigned: list[Tensor] = []
        self._lock = self._live.lock
        self._settings = f"{self.policy!r} {min_nbytes} {check}"
        self._is_bound = False  # to what was learned of the model
        self._is_idle = False
        self._counted = [0, 0]  # tensors saved in this step, and their bytes
        self._hooks: hooks.Hooks | None = None
        self._peak: tuple[PeakRow, ...] = ()

    # -- entering and leaving ------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        hooks.refuse_other_hooks()
        if self._hooks is not None:
            raise SessionError(
                "a Session was entered that is in use already, by another thread. Make a Session for each thread."
            )
        self._elsewhere = False
        self._is_idle = self._may_idle()
        if self._is_idle:
            self._hooks = hooks.Hooks(self._hold, self._read_held, None)
        else:
            self._hooks = hooks.Hooks(self._pack, self._unpack, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as last:
            last.callback(self._forget)
            last.callback(self._finish)
            installed, self._hooks = self._hooks, None
            if installed is not None:
                installed.remove()

    def _finish(self) -> None:
        """Decide about everything that is pending: from now on nobody watches what the program does to it."""
        self.depth = 0
        self._names.leave_all()
        self._name(None)
        with self._lock:
            self._pending.look_at_all()
            self._leaning.store_all(self._encoder, self._pending)

    def _forget(self) -> None:
        self._pending.clear()
        self._leaning.clear()
        self._shapes.clear()
        self._contents.clear()
        self._parameters.clear()

    def report(self) -> Report:
        """The accounts of the last step that saved anything."""
        with self._lock:
            step = self._step
            notes = []
            peak_nbytes = self._live.peak_nbytes
            if self._is_idle:
                step = self._names.learned.step
                peak_nbytes = max(peak_nbytes, self._names.learned.peak_nbytes)
                notes.append(
                    "there is nothing to do, so this step was only counted: the rows are those of an earlier one"
                )
            if self._chooses_min_nbytes and self._names.learned.saves_little:
                notes.append(
                    f"a step saves little, so tensors below {self.min_nbytes >> 10} KiB are kept and nothing is made "
                    f"again, which takes time: Session(min_nbytes=...) changes that"
                )
            if self._elsewhere:
                notes.append(
                    "a module ran with grad mode on another thread, which this Session does not see: open a Session on "
                    "that thread"
                )
            if step.is_empty:
                notes.append(
                    "nothing was saved: no forward pass with grad mode ran inside the Session, on the thread that "
                    "entered it, outside of compiled functions"
                )
            return Report(
                repr(self.policy),
                self._steps,
                step.rows(),
                sum(step.parameters.values()),
                peak_nbytes,
                self._peak,
                tuple(notes),
                step.counts.proven,
                step.counts.repeated,
                tuple(self._live.monitor.found) if self._live.monitor is not None else (),
            )

    @contextmanager
    def watched_by(self, watcher: Watcher) -> Iterator[None]:
        """Inside this context, ``watcher`` is told what the Session does with memory."""
        before, self._live.watcher = self._live.watcher, watcher
        try:
            yield
        finally:
            self._live.watcher = before

    def report_peak(self, rows: tuple[PeakRow, ...]) -> None:
        """From now on, reports list these rows as what was alive at the peak of a step."""
        self._peak = rows

    # -- steps and modules ---------------------------------------------------------------------------------------

    def enter_module(self, module: nn.Module) -> None:
        """A module's forward is about to run."""
        if self._names.is_outside:
            with no_torch_function():
                self._enter_root(self._names.model or module)
        self._names.enter(module)

    def leave_module(self) -> None:
        """It has returned or raised."""
        self._names.leave()

    def ran_elsewhere(self) -> None:
        """A module ran with grad mode on a thread that has no Session."""
        self._elsewhere = True

    def _enter_root(self, module: nn.Module) -> None:
        self._names.enter_root(module)
        if not self._is_bound:
            self._is_bound = True
            self._names.learned = learned.learned_of(module, self._settings)
            self._use_learned_size()
        if self._live.unpacked and torch.is_grad_enabled() and not in_backward():
            self._begin_step()
        assert self._hooks is not None
        if self._is_idle != self._may_idle():
            self._is_idle = not self._is_idle
            if self._is_idle:
                self._hooks.stop_observing()
            else:
                self._hooks.observe()
        if not self._is_idle:
            self._parameters.enter(module)

    def _may_idle(self) -> bool:
        """Whether there is nothing to do (Note: [idle Sessions])."""
        return self._names.learned.is_idle and self._live.watcher is None and self._live.monitor is None

    def _use_learned_size(self) -> None:
        size = self._names.learned.min_nbytes
        if self._chooses_min_nbytes and size is not None:
            self.min_nbytes = self._contents.min_nbytes = size
            self.recomputes = self.policy.recomputes and not self._names.learned.saves_little

    def _learn(self) -> None:
        """A step is over: note what it may spare the next one."""
        known, step, encoder = self._names.learned, self._step, self._encoder
        if not self._is_idle and not step.is_empty:
            known.step, known.peak_nbytes = step, self._live.peak_nbytes
            if self._chooses_min_nbytes and step.accounts:
                known.choose_min_nbytes(account.saved_nbytes for account in step.accounts)
                self._use_learned_size()
        counted = self._counted[0], self._counted[1]
        if self._is_idle:
            known.end_idle_step(counted)
        else:
            known.end_step(counted, encoder.only_keep, step.freed_nbytes)
        self._counted = [0, 0]
        encoder.begin_step()

    def _begin_step(self) -> None:
        """A forward pass begins after a backward pass: the accounts start afresh."""
        self._learn()
        self._live.unpacked = False
        self._live.stashed_nbytes = 0  # there is room for nothing before backward has freed something
        self._steps += 1
        self.policy.begin_step()
        if self._live.monitor is not None:
            self._live.monitor.begin_step(self._steps)
        self._step = Step()
        self._remaking.begin_step(self._step, self._steps)
        self._shapes.clear()
        self._assigned.clear()
        self._live.prefetcher.begin_step()
        self._names.begin_step()
        self._pending.begin_step()
        self._contents.begin_step()

    # -- what the observer tells ---------------------------------------------------------------------------------

    def before_function(self) -> None:
        """A torch function is about to run: encode what nobody holds any more."""
        pending = self._pending
        pending.clock = clock = pending.clock + 1
        due = pending.due.pop(clock, None)
        if due is not None:
            with no_torch_function(), self._lock:
                pending.look_at(due)

    def after_function(self, result: Any) -> None:
        """A torch function has returned: name what it has saved."""
        with no_torch_function():
            self._name(result)

    def before_backward(self) -> None:
        """Backward is about to begin: encode everything that nobody holds."""
        with no_torch_function(), self._lock:
            self._pending.look_at_all()

    def before_side_effect(self, effect: SideEffect, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A function is about to change its arguments, or to hand their memory on to who changes it unseen."""
        with self._lock:
            for x in tensors_in(args, kwargs):
                if type(x) not in PLAIN or x.layout is not torch.strided or is_odd(x):
                    continue
                storage = x.untyped_storage()
                if storage._cdata in self._leaning:
                    self._leaning.store(storage._cdata, self._encoder, self._pending)
                if effect is SideEffect.ESCAPES:
                    self._contents.escape(x, storage)

    def assign_data(self, x: Tensor, assign: Callable[[], Any]) -> Any:
        """Follow a tensor whose ``.data`` is assigned: plain PyTorch has saved that very tensor, not its old memory."""
        if type(x) not in PLAIN or x.layout is not torch.strided or x.is_leaf:
            return assign()  # a leaf is held itself
        with no_torch_function():
            storage = x.untyped_storage()
            if storage.nbytes() < self.min_nbytes:
                self._assigned.append(x)  # what is held as it is follows when it is read, so ``x`` has to live
            value = self._pending.get(storage._cdata)
            saved = [] if value is None else [each for each in value.saved() if each.is_of(x)]
        result = assign()
        with no_torch_function(), self._lock:
            for each in saved:
                follow_original(each)
        return result

    def made(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, random_state: Tensor | None
    ) -> None:
        """A cheap function has returned a tensor: remember how its content was made."""
        with self._lock:
            self._contents.note_call(function, args, kwargs, result, random_state)

    # -- pack ----------------------------------------------------------------------------------------------------

    def _hold(self, x: Tensor) -> Packed:
        """The pack hook of a Session that is idle."""
        with no_torch_function():
            if self._steps == 0:
                self._steps = 1
            elif self._live.unpacked and not in_backward():
                self._learn()
                self._live.unpacked = False
                self._steps += 1
            self._counted[0] += 1
            if x.layout is torch.strided:
                self._counted[1] += x.nbytes
            return held.hold(x)

    def _read_held(self, packed: held.AsItIs) -> Tensor:
        """The unpack hook of a Session that is idle."""
        with no_torch_function():
            if not self._live.unpacked and in_backward():
                self._live.unpacked = True
            return held.read(packed)

    def _pack(self, x: Tensor) -> Packed:
        if self._is_idle:
            return self._hold(x)
        with no_torch_function():
            self._counted[0] += 1
            inner = wrapped.inner_tensor(x)
            if inner is not None and inner.layout is torch.strided:
                storage = inner.untyped_storage()
                self._counted[1] += x.nbytes
                if self._parameters.include(x, storage):
                    self._step.parameters[storage._cdata] = storage.nbytes()
                    return parameters.HeldParameter.of(x, inner)
                if storage.nbytes() < self.min_nbytes:
                    self._step.small_nbytes += inner.nbytes
                    return held.hold(x)
            return self._pack_large(x, inner)

    def _pack_large(self, x: Tensor, inner: Tensor | None) -> Saved:
        with self._lock:
            if self._steps == 0:
                self._steps = 1
                self._remaking.begin_step(self._step, 1)
                self.policy.begin_step()
                if self._live.monitor is not None:
                    self._live.monitor.begin_step(1)
            if self._step.accounts and self._live.saved == 0 and not in_backward():  # the last graph is gone
                self._begin_step()
            saved = Saved(x if inner is None else inner, self._live)
            saved.pinned = parameters.is_pinned(x)
            if inner is not None and inner is not x:
                saved.wrapping = wrapped.Wrapping(x, inner)
            elif parameters.is_leaf_of_graph(x):
                saved.dense = x
            self.unnamed.append(saved)
            # Outside any torch function (a custom Function, an extension's op), or inside backward, which is one long
            # torch function: what a reentrant checkpoint recomputes must not wait for its end.
            if self.depth == 0 or in_backward():
                self.before_function()
                self._name(None)
        return saved

    def _name(self, result: Any) -> None:
        """Find out what the tensors saved by the op that has just returned are, and take them in."""
        with self._lock:
            unnamed, self.unnamed = self.unnamed, []
            wanted = {id(saved): saved for saved in unnamed if saved.is_plain}
            if not wanted:
                return
            is_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled()
            for node, found in find(result, wanted):
                copies = weight_copies(node) if is_autocast else ()
                places = self._names.places(node, found)
                for (role, saved), place in zip(found, places, strict=True):
                    original = saved.original() if saved.original is not None else None
                    if original is not None and original.grad_fn is node:
                        saved.original = None  # autograd keeps an alias of a node's own result
                    del original
                    if copies and role in ("weight", "mat2") and sorted(place.facts.spec.shape) in copies:
                        self._step.parameters[id(saved)] = place.facts.spec.nbytes
                        continue
                    builtin = not isinstance(node, torch.autograd.function.BackwardCFunction)
                    dense = saved.dense if builtin and self._is_watched else None
                    self._take(saved, place, builtin)
                    if dense is not None:
                        self.policy.watch(place.facts, node, dense.detach())
                    del dense
                    if builtin:
                        saved.node, saved.claimable = node._sequence_nr(), place.claimable
            for saved in wanted.values():
                self._take(saved, self._names.unknown_place(saved), False)

    def _take(self, saved: Saved, place: Place, builtin: bool) -> None:
        """Account for a named tensor, and queue its storage for encoding unless backward reads nothing of it."""
        dense, facts = saved.dense, place.facts
        assert dense is not None
        saved.place, saved.tensor = place, facts
        saved.need, saved.mask, saved.builtin = facts.need, facts.mask, builtin
        saved.offset = int(dense.storage_offset())
        storage = dense.untyped_storage()
        cdata = storage._cdata
        value = self._pending.get(cdata)
        if facts.need is Need.SHAPE and self._releases_shape(place):
            if value is not None:
                value.account.share(facts)
            else:
                account = self._account_of_shape(facts, storage)
                if account is None:
                    self._shapes[cdata] = weakref.ref(storage), self._step.open(facts, storage.nbytes(), "shape")
            saved.counter, saved.dense = version_of(dense), None
            self._encoder.only_keep = False
            return
        if value is None:
            nbytes = storage.nbytes()
            account = self._account_of_shape(facts, storage) or self._step.open(facts, nbytes, "kept")
            account.stash_nbytes, account.codec = nbytes, "kept"
            account.reason = "held by the program, kept by reference"
            self._live.add(nbytes)
            value = Value(storage, account, self._live, place)
            self._pending.add(value)
        else:
            value.account.share(facts)
        value.members.append(weakref.ref(saved))
        saved.value = value
        if saved.pinned:
            value.address, value.storage = StorageWeakRef(storage), None
        if saved.wrapping is not None and saved.wrapping.was_changed:
            value.content = None  # its content ended unseen (Note: [versions of a wrapper])
        elif self.recomputes:
            value.content = self._contents.of(dense)
            value.content.value = weakref.ref(value)

    def _releases_shape(self, place: Place) -> bool:
        if place.releases is None or not self._encoder.is_fixed:
            action = self.policy.decide(place.facts)
            place.releases = isinstance(action, Stash) and any(codec.id == Shape.id for codec in action.codecs)
        return place.releases

    def _account_of_shape(self, facts: SavedTensor, storage: torch.UntypedStorage) -> Account | None:
        """The account of a storage of which only the shape was read so far, shared with one more saved tensor."""
        known = self._shapes.get(storage._cdata)
        if known is None or known[0]() is not storage:
            return None
        known[1].share(facts)
        return known[1]

    def _encode(self, value: Value) -> None:
        """Encode a value that nobody but autograd holds."""
        self._leaning.forget(value.cdata)  # nobody can change it any more
        self._encoder.encode(value)

    # -- unpack --------------------------------------------------------------------------------------------------

    def _unpack(self, packed: Packed) -> Tensor:
        with no_torch_function():
            if not self._live.unpacked and in_backward():  # and not a look at grad_fn._saved_*
                self._begin_backward()
            tensor = unpack(packed, self._live, self.min_nbytes)
            if self._live.watcher is not None:
                self._live.watcher.read(tensor, is_stored=isinstance(packed, Saved) and packed.dense is None)
            return tensor

    def _begin_backward(self) -> None:
        live = self._live
        with self._lock:
            self._pending.look_at_all()
            live.unpacked = True
            live.stashed_nbytes = live.nbytes
            live.prefetcher.begin_backward()
            live.prefetcher.advance(live.below_peak)


for _function in (
    Session.before_function,
    Session.after_function,
    Session.before_side_effect,
    Session.assign_data,
    Session.before_backward,
    Session.made,
    Session._pack,
    Session._unpack,
):
    hide_from_dynamo(_function, and_all_below=True)

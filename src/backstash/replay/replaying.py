"""The choice of the forward passes that run a script, and the functions by which the interpreter in C++ asks Python.

Note: [settled passes]
    Training repeats itself. When some passes of a kind (Note: [kinds of passes] in capture/learned.py) have saved as
    many tensors and bytes as each other, the next one is written down (recorder.py), and those after it run the script:
    what autograd saves is compared with what it saved then, in order, by its looks, by what else has its memory, and by
    the node that saves it. Each value becomes what it became then, when nobody else holds it any more. Where a value
    cannot - what would make it again was called in another way, or its codec refuses it - it goes the long way alone.
    If a plan is to make it again, and it is kept for that reason, the script is forgotten when the pass ends: a plan's
    peak counts on it. Where the pass itself differs, what is not decided yet is given back, and the pass goes on the
    long way. If it then saves what those before it did, or no pass has followed the script for long, a later one is
    written down anew, after twice as many equal passes. One in PERIOD passes goes the long way in any case, so that
    codecs look again and recipes are proven again.

    What is compared is what the long way compares: a shape or a dtype that is another, a node of another type, scalars
    that a formula asks for, an argument, autocast, a setting of the process, a tensor that was changed or handed on. So
    nothing is taken for granted that the long way would look at but the policy's answer and the time of the look.

Note: [functions in Python]
    Functions of torch.nn.functional that are written in Python, as relu and batch_norm are, offer themselves to modes
    by a function in Python that takes longer than all that a settled pass does of the call. So as long as a pass runs a
    script they find one in C++ in its place. Where the observer is the mode to ask, and the pass in progress is
    its own, that one asks the interpreter; anything else it leaves to torch's. A pass that ends on one thread puts
    torch's back for all, and those of other threads go on with it.

Note: [saved in known calls]
    For each tensor that autograd saves, torch asks its engine for hooks, and those of Python hand Python's lock over a
    dozen times until the tensor is dropped again. So as long as a known call of a settled pass runs, an engine stands
    in the place of torch's that gives hooks in C++ (native/replay/saving.cpp). They compare at once how the tensor
    looks, and put it aside with its version and node; what else has its memory is compared when the call has returned,
    or when anything looks at the pass before. Then all are taken in, in order. Where one looks otherwise, and where the
    innermost hooks are the program's, or a backward pass, a dispatch mode or a transform runs inside of the call, torch
    asks Python's hooks as before. What backward reads of parameters and small tensors takes no lock either.

Note: [between passes]
    Behind a known pass come the gradients' norm, an optimizer's step, an evaluation: thousands of calls in which grad
    mode is off, for networks of many weights. While no value waits to be looked at on the long way, and none there is
    to be made again from memory that may change, such a call concerns nobody unless it hands memory on, or writes to it
    without a new version. So the interpreter calls the function, until autograd saves something again. The same holds
    for reading and setting attributes, as an optimizer sets ``grad`` to None.

Note: [moves]
    A value that goes to another store is a Form there, as on the long way, and the same prefetcher is told of it and of
    all that backward reads. So values that a script moves and those that went the long way alone come back in one
    order, through one window; room is what both leave below the peak. The interpreter calls a function here where a
    value is put, fetched or seen as a view of its plane, and drops the Form with the value. A store that is full, or
    brings back nothing, raises there. On an accelerator only codecs that need no look at numbers are replayed, which
    are masks, bits of bools and copies: for the others the host would wait.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import GetSetDescriptorType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from backstash import interpreter, repeatable
from backstash.capture import modules, naming, observer
from backstash.capture.forward import Forward
from backstash.capture.learned import MOST_SCRIPTS, Passes, WrittenPass
from backstash.capture.names import scalar_of
from backstash.capture.side_effects import SideEffect, inplace_position
from backstash.codecs import base
from backstash.codecs.base import Encoded
from backstash.codecs.direct import MaskBits, Readable
from backstash.codecs.masks.codec import Bitmask
from backstash.codecs.shape import stand_in
from backstash.codecs.zvc.reference import zvc_damage
from backstash.errors import (
    CodecRefusedError,
    DamagedPlanesError,
    RecomputedDifferentlyError,
    SavedTensorModifiedError,
)
from backstash.numerics import under
from backstash.ops.bits import bits_of
from backstash.ops.cpu import library
from backstash.policies.base import Outcome, Policy, is_watching
from backstash.redeem import accumulation, claims, linear, table
from backstash.remake import calls, repeating
from backstash.remake.remaking import REPEAT
from backstash.remake.tape import CallTape
from backstash.replay.program import Script, ValueFate
from backstash.replay.recorder import Recorder, RecordingForward, RefusedError, Ways
from backstash.saved import SavedTensor, TensorSpec
from backstash.stash import held, seams
from backstash.stash.accounts import Account, Step
from backstash.stash.comparing import Late, distrusted
from backstash.stash.decode import modified_message
from backstash.stash.parameters import check_memory
from backstash.stash.value import Form, Saved, Value
from backstash.torch_internals import (
    dispatch_to_modes,
    hide_from_dynamo,
    no_torch_function,
    replace_dispatch_to_modes,
    running_node,
)

if TYPE_CHECKING:
    from backstash.session import Session

PERIOD = 64
"""One in so many passes goes the long way."""

native: Any = interpreter.module
"""The interpreter; None where it was not built for this torch."""

if native is not None:
    native.configure(scalar_of, library.address_of)
    native.configure_dispatch(observer.Observer, dispatch_to_modes, vars(torch.compiler), observer.LONG_WAY)
    native.configure_sizes(vars(accumulation), vars(table))


class Replaying:
    """What a Session asks before each pass, and tells after it.

    Args:
        session: the Session, which holds this.
        forward: its Forward.
        read: unpacks what goes the long way.
        take_in: packs on the long way.
    """

    def __init__(
        self, session: Session, forward: Forward, take_in: Callable[[Tensor], Any], read: Callable[[Any], Tensor]
    ) -> None:
        self._session = weakref.ref(session)
        self._forward = forward
        assert isinstance(forward._tape, CallTape)
        self._tape = forward._tape
        self._recorder: Recorder | None = None
        self._running: Script
        self._unnamed: list[tuple[Any, Saved]] = []
        self._exceeds = False  # what a plan makes again was kept in the pass that runs the script
        self._abandons = False  # the pass that runs the script, of which backward reads nothing any more
        self._is_over = False  # a pass that ran the script, or was given back; backward has not begun
        self._outermost: int | None = None  # the id of the module, in whose call a known pass is
        self._thread = 0  # of that call
        self._policy, self._stores = session.policy, session.stores
        self._prefetcher = forward._live.prefetcher
        self._learned: Passes
        me = weakref.ref(self)

        def beside() -> tuple[int, int]:
            this = me()
            return (0, 0) if this is None else (this.nbytes, this.peak_nbytes)

        forward._live.beside = beside

        ask = partial(_asking, me)
        passes = ["take_back", "name", "before_end", "begin_backward", "rare", "touched"]
        asked = [*passes, "distrust", "compare", "others", "encode", "fetch", "told"]
        own = {name: ask(f"_{name}") for name in asked}
        self._first_on_the_long_way = ask("_begin_long_way")
        own["claim"] = partial(_claim, forward._live.overwrites)
        self._native = native.Replayer(
            **own,
            **_CALLBACKS,
            take_in=_packing(forward, take_in),
            read=read,
            lock=forward._lock,
            is_planned=forward._live.buffers.is_planned,
        )
        self.pack, self.unpack = self._native.pack, self._native.unpack
        # A forward pass begins, known or not: what backward reads next ends it, also of an earlier graph.
        self.begin_forward: Callable[[], None] = self._native.begin_forward

    @property
    def is_running(self) -> bool:
        """Whether a pass in progress runs a script."""
        return bool(self._native.is_running)

    @property
    def alive(self) -> int:
        """How many tensors autograd holds that scripts have packed."""
        return int(self._native.alive)

    @property
    def nbytes(self) -> int:
        """Bytes of values that scripts hold."""
        return int(self._native.nbytes)

    @property
    def peak_nbytes(self) -> int:
        """The most bytes that values of scripts and others have held together."""
        return int(self._native.peak_nbytes)

    @property
    def is_dropped(self) -> bool:
        """Whether the latest pass has saved something, and all of it was dropped without a backward pass."""
        has_saved = self._is_over or (self.is_running and self._native.place[0] > 0)
        return has_saved and not self.alive and not self._forward._live.saved

    def watch(self, otherwise: Callable[..., Any]) -> Callable[..., Any]:
        """What watches torch functions: the interpreter, and ``otherwise`` on the long way."""
        self._otherwise = otherwise
        self._native.watch(self._first_on_the_long_way, False)
        watch: Callable[..., Any] = self._native.call
        return watch

    # -- passes --------------------------------------------------------------------------------------------------

    def begin(self, learned: Passes, number: int, others_nbytes: int, may_run: bool) -> bool:
        """A pass begins; returns whether it runs the script.

        Args:
            learned: of the model.
            number: of the step.
            others_nbytes: bytes that values hold which went the long way.
            may_run: whether it may run a script at all.
        """
        self._outermost = None
        self._learned, self._is_over = learned, False
        if learned.read is not None and may_run:
            is_same = learned.revision is self._policy.revision
            if learned.since < PERIOD and not learned.is_stale and is_same:
                learned.since += 1
                learned.runs += 1
                learned.step.begin_again()
                self._native.watch(self._first_on_the_long_way, False)
                self._running = learned.script
                leaning = self._tape.leaning
                self._native.begin(learned.read, number, others_nbytes, bool(leaning.by_storage) and leaning.prune())
                replace_dispatch_to_modes(native.handle_torch_function)
                return True
            _count_uses(learned)
            learned.clear()
            learned.equal = learned.needed
        return False

    def record_if_due(self) -> None:
        """A pass that goes the long way has begun: it is written down if it is like those before it."""
        if self._learned.equal < self._learned.needed or not _is_steady(self._policy):
            return
        session = self._session()
        assert session is not None
        self._recorder = Recorder(session._names, self._tape, native.type_of_node, native.settings_now)
        self._forward.__class__ = RecordingForward
        self._forward.recorder = self._recorder
        self._tape.contents.describes = True

    def enter(self, module: nn.Module) -> bool:
        """A module's call begins in a known pass; whether it is the outermost one."""
        if self._outermost is not None:
            return False
        self._outermost, self._thread = id(module), threading.get_ident()
        return True

    def leave(self, module: nn.Module) -> None:
        """It has ended."""
        if self._outermost == id(module):
            self._outermost = None

    def abandon(self) -> None:
        """Nothing is written down, or run, of the pass in progress."""
        if self._native.is_running:
            self._abandons = True
            try:
                self._native.stop()
            finally:
                self._abandons = False
        recorder = self._end_recording()
        if recorder is not None:
            recorder.clear()

    def _end_recording(self) -> Recorder | None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.end()
            self._forward.__class__, self._forward.recorder = Forward, None
            self._tape.contents.describes = False
        return recorder

    def end(self, is_left: bool) -> None:
        """The pass is over: backward begins, or the Session is left."""
        if is_left and self._tape.leaning.by_storage and self._tape.leaning.prune():  # of graphs of earlier passes
            session = self._session()
            if session is not None:
                session.prepare(self._forward.step)
        if is_left or self._native.is_running:
            self._native.end(is_left)

    def end_recording(self, step: Step) -> None:
        """The pass is over, and every value has become what it becomes.

        Args:
            step: its accounts.
        """
        recorder = self._end_recording()
        if recorder is None:
            return
        session = self._session()
        assert session is not None
        known = session._names.learned
        if session.compares_with_idle and known.worth.is_open(step):
            recorder.refuse("it lowers little of what the pass saves, and may not be worth its time")
        if not _is_steady(self._policy):
            recorder.refuse("the policy may say something else in each pass")
        try:
            script = recorder.script(session.min_nbytes, self._stores, self._policy, self._prefetcher)
            written = WrittenPass(script, native.script(script), step, self._policy.revision)
            script.copied.clear()
        except RefusedError as refused:
            written = WrittenPass(refusal=str(refused))
        recorder.clear()
        known.write_down(written)

    def begin_backward(self, others_nbytes: int) -> int:
        """A backward pass begins; returns the bytes that scripts hold."""
        self._is_over = False
        self._native.begin_backward(others_nbytes)
        return self.nbytes

    def told(self, learned: Passes) -> str:
        """The script as text, or why there is none."""
        if learned.script is not None:
            alone = sum(taken is False for taken in self._native.counts() or ())
            return f"{learned.script}\n{alone} values went the long way alone in the latest pass"
        why = f": {learned.refusal}" if learned.refusal else f" until {max(1, learned.needed)} equal steps were seen"
        return f"nothing is replayed{why}"

    def fill(self) -> None:
        """Writes into the accounts of a pass that has run a script what its values have taken."""
        counts = self._native.counts()
        for value, taken in zip(self._running.values, counts or (), strict=False):
            account = value.account
            if taken is False:  # the long way accounts for it
                continue
            encode_seconds, decode_seconds, stall_seconds, decodes, nbytes = taken or (0.0, 0.0, 0.0, 0, -1)
            account.encode_seconds, account.decode_seconds = encode_seconds, decode_seconds
            account.stall_seconds, account.decodes = stall_seconds, decodes
            account.stash_nbytes, account.codec, account.reason, account.store = value.kept_as
            if nbytes >= 0:
                account.stash_nbytes = nbytes

    # -- what the interpreter asks for ----------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        session = self._session()
        if session is not None:
            session._begin_backward()
        else:  # it is gone, and its graph is not
            self._native.end(False)
            self._native.begin_backward(0)

    def _begin_long_way(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Watches the first function after a known pass, as its successors are watched."""
        session = self._session()
        if session is not None:
            session.prepare(self._forward.step)
        self._native.watch(self._otherwise, not (self._forward._pending.is_waiting or self._tape.leaning))
        return self._otherwise(func, args, kwargs)

    def _rare(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        return self._otherwise(func, args, kwargs)

    def _before_end(self, is_broken: bool, in_call: bool) -> None:
        replace_dispatch_to_modes(dispatch_to_modes)
        self._is_over = True
        modules.wake()
        session = self._session()
        if session is not None:
            if is_broken or self._outermost is not None:
                running = [] if self._outermost is None else modules.calls_in_progress(self._thread)
                while running and id(running[0][0]) != self._outermost:
                    del running[0]
                saved, named = self._native.saves_at_end
                saves = self._running.saves[:named]
                facts = [None if save.place is None else save.place.facts for save in saves]
                session._names.follow(self._running.module_events, facts, running, self._thread)
            elif self._policy.cycles is not None:
                session._names.count_as(self._running.counts)
            if is_broken:
                session._is_replayed = False
                if not self._abandons:  # else it is counted as what it seemed to be
                    session._names.learned.give_back(self._running.saved_by(saved, named))
                if running:
                    session._parameters.enter(running[0][0])
                step = Step()
                step.is_whole = session._forward.step.is_whole
                session.prepare(step)
                session._forward.step = step
        if self._exceeds:
            self._learned.forget()
            self._exceeds = False
        if in_call:
            self._forward.depth += 1

    def _touched(self, effect: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """A function is about to change memory, or to hand it on, from which values of the long way may be made again.

        Returns:
            Whether there are such values.
        """
        session = self._session()
        if session is None or not self._tape.leaning.prune():
            return False
        session.prepare(self._forward.step)
        with no_torch_function():
            self._forward.before_side_effect(SideEffect(effect), args, kwargs or {})
        return True

    def _take_back(self, members: Any, unnamed: Any, is_orphan: bool) -> None:
        """Makes ordinary saved tensors of what a pass has packed, with names or before it is named."""
        session = self._session()
        if session is not None:
            session.prepare(self._forward.step)
        script, forward, live, value = self._running, self._forward, self._forward._live, None
        for packed, dense, original, number, version, node in members or ():
            save = script.saves[number]
            saved = _saved_of(dense, original, version, live)
            saved.origin.pinned = save.is_pinned
            native.delegate(packed, saved)
            forward.take(saved, save.place, node if save.is_builtin else None)
            value = saved.value
        for packed, dense, original, number, version, _ in unnamed or ():
            saved = _saved_of(dense, original, version, live)
            saved.origin.pinned = script.saves[number].is_pinned
            native.delegate(packed, saved)
            self._unnamed.append((packed, saved))
        if is_orphan and value is not None:
            number = script.saves[members[0][3]].value
            self._account_for(value, script.values[number].account)
            forward._pending.decide_if_orphaned(value)
            program = script.values[number].program
            if value.state.form is not None and program is ValueFate.HOLD:
                self._learned.is_stale = True  # a codec takes it now
            elif value.is_dense and program is ValueFate.REMAKE and self._policy.cycles is not None:
                self._exceeds = True

    def _account_for(self, value: Value, account: Account) -> None:
        """Has a value that goes the long way alone go on in the account that it has in the script's step."""
        accounts = self._forward.step.accounts
        fresh = accounts.pop()
        assert fresh is value.account
        account.stash_nbytes, account.codec, account.store = fresh.stash_nbytes, fresh.codec, fresh.store
        account.reason, account.stall_seconds = fresh.reason, 0.0
        account.encode_seconds = account.decode_seconds = account.remake_seconds = 0.0
        account.decodes = 0
        value.account = account

    def _name(self, result: Any) -> None:
        """Names what was packed in a call in which the pass was given back."""
        forward, unnamed = self._forward, self._unnamed
        self._unnamed = []
        forward.depth = max(0, forward.depth - 1)
        wanted = {id(packed): saved for packed, saved in unnamed if saved.is_plain}
        wanted |= {id(saved): saved for saved in forward.unnamed if saved.is_plain}
        forward.unnamed = []
        with no_torch_function():
            nodes = [x.grad_fn for x in naming.tensors_within(result)]
            for node, found in naming.find_by_nodes(nodes, wanted):
                forward._take_of_node(node, found)
            for saved in wanted.values():
                forward._take_of_unknown(saved)

    def _others(self) -> int:
        return self._forward._live.nbytes

    def _compare(self, found: Any, expected: Tensor | None, key: str, spec: TensorSpec, recipe: str) -> None:
        """Compares a sample, ``found``; or samples of that backward pass at its end, of which the interpreter keeps."""
        live = self._forward._live
        if expected is None:
            live.comparisons.expect(found, self._compared)
        elif found.shape != expected.shape or found.dtype is not expected.dtype:
            self._distrust(key, spec, recipe)
        else:
            failed = partial(distrusted, live, key, spec, None)
            live.comparisons.add_different(bits_of(found) != bits_of(expected), failed)

    def _compared(self, number: int) -> list[Late]:
        live = self._forward._live
        return [
            (found, expected, partial(distrusted, live, key, spec, None))
            for found, expected, key, spec in self._native.comparisons(number)
        ]

    def _encode(self, ways: Ways, x: Tensor, key: str | None) -> Encoded | Form | None:
        """Encodes a value; its planes are moved if there is a key for the prefetcher. None: it goes the long way."""
        if ways.codec.declines(x) is not None:
            return None
        try:
            encoded = base.adopt(ways.codec, x)
        except CodecRefusedError:
            return None
        if key is None:
            self._tell(ways, encoded.nbytes)
            return encoded
        assert ways.store is not None
        store = self._stores.get(ways.store)
        if store is None:
            return None
        form = Form(ways.codec, ways.mask, ways.spec, store, store.put(encoded))
        self._prefetcher.put(form, key)
        self._tell(ways, form.ticket.nbytes)
        return form

    def _tell(self, ways: Ways, nbytes: int) -> None:
        """Tells a policy that wants to know if the planes of a value take other bytes than before."""
        policy = self._policy
        if not policy.is_fixed and policy.observes_changes and nbytes != ways.nbytes:
            ways.nbytes = nbytes
            policy.observe(Outcome(ways.facts, base.label(ways.codec), nbytes))
            if policy.revision is not self._learned.revision:
                self._native.stop_soon()

    def _fetch(self, form: Form) -> tuple[Encoded, float]:
        return self._prefetcher.read(form, self._forward._live.below_peak)

    def _told(self, key: str) -> None:
        """Backward reads a saved tensor (Note: [order of reading] in stash/prefetch.py)."""
        if not self._prefetcher.idle:
            self._prefetcher.reach(key)
            self._prefetcher.passed(key, self._forward._live.below_peak)

    def _distrust(self, key: str, spec: TensorSpec, recipe: str) -> None:
        self._learned.forget()
        raise RecomputedDifferentlyError(distrusted(self._forward._live, key, spec, recipe))


def _asking(me: weakref.ref[Replaying], name: str) -> Callable[..., Any]:
    """What calls a method of whom ``me`` refers to."""

    def asked(*args: Any) -> Any:
        this = me()
        assert this is not None
        return getattr(this, name)(*args)

    return asked


def _packing(forward: Forward, take_in: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """What packs on the long way, also while a pass is written down."""

    def pack(x: Tensor) -> Any:
        return take_in(x) if type(forward) is Forward else forward.pack(x)

    return pack


def _count_uses(learned: Passes) -> None:
    """Counts the passes that ran a script: a recipe that is due is proven in this pass, and codecs look again."""
    for value in learned.script.values:
        place = learned.script.saves[value.strongest].place
        if value.program is ValueFate.REMAKE:
            due = REPEAT - 1 - place.uses % REPEAT
            place.uses += min(due, learned.since)
        else:
            place.spared = max(0, place.spared - learned.since)


def _is_steady(policy: Policy) -> bool:
    """Whether it is known if a policy says the same of a value as it did in an earlier pass."""
    return policy.is_fixed or policy.revision is not None


def for_session(
    session: Session, forward: Forward, take_in: Callable[[Tensor], Any], read: Callable[[Any], Tensor]
) -> Replaying | str:
    """What replays the passes of a Session, or why nothing does."""
    policy = session.policy
    if native is None:
        return "what runs scripts was not built for this torch (backstash doctor)"
    if not _is_steady(policy):
        return (
            f"{type(policy).__name__} may say something else of a value in each step. A policy that does not says so "
            f"by is_fixed or by revision"
        )
    if is_watching(policy) and policy.watches_again:
        return f"{type(policy).__name__} watches what nodes save in every step"
    if policy.cycles is not None and not 0 < policy.cycles <= MOST_SCRIPTS:
        return f"a step has {policy.cycles or 'any number of'} passes, which the policy tells from each other"
    if session.check:
        return f"check={session.check!r} compares, or measures, in steps"
    if not isinstance(forward._tape, CallTape):
        return "no values are made again here"
    return Replaying(session, forward, take_in, read)


def _saved_of(dense: Tensor, original: Tensor | None, version: int, live: Any) -> Saved:
    saved = Saved(dense, live)
    saved.origin.tensor = None if original is None else weakref.ref(original)
    saved.origin.version = version
    saved.dense = dense  # which is nobody else's, or a leaf
    return saved


class Replayed:
    """A saved tensor that a script has packed, as the package redeem sees it: see redeem/claims.py."""

    __slots__ = ("__weakref__", "overwrites", "packed", "spec")

    def __init__(self, packed: Any, spec: TensorSpec, overwrites: bool) -> None:
        self.packed, self.spec, self.overwrites = packed, spec, overwrites

    def whole(self) -> Tensor:
        """The tensor, decoded or remade."""
        whole: Tensor = native.whole(self.packed)
        return whole

    def direct(self, form: type[Readable]) -> Readable | None:
        """The planes of exactly what the reader needs, in that form; None where they are not stored in it."""
        stored = native.planes(self.packed)
        if stored is None:
            return None
        how, stored, is_mask = stored
        codec = Bitmask(how) if is_mask else how.codec
        spec = self.spec if is_mask else how.spec
        if spec.shape != self.spec.shape or spec.stride != self.spec.stride:
            return None
        if form is MaskBits and not is_mask and base.mask_of(codec) != how.mask:
            return None
        read = base.direct(codec, form)
        if read is None:
            return None
        if isinstance(stored, Form):
            encoded: Encoded = native.fetch(self.packed)
        else:
            encoded = Encoded(codec.id, spec, {"mask": stored}) if is_mask else stored
        found = read(encoded)
        return found if isinstance(found, form) else None

    def release(self) -> None:
        """Its reader is done: free what was decoded, but for the bits that others will read."""
        native.release(self.packed)

    def adopt(self, dead: Tensor) -> None:
        """Decode into that memory from now on."""
        native.adopt(self.packed, dead)


def _claim(overwrites: bool, packed: Any, spec: TensorSpec, node: int, only_large: bool) -> Tensor | None:
    """A claim for a saved tensor; where it is asked ``only_large``, if its layer's weight is large."""
    if only_large and not accumulation.awaits_large_weight():
        return None
    stashed = Replayed(packed, spec, overwrites)
    claim = claims.claim(stashed, spec, node)
    if claim is not None and type(running_node()).__name__ in accumulation.LINEAR:
        linear.begin(stashed, node)
    return claim


def _modified(spec: TensorSpec, facts: SavedTensor | None, now: int, expected: int) -> None:
    raise SavedTensorModifiedError(modified_message(spec, facts, now, expected))


def _freed(x: Tensor, nbytes: int, facts: SavedTensor | None) -> None:
    check_memory(x, nbytes, facts.key if facts is not None else "")


def _assigned(dense: Tensor, original: Tensor) -> Tensor:
    """What is read where the program has assigned the data of its own tensor since."""
    return held.read((dense, dense._version, weakref.ref(original)))


def _decode(ways: Ways, encoded: Encoded, out: Tensor) -> None:
    ways.codec.decode(encoded, out)


def _damaged(stored: int) -> None:
    raise DamagedPlanesError(zvc_damage(stored))


def _view(ways: Ways, encoded: Encoded) -> Tensor:
    view = base.view(ways.codec)
    assert view is not None
    return view(encoded)


def _encode_bits(whole: Tensor, mask: Any) -> Tensor | None:
    codec = Bitmask(mask)
    if codec.accepts(TensorSpec.of(whole)) is not None:
        return None
    encoded = codec.encode(whole)
    return encoded.planes["mask"] if set(encoded.planes) == {"mask"} else None


def _decode_bits(mask: Any, bits: Tensor, out: Tensor) -> None:
    codec = Bitmask(mask)
    codec.decode(Encoded(codec.id, TensorSpec.of(out), {"mask": bits}), out)


def _repeat(call: calls.Call, function: Any, tensors: list[Tensor], random_state: Tensor | None) -> Tensor:
    return repeating.repeat(_drawing(call, random_state), function, tensors)


def _repeat_inside(
    call: calls.Call, function: Any, tensors: list[Tensor], random_state: Tensor | None, numbers: tuple[int, ...]
) -> list[Tensor | None]:
    """What a function saves inside under these numbers; None for what it has not saved."""
    found = repeating.repeat_inside(_drawing(call, random_state), function, tensors, numbers)
    return [found.get(number) for number in numbers]


def _drawing(call: calls.Call, random_state: Tensor | None) -> calls.Call:
    """The call with the state that the generator had."""
    return call if random_state is None else replace(call, random_state=random_state)


def _affine(
    kernel: tuple[Any, Any],
    x: Tensor,
    vectors: tuple[Any, ...],
    y: Tensor | None,
    numbers: tuple[Any, ...],
    spec: TensorSpec,
    sample: tuple[Tensor, int, int] | None,
    of_residual: tuple[Any, ...],
) -> Tensor:
    """Has an accelerator's kernel make a value, and perhaps copy a sample of it: see fused.affine."""
    result = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    kernel[0](x, *vectors, y, *numbers, result, None, kernel[1], *(sample or (None, 0, 1)), *of_residual)
    return result


def _enter_settings(wanted: Any, spec: TensorSpec) -> Any:
    context = under(wanted, spec.device.type)
    context.__enter__()
    return context


def _leave_settings(context: Any) -> None:
    context.__exit__(None, None, None)


_VIEWS = frozenset({"H", "T", "imag", "mH", "mT", "real"})
"""Attributes of a tensor that are operations, whose results may be made again."""


def _is_attribute(function: Any) -> bool:
    """Whether a function reads or sets an attribute of a tensor, which autograd does not record."""
    attribute = getattr(function, "__self__", None)
    return isinstance(attribute, GetSetDescriptorType) and attribute.__name__ not in _VIEWS


def _number_of(function: Any) -> int | None:
    """What the interpreter knows of a function, as one number; None where the long way has to know."""
    try:
        kind = observer._kinds.get(function) or observer._kind_of(function)
    except TypeError:  # it cannot be hashed
        return None
    if kind.assigns_data:
        return None
    if kind.ends_pass:
        return -1
    position = inplace_position(function)
    number = kind.effect.value + 8 * kind.is_cheap + 16 * repeatable.may_draw(function) + 32 * _is_attribute(function)
    return number + 64 * (kind.inside is not None) + 128 * (0 if position is None else position + 1)


_CALLBACKS: dict[str, Callable[..., Any]] = {
    "claim_weight": linear.claim_weight,
    "claim_input": linear.claim_input,
    "modified": _modified,
    "freed": _freed,
    "assigned": _assigned,
    "stand_in": stand_in,
    "check_reference": lambda x, version: calls.Held(x, version, True).get(),
    "decode": _decode,
    "damaged": _damaged,
    "view": _view,
    "planes_nbytes": lambda stored: stored.ticket.nbytes if type(stored) is Form else stored.nbytes,
    "encode_bits": _encode_bits,
    "decode_bits": _decode_bits,
    "repeat": _repeat,
    "repeat_inside": _repeat_inside,
    "enter_settings": _enter_settings,
    "leave_settings": _leave_settings,
    "random_state": lambda func, args, kwargs: repeatable.random_state(func, args, kwargs or {}),
    "number_of": _number_of,
    "affine": _affine,
}
_nobody: Any = None
for _function in (
    *_CALLBACKS.values(),
    _asking(_nobody, ""),
    _packing(_nobody, _nobody),
):  # all closures share their code
    hide_from_dynamo(_function, and_all_below=True)


seams.replays = for_session

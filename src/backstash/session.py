"""The Session: what happens to a tensor from the moment autograd saves it until backward asks for it.

A saved tensor passes through it as the package's top level reads: it is *packed* when autograd saves it, *named* when
the op that saved it has returned (capture/), *encoded* when nobody but autograd holds its memory any more, or forgotten
and made again (stash/), and *unpacked* when backward asks for it (redeem/). This module connects these rooms, and
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

import copy
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from backstash import graphs, policies
from backstash import stores as all_stores
from backstash.arguments import check_arguments, replanned
from backstash.capture import hooks, learned, leaving, modules
from backstash.capture.forward import Forward
from backstash.capture.names import Entries, Names
from backstash.capture.naming import packed_by
from backstash.capture.worth import SHARE, lowered_nbytes
from backstash.errors import SessionError
from backstash.policies.base import Policy
from backstash.saved import MIN_NBYTES
from backstash.stash import held, seams
from backstash.stash.accounts import Step
from backstash.stash.encode import Encoder
from backstash.stash.live import Live
from backstash.stash.parameters import ParameterStorages
from backstash.stash.pending import Pending
from backstash.stash.unpack import unpack
from backstash.stash.value import Value
from backstash.stores import DeviceStore, Store
from backstash.stores.base import check_is_store
from backstash.torch_internals import has_compiled, hide_from_dynamo, in_backward, inputs_of_call, no_torch_function

if TYPE_CHECKING:
    from backstash.stash.ledger import PeakRow, Report
    from backstash.stash.watcher import Watcher

MOST_DROPPED = 4096
"""How many values of graphs that are gone without a backward pass are noted, as in an evaluation with gradients."""

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
        stop_if_useless: whether a Session that lowers what a step saves by less than 2 %, and makes a step more than
            5 % slower, says so once and does nothing from then on (Note: [Sessions of no use] in capture/worth.py). By
            default it does under the policy ``lossless``, and under no other.
        replan: ``"auto"`` with a :class:`~backstash.Plan` as the policy: steps that do not match it are profiled and
            planned for within its budget, each shape of input for itself (see planning/run/budgeted.py).

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
        stop_if_useless: bool | None = None,
        replan: Literal["auto"] | None = None,
    ) -> None:
        seams.readers.prepare()
        self._arguments: dict[str, Any] = {
            "policy": policy,
            "model": model,
            "stores": stores,
            "min_nbytes": min_nbytes,
            "check": check,
            "check_limit": check_limit,
            "overwrite_gradients": overwrite_gradients,
            "stop_if_useless": stop_if_useless,
            "replan": replan,
        }
        self.policy = policies.get(policy)
        check_arguments(model, stores, min_nbytes, check, check_limit, overwrite_gradients, stop_if_useless)
        is_lossless = isinstance(self.policy, policies.Lossless)
        for name, store in (stores or {}).items():
            check_is_store(store, f"Session was asked for stores={{{name!r}: {store!r}}}")
        self._stops_if_useless = is_lossless if stop_if_useless is None else stop_if_useless
        self.check = check
        if min_nbytes is None:
            min_nbytes = self.policy.min_nbytes
        self._chooses_min_nbytes = min_nbytes is None
        self.stores: dict[str, Store] = {"device": DeviceStore(), "host": all_stores.HostStore()}
        opened = {name: opens() for name, opens in (self.policy.stores or {}).items() if name not in (stores or {})}
        self.stores |= {**opened, **(stores or {})}
        self._names = Names(model, seams.readers.can_claim, self.policy.cycles)
        self._live = Live(self.policy.ahead, overwrite_gradients, MIN_NBYTES if min_nbytes is None else min_nbytes)
        if isinstance(check, int) and check:
            from backstash.gradient_error import Monitor  # which a Session without checked steps does not need

            name_of = self._names.parameter_name
            self._live.monitor = Monitor(check, check_limit, repr(self.policy), packed_by, name_of)
        self._parameters, self._pending = ParameterStorages(), Pending(self._encode)
        rooms = self._pending, self._parameters
        self._producer = seams.producer(self.policy, self._names, self._live, *rooms, check == "full")
        self._live.remake, self._tape = self._producer.remake, self._producer.tape
        self._encoder = Encoder(self.policy, self.stores, self._live, self._producer)
        listens = self._names, self._live, self._tape, self._encoder
        self._forward = Forward(self.policy, *listens, *rooms, self._before_save)
        self._steps, self._elsewhere = 0, False
        self._holding = held.Holding(self._forward.counted, self._before_hold)
        self._reading = held.Reading(self._unpack, seams.readers.claim_input, seams.readers.linear_nodes)
        self._hold, self._read = held.hooks_of(self._holding, self._reading)
        replays = seams.replays
        replaying = "" if replays is None else replays(self, self._forward, self._pack, self._read)
        self._unreplayed = f"nothing is replayed: {replaying}" if isinstance(replaying, str) and replaying else ""
        self._replaying = None if isinstance(replaying, str) else replaying
        self._forward.replaying = self._replaying
        self._is_replayed = False  # the pass in progress, or the latest one
        self._is_prepared = True  # for values that go the long way in this pass
        self._lock = self._live.lock
        self._settings = f"{learned.name_of(self.policy)} {min_nbytes} {check} {self._stops_if_useless}"
        self._is_bound = False  # to what was learned of the model
        self.learns_anew = False  # whatever other Sessions have learned of it
        self._entries = Entries()  # which the Sessions of one loop share
        self._is_entered = False  # and no forward pass has begun since
        self._hooks: hooks.Hooks | None = None
        self._entry: leaving.Entrance | None = None
        rewriting = self.policy.rewriting
        self._rewriting = None if rewriting is None else rewriting(model)
        self._rewritten: AbstractContextManager[object] | None = None
        self._peak: tuple[PeakRow, ...] = ()
        passed = ("model", "stores", "check", "check_limit", "overwrite_gradients")
        given = {name: self._arguments[name] for name in passed}
        self._replanned = replanned(self.policy, replan, min_nbytes=self.min_nbytes, **given)
        if self._replanned is not None:
            # Other Sessions do the work. What refers to this one would keep it, and a profiler that runs for it, until
            # the collector comes.
            self._forward.replaying = self._holding.native = None
            del self._pending, self._producer, self._tape, self._encoder, self._forward, self._holding, self._reading
            del self._hold, self._read, self._replaying

    def __deepcopy__(self, memo: Any) -> Session:
        """A new Session with the same arguments, as a copy of the model that holds it needs one. It shares stores."""
        own = {name: copy.deepcopy(self._arguments[name], memo) for name in ("policy", "model")}
        return type(self)(**(self._arguments | own))

    def __copy__(self) -> Session:
        return type(self)(**(self._arguments | {"policy": copy.deepcopy(self._arguments["policy"])}))

    def __reduce__(self) -> tuple[Any, ...]:
        return made_again(type(self), self._arguments)

    # -- entering and leaving ------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        leaving.leave_abandoned()
        hooks.remove_left_observers()
        hooks.refuse_other_hooks()
        if self._replanned is not None:
            leaving.enter_instead(self, self._replanned)
            self._replanned.__enter__()
            return self
        if self._entry is not None and self._entry.is_abandoned:
            self._leave(None, None, None)
        if self._entry is not None:
            raise SessionError(
                "a Session was entered that is in use already, by another thread. Make a Session for each thread."
            )
        self._live.comparisons.check(waits=True)
        self._entry = entry = leaving.Entrance(self)
        try:
            self._elsewhere = False
            self._is_entered = True
            self._live.read_with_graph = self._forward.read_with_graph
            self._names.enter_session()
            if self._rewriting is not None:
                self._rewritten = self._rewriting()
            self._forward.is_idle = self._may_idle()
            if self._forward.is_idle:
                self._holding.tell(self._reading)
                self._hooks = hooks.Hooks(self._hold, self._read)
            else:
                of = self._replaying
                pack, unpack = (self._pack, self._read) if of is None else (of.pack, of.unpack)
                self._hooks = hooks.Hooks(pack, unpack, self, self._forward)
            self._hooks.install()
            if self._names.learned.begins_early and self._begins_as_entered():
                self._is_entered = False
                self._entries.add(True, self._live)
                self._begin_step(is_early=True)
        except BaseException as error:
            entry.leave(error)
            raise
        return self

    __exit__ = leaving.Exit()

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves the Session; does nothing if that was done already (Note: [interrupted leaving])."""
        if self._replanned is not None:
            self._replanned._leave(kind, error, trace)
            return
        if self._entry is None or not self._entry.may_end_here():
            return
        self._entry.is_over = True
        if error is not None:
            self._holding.count()
            self._forward.step.is_whole, self._forward.counted[:] = False, (0, 0, 0)
            self._entries.is_broken = True
        leaving.to_the_end(self._leave_entry)

    def _leave_entry(self) -> None:
        """Takes everything away, and decides about what is pending. It may be called again if it was interrupted."""
        entry = self._entry
        if entry is None:
            return
        if self._hooks is not None:
            self._hooks.remove(entry.is_here)
        if self._rewritten is not None:
            self._rewritten.__exit__(None, None, None)
            self._rewritten = None
        try:
            leaving.to_the_end(self._finish)
            self._learn()
        finally:
            self._forget()
            self._hooks = None
            entry.end()
            self._entry = None

    def _finish(self) -> None:
        """Decide about everything that is pending: from now on nobody watches what the program does to it."""
        self._forward.depth = 0
        self._names.leave_all()
        with no_torch_function(), self._lock:
            if self._replaying is not None:
                self._replaying.end(is_left=True)
            if self._is_prepared:
                self._forward.name(None)
                self._pending.look_at_all()
                self._tape.store_all(self._encoder)
                self._end_recording()

    def _forget(self) -> None:
        self._live.read_with_graph = None
        if self._is_prepared:
            self._pending.clear()
            self._forward.clear()
            self._tape.clear()
            self._parameters.clear()

    @property
    def min_nbytes(self) -> int:
        """Smaller tensors are kept."""
        return self._live.min_nbytes

    @property
    def model(self) -> nn.Module | None:
        """The module that was passed as ``model``."""
        return self._names.model

    @property
    def is_replanned(self) -> bool:
        """Whether it makes plans while the program runs."""
        return self._replanned is not None

    @property
    def recomputes(self) -> bool:
        """Whether it is noted how values are made, so that they can be made again."""
        return bool(self.policy.recomputes) if self._replanned is not None else self._forward.recomputes

    @property
    def is_innermost(self) -> bool:
        """Whether it is open, and no other hooks of autograd were installed inside it."""
        return self._hooks is not None and self._hooks.are_innermost

    def report(self) -> Report:
        """The accounts of the last step that saved anything."""
        from backstash.stash.ledger import Report  # which a step that nobody looks at does not need

        if self._replanned is not None:
            report: Report = self._replanned.report()
            return report
        self._live.comparisons.check(waits=True)
        with self._lock:
            step = self._forward.step
            peak_nbytes = self._live.peak_nbytes
            if self._replaying is not None:
                peak_nbytes = max(peak_nbytes, self._replaying.peak_nbytes)
                if self._is_replayed:
                    self._replaying.fill()
            if self._forward.is_idle or step.is_empty:  # a pass that was cut short, and dropped, has no accounts
                step = self._names.learned.step
                peak_nbytes = max(peak_nbytes, self._names.learned.peak_nbytes)
            saves_little = self._chooses_min_nbytes and self._names.learned.saves_little
            notice = self._names.learned.worth.notice
            is_idle = self._forward.is_idle and not notice
            kept_below = self.min_nbytes if saves_little else None
            own_notes = step.notes(is_idle, kept_below, self._elsewhere, has_compiled())
            own_notes += (notice,) if notice else ()
            return Report(
                str(self.policy),
                self._steps,
                step.rows(),
                sum(step.parameters.values()),
                peak_nbytes,
                self._peak,
                (*own_notes, *self.policy.notes),
                step.proven,
                step.repeated,
                tuple(self._live.monitor.found) if self._live.monitor is not None else (),
                named=step.named,
                recognised=step.recognised,
                script=self._told(),
            )

    def _told(self) -> str:
        """What a report says of the script that passes run."""
        if self._unreplayed or self._replaying is None:
            return self._unreplayed
        if self._forward.is_idle:
            return "nothing is replayed: there is nothing to do, so what a step saves is held as it is"
        return str(self._replaying.told(self._names.learned.passes))

    @contextmanager
    def watched_by(self, watcher: Watcher) -> Iterator[None]:
        """Inside this context, ``watcher`` is told what the Session does with memory.

        No pass runs a script then, and only one that :meth:`settle_soon` has asked for is written down.
        """
        before, self._live.watcher = self._live.watcher, watcher
        if self._replanned is None:
            self._reading.is_simple = False
            self._holding.tell(self._reading)
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
                self._enter_root(module if self._names.model is None else self._names.model, module)
        if self._replaying is None or not self._replaying.is_running:
            self._names.enter(None if self._forward.is_idle else module)
        elif self._replaying.enter(module) and not self._names.learned.runs_elsewhere:
            modules.rest(module)

    def leave_module(self, module: nn.Module) -> None:
        """It has returned or raised."""
        if self._replaying is not None:
            self._replaying.leave(module)
        self._names.leave(module)

    def ran_elsewhere(self) -> None:
        """A module ran with grad mode on a thread that has no Session."""
        self._elsewhere = self._names.learned.runs_elsewhere = True

    def begin_cycles(self) -> None:
        """The next forward pass is the first one of a step of several passes (Note: [calls apart] in names.py)."""
        if self._steps:
            self._names.start_over()

    @property
    def accounts(self) -> Step:
        """The accounts of the step in progress, or of the latest one."""
        return self._forward.step

    def settle_soon(self) -> None:
        """The next pass is written down (replay/) without waiting for equal ones, so the one after it is settled."""
        self._names.learned.settle_soon()

    def _enter_root(self, module: nn.Module, called: nn.Module) -> None:
        if not self._is_bound:
            self._is_bound = True
            self._names.learned = learned.learned_of(module, self._settings, self.learns_anew)
            self._use_learned_size()
        if torch.is_grad_enabled() and not in_backward():
            begins = self._live.unpacked or self._is_dropped or self._is_skipped
            if begins:
                self._begin_step(called)
            elif self._steps == 0 and self._replaying is not None and not self._forward.is_idle:
                self._before_save()
                self._begin_pass(called)
            if self._is_entered:
                self._is_entered = False
                self._entries.add(begins, self._live)
        assert self._hooks is not None
        may_idle = self._may_idle()
        if self._forward.is_idle != may_idle and not in_backward():  # a node undoes what is pushed or popped in it
            self._forward.is_idle = may_idle
            (self._hooks.stop_observing if may_idle else self._hooks.observe)()
        if not self._forward.is_idle:
            self._names.enter_root(module)
            # Else nobody asks, and what goes the long way alone may read no parameter again.
            if self._replaying is None or not self._replaying.is_running:
                self._parameters.enter(module)

    def _may_idle(self) -> bool:
        """Whether there is nothing to do (Note: [idle Sessions])."""
        return self._names.learned.is_idle and self._live.watcher is None and self._live.monitor is None

    def _use_learned_size(self) -> None:
        if self._chooses_min_nbytes:
            known = self._names.learned
            self._live.min_nbytes = known.min_nbytes or MIN_NBYTES
            self._forward.recomputes = bool(self.policy.recomputes) and not known.saves_little

    @property
    def compares_with_idle(self) -> bool:
        """Whether steps that lower little are timed beside idle ones, whose hooks would have all compiled once more."""
        return self._stops_if_useless and not has_compiled()

    def _learn(self) -> None:
        """A step is over, or the Session is left: note what it may spare the next one."""
        known, step, encoder = self._names.learned, self._forward.step, self._encoder
        self._holding.count()
        counted, looks = (self._forward.counted[0], self._forward.counted[1]), self._forward.counted[2]
        self._forward.counted[:] = 0, 0, 0
        if self._forward.is_idle:
            known.end_idle_step(counted)
            return
        if not step.is_whole:
            known.drop_pass()
            return
        if self._is_replayed:
            return
        if self._replaying is not None and counted[0]:  # else it was an evaluation
            is_ordinary = step.named == step.recognised and not step.calls
            known.end_pass((*counted, looks), is_ordinary)
        if not step.is_empty:
            known.step, known.peak_nbytes = step, self._live.peak_nbytes
        # Where something was compiled it would be compiled once more for the hooks of an idle Session.
        saved_nbytes, compiled_any = step.saved_nbytes, has_compiled()
        lowered = 0 if encoder.only_keep else lowered_nbytes(step)
        has_no_use = encoder.is_fixed and not step.freed_nbytes and SHARE * lowered < saved_nbytes
        is_equal = counted == known.counted
        does_nothing = (encoder.only_keep or has_no_use) and not encoder.is_looking and not compiled_any
        known.end_step(counted, does_nothing, saved_nbytes, lowered)
        if self.compares_with_idle and counted[0]:
            known.worth.end_step(is_equal, step)
        if self._chooses_min_nbytes and step.accounts and counted[0]:
            known.choose_min_nbytes((account.saved_nbytes for account in step.accounts), step.saved_nbytes)
        self._use_learned_size()

    def _compare(self) -> None:
        """A step begins: say so if it was found that what is done is not worth its time."""
        if not self._names.learned.assigns_data and self._names.learned.worth.begin_step():
            warnings.warn(f"the policy {self.policy!r}: {self._names.learned.worth.notice}.", stacklevel=2)

    def _begins_as_entered(self) -> bool:
        """Whether a pass begins as the Session is entered, where one has saved something before any module was called.

        A pass runs a script only if it was known before it has saved anything, and no module tells of it then.
        """
        return self._live.unpacked and not self._forward.is_idle and torch.is_grad_enabled() and not in_backward()

    def _begin_step(self, called: nn.Module | None = None, is_early: bool = False) -> None:
        """A forward pass begins after a backward pass, with a module or without: the accounts start afresh."""
        dropped: dict[str, str] = {}
        if self._live.watcher is not None and not self._live.unpacked:
            dropped = self.accounts.take_saved()
            self._live.watcher.dropped(dropped)
        self._live.comparisons.check(waits=True)
        is_holding = self._hooks is not None and self._hooks.stands_in
        if is_holding:
            self._holding.count()
        if self._forward.counted[0]:  # and the Session was not left since
            self._learn()
        self._reading.is_simple = False
        if is_holding:
            self._holding.tell(self._reading)
        # There is room for nothing before backward has freed something.
        self._live.stashed_nbytes = 0
        self._steps += 1
        self._compare()
        self.policy.begin_step()
        if self._live.monitor is not None:
            self._live.monitor.begin_step(self._steps)
        self._live.prefetcher.begin_step(self.policy)
        self._names.begin_step(is_next=self._live.unpacked)
        self._is_prepared = False
        self._begin_pass(called, is_early)
        if 0 < len(dropped) <= MOST_DROPPED:
            self.accounts.dropped = dropped
        if self._replaying is not None:
            self._replaying.begin_forward()
        self._live.unpacked = False  # last: what is interrupted before that is done again

    def _begin_pass(self, called: nn.Module | None, is_early: bool = False) -> None:
        """A pass begins, which may be one that is known (Note: [settled passes] in replay/replaying.py)."""
        replaying = self._replaying if self._may_be_known() else None
        if self._replaying is not None:
            self._replaying.abandon()  # what is left of an earlier one
        known = self._names.learned
        kind: Hashable = None
        if called is not None and replaying is not None:
            inputs = modules.signature_of(inputs_of_call(called))
            kind = known.number_of(called), inputs, self._names.frames[0].label
        elif is_early and replaying is not None:
            kind = "entered"
        passes = known.begin_pass(kind)
        may_run = self._live.watcher is None
        self._is_replayed = replaying is not None and replaying.begin(passes, self._steps, self._live.nbytes, may_run)
        if self._is_replayed:
            known.runs = True
            self._forward.step = passes.step
            return
        self.prepare(Step())
        if replaying is not None:
            replaying.record_if_due()

    def _may_be_known(self) -> bool:
        """Whether the pass that begins may run a script, or be written down."""
        is_watched = self._live.watcher is not None and not self._names.learned.settles_soon
        if self._replaying is None or is_watched or self._live.monitor is not None:
            return False
        if graphs.capture() is not None:
            self._replaying.abandon()
            return False
        # A pass that begins inside a function, with what that has saved, is known too late.
        is_idle = self._forward.is_idle or self._may_idle()  # or is about to be, and hears of nothing more then
        return not is_idle and not self._forward.depth

    def prepare(self, step: Step) -> None:
        """A value is about to go the long way: has the rooms begin the step, if it is the first one in this pass.

        Args:
            step: the accounts that it is entered in.
        """
        if self._is_prepared:
            return
        self._encoder.begin_step()
        self._forward.begin_step(step)
        self._producer.begin_step(step, self._steps)
        self._pending.begin_step()
        self._tape.begin_step()
        self._is_prepared = True

    def _end_recording(self) -> None:
        if self._replaying is not None:
            self._replaying.end_recording(self._forward.step)

    # -- pack ----------------------------------------------------------------------------------------------------

    def _before_hold(self) -> None:
        """A tensor is about to be held by a Session that is idle: a step begins if it is the first one."""
        if self._live.unpacked and in_backward():
            return
        if self._steps == 0 or self._live.unpacked:
            self._learn()
            self._steps += 1
            self._compare()
        if self._replaying is not None:
            self._replaying.begin_forward()
        self._live.unpacked = self._reading.is_simple = False
        self._holding.before = None
        self._holding.tell(self._reading)

    def _pack(self, x: Tensor) -> held.Packed:
        if self._forward.is_idle:
            return self._hold(x)
        if not self._is_prepared:
            self.prepare(self._forward.step)
        return self._forward.pack(x)

    def _before_save(self) -> None:
        """A tensor is about to be taken in: a step begins if it is the first one, or if the last graph is gone."""
        if self._steps == 0:
            self._steps = 1
            self._compare()
            self._producer.begin_step(self._forward.step, 1)
            self.policy.begin_step()
            self._live.prefetcher.begin_step(self.policy)
            if self._live.monitor is not None:
                self._live.monitor.begin_step(1)
        elif self._forward.step.accounts and not self.has_graph and not in_backward():
            self._names.learned.begins_early |= self._live.unpacked
            self._begin_step()
            self.prepare(self._forward.step)  # this tensor goes the long way in any case

    @property
    def _is_dropped(self) -> bool:
        """Whether the latest pass has saved something, and all of it was dropped without a backward pass."""
        if self._replaying is not None and self._replaying.is_dropped:
            return True
        is_known = self._is_replayed or self._forward.is_idle  # then the accounts are those of another pass
        return not is_known and bool(self._forward.step.accounts) and not self.has_graph

    @property
    def _is_skipped(self) -> bool:
        """Whether the latest pass has saved something, and will have no backward pass for all that is known."""
        return self._is_entered and self.has_graph and self._entries.are_all

    @property
    def has_graph(self) -> bool:
        """Whether autograd holds anything that was saved."""
        return self._live.saved != 0 or (self._replaying is not None and self._replaying.alive != 0)

    def _encode(self, value: Value) -> None:
        """Encode a value that nobody but autograd holds."""
        self._tape.owns(value.waiting.cdata)
        self._encoder.encode(value)

    # -- unpack --------------------------------------------------------------------------------------------------

    def _unpack(self, packed: held.Packed) -> Tensor:
        if self._reading.is_simple and type(packed) is tuple:
            return self._read(packed)
        with no_torch_function():
            # Not a look at grad_fn._saved_*, nor a pass that has a graph of its own, which belongs to the forward pass.
            if not self._live.unpacked and in_backward() and not torch.is_grad_enabled():
                self._begin_backward()
            return unpack(packed, self._live)

    def _begin_backward(self) -> None:
        live = self._live
        with self._lock:
            if self._replaying is not None:
                self._replaying.end(is_left=False)
            if self._is_prepared:
                self._pending.look_at_all()
                self._end_recording()
                self._tape.begin_backward()
            live.unpacked = True
            self._entries.begin_backward(live, self._replaying)
            self._holding.before = self._before_hold
            self._reading.is_simple = live.watcher is None and live.monitor is None
            self._holding.tell(self._reading)
            live.stashed_nbytes = live.nbytes
            if self._replaying is not None:
                live.stashed_nbytes += self._replaying.begin_backward(live.nbytes)
            live.prefetcher.begin_backward()
            live.prefetcher.advance(live.below_peak)


def made_again(make: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """What pickle is given of a Session, or of what opens Sessions: how to make it anew.

    Raises:
        SessionError: there are stores among the arguments.
    """
    if arguments.get("stores"):
        raise SessionError(
            "a Session was asked to be pickled, but it has stores, which hold memory and files of this process. Leave "
            "the Session out of what is saved, and make one where it is loaded."
        )
    return partial(make, **arguments), ()


for _function in (Session.__enter__, Session._pack, Session._before_hold, Session._unpack):
    hide_from_dynamo(_function, and_all_below=True)

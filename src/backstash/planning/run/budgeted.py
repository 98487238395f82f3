"""Keeps training within a budget: its first steps are profiled and planned for, and so is each new shape of input.

Nobody hands over a step here. The program trains in its own loop and runs its forward passes inside of a
:class:`Budgeted`, which opens the Session that is right for each of them. course.py has what is measured when.

Note: [between steps]
    A Session is chosen when a forward pass begins. Where the inputs are not known then, it is when a module is called
    first with tensors, by position or by keyword. By then the program may have put hooks or modes of its own above the
    Session's, as a checkpoint around the whole model does; then the Session stays, and the next one is right. Modules
    that are called inside of what is compiled do not count: at the end of each part Dynamo puts back the modes that
    there were at its beginning. If a backward pass has ended and no module was heard of, forward passes begin where
    the one before has ended, or where this is entered.

Note: [full stores]
    A disk may fill up at any time, and other programs may fill it. That ends no training: what a store has no room for
    stays on its device, and the next step runs under a plan of the same profiles that moves nothing. No step is
    profiled again for it. Nothing is moved from then on, since what has filled the disk once may do so in any step.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import torch
from torch import nn

from backstash import accelerator, repeatable
from backstash.arguments import check_switch
from backstash.capture import leaving, modules
from backstash.capture.modules import Signature, signature_of
from backstash.capture.names import Entries
from backstash.codecs.base import Encoded
from backstash.errors import BatchTooLargeError, BudgetError, PlanError, SessionError, StoreError
from backstash.ops.backends import serving
from backstash.planning.measure import link
from backstash.planning.measure.survey import KeepForSurvey
from backstash.planning.model.budget import check_device, families, limit_of_errors, parse_budget
from backstash.planning.model.explain import size
from backstash.planning.model.plan import Plan
from backstash.planning.model.problem import StepProfile
from backstash.planning.run.agreement import Agreement
from backstash.planning.run.buckets import MET, MOST_COURSES, Alike, Bucket, Buckets, size_ratio
from backstash.planning.run.course import PATIENCE, Aside, Course
from backstash.planning.run.cycles import MOST_CYCLES, MOST_VALUES, Order
from backstash.planning.run.following import Following, Witness
from backstash.planning.run.guard import Guard, in_front_of
from backstash.planning.run.retry import Before, advise, is_of_collective, is_out_of_memory
from backstash.planning.run.trainings import Trainings
from backstash.planning.run.unhooked import Unhooked
from backstash.planning.run.within import Within
from backstash.planning.search.planner import Planner
from backstash.policies import Policy, get
from backstash.session import Session, made_again
from backstash.stash.buffers import release_buffers
from backstash.stash.ledger import Report
from backstash.stores import DeviceStore, Store, Ticket, TierStore
from backstash.torch_internals import (
    current_function_mode,
    hide_from_dynamo,
    hooks_are_enabled,
    in_backward,
    inputs_of_call,
    is_inside_compiled,
    is_traced,
    may_compile,
)

T = TypeVar("T")

ROOMY = 0.9
"""Up to which share of the budget a peak that follows from steps in which all was kept is taken for a plain one's."""

MORE = 64
"""How many solutions are tried before it is seen again whether the first step of one of those that are known fits."""

MOST_SURVEYS = 8
"""How often steps of one shape are surveyed where their kinds come in any order: one of each kind has to be met."""

MIXED = (
    f"the backward passes of this loop are of several kinds, in no order that repeats itself within {MOST_CYCLES} "
    f"passes and {MOST_VALUES} values. So each of them is kept within the budget by itself, and what one leaves to the "
    f"next is not counted. Run the kinds in a fixed order, or ask for less."
)
"""What there is to say of passes that come in any order."""


class Budgeted(Following):
    """Inside the ``with``, forward passes run under the plan that keeps their step within a budget.

    It is entered around each training forward pass, or once around a whole loop; backward may run inside or outside.
    Nine steps take the memory of plain PyTorch, in which the loop is timed and profiled; from the tenth backward pass
    on the budget holds, or from some passes later where steps are small (Note: [bounded shares] in course.py). Inputs
    of other shapes get plans of their own (Note: [new shapes] in buckets.py).

    Args:
        budget: bytes that a step may take above what is held before it, or a text such as ``"2GiB"``, ``"512 MiB"`` or
            ``"60%"``, which is of the plain step's peak.
        allow, error_limit: as for :func:`backstash.plan`; what a loop's plan rounds rests on predicted errors alone.
        plan: a plan for the first steps, which are not profiled then.
        min_nbytes: smaller tensors are kept; 16 KiB by default.
        device: type of the device whose memory counts; by default the accelerator where there is one.
        folder: a folder in which plans are kept, so that a later run of the same training need not profile.
        offload_to: a folder on a local disk, to which values may be moved on CPU (see link.folder).
        agree: whether all ranks of the process group keep the budget together: they take one plan where their steps are
            alike, and where no plan fits one of them, all raise its error (Note: [ranks that agree] in agreement.py).
            Each rank makes it in the same order, after the process group.
        of: which bytes the budget is of: ``"allocated"``, those of tensors, or ``"reserved"``, those that CUDA's
            allocator takes of the device for them (model/allocator.py), its fragmentation included. A plan whose
            counted step would reserve more than the budget is replaced by a leaner one. On CPU that tells what a GPU
            would take.
        strict: whether steps of any shape are refused that no plan keeps within the budget, not only those of the first
            one. Programs that look for the largest batch need that (see errors.BatchTooLargeError). Otherwise such
            steps run under the leanest plan, and a warning says so.
        options: further arguments of :class:`backstash.Session`. A store of the name ``"spill"`` among its ``stores``
            takes what is above the plan; on a GPU the host does, where there is none.

    Attributes:
        found: what became of the budget so far.
        is_hurried: whether steps may take as long as they want, because as few of them as possible are to be measured.
        spared: returns bytes that a plain step takes beside what was counted of it, because something else spares them,
            as treated graphs do.
        aside: knows how long the program has waited for this.
        overflowed: why nothing is moved any more; empty as long as stores have room (Note: [full stores]).
        unused_nbytes: bytes that the allocator reserves for a plain step beside what is allocated of it; 0 where the
            budget is one of what is allocated.
        agreement: what ranks tell each other; None if each keeps the budget for itself.

    Raises:
        PlanError: the budget or another argument means nothing.
        BatchTooLargeError: later, from a backward pass, if no plan fits the first steps; if ranks agree, from an
            optimizer's step; if it is ``strict``, from any forward or backward pass.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        >>> session = Budgeted("90%", min_nbytes=0)
        >>> for _ in range(60):
        ...     with session:
        ...         loss = model(torch.ones(256, 64)).square().mean()
        ...     loss.backward()
        >>> session.found.plans > 0
        True
    """

    agreement: Agreement | None = None

    def __init__(
        self,
        budget: int | str,
        allow: str | Sequence[str] = ("lossless", "recompute"),
        *,
        error_limit: float | None = None,
        plan: Plan | None = None,
        min_nbytes: int | None = None,
        device: str | None = None,
        folder: str | Path | None = None,
        offload_to: str | os.PathLike[str] | None = None,
        agree: bool = False,
        of: Literal["allocated", "reserved"] = "allocated",
        strict: bool = False,
        **options: Any,
    ) -> None:
        if of not in ("allocated", "reserved"):
            raise PlanError(
                f"training within a budget was asked for with of={of!r:.80}, but a budget is one of 'allocated' or of "
                f"'reserved' memory. Pass one of these words."
            )
        check_switch(agree, "agree", "training within a budget")
        check_switch(strict, "strict", "training within a budget")
        self.of, self.strict = of, strict
        parse_budget(budget, 1 << 30)  # what means nothing is an error now, and not in the middle of the training
        self.tries = families(allow)
        check_device(device, "training within a budget was asked for on")
        self.budget = budget
        self.allow = (allow,) if isinstance(allow, str) else tuple(allow)
        self.error_limit = error_limit
        self.device = device or accelerator.kind() or "cpu"
        self.link = link.allowed(self.tries, self.device, offload_to)
        self._plans = folder, (budget, limit_of_errors(error_limit, allow), self.link and self.link.directory, of)
        self._options = options | ({} if min_nbytes is None else {"min_nbytes": min_nbytes})
        self.buckets = self._new_buckets()
        self._arguments = {**options, "error_limit": error_limit, "plan": plan, "min_nbytes": min_nbytes}
        self._arguments |= {
            "allow": self.allow,
            "device": device,
            "folder": folder,
            "offload_to": offload_to,
            "agree": agree,
            "of": of,
            "strict": strict,
        }
        self.given = plan
        self.overflowed = ""
        self.aside = Aside()
        self._steps = 0  # of Sessions that are not used any more
        self._keeping: dict[int, KeepForSurvey] = {}
        self._entries = Entries()
        super().__init__(self.session_with(self.keeping(1) if plan is None else self._guarded(plan)))
        self._spare: Session | None = self._session  # for the first kind of steps
        self._open: list[Session] = []  # the Session that is open now, if any
        self._calls_modules: bool | None = None  # outside of what is compiled; None where that is not known yet
        self._entry: leaving.Entrance | None = None
        self._chain: list[nn.Module] = []
        self._thread = self._retried = self._nbytes = 0
        self._modes: tuple[Any, Any] = (None, None)
        self._guards: list[Guard] = []
        self._before: weakref.WeakKeyDictionary[nn.Module, Before] = weakref.WeakKeyDictionary()
        self.spared: Callable[[], int] = lambda: 0
        self.unused_nbytes = 0
        self._trainings = Trainings()
        self.agreement = Agreement(self._planned, self._take, self.aside) if agree else None
        self.hears_all = agree
        self.has_planned = False
        self.is_hurried = False
        _prepare(self.device)

    def _new_buckets(self) -> Buckets:
        """No kind of steps yet, whose plans depend on what is allowed."""
        folder, limits = self._plans
        return Buckets(folder, (*limits, self.allow, self._options.get("min_nbytes"), self.device))

    # -- entering and leaving ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with self.aside:
            self._enter_entry()
        return self

    __exit__ = leaving.Exit()

    def _enter_entry(self) -> None:
        leaving.leave_abandoned()
        if self._entry is not None and self._entry.is_abandoned:
            self._leave(None, None, None)
        if self._entry is not None:
            raise SessionError(
                "a Budgeted was entered inside itself, or while another thread uses it. Enter it once around the whole "
                "forward pass, and make one for each thread."
            )
        self._entry = entry = leaving.Entrance(self)
        try:
            modules.hear_calls(self._before_module)
            self._thread = threading.get_ident()
            self._note_forward()
            self._is_new = self._is_inside = True
            self._listen()
            if self._calls_modules is False:
                self._begin(None, ())
            self._enter(self._session)
        except BaseException as error:
            entry.leave(error)
            raise

    @property
    def _is_elsewhere(self) -> bool:
        """Whether another thread than the one that is inside asks, and trains by itself for all that is known."""
        return self._is_inside and not self._calls_modules and self._thread != threading.get_ident()

    def begin_backward(self, tensors: Any) -> None:
        """A backward pass begins."""
        if not self._is_elsewhere:
            with self.aside:
                super().begin_backward(tensors)

    def end_backward(self) -> None:
        """A backward pass has ended."""
        if self._is_elsewhere:
            return
        with self.aside:
            super().end_backward()
            if self._is_own and self._is_new and self._calls_modules is None:
                self._calls_modules = False
            self._hear_again()

    def _hear_again(self) -> None:
        """A forward pass begins with the next module, or now where none is heard of."""
        if not self._is_new or not self._is_inside:
            return
        if self._calls_modules is False:
            self._chain.clear()
            self._begin(None, ())
            exchange = partial(self._exchange, [])
            if not leaving.at_end_of_torch(exchange):  # the function of torch that runs would put the open one back
                exchange()
        else:
            modules.hear_calls(self._before_module)

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves it; does nothing if that was done already (Note: [interrupted leaving] in leaving.py)."""
        if self._entry is None or not self._entry.may_end_here():
            return
        self._entry.is_over = True
        with self.aside:
            leaving.to_the_end(partial(self._leave_entry, error))

    def _leave_entry(self, error: BaseException | None) -> None:
        """Takes everything away. It may be called again if it was interrupted."""
        entry = self._entry
        if entry is None:
            return
        modules.ignore_calls(self._before_module)
        self._chain.clear()
        self._is_inside = False
        if error is not None or self._calls_modules is not None:  # else the next backward pass tells
            self._unlisten()
        if error is not None and is_out_of_memory(error):
            advise(error, str(self.budget), "")
        self._leave_session(error)
        entry.end()  # not before: where nothing can be called, all of this is done when something is entered next
        self._entry = None

    def window(self, model: nn.Module, *inputs: Any) -> Window:
        """A forward pass whose inputs are known: inside the ``with``, its Session is open.

        Args:
            inputs: what it is called with, nested as it may be.
        """
        return Window(self, model, signature_of(inputs))

    def call(self, model: nn.Module, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs a forward pass, and once more under a leaner plan if an allocation has failed in it.

        It runs once more where what it has changed can be restored: the global generators and the buffers of the model.
        With several processes it does not, because the others would not repeat their part.

        Args:
            function: what runs the forward pass, with ``args`` and ``kwargs``.
        """
        before = self._before.get(model)
        if before is None:
            before = self._before[model] = Before(model)
        with before:
            try:
                with self.window(model, args, kwargs):
                    return function(*args, **kwargs)
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                if not is_out_of_memory(error):
                    self._tell_ranks(error)
                    raise
                alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
                if not alone or not before.restore() or not self._escalate():
                    advise(error, str(self.budget), " and the step cannot be repeated in less memory")
                    self._tell_ranks(error)
                    raise
                error.__traceback__ = None  # which holds what the forward pass has made
            self._retried += 1
            release_buffers()
            gc.collect()
            if accelerator.kind_in_use():
                torch.accelerator.empty_cache()
            try:
                with self.window(model, args, kwargs):
                    return function(*args, **kwargs)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    advise(error, str(self.budget), ", and again under the leanest plan")
                raise

    def step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Calls a model for training: as :meth:`call`, with the model itself as the function."""
        return self.call(model, model, *args, **kwargs)

    def close(self) -> None:
        """Stops what is being measured, and meets no other rank; training goes on under the plans that there are."""
        super().close()
        if self.agreement is not None:
            self.agreement.close()

    def fail_backward(self) -> None:
        """A backward pass has raised."""
        if self._is_elsewhere:
            return
        super().fail_backward()
        self._hear_again()
        error = sys.exception()
        if error is not None:
            self._tell_ranks(error)

    def _tell_ranks(self, error: BaseException) -> None:
        """Tells other ranks of an allocation that failed, or raises what has failed in another one."""
        if self.agreement is None:
            return
        if is_out_of_memory(error):
            self.agreement.fail(error)
        elif is_of_collective(error):
            reason = self.agreement.reason()
            if reason is not None:
                raise reason from error

    def _planned(self) -> tuple[bool, Plan | None]:
        """Returns whether steps like the last one are done with, and their plan."""
        bucket = self.last
        is_done = bucket is not None and bucket.is_done and self._course is None and not self._is_ordering
        return is_done, None if bucket is None else bucket.plan

    def _take(self, plan: Plan | None) -> None:
        """Takes the plan of all ranks."""
        bucket = self.last
        if plan is None or bucket is None or bucket.plan is None or bucket.plan.fingerprint == plan.fingerprint:
            return
        if self.overflowed and plan.fetches is not None:
            return
        budget = bucket.found.budget_nbytes or plan.budget
        policy = self.guarded(bucket, plan, max(budget, plan.peak_nbytes))
        bucket.plan = plan
        bucket.found = replace(bucket.found, plan=plan, planned_nbytes=plan.peak_nbytes)
        self.use(bucket, policy)

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_before") and not is_ending():  # else its modules may be empty already
            self.close()

    def __deepcopy__(self, memo: Any) -> Budgeted:
        return Budgeted(self.budget, **self._arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return made_again(partial(Budgeted, self.budget), self._arguments)

    # -- what there is to tell -----------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The policy of the step in progress, or of the last one."""
        return self._session.policy

    @property
    def found(self) -> Within:
        """What became of the budget, for the last kind of steps."""
        planned = [bucket for bucket in self.buckets if bucket.plan is not None]
        bucket = self.last if self.last is not None else Bucket()
        found = bucket.found
        if found.plan is None and planned and not found.trouble:
            found = planned[-1].found
        escalated = sum(guard.escalated for guard in self._guards)
        course = self._course
        told = "" if course is None else course.trouble
        trouble = found.trouble or told or (MIXED if self.order.is_mixed else "")
        trouble = "; ".join(each for each in (trouble, self.overflowed) if each)
        predicted = sum(each.is_predicted for each in planned)
        progress = "" if course is None else f"no plan yet after {self.begun} forward passes: {course.stage}"
        if self.raised:
            raised = f"{self.raised} of its steps have raised" if self.cycles else "each of its steps has raised"
            ended = progress or "training ended before a step could be planned"
            progress = f"{ended}; {raised}, while a plan takes some in a row that do not"
        if not self.begun:
            progress = "no training step was seen, so none was planned: no forward pass has begun within the budget"
        found = replace(found, predicted=predicted, progress=progress)
        return replace(found, shapes=len(planned), escalated=escalated, retried=self._retried, trouble=trouble)

    def report(self) -> Report:
        """The report of the last step, and what became of the budget."""
        report = self._session.report()
        return replace(report, steps=self.begun, notes=(*report.notes, str(self.found)))

    @property
    def begun(self) -> int:
        """How many forward passes have begun, also of Sessions that are not used any more."""
        used: list[Session] = [each.session for each in self.buckets if each.session is not None]
        return self._steps + sum(session._steps for session in used)

    # -- a forward pass begins -----------------------------------------------------------------------------------

    def _before_module(self, module: nn.Module, args: Any) -> None:
        """Note: [between steps]."""
        is_asked = (self._is_new or self._calls_modules is False) and self._thread == threading.get_ident()
        if not is_asked or not torch.is_grad_enabled() or in_backward() or not hooks_are_enabled():
            return  # what runs while hooks are switched off is in no Session (Note: [transforms] in transforms.py)
        if may_compile() and is_inside_compiled():
            return
        signature = signature_of(args) or signature_of(inputs_of_call(module)[1])
        if not signature and len(self._chain) < 8:
            self._chain.append(module)
            return
        self._calls_modules = True
        with self.aside:
            chain, self._chain = self._chain, []
            self._begin(chain[0] if chain else module, signature)
            self._exchange(chain)
        if not may_compile() or (self._open and isinstance(self._open[0], Unhooked)):
            modules.ignore_calls(self._before_module)  # until the next pass, because to hear of each takes time

    def _exchange(self, chain: list[nn.Module]) -> None:
        """Opens the Session that was chosen, in the place of the open one if that can be taken away."""
        if not self._open or self._session is self._open[0]:
            return
        if not self._may_replace():
            self._attach(self._open[0])
        else:
            self._leave_session(None)
            self._enter(self._session)
            if not is_traced():  # Note: [transforms] in transforms.py
                for each in chain:
                    self._session.enter_module(each)

    def _may_replace(self) -> bool:
        """Whether the open Session's hooks are the innermost ones, so that they can be taken away."""
        return self._open[0].is_innermost and current_function_mode() in self._modes

    def _begin(self, model: nn.Module | None, signature: Signature) -> None:
        """Chooses the Session for a forward pass with these inputs, of a model if it calls one."""
        self._is_new = False
        if self.agreement is not None:
            self.agreement.tidy()
        if not self.recording.is_inside:
            self._advance()
        self._witness = (None if model is None else Witness.of(model)) or self._witness
        if self.phase and self.last is not None:
            self._session = self.last.session or self._session
            self._attach()
            return  # a step has one plan, whatever its second model is given
        if model is not None and self._trainings.has_ended_with(model):
            self._begin_anew()
        if self.overflowed and "offload" in self.tries:
            self._move_no_more()
        if self.period > 1:
            self._listen()
        self.last = bucket = self.buckets.of(signature)
        for forgotten in self.buckets.take_forgotten():
            if forgotten.session is not None:
                self.retire(forgotten.session)
        self._look_at(bucket)
        bucket.met += 1
        if bucket.session is None:
            spare, self._spare = self._spare, None
            bucket.session = spare if spare is not None else self.session_with(self._derived(bucket))
        elif self._may_derive(bucket):
            self.use(bucket, self._derived(bucket))
        if self._course is not None and self._course.is_over(bucket):
            self.abandon()
        may_start = self._course is None and not self.phase and not bucket.is_done
        if may_start and self.helps(bucket) and bucket.offers < MOST_COURSES:
            bucket.offers += 1
            self._start(Course(self, bucket, is_for_others=True))
        elif may_start and (bucket.waits or not self.has_planned) and self._may_measure(bucket):
            bucket.courses += 1
            self._start(Course(self, bucket))
        self._is_other = not (self.takes_any or self._course is None or self._course.measures(bucket))
        self._is_apart = self._is_other and self.period == 1 and bucket.is_predicted and bucket.is_done
        borrowed = None if self._course is None else self._course.session_for(bucket)
        self._session = bucket.session if borrowed is None else borrowed
        if isinstance(self._session, Unhooked):
            self._session.begin_step()
        self._attach()

    def _may_derive(self, bucket: Bucket) -> bool:
        """Whether more is known of a bucket without a plan than when it was met, or measured in vain."""
        if bucket.plan is not None or bucket.is_done or not self.has_planned or bucket.session is None:
            return False
        if self._course is not None and self._course.directs(bucket):
            return False
        keeps = isinstance(bucket.session.policy, KeepForSurvey)
        return keeps or len(self.buckets.planners) > bucket.derived_from

    def _look_at(self, bucket: Bucket) -> None:
        """Has a bucket profiled again whose last step did not match its plan, or counted if all but shapes did."""
        plan = bucket.plan
        most = MOST_SURVEYS if self.order.is_mixed else 2
        if plan is not None and bucket.is_done and plan.unknown:
            if bucket.is_strange and bucket.surveys < most:
                bucket.is_done = False
                self.note_order(2 * MOST_CYCLES)
            elif not bucket.is_strange and bucket.met >= bucket.recounts_from:
                bucket.is_done, bucket.recounts_from = False, 2 * bucket.met
        for guard in self._guards:
            over = guard.most_excess - guard.room
            may_plan = bucket.planner is not None and bucket.is_done and not bucket.is_over
            if bucket.plan is guard.plan and over > 0 and may_plan:
                bucket.margin += over
                bucket.is_done = False
                guard.most_excess = 0

    @property
    def _may_predict(self) -> bool:
        """Whether steps of other shapes are alike but for their sizes: single passes, whose values are not rounded."""
        return self.period <= 1 and not self.order.is_mixed and "bounded" not in self.tries

    @property
    def takes_any(self) -> bool:
        """Whether a step of any shape is measured, as there is no plan of any."""
        return self.buckets.largest() is None or not self.has_planned

    def helps(self, bucket: Bucket) -> bool:
        """Returns whether the profiles of other shapes may follow once one step of this one was recorded, as it may be.

        Everything is kept in that step, and tried. So one that would take more than the budget is recorded only if it
        comes again and again, or others have not come for as long as the first plan took, and nothing follows yet; and
        none that is smaller comes again and again.
        """
        largest = self.buckets.largest()
        if largest is None or not self._may_predict or not self.buckets.helps(bucket):
            return False
        if self.surveyed_above(bucket) is None:
            return True
        has_waited = bucket.met > MET or self.begun > 2 * largest.found.measured_passes
        return has_waited and not self.buckets.may_follow and not self._awaits_smaller(bucket)

    def _awaits_smaller(self, bucket: Bucket) -> bool:
        """Whether a shape whose profile helps others as well, and takes more than the budget, is yet to be profiled.

        As long as others that are smaller come again and again, their steps are recorded first.
        """
        is_one_of_many = self.has_planned and self._may_predict and not self.buckets.may_follow
        nbytes = self.surveyed_above(bucket) if is_one_of_many and self.buckets.helps(bucket) else None
        if nbytes is None:
            return False
        come = [each for each in self.buckets if each.met > MET and not each.is_done and each.offers < MOST_COURSES]
        return any(self._surveyed_nbytes(each) < nbytes and self.buckets.helps(each) for each in come)

    def surveyed_above(self, bucket: Bucket) -> float | None:
        """What a step of a shape takes in which everything is kept and tried, if above the budget; None if not."""
        largest = self.buckets.largest()
        if largest is None:
            return None
        nbytes = self._surveyed_nbytes(bucket)
        return None if nbytes <= self.nbytes_of(largest.plain_nbytes) else nbytes

    def _surveyed_nbytes(self, bucket: Bucket) -> float:
        """The same wherever it lies, in proportion to the largest shape that was profiled."""
        largest = self.buckets.largest()
        assert largest is not None and largest.planner is not None
        nbytes = largest.plain_nbytes + largest.planner.profile.trial_nbytes
        return nbytes * size_ratio(largest.signature, bucket.signature, is_linear=True)

    def _may_measure(self, bucket: Bucket) -> bool:
        """Whether steps of a shape come often enough to be measured: one has to come again before others end that."""
        if self.buckets.largest() is None:
            return True
        if self._awaits_smaller(bucket):
            return False
        is_one_of_few = len(self.buckets) <= PATIENCE
        return bucket.met > 1 and (is_one_of_few or bucket.met * PATIENCE >= sum(each.met for each in self.buckets))

    def _predicted(self, bucket: Bucket) -> Policy | None:
        """The plan of a shape whose profile follows from those of others; None where it does not."""
        largest = self.buckets.largest()
        if largest is None or not self._may_predict or self.given is not None or not self.has_planned:
            return None
        smallest = self._options.get("min_nbytes", 0)
        planner, is_predicted = bucket.planner, not bucket.is_measured
        if is_predicted:
            planner = self.buckets.predicted(bucket.signature, smallest, self.error_limit)
        if planner is None:
            return None
        budget = self.nbytes_of(largest.plain_nbytes)
        nbytes = max(1, budget - largest.margin)
        kept_nbytes = planner.profile.plain_peak_nbytes
        is_roomy = kept_nbytes <= ROOMY * budget
        below_nbytes = nbytes if is_roomy else min(nbytes, kept_nbytes - 1)
        while not planner.has_found(below_nbytes) and next(planner.search(), self) is not self:
            pass  # a step that is larger than those before may need what none of these did
        while True:
            plan, first_nbytes = planner.first_plan(nbytes, is_roomy)
            if first_nbytes <= nbytes or planner.is_searched:
                break
            for _ in islice(planner.search(), MORE):  # what is known fits from the second step on
                pass
        is_other = not is_predicted or plan.peak_nbytes > budget  # a prediction of steps that cannot take so much
        if first_nbytes > budget and is_other and self._alike(bucket)[1] <= budget:
            return None
        if first_nbytes > budget:
            said = (
                f"a step of {bucket.inputs} was asked for within {size(budget)} ({budget} bytes), but under the "
                f"leanest plan the first one takes {first_nbytes} bytes ({size(first_nbytes)}). Pass that budget, "
                f"allow more, or make the batch smaller."
            )
            if self.strict:
                raise BatchTooLargeError(BudgetError(said, first_nbytes, plan.seconds, plan))
            warnings.warn(said, stacklevel=2)
        bucket.planner, bucket.is_predicted, bucket.margin = planner, is_predicted, largest.margin
        bucket.found = Within(
            budget_nbytes=budget,
            plain_nbytes=planner.profile.plain_peak_nbytes,
            planned_nbytes=first_nbytes,
            plans=1,
            plan=plan,
            trouble="" if first_nbytes <= budget else f"no plan fits {bucket.inputs}: the leanest one is used",
        )
        policy = self.guarded(bucket, plan, max(budget, plan.budget))
        bucket.plan = plan
        bucket.is_done = first_nbytes <= budget  # else it is counted what a step takes
        return policy

    def _derived(self, bucket: Bucket) -> Policy:
        """The policy for the first steps of a bucket (Note: [new shapes])."""
        bucket.derived_from = len(self.buckets.planners)
        predicted = self._predicted(bucket)
        if predicted is not None:
            return predicted
        known = self.buckets.largest()
        if known is None or known.planner is None:
            if self.given is None:
                return self.keeping(1)
            return self._guarded(self.given) if len(self.buckets) == 1 else Alike(self.given)
        return Alike(self._alike(bucket)[0])

    def _alike(self, bucket: Bucket) -> tuple[Plan, float]:
        """The plan of the largest shape that a step follows within the budget, and what it takes then at most."""
        known = self.buckets.largest()
        assert known is not None and known.planner is not None
        times = size_ratio(known.signature, bucket.signature)
        if times <= 1 and known.plan is not None:
            return known.plan, known.plan.peak_nbytes
        plan = known.planner.at_most(int(self.nbytes_of(known.plain_nbytes) / times))
        return plan, plan.peak_nbytes * times

    # -- Sessions ------------------------------------------------------------------------------------------------

    def session_with(self, policy: Policy, is_unhooked: bool = False, **options: Any) -> Session:
        """A new Session with that policy; with ``is_unhooked``, one that installs nothing."""
        if is_unhooked:
            return Unhooked(policy)
        stores = self._stores_for(policy)
        session = Session(policy, **({"stop_if_useless": False} | self._options | {"stores": stores} | options))
        session._entries = self._entries
        return session

    def _stores_for(self, policy: Policy) -> dict[str, Store]:
        """The user's stores and those of a policy (Note: [full stores])."""
        stores: dict[str, Store] = dict(self._options.get("stores") or {})
        for name, opens in (policy.stores or {}).items():
            if name not in stores:
                try:
                    stores[name] = opens()
                except StoreError as error:
                    stores[name] = DeviceStore()
                    self._overflow(str(error))
        return {name: store if name == "host" else Overflowing(store, self._overflow) for name, store in stores.items()}

    def _overflow(self, why: str) -> None:
        """A store has no room, for the reason that is given."""
        self.overflowed = self.overflowed or f"nothing is moved any more, because {why}"

    def _move_no_more(self) -> None:
        """All is planned anew from what was measured, and nothing is moved (Note: [full stores])."""
        warnings.warn(
            f"a plan within {self.budget} was asked for, and values were moved, but now {self.overflowed}. Steps are "
            f"planned anew without that. Make room there, or name another folder, and begin again.",
            stacklevel=2,
        )
        self.abandon()
        before, self._steps = self.buckets, self.begun
        self.allow = tuple(word for word in self.allow if word != "offload")
        self.tries, self.link = families(self.allow), None
        self.given = self.last = None
        self._guards.clear()
        self.buckets = self._new_buckets()
        self.buckets.recorded_share = before.recorded_share
        self.has_planned = any(each.is_measured and each.found.reached_nbytes for each in before)
        for each in before:
            bucket = self.buckets.of(each.signature)
            bucket.met, bucket.margin = each.met, each.margin
            if each.is_measured:
                bucket.planner = Planner(each.planner.profile, self.allow, self.error_limit)
                bucket.surveys = each.surveys
                facts = each.found.plain_nbytes, each.found.plain_seconds
                bucket.found = Within(plain_nbytes=facts[0], plain_seconds=facts[1])

    def keeping(self, cycles: int) -> KeepForSurvey:
        """The policy for steps in which everything is kept, so that what a model has taught under it is found again."""
        return self._keeping.setdefault(cycles, KeepForSurvey(cycles))

    def use(self, bucket: Bucket, policy: Policy, is_unhooked: bool = False, **options: Any) -> None:
        """From the next forward pass on, steps of that bucket run under that policy, in a new Session."""
        if bucket.session is not None:
            self._steps += bucket.session._steps
        bucket.session = self.session_with(policy, is_unhooked, **options)

    def go_back(self, bucket: Bucket, session: Session) -> None:
        """The same, under a Session that was in use before."""
        assert bucket.session is not None
        self._steps += bucket.session._steps - session._steps
        bucket.session = session

    def retire(self, session: Session) -> None:
        """Counts the steps of a Session that is not used any more."""
        self._steps += session._steps

    def use_alike(self, bucket: Bucket, plan: Plan) -> None:
        """The same, under the plan of another shape."""
        self.use(bucket, Alike(plan))

    def nbytes_of(self, plain_nbytes: int) -> int:
        """The budget in bytes.

        A share is one of the first plain step's peak, whatever shapes come later; of the largest one's, where passes
        of several kinds come in any order.
        """
        if not self._nbytes or self.order.is_mixed:
            self._nbytes = max(
                self._nbytes, parse_budget(self.budget, plain_nbytes + self.spared() + self.unused_nbytes)
            )
        return self._nbytes

    def forget_nbytes(self) -> None:
        """The step of which the budget was a share was not like others."""
        self._nbytes = self.unused_nbytes = 0

    def begin_cycles(self) -> None:
        """The next forward pass is the first one of a step."""
        for bucket in self.buckets:
            if bucket.session is not None:
                bucket.session.begin_cycles()

    def restart(self, period: int, forwards: int) -> None:
        """A step has so many backward and forward passes, and all that was measured is of other steps."""
        self.abandon()
        self._steps = self.begun
        self.buckets.clear()
        self._guards.clear()
        self.period, self.forwards, self.given = period, forwards, None
        self._nbytes, self.unused_nbytes, self.last = 0, 0, None

    def _begin_anew(self) -> None:
        """Another training has begun (Note: [another training] in trainings.py)."""
        self.order = Order()
        self.restart(0, 1)
        self.cycles = self.raised = 0
        self.has_planned = False

    def mix(self) -> None:
        """Passes of several kinds come in no order that repeats itself: each kind is planned for by itself."""
        super().mix()
        warnings.warn(f"a plan within {self.budget} was asked for, but {MIXED}", stacklevel=2)

    def profiled(self, profile: StepProfile) -> None:
        """Is called with each profile, at the end of a backward pass."""

    def settled(self) -> None:
        """Is called when steps of a kind have been profiled and counted: from now on they run under their plan."""

    def guarded(self, bucket: Bucket, plan: Plan, budget: int) -> Policy:
        """The policy for a plan of that bucket: the plan itself where nothing is left to be held in less."""
        others = {id(each.plan) for each in self.buckets if each is not bucket}
        self._guards = [guard for guard in self._guards if id(guard.plan) in others]
        policy = in_front_of(plan, budget, "spill" if "spill" in (self._options.get("stores") or {}) else None)
        if isinstance(policy, Guard):
            self._guards.append(policy)
        return policy

    def _guarded(self, plan: Plan) -> Policy:
        if not isinstance(plan, Plan):
            raise PlanError(
                f"training within a budget was asked for with the plan {plan!r:.80}, but that is no Plan. Pass what "
                f"backstash.plan() has returned, or leave plan= out."
            )
        return plan

    def _enter(self, session: Session) -> None:
        self._meet()
        below = current_function_mode()
        self._open.append(session)  # first: what is not noted cannot be left
        session.__enter__()
        self._spans.begin()
        self._modes = below, current_function_mode()

    def _leave_session(self, error: BaseException | None) -> None:
        """Leaves the open Session first: what is measured may be forgotten later, but no hook may stay."""
        if self._open:
            self._spans.end()
            self._open[-1].__exit__(None if error is None else type(error), error, None)
            self._open.clear()
        if error is not None:
            self._leave_out()

    def _escalate(self) -> bool:
        """Has the next forward pass hold less. Returns False where nothing less is known."""
        bucket = self.last
        if bucket is None:
            return False
        bucket.is_done = True
        self.abandon()
        known = bucket if bucket.planner is not None else self.buckets.largest()
        if known is None or known.planner is None:
            self.use(bucket, get("lossless"))
            bucket.found = replace(bucket.found, trouble="an allocation failed in plain steps: the policy is lossless")
            return True
        current = bucket.plan
        leaner = known.planner.at_most(0 if current is None else int(0.8 * current.peak_nbytes))
        if current is not None and leaner.peak_nbytes >= current.peak_nbytes:
            return False
        bucket.plan = leaner
        bucket.found = replace(bucket.found, plan=leaner, planned_nbytes=leaner.peak_nbytes, reached_nbytes=0)
        self.use(bucket, leaner if known is bucket else Alike(leaner))
        return True


class Window:
    """A forward pass of a budget whose inputs are known."""

    def __init__(self, budgeted: Budgeted, model: nn.Module, signature: Signature) -> None:
        self._budgeted, self._model, self._signature = budgeted, model, signature
        self._entry: leaving.Entrance | None = None

    def __enter__(self) -> None:
        leaving.leave_abandoned()
        self._entry = entry = leaving.Entrance(self)
        try:
            with self._budgeted.aside:
                self._budgeted._note_forward()
                self._budgeted._begin(self._model, self._signature)
                self._budgeted._enter(self._budgeted._session)
        except BaseException as error:
            entry.leave(error)
            raise

    __exit__ = leaving.Exit()

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entry is None or not self._entry.may_end_here():
            return
        self._entry.is_over = True
        leaving.to_the_end(partial(self._leave_entry, error))

    def _leave_entry(self, error: BaseException | None) -> None:
        entry = self._entry
        if entry is None:
            return
        self._budgeted._leave_session(error)
        entry.end()  # not before, as in a Budgeted
        self._entry = None


def _prepare(device_type: str) -> None:
    """Does now what the first steps would do once for the process, since small steps take less time than that."""
    serving(device_type)
    repeatable.list_functions()
    if gc.isenabled() and gc.get_count()[2] > gc.get_threshold()[2] // 2:
        gc.collect()


for _function in (Budgeted.__enter__, Window.__enter__):
    hide_from_dynamo(_function, and_all_below=True)


class Overflowing(TierStore):
    """Puts values into a store, and leaves on their device those for which there is no room.

    Args:
        tell: is called with the reason for each value that stays.
    """

    def __init__(self, store: Store, tell: Callable[[str], None]) -> None:
        super().__init__([store, DeviceStore()])
        self._tell = tell

    def _put(self, encoded: Encoded) -> tuple[Store, Ticket]:
        store, ticket = super()._put(encoded)
        if store is self.stores[-1]:
            held = self.stores[0].usage().nbytes
            self._tell(f"{self.stores[0]!r} has no room for {ticket.nbytes} bytes beside the {held} that it holds")
        return store, ticket

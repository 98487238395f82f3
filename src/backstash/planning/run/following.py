"""Follows a training loop from backward pass to backward pass, and has a course measure what it asks for.

Note: [steps in closures]
    Lightning hands forward and backward passes to its optimizer as a closure, so no pass ends where a profiler can be
    started (Note: [safe places] in recording.py). Its callback knows where one can, but an unchanged script has no
    callback. So if a measurement has waited in vain, and the loop of a framework is imported, that loop tells before
    each batch that it is between two steps. It does so until whoever wanted to be told is closed, or gone.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from backstash.capture import passes
from backstash.planning.measure.events import Thread
from backstash.planning.measure.recording import Recording
from backstash.planning.measure.survey import Births, Silent
from backstash.planning.run.buckets import Bucket
from backstash.planning.run.course import Awaited, Course, Waiting
from backstash.planning.run.cycles import MOST_CYCLES, MOST_VALUES, Order
from backstash.planning.run.unhooked import Unhooked
from backstash.session import Session
from backstash.stash.parameters import is_leaf_of_graph
from backstash.torch_internals import gradient_of, next_sequence_number, nodes_behind

PATIENCE, IMPATIENT = 64, 2
"""For how many backward passes the profiler may wait for a place where it can be started, and after how many the loops
of frameworks are asked to tell of one."""

STEADY = 2
"""How many backward passes in a row run on one thread before a profiler is started there, if any ran on another."""


class Witness:
    """A weight that tells whether gradients are there.

    It is known by its module and its name, since torch swaps no parameter to which there is a weak reference.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = weakref.ref(module)
        self._name = name

    @classmethod
    def of(cls, model: nn.Module) -> Witness | None:
        """The first weight of a model that is trained; None if there is none."""
        each = ((module, pair) for module in model.modules() for pair in module.named_parameters(recurse=False))
        return next((cls(module, name) for module, (name, weight) in each if is_leaf_of_graph(weight)), None)

    @property
    def has_gradient(self) -> bool:
        """Whether its gradient is there."""
        module = self._module()
        weights = {} if module is None else dict(module.named_parameters(recurse=False))
        return self._name in weights and gradient_of(weights[self._name]) is not None


class Following:
    """Tells a course of the backward passes that it waits for.

    Attributes:
        last: the kind of the step which has ended, or is in progress.
        adds_up: whether the last backward pass added to gradients that were there.
        may_add_up: whether any backward pass did.
        period: backward passes in a step; 0 as long as that is not known.
        forwards: forward passes in a step, or several in a row for one backward pass.
        cycles: backward passes of steps so far; a step begins where they are a multiple of the period.
        passed: what was saved before the last backward pass whose kind was noted, by the keys with the specs.
        order: the kinds of passes (Note: [longer periods] in cycles.py).
        raised: steps that have raised.
        hears_all: whether every backward pass is followed, also where nothing is measured any more.
    """

    hears_all = False

    def __init__(self, session: Session) -> None:
        self.recording = Recording()
        self.last: Bucket | None = None
        self.adds_up = self.may_add_up = False
        self._session = session  # that of the step in progress, or of the last one
        self._spans = Spans()
        self._thread_of_pass: weakref.ref[Thread] | None = None
        self._stayed = STEADY  # how many backward passes have ended since passes moved to another thread
        self._is_own = True  # whether the backward pass in progress is that of a step
        self.period = self.cycles = self.raised = 0
        self.forwards = 1
        self.passed: dict[str, str] = {}
        self.order = Order()
        self._is_ordering = False  # whether the kinds of passes are noted
        self._is_other = False  # the pass in progress is of another shape than is measured, and there is a plan
        self._is_apart = False  # the pass in progress is a step like those that are measured, of which all is known
        self._left = 0  # passes whose kinds are noted in any case
        self._begun: list[int] = []  # how many forward passes had begun before each of these passes, and after the last
        self._asked: Births | None = None  # the watcher that is asked for
        self._watcher: Births | None = None  # and the one that watches
        self._watching = ExitStack()
        self._course: Course | None = None
        self._running: Waiting | None = None
        self._awaited: Awaited | None = None
        self._waited = 0
        self._is_new = True  # whether a forward pass begins with the next module
        self._is_inside = False  # the with
        self._witness: Witness | None = None

    def between_steps(self) -> None:
        """The program is between two steps, and no optimizer's step runs. Frameworks that know this call it."""
        self.recording.is_inside = False
        self._advance()

    def close(self) -> None:
        """Stops whatever is being measured. Training goes on under the plans that there are."""
        self.abandon()
        self.recording.close()
        tell_no_more(self)

    @property
    def is_quiet(self) -> bool:
        """Whether there is a plan, and nothing is measured or watched for the time being."""
        is_planned = self.last is not None and self.last.plan is not None
        return is_planned and self._course is None and not self._is_ordering

    @property
    def is_steady(self) -> bool:
        """Whether passes stay on the thread that asks, so that a profiler sees them all (Note: [one thread])."""
        is_here = self._thread_of_pass is None or self._thread_of_pass() is Thread.current()
        return is_here and self._stayed >= STEADY and self.recording.is_here

    def _meet(self) -> None:
        """A forward or a backward pass begins on this thread."""
        here = Thread.current()
        if self._thread_of_pass is not None and self._thread_of_pass() is not here:
            self._stayed = 0
        self._thread_of_pass = weakref.ref(here)
        self.recording.meet()

    def _note_forward(self) -> None:
        """The program enters this for a forward pass, which is a step's first one if none has begun before."""
        if self._is_new and not self.phase:
            self.recording.note_forward()

    def watch(self, watcher: Births | None) -> None:
        """From now on, that watcher is told what the Sessions do; None for nobody."""
        self._asked = watcher
        # A pass that is replayed, or in which a Session has nothing to do, would have no accounts.
        self._watcher = Silent() if watcher is None and self._is_ordering else watcher
        self._attach()

    def _attach(self, session: Session | None = None) -> None:
        """Has the watcher watch a Session, by default that of the step that begins."""
        self._watching.close()
        watcher = self._watcher
        if self._is_other:  # nobody asks about its step, but its kind may be noted
            watcher = Silent() if self._is_ordering and not self._is_apart else None
        if watcher is not None:
            self._watching.enter_context((session or self._session).watched_by(watcher))

    def _start(self, course: Course) -> None:
        self._course = course
        self._running = course.run()
        self._waited = 0
        self.note_order()
        self._listen()
        self.recording.listen()
        self._resume()

    def _listen(self) -> None:
        passes.listen(self, of_grad=True)

    @property
    def phase(self) -> int:
        """How many passes of the step in progress have run."""
        return self.cycles % (self.period or 1)

    def _unlisten(self) -> None:
        is_between = self.period <= 1 or (self._is_new and not self.phase)  # else passes would not be counted
        if self._course is None and not self._is_inside and is_between and not self.hears_all:
            passes.unlisten(self)

    def _resume(self, has_raised: bool | None = None) -> None:
        assert self._running is not None
        running = self._running
        try:
            self._awaited = running.send(has_raised)
        except StopIteration:
            self.abandon()
        except BaseException:
            self.abandon()
            raise

    def _advance(self) -> None:
        """The profiler may be started and stopped here."""
        if self._awaited == "safe":
            self._resume()
        elif self._course is None:
            self.recording.close()

    def abandon(self) -> None:
        """Stops the course in progress, if any."""
        running, self._running, self._course, self._awaited = self._running, None, None, None
        if running is not None and inspect.getgeneratorstate(running) != inspect.GEN_RUNNING:
            running.close()
        self._stop_ordering()
        self.watch(None)
        self._unlisten()
        if not self.recording.is_inside:  # else between_steps() does it, or the next forward pass
            self.recording.close()

    def begin_backward(self, tensors: Any) -> None:
        """A backward pass begins."""
        if self._is_measuring:
            return
        self._is_own = (self._course is None and self.period <= 1) or self._spans.include(tensors)
        if not self._is_own:
            return
        self._meet()
        self.recording.note_pass(is_backward=True)
        self.adds_up = self._witness is not None and self._witness.has_gradient
        self.may_add_up = self.may_add_up or self.adds_up

    def end_backward(self) -> None:
        """A backward pass has ended."""
        if self._is_measuring or not self._is_own:
            return
        self._is_new = True
        self._stayed += 1
        self.cycles += 1
        self.recording.note_pass(is_backward=False)
        if not self.phase and self.period > 1:
            self.begin_cycles()
        if self._is_ordering:
            self._end_pass()
        if self._course is None:
            self._unlisten()
            return
        if self._awaited != "safe":
            self._resume()
        if not self.recording.is_inside:
            self._advance()
            if self._awaited == "safe":  # a record has ended, and the next one begins before the program goes on
                self._advance()
        elif self._awaited == "safe":
            self._waited += 1
            if self._waited == IMPATIENT:
                tell_between_steps(self)
            if self._waited > PATIENCE and self._course is not None:
                self._course.give_up("the loop runs in a closure of its optimizer, where nothing can be profiled")
                self.abandon()

    def fail_backward(self) -> None:
        """A backward pass has raised."""
        if self._is_own and not self._is_measuring:
            self.recording.note_pass(is_backward=False)
            self._leave_out()

    def _leave_out(self) -> None:
        """A step has raised. It is none of those that are measured, and the next pass is the first one of a step."""
        if self._is_new and not self.phase:
            return  # none has begun since that was told
        self.raised += 1
        self.cycles -= self.phase
        self._is_new = True
        if self._is_ordering:
            self._session.accounts.take_saved()
            since = self.begun - self._begun[-1]
            self._begun = [begun + since for begun in self._begun]
        if self.period > 1:
            self.begin_cycles()
            self._forget_order()
        if self._awaited == "outcome":
            self._resume(has_raised=True)
        if self.recording.is_running and not self.recording.is_inside:  # nobody knows whether the program goes on
            self._advance()

    # -- the order of passes ---------------------------------------------------------------------------------------

    @property
    def begun(self) -> int:
        """How many forward passes have begun."""
        raise NotImplementedError

    def begin_cycles(self) -> None:
        """The next forward pass is the first one of a step."""
        raise NotImplementedError

    def restart(self, period: int, forwards: int) -> None:
        """A step has so many backward and forward passes, and all that was measured is of other steps."""
        raise NotImplementedError

    def note_order(self, passes: int = 0) -> None:
        """From now on, until no step is measured and no question is left, the kinds of passes are noted.

        Args:
            passes: of so many in any case.
        """
        self._left = 0 if self.order.is_mixed else max(self._left, passes)
        if not self._is_ordering:
            self._is_ordering = True
            self._forget_order()
            self._session.accounts.take_saved()
        self.watch(self._asked)

    def end_order(self) -> None:
        """From now on the kinds of passes are not noted any more, unless a question is left."""
        self._stop_ordering()
        self.watch(self._asked)

    def _stop_ordering(self) -> None:
        is_open = bool(self.period) and (self._left > 0 or self.order.unresolved > 0)
        self._is_ordering = self._is_ordering and is_open

    def _forget_order(self) -> None:
        self.order.clear()
        self._begun = [self.begun]

    def find_period(self) -> bool:
        """Returns whether it is known how many passes make a step, by those that were noted so far."""
        if not self.period:
            self.period = self.order.first_period()
            if self.period > 1:
                self.cycles += self.order.ahead_of(self.period, self.phase)
                self.forwards = self._forwards_of(self.period)
            if self.period:
                self.order.settle(self.period, self.phase)
        return bool(self.period)

    def _forwards_of(self, period: int) -> int:
        """How many forward passes the last so many backward passes had."""
        return max(1, self._begun[-1] - self._begun[max(0, len(self._begun) - 1 - period)])

    def _end_pass(self) -> None:
        """Notes the kind of the pass that has ended (Note: [longer periods] in cycles.py)."""
        if self._is_apart:
            self._begun[-1] = self.begun
            return
        if isinstance(self._session, Unhooked):  # nobody knows what it has saved
            self._forget_order()
            return
        self.passed = self._session.accounts.take_saved()
        self.order.add(self.passed, may_be_last=not self._session.has_graph)
        self._begun.append(self.begun)
        self._left = max(0, self._left - 1)
        if self.period and not self.order.is_mixed and self.order.is_odd(self.period, (self.cycles - 1) % self.period):
            self._resolve()
        if self._course is None:
            self._stop_ordering()
            if not self._is_ordering:
                self.watch(None)

    def _resolve(self) -> None:
        """Finds out why a pass was not the one of the pattern, if enough of them were seen since."""
        shift = self.order.shift((self.cycles - 1) % self.period)
        longer = self.order.longer_period()
        if shift is not None:
            self.cycles -= shift
        elif longer == self.period:  # its passes have changed
            self.order.settle(longer, self.phase)
        elif longer and self.order.values_in(longer) <= MOST_VALUES:
            self.restart(longer, self._forwards_of(longer))
            self.order.settle(longer, self.phase)
            return
        elif longer or self.order.unresolved > 2 * MOST_CYCLES:
            self.mix()
        else:
            return
        self._forget_order()

    def mix(self) -> None:
        """Passes of several kinds come in no order that repeats itself."""
        self.order.is_mixed = True

    @property
    def _is_measuring(self) -> bool:
        """Whether what runs now is the course itself, which may ask for gradients of its own."""
        return self._running is not None and inspect.getgeneratorstate(self._running) == inspect.GEN_RUNNING


_MOST = 64
"""How many spans are remembered."""

_OF_LEAVES = 1 << 63
"""Nodes that add to the gradients of leaves are numbered from here on."""


class Spans:
    """The spans in which a Session was open, by the numbers of the nodes that were made there."""

    def __init__(self) -> None:
        self._spans: deque[range] = deque(maxlen=_MOST)
        self._begun: int | None = None

    def begin(self) -> None:
        """A Session was opened."""
        self._begun = next_sequence_number()

    def end(self) -> None:
        """It is closed."""
        if self._begun is not None:
            self._spans.append(range(self._begun, next_sequence_number()))
        self._begun = None

    def include(self, tensors: Any) -> bool:
        """Whether a backward pass from these tensors, or this tensor, reaches what was made in a span.

        Where it cannot be told what it begins from, it does. From a tensor that no function has made, it reaches
        nothing.
        """
        waiting = list(_nodes(tensors))
        if not waiting:
            return not all(isinstance(each, Tensor) for each in _listed(tensors))
        for node in nodes_behind(waiting):
            number = node._sequence_nr()
            is_open = self._begun is not None and self._begun <= number < _OF_LEAVES
            if is_open or any(number in span for span in self._spans):
                return True
        return False


def _listed(tensors: Any) -> tuple[Any, ...]:
    return tuple(tensors) if isinstance(tensors, (list, tuple)) else (tensors,)


def _nodes(tensors: Any) -> Iterator[Any]:
    for each in _listed(tensors):
        node = each.node if isinstance(each, GradientEdge) else getattr(each, "grad_fn", None)
        if node is not None:
            yield node


LOOPS = (
    ("lightning.pytorch.loops.training_epoch_loop", "_TrainingEpochLoop", "advance"),
    ("pytorch_lightning.loops.training_epoch_loop", "_TrainingEpochLoop", "advance"),
)
"""Modules of frameworks, with the class of a loop and its method that runs a batch."""


class Told(Protocol):
    """Who is told."""

    def between_steps(self) -> None:
        """As Following.between_steps."""


_told: weakref.WeakSet[Told] = weakref.WeakSet()
_originals: dict[type, Callable[..., Any]] = {}


def tell_between_steps(told: Told) -> None:
    """Has the loops of frameworks that are imported tell before each batch, on the thread that runs it."""
    _told.add(told)
    for module, name, method in LOOPS:
        loop = getattr(sys.modules.get(module), name, None)
        if loop is not None and loop not in _originals and hasattr(loop, method):
            _originals[loop] = getattr(loop, method)
            setattr(loop, method, _telling(_originals[loop]))


def tell_no_more(told: Told) -> None:
    """Nothing is told to it any more. The loops have their own methods again when nobody is left."""
    _told.discard(told)
    if _told:
        return
    for module, name, method in LOOPS:
        loop: Any = getattr(sys.modules.get(module), name, None)
        if loop in _originals:
            setattr(loop, method, _originals.pop(loop))


def _telling(advance: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(advance)
    def tells(*args: Any, **kwargs: Any) -> Any:
        for told in list(_told):
            told.between_steps()
        return advance(*args, **kwargs)

    return tells

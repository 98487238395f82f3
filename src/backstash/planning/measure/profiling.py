"""Takes the profile of a training step: what it holds at each position, and what each choice would cost there.

The step runs a few times and its effects are undone. One plain run gives the peak, some give the time, and one with
everything kept (survey.py) gives the rest. In that run the profiler reports every allocation, and the Session's notes
between them say from when on autograd alone holds a value and which nodes read it.
"""

from __future__ import annotations

import gc
import os
import platform
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from backstash import accelerator
from backstash.arguments import check_count, check_model, check_step
from backstash.capture import modules
from backstash.errors import MeasureError
from backstash.planning.measure.events import memory_profiler, roots_of
from backstash.planning.measure.link import Link, allowed
from backstash.planning.measure.moving import moved
from backstash.planning.measure.probing import Probe, with_errors
from backstash.planning.measure.survey import Births, KeepForSurvey, KeepForTiming, Silent, Survey, SurveyedValue
from backstash.planning.measure.timeline import Timeline
from backstash.planning.measure.zeros import without_initial_zeros
from backstash.planning.model.budget import ALLOW, families
from backstash.planning.model.plan import Plan
from backstash.planning.model.problem import Choice, PlannedValue, Position, StepProfile
from backstash.policies import Policy
from backstash.rewrites.chunked_loss import chunked_loss
from backstash.rewrites.state import State, StepState
from backstash.saved import MIN_NBYTES, cycle_of
from backstash.session import Session
from backstash.stash.buffers import release_buffers
from backstash.telling import note_progress
from backstash.torch_internals import REENTRANT, gradient_of

LONG = 0.2
"""Seconds from which on a step is timed while it is recorded: what that adds is next to nothing of it."""

ENOUGH = 0.8
"""Seconds that are enough to time such a step: longer ones run once for that, shorter ones as often as it takes."""

MOST_REHEARSED = 8
"""How many Sessions that have tried a plan are kept, to time it without a first step."""

FEWEST, ROUNDS, SECONDS = 3, 8, 2.0
"""Shorter plain steps and steps under a Session are timed in turns: at least FEWEST of each, and then until there are
ROUNDS of each or SECONDS are over. Another step of the same kind runs before each of them."""


def profile(
    step: Callable[[], object],
    model: nn.Module | None = None,
    *,
    allow: str | Sequence[str] = ("lossless", "recompute"),
    min_nbytes: int = MIN_NBYTES,
    device: str = "cpu",
    offload_to: str | os.PathLike[str] | None = None,
) -> StepProfile:
    """Runs a training step a few times and returns what a planner has to know about it.

    Everything that the step's code reaches is afterwards as it was before: parameters, buffers, gradients, generators,
    optimizers, schedulers, scalers, averages, counters. What was taken from an iterator, such as a DataLoader's, is not
    put back, which a warning says, and what was written to files or sent elsewhere is not either.

    Args:
        step: runs forward and backward, such as ``lambda: criterion(model(x), y).backward()``. Optimizers may step in
            it.
        model: the model that it trains. Without it, the modules that the step calls outermost are taken.
        allow: what plans may do, as for :func:`backstash.plan`. A plan may allow more, as long as the
            profile is in the process that took it: what it lacks is measured then. ``"offload"`` takes about a second
            to measure the link, and ``"bounded"`` some dozens of backward passes (probing.py).
        min_nbytes: smaller tensors are kept, and are not planned.
        device: the type of device whose memory is planned, ``"cpu"`` or that of the accelerator, such as ``"cuda"``.
        offload_to: a folder on a local disk, to which values may be moved on CPU (see link.folder).

    Warns:
        UserWarning: something of the step cannot be undone, or it saves tensors while backward runs.

    Returns:
        The profile. Its bytes are counted above what is held before the step, with gradients there.

    Raises:
        MeasureError: the step ran no backward pass, changes large data in place, or takes no time by the clock; or
            there is no such device.
        PlanError: ``allow`` means nothing, or there is nowhere to move values to.
        TypeError: ``step`` cannot be called without arguments, or ``model`` is no module.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        >>> x = torch.ones(8, 64)
        >>> found = profile(lambda: model(x).sum().backward(), model, min_nbytes=0)
        >>> any(choice.name == "recompute" for value in found.values for choice in value.choices)
        True
    """
    check_step(step, "profile")
    if model is not None:
        check_model(model, "profile", ", or None for the modules that the step calls")
    if not accelerator.is_here(device):
        raise MeasureError(
            f"profile was asked for device={device!r}, but it knows 'cpu', and an accelerator where one is "
            f"({accelerator.kind() or 'none'} here)."
        )
    check_count(min_nbytes, "min_nbytes", "bytes", "profile")
    tries = families(allow)
    link = allowed(tries, device, offload_to)
    models = [model] if model is not None else _outermost(step)
    with _undone(step, models, link is not None, is_told=True) as runs:
        survey = Survey(tries)
        keep = KeepForSurvey()
        kept = Session(keep, model=model, min_nbytes=min_nbytes)
        note_progress("recording a plain step")
        runs.once(kept)  # makes gradients, and proves what it has to
        plain_nbytes = _plain_peak(runs, device)
        seconds = runs.seconds
        events = _recorded(runs, kept, survey)
        survey.end_step()
        asked = keep.asked | kept.accounts.take_saved()  # with what a call held, so that nothing was decided on it
        session = Session(KeepForTiming(), model=model, min_nbytes=min_nbytes)
        with session.watched_by(Silent()):
            if seconds < LONG:
                seconds, keeping = _in_turns(step, runs.restore, session)
            else:
                runs.once(session)
                keeping = runs.seconds
        if not min(seconds, keeping) > 0.0:
            raise MeasureError(
                f"profile was asked for the time of a step, but by this machine's clock it took {seconds} seconds, and "
                f"{keeping} with hooks. Let the step do more, or mend the clock: time.perf_counter() stands still."
            )
        squares = _probed(runs.once, survey, model, min_nbytes) if "bounded" in tries else {}
        line = Timeline(events, device)
        found = profile_of(line, survey, plain_nbytes, seconds, models, device, link, squares)
        planned = {value.key for value in found.values}
        others = tuple(key for key in asked if key not in planned)
        cycles = 1 + max(map(cycle_of, asked), default=0)
        beside = max(0.0, keeping - seconds)
        found = replace(found, others=others, cycles=cycles, session_seconds=beside, min_nbytes=min_nbytes)
        late = [value.key for value in found.values if found.positions[value.born].is_backward]
        if late and any(position.name == REENTRANT for position in found.positions):
            warnings.warn(
                f"profile was asked for a step that saves {_some(late)} while backward runs, as a reentrant checkpoint "
                f"does. Plans count on a Session that is open then as well: call backward() inside of it, or use "
                f"checkpoint(..., use_reentrant=False).",
                stacklevel=2,
            )

    session_under = partial(Session, model=model, min_nbytes=min_nbytes)
    trials = _Trials(step, models, session_under, device, is_long=seconds >= LONG, waits=link is not None)

    @cache  # what belongs to a plan that was made with more is found again
    def tries_more(more: tuple[str, ...]) -> StepProfile:
        wanted = (*tries, *more)
        return profile(step, model, allow=wanted, min_nbytes=min_nbytes, device=device, offload_to=offload_to)

    def reorders(chunk_nbytes: int) -> tuple[str, StepProfile]:
        with chunked_loss(models[0], step=step, chunk_nbytes=chunk_nbytes) as rewrite:
            head = rewrite.head

        def in_chunks() -> object:
            with chunked_loss(models[0], head, chunk_nbytes=chunk_nbytes):
                return step()

        return head, profile(in_chunks, model, allow=tries, min_nbytes=min_nbytes, device=device, offload_to=offload_to)

    ways = {
        **{"rehearse": trials.rehearse, "clock": trials.clock, "off_by": trials.off_by, "together": trials.together},
        **{"tries_more": tries_more, "reorders": reorders},
    }
    for name, way in ways.items():  # no fields: a profile is data, and these are the ways to more of it
        object.__setattr__(found, name, way)
    return found


def _probed(step: Callable[[], None], survey: Survey, model: nn.Module | None, min_nbytes: int) -> dict[str, float]:
    """What rounding each value does to the gradients (see probing.Probe), in a step of its own."""
    probe = Probe(survey.found)
    session = Session(KeepForSurvey(), model=model, min_nbytes=min_nbytes, overwrite_gradients=False)
    with session.watched_by(probe.watcher), probe.waiting(), session:
        step()
    return probe.squares


class _Runs:
    """Runs of a step that begin alike.

    Args:
        waits: whether the time counts in which it waits for a store.

    Attributes:
        fills: whether the weights have numbers in the place of zeros that an update does not leave.
        seconds: the time of the last run. On a single thread of the CPU, time in which the machine did other work is
            left out: there is one run, not the shortest of some.
    """

    def __init__(self, step: Callable[[], object], state: StepState, waits: bool) -> None:
        self.seconds = 0.0
        self._step, self._state = step, state
        self._is_alone = not waits and torch.get_num_threads() == 1 and accelerator.kind() is None
        self._profiled = [without_initial_zeros(each) for each in state.states]
        self.fills = any(
            filled.contents[number][1] is not content
            for given, filled in zip(state.states, self._profiled, strict=True)
            for number, (_, content) in given.contents.items()
        )
        self._is_first = True

    def restore(self) -> None:
        """Restores all but the gradients."""
        self._restore(self._profiled)

    def _restore(self, states: Sequence[State]) -> None:
        self._state.rewind()
        for each in states:
            each.restore()

    def once(self, session: Session | None = None) -> None:
        """Restores all but the gradients, and runs the step, under a Session if there is one."""
        self.restore()
        self.run(session)

    def once_as_given(self, session: Session | None = None) -> None:
        """The same with the weights as they are now, zeros included: errors may be larger beside smaller gradients."""
        self._restore(self._state.states)
        self.run(session)

    def run(self, session: Session | None = None) -> None:
        """Runs the step."""
        started, began = _now(), time.process_time()
        with session or nullcontext():
            self._step()
        self.seconds = _now() - started
        if self._is_alone:
            self.seconds = min(self.seconds, time.process_time() - began)
        if self._is_first:
            self._is_first = False
            _require_undoable(self._state)

    def shortest(self, session: Session | None = None) -> float:
        """Returns the time of a step behind one of its kind, which has left the heap as it is; the shortest of some."""
        times: list[float] = []
        while sum(times) < ENOUGH and len(times) < ROUNDS:
            self.once(session)
            times.append(self.seconds)
        return min(times)


@contextmanager
def _undone(step: Callable[[], object], models: list[nn.Module], waits: bool, is_told: bool = False) -> Iterator[_Runs]:
    """Inside, steps may run, with weights as after an update (Note: [zeros that do not last]); all is restored then."""
    with StepState(step, models) as state:
        yield _Runs(step, state, waits)
    if is_told and state.consumed():
        warnings.warn(
            f"profile was asked to undo a step, but it takes items from {_some(state.consumed())}, which cannot be put "
            f"back: the training misses them. Take the batch before the step, and have the step use it.",
            stacklevel=4,
        )
    if is_told and state.filled():
        warnings.warn(
            f"profile was asked to undo a step, but it adds to what functools caches of {_some(state.filled())}, which "
            f"cannot be taken out again: the training finds it there. If that draws random numbers, profile before the "
            f"first step, or call cache_clear() before.",
            stacklevel=4,
        )


class _Trials:
    """Runs of a profiled step under plans, each of which is undone."""

    def __init__(
        self,
        step: Callable[[], object],
        models: list[nn.Module],
        session: Callable[..., Session],
        device: str,
        is_long: bool,
        waits: bool,
    ) -> None:
        self._step, self._models, self._session, self._device = step, models, session, device
        self._is_long, self._waits = is_long, waits
        self._plain_seconds = 0.0  # of a long step, once it is asked for
        self._rehearsed: dict[object, Session] = {}
        self._latest: Session | None = None  # which has run the latest step, if that was a rehearsal
        self._shared: ExitStack | None = None
        self._runs: _Runs | None = None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, all trials share one copy of what the step changes."""
        with ExitStack() as self._shared:
            try:
                yield
            finally:
                self._shared = self._runs = None

    def _undone(self) -> AbstractContextManager[_Runs]:
        if self._shared is None:
            return _undone(self._step, self._models, self._waits)
        if self._runs is None:
            self._runs = self._shared.enter_context(_undone(self._step, self._models, self._waits))
        return nullcontext(self._runs)

    def rehearse(self, policy: Policy) -> tuple[int, ...]:
        """Runs the step under a policy, and returns the most bytes that were alive at each position."""
        session = self._session(policy)
        session.learns_anew = True  # as in training, whose first steps take more than those that settled
        with self._undone() as runs:
            runs.once(session)  # proves what it has to
            session.settle_soon()  # as training comes to it: the step after the next one runs programs
            events = _recorded(runs, session, Births())
        if len(self._rehearsed) >= MOST_REHEARSED:
            del self._rehearsed[next(iter(self._rehearsed))]
        self._rehearsed[_what_is_done(policy)] = self._latest = session
        return tuple(position.most_nbytes for position in Timeline(events, self._device).positions)

    def clock(self, policy: Policy) -> float:
        """Runs plain steps and steps under a policy, and returns how many times as long the latter take."""
        latest, self._latest = self._latest, None
        known = self._rehearsed.get(_what_is_done(policy))
        session = known or self._session(policy)
        with self._undone() as runs:
            if not self._is_long:
                plain, own = _in_turns(self._step, runs.restore, session)
                return own / plain
            if known is None or known is not latest:  # else its latest step was written down
                if known is None:
                    runs.once(session)
                session.settle_soon()
                runs.once(session)
            own = runs.shortest(session)
            if not self._plain_seconds:
                runs.once()
                self._plain_seconds = runs.shortest()
            return own / self._plain_seconds

    def off_by(self, policy: Policy) -> float | None:
        """By how much a policy makes the gradients of the step wrong; None where that cannot be measured."""
        self._latest, found = None, []
        with _undone(self._step, self._models, self._waits) as runs:
            for once in (runs.once, runs.once_as_given)[: 1 + runs.fills]:
                session = self._session(policy, check=1, check_limit=1e30)
                once(session)
                errors = [found.error for found in session.report().gradient_error]
                found += [error for error in errors if error is not None]
        return max(found, default=None)


def _what_is_done(policy: Policy) -> object:
    """Returns what tells plans apart of which a step takes another time."""
    return tuple((each.key, each.choice) for each in policy.decisions) if isinstance(policy, Plan) else policy


def _require_undoable(state: StepState) -> None:
    """Checks that what a step has changed can be undone."""
    lost = state.lost()
    if lost:
        raise MeasureError(
            f"profile was asked to undo a step, but it changes {_some(lost)} in place, of which no copy was made: it "
            f"is large, and looks like data and not like the state of a training. What else the step has changed was "
            f"put back. Leave that out of the step, or pass a copy."
        )


def _some(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _outermost(step: Callable[[], object]) -> list[nn.Module]:
    """Runs the step once, undoes it, and returns the modules that it calls and that no other module calls."""
    seen = _Outermost()
    with StepState(step) as state:
        try:
            modules.listen(seen)
            step()
            _require_undoable(state)
        finally:
            modules.unlisten(seen, is_here=True)
            for _, each in seen.found.values():
                each.restore()
                each.restore_gradients()
    return [module for module, _ in seen.found.values()]


class _Outermost:
    """Listens to the modules of a step, and notes the state in which it finds them."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[nn.Module, State]] = {}
        self._depth = 0

    def enter_module(self, module: nn.Module) -> None:
        """Notes a module that no other module has called."""
        if self._depth == 0 and id(module) not in self.found:
            state = State(module)
            self.found[id(module)] = module, state
            state.set_gradients_aside()
        self._depth += 1

    def leave_module(self, module: nn.Module) -> None:
        """Notes that it is over."""
        self._depth = max(0, self._depth - 1)

    def ran_elsewhere(self) -> None:
        """Notes nothing."""


def _in_turns(step: Callable[[], object], restore: Callable[[], None], session: Session) -> tuple[float, float]:
    """Shortest times in seconds of a plain step and of a step under a Session: other work of the machine only adds.

    In training each step follows one of its own kind, whose freed memory it finds. So of each kind two run in turn, and
    the second is timed. Plans of two small networks seemed 14 % slower than they were where the first was.
    """
    restore()
    with session:  # proves what it has to
        step()
    times: tuple[list[float], list[float]] = [], []
    begun = time.perf_counter()
    contexts: tuple[AbstractContextManager[object], ...] = nullcontext(), session
    while len(times[1]) < FEWEST or (len(times[1]) < ROUNDS and time.perf_counter() - begun < SECONDS):
        note_progress("timing steps", len(times[1]), ROUNDS)
        for found, context in zip(times, contexts, strict=True):
            for is_timed in (False, True):  # the first finds the heap as the other kind of step has left it
                restore()
                started = _now()
                with context:
                    step()
                if is_timed:
                    found.append(_now() - started)
    return min(times[0]), min(times[1])


def _now() -> float:
    accelerator.synchronize(accelerator.kind() or "cpu")
    return time.perf_counter()


def _recorded(runs: _Runs, session: Session | None = None, watcher: Births | None = None) -> list[Any]:
    """The profiler's record of a step that is not the first one, which makes gradients and proves what it has to."""
    release_buffers()
    gc.collect(1)  # what the step before has left behind; all that a process has takes half a second to look through
    with session.watched_by(watcher) if session is not None and watcher is not None else nullcontext():
        runs.restore()
        with memory_profiler() as profiled:
            runs.run(session)
    return roots_of(profiled)


def _plain_peak(runs: _Runs, device: str) -> int:
    """Returns the most bytes alive in a plain step, counted as those of a step under a plan are.

    Gradients are there already.
    """
    line = Timeline(_recorded(runs), device)
    _first_of_backward(line)
    return max(each.most_nbytes for each in line.positions)


def _first_of_backward(line: Timeline) -> int:
    """Returns the position of the first autograd node."""
    first = next((number for number, each in enumerate(line.positions) if each.is_backward), None)
    if first is None:
        raise MeasureError(
            "profile was asked for a training step, but no autograd node ran in it. Call backward() in it."
        )
    return first


def profile_of(
    line: Timeline,
    survey: Survey,
    peak_nbytes: int,
    seconds: float,
    models: list[nn.Module],
    device: str,
    link: Link | None = None,
    squares: Mapping[str, float] | None = None,
) -> StepProfile:
    """The profile of a step that was surveyed.

    Args:
        models: the modules whose parameters and gradients were held before the step.
        link: where values may be moved to; None for nowhere.
        squares: what rounding does to the gradients, by the value's key (see probing.Probe).

    Raises:
        MeasureError: no autograd node ran in the step.
    """
    first = _first_of_backward(line)
    for each in line.positions[first:]:
        each.is_backward = True  # and what lies between two nodes
    found = {
        key: value
        for key, value in survey.found.items()
        if key in line.born and any(read >= first for read in line.reads.get(key, ()))
    }
    index = {key: number for number, key in enumerate(found)}
    together = Counter(id(value.group) for value in found.values() if value.group is not None)
    total = sum(each.seconds for each in line.positions) or 1.0
    times = [each.seconds * seconds / total for each in line.positions]
    moves = {} if link is None else moved(link, found, line, times, first)
    values = []
    for key, value in found.items():
        reads = tuple(sorted({read for read in line.reads[key] if read >= first}))
        born = min(line.born[key], reads[0])
        choices = [*value.choices, *_remade(value, survey, index, line, together[id(value.group)] or 1, reads[0])]
        choices += [*with_errors(value, (squares or {}).get(key)), *moves.get(key, ())]
        facts = value.facts
        values.append(
            PlannedValue(key, facts.fqn, facts.op, str(facts.spec), value.nbytes, born, reads, tuple(choices))
        )
    held = [0] * (len(line.positions) + 1)
    for planned in values:
        held[planned.born] += planned.nbytes
        held[planned.reads[-1] + 1] -= planned.nbytes
    moments, now = [], 0
    for number, position in enumerate(line.positions):
        now += held[number]
        moments.append(tuple(nbytes - now for nbytes in position.moments))
    module_of = {read: value.module for value in values for read in value.reads}
    positions = tuple(
        Position(each.name or "let go", module_of.get(number, ""), each.is_backward, times[number])
        for number, each in enumerate(line.positions)
    )
    resident = sum(_nbytes(p) + _nbytes(gradient_of(p)) for m in models for p in m.parameters())
    return StepProfile(
        positions,
        tuple(max(each) for each in moments),
        tuple(values),
        peak_nbytes,
        resident,
        machine=f"{platform.machine()}, {os.cpu_count()} processors, {torch.get_num_threads()} threads",
        device=device,
        versions={"torch": torch.__version__},
        tries=tuple(word for word in ALLOW if word in {*survey.tries, "lossless", "recompute"}),
        store="host" if link is None else link.store,
        directory="" if link is None else link.directory,
        moments=tuple(moments),
    )


def _nbytes(x: torch.Tensor | None) -> int:
    """Bytes of a parameter or a gradient, which may be sparse."""
    if x is None or x.is_meta:
        return 0
    if x.layout is torch.sparse_coo:
        return int(x._indices().nbytes + x._values().nbytes)
    return int(x.nbytes)


def _remade(
    value: SurveyedValue, survey: Survey, index: dict[str, int], line: Timeline, together: int, first_read: int
) -> list[Choice]:
    """The choice to remake a value, where all that it is remade from is planned as well or held anyway."""
    if value.parents is None or (value.account is not None and value.account.is_exposed):
        return []
    keys = []
    for parent in value.parents:
        lives = survey.keys.get(parent, [])  # none: the program holds it anyway
        then = [key for key in lives if line.born.get(key, 0) <= first_read] or lives[:1]
        if then and then[-1] in index:
            keys.append(then[-1])
        elif len(then) == 1:
            return []
    trial = line.trials.get(value.section)
    if trial is None:  # another thread, which the profiler does not see, has decided on it
        return []
    workspace = max(0, trial.most - trial.before - value.nbytes)
    parents = tuple(sorted({index[key] for key in keys}))
    return [
        Choice(
            "recompute",
            "recompute",
            0,
            parents=parents,
            workspace_nbytes=workspace,
            seconds=value.remake_seconds / together,
            reason=value.reason,
            calls=value.calls,
            in_place=value.in_place,
        )
    ]

"""The measurements of one kind of steps in their order: its profile, and the peak that its plan reaches.

1. Of the first kind two steps are kept as they are. What is proven on first use is proven, and it is seen how many
   backward passes make a step (cycles.py).
2. Two steps, or some more where they are short, run as in plain PyTorch, without any hooks, and are timed.
3. In one step, or in some where there is more to try, every choice is tried on the values (survey.py), and the next
   one is recorded, with a plain step behind it, of whose peak a budget may be a share. If codecs with an error are
   allowed, one more step measures what they do to the gradients (probing.py). From then on there is a plan.
4. One step under the plan proves its recipes, while the profiler runs already, and the next one is counted. If its peak
   is above the budget, the next plan leaves more room, and so on.
5. Some more steps are timed.

Note: [bounded shares]
    What the course itself computes, it computes between steps: choices that are tried, the record that is read, the
    search for a plan. A small step is over in less time than any of these. So each is done in slices, one after each
    backward pass, and a slice takes one or two plain steps and LEAST seconds at most, or as long as what cannot be
    divided: one choice of one value, and the profiler's end. While there is no plan, steps between two slices run as
    plain ones do. The first solution that keeps the budget is the plan, and when the search is over, a faster one takes
    its place. The search finds the same however it is divided, and no step waits for another. As long as there is no
    plan, slices grow to MOST_HURRIED shares, because steps take more than the budget; and where less than what is there
    whatever is done with values is asked for, the search goes to its end at once, since an error ends the training.

Note: [accumulated gradients]
    A backward pass takes more if it adds to gradients that are there. If some of a loop's passes do and others do not,
    one that does is surveyed and counted, unless those of its kind never do, as where the first batch of each step has
    a size of its own.

Note: [steps that raise]
    A loop may catch an error and go on with the next batch. A step that raises is none of those that are awaited, timed
    or recorded, and what is known stays known. Only a record begins again, since its steps have to follow one another:
    what an interrupted step leaves behind is freed in the next one. It ends where the step raises, because nobody knows
    whether the program goes on.

Note: [freed unseen]
    The profiler sees the memory that the program's own threads free. A thread of a communication library, which may
    hold the last reference to a buffer, is not among them: what it frees seems to be alive until its address is used
    again. Which thread is the last one differs from step to step. And a step that follows an interrupted one may free
    what that has left behind, and so take less than others do. So a budget is refused only if several steps say so, and
    a share is one of the latest of them. The recorded step and the plain one behind it, or two recorded steps where no
    plain one is, are enough where no process group is there and the least that a plan could take is more than FAR
    budgets. These two should take about as much. Where the plain step takes UNLIKE times as much as the recorded one,
    or as little, the program took memory in one of them that it keeps, as a cache that is filled once, or an earlier
    pass was never differentiated, and both are recorded anew.
"""

from __future__ import annotations

import gc
import math
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, Literal, Protocol

import torch.distributed

from backstash.errors import BatchTooLargeError, BudgetError, MeasureError
from backstash.planning.measure.events import Event
from backstash.planning.measure.link import Link
from backstash.planning.measure.probing import Probe
from backstash.planning.measure.profiling import profile_of
from backstash.planning.measure.recording import Recording
from backstash.planning.measure.survey import (
    Births,
    KeepForSurvey,
    KeepForTiming,
    KindMeasurements,
    Silent,
    Stopwatch,
    Survey,
)
from backstash.planning.measure.timeline import Timeline
from backstash.planning.model.allocator import reserved_by
from backstash.planning.model.explain import size
from backstash.planning.model.plan import Plan
from backstash.planning.model.problem import StepProfile
from backstash.planning.run.agreement import Agreement
from backstash.planning.run.buckets import Bucket, Buckets, size_ratio
from backstash.planning.run.cycles import MOST_CYCLES, Order
from backstash.planning.run.within import Within
from backstash.planning.search.planner import Planner
from backstash.policies import Policy, get
from backstash.session import Session
from backstash.torch_internals import may_compile

Awaited = Literal["cycle", "outcome", "safe"]
"""The end of a backward pass, that or a step that raises, or a place where the profiler may be started and stopped."""

TIMED_STEPS, FINALLY_TIMED = 20, 8
"""How many steps under a plan are timed at most, and how many of them last, when kinds of passes are not noted and the
steps have settled."""

PLAIN_STEPS, MOST_PLAIN_STEPS, PLAIN_SECONDS = 2, 8, 0.04
"""How many plain steps are timed in a row, how many at most, and how many seconds they take together otherwise: short
ones take longer at first, and behind a slice, until what they read is in the processor's caches again."""

SHARE, SHARE_OF_PLAIN, LEAST = 1.0, 2.0, 0.004
"""How long a slice of what the course computes may take: plain steps, also after a plain step, which has no hooks that
take time as well, and seconds (Note: [bounded shares])."""

PATIENT, MOST_HURRIED = 4, 4
"""After how many steps without a plan a slice takes as much again as the first one did, and how many times that at
most: a budget that no plan keeps is known when the search is over, and until then steps take more than it."""

FEW = 4
"""More steps of other shapes than that, and than one in so many, are awaited no more."""

MOST_TRIED = 64
"""In how many steps choices are tried at most, before what is left is tried in the recorded one."""

WORTH = 0.005
"""By what share of its time a step has to become faster for a plan to take another one's place."""

MOST_PLANS = 5
"""How many plans are tried until one keeps the budget."""

MOST_SURVEYED, FAR, UNLIKE = 3, 2, 1.5
"""How many steps are surveyed until a budget is refused, how many budgets the least is above which one is enough, and
how many times as much as the plain step behind it such a step may take, or as little (Note: [freed unseen])."""

MOST_RECORDED = 24
"""How many steps of other kinds are recorded at most until one comes of the kind that is asked for."""

MOST_REFUSED = 24
"""How many backward passes another loop's record is waited for, which takes some passes of that loop."""

MOST_MOVED = 4
"""How many steps are awaited at most until they stay on one thread."""

MOST_SMALLER = 10
"""After how many recorded steps one that is half as large as the largest one so far is taken for it, and after twice as
many any: each step that is recorded in vain makes do with a little less."""

MOST_ALONE = 2
"""How many recorded steps of the right kind may add to no gradients, until one of them is taken for all."""

MOST_PROBED = 3
"""How many steps are asked at most what rounding does to the gradients: a loss scale that overflows tells nothing."""

PATIENCE, MOST_PATIENT = 6, 4 * MOST_RECORDED
"""After how many forward passes of other shapes a course ends, to begin again when its own shape comes: where one of
them waits for a course of its own, and where none does."""

Waiting = Generator[Awaited, bool | None, None]
"""What waits. Who waits for an outcome is sent whether a step has raised."""

clock = time.perf_counter


class Aside:
    """Inside the ``with``, the program waits for what keeps its budget: no step of plain PyTorch takes this time."""

    def __init__(self) -> None:
        self._seconds = self._began = 0.0
        self._depth = 0

    def __enter__(self) -> None:
        if not self._depth:
            self._began = clock()
        self._depth += 1

    def __exit__(self, *raised: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._seconds += clock() - self._began

    def program_clock(self) -> float:
        """Returns the time by a clock that stands still inside."""
        return (self._began if self._depth else clock()) - self._seconds


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, Python's garbage collector does not run: what a slice makes and drops would set it off again and again.

    A full collection takes longer than many small steps.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def usual(times: Sequence[float]) -> float:
    """Returns the median of the faster half of some times: other work, of the machine or of the course, only adds."""
    return median(sorted(times)[: (len(times) + 1) // 2])


def _is_far(least_nbytes: int, budget_nbytes: int) -> bool:
    """Whether a budget is missed by more than one step may be wrong about (Note: [freed unseen])."""
    is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    return is_alone and least_nbytes > FAR * budget_nbytes


class _MeasuredLoop(Protocol):
    """What a course asks of the loop in which it measures: what Budgeted and Following have under these names."""

    adds_up: bool
    may_add_up: bool
    cycles: int
    forwards: int
    period: int
    last: Bucket | None
    order: Order
    passed: dict[str, str]
    recording: Recording
    agreement: Agreement | None
    allow: tuple[str, ...]
    aside: Aside
    budget: int | str
    buckets: Buckets
    device: str
    error_limit: float | None
    given: Plan | None
    has_planned: bool
    is_hurried: bool
    link: Link | None
    of: Literal["allocated", "reserved"]
    overflowed: str
    spared: Callable[[], int]
    strict: bool
    unused_nbytes: int
    tries: tuple[str, ...]

    @property
    def is_steady(self) -> bool: ...
    @property
    def takes_any(self) -> bool: ...
    @property
    def phase(self) -> int: ...
    def find_period(self) -> bool: ...
    def end_order(self) -> None: ...
    def watch(self, watcher: Births | None) -> None: ...
    def keeping(self, cycles: int) -> KeepForSurvey: ...
    def use(self, bucket: Bucket, policy: Policy, is_unhooked: bool = False, **options: Any) -> None: ...
    def use_alike(self, bucket: Bucket, plan: Plan) -> None: ...
    def retire(self, session: Session) -> None: ...
    def go_back(self, bucket: Bucket, session: Session) -> None: ...
    def session_with(self, policy: Policy) -> Session: ...
    def guarded(self, bucket: Bucket, plan: Plan, budget: int) -> Policy: ...
    def nbytes_of(self, plain_nbytes: int) -> int: ...
    def helps(self, bucket: Bucket) -> bool: ...
    def surveyed_above(self, bucket: Bucket) -> float | None: ...
    def forget_nbytes(self) -> None: ...
    def profiled(self, profile: StepProfile) -> None: ...
    def settled(self) -> None: ...


class Course:
    """The measurements of one bucket.

    Args:
        owner: the loop, which opens the Sessions.
        is_for_others: whether a single step is recorded of it, or of another kind of which that helps as much.

    Attributes:
        stage: what it does now, in words.
        trouble: why steps may not keep the budget meanwhile; empty if they do.
    """

    def __init__(self, owner: _MeasuredLoop, bucket: Bucket, is_for_others: bool = False) -> None:
        self._owner: _MeasuredLoop = weakref.proxy(owner)  # which holds this object
        self._is_for_others = is_for_others
        self._keeping: Session | None = None  # for that step
        self._is_recording = False  # the next step, or this one
        self._has_recorded = False  # a step, which is yet to be read
        self._bucket = bucket
        self._plain_of: Bucket | None = None  # the kind of the plain step that was recorded behind the other one
        self._recorded_nbytes = 0  # what the recorded step took
        self._is_usual = False  # that is about what another step took
        self._unusual = 0  # pairs of steps that do not, or of which the second one has raised
        self._recorded: dict[str, str] = {}  # what the recorded step saved, by the keys with the specs
        self._estimate = 0.0  # seconds of a plain step, by what was recorded
        self._plain: list[tuple[Bucket, float]] = []  # kinds of plain steps, and their times
        self._times: list[tuple[Bucket, float]] | None = None  # of steps as they run now; None where they are not timed
        self._used = 0.0  # seconds of the slice that follows the last pass which are used up already
        self._spent = 0.0  # seconds that were computed between steps
        self._met: set[Bucket] = set()  # kinds of steps, since it began
        self._passed = 0  # forward passes of other shapes since the last one of its own
        self.stage = "the order of its passes is looked for"
        self.trouble = ""

    def measures(self, bucket: Bucket) -> bool:
        """Whether steps of a bucket are those that it waits for."""
        return bucket is self._bucket or (self._is_for_others and self._owner.helps(bucket))

    def directs(self, bucket: Bucket) -> bool:
        """Whether it says under which policy steps of a bucket run."""
        return bucket is self._bucket and not self._is_for_others

    def is_over(self, bucket: Bucket) -> bool:
        """Is told of each forward pass. Returns whether this course waits in vain, because other shapes come."""
        self._met.add(bucket)
        self._passed = 0 if self.measures(bucket) else self._passed + 1
        patience = PATIENCE if bucket.waits and not self._is_for_others else MOST_PATIENT
        return self._passed > patience and self._owner.has_planned and not self._has_recorded

    def session_for(self, bucket: Bucket) -> Session | None:
        """Returns the Session that the next step of a kind borrows; None where it has its own."""
        return self._keeping if self._is_recording and self._owner.helps(bucket) else None

    def run(self) -> Waiting:
        """Measures. Yields what it waits for."""
        if self._is_for_others:
            yield from self._record_for_others()
            return
        bucket, owner = self._bucket, self._owner
        if bucket.planner is not None and not bucket.is_strange:
            yield from self._plan_within()  # the profile is known, and its plan needs more room or was not counted
        elif owner.given is not None and len(owner.buckets) == 1 and bucket.plan is None:
            owner.period, owner.forwards = max(1, owner.given.cycles), owner.given.cycles
            self._use(owner.given)
            yield from self._count()
            if owner.given.unknown or bucket.found.reached_nbytes > bucket.found.budget_nbytes:
                yield from self._first_steps()  # the plan is for other steps than these
        else:
            yield from self._first_steps()
        owner.settled()
        if self._bucket.found.plan is not None:
            yield from self._improve()
            if len(owner.buckets.planners) <= 1:  # else other shapes wait, and steps run slower meanwhile
                yield from self._time()
        self._bucket.is_done, self._bucket.courses = True, 0

    def give_up(self, why: str) -> None:
        """From now on the steps run under the rules, because there can be no plan."""
        bucket = self._bucket
        bucket.is_done = True
        bucket.found = replace(bucket.found, trouble=f"no plan: {why}; the policy is lossless")
        self._owner.use(bucket, get("lossless"))
        warnings.warn(
            f"a plan within {self._owner.budget} was asked for, but {why}. The policy is lossless now.", stacklevel=2
        )

    # -- slices (Note: [bounded shares]) --------------------------------------------------------------------------

    @property
    def _share(self) -> float:
        """How many seconds a slice takes at most."""
        if self._owner.is_hurried:
            return math.inf
        is_plain = self._times is not None and self._times is self._plain
        return (SHARE_OF_PLAIN if is_plain else SHARE) * self._seconds + LEAST

    @property
    def _plain_seconds(self) -> float:
        """The time of a plain step; 0.0 where none was timed."""
        own = self._usual(self._plain)
        is_single = sum(bucket is self._bucket for bucket, _ in self._plain) == 1
        return min(own, self._in_proportion) if is_single else own

    @property
    def _told_plain_seconds(self) -> float:
        """The same for who compares it with steps under a plan; 0.0 where plain steps have kept their hooks.

        Where something is compiled they keep them (Note: [plain steps in a loop] in hazards.md).
        """
        return 0.0 if may_compile() else self._plain_seconds

    @property
    def _in_proportion(self) -> float:
        """The time of a plain step in proportion to all that were timed; infinite where none was."""
        ratios = [(size_ratio(each.signature, self._bucket.signature, is_linear=True), s) for each, s in self._plain]
        times = [ratio * seconds for ratio, seconds in ratios if math.isfinite(ratio)]
        return usual(times) if times else math.inf

    def _usual(self, times: list[tuple[Bucket, float]]) -> float:
        """What steps of this bucket usually take; 0.0 where none was timed."""
        own = [seconds for bucket, seconds in times if bucket is self._bucket]
        return usual(own) if own else 0.0

    @property
    def _seconds(self) -> float:
        """The time of a plain step: as it was timed, or in proportion to plain steps of other shapes, or estimated."""
        others = self._in_proportion
        return self._plain_seconds or (others if math.isfinite(others) else self._estimate)

    def _has_raised(self, saved: dict[str, str] | None = None) -> Generator[Awaited, bool | None, bool]:
        """Waits until a step has ended, or has raised. Returns which, and adds what it has saved to ``saved``."""
        while not (yield "outcome"):
            if saved is not None:
                saved |= self._owner.passed
            if not self._owner.phase:
                return False
        return True

    def _step(self) -> Waiting:
        """Waits for a step that does not raise, and times it where steps are timed."""
        is_plain = self._times is self._plain
        now = self._owner.aside.program_clock if is_plain else clock
        began = now()
        while (yield from self._has_raised()):
            began = now()
        self._used = 0.0
        last = self._owner.last
        if self._times is not None and last is not None:
            self._times.append((last, now() - began))
            if not is_plain:
                self._bucket.found = replace(self._bucket.found, seconds=self._usual(self._times))

    def _slice(self, work: Iterator[None], times: float = 1.0) -> bool:
        """Does some work, for so many times the usual share. Returns whether it is done."""
        with uncollected():
            began = clock()
            until = began + times * self._share - self._used
            is_done = False
            while not is_done and clock() < until:
                is_done = next(work, self) is self
        took = clock() - began
        self._spent += took
        self._used += took  # what comes next before the next step has the rest of the share
        return is_done

    def _steps_until(self, work: Iterator[None], is_enough: Callable[[], bool] = lambda: False) -> Waiting:
        """Does work between steps, until it is done or enough of it is."""
        waited = 0
        while not self._slice(work, min(MOST_HURRIED, 1 + waited // PATIENT)) and not is_enough():
            yield from self._step()
            waited += self._bucket.plan is None

    def _read(self, events: list[Event]) -> Generator[Awaited, bool | None, Timeline]:
        """Reads a record between steps."""
        line = Timeline([], self._owner.device)
        yield from self._steps_until(line.read(events))
        self._has_recorded = False
        return line

    # -- steps ---------------------------------------------------------------------------------------------------

    def _first_steps(self) -> Waiting:
        owner = self._owner
        is_first = owner.buckets.largest() is None
        firsts, passes = [], 0
        while passes < (owner.period or 1) or not owner.find_period():
            yield "cycle"
            passes += 1
            firsts.append((owner.passed, owner.last))
            if not is_first:
                break
        values, began_in = firsts[max(0, len(firsts) - owner.phase - owner.period) if is_first else 0]
        while owner.phase:
            yield "cycle"
        if is_first and not owner.order.begins_with_a_step:
            self._bucket = began_in or self._bucket
        bucket = self._bucket
        fingerprint = owner.buckets.fingerprint(values)
        known = owner.buckets.known(fingerprint)
        is_known = False
        if known is not None and not known.unknown and bucket.surveys == 0 and known.cycles == owner.forwards:
            self._use(known, owner.nbytes_of(known.plain_peak_nbytes))
            yield from self._count()
            is_known = bucket.found.reached_nbytes <= bucket.found.budget_nbytes
        if is_known:
            return
        if is_first or self._may_survey():
            if not is_first:
                self._tell_of_survey(bucket)
            yield from self._survey()
            self.trouble = ""
            if self._bucket.planner is not None:
                yield from self._plan_within()
                if self._bucket is bucket and bucket.plan is not None:
                    owner.buckets.keep(fingerprint, bucket.plan)
        else:
            yield from self._count_derived()

    def _tell_of_survey(self, bucket: Bucket) -> None:
        """Tells where a step that is profiled although there is a plan may take more than the budget."""
        nbytes = self._owner.surveyed_above(bucket)
        taken = "" if nbytes is None else size(int(nbytes))
        told = f"a step of {bucket.inputs} is profiled with everything kept, which may take {taken}"
        self.trouble = told if taken else ""

    def _may_survey(self) -> bool:
        """Whether a plain step of this bucket takes no more than one that has run already."""
        largest = self._owner.buckets.largest()
        return largest is None or size_ratio(largest.signature, self._bucket.signature) <= 1

    def _survey(self) -> Waiting:
        """Profiles a step."""
        bucket, owner = self._bucket, self._owner
        bucket.surveys += 1
        surveys: list[Survey] = []
        watch = Stopwatch()

        def watcher() -> Births:
            surveys.append(Survey(owner.tries, watch, measured))
            return surveys[-1]

        measured = KindMeasurements()

        def is_timed() -> bool:
            own = [seconds for each, seconds in self._plain if each is self._bucket]
            is_enough = owner.is_hurried or sum(own) >= PLAIN_SECONDS or len(own) >= MOST_PLAIN_STEPS
            return len(own) >= timed and is_enough

        is_first, before = owner.takes_any, bucket.session
        timed = PLAIN_STEPS if is_first else 0
        if owner.is_hurried:
            timed = min(timed, 1)
        if len(self._plain) < timed:
            self.stage = "plain steps are timed"
            self._run_plain()
            yield from self._steps_of_its_own(MOST_RECORDED, is_timed)

        def keep() -> None:
            self._run(bucket, owner.keeping(owner.forwards))

        def wait(recorded: Bucket) -> None:
            self._bucket = recorded
            self._wait_under(None if is_first else before)

        lines: list[list[Event]] = []
        keep()
        self.stage = "it is tried what can be done with the values of a step"
        if is_first:
            yield from self._try_choices(partial(Survey, owner.tries, watch, measured))
        yield from self._record(watcher, lines, is_first, keep, wait, counts_plain=True)
        if not lines and not is_first:
            if before is not None:
                owner.go_back(bucket, before)  # which has a plan for another shape
            return
        if not lines:
            self.give_up("its steps run on more than one thread, of which torch's profiler sees one")
            return
        bucket = self._bucket
        line = yield from self._read(lines[0])
        behind = line.plain if self._plain_of is bucket else None
        self._is_usual, self._recorded_nbytes = self._is_like_another(line), line.peak_nbytes
        if behind is not None and not self._is_usual and self._unusual < MOST_SURVEYED - 1:
            self._unusual += 1
            bucket.surveys -= 1  # the next one takes the place of this one
            yield from self._survey()
            return
        # About plain: under a Session that keeps everything some readers write over what they read.
        plain = line if behind is None else behind
        recorded = sum(position.seconds for position in line.positions)
        if is_first:
            self._estimate = recorded
            owner.buckets.recorded_share = self._seconds / recorded if recorded else 1.0
        else:
            self._estimate = owner.buckets.recorded_share * recorded
        squares: dict[str, float] = {}
        if "bounded" in owner.tries:
            yield from self._probe(surveys[-1], squares)
            self._wait_under(None if is_first else before)
        profile = self._profile_of(line, surveys[-1], plain.peak_nbytes, self._seconds, squares)
        if profile is None:
            self.give_up("no autograd node runs in its backward passes, as with compiled autograd")
            return
        if owner.of == "reserved" and not owner.unused_nbytes:
            owner.unused_nbytes = max(0, reserved_by(plain.changes).reserved_nbytes - plain.peak_nbytes)
        plain_nbytes = plain.peak_nbytes + owner.spared() + owner.unused_nbytes
        bucket.found = replace(bucket.found, plain_nbytes=plain_nbytes, plain_seconds=self._told_plain_seconds)
        owner.profiled(profile)
        bucket.planner = Planner(profile, owner.allow, owner.error_limit)  # one search serves all plans
        bucket.is_predicted = False

    def _is_like_another(self, line: Timeline) -> bool:
        """Whether a recorded step took about as much as the plain one behind it, or as the one recorded before."""
        taken, of = [float(self._recorded_nbytes)], self._plain_of
        if line.plain is not None and of is not None:
            ratio = size_ratio(self._bucket.signature, of.signature, is_linear=True)
            taken = [line.plain.peak_nbytes / ratio, *(taken if of is not self._bucket else [])]
        return any(max(each, line.peak_nbytes) <= UNLIKE * min(each, line.peak_nbytes) for each in taken)

    def _profile_of(
        self, line: Timeline, survey: Survey, plain_nbytes: int, seconds: float, squares: dict[str, float] | None = None
    ) -> StepProfile | None:
        """The profile of the recorded step, with the other keys that it saved; None where it has no backward pass."""
        owner = self._owner
        try:
            profile = profile_of(line, survey, plain_nbytes, seconds, [], owner.device, owner.link, squares)
        except MeasureError:
            return None
        planned = {value.key for value in profile.values}
        others = tuple(key for key in self._recorded if key not in planned)
        return replace(profile, others=others, cycles=owner.forwards)

    def _record_for_others(self) -> Waiting:
        """Records one step of a shape from which those of others may follow (Note: [new shapes] in buckets.py)."""
        owner = self._owner
        lines: list[list[Event]] = []
        surveys: list[Survey] = []

        def watcher() -> Births:
            surveys.append(Survey(owner.tries, Stopwatch(), KindMeasurements()))
            return surveys[-1]

        def keep() -> None:
            self._keeping = owner.session_with(owner.keeping(owner.forwards))

        def stop(recorded: Bucket) -> None:
            assert self._keeping is not None
            owner.retire(self._keeping)
            self._bucket, self._keeping = recorded, None
            self._tell_of_survey(recorded)

        self._tell_of_survey(self._bucket)
        yield from self._record(watcher, lines, True, keep, stop)
        if self._keeping is not None:
            owner.retire(self._keeping)
            self._keeping = None
        if not lines:
            return
        bucket = self._bucket
        line = yield from self._read(lines[0])
        kept = line.peak_nbytes
        seconds = owner.buckets.recorded_share * sum(position.seconds for position in line.positions)
        profile = self._profile_of(line, surveys[-1], kept, seconds)
        if profile is None:
            return
        bucket.surveys += 1
        plain_nbytes = kept + owner.spared() + owner.unused_nbytes
        bucket.found = replace(bucket.found, plain_nbytes=plain_nbytes)
        owner.profiled(profile)
        bucket.planner = Planner(profile, owner.allow, owner.error_limit, owner.buckets.planners)

    def _try_choices(self, survey: Callable[[float], Survey]) -> Waiting:
        """Tries the choices of values in as many steps as that takes, a share in each of them."""
        trying = survey(self._share)

        def is_complete() -> bool:
            nonlocal trying
            self._spent += trying.spent
            if trying.is_complete:
                return True
            trying = survey(self._share)
            self._owner.watch(trying)
            return False

        self._owner.watch(trying)
        yield from self._steps_of_its_own(0 if self._owner.is_hurried else MOST_TRIED, is_complete)
        self._owner.watch(None)

    def _steps_of_its_own(self, most: int, is_enough: Callable[[], bool]) -> Waiting:
        """Waits for so many steps at most, until it is enough, or too many of them are of other shapes."""
        others = 0
        for number in range(1, most + 1):
            yield from self._step()
            others += self._owner.last is not self._bucket
            if is_enough() or (others > FEW and others > number // FEW):
                return

    def _run(self, bucket: Bucket, policy: Policy, **options: Any) -> None:
        """From now on, steps of that bucket run under that policy, and are not timed."""
        self._times = None
        self._owner.watch(None)
        self._owner.use(bucket, policy, **options)

    def _run_plain(self) -> None:
        """From now on, the steps run as in plain PyTorch, and are timed."""
        if may_compile():  # what is compiled would be compiled once more where there are no hooks
            self._run(self._bucket, KeepForTiming())
            self._owner.watch(Silent())
        else:
            self._run_unhooked(self._bucket)
        self._times = self._plain

    def _run_unhooked(self, bucket: Bucket) -> None:
        """From now on, steps of that bucket run without any hooks, and are not timed."""
        self._run(bucket, KeepForTiming(), is_unhooked=True)

    def _wait_under(self, session: Session | None) -> None:
        """From now on, as long as there is no plan, the steps run under a Session that was in use, or as plain ones."""
        if session is None:
            self._run_plain()
        else:
            self._times = None
            self._owner.go_back(self._bucket, session)

    def _is_as_large(self, bucket: Bucket | None, tried: int) -> bool:
        """Whether a step takes about as much as the largest one so far, of which a budget may be a share."""
        if bucket is None:
            return False
        least = min(size_ratio(each.signature, bucket.signature) for each in (bucket, *self._met))
        return least >= 1 - tried / (2 * MOST_SMALLER)

    def _probe(self, survey: Survey, squares: dict[str, float]) -> Waiting:
        """Measures in a step what rounding does to the gradients, and adds it to ``squares``, by key (see Probe)."""
        bucket, owner = self._bucket, self._owner
        is_any, tried = owner.buckets.largest() is None, 0
        self._run(bucket, owner.keeping(owner.forwards), overwrite_gradients=False)
        for _ in range(MOST_RECORDED):
            probe = Probe(survey.found)
            owner.watch(probe.watcher)
            with probe.waiting():
                yield from self._step()
            owner.watch(None)
            is_own = is_any or owner.last is bucket
            tried += is_own
            squares |= probe.squares if is_own else {}
            if squares or tried == MOST_PROBED:
                break
        if not squares and any(found.rounded for found in survey.found.values()):
            why = "nothing is rounded, because what that does to the gradients could not be measured"
            bucket.found = replace(bucket.found, trouble=why)
            warnings.warn(f"a plan with codecs that have an error was asked for, but {why}.", stacklevel=2)

    def _plan_within(self, before: Within | None = None) -> Waiting:
        """Makes a plan, counts a step under it, and makes leaner ones as long as the budget is not kept."""
        bucket, owner = self._bucket, self._owner
        is_first = not owner.has_planned
        surveyed = 1
        tried = [] if before is None or not before.reached_nbytes else [before]
        refusal: BudgetError | None = None
        while True:
            planner = bucket.planner
            assert planner is not None
            budget = owner.nbytes_of(planner.profile.plain_peak_nbytes)
            nbytes = max(1, budget - bucket.margin) if len(tried) < MOST_PLANS else 1
            is_open = is_first and bucket.plan is None and surveyed < MOST_SURVEYED
            may_survey = is_open and not (self._is_usual and _is_far(planner.floor_nbytes, nbytes))
            if may_survey and planner.floor_nbytes > nbytes:  # whatever a search would find
                surveyed += 1
                yield from self._survey_again(f"{size(planner.floor_nbytes)} are there whatever is done with values")
                continue
            is_refused = is_first and bucket.plan is None and planner.floor_nbytes > nbytes
            if is_refused:
                for _ in planner.search():  # at once, to say which budget would do
                    pass
            elif not planner.has_found(nbytes):
                self.stage = "the best plan is searched for, and steps take what plain ones take"
                yield from self._steps_until(planner.search(), partial(planner.has_found, nbytes))
            is_so_far = planner.has_found(nbytes) and not planner.is_searched
            try:
                plan = planner.plan_so_far(nbytes) if is_so_far else planner.plan(nbytes)
            except BudgetError as error:
                if tried or (bucket.plan is not None and not bucket.is_strange):
                    plan = planner.at_most(0)
                    if bucket.plan is not None and bucket.plan.peak_nbytes <= plan.peak_nbytes:
                        break
                else:
                    if may_survey and not (self._is_usual and _is_far(error.smallest_nbytes, nbytes)):
                        surveyed += 1
                        yield from self._survey_again(str(error))
                        continue
                    if is_first and self._is_hopeless(planner.floor_nbytes, nbytes):
                        self._say_refused(error, is_first)
                        return
                    if is_first and (yield from self._see_all()):
                        continue
                    refusal, plan = error, planner.at_most(0)  # which may reach less than it predicts
            self._use(plan, budget)
            if refusal is not None:
                why = f"no plan keeps it: the smallest budget that fits is {size(refusal.smallest_nbytes)}"
                bucket.found = replace(bucket.found, trouble=why)
            owner.has_planned = refusal is None or not is_first  # it is a trial
            if not (yield from self._count()):
                if refusal is not None:
                    self._say_refused(refusal, is_first)
                    return
                why = bucket.found.trouble or ("" if not tried else "no step under the last plan could be counted")
                bucket.found = replace(bucket.found, reached_nbytes=0, fragmented_nbytes=0, trouble=why)
                return
            tried.append(bucket.found)
            over = bucket.found.reached_nbytes - budget
            if over <= 0:
                owner.has_planned = True
                if refusal is not None:
                    bucket.found = replace(bucket.found, trouble="")
                self._take_as_kept()
                return
            if refusal is not None:
                self._say_refused(refusal, is_first)
                return
            # The same plan again would reach as much: what is reserved may be far above what a plan predicts.
            bucket.margin = max(bucket.margin + over + (over >> 3), budget - plan.peak_nbytes + 1)
        if not tried and (yield from self._count()):  # its guard has held more than planned
            tried.append(bucket.found)
        if tried:
            least = min(tried, key=lambda each: (each.reached_nbytes, each.plan.seconds if each.plan else 0.0))
            yield from self._go_back_to(least, budget)
            if least.reached_nbytes > budget:
                self._say_over(budget)
            else:
                self._take_as_kept()

    def _is_hopeless(self, floor_nbytes: int, nbytes: int) -> bool:
        """Whether steps of none of the shapes that have come fit into a budget, whatever is done with their values.

        Then no step is awaited that would only tell by how much. Of a single shape the next steps tell that, and of
        what a share is depends on them.
        """
        owner, own = self._owner, self._bucket.signature
        is_share = isinstance(owner.budget, str) and "%" in owner.budget
        if is_share or not self._is_usual or len(self._met) < 2:
            return False
        ratios = [size_ratio(own, each.signature, is_linear=True) for each in self._met]
        are_alike = all(len(each.signature) == len(own) for each in self._met)
        return are_alike and _is_far(int(floor_nbytes * min(ratios)), nbytes)

    def _see_all(self) -> Generator[Awaited, bool | None, bool]:
        """Before a budget is refused: sees how other kinds of passes belong to the step. Whether they have no order."""
        owner = self._owner
        if owner.order.is_mixed or not owner.order.has_others:
            return False
        self.stage = "the order of its passes is looked for"
        self._run(self._bucket, owner.keeping(owner.forwards))  # for plain steps say nothing of their passes
        seen = 0
        while seen < MOST_CYCLES or owner.order.unresolved:
            yield "cycle"
            seen += 1
            if owner.order.is_mixed:
                return True
        return False

    def _survey_again(self, why: str) -> Waiting:
        """Profiles another step, because a budget seems to be too small (Note: [freed unseen])."""
        bucket = self._bucket
        bucket.surveys -= 1  # the next one takes the place of the one before
        self._owner.forget_nbytes()
        bucket.found = replace(bucket.found, trouble=f"no plan yet: {why}")  # other shapes may come now
        yield from self._survey()
        bucket.found = replace(bucket.found, trouble="")

    def _go_back_to(self, counted: Within, budget: int) -> Waiting:
        """Has steps run under a plan that was counted before."""
        bucket, plans = self._bucket, self._bucket.found.plans
        if counted.plan is None or counted.plan is bucket.found.plan:
            return
        self._use(counted.plan, budget)
        facts = counted.reached_nbytes, counted.fragmented_nbytes
        bucket.found = replace(bucket.found, reached_nbytes=facts[0], fragmented_nbytes=facts[1], plans=plans)
        yield from self._step()
        self._time_from_here()

    def _take_as_kept(self) -> None:
        """Takes back that the budget is not kept, as a step was counted that keeps it."""
        bucket = self._bucket
        if bucket.is_over:
            bucket.is_over, bucket.found = False, replace(bucket.found, trouble="")

    def _say_over(self, budget: int) -> None:
        """Says that the budget is not kept, and that no plan is known which would keep it."""
        bucket, owner = self._bucket, self._owner
        reached, plan = bucket.found.reached_nbytes, bucket.found.plan
        assert plan is not None
        holes = f", {size(bucket.found.fragmented_nbytes)} of it fragmented" if bucket.found.fragmented_nbytes else ""
        said = (
            f"training within {size(budget)} ({budget} bytes) of {owner.of} memory was asked for, but of all plans "
            f"that were tried, the one that takes the least has reached {reached} bytes ({size(reached)}{holes}). Pass "
            f"that budget, which is the smallest that may fit, allow more, or train on smaller batches."
        )
        if owner.strict:
            self._refuse(BudgetError(said, reached, plan.seconds, plan))
            return
        trouble = f"the budget is not kept: the least that a plan has reached is {size(reached)} ({reached} bytes)"
        bucket.found = replace(bucket.found, trouble=trouble)
        if not bucket.is_over:
            bucket.is_over = True
            warnings.warn(said, stacklevel=2)

    def _say_refused(self, error: BudgetError, is_first: bool) -> None:
        """No plan was found that keeps the budget, and a step under the leanest one has not kept it either."""
        bucket, owner = self._bucket, self._owner
        reached, plain = bucket.found.reached_nbytes, bucket.found.plain_nbytes
        smallest = min(reached, plain or reached)
        if 0 < smallest != error.smallest_nbytes:
            but = "A" if smallest < error.smallest_nbytes else f"But pass {smallest} bytes: a"
            said = f"{error} {but} step under the leanest plan has reached {reached} bytes ({size(reached)})."
            error = BudgetError(said, smallest, error.seconds, error.plan)
        if owner.overflowed:
            said = f"{error} And {owner.overflowed}: make room there, or name another folder."
            error = BudgetError(said, error.smallest_nbytes, error.seconds, error.plan)
        if is_first or owner.strict:
            if is_first:
                bucket.plan = None
                bucket.found = replace(bucket.found, plan=None, planned_nbytes=0, reached_nbytes=0, plans=0)
                self._wait_under(None)
            self._refuse(error)
            return
        bucket.found = replace(bucket.found, trouble=f"no plan fits {bucket.inputs}: the leanest one is used")
        warnings.warn(str(error), stacklevel=2)

    def _refuse(self, error: BudgetError) -> None:
        """Raises an error, or has all ranks raise it together."""
        if self._owner.agreement is None:
            raise BatchTooLargeError(error) from None
        self._owner.agreement.refuse(error)

    def _use(self, plan: Plan, budget: int = 0) -> None:
        bucket, owner = self._bucket, self._owner
        if bucket.plan is not None and bucket.plan.unknown:
            plan = plan.united(bucket.plan)  # steps of this shape take one branch or the other
        bucket.found = replace(
            bucket.found,
            budget_nbytes=budget or plan.budget,
            plain_nbytes=bucket.found.plain_nbytes or plan.plain_peak_nbytes,
            planned_nbytes=plan.peak_nbytes,
            plans=bucket.found.plans + 1,
            plain_seconds=self._told_plain_seconds or bucket.found.plain_seconds,
            seconds=0.0,
            measured_passes=owner.cycles,
            measured_seconds=self._spent,
            plan=plan,
        )
        policy = owner.guarded(bucket, plan, budget or plan.budget)
        bucket.plan, owner.has_planned = plan, True
        self._run(bucket, policy)

    def _count_derived(self) -> Waiting:
        """Counts a step of a shape that is larger than the profiled ones, and leaves more room until it fits."""
        bucket, owner = self._bucket, self._owner
        largest = owner.buckets.largest()
        assert largest is not None and largest.planner is not None
        budget = owner.nbytes_of(largest.plain_nbytes)
        times = size_ratio(largest.signature, bucket.signature)
        for number in range(MOST_PLANS + 1):
            nbytes = int((budget - bucket.margin) / times) if number < MOST_PLANS else 0
            plan = largest.planner.at_most(nbytes)
            planned = plan.peak_nbytes if times == math.inf else int(plan.peak_nbytes * times)
            found = replace(bucket.found, budget_nbytes=budget, planned_nbytes=planned, plan=plan)
            bucket.found = replace(found, plans=found.plans + 1)
            owner.use_alike(bucket, plan)
            if not (yield from self._count()):
                why = "no step of this shape could be counted"
                bucket.found = replace(bucket.found, reached_nbytes=0, trouble=bucket.found.trouble or why)
                return
            over = bucket.found.reached_nbytes - budget
            is_leanest = plan.peak_nbytes <= largest.planner.at_most(0).peak_nbytes
            if over > 0 and is_leanest and owner.strict:
                said = f"steps of {bucket.inputs} were asked for within {budget} bytes, but took {budget + over}."
                raise BatchTooLargeError(BudgetError(said, budget + over, plan.seconds, plan))
            if over <= 0:
                self._take_as_kept()
                return
            if is_leanest:
                self._say_over(budget)
                return
            bucket.margin = max(bucket.margin + over + (over >> 3), budget - planned + 1)

    def _count(self) -> Generator[Awaited, bool | None, bool]:
        """Proves the recipes of a plan in one step, and counts the peak of another. Returns whether it was counted."""
        bucket, session = self._bucket, self._bucket.session
        assert session is not None
        lines: list[list[Event]] = []
        # A Session under an empty plan becomes idle, so its steps are plain ones.
        is_plain = bucket.plan is not None and bucket.plan.is_empty and not may_compile()
        prepare = partial(self._run_unhooked, bucket) if is_plain else lambda: None
        yield from self._record(Births, lines, prepare=prepare, proves=True)
        if is_plain:
            self._owner.go_back(bucket, session)
        self._time_from_here()
        if lines:
            line = yield from self._read(lines[0])
            reached, fragmented = line.peak_nbytes, 0
            if self._owner.of == "reserved":
                taken = reserved_by(line.changes)
                reached, fragmented = taken.reserved_nbytes, taken.fragmented_nbytes
            bucket.found = replace(bucket.found, reached_nbytes=reached, fragmented_nbytes=fragmented)
        return bool(lines)

    def _improve(self) -> Waiting:
        """Goes on with the search while steps run under the first plan that was found, and takes a faster one."""
        bucket, owner = self._bucket, self._owner
        planner, first = bucket.planner, bucket.plan
        if planner is None or first is None or first.is_empty or planner.is_searched:
            return
        yield from self._steps_until(planner.search())
        bucket.found = replace(bucket.found, measured_passes=owner.cycles, measured_seconds=self._spent)
        budget = owner.nbytes_of(planner.profile.plain_peak_nbytes)
        best = planner.plan(max(first.peak_nbytes, budget - bucket.margin))
        if best.seconds < first.seconds - WORTH * planner.profile.seconds and bucket.plan is first:
            yield from self._plan_within(bucket.found)

    def _time_from_here(self) -> None:
        """From now on steps are timed, unless those of other shapes come between them: then they may never settle."""
        self._times = [] if len(self._owner.buckets) == 1 else None

    def _time(self) -> Waiting:
        """Times some steps: while the kinds of passes are noted, which takes time, and then as they will stay."""
        for _ in range(TIMED_STEPS - FINALLY_TIMED):
            yield from self._step()
        bucket, self._times = self._bucket, []
        self._owner.end_order()
        if bucket.session is not None:
            bucket.session.settle_soon()
        for _ in range(FINALLY_TIMED):
            yield from self._step()

    def _record(
        self,
        watcher: Callable[[], Births],
        lines: list[list[Event]],
        is_any: bool = False,
        prepare: Callable[[], None] = lambda: None,
        wait: Callable[[Bucket], None] | None = None,
        proves: bool = False,
        counts_plain: bool = False,
    ) -> Waiting:
        """Records a step of this bucket, or of any, and adds it to ``lines`` (Note: [where a step begins]).

        Args:
            watcher: makes the watcher of the recorded step.
            lines: the outermost events of the record are added to it.
            wait: is called after the recorded step. Where shares are bounded, another step runs then, because the end
                of the profiler takes as long as some small steps.
            proves: whether a step of this bucket has to come before it, in which what is proven on first use is proven.
        """
        while True:
            prepare()
            self._is_recording = self._has_recorded = False
            has_raised = yield from self._record_once(watcher, lines, is_any, wait, proves, counts_plain)
            if has_raised:  # Note: [steps that raise]
                yield "safe"
                self._owner.recording.give_way()
            if lines or not (has_raised or self._owner.recording.gave_way):
                return
            self._owner.recording.gave_way = False
            self._owner.watch(None)  # and once more when the program has profiled what it wanted to

    @property
    def _is_full(self) -> bool:
        """Whether the last step took what those of its kind take (Note: [accumulated gradients])."""
        owner = self._owner
        return owner.adds_up or not owner.may_add_up or (owner.period or 1) > 1

    def _record_plain(self, bucket: Bucket) -> Generator[Awaited, bool | None, bool]:
        """Records a plain step behind the recorded one, so that its peak is known. Returns whether it has raised."""
        owner, session = self._owner, bucket.session
        assert session is not None
        owner.recording.begin_plain()
        self._run_unhooked(bucket)
        has_raised = yield from self._has_raised()
        self._used = 0.0
        self._plain_of = owner.last if self._is_full and not has_raised else None
        owner.go_back(bucket, session)
        return has_raised

    def _record_once(
        self,
        watcher: Callable[[], Births],
        lines: list[list[Event]],
        is_any: bool,
        wait: Callable[[Bucket], None] | None,
        proves: bool,
        counts_plain: bool,
    ) -> Generator[Awaited, bool | None, bool]:
        """Does so if no step raises meanwhile. Returns whether one has."""
        owner, recording = self._owner, self._owner.recording
        moved = refused = 0
        while not recording.is_running:
            yield "safe"
            if not owner.is_steady:
                moved += 1
                if moved > MOST_MOVED:
                    return False
                yield "cycle"
            elif not recording.start(insists=refused > MOST_REFUSED):
                refused += 1
                yield "cycle"  # another profiler runs
        while owner.phase:  # the first passes of a step may leave to the others what they have made
            if (yield "outcome"):
                return True
        for _ in range(MOST_RECORDED):
            if (yield from self._has_raised()):
                return True
            if owner.last is self._bucket or not proves:
                break
        alone = tried = others = 0
        while others < MOST_RECORDED:
            if not recording.is_running:
                return False  # Note: [one thread] in recording.py
            recording.begin_step()
            self._is_recording = True
            told = watcher()
            owner.watch(told)
            self._recorded = {}
            if (yield from self._has_raised(self._recorded)):
                return True
            owner.watch(None)
            told.end_step()
            is_own = owner.last is self._bucket if not is_any else self._is_as_large(owner.last, tried)
            if self._is_for_others:
                is_own = owner.last is not None and owner.helps(owner.last)
            is_full = self._is_full
            alone += is_own and not is_full
            tried, others = tried + 1, 0 if is_own else others + 1
            if is_own and (is_full or alone > MOST_ALONE):
                self._spent += told.spent if isinstance(told, Survey) else 0.0
                self._is_recording, self._has_recorded = False, True
                recorded, is_followed = owner.last, counts_plain and not may_compile()
                assert recorded is not None
                has_raised = is_followed and (yield from self._record_plain(recorded))
                if has_raised and self._unusual < MOST_SURVEYED - 1:
                    self._unusual += 1
                    return True
                recording.end_step()
                if wait is not None:
                    wait(recorded)
                    if math.isfinite(self._share) and not is_followed:
                        yield from self._step()
                yield "safe"
                began = clock()
                with uncollected():
                    events = recording.stop()
                self._used = clock() - began
                self._spent += self._used
                lines += [] if events is None else [events]
                return False
        yield "safe"
        recording.close()
        recording.listen()
        return False

"""Facts about a model's step that outlive the Session that learned them, so a Session for each step is fine.

Note: [sizes that matter]
    Each tensor that a Session looks at costs it some ten microseconds, whatever the tensor's size. So small tensors are
    kept as they are, where that changes little: those below the largest power of two, from 16 to 256 KiB, below which
    no more than a fiftieth of the saved bytes lie. Where all that a step saves takes less than 64 MiB, which is less
    than the process takes before it trains, time counts more than bytes: what is below 64 KiB is kept, up to half of
    the bytes may lie below the chosen size, and nothing is remade. The sizes are counted in the first step, so the
    choice depends on the model and its input alone, and is the same on every machine. When a step saves four times as
    much or as little as that one did, the choice is made anew.

Note: [idle Sessions]
    When a fixed policy has said Keep of everything in two equal steps, or has made nothing smaller, because the program
    holds it all or no codec takes it (and nothing was compiled, because Dynamo compiles anew where hooks differ), or
    two equal steps that save little could be made smaller by less than a fiftieth, there is nothing to do: the Session
    takes its observer and its module hooks away, and holds what is saved with its version and nothing else. It counts
    the tensors and their bytes. After a step that has saved others it learns anew, and in one of 64 steps it looks
    again in any case. Passes that come in turn, as those of a critic and a generator, are known by what each saves.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from backstash.capture.worth import Worth
from backstash.saved import MIN_NBYTES
from backstash.stash.accounts import Step

if TYPE_CHECKING:
    from backstash.capture.names import KnownNode

LARGEST = 256 << 10
"""Tensors from this size on are looked at in any case."""

SHARE = 50
"""The tensors that are kept for their size alone have at most one in so many of the saved bytes."""

LITTLE = 64 << 20
"""Bytes of a whole step below which time counts more than bytes."""

SHARE_OF_LITTLE = 2
"""The same as SHARE in such a step."""

SMALLEST_OF_LITTLE = 64 << 10
"""The same as MIN_NBYTES in such a step."""

LOOK_AGAIN = 64
"""An idle Session looks again in one of so many steps: the numbers, or what the program holds itself, may be others."""

MANY_NODES, MOST_NODES = 1 << 16, 1 << 19
"""How many nodes are known at most: see Limit."""

QUIET_STEPS = 2
"""Equal steps without anything to do after which a Session is idle."""

MOST_QUIET = 8
"""How many steps without anything to do are told apart by what they save."""

EQUAL_PASSES, MOST_EQUAL_PASSES = 4, 256
"""After how many equal passes one is written down (replay/), at first and at most."""

MOST_KINDS, MOST_SCRIPTS = 256, 16
"""How many kinds of passes are told apart, and how many scripts there are. What was not met for the longest time is
forgotten first."""

HISTORIES = (16, 8, 4, 2, 1)
"""How many passes of a kind are looked back at to tell what the next one saves, the longest first."""

SURE, LONG = 4, 64
"""How many times as often as not the same has to come after a course of passes to be foretold, and after how many times
what was long ago counts half."""

MOST_EXPECTED, MOST_VARIANTS, MOST_LOST = 256, 16, 8
"""For how many courses of passes of a kind it is kept what came after them, how many passes that differ are told apart,
and after how many passes in a row that were given back a script is forgotten."""


Counted = tuple[int, int, int]
"""What a pass has saved: how many tensors, their bytes, and a sum that tells by which nodes, as Forward.counted."""


class Limit:
    """How much is remembered of the passes of a model at most.

    What passes have taught that do not come again is forgotten when it is too much. But a pass that has more than that
    by itself would be forgotten each time before it comes again, and nothing would ever be learned of it. So the limit
    is doubled when it is reached for the first time, or twice in one pass.
    """

    __slots__ = ("_last", "_many", "_most")

    def __init__(self, many: int, most: int) -> None:
        self._many, self._most = many, most
        self._last: int | None = None

    def is_reached(self, number: int, passes: int) -> bool:
        """Whether all has to be forgotten.

        Args:
            number: how many things are remembered.
            passes: how many passes there were before this one.
        """
        if number < self._many:
            return False
        is_long, self._last = self._last in (None, passes), passes
        if is_long and 2 * self._many <= self._most:
            self._many *= 2
            return False
        return True


class WrittenPass(NamedTuple):
    """A pass that was written down, or why it could not be.

    Attributes:
        script, read: the script, and the same as the interpreter has read it; None where none was written.
        step: the accounts of the pass.
        revision: of the policy then.
        refusal: why there is none.
    """

    script: Any = None
    read: Any = None
    step: Any = None
    revision: object | None = None
    refusal: str = ""


class Passes:
    """What is known of passes that begin alike and save as much as each other.

    Args:
        counted: what each has saved.
        needed: how many there have to be until one is written down.

    Attributes:
        script, read, step, revision, refusal: of the latest one that was written down, as in WrittenPass.
        equal: how many there were since a script was of no use, if all did nothing out of the ordinary.
        lost: how many passes in a row were given back.
        is_stale: whether what the script says of a value is no longer so.
        since: how many passes have run the script since one went the long way.
        runs, misses: how many passes have begun with a script, and how many of these were given back.
    """

    __slots__ = (
        "counted",
        "equal",
        "is_stale",
        "lost",
        "misses",
        "needed",
        "read",
        "refusal",
        "revision",
        "runs",
        "script",
        "since",
        "step",
    )

    def __init__(self, counted: Counted, needed: int) -> None:
        self.script: Any = None
        self.read: Any = None
        self.counted = counted
        self.equal, self.needed, self.since, self.misses, self.runs = 0, needed, 0, 0, 0
        self.refusal, self.is_stale, self.lost = "", False, 0
        self.step: Any = None
        self.revision: object | None = None

    def take(self, written: WrittenPass) -> None:
        """One of the passes was written down, or could not be."""
        if written.script is None:
            self.forget()
        else:
            self.since, self.is_stale = 0, False
        self.script, self.read, self.step, self.revision, self.refusal = written

    def clear(self) -> None:
        """There is no script any more."""
        self.script = self.read = self.step = None
        self.equal, self.since, self.is_stale, self.lost = 0, 0, False, 0

    def forget(self) -> None:
        """The passes differ: it takes twice as many equal ones until the next is written down."""
        self.clear()
        self.needed = min(max(EQUAL_PASSES, 2 * self.needed), MOST_EQUAL_PASSES)


class Expected:
    """What came after some passes of a kind, one after the other.

    Attributes:
        passes: what came.
    """

    __slots__ = ("_right", "_wrong", "passes")

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self._right = self._wrong = 0

    @property
    def is_sure(self) -> bool:
        """Whether it comes again, as far as can be told."""
        return self._right >= SURE * self._wrong

    def add(self, passes: Passes) -> None:
        """These came this time."""
        if passes is self.passes:
            self._right += 1
        elif self._wrong < self._right:
            self._wrong += 1
        else:
            self.passes, self._right, self._wrong = passes, 0, 1
        if self._right + self._wrong > LONG:  # what is long past counts less
            self._right //= 2
            self._wrong //= 2


class Kind:
    """Passes that begin alike (Note: [kinds of passes]).

    Attributes:
        variants: those that were met, by what they save; the latest one is at the end.
    """

    __slots__ = ("_expected", "_history", "variants")

    def __init__(self) -> None:
        self.variants: dict[Counted, Passes] = {}
        self._expected: dict[tuple[Counted, ...], Expected] = {}
        self._history: tuple[Counted, ...] = ()

    def _courses(self) -> list[tuple[Counted, ...]]:
        """The courses of the latest passes, the longest first."""
        history = self._history
        return [history[len(history) - each :] for each in HISTORIES if each <= len(history)]

    def next_passes(self) -> Passes | None:
        """What the next pass is one of; None if that cannot be told."""
        for course in self._courses():
            expected = self._expected.get(course)
            if expected is not None and expected.is_sure:
                return expected.passes
        return None

    def add(self, counted: Counted, needed: int) -> Passes:
        """A pass is over; returns what is known of those that are like it.

        Args:
            counted: what it has saved.
            needed: how many equal ones there have to be if it is the first one.
        """
        passes = self.variants.pop(counted, None)
        is_new = passes is None
        if passes is None:
            passes = Passes(counted, needed)
        self.variants[counted] = passes
        if len(self.variants) > MOST_VARIANTS:
            del self.variants[next(iter(self.variants))]
            self._expected.clear()
        elif len(self._expected) > MOST_EXPECTED:
            self._expected.clear()
        for course in self._courses():
            expected = self._expected.get(course)
            if expected is None:
                self._expected[course] = Expected(passes)
            else:
                expected.add(passes)
        self._history = (*self._history, counted)[-HISTORIES[0] :]
        if is_new:  # what comes for the first time may come again
            self._expected[(counted,)] = Expected(passes)
        return passes


class Learned:
    """What is known of the steps of one model under one policy.

    Note: [kinds of passes]
        Batches have different lengths, and a generator's pass comes after a discriminator's. So passes are told apart
        by what they begin with, the module that is called, the shapes and dtypes of what it is given, and the pass's
        place in the step where a plan tells the passes of a step apart. Passes that begin alike may still differ:
        weights are frozen in turn, or a penalty is added to every fourth loss. What such a pass saves in all is known
        when it is over, and training is a loop, so what comes next is told from what came after the same passes before,
        as processors foretell branches: of the courses of the latest 16, 8, 4, 2 and 1 passes of the kind, the longest
        one counts that was met and was nearly always right. Each variant has a script of its own. A pass that was
        foretold wrongly goes on the long way from where it differs, and the script stays. It is forgotten where a pass
        does not follow it and saves the same, or none has followed it for long.

    Attributes:
        begins_early: whether a pass has saved something after a backward pass before any module was called.
        assigns_data: whether a step has assigned the ``.data`` of a tensor that autograd had saved. An idle Session
            does not see that (Note: [assigned data] in docs/understand/hazards.md).
        nodes: what is known of the tensors that nodes save, by module path, type of node and number.
        limit: of the nodes.
        noting: what the tape has learned of the calls of functions; None for nothing yet.
        forward_passes: how many there were.
        min_nbytes: tensors smaller than this are kept; None where this was not decided yet.
        saves_little: whether all that a step saves is so little that time counts more.
        counted: how many tensors the last step has saved, and their bytes.
        step: the accounts of the last step that was not idle.
        peak_nbytes: the most bytes that such a step has held on the device.
        worth: whether what Sessions do is worth their time.
        passes: what is known of passes like the latest one.
        runs: whether the latest pass runs its script, to the end unless it is given back.
        runs_elsewhere: whether a module was called with grad mode on a thread that has no Session.
    """

    __slots__ = (
        "__weakref__",
        "_chosen_of",
        "_equal_passes",
        "_given_back",
        "_kind",
        "_kinds",
        "_needed",
        "_numbers",
        "_quiet",
        "_quiet_steps",
        "_until_look",
        "_written",
        "assigns_data",
        "begins_early",
        "counted",
        "forward_passes",
        "limit",
        "min_nbytes",
        "nodes",
        "noting",
        "passes",
        "peak_nbytes",
        "runs",
        "runs_elsewhere",
        "saves_little",
        "step",
        "worth",
    )

    def __init__(self) -> None:
        self.assigns_data = self.begins_early = self.runs_elsewhere = False
        self.nodes: dict[tuple[str, type, int], tuple[KnownNode, ...]] = {}
        self.limit = Limit(MANY_NODES, MOST_NODES)
        self.noting: Any = None
        self.forward_passes = 0
        self.min_nbytes: int | None = None
        self.saves_little = False
        self._chosen_of = 0  # bytes that the step has saved of which the size was chosen
        self.counted = (0, 0)
        self.step = Step()
        self.peak_nbytes = 0
        self._quiet: dict[tuple[int, int], None] = {}  # what steps have saved in which there was nothing to do
        self._quiet_steps = 0
        self._needed = QUIET_STEPS
        self._until_look = LOOK_AGAIN
        self.worth = Worth()
        self._equal_passes = EQUAL_PASSES
        self._kinds: dict[Hashable, Kind] = {}  # the latest one at the end
        self._kind = Kind()  # of the latest pass
        self._numbers: dict[int, tuple[weakref.ref[nn.Module], type, int]] = {}  # of what passes begin with, by its id
        self.runs = False
        self._given_back: Counted | None = None  # what it had saved when it was given back
        self._written: WrittenPass | None = None  # it was written down
        self.passes = self.begin_pass(None)

    def number_of(self, module: nn.Module) -> int:
        """A number for the module that a pass begins with: one that is gone gives its own to the next of its type.

        Libraries wrap a model in a new module for each call, as solvers of differential equations do.
        """
        known = self._numbers.get(id(module))
        if known is None or known[0]() is not module:
            gone = (key for key, (each, of, _) in self._numbers.items() if each() is None and of is type(module))
            heir = self._numbers.pop(next(gone, 0), None)  # no module has that id
            number = next(_count) if heir is None else heir[2]
            known = self._numbers[id(module)] = weakref.ref(module), type(module), number
        return known[2]

    def begin_pass(self, kind: Hashable) -> Passes:
        """A pass of that kind begins (Note: [kinds of passes]); returns what is known of what it seems to be."""
        if self.runs:
            if self._kinds.get(kind) is self._kind and len(self._kind.variants) == 1:
                self.runs = False
                return self.passes  # there is nothing to learn
            self._end_pass(self.passes.counted)
        elif self._given_back is not None:
            self._end_pass(self._given_back)
        self._kind = self._kinds.pop(kind) if kind in self._kinds else Kind()
        self._kinds[kind] = self._kind
        if len(self._kinds) > MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        self.passes = self._kind.next_passes() or Passes((0, 0, 0), self._equal_passes)
        return self.passes

    def give_back(self, counted: Counted) -> None:
        """It goes on the long way: it is not what it seemed to be, or its script is of no use."""
        self.runs, self._given_back = False, counted
        self.passes.misses += 1

    def drop_pass(self) -> None:
        """Nothing is learned of it."""
        self.runs, self._given_back, self._written = False, None, None

    def end_pass(self, counted: Counted, is_ordinary: bool) -> None:
        """A pass is over that went the long way, or was given back.

        Args:
            counted: what it has saved on the long way.
            is_ordinary: whether it may be one that repeats itself.
        """
        before = self._given_back or (0, 0, 0)
        counted = before[0] + counted[0], before[1] + counted[1], before[2] + counted[2]
        is_like_others = is_ordinary and counted in self._kind.variants
        self._end_pass(counted)
        self.passes.equal = self.passes.equal + 1 if is_like_others else 0

    def _end_pass(self, counted: Counted) -> None:
        passes, foretold = self._kind.add(counted, self._equal_passes), self.passes
        if self._given_back is not None:
            foretold.lost += 1
            if passes is foretold or foretold.lost >= MOST_LOST:
                foretold.forget()
        elif self.runs:
            foretold.lost = 0
        if self._written is not None:
            passes.take(self._written)
        self.passes = passes
        self.drop_pass()

    def write_down(self, written: WrittenPass) -> None:
        """The pass in progress was written down, or could not be.

        What it is one of is known when it is over: something may be saved behind its end. Where there are too many
        scripts, the oldest are forgotten.
        """
        self._written = written
        if written.script is None:
            return
        self._equal_passes = EQUAL_PASSES
        all_passes = (each for kind in self._kinds.values() for each in kind.variants.values())
        with_script = [each for each in all_passes if each.script is not None]
        for each in with_script[: len(with_script) + 1 - MOST_SCRIPTS]:
            each.clear()

    @property
    def settles_soon(self) -> bool:
        """Whether the next pass is written down in any case."""
        return self._equal_passes == 0

    def settle_soon(self) -> None:
        """The next pass is written down (replay/) without waiting for equal ones, whatever its kind is."""
        self._equal_passes = 0
        for kind in self._kinds.values():
            for each in kind.variants.values():
                each.needed = 0

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do (Note: [idle Sessions]), or nothing that is worth its time (worth.py)."""
        return not self.assigns_data and (self._quiet_steps >= self._needed or self.worth.is_idle)

    def end_step(self, counted: tuple[int, int], does_nothing: bool, saved_nbytes: int, freed_nbytes: int) -> None:
        """A step is over that was not idle.

        Args:
            counted: how many tensors it has saved, and their bytes.
            does_nothing: whether the policy is fixed and has said Keep of all of them, or nothing became smaller, and
                nothing was compiled.
            saved_nbytes: bytes of all values that it has saved, without parameters.
            freed_nbytes: bytes that plain PyTorch would have held, and the Session has not, or may free early.
        """
        if not counted[0]:  # an evaluation
            return
        if self.min_nbytes is not None and not self._chosen_of <= 4 * saved_nbytes <= 16 * self._chosen_of:
            self.min_nbytes, self.saves_little = None, False
        is_quiet = does_nothing or (self.saves_little and SHARE * freed_nbytes < saved_nbytes)
        was_quiet = counted in self._quiet
        self._quiet.pop(counted, None)
        if is_quiet:
            self._quiet[counted] = None
        if len(self._quiet) > MOST_QUIET:
            del self._quiet[next(iter(self._quiet))]
        self._quiet_steps = self._quiet_steps + 1 if is_quiet and was_quiet else int(is_quiet)
        self._until_look = LOOK_AGAIN
        self.counted = counted

    def end_idle_step(self, counted: tuple[int, int]) -> None:
        """A step is over in which the tensors were only counted."""
        if not counted[0]:
            return
        if counted != self.counted and counted not in self._quiet:
            self._quiet_steps = 0
            self._needed = min(2 * self._needed, 64)  # steps differ: it takes longer to be sure again
            self.counted = counted
            self.worth.end_other_step()
            return
        self._until_look -= 1
        if not self._until_look:
            self._quiet_steps = min(self._quiet_steps, self._needed - 1)
        self.worth.end_idle_step(looks_again=not self._until_look)

    def choose_min_nbytes(self, sizes: Iterable[int], saved_nbytes: int) -> None:
        """Decide from which size on tensors are looked at, unless that was decided (Note: [sizes that matter]).

        Args:
            sizes: of the values that a step has saved, but for those below MIN_NBYTES.
            saved_nbytes: bytes of all values that it has saved.
        """
        if self.min_nbytes is not None:
            return
        sizes = list(sizes)
        total, chosen = sum(sizes), LARGEST
        self.saves_little = total < LITTLE
        share, smallest = SHARE, MIN_NBYTES
        if self.saves_little:
            share, smallest = SHARE_OF_LITTLE, SMALLEST_OF_LITTLE
        while chosen > smallest and share * sum(size for size in sizes if size < chosen) > total:
            chosen //= 2
        self.min_nbytes, self._chosen_of = chosen, saved_nbytes


MOST_SETTINGS = 16
"""For how many settings it is kept what was learned of a model; then the oldest is forgotten."""

_by_module: weakref.WeakKeyDictionary[nn.Module, dict[str, Learned]] = weakref.WeakKeyDictionary()


def learned_of(model: nn.Module, settings: str, anew: bool = False) -> Learned:
    """What was learned of a model by all Sessions with the same settings; it goes with the model.

    Args:
        model, settings: tell it.
        anew: forget what they have learned before.
    """
    by_settings = _by_module.setdefault(model, {})
    if anew:
        by_settings.pop(settings, None)
    learned = by_settings.get(settings)
    if learned is None:
        if len(by_settings) >= MOST_SETTINGS:
            del by_settings[next(iter(by_settings))]
        learned = by_settings[settings] = Learned()
    return learned


_numbers: dict[int, tuple[weakref.ref[object], int]] = {}
"""Of policies, by their identity: two that are equal may still decide otherwise."""

_count = itertools.count()


def name_of(policy: object) -> str:
    """What tells a policy from those that decide otherwise: what it prints as, unless that is its address in memory.

    Another policy may have the same address later, so such a one gets a number, and what was learned under it serves
    no other object.
    """
    text = repr(policy)
    return text if " at 0x" not in text else f"{text} {_number_of(policy)}"


def _number_of(policy: object) -> int:
    key = id(policy)
    known = _numbers.get(key)
    if known is not None and known[0]() is policy:
        return known[1]

    def forget(gone: weakref.ref[object]) -> None:
        if key in _numbers and _numbers[key][0] is gone:
            del _numbers[key]

    number = next(_count)
    with contextlib.suppress(TypeError):  # it cannot be referred to weakly
        _numbers[key] = weakref.ref(policy, forget), number
    return number

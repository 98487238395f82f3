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
    again in any case.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from backstash.capture.worth import Worth
from backstash.stash.accounts import Step

if TYPE_CHECKING:
    from backstash.capture.names import KnownNode

SMALLEST = 16 << 10
"""Tensors below this are always kept unless a Session is told otherwise."""

LARGEST = 256 << 10
"""Tensors from this size on are looked at in any case."""

SHARE = 50
"""The tensors that are kept for their size alone have at most one in so many of the saved bytes."""

LITTLE = 64 << 20
"""Bytes of a whole step below which time counts more than bytes."""

SHARE_OF_LITTLE = 2
"""The same as SHARE in such a step."""

SMALLEST_OF_LITTLE = 64 << 10
"""The same as SMALLEST in such a step."""

LOOK_AGAIN = 64
"""An idle Session looks again in one of so many steps: the numbers, or what the program holds itself, may be others."""

MANY_NODES, MOST_NODES = 1 << 16, 1 << 19
"""How many nodes are known at most: see Limit."""

QUIET_STEPS = 2
"""Equal steps without anything to do after which a Session is idle."""

EQUAL_PASSES, MOST_EQUAL_PASSES = 4, 256
"""After how many equal passes one is written down (replay/), at first and at most."""


MOST_KINDS, MOST_SCRIPTS = 256, 16
"""How many kinds of passes are told apart, and how many of them have a script. The one that was not met for the longest
time is forgotten first."""


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


class Passes:
    """What is known of one kind of passes of a model under a policy, which may be the same again and again.

    Args:
        needed: how many equal ones there have to be.

    Attributes:
        script, read: the script, and the same as the interpreter has read it; None where none was written.
        counted: how many tensors the latest pass has saved, and their bytes.
        equal: how many equal passes there were.
        needed: how many there have to be.
        refusal: why the latest one could not be written down.
        since: how many passes have run the script since one went the long way.
        runs, misses: how many passes have begun with a script, and how many of these were given back.
        step: the accounts of the pass that was written down.
        revision: of the policy then.
    """

    __slots__ = (
        "counted",
        "equal",
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

    def __init__(self, needed: int) -> None:
        self.script: Any = None
        self.read: Any = None
        self.counted = (0, 0)
        self.equal, self.needed, self.since, self.misses, self.runs = 0, needed, 0, 0, 0
        self.refusal = ""
        self.step: Any = None
        self.revision: object | None = None

    def forget(self) -> None:
        """The passes differ: it takes twice as many equal ones until the next is written down."""
        self.script = self.read = None
        self.equal, self.since = 0, 0
        self.needed = min(max(EQUAL_PASSES, 2 * self.needed), MOST_EQUAL_PASSES)


class Learned:
    """What is known of the steps of one model under one policy.

    Note: [kinds of passes]
        Batches have different lengths, and a generator's pass comes after a discriminator's. So passes are told apart
        by what they begin with, the module that is called and the shapes and dtypes of what it is given, and each kind
        has a script of its own. Where passes that begin alike differ, the script is of no use, and is written anew
        after more and more equal ones.

    Attributes:
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
        passes: what is known of the kind of forward passes of which the latest one is.
        runs_elsewhere: whether a module was called with grad mode on a thread that has no Session.
    """

    __slots__ = (
        "__weakref__",
        "_chosen_of",
        "_equal_passes",
        "_kinds",
        "_needed",
        "_quiet_steps",
        "_until_look",
        "assigns_data",
        "counted",
        "forward_passes",
        "limit",
        "min_nbytes",
        "nodes",
        "noting",
        "passes",
        "peak_nbytes",
        "runs_elsewhere",
        "saves_little",
        "step",
        "worth",
    )

    def __init__(self) -> None:
        self.assigns_data = self.runs_elsewhere = False
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
        self._quiet_steps = 0
        self._needed = QUIET_STEPS
        self._until_look = LOOK_AGAIN
        self.worth = Worth()
        self._equal_passes = EQUAL_PASSES
        self._kinds: dict[Hashable, Passes] = {}  # the latest one at the end
        self.passes = self.begin_pass(None)

    def begin_pass(self, kind: Hashable) -> Passes:
        """A pass of that kind begins (Note: [kinds of passes]); returns what is known of them."""
        known = self._kinds.pop(kind) if kind in self._kinds else Passes(self._equal_passes)
        self.passes = self._kinds[kind] = known
        if len(self._kinds) > MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        return known

    def make_room(self) -> None:
        """A pass was written down: the oldest scripts are forgotten where there are too many."""
        self._equal_passes = EQUAL_PASSES
        written = [each for each in self._kinds.values() if each.script is not None]
        for each in written[: len(written) + 1 - MOST_SCRIPTS]:
            each.script = each.read = each.step = None
            each.equal = each.since = 0

    def settle_soon(self) -> None:
        """The next pass is written down (replay/) without waiting for equal ones, whatever its kind is."""
        self._equal_passes = 0
        for each in self._kinds.values():
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
            freed_nbytes: bytes that plain PyTorch would have held, and the Session has not.
        """
        if not counted[0]:  # an evaluation
            return
        if self.min_nbytes is not None and not self._chosen_of <= 4 * saved_nbytes <= 16 * self._chosen_of:
            self.min_nbytes, self.saves_little = None, False
        is_quiet = does_nothing or (self.saves_little and SHARE * freed_nbytes < saved_nbytes)
        equal = is_quiet and counted == self.counted
        self._quiet_steps = self._quiet_steps + 1 if equal else int(is_quiet)
        self._until_look = LOOK_AGAIN
        self.counted = counted

    def end_idle_step(self, counted: tuple[int, int]) -> None:
        """A step is over in which the tensors were only counted."""
        if not counted[0]:
            return
        if counted != self.counted:
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
            sizes: of the values that a step has saved, but for those below SMALLEST.
            saved_nbytes: bytes of all values that it has saved.
        """
        if self.min_nbytes is not None:
            return
        sizes = list(sizes)
        total, chosen = sum(sizes), LARGEST
        self.saves_little = total < LITTLE
        share, smallest = SHARE, SMALLEST
        if self.saves_little:
            share, smallest = SHARE_OF_LITTLE, SMALLEST_OF_LITTLE
        while chosen > smallest and share * sum(size for size in sizes if size < chosen) > total:
            chosen //= 2
        self.min_nbytes, self._chosen_of = chosen, saved_nbytes


MOST_SETTINGS = 16
"""For how many settings it is kept what was learned of a model; then the oldest is forgotten."""

_by_module: weakref.WeakKeyDictionary[nn.Module, dict[str, Learned]] = weakref.WeakKeyDictionary()


def learned_of(model: nn.Module, settings: str) -> Learned:
    """What was learned of a model by all Sessions with the same settings; it goes with the model."""
    by_settings = _by_module.setdefault(model, {})
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

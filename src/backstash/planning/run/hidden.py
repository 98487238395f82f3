"""The policy that moves what the link hides, and keeps, encodes or remakes the rest.

Note: [learning what hides]
    In the first two steps everything is moved, as under the policy ``offload``: so they take the least memory. The
    first one learns and proves, which takes time that no later step takes; the second one is timed. What the device
    waits for the link in it is left out: what is left is how long it computes between the births of values and their
    reads. On an accelerator these are events on the stream that computes, whose times are looked at when they have
    passed; the host waits for nothing. Then it is decided once (measure/hiding.py), from when on the policy answers at
    once, and the store is asked for values at the reads that the decision names: nothing is looked up in an order.

    Values of other shapes are treated as ``lossless`` treats them. If a fourth of a step is of other shapes, the next
    steps are learned from anew, a few times at most.

Note: [reads as timed]
    A value that is remade from a moved one has that read early. So in the timed step no value is remade from more than
    one moved value, as under ``offload``; and those that were stored in it, such as residual sums, are remade later
    only where nothing that is moved is read for it. So what is moved is read when it was read in that step.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from backstash import graphs, policies
from backstash.arguments import check_count, check_word
from backstash.errors import PlanError
from backstash.planning.measure.hiding import Candidate, Hidden, hide, stays_after
from backstash.planning.measure.link import SMALLEST, Link, folder, measured, of_speed
from backstash.planning.model.explain import size
from backstash.planning.model.plan import open_store
from backstash.policies.base import Action, Outcome, Policy, Recompute, no_torch_function
from backstash.policies.exact import Lossless
from backstash.policies.offloading import Offload
from backstash.saved import Need, SavedTensor, TensorSpec
from backstash.stores import Store

TIMED = 2
"""The number of the step that is timed, from 1 on."""

STRANGE = 4
"""If one in so many of the bytes of a step are of values that a decision does not know, it is made anew."""

MOST_DECISIONS = 4
"""So many times at most."""

NOWHERE = of_speed(1e15)
"""The link of the CPU to the memory of the host, which is its own: nothing crosses it."""


@dataclass(frozen=True)
class HiddenMoves:
    """What is decided for the steps of a model. A value is told by its key, and its spec as text.

    Attributes:
        known: the values of the steps that were timed.
        stored: those of them that were stored then, and not remade.
        moved: those that are moved.
        fetches, stays: as Policy has them.
        found: the latest decision as numbers.
        seconds: that the latest timed step computed.
        saved_nbytes: bytes of the values of that step.
    """

    known: frozenset[tuple[str, str]]
    stored: frozenset[tuple[str, str]]
    moved: frozenset[tuple[str, str]]
    fetches: Mapping[str, tuple[str, ...]]
    stays: Mapping[str, frozenset[int]]
    found: Hidden
    seconds: float
    saved_nbytes: int

    def after(self, other: HiddenMoves | None) -> HiddenMoves:
        """Returns this decision with what another one says of the values of other steps."""
        if other is None:
            return self
        both = {key: tuple(dict.fromkeys((*self.fetches.get(key, ()), *keys))) for key, keys in other.fetches.items()}
        return replace(
            self,
            known=self.known | other.known,
            stored=self.stored | (other.stored - self.known),
            moved=self.moved | (other.moved - self.known),
            fetches={**self.fetches, **both},
            stays={**other.stays, **self.stays},
        )

    def __str__(self) -> str:
        count, passage = len(self.found.chosen), self.found.passage
        computed, added, waited = (f"{1e3 * each:.2f} ms" for each in (self.seconds, passage.added, passage.waited))
        return (
            f"{count} values are moved, {size(self.found.nbytes)}, beside {computed} of computation; predicted to add "
            f"{added}, of which {waited} are waits for the link"
        )


@dataclass(eq=False)
class OffloadHidden(Policy):
    """Exact: what the link hides is moved, and the rest is treated as :class:`Lossless` does.

    A value is moved if it leaves before backward begins, and is back before it is read, without the step waiting for
    it (Note: [learning what hides]). The first two steps move everything, and take the time that this takes.

    Args:
        store: name of the store that values are moved to. ``"disk"`` is a file in the system's folder for temporary
            files (see planning/measure/link.py), which is opened for each Session that is not given a store of that
            name.
        nbytes: how many bytes are moved at most, those first that hide best, also if the step has to wait for them;
            None for as many as hide.
        recompute, dense: as in :class:`Lossless`, which chooses the codecs of what is moved as well.
        smallest: values that take fewer bytes stay.
        link: how fast the store is; None to measure it when it is needed first.
        clock: seconds, for a step that does not take real time; None for the device's own.

    Raises:
        PlanError: a number is negative.
    """

    store: str = "host"
    nbytes: int | None = None
    recompute: bool = True
    dense: bool = False
    smallest: int = SMALLEST
    link: Link | None = None
    clock: Callable[[], float] | None = field(default=None, repr=False)

    is_fixed = False
    min_nbytes = None  # the first step decides

    decision: HiddenMoves | None = field(default=None, init=False, repr=False)
    _lossless: Lossless = field(init=False, repr=False)
    _moving: Offload = field(init=False, repr=False)
    _timing: StepTiming | None = field(default=None, init=False, repr=False)
    _steps: int = field(default=0, init=False, repr=False)
    _decisions: int = field(default=0, init=False, repr=False)
    _moves_anything: bool = field(default=False, init=False, repr=False)
    _before: HiddenMoves | None = field(default=None, init=False, repr=False)
    _strange_nbytes: int = field(default=0, init=False, repr=False)  # that the decision does not know, of this step

    def __post_init__(self) -> None:
        check_word(self.store, "store", "offload_hidden", "host")
        for name, nbytes in (("nbytes", self.nbytes), ("smallest", self.smallest)):
            if isinstance(nbytes, bool) or not isinstance(nbytes, int | None):
                check_count(nbytes, name, "bytes", "offload_hidden")
        if min(self.nbytes or 0, self.smallest) < 0:
            raise PlanError(
                f"offload_hidden was asked for nbytes={self.nbytes} and smallest={self.smallest}, but these are "
                f"numbers of bytes: 0 or more."
            )
        self._lossless = Lossless(recompute=self.recompute, dense=self.dense)
        self._moving = Offload(store=self.store)

    @property
    def recomputes(self) -> bool:  # type: ignore[override]  # read-only here
        """The argument ``recompute``."""
        return self.recompute

    @property
    def revision(self) -> object | None:  # type: ignore[override]  # read-only here
        """The decision; None as long as there is none."""
        return self.decision

    @property
    def fetches(self) -> Mapping[str, tuple[str, ...]] | None:  # type: ignore[override]  # read-only here
        """What is asked for when; None as long as there is no decision."""
        return None if self.decision is None else self.decision.fetches

    @property
    def stays(self) -> Mapping[str, frozenset[int]] | None:  # type: ignore[override]  # read-only here
        """Of what was decided."""
        return None if self.decision is None else self.decision.stays

    @property
    def move_timer(self) -> StepTiming | None:  # type: ignore[override]  # read-only here
        """What times the step, if this is the one that is timed."""
        return self._timing

    @property
    def stores(self) -> Mapping[str, Callable[[], Any]] | None:  # type: ignore[override]  # read-only here
        """What opens the disk, if values are moved to one."""
        return {"disk": lambda: open_store("disk", folder())} if self.store == "disk" else None

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]  # read-only here
        """What was decided."""
        return () if self.decision is None else (str(self.decision),)

    def begin_step(self) -> None:
        """Decides, when the timed step is over and its times are known."""
        if graphs.capture() is not None:  # nothing is timed there
            self._timing = None
        elif self.decision is not None:
            self._forget_if_strange()
        elif self._timing is not None and self._timing.is_whole:
            if self._timing.is_known:
                self._decide(self._timing)
                self._timing, self._steps = None, 0
        else:
            self._steps += self._moves_anything
            self._timing = StepTiming(self.clock) if self._steps >= TIMED - 1 else None
        self._moves_anything = False

    def _forget_if_strange(self) -> None:
        strange, self._strange_nbytes = self._strange_nbytes, 0
        assert self.decision is not None
        if STRANGE * strange > self.decision.saved_nbytes and self._decisions < MOST_DECISIONS:
            self._before, self.decision = self.decision, None

    def _decide(self, timing: StepTiming) -> None:
        self._decisions += 1
        with no_torch_function(), torch.no_grad():
            is_near = timing.device == "cpu" and self.store == "host"
            link = self.link or (NOWHERE if is_near else measured(timing.device))
        self.decision = timing.decided(link, self.nbytes, self.smallest).after(self._before)
        self._strange_nbytes = 0
        for store in timing.stores.values():
            if hasattr(store, "in_flight"):  # who waited for copies sooner than is planned would wait for the link
                store.in_flight = max(store.in_flight, self.decision.found.passage.backlog_nbytes)

    def decide(self, saved: SavedTensor) -> Action:
        """Returns what ``lossless`` says, in the store if the value is moved."""
        return self._placed(saved, self._lossless.decide(saved))

    def decide_together(self, saved: SavedTensor, readers: Sequence[SavedTensor]) -> Action:
        """Likewise."""
        if self._timing is not None:
            self._timing.begin_put(saved)
        return self._placed(saved, self._lossless.decide_together(saved, readers))

    def _placed(self, saved: SavedTensor, action: Action) -> Action:
        if saved.need is Need.SHAPE:
            return action
        decision = self.decision
        if decision is None:
            moves, most = True, 1
        else:
            value = saved.key, str(saved.spec)
            if value not in decision.known:
                self._strange_nbytes += saved.spec.nbytes
            moves = value in decision.moved
            most = int(value in decision.known and value not in decision.stored)  # Note: [reads as timed]
        if isinstance(action, Recompute):
            otherwise = self._moving.moved(saved, action.otherwise) if moves else action.otherwise
            return replace(action, otherwise=otherwise, max_moved=most)
        return self._moving.moved(saved, action) if moves else action

    def observe(self, outcome: Outcome) -> None:
        """Notes whether anything was stored."""
        self._moves_anything = self._moves_anything or outcome.codec is not None


class StepTiming:
    """A step as its moves tell it: when values are born and read, and how long the device computes between.

    Args:
        clock: seconds; None for the device's own time.

    Attributes:
        device: the type of the device that the values are on.
        stores: where values were moved to, by their identity.
        is_whole: whether values were moved and read.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.device = "cpu"
        self.stores: dict[int, Any] = {}
        self.is_whole = False
        self._clock = clock
        self._specs: dict[str, TensorSpec] = {}
        self._marks: list[tuple[str, str, int, Any]] = []  # what happens, the key, bytes, the time or an event

    def _mark(self, what: str, key: str = "", nbytes: int = 0) -> None:
        if self._clock is not None or self.device == "cpu":
            self._marks.append((what, key, nbytes, (self._clock or time.perf_counter)()))
        else:
            event = torch.Event(self.device, enable_timing=True)
            event.record()
            self._marks.append((what, key, nbytes, event))

    def begin_put(self, saved: SavedTensor) -> None:
        """It is decided what becomes of a value."""
        self.device = saved.spec.device.type
        self._specs[saved.key] = saved.spec
        self._mark("begin put", saved.key)

    def put(self, key: str, nbytes: int, store: Store) -> None:
        """As MoveTimer has it."""
        self.stores[id(store)] = store
        self._mark("put", key, nbytes)

    def begin_backward(self) -> None:
        """As MoveTimer has it."""
        self._mark("backward")

    def reach(self, key: str) -> None:
        """As MoveTimer has it."""
        self._mark("reach", key)

    def begin_read(self, key: str) -> None:
        """As MoveTimer has it."""
        self._mark("begin read", key)

    def end_read(self, key: str) -> None:
        """As MoveTimer has it."""
        self.is_whole = True
        self._mark("read", key)

    @property
    def is_known(self) -> bool:
        """Whether the device has come past the last mark."""
        return isinstance(self._marks[-1][3], float) or self._marks[-1][3].query()

    def _computed(self) -> list[float]:
        """For each mark, the seconds that the device has computed until then, without what it waited for the link."""
        first = self._marks[0][3]
        open_puts: dict[str, float] = {}
        now = before = began_read = 0.0
        waited = 0.0
        found = []
        for what, key, _, mark in self._marks:
            now = mark - first if isinstance(mark, float) else first.elapsed_time(mark) / 1e3
            if what == "begin put":
                open_puts[key] = now - waited
            elif what == "put" and key in open_puts:
                waited = now - open_puts.pop(key)
            elif what == "begin read":
                began_read = now - waited
            elif what == "read":
                waited = now - began_read
            before = max(before, now - waited)
            found.append(before)
        return found if found[-1] > 0.0 else [float(at) for at in range(len(found))]  # events that tell no time

    def decided(self, link: Link, nbytes: int | None, smallest: int) -> HiddenMoves:
        """Returns what is decided for steps like this one."""
        computed = self._computed()
        seconds = [after - at for at, after in zip(computed, [*computed[1:], computed[-1]], strict=True)]
        first_backward = next(at for at, mark in enumerate(self._marks) if mark[0] == "backward")
        sizes: Counter[str] = Counter()
        births: dict[str, int] = {}
        reads, asks = defaultdict[str, list[int]](list), dict[str, int]()
        for at, (what, key, moved_nbytes, _) in enumerate(self._marks):
            if what == "put" and at < first_backward:
                sizes[key] += moved_nbytes
                births[key] = at
            elif what == "begin read" and at > first_backward:
                reads[key].append(at)
            elif what == "reach" and at > first_backward:
                asks.setdefault(key, at)
        keys = [key for key in births if reads[key] and key in self._specs and sizes[key] >= smallest]
        candidates = [Candidate(sizes[key], births[key], tuple(reads[key])) for key in keys]
        out, back = link.directions()
        positions = sorted(asks.values())
        found = hide(seconds, candidates, out, back, first_backward, asks=positions, nbytes=nbytes)
        key_at = {at: key for key, at in asks.items()}
        fetches: dict[str, tuple[str, ...]] = {}
        stays: dict[str, frozenset[int]] = {}
        asked = []
        for number, move in zip(found.chosen, found.moves, strict=True):
            asked += [(at, read, keys[number]) for at, read in zip(move.fetches, move.reads, strict=True)]
            stays[keys[number]] = stays_after(candidates[number], move)
        for at, _, key in sorted(asked):
            if at in key_at:
                fetches[key_at[at]] = (*fetches.get(key_at[at], ()), key)
        values = {key: (key, str(spec)) for key, spec in self._specs.items()}
        return HiddenMoves(
            frozenset(values.values()),
            frozenset(values[key] for key in births if key in values),
            frozenset(values[keys[number]] for number in found.chosen),
            fetches,
            stays,
            found,
            sum(seconds),
            sum(spec.nbytes for spec in self._specs.values()),
        )


def offload_hidden(
    store: str = "host",
    nbytes: int | None = None,
    recompute: bool = True,
    dense: bool = False,
    smallest: int = SMALLEST,
    link: Link | None = None,
    clock: Callable[[], float] | None = None,
) -> OffloadHidden:
    """Returns the policy :class:`OffloadHidden`."""
    return OffloadHidden(store, nbytes, recompute, dense, smallest, link, clock)


policies.publish(OffloadHidden=OffloadHidden, offload_hidden=offload_hidden)
policies.register(
    "offload_hidden",
    OffloadHidden,
    is_exact=True,
    does="moves what the link hides behind computing, and treats the rest as lossless does",
    use_when="the device is too small and its link to the host is fast",
)

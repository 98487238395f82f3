"""A plan's decision about one value, as data and as the action that a Session takes for it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from backstash.codecs import Raw
from backstash.codecs.base import label
from backstash.planning.model.problem import LARGEST, Kind
from backstash.planning.model.rounding import codec_named, moved_as
from backstash.policies import Action, Keep, Lossless, Recompute, Stash
from backstash.saved import SavedTensor
from backstash.stash.encode import without_error
from backstash.stash.tables import folded


@dataclass(frozen=True, slots=True)
class Decision:
    """What a plan does with one value.

    Attributes:
        key, module, op, spec, nbytes: as in PlannedValue.
        choice, kind, held_nbytes, error, reason, reserve_nbytes: name and facts of the choice, as in Choice.
        seconds: time that the choice adds to a step.
        has_room: whether its readers may hold it until they are done, because the peak lies elsewhere.
        spare: its number among those that are remade, in this order, when a step holds more than planned (Note: [spare
            ways] in spare.py); 0 if it is not among them.
        in_flight_nbytes: how many bytes of values may be held beside their planes from where it is decided on to where
            the next value is (Note: [drafts] in stash/drafts.py).
        calls: names of the calls that make the value again, if the plan or a guard of it has it remade.
        fetched_with: for a value that is moved, the keys of values with whose first reading it is asked for.
    """

    key: str
    module: str
    op: str
    spec: str
    nbytes: int
    choice: str
    kind: Kind
    held_nbytes: int
    seconds: float
    error: float
    reason: str
    has_room: bool = False
    fetched_with: tuple[str, ...] = ()
    reserve_nbytes: int = 0
    spare: int = 0
    in_flight_nbytes: int = 0
    calls: tuple[str, ...] = ()

    def flaw(self) -> str | None:
        """Returns what is wrong with the decision by itself, or None."""
        sizes = self.nbytes, self.held_nbytes, self.reserve_nbytes, self.spare, self.in_flight_nbytes
        if min(sizes) < 0 or max(sizes) > LARGEST:
            return "a number of bytes is negative, or larger than any memory"
        if not all(0.0 <= number < math.inf for number in (self.seconds, self.error)):
            return "a time or an error is negative or not finite"
        if self.kind == "offload" and moved_as(self.choice) is None:
            return f"there is no {self.choice!r:.80}"
        return "only a value that is moved is fetched" if self.fetched_with and self.kind != "offload" else None


def blocks_alike(
    decisions: Iterable[Decision], of: Callable[[Decision], str]
) -> Iterator[tuple[str, tuple[str, ...], dict[str, list[Decision]]]]:
    """Yields modules whose paths differ in numbers alone and whose decisions have the same words in their order.

    Args:
        of: returns the word of a decision.

    Yields:
        The pattern of the paths, the words, and the decisions by path.
    """
    blocks: dict[str, list[Decision]] = defaultdict(list)
    for decision in decisions:
        blocks[decision.module].append(decision)
    alike: dict[tuple[str, tuple[str, ...]], dict[str, list[Decision]]] = defaultdict(dict)
    for module, found in blocks.items():
        alike[folded(module), tuple(map(of, found))][module] = found
    for (pattern, words), members in alike.items():
        yield pattern, words, members


@dataclass(frozen=True)
class PlanData:
    """What a plan says. :class:`~backstash.planning.model.plan.Plan`, which does it, tells what each of these is."""

    budget: int
    peak_nbytes: int
    seconds: float
    plain_peak_nbytes: int
    plain_seconds: float
    allow: tuple[str, ...]
    error_limit: float
    error: float
    decisions: tuple[Decision, ...]
    frontier: tuple[tuple[int, float], ...]
    profile_fingerprint: str
    device: str
    others: tuple[str, ...] = ()
    cycles: int = 1
    store: str = "host"
    directory: str = ""
    reserve_nbytes: int = 0
    in_flight_nbytes: int = 0
    reordered: str = ""
    chunk_nbytes: int = 0

    @cached_property
    def is_empty(self) -> bool:
        """Whether everything is kept, because the plain step fits. A Session with such a plan has nothing to do.

        A plan that keeps all values may still let go of tensors of which backward reads the shape alone, so that its
        step takes less than the plain one.
        """
        keeps_all = all(decision.kind == "keep" for decision in self.decisions)
        return keeps_all and self.peak_nbytes >= self.plain_peak_nbytes


LOSSLESS = Lossless()
"""Decides on values that a plan does not know."""

_STORED = Lossless(recompute=False)


def action_of(decision: Decision, saved: SavedTensor, store: str, is_empty: bool) -> Action:
    """Returns what a Session has to do for a decision.

    Args:
        decision: what a plan says of the value.
        saved: the strongest use of the value.
    """
    stored = _STORED.decide(saved)
    if isinstance(stored, Stash):
        stored = without_error(stored)  # a plan makes others of what it stores, whoever reads that
    if decision.kind == "recompute":
        return Recompute(stored if isinstance(stored, (Keep, Stash)) else Keep(), any_producer=True)
    if decision.kind == "encode":
        if isinstance(stored, Stash) and any(label(codec) == decision.choice for codec in stored.codecs):
            return stored
        codec = codec_named(decision.choice)
        assert codec is not None  # a Plan is made of known names only
        others = stored.codecs if isinstance(stored, Stash) else ()
        return Stash((codec, *others))  # a codec may refuse numbers of another step, such as an infinity
    if decision.kind == "offload":
        first = moved_as(decision.choice)
        assert first is not None
        return Stash((*first, *(stored.codecs if isinstance(stored, Stash) else ()), Raw()), store)
    return Keep("the plan says so: the plain step fits" if is_empty else "the plan says so")


def meets_need(decision: Decision, saved: SavedTensor) -> bool:
    """Whether the form that was decided on has what is read of a value: arguments of its readers may change with steps.

    A clamp reads a value itself, not on which side of a bound it is, if its bound is no number of the value's dtype.
    """
    if decision.kind != "encode":
        return True
    codec = codec_named(decision.choice)
    assert codec is not None  # a Plan is made of known names only
    return saved.need in codec.preserves


def is_like(decision: Decision, saved: SavedTensor) -> bool:
    """Whether a value differs from the profiled one of its name in its shape alone, if at all."""
    dtypes = {spec.partition(" ")[0] for spec in (decision.spec, str(saved.spec))}
    return len(dtypes) == 1 and meets_need(decision, saved)


def serves_decision(decision: Decision, saved: SavedTensor) -> bool:
    """Whether what was decided of a value may be done with one of another shape in its place, such as a last batch.

    An error was predicted for the profiled numbers only, a codec of another dtype may refuse the value, and what is
    larger was not meant to be kept.
    """
    if decision.error or not is_like(decision, saved):
        return False
    return decision.kind != "keep" or saved.spec.nbytes <= decision.nbytes


def fetches_of(decisions: Iterable[Decision]) -> dict[str, tuple[str, ...]] | None:
    """Returns, by the key of a value, which moved values are asked for when it is read first; None if none moves."""
    moved = [decision for decision in decisions if decision.kind == "offload"]
    found: dict[str, tuple[str, ...]] = {}
    for decision in moved:
        for key in decision.fetched_with:
            found[key] = (*found.get(key, ()), decision.key)
    return found if moved else None

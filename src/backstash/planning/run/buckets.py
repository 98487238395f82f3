"""Kinds of steps, told apart by the shapes of their inputs: each of them has a plan of its own.

Note: [new shapes]
    The first step of a shape runs before anything is known about it. It is treated like the largest shape that was
    profiled: if it is no larger, by that shape's plan, whose peak it cannot pass; if it is larger, by the plan for a
    budget that is smaller by as much. Steps grow in proportion to their batch, and no faster than with the square of a
    sequence's length. A larger shape is never run with everything kept, so no step takes more than the first ones.

    When some shapes were profiled, three where one number varies, the profiles of others follow from theirs
    (model/shapes.py), and with them a plan before the first step, whose peak is known then. So no further shape is
    profiled, be it smaller or larger, and none of their steps is counted, unless one turns out to be another step.
    Where every step has a shape of its own, none comes back to be timed and tried at leisure. So of the second shape
    and the third one step is recorded, in which everything is tried at once, and if possible a step that keeps the
    budget in plain PyTorch as well. A prediction is not taken that a larger shape refutes, or that no plan keeps within
    a budget which is kept by what is done with the largest profiled shape.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from backstash.capture.modules import AUTOCAST, Signature
from backstash.planning.model.plan import Plan
from backstash.planning.model.problem import StepProfile
from backstash.planning.model.shapes import ShapeFamily
from backstash.planning.run.plan_files import PlanFiles
from backstash.planning.run.within import Within
from backstash.planning.search.planner import Planner
from backstash.policies import Action, Policy
from backstash.policies.base import Wrapper
from backstash.proofs import environment
from backstash.saved import SavedTensor
from backstash.session import Session

MOST_BUCKETS = 32
"""How many shapes have a plan at the same time. The one that was not met for the longest time is forgotten first."""

MOST_COURSES = 4
"""How often steps of one shape begin to be measured, and others come in between, before they are left as they are."""

LEAST_MEASURED = 3
"""How many shapes are profiled at least until those of others follow from them."""

MOST_MEASURED = 12
"""How many shapes are profiled at most for the sake of others."""

NEAR, WIDE, MET = 0.025, 0.15, 2
"""The logarithm of the ratio of two shapes that tell nothing more about others than one of them; and of two that tell
little more, so that the second one is profiled only if it was met more often than that."""


def size_ratio(small: Signature, large: Signature, is_linear: bool = False) -> float:
    """How many times as much a step of the one signature may take as a step of the other, at most.

    Steps grow no faster than with the square of a sequence's length; ``is_linear`` says in proportion to it. Infinitely
    many times if there are more tensors; single numbers do not count. Without autocast a value takes at most twice what
    it takes with it.
    """
    known, asked = ([each for each in signature if each[0]] for signature in (small, large))
    is_cast, stays_cast = (any(name.startswith(AUTOCAST) for _, name in signature) for signature in (small, large))
    wider = 2.0 if is_cast and not stays_cast else 1.0
    if len(known) != len(asked):
        return math.inf if len(asked) > len(known) else wider
    most = 0.0
    for (shape, dtype), (other, _) in zip(known, asked, strict=True):
        if 0 in shape:
            continue
        batch = other[0] / shape[0]
        inside = math.prod(other[1:]) / math.prod(shape[1:])
        are_tokens = "int" in dtype and inside > 1 and not is_linear
        most = max(most, batch * (inside * inside if are_tokens else inside))
    return wider * (most or 1.0)


@dataclass(eq=False)
class Bucket:
    """One kind of steps.

    Attributes:
        signature: shapes of its inputs; empty as long as they are not known.
        found: what became of the budget.
        margin: bytes of the budget that its plans leave free, because its steps reached more than was predicted.
        is_done: whether nothing remains to be measured.
        recounts_from: from which of its steps on one is counted anew, because its values may have other shapes.
        met: how many of its steps have begun.
        courses: how often it was begun to measure it, since that was done to the end.
        offers: how often it was begun to record a step of it for the sake of others.
        is_over: whether it was said that no plan keeps the budget.
        is_predicted: whether its profile follows from those of other shapes.
        derived_from: how many shapes were profiled when its first policy was chosen.
        plain_nbytes: the counted peak of its plain step; 0 if it was not profiled.
    """

    signature: Signature = ()
    session: Session | None = None
    planner: Planner | None = None
    plan: Plan | None = None
    found: Within = field(default_factory=Within)
    margin: int = 0
    is_done: bool = False
    surveys: int = 0
    recounts_from: int = 0
    met: int = 0
    courses: int = 0
    offers: int = 0
    is_over: bool = False
    is_predicted: bool = False
    derived_from: int = 0

    @property
    def inputs(self) -> str:
        """Its inputs in words, as ``int64 [8, 64]``."""
        each = (
            f"{name} {list(shape)}" if shape or not name.startswith(AUTOCAST) else name
            for shape, name in self.signature
        )
        return ", ".join(each) or "no tensors"

    @property
    def waits(self) -> bool:
        """Whether its steps are yet to be measured."""
        return not self.is_done and self.courses < MOST_COURSES

    @property
    def is_measured(self) -> bool:
        """Whether it was profiled."""
        return self.planner is not None and not self.is_predicted

    @property
    def is_strange(self) -> bool:
        """Whether its steps had values of which its plan knows nothing that could be done with them.

        What was profiled serves values of the same names that have other shapes, as those of experts have.
        """
        return self.plan is not None and (self.plan.has_strange if self.is_measured else bool(self.plan.unknown))

    @property
    def plain_nbytes(self) -> int:
        """The counted peak of its plain step; 0 if it was not profiled."""
        return 0 if self.planner is None else self.planner.profile.plain_peak_nbytes


class Buckets:
    """All kinds of steps so far, and the plans of earlier runs in a folder.

    Args:
        folder: where plans are kept from run to run; None for nowhere.
        settings: what a plan depends on beside the step.

    Attributes:
        recorded_share: the time of a plain step, as a share of that of a recorded one.

    Raises:
        PlanError: there is no such folder.
    """

    def __init__(self, folder: str | Path | None = None, settings: Iterable[object] = ()) -> None:
        self.files = None if folder is None else PlanFiles(folder)
        self._settings = [str(each) for each in settings]
        self._by_signature: OrderedDict[Signature, Bucket] = OrderedDict()
        self._plans: OrderedDict[str, Plan] = OrderedDict()
        self._measured: OrderedDict[Signature, Planner] = OrderedDict()
        self._family: tuple[Sequence[Planner], ShapeFamily] | None = None
        self._forgotten: list[Bucket] = []
        self.recorded_share = 1.0

    def __len__(self) -> int:
        return len(self._by_signature)

    def __iter__(self) -> Any:
        return iter(self._by_signature.values())

    def of(self, signature: Signature) -> Bucket:
        """The bucket of a signature, which is a new one if there is none."""
        found = self._by_signature.get(signature)
        if found is None:
            found = self._by_signature[signature] = Bucket(signature)
            if len(self._by_signature) > MOST_BUCKETS:
                largest = self.largest()  # from which the plans of new shapes are derived
                self._note_measured()
                oldest = next(key for key, each in self._by_signature.items() if each is not largest)
                self._forgotten.append(self._by_signature.pop(oldest))
        self._by_signature.move_to_end(signature)
        return found

    def take_forgotten(self) -> list[Bucket]:
        """Returns the buckets that were forgotten since it was asked."""
        taken, self._forgotten = self._forgotten, []
        return taken

    def largest(self) -> Bucket | None:
        """The profiled bucket whose plain step takes the most."""
        return max((each for each in self if each.is_measured), key=lambda each: each.plain_nbytes, default=None)

    @property
    def may_follow(self) -> bool:
        """Whether so many shapes were profiled that the profiles of others may follow from theirs."""
        return len(self._note_measured()) >= LEAST_MEASURED

    @property
    def planners(self) -> list[Planner]:
        """The planners of the shapes that were profiled."""
        return [each.planner for each in self if each.planner is not None and not each.is_predicted]

    def predicted(self, signature: Signature, min_nbytes: int, error_limit: float | None) -> Planner | None:
        """Returns a planner of a shape whose profile follows from those of other shapes; None where it does not."""
        kind = _kind_of(signature)
        known = {shape: planner for shape, planner in self._note_measured().items() if _kind_of(shape) == kind}
        if len(known) < LEAST_MEASURED:
            return None
        planners = list(known.values())
        if self._family is None or self._family[0] != planners:
            self._family = planners, _family_of(known)
        profile = self._family[1].profile(_sizes_of(signature), min_nbytes)
        if profile is None or profile.plain_peak_nbytes > self._most(signature, known):
            return None
        return Planner(profile, planners[0].allow, error_limit, planners)

    @staticmethod
    def _most(signature: Signature, known: Mapping[Signature, Planner]) -> float:
        """What a plain step takes at most, because a larger shape takes that."""
        larger = [each.profile for shape, each in known.items() if size_ratio(shape, signature) <= 1]
        return min((profile.plain_peak_nbytes for profile in larger), default=math.inf)

    def _note_measured(self) -> Mapping[Signature, Planner]:
        """The planners of all shapes that were profiled, also of those that are forgotten as buckets."""
        for each in self:
            if each.planner is not None and not each.is_predicted:
                self._measured[each.signature] = each.planner
        return self._measured

    def helps(self, bucket: Bucket) -> bool:
        """Returns whether the profiles of other shapes may follow once this shape was profiled as well."""
        largest, measured = self.largest(), self._note_measured()
        if largest is None or bucket.planner is not None or len(measured) >= MOST_MEASURED:
            return False
        if self._family is not None and not self._family[1].wanted:
            return False
        ratios = [size_ratio(shape, bucket.signature, is_linear=True) for shape in (largest.signature, *measured)]
        is_own_kind = _kind_of(bucket.signature) == _kind_of(largest.signature)
        near = NEAR if bucket.met > MET else WIDE
        return is_own_kind and ratios[0] <= 1 and all(abs(math.log(ratio)) > near for ratio in ratios)

    def clear(self) -> None:
        """Forgets all of them, and the plans that are kept in no folder."""
        self._by_signature.clear()
        self._plans.clear()
        self._measured.clear()

    # -- plans by fingerprint ------------------------------------------------------------------------------------

    def fingerprint(self, values: Mapping[str, str]) -> str:
        """A hash of a step's values, by key with their specs, and of what a plan depends on beside them.

        That is what was asked for, the machine and its libraries, and the number of threads.
        """
        machine = [environment(), torch.get_num_threads()]
        text = json.dumps([sorted(values.items()), self._settings, machine])
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def known(self, fingerprint: str) -> Plan | None:
        """The plan that was kept under a fingerprint, now or in an earlier run; None if there is none to read."""
        found = self._plans.get(fingerprint)
        return self.files.read(fingerprint) if found is None and self.files is not None else found

    def keep(self, fingerprint: str, plan: Plan) -> None:
        """Keeps a plan, also for later runs where there is a folder."""
        self._plans[fingerprint] = plan
        if len(self._plans) > MOST_BUCKETS:
            self._plans.popitem(last=False)
        if self.files is not None:
            self.files.write(fingerprint, plan)


def _family_of(known: Mapping[Signature, Planner]) -> ShapeFamily:
    """The family of the profiled shapes, without those that are odd among the larger ones."""
    ordered = sorted(known.items(), key=lambda each: each[1].profile.plain_peak_nbytes, reverse=True)
    shapes = [(_sizes_of(shape), planner.profile) for shape, planner in ordered]
    found = ShapeFamily(*zip(*shapes, strict=True))
    if found.wanted:
        return found
    alike: list[tuple[tuple[int, ...], StepProfile]] = []
    for each in shapes:
        family = ShapeFamily(*zip(*alike, each, strict=True))
        if family.wanted or not alike:
            found = family
            alike.append(each)
    return found


def _kind_of(signature: Signature) -> tuple[tuple[int, str], ...]:
    """What inputs have in common that differ in their sizes alone."""
    return tuple((len(shape), dtype) for shape, dtype in signature)


def _sizes_of(signature: Signature) -> tuple[int, ...]:
    return tuple(size for shape, _ in signature for size in shape)


class Alike(Wrapper):
    """Does with each value what a plan says of the value with its key, whatever its shape."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __repr__(self) -> str:
        return f"Alike({self.plan!r})"

    @property
    def inner(self) -> Policy:
        """The plan."""
        return self.plan

    def decide(self, saved: SavedTensor) -> Action:
        """Returns what the plan says of the key."""
        return self.plan.action_for(saved)

    def decide_together(self, saved: SavedTensor, readers: Any) -> Action:
        """The same."""
        return self.plan.action_for(saved)

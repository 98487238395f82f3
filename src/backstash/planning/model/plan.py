"""Plans as data and as a policy: what is done with each value of a step so that its peak stays within a budget."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib import import_module
from typing import Any

from torch import nn

from backstash.errors import PlanError
from backstash.planning.model.decision import (
    LOSSLESS,
    Decision,
    PlanData,
    action_of,
    fetches_of,
    is_like,
    meets_need,
    serves_decision,
)
from backstash.planning.model.explain import diff, explain, html, plan_summary
from backstash.planning.model.rounding import codec_named, word_has_error
from backstash.planning.model.sealed import plain, restore, seal, shown, unseal
from backstash.policies import Action, Keep, Policy
from backstash.policies.base import Rewriting
from backstash.proofs import environment, proofs
from backstash.rewrites.chunked_loss import chunked_loss
from backstash.saved import MIN_NBYTES, Need, SavedTensor, first_life_of
from backstash.stores import DiskStore, HostStore, Store

TRIFLE = 0.005
"""The share of the predicted peak that values may take together of which the plan knows nothing, without a word."""

STAGING = 16 << 20
"""Bytes of memory through which a plan's disk store writes. It is held before the step, and is not in its peak."""

_KEEPERS = "backstash.planning.run"
"""The room of what keeps a running program to a plan. It is above this one, so it is imported when it is asked for."""


def open_store(store: str, directory: str) -> Store:
    """Returns the store of a plan's Session: a new one for each Session, which is gone with it."""
    return DiskStore(directory, in_flight=STAGING, reuse=0) if store == "disk" else HostStore()


@dataclass(frozen=True, repr=False)
class Plan(PlanData, Policy):
    """What to do with each value of a step so that its peak stays within a budget. ``bs.Session(plan)`` does it.

    Plans are made by :func:`plan`. A value that the plan does not know, because its key or its tensor is another, is
    treated by the policy ``lossless``, and kept if the plan is empty. Gradients are right in any case, but the
    predicted peak is not that of such a step: there is a warning, and ``unknown`` has the keys.

    Attributes:
        budget: bytes that the counted peak of a step may have above what is held before the step.
        peak_nbytes: the peak that is predicted, never below the real one; ``plain_peak_nbytes`` if the plan is empty.
        seconds: the time of a step that is predicted.
        plain_peak_nbytes, plain_seconds: peak and time of the plain step.
        allow: what was allowed.
        error_limit: the largest error that was allowed; 0.0 for exact gradients.
        error: the predicted error of all gradients together, relative to their length: the root of the sum of the
            squares of the values' errors, or what was measured in a rehearsal if that is more. 0.0 if the plan is
            exact.
        decisions: what is done with each value.
        frontier: peak and time of the best plans at all budgets, in the order of their peaks. An empty plan, for which
            nothing had to be searched, has its own alone.
        profile_fingerprint: that of the profile.
        device: type of the device whose memory is planned.
        others: as in StepProfile: keys that a plan is asked about and that are none of its values; with the spec, where
            a value has that key.
        cycles: as in StepProfile.
        store, directory: as in StepProfile: where values are moved to.
        reserve_nbytes: how many bytes of ``peak_nbytes`` are there for numbers that encode worse than the profiled ones
            (Note: [reserve] in problem.py). A step with the profiled numbers takes so much less.
        in_flight_nbytes: how many bytes of ``peak_nbytes`` are there for values that an accelerator holds beside their
            planes (Note: [drafts] in stash/drafts.py).
        reordered: path of the head whose loss is computed in chunks while a Session is open, with sums in another
            order; empty for none.
        chunk_nbytes: bytes of logits that exist at a time then.
        min_nbytes: smaller tensors are kept, as they were in the profiled step; lowered to the smallest tensor that the
            plan does something with.
    """

    min_nbytes: int = MIN_NBYTES
    _by_key: dict[str, Decision] = field(init=False, compare=False)
    _others: frozenset[str] = field(init=False, compare=False)
    _met: set[str] = field(init=False, compare=False, default_factory=set)
    _unknown: dict[str, int] = field(init=False, compare=False, default_factory=dict)  # bytes, in order of meeting
    _strange: set[str] = field(init=False, compare=False, default_factory=set)

    is_fixed = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_key", {decision.key: decision for decision in self.decisions})
        object.__setattr__(self, "_others", frozenset(self.others))
        changed = (decision.nbytes for decision in self.decisions if decision.kind != "keep")
        object.__setattr__(self, "min_nbytes", min([self.min_nbytes, *changed]))
        for decision in self.decisions:
            if decision.kind == "encode" and codec_named(decision.choice) is None:
                raise PlanError(
                    f"a Plan was asked to encode {decision.key!r} by {shown(decision.choice)}, but there is no such "
                    f"codec. Register it before the plan is made or read, or make the plan without it."
                )
        flaw = self._flaw()
        if flaw is not None:
            raise PlanError(
                f"a Plan was asked for of {len(self.decisions)} values, but {flaw}. Make it with backstash.plan(), or "
                f"read what Plan.to_json() has written, unchanged."
            )

    def _flaw(self) -> str | None:
        """Returns what is wrong with the plan, or None."""
        if len(self._by_key) < len(self.decisions):
            return "two of them have the same key"
        if (
            self.budget <= 0
            or min(self.peak_nbytes, self.plain_peak_nbytes, self.reserve_nbytes, self.in_flight_nbytes) < 0
            or self.cycles < 1
        ):
            return "a number of bytes or of forward passes is below what there can be"
        if not all(0.0 <= number < math.inf for number in (self.seconds, self.plain_seconds, self.error)):
            return "a time or its error is negative or not finite"
        flaws = ((decision.key, decision.flaw()) for decision in self.decisions)
        if found := next((f"that of {key!r} does not fit: {flaw}" for key, flaw in flaws if flaw), None):
            return found
        rounded = [each for each in self.decisions if each.kind == "encode" and word_has_error(each.choice)]
        return f"it is exact, and rounds {rounded[0].key!r}" if rounded and not self.error_limit > 0 else None

    @property
    def recomputes(self) -> bool:  # type: ignore[override]  # read-only here
        """Whether a value may be remade; by the policy for unknown values as well."""
        return not self.is_empty

    @property
    def remakes_anything(self) -> bool:  # type: ignore[override]  # read-only here
        """Whether the plan has a value remade."""
        return any(decision.kind == "recompute" for decision in self.decisions)

    @cached_property
    def repeated_calls(self) -> frozenset[str] | None:  # type: ignore[override]  # read-only here
        """Names of the calls by which values are made again; None where they are not known."""
        remade = [each.calls for each in self.decisions if each.kind == "recompute" or each.spare]
        return frozenset().union(*remade) if all(remade) else None

    @cached_property
    def fetches(self) -> dict[str, tuple[str, ...]] | None:  # type: ignore[override]  # read-only here
        """By the key of a value, the keys of the moved values that are asked for when it is read first."""
        return fetches_of(self.decisions)

    @property
    def stores(self) -> dict[str, Callable[[], Any]] | None:  # type: ignore[override]  # read-only here
        """What opens the store that values are moved to, if any are and no Session has it anyway."""
        if self.fetches is None or self.store == "host":
            return None
        return {self.store: lambda: open_store(self.store, self.directory)}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that the plan says."""
        return hashlib.sha256(json.dumps(plain(self), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def unknown(self) -> tuple[str, ...]:
        """Keys of values that a Session has met so far and that the plan does not know."""
        return tuple(self._unknown)

    @property
    def has_strange(self) -> bool:
        """Whether any of them differ in more than their shapes: no such name was profiled, or it is read otherwise."""
        return bool(self._strange)

    def notice(self) -> str:
        """Returns how the steps so far did not match the plan; empty if they did."""
        if not self._unknown:
            return ""
        asked = f"the plan {self.fingerprint} of {len(self.decisions)} values was asked for the values of a step"
        if not self._met and self._by_key.keys().isdisjoint(self._unknown):
            return (
                f"{asked}, but knows none of them (the first is {next(iter(self._unknown))!r}): it was made for "
                f"another model. They are treated by the policy lossless, so gradients are right and the budget is "
                f"not kept. Take a profile of this model's step and make a plan of it."
            )
        return (
            f"{asked}, but {len(self._unknown)} of them are not those of its profile (the first is "
            f"{next(iter(self._unknown))!r}): shapes or branches are others, or what is read of them. What the "
            f"plan says of their names is done where it can be, else what the policy lossless says, so gradients are "
            f"right and the budget may not be kept. Pass replan='auto' to the Session."
        )

    def _meet_unknown(self, saved: SavedTensor, reason: str) -> None:
        """Notes a value that the profiled step did not have, and warns when these are no trifles together any more."""
        before = sum(self._unknown.values())
        now = before + (0 if saved.key in self._unknown else saved.spec.nbytes)
        self._unknown.setdefault(saved.key, saved.spec.nbytes)
        if before <= TRIFLE * self.peak_nbytes < now:
            warnings.warn(
                f"the plan {self.fingerprint} was asked for {saved.key!r} ({saved.spec}), but {reason}. "
                f"What the plan says of its name is done if it can be, else what the policy lossless says, as with "
                f"others like it (plan.unknown): gradients are right, the budget may not be kept. Budgeted, or "
                f"Session(plan, replan='auto'), plans for such a step when it comes again.",
                stacklevel=3,
            )

    def decide(self, saved: SavedTensor) -> Action:
        """Returns what the plan says of the value, also of another shape if that serves, or what lossless says."""
        decision = self._by_key.get(saved.key)
        if decision is not None and decision.spec == str(saved.spec) and meets_need(decision, saved):
            self._met.add(saved.key)
            return action_of(decision, saved, self.store, self.is_empty)
        if self.is_empty:
            return Keep("the plan is empty, because the plain step fits")
        if saved.need is not Need.SHAPE and f"{saved.key} {saved.spec}" in self._others:
            return Keep("the plan counts it as it is")
        first_life = first_life_of(saved.key)
        is_other = saved.key in self._others or first_life in self._others
        is_later = (
            decision is None and first_life != saved.key
        )  # which depends on what the plan does with the first life
        if saved.need is not Need.SHAPE and not is_other and not is_later:  # a plan lets go of what is a shape
            reason = "knows no such value"
            if decision is not None and decision.spec == str(saved.spec):
                reason = "backward reads more of it than in the profiled step, or compares it with another bound"
            self._meet_unknown(saved, reason)
            if decision is None or not is_like(decision, saved):
                self._strange.add(saved.key)
        decision = decision or self._by_key.get(first_life)
        if decision is not None and saved.need is not Need.SHAPE and serves_decision(decision, saved):
            return action_of(decision, saved, self.store, False)
        if decision is None and saved.need is not Need.SHAPE and is_other:
            return Keep("the plan counts it as it is")
        return LOSSLESS.decide(saved)

    @property
    def rewriting(self) -> Rewriting | None:  # type: ignore[override]  # read-only here
        """What has the loss of a head computed in chunks, if the plan says so."""
        return self._in_chunks if self.reordered else None

    def _in_chunks(self, model: nn.Module | None) -> Callable[[], AbstractContextManager[object]]:
        if model is None:
            raise PlanError(
                f"the plan {self.fingerprint} was asked for without a model, but it has the loss of {self.reordered!r} "
                f"computed in chunks. Pass the model: Session(plan, model=model)."
            )
        return partial(chunked_loss, model, self.reordered, chunk_nbytes=self.chunk_nbytes)

    def replanning(self, **options: Any) -> Any:
        """Returns what keeps this plan's budget, beginning with this plan."""
        if self.reordered:
            raise PlanError(
                f"the plan {self.fingerprint} was asked to be followed by others, but it takes sums in another order, "
                f"which is proven for one step. Make it without 'reordered', and rewrite the model yourself: "
                f"backstash.rewrites.chunked_loss(model)."
            )
        known: dict[str, Any] = {"plan": self, "device": self.device, "offload_to": self.directory or None}
        make = import_module(f"{_KEEPERS}.budgeted").Budgeted
        return make(self.budget, self.allow, error_limit=self.error_limit or None, **known, **options)

    def guarded(self, budget: int | str | None = None, spill: str | None = None) -> Policy:
        """Returns a policy that does what the plan says, and holds values in less when a step holds more than planned.

        The numbers of another step may encode worse than those of the profiled one. ``Session(plan.guarded())`` sees
        that, and costs what ``Session(plan)`` does in steps that are as planned (Note: [quiet guard] in guard.py). Its
        report says what was planned, predicted and reached.

        Args:
            budget: the most bytes that a step may take above what is held before it, or a text as for :func:`plan`;
                by default the plan's own budget.
            spill: name of a store of the Session for what can be held in no other way. By default the host on a GPU,
                and elsewhere the disk to which the plan moves values, if it moves any.

        Raises:
            PlanError: the budget means nothing, or the plan is predicted to exceed it.
        """
        guarded: Policy = import_module(f"{_KEEPERS}.guard").guard(self, budget, spill)
        return guarded

    def action_for(self, saved: SavedTensor) -> Action:
        """Returns what the plan says of the value with this key, whatever its shape."""
        decision = self._by_key.get(saved.key)
        if decision is not None:
            return action_of(decision, saved, self.store, self.is_empty)
        return Keep("the plan is empty, because the plain step fits") if self.is_empty else LOSSLESS.decide(saved)

    def united(self, other: Plan) -> Plan:
        """Returns this plan, with what another one says of the values that this one does not know."""
        more = tuple(decision for decision in other.decisions if decision.key not in self._by_key)
        error = math.hypot(self.error, *(decision.error for decision in more))
        others = tuple({*self.others, *other.others})
        least = min(self.min_nbytes, other.min_nbytes)
        found = replace(self, decisions=(*self.decisions, *more), others=others, error=error, min_nbytes=least)
        if self.profile_fingerprint == other.profile_fingerprint:  # what was warned of is warned of once
            found._unknown.update(other._unknown)
            found._strange.update(other._strange)
        return found

    def has_room_for(self, key: str) -> bool:
        """Returns whether the plan's peak lies elsewhere than where the value is read."""
        decision = self._by_key.get(key)
        return decision is not None and decision.has_room

    def in_flight_for(self, key: str) -> int:
        """Returns how many bytes of values may be held beside their planes where the value with that key is born."""
        decision = self._by_key.get(key)
        return 0 if decision is None else decision.in_flight_nbytes

    def explain(self) -> str:
        """Returns a table of what is done with each value and why, with bytes and time, and the totals of modules."""
        return explain(self)

    def diff(self, other: Plan) -> str:
        """Returns a table of what another plan does otherwise; empty if it does the same with each value."""
        if not isinstance(other, Plan):
            raise PlanError(
                f"a plan was asked how it differs from {other!r:.80}, but that is no Plan. Pass what backstash.plan() "
                f"has returned."
            )
        return diff(self, other)

    def to_json(self) -> str:
        """Returns the plan as a JSON document with a checksum, with what this process has proven of its recipes."""
        return seal("Plan", with_proofs(plain(self)))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Returns the plan that :meth:`to_json` has written.

        Raises:
            PlanError: the text is no such document, or it was edited or damaged.
        """
        return restore(cls, without_proofs(unseal("Plan", text)), "Plan")

    def __repr__(self) -> str:
        return f"Plan({self.fingerprint}, {plan_summary(self)})"

    def _repr_html_(self) -> str:
        return html(self)


_FIELD = "proofs"


def with_proofs(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the plain data of a plan, with what this process has proven (Note: [proofs that travel])."""
    return {**content, _FIELD: {"environment": environment(), "answers": proofs.travelling()}}


def without_proofs(content: Any) -> Any:
    """Believes the proofs in a plan's data if they are this environment's, and returns the data without them.

    Raises:
        PlanError: what is there is no proofs.
    """
    if not isinstance(content, dict) or _FIELD not in content:
        return content
    found = content[_FIELD]
    answers = found.get("answers") if isinstance(found, dict) else None
    if not isinstance(answers, dict) or not all(_is_names(names) for names in answers.values()):
        raise PlanError(
            f"a Plan was asked for with its proofs, but got {shown(found)}. Make the file again with this backstash."
        )
    if found.get("environment") == environment():
        proofs.believe(answers)
    return {name: data for name, data in content.items() if name != _FIELD}


def _is_names(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(name, str) for name in found)

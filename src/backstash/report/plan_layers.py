"""The bytes that a step holds at each position under a plan, in the parts that the peak model adds up.

The rules are those of planning/model/peak.py, which gives the sum alone, as fast as a solver needs it. Tests compare
both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from backstash.errors import PlanError
from backstash.planning.model.problem import Choice, PlannedValue, StepProfile, children_first

if TYPE_CHECKING:
    from backstash.planning.model.plan import Plan

ChartLayer = Literal["rest", "keep", "encode", "recompute", "offload", "passing"]
LAYERS: tuple[tuple[ChartLayer, str], ...] = (
    ("rest", "everything else"),
    ("keep", "kept"),
    ("encode", "encoded"),
    ("recompute", "remade"),
    ("offload", "moved"),
    ("passing", "for encoding, decoding, remaking"),
)
"""The layers from bottom to top, with the words for them. ``rest`` is all that no plan changes: feature maps on their
way, gradients, workspaces."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes that are alive at the positions from ``start`` through ``last``.

    Attributes:
        value: index of the planned value to which they belong.
        layer: how the value is held, or ``"passing"``.
    """

    value: int
    layer: ChartLayer
    nbytes: int
    start: int
    last: int


def chosen(profile: StepProfile, plan: Plan) -> list[Choice]:
    """Returns the choice that a plan takes for each value of a profile.

    Raises:
        PlanError: the plan was made of another profile.
    """
    decisions = {decision.key: decision.choice for decision in plan.decisions}
    found = [
        next((choice for choice in value.choices if choice.name == decisions.get(value.key)), None)
        for value in profile.values
    ]
    choices = [choice for choice in found if choice is not None]
    if len(choices) < len(found) or len(decisions) != len(found):
        flaw = next(
            (value.key for value, choice in zip(profile.values, found, strict=True) if choice is None),
            "another number of values",
        )
        raise PlanError(
            f"the page of a plan of {len(decisions)} values was asked for, with a profile of {len(found)} values, but "
            f"they do not belong together ({flaw}). Pass the profile of which the plan was made."
        )
    return choices


def kept(profile: StepProfile) -> list[Choice]:
    """Returns the choices of the plain step, in which every value is kept."""
    return [value.choices[0] for value in profile.values]


def parts(profile: StepProfile, choices: Sequence[Choice]) -> Iterator[Part]:
    """Yields what the step's values hold, if each is held as its choice says."""
    values = profile.values
    first = [value.reads[0] for value in values]
    needs = [set(value.reads) for value in values]
    for index in children_first(values) or []:
        for parent in choices[index].parents:
            first[parent] = min(first[parent], first[index])
            needs[parent].add(first[index])
    for index, (value, choice) in enumerate(zip(values, choices, strict=True)):
        found = [part for part in _parts_of(index, value, choice, first[index], needs[index]) if part.nbytes]
        yield from found


def _parts_of(index: int, value: PlannedValue, choice: Choice, first: int, needs: set[int]) -> Iterator[Part]:
    if choice.kind == "recompute":  # it is there from its first need on
        yield Part(index, "recompute", value.nbytes, first, max(needs))
        yield Part(index, "passing", choice.workspace_nbytes, first, first)
        return
    yield Part(index, choice.kind, choice.held_nbytes, value.born, max(needs))
    yield Part(index, "passing", choice.encode_nbytes, value.born, value.born)
    for position in sorted(needs):
        yield Part(index, "passing", choice.decode_nbytes, position, position)


def layers(profile: StepProfile, choices: Sequence[Choice]) -> dict[ChartLayer, list[int]]:
    """Returns the bytes of each layer at each position, without layers that are empty throughout.

    Example:
        >>> from backstash.planning.model.problem import Position
        >>> forward, backward = Position("relu", "", False, 0.1), Position("ReluBackward0", "", True, 0.2)
        >>> mask = Choice("bitmask", "encode", 4, encode_nbytes=100)
        >>> value = PlannedValue("/Relu#0:result", "", "Relu", "float32 [25]", 100, 0, (1,), (Choice.keep(100), mask))
        >>> layers(StepProfile((forward, backward), (200, 300), (value,), 400), [mask])
        {'rest': [200, 300], 'encode': [4, 4], 'passing': [100, 0]}
    """
    count = len(profile.positions)
    changes: dict[ChartLayer, list[int]] = {name: [0] * (count + 1) for name, _ in LAYERS}
    for part in parts(profile, choices):
        changes[part.layer][part.start] += part.nbytes
        changes[part.layer][part.last + 1] -= part.nbytes
    found = {name: list(accumulate(change[:count])) for name, change in changes.items()}
    found["rest"] = list(profile.base_nbytes)
    return {name: nbytes for name, nbytes in found.items() if any(nbytes)}


def total(found: dict[ChartLayer, list[int]], count: int) -> list[int]:
    """Returns the sum of all layers at each of ``count`` positions."""
    return [sum(nbytes) for nbytes in zip(*found.values(), strict=True)] if found else [0] * count

"""Steps of shapes that were never run: their profiles follow from those of a few other shapes.

A program whose inputs have other sizes runs the same functions on tensors of other sizes. The bytes of such a tensor
are a polynomial of the sizes that vary: a feature map grows with the batch and with the square of an image's width, the
scores of an attention with the square of a sequence's length. So the profiles of three lengths say what there is to
know of every other one.

Note: [fitted bytes]
    What varies is told by the inputs: each group of sizes that stay in proportion is one variable. The dimensions of
    the planned values say to which power it may occur (:attr:`Variable.degree`), and so how many profiles it takes: one
    more than the terms of any dimension, so that each dimension is not only fitted, but found to be what was fitted.
    Bytes of values, and those of everything else at each of a position's moments (problem.py), are then fitted exactly.
    They are fitted by moments, because the most of several polynomials is none. Where two shapes differ in their
    moments, as a kernel chose another algorithm, a bound is taken: that of a larger shape, or that of a smaller one
    times the growth. A codec whose bytes depend on the numbers is taken to make of a value what it made of it at worst.
    If the fitted dimensions of any value are no whole numbers, the shape does not belong to the family.

Note: [claims between shapes]
    A kernel of redeem/ frees a large value before it allocates a gradient, or writes over a gradient; of a small one it
    does not (redeem/table.py). So the bytes of a position that reads such a value are one polynomial where it is small
    and another one where it is large, and no fit through shapes of both kinds is either of them: the backward of a
    log-softmax takes more than such a fit says. A shape of the other kind says the bytes only up to
    what a claim spares, which is at most WITHOUT_CLAIM times the value's bytes. The weights of the fit say how much
    that can make of the sum, and the nearest shapes of the same kind bound it.

Note: [no far shapes]
    A prediction is a weighted sum of what was measured. The weights of a shape between the measured ones add up to
    little more than one. They grow with the distance of a shape beyond them, and so does what any deviation makes of
    it. Above MOST_WEIGHT a shape has to be measured by itself.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from backstash.planning.model.peak import WITHOUT_CLAIM, PeakModel
from backstash.planning.model.problem import Choice, PlannedValue, Position, StepProfile
from backstash.redeem.table import is_claimed_as_kept

Sizes = tuple[int, ...]
"""All sizes of all tensors among a step's inputs, in their order."""

Numbers = NDArray[np.float64]

MOST_DEGREE = 4
"""The highest power of a variable: an attention between the parts of an image takes the fourth power of its width."""

MOST_WEIGHT = 32.0
"""How much the absolute weights of the measured shapes may add up to (Note: [no far shapes])."""

WHOLE = 1e-6
"""How far a fitted dimension may be from a measured or a whole one, as a share of it."""

ALIKE = 0.9
"""The share of operations that profiles have in common if they are of one program."""

LET_GO = "let go"
"""Name of a position between two operations, which is there where a value is born."""


@dataclass(frozen=True)
class Variable:
    """A number by which the sizes of inputs vary.

    Attributes:
        index: the first of the sizes that are in proportion to it.
        ratios: what the others are of it, by their indices.
        degree: the highest power of it in the bytes of a step.
    """

    index: int
    ratios: tuple[tuple[int, float], ...]
    degree: int = 1


class ShapeFamily:
    """The profiles of one program at several shapes.

    Args:
        sizes: of the inputs, [shapes], all of the same length and no two alike.

    Attributes:
        variables: what varies.
        wanted: how many shapes must be measured until others follow from them; 0 if no number is enough, because the
            steps of these shapes are no steps of the same functions, or grow like no polynomial.
    """

    def __init__(self, sizes: Sequence[Sizes], profiles: Sequence[StepProfile]) -> None:
        self.wanted = 0
        self.variables = _variables(sizes)
        self._sizes = np.array(sizes, float)
        self._profiles = _aligned(profiles) if self.variables else []
        self._dimensions = [_dimensions([profile.values[n].spec for profile in self._profiles]) for n in self._numbers]
        if not self._profiles or any(each is None for each in self._dimensions):
            return
        powers = [[self._powers(sizes) for sizes in each.T] for each in self._dimensions if each is not None]
        found = np.array([np.sum(each, axis=0) if each else self._none for each in powers] or [self._none])
        degrees = np.maximum(found.max(axis=0), 1).tolist()
        if max(degrees) <= MOST_DEGREE:
            self.variables = tuple(replace(v, degree=d) for v, d in zip(self.variables, degrees, strict=True))
            most = max((_count(each) for dimensions in powers for each in dimensions), default=1)
            self.wanted = max(_count(degrees), most + 1)

    @cached_property
    def is_complete(self) -> bool:
        """Whether the profiles of other shapes follow from those that are known."""
        terms = self._terms(self._points) if self.wanted else np.zeros((0, 0))
        return 0 < self.wanted <= len(terms) and int(np.linalg.matrix_rank(terms)) == terms.shape[1]

    def profile(self, sizes: Sizes, min_nbytes: int = 0) -> StepProfile | None:
        """Returns the profile of a step whose inputs have other sizes; None where it does not follow."""
        point = self._point(sizes)
        if point is None or not self.is_complete:
            return None
        terms = self._terms(point[None])[0]
        weights = terms @ self._inverse
        if np.abs(weights).sum() > MOST_WEIGHT:
            return None
        specs = []
        for number, dimensions in enumerate(self._dimensions):
            assert dimensions is not None
            fitted = weights @ dimensions
            if (np.abs(fitted - np.rint(fitted)) > WHOLE * np.maximum(1, fitted)).any() or (fitted < 0.5).any():
                return None
            dtype, _, _ = self._profiles[0].values[number].spec.partition(" ")
            specs.append(f"{dtype} {np.rint(fitted).astype(int).tolist()}")
        return self._predicted(point, terms, weights, specs, min_nbytes)

    # -- what varies -------------------------------------------------------------------------------------------------

    @property
    def _numbers(self) -> range:
        """The numbers of the values."""
        return range(len(self._profiles[0].values) if self._profiles else 0)

    @property
    def _none(self) -> list[int]:
        """The powers of what does not vary."""
        return [0] * len(self.variables)

    @cached_property
    def _points(self) -> Numbers:
        """The variables of the measured shapes, [shapes, variables]."""
        return self._sizes[:, [variable.index for variable in self.variables]]

    def _point(self, sizes: Sizes) -> Numbers | None:
        """The variables of a shape; None if its sizes are not in the proportions of the measured ones."""
        found = np.array(sizes, float)
        if not self.variables or found.shape != self._sizes.shape[1:]:
            return None
        expected = self._sizes[0].copy()
        for variable in self.variables:
            expected[variable.index] = found[variable.index]
            for index, ratio in variable.ratios:
                expected[index] = found[variable.index] * ratio
        return found[[each.index for each in self.variables]] if np.allclose(expected, found, rtol=1e-9) else None

    def _powers(self, sizes: Numbers) -> list[int]:
        """The power of each variable in a dimension that has these sizes, the least that fit."""
        count = range(len(self.variables))
        tries = [self._none, *([int(i == j) for j in count] for i in count)]
        tries += [[int(i in pair) for i in count] for pair in itertools.combinations(count, 2)]
        tries += [[2 * int(i == j) for j in count] for i in count]
        points = self._points / self._points.max(axis=0)
        for powers in tries:
            terms = _monomials(points, powers)
            if np.allclose(terms @ np.linalg.lstsq(terms, sizes, rcond=None)[0], sizes, rtol=WHOLE):
                return powers
        return [MOST_DEGREE + 1 for _ in count]

    def _terms(self, points: Numbers) -> Numbers:
        """The products of powers of the variables, [points, terms]; about 1 at most where shapes were measured."""
        return _monomials(points / self._points.max(axis=0), [variable.degree for variable in self.variables])

    @cached_property
    def _inverse(self) -> Numbers:
        """From numbers of the measured shapes to the factors of the terms, [terms, shapes]."""
        return np.asarray(np.linalg.pinv(self._terms(self._points)), dtype=np.float64)

    # -- the profile of another shape --------------------------------------------------------------------------------

    def _predicted(
        self, point: Numbers, terms: Numbers, weights: Numbers, specs: list[str], min_nbytes: int
    ) -> StepProfile:
        first = self._profiles[0]
        seconds = terms @ self._seconds
        positions = tuple(
            replace(each, seconds=float(time)) for each, time in zip(first.positions, seconds, strict=False)
        )
        times = iter(seconds[len(positions) :].reshape(-1, 3).tolist())
        values = []
        for number, (value, spec) in enumerate(zip(first.values, specs, strict=True)):
            alike = [profile.values[number] for profile in self._profiles]
            sizes = [each.nbytes for each in alike]
            nbytes = int(np.rint(weights @ sizes))
            choices = []
            for index in range(len(value.choices)):
                ways = [each.choices[index] for each in alike]
                choices.append(_choice(nbytes, sizes, ways, weights, next(times)))
            choices[0] = Choice.keep(nbytes)
            offered = choices if nbytes >= min_nbytes else choices[:1]
            values.append(replace(value, spec=spec, nbytes=nbytes, choices=tuple(offered)))
        moments = self._moments(point, weights, values)
        found = replace(
            first,
            positions=positions,
            base_nbytes=tuple(max(each) for each in moments),
            moments=moments,
            values=tuple(values),
            others=tuple(dict.fromkeys(key for profile in self._profiles for key in profile.others)),
            plain_peak_nbytes=0,
            session_seconds=float(np.mean([each.session_seconds for each in self._profiles])),
        )
        return replace(found, plain_peak_nbytes=int(np.ceil(self._plain_share * _kept_nbytes(found))))

    @cached_property
    def _plain_share(self) -> float:
        """What plain steps take, as a share of those in which a Session keeps everything, at most."""
        return max(each.plain_peak_nbytes / max(1, _kept_nbytes(each)) for each in self._profiles)

    @cached_property
    def _seconds(self) -> Numbers:
        """Factors of the terms, none below 0, for the times of positions and then of choices, [terms, times]."""
        rows = []
        for profile in self._profiles:
            times = [position.seconds for position in profile.positions]
            for value in profile.values:
                for choice in value.choices:
                    times += [choice.encode_seconds, choice.decode_seconds, choice.seconds]
            rows.append(times)
        return _without_negative(self._terms(self._points), np.array(rows))

    def _moments(self, point: Numbers, weights: Numbers, values: list[PlannedValue]) -> tuple[tuple[int, ...], ...]:
        """The bytes at each moment of each position (Note: [fitted bytes])."""
        degrees = np.array([variable.degree for variable in self.variables])
        growth = (np.maximum(1.0, point / self._points) ** degrees).prod(axis=1)
        is_larger = (self._points >= point).all(axis=1)
        is_smaller = (self._points <= point).all(axis=1)
        more, less = self._otherwise(values)
        found = []
        for at, moments in enumerate(zip(*(profile.moments for profile in self._profiles), strict=True)):
            is_alike = len({len(each) for each in moments}) == 1
            rows = np.array(moments if is_alike else [[max(0, *each)] for each in moments], float)
            most = np.maximum(rows + more[at][:, None], 0.0)
            fitted = np.full(rows.shape[1], np.inf)
            if is_alike:
                fitted = weights @ rows + np.maximum(weights, 0) @ more[at] - np.minimum(weights, 0) @ less[at]
            if not is_alike or more[at].any() or less[at].any():
                bounds = [(most * growth[:, None])[each].min(axis=0) for each in (is_larger, is_smaller) if each.any()]
                if is_alike and bounds:
                    fitted = np.minimum(fitted, np.min(bounds, axis=0))
                elif not is_alike:
                    fitted = np.max(bounds or [(most * growth[:, None]).max(axis=0)], axis=0)
            found.append(tuple(int(each) for each in np.ceil(fitted - WHOLE)))
        return tuple(found)

    def _otherwise(self, values: list[PlannedValue]) -> tuple[Numbers, Numbers]:
        """What claims as at another shape change at most (Note: [claims between shapes]).

        Returns:
            By how many bytes each position of each measured shape might hold more, and by how many it might hold less,
            [positions, shapes] each.
        """
        first = self._profiles[0]
        more, less = (np.zeros((len(first.positions), len(self._profiles))) for _ in range(2))
        if first.device == "cpu":
            wanted = _claims(values)
            for number, profile in enumerate(self._profiles):
                for (index, read), is_claimed in _claims(profile.values).items():
                    if is_claimed != wanted[index, read]:
                        table = more if is_claimed else less
                        table[read, number] += WITHOUT_CLAIM * profile.values[index].nbytes
        return more, less


def _claims(values: Sequence[PlannedValue]) -> dict[tuple[int, int], bool]:
    """Whether each value is claimed at each of its reads if all are kept."""
    freed = sorted((value.reads[-1], value.nbytes) for value in values)
    ends, total = [end for end, _ in freed], [0, *itertools.accumulate(nbytes for _, nbytes in freed)]
    return {
        (index, read): is_claimed_as_kept(
            value.op, value.key.rpartition(":")[2], value.nbytes, total[bisect_left(ends, read)]
        )
        for index, value in enumerate(values)
        for read in value.reads
    }


def _kept_nbytes(profile: StepProfile) -> int:
    """The peak of a step in which a Session keeps everything."""
    return PeakModel(profile).evaluate([0] * len(profile.values)).peak_nbytes


def _choice(nbytes: int, sizes: list[int], alike: list[Choice], weights: Numbers, times: list[float]) -> Choice:
    """A choice for a value of so many bytes."""

    def at_worst(name: str) -> int:
        shares = [getattr(each, name) / max(1, size) for each, size in zip(alike, sizes, strict=True)]
        return int(np.ceil(max(shares) * nbytes))

    encode, decode, remake = times
    names = {name for each in alike for name in each.calls}
    return replace(
        alike[-1],
        held_nbytes=at_worst("held_nbytes"),
        reserve_nbytes=at_worst("reserve_nbytes"),
        encode_nbytes=at_worst("encode_nbytes"),
        decode_nbytes=at_worst("decode_nbytes"),
        workspace_nbytes=max(0, int(np.rint(weights @ [each.workspace_nbytes for each in alike]))),
        encode_seconds=encode,
        decode_seconds=decode,
        seconds=remake,
        error=max(each.error for each in alike),
        calls=tuple(sorted(names)) if all(each.calls for each in alike) else (),
    )


def _variables(sizes: Sequence[Sizes]) -> tuple[Variable, ...]:
    """What varies between shapes; nothing if they have not as many sizes as each other."""
    if len(sizes) < 2 or len({len(each) for each in sizes}) > 1:
        return ()
    table = np.array(sizes, float)
    found: list[tuple[int, list[tuple[int, float]]]] = []
    for index, column in enumerate(table.T):
        if (column == column[0]).all() or (column <= 0).any():
            continue
        ratios = [column / table[:, known] for known, _ in found]
        same = next((at for at, ratio in enumerate(ratios) if np.allclose(ratio, ratio[0], rtol=1e-9)), None)
        if same is None:
            found.append((index, []))
        else:
            found[same][1].append((index, float(ratios[same][0])))
    return tuple(Variable(index, tuple(others)) for index, others in found)


def _monomials(points: Numbers, powers: Sequence[int]) -> Numbers:
    """The products of each variable's powers from 0 up to its own, [points, terms]."""
    each = itertools.product(*(range(power + 1) for power in powers))
    return np.stack([np.prod(points ** np.array(exponents), axis=1) for exponents in each], axis=1)


def _count(powers: Sequence[int]) -> int:
    """The number of products of each variable's powers up to its own."""
    return int(np.prod([power + 1 for power in powers]))


def _dimensions(specs: list[str]) -> Numbers | None:
    """The sizes of one value's dimensions at each shape, [shapes, dimensions]; None if their number or type differs."""
    found = [(spec.partition(" ")[0], *map(int, re.findall(r"\d+", spec.partition(" ")[2]))) for spec in specs]
    if len({(each[0], len(each)) for each in found}) > 1:
        return None
    return np.array([each[1:] for each in found], float)


def _without_negative(terms: Numbers, times: Numbers) -> Numbers:
    """The factors of terms, none below 0, that fit each column of times [shapes, times] best by least squares."""
    count = terms.shape[1]
    best, least = np.zeros((count, times.shape[1])), (times**2).sum(axis=0)
    for size in range(1, min(count, len(terms)) + 1):
        for chosen in itertools.combinations(range(count), size):
            factors = np.linalg.lstsq(terms[:, chosen], times, rcond=None)[0]
            off = ((terms[:, chosen] @ factors - times) ** 2).sum(axis=0)
            better = (factors >= 0).all(axis=0) & (off < least * (1 - 1e-9))
            best[:, better] = 0.0
            best[np.ix_(chosen, better.nonzero()[0])] = factors[:, better]
            least[better] = off[better]
    return best


# -- profiles of one program -------------------------------------------------------------------------------------------

Slot = tuple[int, bool]
"""The number of an operation that all profiles have, and whether it is the moment after it, where values are born."""


def _aligned(profiles: Sequence[StepProfile]) -> list[StepProfile]:
    """The profiles with the positions, values and choices that all have; none if they are of several programs.

    A smaller shape has fewer values, since small ones are kept. What others plan of them is theirs alone. A Session
    copies what is small and may change, which is an operation of its own, at one place or another.
    """
    alike = {(p.device, p.cycles, p.store, p.directory, p.tries, bool(p.moments)) for p in profiles}
    slots = _slots([_operations(profile) for profile in profiles], profiles)
    if len(alike) > 1 or not profiles[0].moments or not slots:
        return []
    shared = set(slots[0]).intersection(*slots[1:])
    slots = [[slot if slot in shared else (slot[0], False) for slot in found] for found in slots]
    places = [_places(profile, found) for profile, found in zip(profiles, slots, strict=True)]
    keys = [key for key, place in places[0].items() if all(other.get(key) == place for other in places[1:])]
    ways = [_ways(profile, set(keys)) for profile in profiles]
    offered = {
        key: [name for name in ways[0][key] if len({found[key].get(name) for found in ways}) == 1] for key in keys
    }
    return [_restricted(profile, found, offered) for profile, found in zip(profiles, slots, strict=True)]


def _operations(profile: StepProfile) -> list[tuple[str, bool]]:
    return [(each.name, each.is_backward) for each in profile.positions if each.name != LET_GO]


def _slots(operations: list[list[tuple[str, bool]]], profiles: Sequence[StepProfile]) -> list[list[Slot]]:
    """The slot of each position; of one that not all profiles have, that of the last one that they have."""
    first = operations[0]
    same = [dict(zip(range(len(first)), range(len(first)), strict=True))]  # from the first one's numbers to its own
    for other in operations[1:]:
        if other == first:
            same.append(same[0])
            continue
        blocks = SequenceMatcher(None, first, other, autojunk=False).get_matching_blocks()
        same.append({at.a + each: at.b + each for at in blocks for each in range(at.size)})
    common = sorted(set(same[0]).intersection(*same[1:]))
    if not common or common[0] != 0 or len(common) < ALIKE * max(map(len, operations)):
        return []
    found = []
    for profile, numbers in zip(profiles, same, strict=True):
        number_of = {numbers[at]: number for number, at in enumerate(common)}
        slots: list[Slot] = []
        operation, latest = -1, 0
        for each in profile.positions:
            operation += each.name != LET_GO
            latest = number_of.get(operation, latest)
            slots.append((latest, each.name == LET_GO))
        found.append(slots)
    return found


def _places(profile: StepProfile, slots: list[Slot]) -> dict[str, tuple[str, Slot, tuple[Slot, ...]]]:
    """The node, the birth and the reads of each value."""
    return {v.key: (v.op, slots[v.born], tuple(slots[read] for read in v.reads)) for v in profile.values}


def _ways(profile: StepProfile, keys: set[str]) -> dict[str, dict[str, tuple[object, ...]]]:
    """For each of those values its choices by their names, with what they depend on beside numbers."""
    names = [value.key for value in profile.values]
    return {
        value.key: {
            choice.name: (choice.kind, tuple(sorted(names[parent] for parent in choice.parents)), choice.fetches)
            for choice in value.choices
            if all(names[parent] in keys for parent in choice.parents)
        }
        for value in profile.values
        if value.key in keys
    }


def _restricted(profile: StepProfile, slots: list[Slot], offered: dict[str, list[str]]) -> StepProfile:
    """A profile with one position for each slot, and the values and choices that are offered; the rest is kept."""
    order = sorted(set(slots))
    number_of = {slot: number for number, slot in enumerate(order)}
    at = [number_of[slot] for slot in slots]
    names = [value.key for value in profile.values]
    index = {key: number for number, key in enumerate(offered)}
    by_key = {value.key: value for value in profile.values}
    held, kept = np.zeros(len(slots) + 1, np.int64), np.zeros(len(slots) + 1, np.int64)
    for value in profile.values:
        table = held if value.key in offered else kept
        table[value.born] += value.nbytes
        table[value.reads[-1] + 1] -= value.nbytes
    held, kept = np.cumsum(held), np.cumsum(kept)
    positions: dict[int, Position] = {}
    moments: dict[int, tuple[int, ...]] = {}
    firsts: dict[int, int] = {}
    for old, new in enumerate(at):
        found = tuple(nbytes + int(kept[old]) for nbytes in profile.moments[old])
        if new not in moments:
            positions[new], moments[new], firsts[new] = profile.positions[old], found, old
            continue
        more = max(found) + int(held[old] - held[firsts[new]])
        if more > max(moments[new]):
            moments[new] = (more,)
        together = positions[new].seconds + profile.positions[old].seconds
        positions[new] = replace(positions[new], seconds=together)
    values = []
    for key in offered:
        value = by_key[key]
        choices = {choice.name: choice for choice in value.choices}
        chosen = [
            replace(
                choices[name],
                parents=tuple(sorted(index[names[parent]] for parent in choices[name].parents)),
                fetches=tuple(at[fetch] for fetch in choices[name].fetches),
            )
            for name in offered[key]
        ]
        reads = tuple(sorted({at[read] for read in value.reads}))
        values.append(replace(value, born=at[value.born], reads=reads, choices=tuple(chosen)))
    return replace(
        profile,
        positions=tuple(positions[number] for number in range(len(order))),
        base_nbytes=tuple(max(moments[number]) for number in range(len(order))),
        moments=tuple(moments[number] for number in range(len(order))),
        values=tuple(values),
        others=tuple({**dict.fromkeys(profile.others), **dict.fromkeys(set(names) - set(offered))}),
    )

"""Bits, peaks and times of steps: the ways on one network, at one size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor

import backstash as bs
from bench.cases import SEED
from bench.gpu.device import deterministic
from bench.gpu.ways import PLAIN, Way
from bench.rounds import Effort, Summary, interleave, summarise
from bench.step_table import same_bits, uncollected

COMPARED_STEPS, TIMED_STEPS = 3, 2

LEARNING = 8
"""Steps before the peak is counted and times are taken: by then a pass that repeats itself runs a script."""


@dataclass(frozen=True)
class Judged:
    """What is found out of a way before it is timed.

    Attributes:
        peak_nbytes: of a step, above what was held before.
        is_exact: whether the gradients must have plain's bits.
        differing: which of them have not, in any of the steps, by number.
        ratio: of the bytes saved to the bytes held for them; None for what is no Session.
        predicted_nbytes: the peak that a plan predicts; None for what is no plan.
        note: what else is to be said.
    """

    peak_nbytes: int
    is_exact: bool
    differing: tuple[int, ...]
    ratio: float | None = None
    predicted_nbytes: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Timed:
    """Times of a way.

    Attributes:
        seconds: of a step.
        times_plain: the same over plain's in the same round.
    """

    seconds: Summary
    times_plain: Summary


def gradients(way: Way) -> list[list[Tensor]]:
    """Returns the gradients of some steps, with deterministic algorithms unless that would compile them anew."""
    found = []
    with nullcontext() if way.is_compiled else deterministic():
        for number in range(COMPARED_STEPS):
            way.step(SEED + number)
            found.append(way.training.gradients())
    return found


def differing(found: list[list[Tensor]], expected: list[list[Tensor]]) -> tuple[int, ...]:
    """Returns the numbers of the gradients that have other bits, in any of the steps."""
    numbers: set[int] = set()
    for own, plain in zip(found, expected, strict=True):
        numbers |= {at for at, (x, y) in enumerate(zip(own, plain, strict=True)) if not same_bits(x, y)}
    return tuple(sorted(numbers))


def judge(way: Way, expected: list[list[Tensor]]) -> Judged:
    """Compares bits and counts the peak."""
    wrong = differing(gradients(way), expected)
    for _ in range(LEARNING):
        way.step()
    peak = way.training.device.peaks(way.step)
    ratio = way.context.report().ratio if isinstance(way.context, bs.Session) else None
    return Judged(peak, way.is_exact, wrong, ratio, way.predicted_nbytes, way.note)


def times(ways: Mapping[str, Way], rounds: int) -> dict[str, Timed]:
    """Times all ways in interleaved rounds. Plain is among them."""

    def of(way: Way) -> Callable[[], float]:
        def seconds() -> float:
            way.step()
            return way.training.device.seconds(way.step, TIMED_STEPS)

        return seconds

    with uncollected():
        found = interleave({name: of(way) for name, way in ways.items()}, Effort(rounds))
    plain = found[PLAIN]
    return {
        name: Timed(summarise(own), summarise([x / y for x, y in zip(own, plain, strict=True)]))
        for name, own in found.items()
    }

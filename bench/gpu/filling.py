"""The largest batch, or sequence, that fits into the memory, and the throughput there.

Nobody with free memory needs to store tensors smaller. So each way is measured at the size that it makes possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch

from bench.gpu.device import Device, survives
from bench.gpu.networks import Training
from bench.gpu.ways import Way
from bench.rounds import Effort, Summary, interleave, summarise
from bench.step_table import uncollected

TRIALS = 6
"""Sizes that are tried after the first guess."""

PROBES, FAR = 4, 6
"""How many small sizes have their peaks counted, and how far their guess may lie away from the largest of them."""

STEPS = 3
"""Steps that a size has to survive. A Session's first step at a size takes more than the next ones."""

NEAR = 0.02
"""A size is the largest if one that is larger by this share fails."""


@dataclass(frozen=True)
class Largest:
    """The largest size that was found to fit.

    Attributes:
        size: it; 0 if none fits.
        failed: the smallest size that was found not to fit; None if none was.
        tried: the sizes that were tried, in turn.
        peak_nbytes: of a step at the size, above what was held before it.
    """

    size: int
    failed: int | None
    tried: tuple[int, ...]
    peak_nbytes: int | None = None


def search(fits: Callable[[int], bool], low: int, guess: int, trials: int = TRIALS) -> Largest:
    """Finds the largest size that fits.

    Args:
        fits: whether a size does.
        low: a size that does.
        guess: where to begin.
        trials: how many sizes to try.
    """
    high: int | None = None
    growth = 1.06
    tried: list[int] = []
    size = max(guess, low + 1)
    while len(tried) < trials and (high is None or high - low > max(1, NEAR * low)):
        tried.append(size)
        if fits(size):
            low = size
            size = max(low + 1, math.ceil(low * growth)) if high is None else (low + high) // 2
            growth **= 2  # far away, if several guesses were too low
        else:
            high = size
            size = max(low + 1, min((low + high + 1) // 2, high - 1) if len(tried) > 2 else math.floor(high * 0.94))
        if high is not None and size >= high:
            size = (low + high) // 2
        if size <= low:
            break
    return Largest(low, high, tuple(tried))


def largest(training: Training, make: Callable[[], Way], trials: int = TRIALS) -> tuple[Largest, Way | None]:
    """Finds the largest size of a way. Returns the way as well, None if not even the smallest size fits.

    The peaks of small sizes say where to begin.

    Args:
        training: what is trained. It has a small size now, at which plain fits.
        make: makes the way anew, as what an error has left behind is not to be measured.
        trials: how many sizes to try after the first ones.
    """
    first = training.size
    way = None
    device = training.device

    def run(size: int) -> None:
        nonlocal way
        if way is None:
            training.resize(first)
            way = make()
        training.resize(size)
        _steps(way)

    def fits(size: int) -> bool:
        nonlocal way
        device.clean()
        has_room = survives(lambda: run(size))
        if not has_room:
            way = None
            training.resize(first)
        device.clean()
        return has_room

    if not fits(first):
        return Largest(0, first, (first,)), None
    assert way is not None
    peaks = {first: device.peaks(way.step)}
    size = 2 * first
    while fits(size):
        peaks[size] = device.peaks(way.step)
        guess = _guess(device, peaks)
        if len(peaks) > PROBES or guess <= FAR * size:
            break
        size = min(FAR * size, guess // 2)  # the peaks of small sizes say little about large ones
    found = search(fits, max(peaks), _guess(device, peaks), trials)
    if found.size and way is None and not fits(found.size):  # the last trial failed
        return Largest(first, found.size, found.tried), None
    training.resize(found.size)
    assert way is not None
    nbytes = device.peaks(way.step)
    return Largest(found.size, found.failed, found.tried, nbytes), way


def _steps(way: Way) -> None:
    for _ in range(STEPS):
        way.step()
    way.training.device.wait()


def _guess(device: Device, peaks: Mapping[int, int]) -> int:
    """Returns the size that should just fit, if peaks grow in a straight line from the largest two sizes on."""
    sizes, room = sorted(peaks)[-2:], device.room()
    if len(sizes) < 2 or room is None:
        return sizes[-1]
    small, large = sizes
    slope = (peaks[large] - peaks[small]) / (large - small)
    slope = max(slope, peaks[large] / large / 4, 1.0)  # where the peak is that of something else, such as the weights
    return int((0.97 * (room - torch.accelerator.memory_allocated()) - peaks[large]) / slope + large)


@dataclass(frozen=True)
class Throughput:
    """How fast a way trains at its own size.

    Attributes:
        size: of a batch.
        seconds: of a step.
        per_second: units of the size in a second.
        times_plain: the same over plain's in the same round.
        lowered: how often memory was short after all, and the size was lowered by 3 %.
    """

    size: int
    seconds: Summary
    per_second: Summary
    times_plain: Summary
    lowered: int = 0


def throughput(training: Training, ways: Mapping[str, tuple[int, Way]], rounds: int) -> dict[str, Throughput]:
    """Times all ways in interleaved rounds, each at its own size.

    Args:
        training: whose steps.
        ways: by name, with their sizes. The first is what others are compared with.
        rounds: how many.
    """
    sizes = {name: size for name, (size, _) in ways.items()}
    lowered = dict.fromkeys(ways, 0)

    def of(name: str, way: Way) -> Callable[[], tuple[int, float]]:
        def steps() -> None:
            training.resize(sizes[name])
            _steps(way)

        def seconds() -> tuple[int, float]:
            while True:
                training.device.clean()
                if survives(steps):
                    return sizes[name], training.device.seconds(way.step)
                if sizes[name] <= 1:
                    return sizes[name], math.nan
                lowered[name] += 1
                sizes[name] = min(sizes[name] - 1, int(sizes[name] * 0.97))

        return seconds

    with uncollected():
        found = interleave({name: of(name, way) for name, (_, way) in ways.items()}, Effort(rounds))
    plain = [size / seconds for size, seconds in found[next(iter(ways))]]
    summaries = {}
    for name, rows in found.items():
        speeds = [size / seconds for size, seconds in rows]
        if any(math.isnan(speed) for speed in speeds):
            continue
        summaries[name] = Throughput(
            int(median(size for size, _ in rows)),
            summarise([seconds for _, seconds in rows]),
            summarise(speeds),
            summarise([own / its for own, its in zip(speeds, plain, strict=True)]),
            lowered[name],
        )
    return summaries

"""The largest batch whose training step fits a budget: plain PyTorch's and each stage's, and how fast they train.

What a step takes is its counted peak and, twice, its parameters: themselves and their gradients. Every activation is as
large as the batch, so the peak is a straight line over it. The line is drawn through steps of a few small batches, the
largest batch is where it crosses the budget, and a real step of that batch is counted: where it takes more than the
budget the batch is made smaller and counted again, so that what is reported has been run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from backstash.report import meter
from benchmarks.cases import Case, Workload, build
from benchmarks.peers import StepPeer
from benchmarks.peers.base import Forward
from benchmarks.rounds import Effort, Summary, interleave, mib, spread, summarise, table
from benchmarks.step_table import timed_step, uncollected


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        network: a key of `networks.NETWORKS`.
        size: height and width of the images.
        budget_nbytes: what a step may take.
        small: the batches of the line.
    """

    network: str
    size: int
    budget_nbytes: int
    small: tuple[int, ...] = (4, 8, 12)


@dataclass(frozen=True)
class BatchRow:
    """The answer for one stage.

    Attributes:
        name: the stage.
        peaks: counted peak of a step, by small batch.
        nbytes_per_image, fixed_nbytes: the line through them, parameters and gradients included.
        error: largest difference of the small batches from the line, as a share of what the step takes.
        predicted: the largest batch that the line says fits the budget.
        batch: the largest batch that was run and fits it.
        step_nbytes: what the step of that batch took.
        ratio: the batch over plain's.
        images_per_second: at that batch, over the rounds.
        seconds: of a step at that batch.
        speed: median images per second over plain's.
    """

    name: str
    peaks: dict[int, int]
    nbytes_per_image: float
    fixed_nbytes: float
    error: float
    predicted: int
    batch: int
    step_nbytes: int
    ratio: float
    images_per_second: Summary
    seconds: Summary
    speed: float


@dataclass(frozen=True)
class BatchTable:
    """All stages of a question.

    Attributes:
        question: what was asked.
        data: what was trained on.
        parameter_nbytes: bytes of the parameters; the gradients take as many.
        rounds: rounds that were timed.
        rows: the answers, plain's first.
    """

    question: Question
    data: str
    parameter_nbytes: int
    rounds: int
    rows: tuple[BatchRow, ...]


@dataclass(frozen=True)
class _Found:
    """A stage's batch, before it is timed."""

    peaks: dict[int, int]
    slope: float
    fixed: float
    error: float
    predicted: int
    batch: int
    step_nbytes: int


def measure(question: Question, peers: Sequence[StepPeer], effort: Effort) -> BatchTable:
    """Finds each stage's largest batch, then times all of them in turns.

    Args:
        question: what is asked.
        peers: the stages, plain first.
        effort: rounds of the timing.

    Raises:
        ValueError: not even a batch of 1 fits the budget.
    """
    found = {peer.name: _largest(question, peer) for peer in peers}
    workloads: dict[int, Workload] = {}
    for one in found.values():
        if one.batch not in workloads:
            workloads[one.batch] = _workload(question, one.batch)
    tasks = {}
    for peer in peers:
        workload = workloads[found[peer.name].batch]
        tasks[peer.name] = partial(timed_step, workload, peer.start(workload))
    with uncollected():
        times = interleave(tasks, effort)
    plain = peers[0].name
    speeds = {name: summarise([found[name].batch / time.seconds for time in times[name]]) for name in tasks}
    rows = [
        BatchRow(
            name=name,
            peaks=one.peaks,
            nbytes_per_image=one.slope,
            fixed_nbytes=one.fixed,
            error=one.error,
            predicted=one.predicted,
            batch=one.batch,
            step_nbytes=one.step_nbytes,
            ratio=one.batch / found[plain].batch,
            images_per_second=speeds[name],
            seconds=summarise([time.seconds for time in times[name]]),
            speed=speeds[name].median / speeds[plain].median,
        )
        for name, one in found.items()
    ]
    some = next(iter(workloads.values()))
    return BatchTable(question, some.data, some.parameter_nbytes, len(times[plain]), tuple(rows))


def line(points: dict[int, float]) -> tuple[float, float]:
    """Slope and intercept of the straight line through ``points``, least squares."""
    slope, intercept = np.polynomial.Polynomial.fit(list(points), list(points.values()), 1).convert().coef[::-1]
    return float(slope), float(intercept)


def _largest(question: Question, peer: StepPeer) -> _Found:
    peaks, taken = {}, {}
    for batch in question.small:
        peaks[batch], taken[batch] = _count(question, peer, batch)
    slope, fixed = line(taken)
    error = max(abs(slope * batch + fixed - nbytes) / nbytes for batch, nbytes in taken.items())
    predicted = math.floor((question.budget_nbytes - fixed) / slope)
    batch, fits, too_many = max(1, predicted), 0, math.inf
    while fits < batch < too_many:
        _, taken[batch] = _count(question, peer, batch)
        left = question.budget_nbytes - taken[batch]
        if left >= 0:
            fits = batch
            batch = min(batch + math.floor(left / slope), int(min(too_many - 1, 2 * batch)))
        else:
            too_many = batch
            batch = max(fits + 1, batch - math.ceil(-left / slope)) if batch > 1 else 0
    if fits:
        return _Found(peaks, slope, fixed, error, predicted, fits, round(taken[fits]))
    raise ValueError(
        f"the largest batch of {question.network} in {mib(question.budget_nbytes)} MiB was asked for; {peer.name} "
        f"takes {mib(round(slope + fixed))} MiB for a single image; give a larger budget"
    )


def _count(question: Question, peer: StepPeer, batch: int) -> tuple[int, float]:
    """Counted peak of a step, and what it takes with parameters and gradients."""
    workload = _workload(question, batch)
    forward = peer.start(workload)
    _train(forward)
    with meter.CountedPeak() as counter:
        _train(forward)
    return counter.peak_nbytes, counter.peak_nbytes + 2.0 * workload.parameter_nbytes


def _train(forward: Forward) -> None:
    torch.autograd.backward([forward.loss()])


def _workload(question: Question, batch: int) -> Workload:
    return build(Case(question.network, question.network, batch, question.size), "cpu")


HEADER = ("stage", "MiB per image", "predicted", "batch", "x plain", "MiB at it", "images per s", "x plain", "step s")


def show(result: BatchTable) -> str:
    """The table of one question."""
    question = result.question
    facts = (
        f"{question.network}, {question.size}x{question.size} ({result.data}), budget {mib(question.budget_nbytes)} "
        f"MiB, of which parameters and gradients take {mib(2 * result.parameter_nbytes)}; {result.rounds} rounds"
    )
    note = f"predicted from batches of {', '.join(map(str, question.small))}; the batch itself was run and counted"
    return "\n".join([facts, table(HEADER, map(_line, result.rows)), note])


def _line(row: BatchRow) -> tuple[str, ...]:
    return (
        row.name,
        f"{row.nbytes_per_image / 2**20:.1f}",
        str(row.predicted),
        str(row.batch),
        f"{row.ratio:.2f}",
        mib(row.step_nbytes),
        spread(row.images_per_second),
        f"{row.speed:.3f}",
        f"{row.seconds.median:.2f}",
    )

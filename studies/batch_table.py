"""The largest batch whose training step fits a budget: plain PyTorch's and each stage's, and how fast they train.

What a step takes is its counted peak and, twice, its parameters: themselves and their gradients. Every activation is as
large as the batch, so the peak is nearly a straight line over it. The line is drawn through steps of a few small
batches, the largest batch is where it crosses the budget, and a real step of that batch is counted: where it takes more
than the budget the batch is made smaller and counted again, so that what is reported has been run. Each stage is timed
in turns with plain PyTorch, each at its own largest batch, so stages can be measured in runs of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from backstash.report import meter
from bench.cases import SEED, Case, Workload, build, image_batch
from bench.peers import StepPeer
from bench.peers.base import Forward
from bench.rounds import Effort, Summary, interleave, mib, spread, summarise, table
from bench.step_table import timed_step, uncollected
from tests import networks


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        network: a key of `networks.NETWORKS`.
        size: height and width of the images.
        budget_nbytes: what a step may take.
        small: the batches of the line.
        blocks, width: bottleneck blocks of each stage of a ResNet, and channels of its first stage; then ``network`` is
            only its name. None: as the network is registered.
    """

    network: str
    size: int
    budget_nbytes: int
    small: tuple[int, ...] = (4, 8, 12)
    blocks: tuple[int, ...] | None = None
    width: int = 64


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
        rounds: rounds that were timed, of the stage with the fewest.
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


def measure(
    question: Question, peers: Sequence[StepPeer], effort: Callable[[int], Effort], known: BatchTable | None = None
) -> Iterator[BatchTable]:
    """Finds each stage's largest batch and times it, in turns with plain's.

    Args:
        question: what is asked.
        peers: the stages, plain first.
        effort: rounds of the timing, of which so many stages are yet to be measured.
        known: what an earlier run has found; its stages are not measured again.

    Yields:
        The table so far, whenever a stage was measured.

    Raises:
        ValueError: not even a batch of 1 fits the budget.
    """
    rows = {row.name: row for row in known.rows} if known is not None else {}
    rounds = [known.rounds] if known is not None and known.rounds else []
    plain = peers[0]
    for number, peer in enumerate(peers):
        if peer.name in rows:
            continue
        found = _largest(question, peer)
        workload = _workload(question, found.batch)
        tasks = {peer.name: partial(timed_step, workload, peer.start(workload))}
        if peer is not plain:
            beside = _workload(question, rows[plain.name].batch)
            tasks[plain.name] = partial(timed_step, beside, plain.start(beside))
        with uncollected():
            times = interleave(tasks, effort(len(peers) - number))
        rounds.append(len(times[peer.name]))
        batches = {peer.name: found.batch, plain.name: rows[plain.name].batch if rows else found.batch}
        speeds = {name: summarise([batches[name] / time.seconds for time in times[name]]) for name in tasks}
        rows[peer.name] = BatchRow(
            name=peer.name,
            peaks=found.peaks,
            nbytes_per_image=found.slope,
            fixed_nbytes=found.fixed,
            error=found.error,
            predicted=found.predicted,
            batch=found.batch,
            step_nbytes=found.step_nbytes,
            ratio=found.batch / batches[plain.name],
            images_per_second=speeds[peer.name],
            seconds=summarise([time.seconds for time in times[peer.name]]),
            speed=speeds[peer.name].median / speeds[plain.name].median,
        )
        yield BatchTable(question, workload.data, workload.parameter_nbytes, min(rounds), tuple(rows.values()))


def table_of(found: Mapping[str, Any]) -> BatchTable:
    """The table that JSON made of one."""
    question: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in found["question"].items()
    }
    rows = [
        BatchRow(
            **{
                **row,
                "peaks": {int(batch): nbytes for batch, nbytes in row["peaks"].items()},
                "images_per_second": Summary(**row["images_per_second"]),
                "seconds": Summary(**row["seconds"]),
            }
        )
        for row in found["rows"]
    ]
    return BatchTable(Question(**question), found["data"], found["parameter_nbytes"], found["rounds"], tuple(rows))


def line(points: dict[int, float]) -> tuple[float, float]:
    """Slope and intercept of the straight line through ``points``, least squares."""
    slope, intercept = np.polynomial.Polynomial.fit(list(points), list(points.values()), 1).convert().coef[::-1]
    return float(slope), float(intercept)


def _largest(question: Question, peer: StepPeer) -> _Found:
    peaks, taken = {}, {}
    for batch in reversed(question.small):  # the largest first: what a candidate learns there holds for the others
        peaks[batch], taken[batch] = _count(question, peer, batch)
    slope, fixed = line(taken)
    if slope <= 0:  # a Session did more for the larger tensors
        slope, fixed = taken[max(taken)] / max(taken), 0.0
    error = max(abs(slope * batch + fixed - nbytes) / nbytes for batch, nbytes in taken.items())
    budget = question.budget_nbytes
    predicted = math.floor((budget - fixed) / slope)
    taken[0] = fixed
    fits = max((batch for batch in taken if taken[batch] <= budget), default=0)
    batch, too_many = max(fits + 1, predicted), 0
    while fits < batch and (batch < too_many or not too_many):
        _, taken[batch] = _count(question, peer, batch)
        if taken[batch] <= budget:
            fits = batch
        else:
            too_many = batch
        other = too_many or max(smaller for smaller in taken if smaller < fits)
        per_image = (taken[other] - taken[fits]) / (other - fits)
        batch = fits + math.floor(max(0.0, budget - taken[fits]) / (per_image if per_image > 0 else slope))
        batch = min(batch, too_many - 1 if too_many else 2 * fits)
    if fits:
        return _Found(dict(sorted(peaks.items())), slope, fixed, error, predicted, fits, round(taken[fits]))
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
    case = Case(question.network, question.network, batch, question.size)
    if question.blocks is None:
        return build(case, "cpu")
    torch.manual_seed(SEED)
    model = networks.resnet(question.blocks, num_classes=10, width=question.width)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    data, images, labels = image_batch(batch, question.size)
    labels = labels % 10

    def loss() -> Tensor:
        return functional.cross_entropy(model(images), labels)

    return Workload(case, model, "cpu", data, loss, loss, "0 segments")


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

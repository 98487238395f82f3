"""Stash ratios of exact mode: what plain PyTorch saves over what is stashed instead, network by network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from backstash import Session
from backstash.stash.ledger import CodecTotal
from bench.cases import SEED, image_batch
from bench.rounds import Deadline, mib, table
from bench.training import Schedule, Training, train
from tests import networks

TARGETS = {"vgg16": 3.2, "alexnet": 3.0, "squeezenet1_0": 4.8, "googlenet": 2.1, "resnet50": 1.25}
"""The ratios to reach."""

NETWORKS = ("vgg16", "alexnet", "squeezenet1_0", "googlenet", "resnet18", "resnet50", "nin", "overfeat")
QUICK_NETWORKS = ("vgg_small", "resnet_cifar20")


@dataclass(frozen=True)
class RatioRow:
    """The ratio of one forward pass.

    Attributes:
        network: a key of `networks.NETWORKS`.
        state: ``"initial"`` or ``"trained"``.
        batch: images.
        image_size: their height and width.
        data: what they show.
        saved_nbytes: bytes that plain PyTorch would hold, parameters excluded.
        stash_nbytes: bytes held instead.
        ratio: the one over the other.
        target: the ratio to reach with images of the published size; None where there is none.
        training: what happened before.
        by_codec: which codec did how much.
    """

    network: str
    state: str
    batch: int
    image_size: int
    data: str
    saved_nbytes: int
    stash_nbytes: int
    ratio: float
    target: float | None
    training: Training | None
    by_codec: tuple[CodecTotal, ...]


def measure(
    names: Sequence[str], device: str, deadline: Deadline, schedule: Schedule, batch: int = 2
) -> list[RatioRow]:
    """The ratios of each network: at the start and after a training, each at the published size of the images, and
    after the training at the size it was trained with.

    Args:
        names: keys of `networks.NETWORKS`.
        device: ``"cpu"`` or ``"cuda"``.
        deadline: trainings stop early to meet it.
        schedule: of the trainings.
        batch: images of the measured forward passes at the published size.
    """  # noqa: D205
    rows: list[RatioRow] = []
    for index, name in enumerate(names):
        rows += _measure_one(name, device, deadline.part(1 / (len(names) - index)), schedule, batch)
    return rows


def _measure_one(name: str, device: str, deadline: Deadline, schedule: Schedule, batch: int) -> list[RatioRow]:
    torch.manual_seed(SEED)
    model = networks.build(name).to(device)
    size = networks.NETWORKS[name].image_size
    initial = ratio(model, name, device, (batch, size), None)
    training = train(model, schedule, device, deadline.part(0.6))
    small = ratio(model, name, device, (schedule.batch, schedule.size), training)
    published = [] if schedule.size == size else [ratio(model, name, device, (batch, size), training)]
    return [initial, small, *published]


def ratio(model: nn.Module, name: str, device: str, shape: tuple[int, int], training: Training | None) -> RatioRow:
    """The ratio of one forward pass over ``(batch, size)`` images."""
    batch, size = shape
    data, images, labels = image_batch(batch, size)
    images, labels = images.to(device), labels.to(device)
    torch.manual_seed(SEED)
    with Session("lossless", model=model) as session:
        loss = functional.cross_entropy(model(images), labels)
    report = session.report()
    del loss  # until here: without it the graph, and what it saved, would be gone before it was counted
    return RatioRow(
        network=name,
        state="initial" if training is None else "trained",
        batch=batch,
        image_size=size,
        data=data,
        saved_nbytes=report.saved_nbytes,
        stash_nbytes=report.stash_nbytes,
        ratio=report.ratio,
        target=TARGETS.get(name) if size == networks.NETWORKS[name].image_size else None,
        training=training,
        by_codec=report.by_codec(),
    )


def show(rows: Sequence[RatioRow]) -> str:
    """The table of some rows."""
    header = ("network", "state", "images", "saved MiB", "stash MiB", "ratio", "target", "")
    lines = table(header, (_line(row) for row in rows))
    notes = [f"{row.network}: {row.training}" for row in rows if row.training is not None]
    return "\n".join([lines, "", "trained:", *(f"  {note}" for note in dict.fromkeys(notes))])


def _line(row: RatioRow) -> tuple[str, ...]:
    verdict = "" if row.target is None else "reached" if row.ratio >= row.target else "MISSED"
    return (
        row.network,
        row.state,
        f"{row.batch} of {row.image_size}",
        mib(row.saved_nbytes),
        mib(row.stash_nbytes),
        f"{row.ratio:.2f}",
        "" if row.target is None else f"{row.target:.2f}",
        verdict,
    )

"""Bounds that follow the gradients: ``python -m benchmarks.comet [--json FILE] [--seconds N] [--network NAME]``.

A small network is trained on Fashion-MNIST (or, where it is not installed, on scikit-learn's digits), several seeds,
with plain PyTorch, ``lossless``, COMET's rules (control.comet) with either codec, and values in 8, 4 and 2 bits
(``quantized``). Within a seed all begin from the same weights and see the same images in the same order. The table has
how much smaller the convolutions' stored inputs and the whole stash are, the test accuracy against plain training of
the same seed, and how far the measured deviation of the weight gradients is from the predicted and the wanted one.

What the program holds itself, the images, is in neither ratio. A value that is made again takes nothing, so where all
inputs of convolutions are, their ratio is infinite, ``null`` in the JSON.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn import functional

from backstash import Session, policies
from backstash.control import Comet, comet
from backstash.ledger import Entry
from backstash.policy import Policy
from benchmarks import datasets
from benchmarks.datasets import Dataset
from benchmarks.gist_accuracy import NETWORKS, Schedule, order_of, right
from benchmarks.results import Results
from benchmarks.rounds import Deadline, table

FORMAT = 1
"""Version of the JSON's layout."""

MakePolicy = Callable[[torch.optim.Optimizer], str | Policy]

VARIANTS: dict[str, MakePolicy] = {
    "plain": lambda optimizer: "keep",
    "lossless": lambda optimizer: "lossless",
    "comet-szp": lambda optimizer: comet(every=20, optimizer=optimizer),
    "comet-sz": lambda optimizer: comet(every=20, optimizer=optimizer, codec="sz"),
    "comet-all-szp": lambda optimizer: comet("conv+linear", every=20, optimizer=optimizer),
    "quantized-8": lambda optimizer: policies.quantized(8),
    "quantized-4": lambda optimizer: policies.quantized(4),
    "quantized-2": lambda optimizer: policies.quantized(2),
}
"""The plain one first: the others are compared with it. It runs under a Session that keeps everything."""

QUICK = Schedule(steps=24, seeds=(1,), batch=16, train_images=64, test_images=64, size=12)


@dataclass(frozen=True)
class Training:
    """What one training came to.

    Attributes:
        variant, seed: which.
        accuracy: share of the test images that it gets right.
        loss: mean of the last 20 steps; ``null`` in the JSON where it is no number.
        ratio: what plain PyTorch would have saved in the last step over what was stashed.
        conv_ratio: the same of the convolutions' inputs alone; None where they take nothing, or there are none.
        step_seconds: mean time of a step.
        predicted: measured over predicted deviation of weight gradients, of each sampled layer and collection.
        wanted: measured over wanted deviation.
        cosines: between the weight gradients and the exact ones.
    """

    variant: str
    seed: int
    accuracy: float
    loss: float
    ratio: float
    conv_ratio: float | None
    step_seconds: float
    predicted: tuple[float, ...] = ()
    wanted: tuple[float, ...] = ()
    cosines: tuple[float, ...] = ()


def train(network: str, variant: str, data: Dataset, schedule: Schedule, seed: int) -> Training:
    """Trains a network from the start and tests it.

    Args:
        network: a key of `NETWORKS`.
        variant: a key of `VARIANTS`.
        data: the images.
        schedule: how long.
        seed: of everything random.
    """
    torch.manual_seed(seed)
    model = NETWORKS[network]()
    optimizer = torch.optim.SGD(model.parameters(), schedule.learning_rate, momentum=0.9)
    policy = VARIANTS[variant](optimizer)
    session = Session(policy, model=model, min_nbytes=0)
    losses: list[float] = []
    started = time.perf_counter()
    for step, chosen in enumerate(order_of(len(data.train_labels), schedule, seed)):
        optimizer.param_groups[0]["lr"] = schedule.learning_rate * (1 - step / schedule.steps)
        optimizer.zero_grad()
        images, labels = data.train_images[chosen], data.train_labels[chosen]
        with nullcontext() if variant == "plain" and step < schedule.steps - 1 else session:
            loss = functional.cross_entropy(model(images), labels)
        torch.autograd.backward([loss])
        optimizer.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - started
    rows = [row for row in session.report().rows if not row.reason.startswith("held by the program")]
    ratio = _ratio(rows)
    records = policy.history if isinstance(policy, Comet) else ()
    measured = [(one, one.measured) for one in records if one.measured]
    return Training(
        variant,
        seed,
        right(model, data, schedule.batch) / len(data.test_labels),
        statistics.fmean(losses[-20:]),
        1.0 if ratio is None else ratio,
        _ratio(row for row in rows if _feeds_a_convolution(row)),
        seconds / schedule.steps,
        tuple(number / one.predicted for one, number in measured if one.predicted),
        tuple(number / one.target for one, number in measured if one.target),
        tuple(one.cosine for one, _ in measured if one.cosine is not None),
    )


def _feeds_a_convolution(row: Entry) -> bool:
    return any("/Convolution#" in key and key.endswith(":input") for key in (row.key, *row.shared_by))


def _ratio(rows: Iterable[Entry]) -> float | None:
    rows = list(rows)
    stashed = sum(row.stash_nbytes for row in rows)
    return sum(row.saved_nbytes for row in rows) / stashed if stashed else None


def fit(network: str, schedule: Schedule, data: Dataset, seconds: float) -> Schedule:
    """The schedule with as many steps as the time has room for, going by a few steps of each variant."""
    trial = replace(schedule, steps=min(25, schedule.steps))
    started = time.monotonic()
    per_step = sum(train(network, variant, data, trial, schedule.seeds[0]).step_seconds for variant in VARIANTS)
    left = 0.8 * (seconds - (time.monotonic() - started))  # the rest is for the tests
    return replace(schedule, steps=max(1, min(schedule.steps, int(left / (per_step * len(schedule.seeds))))))


def show(trainings: Sequence[Training]) -> str:
    """A row for each variant: means over the seeds, medians of the deviations; accuracies in percent."""
    plain = {one.seed: one.accuracy for one in trainings if one.variant == "plain"}
    header = (
        *("variant", "conv inputs", "stash", "accuracy %", "vs plain", "min", "max", "loss", "ms/step"),
        *("sigma/predicted", "sigma/wanted", "least cosine"),
    )
    lines = []
    for variant in VARIANTS:
        group = [one for one in trainings if one.variant == variant]
        against = [100 * (one.accuracy - plain[one.seed]) for one in group]
        ratios = [math.inf if one.conv_ratio is None else one.conv_ratio for one in group]
        lines.append(
            (
                variant,
                f"{statistics.fmean(ratios):.2f}",
                f"{statistics.fmean(one.ratio for one in group):.2f}",
                f"{100 * statistics.fmean(one.accuracy for one in group):.2f}",
                f"{statistics.fmean(against):+.2f}",
                f"{min(against):+.2f}",
                f"{max(against):+.2f}",
                f"{statistics.fmean(one.loss for one in group):.3f}",
                f"{1000 * statistics.fmean(one.step_seconds for one in group):.1f}",
                _median(number for one in group for number in one.predicted),
                _median(number for one in group for number in one.wanted),
                f"{min(cosines):.4f}" if (cosines := [number for one in group for number in one.cosines]) else "",
            )
        )
    return table(header, lines)


def _median(numbers: Iterable[float]) -> str:
    numbers = list(numbers)
    return f"{statistics.median(numbers):.2f}" if numbers else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains everything, prints the table, writes the JSON; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comet", description="Bounds that follow the gradients.")
    parser.add_argument("--json", type=Path, help="the file to write (default: none)")
    parser.add_argument("--seconds", type=float, default=120.0, help="for everything (default: 120)")
    parser.add_argument("--network", choices=sorted(NETWORKS), default="small_vgg", help="default: small_vgg")
    parser.add_argument("--quick", action="store_true", help="a few steps on small images: shows that everything runs")
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST's files (default: where Debian puts them)")
    asked = parser.parse_args(arguments)
    deadline = Deadline.after(asked.seconds)
    results = Results("comet", asked.json, arguments, format=FORMAT, quick=asked.quick)
    schedule = QUICK if asked.quick else Schedule(steps=1000, size=16)
    data = datasets.load(None, schedule.size, asked.data, max(schedule.train_images, schedule.test_images))
    if not asked.quick:
        schedule = fit(asked.network, schedule, data, deadline.left())
    about = (
        f"{asked.network} on {data.name} at {schedule.size}x{schedule.size}: {len(data.train_labels)} training images, "
        f"{len(data.test_labels)} test images; {schedule.steps} steps of {schedule.batch} images, "
        f"{len(schedule.seeds)} seeds"
    )
    print(f"{about}\n", flush=True)
    results.write(about=about, data=data.name, network=asked.network, schedule=schedule)
    trainings = []
    for seed in schedule.seeds:  # seed by seed: what is there when somebody stops it can be compared
        for variant in VARIANTS:
            trainings.append(train(asked.network, variant, data, schedule, seed))
            results.write(trainings=trainings)
    print(show(trainings))
    print(f"\n{results.close()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

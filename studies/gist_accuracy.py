"""Test accuracy with reduced precision: ``python -m studies.gist_accuracy --json FILE [--seconds N] [--quick]``.

Two small networks are trained on Fashion-MNIST (or, where it is not installed, on scikit-learn's digits), several seeds
each, with: plain PyTorch; Gist, which reduces what is stashed for backward and leaves the forward pass as it is
(delayed); and the same formats for every activation as soon as it is computed (all), which is why Gist delays.

Within a seed all variants begin from the same weights and see the same images in the same order, so each is compared
with the plain training of its seed.

The file is long because the variants, the training and the tables belong to one result file.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from backstash import Session, codecs, policies
from backstash.codecs import Codec
from backstash.policies.base import Policy
from bench import datasets
from bench.datasets import Dataset
from bench.results import Results
from bench.rounds import Deadline, table
from tests.networks.initialisation import initialise, kaiming_fan_in

FORMAT = 1
"""Version of the JSON's layout."""


@dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        name: what the table calls it.
        stashed: makes the policy of the Session that the training runs under; None for plain PyTorch.
        computed: makes the codec that every module's output goes through in the forward pass; None for none.
    """

    name: str
    stashed: Callable[[], str | Policy] | None = None
    computed: Callable[[], Codec] | None = None


def gist(form: str) -> Variant:
    """Reduced to ``form`` after the forward pass has used it. As in the paper, nothing is made again."""
    return Variant(f"gist-{form}", stashed=lambda: policies.gist(form, recompute=False))


def everywhere(form: str) -> Variant:
    """Reduced to ``form`` as soon as it is computed."""
    return Variant(f"all-{form}", computed=lambda: codecs.get("minifloat", format=form))


VARIANTS = (Variant("plain"), gist("fp16"), gist("fp10"), gist("fp8"), everywhere("fp10"), everywhere("fp8"))
"""The plain one first: the others are compared with it."""


@dataclass(frozen=True)
class Schedule:
    """How long and on what to train.

    Attributes:
        steps: optimizer steps of each training; fewer where the time does not suffice, as many for all.
        seeds: of weights, order of the images and dropout.
        batch: images per step.
        train_images, test_images: how many images there are.
        size: their height and width.
        learning_rate: of SGD with momentum 0.9 at the first step, falling linearly to 0.
    """

    steps: int = 400
    seeds: tuple[int, ...] = (1, 2, 3)
    batch: int = 64
    train_images: int = 12_800
    test_images: int = 5_000
    size: int = 28
    learning_rate: float = 0.05


QUICK = Schedule(steps=2, batch=16, train_images=64, test_images=64, size=12)


@dataclass(frozen=True)
class Training:
    """What one training came to.

    Attributes:
        network: a key of `NETWORKS`.
        variant: name of the variant.
        seed: its seed.
        accuracy: share of the test images that it gets right, run as it was trained; not a number counts as wrong.
        losses: of each step; the JSON has some twenty of them.
        ratio: what plain PyTorch would have saved in the last step over what was stashed; None without a Session.
        seconds: of all steps.
    """

    network: str
    variant: str
    seed: int
    accuracy: float
    losses: tuple[float, ...]
    ratio: float | None
    seconds: float


@dataclass(frozen=True)
class Row:
    """The trainings of a network and variant over all seeds.

    Attributes:
        network, variant: which.
        mean, low, high, deviation: of the accuracy; the deviation is the sample's, 0 for one seed.
        versus_plain: mean over the seeds of the accuracy less that of the plain training.
        last_loss: mean of the last steps' losses.
        ratio: mean stash ratio, None without a Session.
        step_seconds: mean time of a step.
        count: number of seeds.
    """

    network: str
    variant: str
    mean: float
    low: float
    high: float
    deviation: float
    versus_plain: float
    last_loss: float
    ratio: float | None
    step_seconds: float
    count: int


# -- networks ----------------------------------------------------------------------------------------------------------


def small_vgg() -> nn.Module:
    """Five 3x3 convolutions in the manner of VGG: [N, 1, H, W], H and W at least 8, to logits [N, 10]."""
    layers: list[nn.Module] = []
    channels = 1
    for stage in ((8, 8), (16, 16), (32,)):
        for width in stage:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    head = (nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(channels * 9, 64), nn.ReLU(), nn.Linear(64, 10))
    network = nn.Sequential(*layers, *head)
    initialise(network, convolution=kaiming_fan_in)
    return network


class Mixed(nn.Module):
    """Three branches joined along the channels, as in Inception, with a shortcut around them, as in ResNet.

    Maps [N, 3 * width, H, W] to the same shape.
    """

    def __init__(self, width: int) -> None:
        """Takes the channels of each branch."""
        super().__init__()
        channels = 3 * width
        self.small = _normalised(channels, width, 1)
        self.large = nn.Sequential(_normalised(channels, width, 1), _normalised(width, width, 3))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), _normalised(channels, width, 1))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Joins the branches and adds the shortcut."""
        out: Tensor = self.relu(x + torch.cat([self.small(x), self.large(x), self.pooled(x)], 1))
        return out


def small_inception() -> nn.Module:
    """Three mixed blocks behind a convolution: [N, 1, H, W], H and W at least 4, to logits [N, 10]."""
    network = nn.Sequential(
        _normalised(1, 24, 3, stride=2),
        Mixed(8),
        _normalised(24, 48, 3),
        nn.MaxPool2d(2),
        Mixed(16),
        Mixed(16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, 10),
    )
    initialise(network, convolution=kaiming_fan_in)
    return network


def _normalised(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels), nn.ReLU())


NETWORKS: dict[str, Callable[[], nn.Module]] = {"small_vgg": small_vgg, "small_inception": small_inception}


# -- training ----------------------------------------------------------------------------------------------------------


class _Rounded(torch.autograd.Function):
    """The value through a codec and back, its gradient as it is (straight-through)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codec: Codec) -> Tensor:
        return codec.decode(codec.encode(x))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


@contextmanager
def rounding(model: nn.Module, codec: Codec | None) -> Iterator[None]:
    """Inside the ``with`` the output of each module without children goes through ``codec``, with None nothing does."""

    def rounded(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return _Rounded.apply(output, codec)  # type: ignore[no-any-return]

    leaves = [module for module in model.modules() if not any(module.children())]
    handles = [leaf.register_forward_hook(rounded) for leaf in leaves if codec is not None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def train(network: str, variant: Variant, data: Dataset, schedule: Schedule, seed: int) -> Training:
    """Trains a network from the start and tests it.

    Args:
        network: a key of `NETWORKS`.
        variant: how.
        data: the images.
        schedule: how long.
        seed: of everything random.
    """
    torch.manual_seed(seed)
    model = NETWORKS[network]()
    session = None if variant.stashed is None else Session(variant.stashed(), model=model, min_nbytes=0)
    optimizer = torch.optim.SGD(model.parameters(), schedule.learning_rate, momentum=0.9)
    order = order_of(len(data.train_labels), schedule, seed)
    losses: list[float] = []
    ratio = None
    with rounding(model, None if variant.computed is None else variant.computed()):
        started = time.perf_counter()
        for step, chosen in enumerate(order):
            optimizer.param_groups[0]["lr"] = schedule.learning_rate * (1 - step / schedule.steps)
            optimizer.zero_grad()
            with session or nullcontext():
                loss = functional.cross_entropy(model(data.train_images[chosen]), data.train_labels[chosen])
            if session is not None and step == schedule.steps - 1:
                ratio = session.report().ratio
            torch.autograd.backward([loss])
            optimizer.step()
            losses.append(loss.item())
        seconds = time.perf_counter() - started
        hits = right(model, data, schedule.batch)
    return Training(network, variant.name, seed, hits / len(data.test_labels), tuple(losses), ratio, seconds)


def order_of(count: int, schedule: Schedule, seed: int) -> Iterator[Tensor]:
    """The images of each step, [batch]: a new order whenever all have been seen."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.empty(0, dtype=torch.int64)
    for _ in range(schedule.steps):
        while len(left) < schedule.batch:
            left = torch.cat([left, torch.randperm(count, generator=generator)])
        yield left[: schedule.batch]
        left = left[schedule.batch :]


def right(model: nn.Module, data: Dataset, batch: int) -> int:
    """How many test images the network gets right."""
    model.eval()
    hits = 0
    with torch.no_grad():
        for images, labels in zip(data.test_images.split(batch), data.test_labels.split(batch), strict=True):
            logits = model(images)
            hits += int(((logits.argmax(1) == labels) & logits.isfinite().all(1)).sum())
    return hits


# -- all of it ---------------------------------------------------------------------------------------------------------


def fit(schedule: Schedule, data: Dataset, variants: Sequence[Variant], seconds: float) -> Schedule:
    """The schedule with as many steps as the time has room for, going by a few steps of each network and variant."""
    trial = replace(schedule, steps=min(3, schedule.steps))
    few = _some(data, trial.batch)
    per_step = 0.0
    started = time.monotonic()
    for network in NETWORKS:
        for variant in variants:
            train(network, variant, few, trial, schedule.seeds[0])  # what is made once
            per_step += train(network, variant, few, trial, schedule.seeds[0]).seconds / trial.steps
    left = 0.85 * (seconds - (time.monotonic() - started))  # the rest is for the tests
    steps = int(left / (per_step * len(schedule.seeds)))
    return replace(schedule, steps=max(1, min(schedule.steps, steps)))


def _some(data: Dataset, count: int) -> Dataset:
    parts = (data.train_images, data.train_labels, data.test_images, data.test_labels)
    return Dataset(data.name, data.classes, *(part[:count] for part in parts))


def summarise(trainings: Sequence[Training]) -> list[Row]:
    """One row for each network and variant, in order of appearance."""
    plain = {(one.network, one.seed): one.accuracy for one in trainings if one.variant == VARIANTS[0].name}
    groups: dict[tuple[str, str], list[Training]] = {}
    for one in sorted(trainings, key=lambda one: list(NETWORKS).index(one.network)):
        groups.setdefault((one.network, one.variant), []).append(one)
    return [_row(group, plain) for group in groups.values()]


def _row(group: Sequence[Training], plain: dict[tuple[str, int], float]) -> Row:
    accuracies = [one.accuracy for one in group]
    ratios = [one.ratio for one in group if one.ratio is not None]
    return Row(
        network=group[0].network,
        variant=group[0].variant,
        mean=statistics.fmean(accuracies),
        low=min(accuracies),
        high=max(accuracies),
        deviation=statistics.stdev(accuracies) if len(group) > 1 else 0.0,
        versus_plain=statistics.fmean(one.accuracy - plain[one.network, one.seed] for one in group),
        last_loss=statistics.fmean(one.losses[-1] for one in group),
        ratio=statistics.fmean(ratios) if ratios else None,
        step_seconds=statistics.fmean(one.seconds / len(one.losses) for one in group),
        count=len(group),
    )


def show(rows: Iterable[Row]) -> str:
    """The table: accuracies in percent."""
    header = ("network", "variant", "accuracy %", "deviation", "min", "max", "vs plain", "loss", "ratio", "ms/step")
    return table(header, (_line(row) for row in rows))


def _line(row: Row) -> tuple[str, ...]:
    percent = [f"{100 * value:.2f}" for value in (row.mean, row.deviation, row.low, row.high)]
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    versus = f"{100 * row.versus_plain:+.2f}"
    return (
        row.network,
        row.variant,
        *percent,
        versus,
        f"{row.last_loss:.3f}",
        ratio,
        f"{1000 * row.step_seconds:.1f}",
    )


def main(arguments: Sequence[str] | None = None, variants: Sequence[Variant] = VARIANTS) -> int:
    """Trains everything, prints the table, writes the JSON; returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.gist_accuracy", description="Test accuracy with reduced precision."
    )
    parser.add_argument("--json", type=Path, help="the file to write (default: none)")
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything (default: 540)")
    parser.add_argument("--quick", action="store_true", help="a few steps on small images: shows that everything runs")
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST's files (default: where Debian puts them)")
    asked = parser.parse_args(arguments)
    deadline = Deadline.after(asked.seconds)
    results = Results("studies.gist_accuracy", asked.json, arguments, format=FORMAT, quick=asked.quick, complete=False)
    schedule = QUICK if asked.quick else Schedule()
    data = datasets.load(None, schedule.size, asked.data, max(schedule.train_images, schedule.test_images))
    data = Dataset(
        data.name,
        data.classes,
        data.train_images[: schedule.train_images],
        data.train_labels[: schedule.train_images],
        data.test_images[: schedule.test_images],
        data.test_labels[: schedule.test_images],
    )
    schedule = fit(schedule, data, variants, deadline.left())
    about = (
        f"{data.name} at {schedule.size}x{schedule.size}: {len(data.train_labels)} training images, "
        f"{len(data.test_labels)} test images; {schedule.steps} steps of {schedule.batch} images, "
        f"{len(schedule.seeds)} seeds"
    )
    print(f"{about}\n", flush=True)
    trainings: list[Training] = []
    results.write(about=about, data=data.name, schedule=schedule)
    for seed in schedule.seeds:  # seed by seed: what is there when somebody stops it can be compared
        for network in NETWORKS:
            trainings += (train(network, variant, data, schedule, seed) for variant in variants)
        rows = summarise(trainings)
        results.write(rows=rows, trainings=[_thinned(one) for one in trainings], complete=seed == schedule.seeds[-1])
    print(show(rows))
    print(f"\n{results.close()}")
    return 0


def _thinned(training: Training) -> dict[str, Any]:
    losses = training.losses
    return asdict(training) | {"losses": losses[:: max(1, len(losses) // 20)]}


if __name__ == "__main__":
    raise SystemExit(main())

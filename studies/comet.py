"""Bounds that follow the gradients: ``python -m studies.comet [--json FILE] [--seconds N] [--network NAME]``.

A network is trained on Fashion-MNIST (or, where it is not installed, on scikit-learn's digits) with plain PyTorch,
``lossless``, COMET's rules (policies.comet), JPEG-ACT's transform of what convolutions read (jpeg_act), and values in
8, 4 and 2 bits (``quantized``). Within a seed all begin from the same weights and see the same images in the same
order, and all make a step in turn, so that a step's times can be compared. The table has how much smaller the
convolutions' stored inputs and the whole stash are, the counted peak, a step's time over the plain one's, the test
accuracy against plain training of the same seed, and how far the measured deviation of the weight gradients is from the
predicted and the wanted one. A second table has COMET's own equation for the bound beside ours.

What the program holds itself, the images, is in no ratio. A value that is made again takes nothing, so where all inputs
of convolutions are, their ratio is infinite, ``null`` in the JSON.

The file is long because the variants, the training and the tables belong to one result file.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from backstash import Session, policies
from backstash.codecs import Binary, Signed, Szp, Zvc
from backstash.papers.comet import Comet, bound_for, comet, comet_bound
from backstash.papers.comet.bound import channel_norms, coverage
from backstash.policies import Policy, Rules, Stash
from backstash.report.meter import CountedPeak
from backstash.stash.ledger import Entry
from bench import datasets
from bench.datasets import Dataset
from bench.results import Results
from bench.rounds import Deadline, Summary, mib, summarise, table
from studies import gist_accuracy
from studies.gist_accuracy import Schedule, order_of, right
from studies.jpeg_act import Dct
from tests import networks
from tests.networks.initialisation import initialise, kaiming_fan_in

FORMAT = 2
"""Version of the JSON's layout."""

MakePolicy = Callable[[torch.optim.Optimizer, int], str | Policy]


def _jpeg_act(optimizer: torch.optim.Optimizer, every: int) -> Policy:
    """What convolutions read through JPEG-ACT's transform, with a bit per element where a relu reads it too."""
    images = Stash((Dct(), Signed(Dct()), Binary(), Zvc()))
    return Rules((("*/Convolution#*:input", images),), policies.get("lossless"))


VARIANTS: dict[str, MakePolicy] = {
    "plain": lambda optimizer, every: "keep",
    "lossless": lambda optimizer, every: "lossless",
    "comet-conv": lambda optimizer, every: comet("conv", 0.01, every, "sz", optimizer),
    "comet-szp": lambda optimizer, every: comet("conv+norm", 0.01, every, "szp", optimizer),
    "comet-1": lambda optimizer, every: comet("conv+norm", 0.01, every, "sz", optimizer),
    "comet-5": lambda optimizer, every: comet("conv+norm", 0.05, every, "sz", optimizer),
    "comet-10": lambda optimizer, every: comet("conv+norm", 0.10, every, "sz", optimizer),
    "dct": _jpeg_act,
    "quantized-8": lambda optimizer, every: policies.quantized(8),
    "quantized-4": lambda optimizer, every: policies.quantized(4),
    "quantized-2": lambda optimizer, every: policies.quantized(2),
}
"""The plain one first: the others are compared with it. It runs under a Session that keeps everything, in its last step
only. The number behind ``comet`` is sigma in percent; ``comet-conv`` leaves what batch norms read exact, as COMET."""


def _small_head(name: str) -> nn.Module:
    """A network of the paper for small images: one feature per channel, 512 hidden ones, Kaiming weights."""
    network = networks.build(name, num_classes=10, in_channels=1)
    channels = {"alexnet": 256, "vgg16": 512}[name]
    network.pool = nn.AdaptiveAvgPool2d(1)
    network.classifier = nn.Sequential(
        nn.Dropout(),
        nn.Linear(channels, 512),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(512, 512),
        nn.ReLU(inplace=True),
        nn.Linear(512, 10),
    )
    initialise(network, convolution=kaiming_fan_in)
    return network


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    **gist_accuracy.NETWORKS,
    "alexnet": lambda: _small_head("alexnet"),
    "vgg16": lambda: _small_head("vgg16"),
    "resnet18": lambda: networks.build("resnet18", num_classes=10, in_channels=1),
    "resnet50": lambda: networks.build("resnet50", num_classes=10, in_channels=1),
}
"""Two small ones, and the four that COMET was measured with. AlexNet and VGG16 have a smaller classifier here, as the
published one has up to ten times the parameters of the rest, for features that 64x64 images do not have."""

_LARGE = Schedule(steps=2000, seeds=(1,), batch=32, train_images=6400, test_images=500, size=64, learning_rate=0.02)
SCHEDULES: dict[str, Schedule] = {
    "small_vgg": Schedule(steps=1000, size=16),
    "small_inception": Schedule(steps=1000, size=16),
    "alexnet": replace(_LARGE, test_images=2000),
    "vgg16": replace(_LARGE, size=32, test_images=2000, learning_rate=0.01),
    "resnet18": replace(_LARGE, batch=16),
    "resnet50": replace(_LARGE, size=32, test_images=2000),
}
"""The most steps; fewer where the time does not suffice. VGG16 and ResNet-50 would come to a few dozen at 64x64."""

QUICK = Schedule(steps=24, seeds=(1,), batch=16, train_images=64, test_images=64, size=12)
EVERY = 10
"""Steps between collections, and exact steps at first."""


@dataclass(frozen=True)
class Part:
    """Saved tensors of a kind in the last step.

    Attributes:
        kind: node and role of all who read it.
        codec: what they are stored as, without its parameters.
        saved_nbytes, stash_nbytes: dense, and held.
    """

    kind: str
    codec: str
    saved_nbytes: int
    stash_nbytes: int


@dataclass(frozen=True)
class Training:
    """What one training came to.

    Attributes:
        variant, seed: which.
        steps: done; fewer than the schedule's where the time was up.
        accuracy: share of the test images that it gets right.
        loss: mean of the last 20 steps; ``null`` in the JSON where it is no number.
        ratio: what plain PyTorch would have saved in the last step over what was stashed.
        conv_ratio: the same of the convolutions' inputs alone; None where they take nothing, or there are none.
        norm_ratio: the same of the batch norms' inputs.
        stash_nbytes: what was stashed.
        peak_nbytes: the most that a step allocates beside parameters and gradients; of two steps the smaller one, as
            one of them may collect statistics.
        step_seconds: mean time of a step.
        overhead: a step's time over the plain one's, in the same turn; None for the plain one.
        mean_overhead: all steps' time over the plain ones', with those that collect statistics.
        ordinary: as ``overhead``, of the steps alone that neither collect statistics nor follow one that does. Here one
            step in a few collects, in long trainings one in a hundred, and one in a thousand in COMET's.
        collection: what the others take beyond an ordinary step, in plain steps for each collection; None without any.
        parts: what the stash is made of, the largest first.
        predicted: measured over predicted deviation of weight gradients, of each sampled layer and collection.
        wanted: measured over wanted deviation.
        cosine: the least one between a weight gradient and the exact one.
    """

    variant: str
    seed: int
    steps: int
    accuracy: float
    loss: float
    ratio: float
    conv_ratio: float | None
    norm_ratio: float | None
    stash_nbytes: int
    peak_nbytes: int
    step_seconds: float
    overhead: Summary | None
    mean_overhead: float
    parts: tuple[Part, ...]
    predicted: Summary | None = None
    wanted: Summary | None = None
    cosine: float | None = None
    ordinary: Summary | None = None
    collection: float | None = None


@dataclass(frozen=True)
class Equation:
    """A layer's bounds, by our error model and by COMET's equation 3, after the plain training.

    Attributes:
        layer: its path.
        measured: deviation of its weight gradient's error at our bound, over the wanted one.
        maxima: equation 3's bound over ours, with means over samples of the largest magnitude in the output's gradient.
        means: the same with mean magnitudes.
    """

    layer: str
    measured: float
    maxima: float
    means: float


@dataclass(eq=False)
class _Run:
    """A variant's training in progress."""

    variant: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    session: Session
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def gradients(self, images: Tensor, labels: Tensor, seed: int, manager: AbstractContextManager[object]) -> Tensor:
        """Forward and backward; the loss."""
        torch.manual_seed(seed)
        with manager:
            loss = functional.cross_entropy(self.model(images), labels)
        torch.autograd.backward([loss])
        return loss.detach()

    def step(self, images: Tensor, labels: Tensor, rate: float, seed: int, plainly: bool) -> None:
        """One of the training."""
        self.optimizer.param_groups[0]["lr"] = rate
        started = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.gradients(images, labels, seed, nullcontext() if plainly else self.session)
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(loss.item())

    def peak(self, images: Tensor, labels: Tensor) -> int:
        """Counted in two steps that change nothing but gradients."""
        found = []
        for _ in range(2):
            self.optimizer.zero_grad(set_to_none=False)
            with CountedPeak() as counter:
                self.gradients(images, labels, 0, nullcontext() if self.variant == "plain" else self.session)
            found.append(counter.peak_nbytes)
        return min(found)


def begin(network: str, variant: str, schedule: Schedule, seed: int, every: int) -> _Run:
    """A variant's training before its first step."""
    torch.manual_seed(seed)
    model = NETWORKS[network]()
    optimizer = torch.optim.SGD(model.parameters(), schedule.learning_rate, momentum=0.9)
    return _Run(variant, model, optimizer, Session(VARIANTS[variant](optimizer, every), model=model, min_nbytes=0))


def train(
    network: str,
    variants: Sequence[str],
    data: Dataset,
    schedule: Schedule,
    seed: int,
    every: int = EVERY,
    deadline: Deadline | None = None,
) -> list[_Run]:
    """Trains a network from the start with all variants, a step of each in turn.

    Args:
        network: a key of `NETWORKS`.
        variants: keys of `VARIANTS`.
        data: the images.
        schedule: how long.
        seed: of everything random.
        every: steps between collections.
        deadline: when to stop, though the schedule had more steps.
    """
    runs = [begin(network, variant, schedule, seed, every) for variant in variants]
    for step, chosen in enumerate(order_of(len(data.train_labels), schedule, seed)):
        images, labels = data.train_images[chosen], data.train_labels[chosen]
        rate = schedule.learning_rate * (1 - step / schedule.steps)
        last = step == schedule.steps - 1 or (deadline is not None and deadline.left() < 0)
        for run in runs:
            run.step(images, labels, rate, seed * 100_000 + step, plainly=run.variant == "plain" and not last)
        if last:
            break
    return runs


def outcome(run: _Run, plain: _Run, data: Dataset, schedule: Schedule, seed: int, every: int = EVERY) -> Training:
    """What a training came to, tested."""
    rows = [row for row in run.session.report().rows if not row.reason.startswith("held by the program")]
    ratio = _ratio(rows)
    policy = run.session.policy
    records = policy.history if isinstance(policy, Comet) else ()
    measured = [(one, one.measured) for one in records if one.measured]
    pairs = list(zip(run.seconds, plain.seconds, strict=True))[every:-1] or [(1.0, 1.0)]  # bounded; plain without hooks
    ordinary, collection = _ordinary([own / of_plain for own, of_plain in pairs], {one.step - every for one in records})
    peak = run.peak(data.train_images[: schedule.batch], data.train_labels[: schedule.batch])
    return Training(
        run.variant,
        seed,
        len(run.losses),
        right(run.model, data, schedule.batch) / len(data.test_labels),
        statistics.fmean(run.losses[-20:]),
        1.0 if ratio is None else ratio,
        _ratio(row for row in rows if _is_read(row, "Convolution")),
        _ratio(row for row in rows if _is_read(row, "NativeBatchNorm") and not _is_read(row, "Convolution")),
        sum(row.stash_nbytes for row in rows),
        peak,
        statistics.fmean(run.seconds),
        None if run is plain else summarise([seconds / of_plain for seconds, of_plain in pairs]),
        sum(seconds for seconds, _ in pairs) / sum(seconds for _, seconds in pairs),
        _parts(rows),
        _summary(number / one.predicted for one, number in measured if one.predicted),
        _summary(number / one.target for one, number in measured if one.target),
        min((one.cosine for one, _ in measured if one.cosine is not None), default=None),
        None if run is plain else ordinary,
        collection,
    )


def _ordinary(overheads: Sequence[float], collected: set[int]) -> tuple[Summary | None, float | None]:
    """See Training.ordinary and Training.collection.

    Args:
        overheads: of each step.
        collected: numbers of the steps that collect, the first of ``overheads`` being 1; others are not among these.
    """
    others = {number for one in collected for number in (one, one + 1)}
    ordinary = _summary(overhead for number, overhead in enumerate(overheads, 1) if number not in others)
    begun = [number for number in collected if 1 <= number < len(overheads)]
    if ordinary is None or not begun:
        return ordinary, None
    taken = [overheads[number - 1] for number in {number for one in begun for number in (one, one + 1)}]
    return ordinary, sum(overhead - ordinary.median for overhead in taken) / len(begun)


def _summary(numbers: Iterable[float]) -> Summary | None:
    numbers = list(numbers)
    return summarise(numbers) if numbers else None


def _is_read(row: Entry, op: str) -> bool:
    return any(f"/{op}#" in key and key.endswith(":input") for key in (row.key, *row.shared_by))


def _ratio(rows: Iterable[Entry]) -> float | None:
    rows = list(rows)
    stashed = sum(row.stash_nbytes for row in rows)
    return sum(row.saved_nbytes for row in rows) / stashed if stashed else None


def _parts(rows: Iterable[Entry], count: int = 6) -> tuple[Part, ...]:
    sizes: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        readers = {key.rsplit("/", 1)[-1] for key in (row.key, *row.shared_by)}
        kind = ", ".join(sorted({f"{key.split('#')[0]}:{key.rsplit(':', 1)[-1]}" for key in readers}))
        known = sizes[kind, row.codec.split("+")[0]]
        known[0] += row.saved_nbytes
        known[1] += row.stash_nbytes
    parts = [Part(kind, codec, saved, stashed) for (kind, codec), (saved, stashed) in sizes.items()]
    return tuple(sorted(parts, key=lambda part: -part.stash_nbytes)[:count])


def equation(run: _Run, images: Tensor, labels: Tensor, sigma: float = 0.01) -> list[Equation]:
    """Equation 3's bounds beside ours, of every convolution behind the first one.

    Args:
        run: after a training; its gradients are overwritten.
        images, labels: of one step.
        sigma: share of the momentum's mean magnitude.
    """
    layers = {name: layer for name, layer in run.model.named_modules() if isinstance(layer, nn.Conv2d)}
    inputs: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    handles = []
    for name, layer in list(layers.items())[1:]:

        def look(module: nn.Module, given: tuple[Tensor], made: Tensor, name: str = name) -> None:
            inputs[name] = given[0].detach().clone()
            made.register_hook(lambda grad: gradients.__setitem__(name, grad.detach().clone()))

        handles.append(layer.register_forward_hook(look))
    run.gradients(images, labels, 0, nullcontext())
    for handle in handles:
        handle.remove()
    rows = []
    for name, grad in gradients.items():
        layer, x = layers[name], inputs[name]
        state = run.optimizer.state[layer.weight]["momentum_buffer"]
        wanted, nonzero = sigma * float(state.abs().mean()), float(x.count_nonzero()) / x.numel()
        geometry = layer.stride, layer.padding, layer.dilation
        covered = coverage(x.shape[2:], grad.shape[2:], layer.kernel_size, *geometry)  # type: ignore[arg-type]
        ours = bound_for(wanted, channel_norms(grad), nonzero * covered)
        sizes = grad.abs().flatten(1)
        by_maxima, by_means = (
            comet_bound(wanted, float(loss_gradient), len(x), nonzero)
            for loss_gradient in (sizes.amax(1).mean(), sizes.mean())
        )
        codec = Szp(ours)
        error = codec.decode(codec.encode(x)) - x
        off = conv2d_weight(error, layer.weight.shape, grad, *geometry, layer.groups)  # type: ignore[arg-type]
        rows.append(Equation(name, float(off.square().mean().sqrt()) / wanted, by_maxima / ours, by_means / ours))
    return rows


def fit(network: str, variants: Sequence[str], schedule: Schedule, data: Dataset, seconds: float) -> Schedule:
    """The schedule with as many steps as the time has room for, going by a few steps of each variant."""
    trial = replace(schedule, steps=min(12, schedule.steps))
    started = time.monotonic()
    runs = train(network, variants, data, trial, schedule.seeds[0], every=2)
    per_step = sum(statistics.median(run.seconds[4:]) for run in runs)
    tests = len(data.test_labels) / schedule.batch / 2 + 8  # a forward pass is half a step; and some for the peaks
    left = 0.8 * (seconds - (time.monotonic() - started))
    for_one = left / len(schedule.seeds) - len(runs) * tests * statistics.median(runs[0].seconds[4:-1])
    return replace(schedule, steps=max(1, min(schedule.steps, int(for_one / per_step))))


def show(trainings: Sequence[Training]) -> str:
    """A row for each variant: means over the seeds, medians of the deviations; accuracies in percent."""
    plain = {one.seed: one for one in trainings if one.variant == "plain"}
    header = (
        *("variant", "conv inputs", "norm inputs", "stash", "peak", "accuracy %", "vs plain", "min", "max", "loss"),
        *("step", "mean step", "ordinary step", "collection", "sigma/predicted", "sigma/wanted", "least cosine"),
    )
    lines = []
    for variant in dict.fromkeys(one.variant for one in trainings):
        group = [one for one in trainings if one.variant == variant]
        against = [100 * (one.accuracy - plain[one.seed].accuracy) for one in group]
        peaks = [plain[one.seed].peak_nbytes / one.peak_nbytes for one in group]
        cosines = [one.cosine for one in group if one.cosine is not None]
        lines.append(
            (
                variant,
                _mean(one.conv_ratio for one in group),
                _mean(one.norm_ratio for one in group),
                _mean(one.ratio for one in group),
                _mean(peaks),
                f"{100 * statistics.fmean(one.accuracy for one in group):.2f}",
                f"{statistics.fmean(against):+.2f}",
                f"{min(against):+.2f}",
                f"{max(against):+.2f}",
                f"{statistics.fmean(one.loss for one in group):.3f}",
                _mean(one.overhead.median if one.overhead else 1.0 for one in group),
                _mean(one.mean_overhead for one in group),
                _mean(one.ordinary.median if one.ordinary else 1.0 for one in group),
                _mean(one.collection for one in group),
                _mean(one.predicted.median for one in group if one.predicted),
                _mean(one.wanted.median for one in group if one.wanted),
                f"{min(cosines):.4f}" if cosines else "",
            )
        )
    return table(header, lines)


def _mean(numbers: Iterable[float | None]) -> str:
    known = list(numbers)
    found = [number for number in known if number is not None]
    return f"{statistics.fmean(found):.2f}" if found and len(found) == len(known) else ""


def show_parts(trainings: Sequence[Training]) -> Iterator[str]:
    """What each variant's stash is made of."""
    for one in trainings:
        lines = [(part.kind, part.codec, mib(part.saved_nbytes), mib(part.stash_nbytes)) for part in one.parts]
        yield f"{one.variant}, seed {one.seed}: {mib(one.stash_nbytes)} MiB"
        yield table(("read as", "stored as", "MiB dense", "MiB"), lines)


def show_equations(equations: Sequence[Equation]) -> str:
    """A row for each layer."""
    header = ("layer", "measured/wanted at our bound", "equation 3, maxima, over ours", "with means")
    rows = [(one.layer, f"{one.measured:.2f}", f"{one.maxima:.2f}", f"{one.means:.2f}") for one in equations]
    return table(header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains everything, prints the tables, writes the JSON; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m studies.comet", description="Bounds that follow the gradients.")
    parser.add_argument("--json", type=Path, help="the file to write (default: none)")
    parser.add_argument("--seconds", type=float, default=120.0, help="for everything (default: 120)")
    parser.add_argument("--network", choices=sorted(NETWORKS), default="small_vgg", help="default: small_vgg")
    parser.add_argument("--variants", help=f"comma-separated, plain is always one (default: {','.join(VARIANTS)})")
    parser.add_argument("--seeds", type=int, help="how many (default: 3, of the large networks 1)")
    parser.add_argument("--size", type=int, help="of the images; 24 steps of 8 then, for times and peaks only")
    parser.add_argument("--quick", action="store_true", help="a few steps on small images: shows that everything runs")
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST's files (default: where Debian puts them)")
    asked = parser.parse_args(arguments)
    chosen = asked.variants.split(",") if asked.variants else list(VARIANTS)
    if not set(chosen) <= set(VARIANTS):
        raise SystemExit(f"studies.comet: of {asked.variants} some are unknown; there are {', '.join(VARIANTS)}")
    variants = [variant for variant in VARIANTS if variant in chosen or variant == "plain"]
    deadline = Deadline.after(asked.seconds)
    results = Results("studies.comet", asked.json, arguments, format=FORMAT, quick=asked.quick)
    schedule = QUICK if asked.quick else SCHEDULES[asked.network]
    if asked.seeds is not None:
        schedule = replace(schedule, seeds=tuple(range(1, asked.seeds + 1)))
    every = EVERY
    if asked.size is not None:
        schedule, every = replace(schedule, size=asked.size, batch=8, steps=24, train_images=192, test_images=64), 8
    data = datasets.load(None, schedule.size, asked.data, max(schedule.train_images, schedule.test_images))
    data = replace(
        data, test_images=data.test_images[: schedule.test_images], test_labels=data.test_labels[: schedule.test_images]
    )
    if not asked.quick and asked.size is None:
        schedule = fit(asked.network, variants, schedule, data, deadline.left())
    about = (
        f"{asked.network} on {data.name} at {schedule.size}x{schedule.size}: {len(data.train_labels)} training images, "
        f"{len(data.test_labels)} test images; {schedule.steps} steps of {schedule.batch} images, "
        f"{len(schedule.seeds)} seeds"
    )
    print(f"{about}\n", flush=True)
    results.write(about=about, data=data.name, network=asked.network, schedule=schedule)
    trainings: list[Training] = []
    equations: list[Equation] = []
    for index, seed in enumerate(schedule.seeds):  # seed by seed: what is there when it is stopped can be compared
        part = deadline.part(0.85 / (len(schedule.seeds) - index))  # the tests come after
        runs = train(asked.network, variants, data, schedule, seed, every, None if asked.quick else part)
        trainings += [outcome(run, runs[0], data, schedule, seed, every) for run in runs]
        if not equations:
            runs[0].model.train()
            equations = equation(runs[0], data.train_images[: schedule.batch], data.train_labels[: schedule.batch])
        results.write(trainings=trainings, equations=equations)
    print(show(trainings))
    print("\n" + "\n".join(show_parts([one for one in trainings if one.seed == schedule.seeds[0]])))
    print(f"\n{show_equations(equations)}\n\n{results.close()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

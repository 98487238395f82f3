"""Zeros over a training, by layer: ``python -m studies.cdma_training --states FOLDER --json FILE [--resume]``.

cDMA's ratio depends on the zeros that a long training brings. Each network is trained on Fashion-MNIST (or on
scikit-learn's digits), and every so many steps a forward pass of the same test images says, for each activation, how
many of its elements are not zero and how much smaller zero-value compression makes it. Six networks are those of the
paper; three more have squared relus, neurons that spike, and neurons that spike rarely.

Trainings may take hours: with --states their states are kept, and with --resume a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from backstash.codecs import Zvc
from bench import datasets
from bench.datasets import Dataset
from bench.results import Results
from bench.rounds import table
from studies.cdma import NETWORKS as PAPER
from studies.gist_accuracy import Schedule, order_of, right
from studies.resumable import Batch, States, Training
from tests import networks
from tests.networks.sparse import Spiking, SpikingNetwork, SquaredReLU, squared_relu_network

_PAPER = tuple(name for name in PAPER if not name.startswith("resnet"))
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(networks.build, name, num_classes=10, in_channels=1) for name in _PAPER},
    "squared_relu": squared_relu_network,
    "spiking": SpikingNetwork,
    "spiking_rarely": partial(SpikingNetwork, threshold=1.5),
}

ACTIVATIONS = (nn.ReLU, SquaredReLU, Spiking)
"""Modules whose results are looked at."""

MEASURED = 32
"""Images of the forward pass that is looked at."""


@dataclass(frozen=True)
class Density:
    """An activation's result at one moment of a training.

    Attributes:
        step: steps done.
        layer: the module's path.
        nonzero: share of its elements that are not zero.
        ratio: dense bytes over those of zero-value compression.
        nbytes: dense.
    """

    step: int
    layer: str
    nonzero: float
    ratio: float
    nbytes: int


def fitting(name: str, size: int) -> int:
    """The least height and width of images, in steps of 16 from ``size``, that the poolings leave something of."""
    with torch.device("meta"):
        model = NETWORKS[name]()
        for pixels in range(size, size + 256, 16):
            try:
                model(torch.empty(2, 1, pixels, pixels))
            except RuntimeError:  # torch says that the output size is too small
                continue
            return pixels
    raise ValueError(f"{name} takes no images of {size} to {size + 240} pixels. Ask for larger ones by --size.")


def densities(model: nn.Module, images: Tensor, step: int) -> list[Density]:
    """One forward pass in training mode, without a change of the model."""
    found: list[Density] = []
    handles = []
    for path, module in model.named_modules():
        if isinstance(module, ACTIVATIONS):

            def look(module: nn.Module, given: object, made: Tensor, path: str = path) -> None:
                sent = min(Zvc().encode(made.contiguous()).nbytes, made.nbytes)
                share = int(made.count_nonzero()) / made.numel()
                found.append(Density(step, path, share, made.nbytes / sent, made.nbytes))

            handles.append(module.register_forward_hook(look))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(images)
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
    return found


def ratio(found: Sequence[Density]) -> float:
    """Dense bytes of all activations over their compressed bytes."""
    return sum(one.nbytes for one in found) / sum(one.nbytes / one.ratio for one in found)


def follow(name: str, data: Dataset, schedule: Schedule, every: int, states: States, resume: bool) -> Training:
    """Trains a network, and looks at its activations every so many steps (in the Training's notes)."""
    torch.manual_seed(schedule.seeds[0])
    model = NETWORKS[name]()
    training = Training(
        name, model, torch.optim.SGD(model.parameters(), schedule.learning_rate, momentum=0.9), schedule.steps
    )
    training.notes["densities"] = []
    if resume:
        training.resume(states)

    def batches() -> Iterator[Batch]:
        for chosen in order_of(len(data.train_labels), schedule, schedule.seeds[0]):
            yield data.train_images[chosen], data.train_labels[chosen]

    def step(batch: Batch, number: int) -> Tensor:
        torch.manual_seed(number)
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        torch.autograd.backward([loss])
        return loss

    def look(done: int) -> None:
        found = densities(model, data.test_images[:MEASURED], done)
        training.notes["densities"] += [asdict(one) for one in found]
        print(f"{name}: {done} of {schedule.steps} steps, ratio {ratio(found):.2f}", flush=True)

    training.run(batches(), step, states, every, schedule.learning_rate, look)
    return training


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, prints a table and writes the JSON; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m studies.cdma_training", description="Zeros over a training.")
    parser.add_argument("--networks", nargs="+", choices=sorted(NETWORKS), default=tuple(NETWORKS))
    parser.add_argument("--steps", type=int, default=20000, help="of each network (default: 20000)")
    parser.add_argument("--every", type=int, default=500, help="steps between two looks (default: 500)")
    parser.add_argument("--batch", type=int, default=32, help="images of a step (default: 32)")
    parser.add_argument("--size", type=int, default=64, help="their height and width, at least (default: 64)")
    parser.add_argument("--images", type=int, default=60000, help="training images (default: 60000)")
    parser.add_argument("--rate", type=float, default=0.01, help="learning rate (default: 0.01)")
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST's files (default: where Debian puts them)")
    parser.add_argument("--states", type=Path, help="folder of the trainings' states (default: none are kept)")
    parser.add_argument("--json", type=Path, help="file to write, after every network")
    parser.add_argument("--resume", action="store_true", help="go on from --states, and leave out what --json has")
    asked = parser.parse_args(arguments)
    if min(asked.steps, asked.every, asked.batch, asked.size, asked.images) < 1:
        raise SystemExit(
            f"studies.cdma_training was asked for {asked.steps} steps, a look every {asked.every}, a batch of "
            f"{asked.batch} of {asked.images} images of {asked.size} pixels, but it takes one of each at least."
        )
    results = Results("studies.cdma_training", asked.json, arguments, resume=asked.resume)
    trained: list[dict[str, object]] = list(results.found.get("networks", []))
    for name in asked.networks:
        if name in {one["network"] for one in trained}:
            continue
        size = fitting(name, asked.size)
        data = datasets.load(None, size, asked.data, max(asked.images, MEASURED))
        schedule = Schedule(asked.steps, (1,), asked.batch, asked.images, asked.images, size, asked.rate)
        training = follow(name, data, schedule, asked.every, States(asked.states), asked.resume)
        accuracy = right(training.model, data, asked.batch) / len(data.test_labels)
        trained.append(
            {
                "network": name,
                "data": data.name,
                "size": size,
                "steps": training.done,
                "rate": asked.rate,
                "accuracy": accuracy,
                "resumed": training.resumed,
                "densities": training.notes["densities"],
            }
        )
        results.write(networks=trained)
    print(table(("network", "accuracy, %", "nonzero and ratio, first", "last"), [_line(one) for one in trained]))
    print(f"\n{results.close()}")
    return 0


def _line(trained: dict[str, object]) -> tuple[str, ...]:
    found = [Density(**one) for one in trained["densities"]]  # type: ignore[attr-defined]
    ends = []
    for step in (min(one.step for one in found), max(one.step for one in found)):
        then = [one for one in found if one.step == step]
        nonzero = sum(one.nonzero * one.nbytes for one in then) / sum(one.nbytes for one in then)
        ends.append(f"{nonzero:.0%}, {ratio(then):.2f}")
    return (str(trained["network"]), f"{100 * float(trained['accuracy']):.1f}", *ends)  # type: ignore[arg-type]


if __name__ == "__main__":
    raise SystemExit(main())

"""Accuracy after long trainings: ``python -m studies.accuracy --states FOLDER --json FILE [--resume]``.

Each network is trained with plain PyTorch and under each policy, with several seeds. A seed decides on weights, the
order of the images, and dropout, so that the trainings of one seed differ by the policy alone. The table has means and
spreads, and the JSON has the loss over time. ``gpt2`` is a transformer of four layers of GPT-2's size, which learns the
characters of the topics that Python's ``pydoc`` ships; its measure is the perplexity of a part that it was not trained
on. It is trained with AdamW, as transformers are, and the others with SGD and a momentum.

Trainings may take hours in all: with --states their states are kept, and with --resume a run that was stopped goes on.
What a policy has learned is not part of a state, so a bounded training is exact for a few steps after it was resumed.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from backstash import Session, policies
from backstash.papers.comet import comet
from bench import datasets
from bench.results import Results
from bench.rounds import table
from studies import comet as benchmark
from studies.comet import MakePolicy
from studies.gist_accuracy import Schedule, order_of, right
from studies.resumable import Batch, States, Training

VARIANTS: dict[str, MakePolicy] = {
    **{
        name: benchmark.VARIANTS[name]
        for name in ("plain", "comet-1", "comet-5", "comet-10", "quantized-8", "quantized-4", "quantized-2", "dct")
    },
    "gist-fp8": lambda optimizer, every: policies.get("gist_fp8"),
}
LINEAR: dict[str, MakePolicy] = {
    "plain": VARIANTS["plain"],
    "comet-1": lambda optimizer, every: comet("linear", 0.01, every, "sz", optimizer),
    "comet-5": lambda optimizer, every: comet("linear", 0.05, every, "sz", optimizer),
    "comet-10": lambda optimizer, every: comet("linear", 0.10, every, "sz", optimizer),
    **{name: VARIANTS[name] for name in ("quantized-8", "quantized-4", "quantized-2", "gist-fp8")},
}
"""Of a transformer."""

IMAGES = ("alexnet", "vgg16", "resnet18", "resnet50")
TEXT = "gpt2"
LOSSES = 200
"""Points of the loss over time that the JSON has."""


@dataclass(frozen=True)
class Outcome:
    """A training that has come to its end.

    Attributes:
        network, variant, seed: which.
        steps: how many.
        rate: learning rate of the first one.
        score: share of the test images that it gets right, or the perplexity of the test text.
        losses: means of equal parts of the training.
        ratio: dense bytes over stashed bytes in the last step; None for plain.
        resumed: the steps after which it was stopped and went on.
    """

    network: str
    variant: str
    seed: int
    steps: int
    rate: float
    score: float
    losses: tuple[float, ...]
    ratio: float | None
    resumed: tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """What a network learns.

    Attributes:
        model: makes it.
        batches: those of every step, by seed.
        loss: of a batch.
        score: of the trained model.
        variants: the policies.
        optimizer: makes it, of the parameters and the first step's learning rate.
        rate: that learning rate, where none is asked for.
    """

    model: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[Batch]]
    loss: Callable[[nn.Module, Batch], Tensor]
    score: Callable[[nn.Module], float]
    variants: dict[str, MakePolicy]
    optimizer: Callable[[list[nn.Parameter], float], torch.optim.Optimizer]
    rate: float


def image_task(network: str, schedule: Schedule, data: datasets.Dataset) -> Task:
    """Fashion-MNIST, or scikit-learn's digits where it is not installed."""

    def batches(seed: int) -> Iterator[Batch]:
        for chosen in order_of(len(data.train_labels), schedule, seed):
            yield data.train_images[chosen], data.train_labels[chosen]

    return Task(
        benchmark.NETWORKS[network],
        batches,
        lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        lambda model: right(model, data, schedule.batch) / len(data.test_labels),
        VARIANTS,
        partial(torch.optim.SGD, momentum=0.9),
        0.02,
    )


def text_task(schedule: Schedule, width: int, layers: int) -> Task:
    """The characters of what Python's pydoc ships; a tenth of it is kept for the test."""
    from pydoc_data.topics import topics

    text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.int64)
    length, split = schedule.size, len(text) * 9 // 10

    def batches(seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(schedule.steps):
            starts = torch.randint(split - length - 1, (schedule.batch,), generator=generator)
            yield (torch.stack([text[start : start + length + 1] for start in starts.tolist()]),)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch[0][:, :-1]).logits
        return functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())

    def perplexity(model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            parts = [text[start : start + length + 1] for start in range(split, len(text) - length, length)]
            chosen = parts[: max(1, schedule.test_images)]
            found = [float(loss(model, (part[None],))) for part in chosen]
        return math.exp(statistics.fmean(found))

    def model() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        heads = max(1, width // 64)
        config = GPT2Config(vocab_size=256, n_positions=length, n_embd=width, n_layer=layers, n_head=heads)
        return GPT2LMHeadModel(config)

    return Task(model, batches, loss, perplexity, LINEAR, torch.optim.AdamW, 0.0005)


def train(
    network: str, variant: str, seed: int, task: Task, schedule: Schedule, every: int, states: States, resume: bool
) -> Outcome:
    """One training, from its start or from where it was stopped."""
    torch.manual_seed(seed)
    model = task.model()
    model.train()
    rate = schedule.learning_rate
    optimizer = task.optimizer(list(model.parameters()), rate)
    training = Training(f"{network}-{variant}-{seed}", model, optimizer, schedule.steps)
    if resume:
        training.resume(states)
    session = Session(task.variants[variant](optimizer, every), model=model)

    def step(batch: Batch, number: int) -> Tensor:
        torch.manual_seed(seed * 100_000 + number)
        with nullcontext() if variant == "plain" else session:
            loss = task.loss(model, batch)
        torch.autograd.backward([loss])
        return loss

    def said(done: int) -> None:
        last = training.losses[-20:]
        if last:
            print(f"{training.name}: {done} of {schedule.steps} steps, loss {statistics.fmean(last):.3f}", flush=True)

    training.run(task.batches(seed), step, states, max(1, schedule.steps // 20), rate, said)
    part = max(1, math.ceil(training.done / LOSSES))
    losses = [statistics.fmean(training.losses[at : at + part]) for at in range(0, training.done, part)]
    ratio = None if variant == "plain" else session.report().ratio
    return Outcome(
        network, variant, seed, training.done, rate, task.score(model), tuple(losses), ratio, tuple(training.resumed)
    )


def show(outcomes: Sequence[dict[str, Any]]) -> str:
    """A row for each network and variant: mean and spread over the seeds, and against plain of the same seed."""
    plain = {(one["network"], one["seed"]): one["score"] for one in outcomes if one["variant"] == "plain"}
    rows = []
    for network, variant in dict.fromkeys((one["network"], one["variant"]) for one in outcomes):
        group = [one for one in outcomes if (one["network"], one["variant"]) == (network, variant)]
        scale = 1.0 if network == TEXT else 100.0
        scores = [scale * one["score"] for one in group]
        against = [
            scale * (one["score"] - plain[network, one["seed"]]) for one in group if (network, one["seed"]) in plain
        ]
        ratios = [one["ratio"] for one in group if one["ratio"] is not None]
        rows.append(
            (
                network,
                variant,
                str(len(group)),
                f"{statistics.fmean(scores):.2f}",
                f"{statistics.stdev(scores):.2f}" if len(scores) > 1 else "",
                f"{statistics.fmean(against):+.2f}" if against else "",
                f"{statistics.fmean(ratios):.1f}" if ratios else "",
                f"{statistics.fmean(one['losses'][-1] for one in group):.3f}",
            )
        )
    return table(("network", "variant", "seeds", "score", "deviation", "vs plain", "stash", "last loss"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains everything, prints the table, writes the JSON after every training; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m studies.accuracy", description="Accuracy of long trainings.")
    parser.add_argument("--networks", nargs="+", choices=(*IMAGES, TEXT), default=(*IMAGES, TEXT))
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=tuple(VARIANTS))
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--steps", type=int, default=8000, help="of each training (default: 8000)")
    parser.add_argument("--batch", type=int, default=32, help="images or texts of a step (default: 32)")
    parser.add_argument("--size", type=int, default=64, help="pixels of an image, characters of a text (default: 64)")
    parser.add_argument("--images", type=int, default=60000, help="training images (default: 60000)")
    parser.add_argument("--tests", type=int, default=10000, help="test images or texts (default: 10000)")
    parser.add_argument("--rate", type=float, help="of the first step (default: 0.02 for images, 0.0005 for texts)")
    parser.add_argument("--every", type=int, default=100, help="steps between collections (default: 100)")
    parser.add_argument("--width", type=int, default=768, help="of the transformer (default: 768)")
    parser.add_argument("--layers", type=int, default=4, help="of the transformer (default: 4)")
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST's files (default: where Debian puts them)")
    parser.add_argument("--states", type=Path, help="folder of the trainings' states (default: none are kept)")
    parser.add_argument("--json", type=Path, help="file to write, after every training")
    parser.add_argument("--resume", action="store_true", help="go on from --states, and leave out what --json has")
    asked = parser.parse_args(arguments)
    if min(asked.seeds, asked.steps, asked.batch, asked.size, asked.images, asked.tests, asked.every) < 1:
        raise SystemExit(
            f"studies.accuracy was asked for {asked.seeds} seeds, {asked.steps} steps of {asked.batch}, a size of "
            f"{asked.size}, {asked.images} images, {asked.tests} tests and a collection every {asked.every} steps, but "
            f"all of them are 1 or more."
        )
    results = Results("studies.accuracy", asked.json, arguments, resume=asked.resume)
    seeds = tuple(range(1, asked.seeds + 1))
    schedule = Schedule(asked.steps, seeds, asked.batch, asked.images, asked.tests, asked.size)
    images = [name for name in asked.networks if name != TEXT]
    data = datasets.load(None, asked.size, asked.data, max(asked.images, asked.tests)) if images else None
    outcomes: list[Any] = list(results.found.get("outcomes", []))
    for seed in seeds:  # seed by seed: what is there when it is stopped can be compared
        for network in asked.networks:
            if data is None or network == TEXT:
                task = text_task(schedule, asked.width, asked.layers)
            else:
                task = image_task(network, schedule, data)
            rated = replace(schedule, learning_rate=task.rate if asked.rate is None else asked.rate)
            for variant in (name for name in task.variants if name in asked.variants):
                if (network, variant, seed) in {(one["network"], one["variant"], one["seed"]) for one in outcomes}:
                    continue
                states = States(asked.states)
                outcome = train(network, variant, seed, task, rated, asked.every, states, asked.resume)
                results.write(outcomes=[*outcomes, outcome])
                outcomes = results.found["outcomes"]
    print(f"\n{show(outcomes)}\n\n{results.close()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

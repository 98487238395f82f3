"""The whole error of every weight gradient, predicted and measured: ``python -m studies.comet_error [--json FILE]``.

A network is trained under ``comet("conv+norm")``. Then one step runs twice, from the same weights and with the same
images: with exact values, and within the bounds. The difference of the two gradients of a weight is the weight's whole
error. It has two parts, which the error model predicts in the same step. The layer's own part comes from its stored
input. The other part comes from the batch norms behind it in the network, whose input gradients are off by a share;
the squares of these shares add up. The second part takes all batch norms behind a layer, though some of them lie in
another branch, and it takes a gradient's error for a part of the weight's gradient as large as its own share.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from backstash import Session
from backstash.papers.comet import Comet, Record, comet
from bench import datasets
from bench.results import Results
from bench.rounds import table
from studies import comet as benchmark

RATE = 0.02


@dataclass(frozen=True)
class Layer:
    """A weight's gradient in the step that ran twice. Errors are shares of the exact gradient's root mean square.

    Attributes:
        weight: the parameter's name.
        kind: ``"convolution"`` or ``"batch norm"``.
        target: the error that the layer's own input may cause.
        own: the error that its own input causes, by the error model.
        others: the error that the batch norms behind it cause, by the error model.
        measured: the whole error.
        cosine: between the two gradients.
        share: stored bytes over dense bytes of the layer's input; 0 if it takes nothing.
    """

    weight: str
    kind: str
    target: float
    own: float
    others: float
    measured: float
    cosine: float
    share: float

    @property
    def predicted(self) -> float:
        """The whole error, by the error model."""
        return math.hypot(self.own, self.others)


def train(
    network: str, sigma: float, steps: int, batch: int, size: int, every: int
) -> tuple[nn.Module, Comet, Session]:
    """Trains a network under bounds; returns it with its policy and its Session."""
    data = datasets.load(None, size, None, 6400)
    torch.manual_seed(1)
    model = benchmark.NETWORKS[network]()
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    policy = comet("conv+norm", sigma, every, "sz", optimizer)
    session = Session(policy, model=model, min_nbytes=0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        chosen = torch.randint(len(data.train_labels), (batch,), generator=generator)
        optimizer.zero_grad(set_to_none=False)
        gradients(model, data.train_images[chosen], data.train_labels[chosen], session)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    return model, policy, session


def gradients(model: nn.Module, images: Tensor, labels: Tensor, manager: Session) -> None:
    """Forward under the Session, and backward."""
    with manager:
        loss = functional.cross_entropy(model(images), labels)
    loss.backward()


def compare(model: nn.Module, policy: Comet, session: Session, batch: int, size: int) -> list[Layer]:
    """Runs one step twice and compares the gradients of every layer whose input has a bound."""
    data = datasets.load(None, size, None, batch)
    images, labels = data.train_images[:batch], data.train_labels[:batch]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    names = dict(model.named_parameters())

    def run(manager: Session) -> dict[str, Tensor]:
        model.zero_grad(set_to_none=False)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        gradients(model, images, labels, manager)
        return {name: parameter.grad.clone() for name, parameter in names.items() if parameter.grad is not None}

    exact = run(Session("keep", model=model))
    policy.samples = 0
    policy.collect_next()
    bounded = run(session)
    shares = {
        key: row.stash_nbytes / row.saved_nbytes for row in session.report().rows for key in (row.key, *row.shared_by)
    }
    policy.begin_step()  # evaluates the step
    newest = max(record.step for record in policy.history)
    records = [record for record in policy.history if record.step == newest]
    return [
        _layer(record, sum(later.passed**2 for later in records[place + 1 :]), exact, bounded, shares)
        for place, record in enumerate(records)
    ]


def _layer(
    record: Record, behind: float, exact: dict[str, Tensor], bounded: dict[str, Tensor], shares: dict[str, float]
) -> Layer:
    path, node = record.key.split("/")
    weight = f"{path}.weight"
    truth, found = exact[weight].double(), bounded[weight].double()
    size = float(truth.square().mean().sqrt()) or math.nan
    return Layer(
        weight,
        "batch norm" if "BatchNorm" in node else "convolution",
        record.target / size,
        (record.predicted or 0.0) / size,
        math.sqrt(behind),
        float((found - truth).square().mean().sqrt()) / size,
        float(torch.cosine_similarity(found.flatten(), truth.flatten(), dim=0)),
        shares.get(record.key, 0.0),
    )


def show(layers: Sequence[Layer]) -> str:
    """A row for each layer."""
    header = (
        "weight",
        "wanted",
        "own, predicted",
        "others', predicted",
        "whole, predicted",
        "whole, measured",
        "cosine",
    )
    rows = [
        (
            one.weight,
            *(f"{100 * part:.2f} %" for part in (one.target, one.own, one.others, one.predicted, one.measured)),
            f"{one.cosine:.5f}",
        )
        for one in layers
    ]
    return table(header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, compares, prints the table and writes the JSON; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m studies.comet_error", description="Errors of weight gradients.")
    parser.add_argument("--json", type=Path, help="the file to write (default: none)")
    parser.add_argument("--network", choices=sorted(benchmark.NETWORKS), default="resnet50", help="default: resnet50")
    parser.add_argument("--sigma", type=float, default=0.01, help="default: 0.01")
    parser.add_argument("--steps", type=int, default=120, help="default: 120")
    parser.add_argument("--batch", type=int, default=32, help="default: 32")
    parser.add_argument("--size", type=int, default=32, help="of the images (default: 32)")
    parser.add_argument("--every", type=int, default=10, help="steps between collections (default: 10)")
    asked = parser.parse_args(arguments)
    if asked.steps <= asked.every:
        raise SystemExit(
            f"studies.comet_error was asked for {asked.steps} steps with {asked.every} between collections, so that "
            f"no value would have a bound. Ask for more steps, or for a smaller --every."
        )
    if not math.isfinite(asked.sigma) or asked.sigma <= 0 or min(asked.batch, asked.size) < 1:
        raise SystemExit(
            f"studies.comet_error was asked for sigma {asked.sigma}, batch {asked.batch} and size {asked.size}, but "
            f"they are above zero."
        )
    results = Results("studies.comet_error", asked.json, arguments)
    model, policy, session = train(asked.network, asked.sigma, asked.steps, asked.batch, asked.size, asked.every)
    ratio = session.report().ratio
    layers = compare(model, policy, session, asked.batch, asked.size)
    results.write(
        network=asked.network,
        sigma=asked.sigma,
        steps=asked.steps,
        batch=asked.batch,
        size=asked.size,
        ratio=ratio,
        layers=layers,
    )
    print(show(layers))
    print(f"\nstash {ratio:.2f} times smaller than dense\n{results.close()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

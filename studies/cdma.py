"""Bytes that cDMA's compressors would send over the link: ``python -m studies.cdma [--seconds 60] [--json FILE]``.

The feature maps are those that the policy ``vdnn`` moves: what layers save that extract features, above the Session's
smallest size, indices of poolings apart. Every one is encoded as the policy ``cdma`` would, or sent as it is where its
sample says so. Images are real; networks are fresh, or were trained for a few steps, and that decides how many zeros
there are: a row says which, and the share of zeros. Nothing is timed, and the batch itself is not counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from backstash import Encoded, Session, policies
from backstash.errors import StoreError
from backstash.papers.cdma import Cdma
from backstash.policies.base import Stash
from backstash.saved import Need, SavedTensor, TensorSpec
from backstash.stores import Ticket, Usage
from bench.cases import SEED, image_batch
from bench.results import Results
from bench.rounds import Deadline, mib, table
from bench.training import Schedule, Training, train
from tests import networks

NETWORKS = ("alexnet", "overfeat", "nin", "vgg16", "squeezenet1_0", "googlenet", "resnet18", "resnet50")
"""The six of the paper, and two with batch norm."""

CODECS = ("rle", "zvc", "deflate")
LAYOUTS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}
SCHEDULE = Schedule(steps=24, batch=8, size=64)


@dataclass
class Scale:
    """A store that weighs feature maps as each codec would send them, and holds nothing.

    Attributes:
        nbytes: of the feature maps.
        elements, zeros: how many there are in them, and how many have no bit set.
        index_nbytes: of what holds no floating numbers.
        sent: bytes sent, by codec.
    """

    nbytes: int = 0
    elements: int = 0
    zeros: int = 0
    index_nbytes: int = 0
    sent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CODECS, 0))
    _numbers: count[int] = field(default_factory=count, repr=False)

    def put(self, encoded: Encoded) -> Ticket:
        """Weigh a value."""
        values = encoded.planes["values"]  # in memory order
        if not values.is_floating_point():
            self.index_nbytes += values.nbytes
        else:
            self.nbytes += values.nbytes
            self.elements += values.numel()
            self.zeros += int((values == 0).sum())
            facts = SavedTensor("", "Relu", "result", "", TensorSpec.of(values), Need.VALUE)
            for name in CODECS:
                action = Cdma(name).decide(facts)
                assert isinstance(action, Stash)
                codec = next(one for one in action.codecs if one.declines(values) is None)
                self.sent[name] += codec.encode(values).nbytes
        return Ticket(next(self._numbers), encoded.nbytes)

    def prefetch(self, ticket: Ticket) -> None:
        """Nothing is here."""

    def get(self, ticket: Ticket) -> Encoded:
        """Nothing is here."""
        raise StoreError("Scale was asked for a value, but it holds none. Run no backward.")

    def drop(self, ticket: Ticket) -> None:
        """Nothing is here."""

    def usage(self) -> Usage:
        """Nothing is held."""
        return Usage(0, 0, 0)


@dataclass(frozen=True)
class Row:
    """One forward pass.

    Attributes:
        network: a key of `networks.NETWORKS`.
        state: ``"initial"`` or ``"trained"``.
        layout: a key of `LAYOUTS`.
        batch, size: images, their height and width.
        data: what they show.
        nbytes: of the feature maps.
        zeros: the share of their elements that are zero.
        index_nbytes: what poolings' indices would add, in PyTorch's format.
        sent_nbytes: bytes sent, by codec.
        ratios: ``nbytes`` over that.
        training: what happened before.
    """

    network: str
    state: str
    layout: str
    batch: int
    size: int
    data: str
    nbytes: int
    zeros: float
    index_nbytes: int
    sent_nbytes: dict[str, int]
    ratios: dict[str, float]
    training: Training | None


def weigh(name: str, model: nn.Module, layout: str, shape: tuple[int, int], training: Training | None) -> Row:
    """One forward pass over ``(batch, size)`` images."""
    data, images, labels = image_batch(*shape)
    images = images.contiguous(memory_format=LAYOUTS[layout])  # held here, and so not moved
    model = model.to(memory_format=LAYOUTS[layout])  # type: ignore[call-overload]  # an overload that the stubs lack
    scale = Scale()
    torch.manual_seed(SEED)
    with Session(policies.vdnn(), model=model, stores={"host": scale}):
        functional.cross_entropy(model(images), labels)
    return Row(
        network=name,
        state="initial" if training is None else "trained",
        layout=layout,
        batch=shape[0],
        size=shape[1],
        data=data,
        nbytes=scale.nbytes,
        zeros=scale.zeros / scale.elements,
        index_nbytes=scale.index_nbytes,
        sent_nbytes=scale.sent,
        ratios={codec: scale.nbytes / sent for codec, sent in scale.sent.items()},
        training=training,
    )


def measure(name: str, batch: int, size: int | None, schedule: Schedule, deadline: Deadline) -> list[Row]:
    """A network at the start and after a training, in both layouts."""
    torch.manual_seed(SEED)
    model = networks.build(name)
    shape = batch, size or networks.NETWORKS[name].image_size
    rows = [weigh(name, model, layout, shape, None) for layout in LAYOUTS]
    training = train(model.to(memory_format=torch.contiguous_format), schedule, "cpu", deadline.part(0.6))  # type: ignore[call-overload]
    return rows + [weigh(name, model, layout, shape, training) for layout in LAYOUTS]


def main(arguments: Sequence[str] | None = None) -> int:
    """Encodes, prints a table, writes the JSON."""
    parser = argparse.ArgumentParser(prog="python -m studies.cdma", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--networks", nargs="+", choices=sorted(networks.NETWORKS), default=NETWORKS)
    parser.add_argument("--batch", type=int, default=2, help="images of a measured forward pass (default: 2)")
    parser.add_argument("--size", type=int, help="their height and width (default: the network's own)")
    parser.add_argument("--steps", type=int, default=SCHEDULE.steps, help="most training steps (default: 24)")
    parser.add_argument("--seconds", type=float, default=60.0, help="trainings stop early to meet it (default: 60)")
    parser.add_argument("--json", type=Path, help="file to write")
    asked = parser.parse_args(arguments)
    schedule = Schedule(asked.steps, SCHEDULE.batch, SCHEDULE.size)
    deadline = Deadline.after(asked.seconds)
    results = Results("studies.cdma", asked.json, arguments)
    rows: list[Row] = []
    for index, name in enumerate(asked.networks):
        part = deadline.part(1 / (len(asked.networks) - index))
        rows += measure(name, asked.batch, asked.size, schedule, part)
        results.write(rows=rows)
    header = ("network", "state", "layout", "images", "maps MiB", "zeros", *CODECS)
    print(table(header, map(_line, rows)))
    print("\ntrained:")
    for row in rows:
        if row.training is not None and row.layout == "NCHW":
            print(f"  {row.network}: {row.training}")
    return 0


def _line(row: Row) -> tuple[str, ...]:
    return (
        row.network,
        row.state,
        row.layout,
        f"{row.batch} of {row.size}",
        mib(row.nbytes),
        f"{row.zeros:.0%}",
        *(f"{row.ratios[codec]:.2f}" for codec in CODECS),
    )


if __name__ == "__main__":
    raise SystemExit(main())

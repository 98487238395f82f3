"""Sizes of each activation that a network saves, as csr, zvc and zvc with fp8 values, and what policies chose.

The network is trained for a few steps first, so that zeros are where training puts them. Then one forward pass under a
policy that weighs every value in passing, and one under each of the policies, with the same weights, images and
dropout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from backstash import Encoded, Keep, Need, Policy, Session, Stash
from backstash.codecs import Csr, Minifloat, Shape, Zvc
from backstash.codecs.base import EXACT, ErrorBound, flat
from backstash.ops.bits import bits_of
from backstash.policies.base import Action
from backstash.saved import SavedTensor, TensorSpec
from backstash.stash.ledger import Report
from bench.cases import SEED, image_batch
from bench.rounds import Deadline, mib, table
from bench.training import Schedule, Training, train
from tests import networks

BATCH = 2
"""Images of the forward passes; the share of zeros hardly depends on it."""


@dataclass(frozen=True)
class LayerRow:
    """One saved activation.

    Attributes:
        key: key of the saved tensor whose need is strongest.
        spec: its dtype and shape.
        need: what backward reads of it.
        nbytes: its dense bytes.
        zero_share: share of its elements that have no bit set.
        csr_nbytes, zvc_nbytes, zvc_fp8_nbytes: encoded bytes, also where that is more than the dense ones.
        csr_ratio, zvc_ratio, zvc_fp8_ratio: dense over encoded bytes.
        chosen: what each policy did with it: the codec's label, or ``"kept"``.
        stash_nbytes: bytes that each policy holds for it.
    """

    key: str
    spec: str
    need: str
    nbytes: int
    zero_share: float
    csr_nbytes: int
    zvc_nbytes: int
    zvc_fp8_nbytes: int
    csr_ratio: float
    zvc_ratio: float
    zvc_fp8_ratio: float
    chosen: Mapping[str, str]
    stash_nbytes: Mapping[str, int]


@dataclass(frozen=True)
class LayerTable:
    """All saved activations of a network.

    Attributes:
        network: a key of `networks.NETWORKS`.
        batch: images of the forward passes.
        image_size: their height and width.
        data: what they show.
        training: what happened before.
        ratios: stash ratio of each policy over all that the pass saves, which is more than activations.
        rows: the activations, in the order of saving.
    """

    network: str
    batch: int
    image_size: int
    data: str
    training: Training
    ratios: Mapping[str, float]
    rows: tuple[LayerRow, ...]


@dataclass(frozen=True)
class Weight:
    """What one value would take."""

    nbytes: int
    zero_share: float
    csr_nbytes: int
    zvc_nbytes: int
    zvc_fp8_nbytes: int


@dataclass(frozen=True, eq=False)
class _Scales:
    """The codec zvc, which also notes what its value would take otherwise."""

    key: str
    sink: dict[str, Weight]

    id: ClassVar[str] = "scales"
    preserves: ClassVar[frozenset[Need]] = EXACT
    bound: ClassVar[ErrorBound | None] = None

    def accepts(self, spec: TensorSpec) -> str | None:
        return Zvc().accepts(spec) or Csr().accepts(spec) or Minifloat("fp8").accepts(spec)

    def declines(self, x: Tensor) -> str | None:
        return None if x.numel() else "it is empty"

    def encode(self, x: Tensor) -> Encoded:
        encoded = Zvc().encode(x)
        self.sink[self.key] = Weight(
            nbytes=x.nbytes,
            zero_share=1 - int(bits_of(flat(x)).count_nonzero()) / x.numel(),
            csr_nbytes=Csr().encode(x).nbytes,
            zvc_nbytes=encoded.nbytes,
            zvc_fp8_nbytes=Zvc(values=Minifloat("fp8")).encode(x).nbytes,
        )
        return encoded

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        return Zvc().decode(encoded, out)

    def nbytes_bound(self, spec: TensorSpec) -> int:
        return Zvc().nbytes_bound(spec)


@dataclass(frozen=True, eq=False)
class Weighing(Policy):
    """A policy that weighs every activation: each floating value of which backward reads a sign or the value."""

    weights: dict[str, Weight] = field(default_factory=dict)

    recomputes = False

    def decide(self, saved: SavedTensor) -> Action:
        """A shape as a shape, what is weighed as zvc, everything else as it is."""
        if saved.need is Need.SHAPE:
            return Stash(Shape())
        if saved.need in (Need.SIGN, Need.VALUE) and saved.spec.dtype.is_floating_point:
            return Stash(_Scales(saved.key, self.weights))
        return Keep()


def measure(
    name: str,
    chosen_by: Mapping[str, str | Policy],
    schedule: Schedule,
    deadline: Deadline | None = None,
    image_size: int | None = None,
) -> LayerTable:
    """Trains a network and weighs what it saves.

    Args:
        name: a key of `networks.NETWORKS`.
        chosen_by: the policies whose choices are told, by name.
        schedule: of the training.
        deadline: when the training ends early; None for never.
        image_size: of the forward passes' images; None for the published one.
    """
    torch.manual_seed(SEED)
    model = networks.build(name)
    size = image_size or networks.NETWORKS[name].image_size
    training = train(model, schedule, "cpu", deadline)
    data, images, labels = image_batch(BATCH, size)
    weighing = Weighing()
    _forward(weighing, model, images, labels)
    reports = {policy: _forward(chosen, model, images, labels) for policy, chosen in chosen_by.items()}
    entries = {policy: {entry.key: entry for entry in report.rows} for policy, report in reports.items()}
    rows = []
    for key, weight in weighing.weights.items():
        found = {policy: known[key] for policy, known in entries.items() if key in known}
        first = next(iter(found.values()), None)
        rows.append(
            LayerRow(
                key=key,
                spec="" if first is None else first.spec,
                need="" if first is None else first.need,
                nbytes=weight.nbytes,
                zero_share=weight.zero_share,
                csr_nbytes=weight.csr_nbytes,
                zvc_nbytes=weight.zvc_nbytes,
                zvc_fp8_nbytes=weight.zvc_fp8_nbytes,
                csr_ratio=weight.nbytes / weight.csr_nbytes,
                zvc_ratio=weight.nbytes / weight.zvc_nbytes,
                zvc_fp8_ratio=weight.nbytes / weight.zvc_fp8_nbytes,
                chosen={policy: entry.codec for policy, entry in found.items()},
                stash_nbytes={policy: entry.stash_nbytes for policy, entry in found.items()},
            )
        )
    ratios = {policy: report.ratio for policy, report in reports.items()}
    return LayerTable(name, BATCH, size, data, training, ratios, tuple(rows))


def _forward(policy: str | Policy, model: nn.Module, images: Tensor, labels: Tensor) -> Report:
    """The accounts of one forward pass; each has the same dropout."""
    torch.manual_seed(SEED)
    with Session(policy, model=model) as session:
        loss = functional.cross_entropy(model(images), labels)
    report = session.report()
    del loss  # until here: what it saved would be gone before it was counted
    return report


def show(tables: Sequence[LayerTable]) -> str:
    """One line per network; the activations themselves are in the JSON."""
    header = ("network", "images", "values", "MiB", "zeros", "min", "max", "csr", "zvc", "zvc+fp8", "csr < zvc")
    lines = [table(header, map(_line, tables))]
    for one in tables:
        lines.append(f"\n{one.network}: trained: {one.training}")
        lines += [f"  {policy}: ratio {ratio:.2f}; {_choices(one, policy)}" for policy, ratio in one.ratios.items()]
    return "\n".join(lines)


def _line(one: LayerTable) -> tuple[str, ...]:
    total = sum(row.nbytes for row in one.rows)
    shares = [row.zero_share for row in one.rows]
    zeros = sum(row.zero_share * row.nbytes for row in one.rows) / total if total else 0.0
    encoded = [
        sum(row.csr_nbytes for row in one.rows),
        sum(row.zvc_nbytes for row in one.rows),
        sum(row.zvc_fp8_nbytes for row in one.rows),
    ]
    return (
        one.network,
        f"{one.batch} of {one.image_size}",
        str(len(one.rows)),
        mib(total),
        f"{zeros:.0%}",
        f"{min(shares, default=0.0):.0%}",
        f"{max(shares, default=0.0):.0%}",
        *(f"{total / nbytes:.2f}" if nbytes else "-" for nbytes in encoded),
        str(sum(row.csr_nbytes < row.zvc_nbytes for row in one.rows)),
    )


def _choices(one: LayerTable, policy: str) -> str:
    """``"bitmask 4, zvc 3 activations"``: what the policy chose, most frequent first."""
    counts = Counter(row.chosen[policy] for row in one.rows if policy in row.chosen)
    return ", ".join(f"{codec} {count}" for codec, count in counts.most_common()) + " activations"

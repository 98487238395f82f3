"""Codecs on tensors that a training network saves: ratio, speed, and other libraries on the same tensors.

The images are small ones, enlarged, often before an even background: smoother than photographs. That favours libraries
that look for repeated bytes (LZ4, zlib), in the first layers most; ratios of backstash's codecs depend on zeros only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from backstash import Encoded, Keep, Need, Policy, Session, Stash
from backstash.codecs import Bitmask, Codec, ErrorBound
from backstash.codecs.base import flat
from backstash.policies import lossless
from backstash.policies.base import Action
from backstash.saved import SavedTensor, TensorSpec
from bench.cases import SEED, image_batch
from bench.peers import Absent, CodecPeer, Own, codec_peers
from bench.rounds import Deadline, Effort, Summary, interleave, spread, summarise, table
from bench.training import Schedule, Training, train
from tests import networks

WANTED = {
    "features.2/Convolution#0:input": "relu output, first, read by a convolution",
    "features.12/Convolution#0:input": "relu output, deeper, read by a convolution",
    "features.3/Relu#0:result": "relu output, read by its own backward only",
    "features.5/Convolution#0:input": "pool output",
    "features.4/MaxPool2DWithIndices#0:result1": "pool indices",
    "classifier.3/Addmm#0:mat1": "relu and dropout output, read by a linear layer",
    "classifier.2/Mul#0:other": "dropout mask",
    "classifier.2/NativeDropout#0:result1": "dropout mask",
}
"""Keys of the tensors of the VGGs that are looked at, and what they are; some have another key on another device."""


@dataclass(frozen=True)
class Work:
    """What the tensors are captured from.

    Attributes:
        network: a key of `networks.NETWORKS`.
        schedule: of the training before.
        batch: images of the captured pass.
        size: their height and width.
    """

    network: str
    schedule: Schedule
    batch: int
    size: int


FULL = Work("vgg16", Schedule(steps=6, batch=8, size=64), batch=4, size=224)
FULL_CUDA = Work("vgg16", Schedule(steps=12, batch=32, size=64), batch=32, size=224)
QUICK = Work("vgg_small", Schedule(steps=2, batch=8, size=32), batch=4, size=32)


@dataclass(frozen=True, eq=False)
class Captured:
    """A tensor that a Session was about to encode.

    Attributes:
        saved: the facts about it.
        codec: the codec that the exact policy chose.
        x: the tensor.
    """

    saved: SavedTensor
    codec: Codec
    x: Tensor


@dataclass(frozen=True)
class CodecRow:
    """One codec on one tensor.

    Attributes:
        key: key of the saved tensor.
        tensor: what it is.
        spec: its dtype and shape.
        need: what backward reads of it.
        nbytes: its dense bytes.
        zero_share: share of its elements that have no bit set.
        codec: name of the codec, or ``"copy"``: the same bytes copied from memory to memory in the same rounds.
        own: whether the codec is backstash's.
        encoded_nbytes: bytes after encoding.
        ratio: dense over encoded bytes.
        exact: whether decoding gave back every bit that backward reads.
        encode_gb_per_second, decode_gb_per_second: dense bytes per second; for the copy both are the copy.
        encode_seconds, decode_seconds: every round.
    """

    key: str
    tensor: str
    spec: str
    need: str
    nbytes: int
    zero_share: float
    codec: str
    own: bool
    encoded_nbytes: int
    ratio: float
    exact: bool
    encode_gb_per_second: Summary
    decode_gb_per_second: Summary
    encode_seconds: tuple[float, ...]
    decode_seconds: tuple[float, ...]


@dataclass(frozen=True)
class CodecTable:
    """The whole table.

    Attributes:
        network: what the tensors come from.
        training: how it was trained before.
        data: the images of the captured pass.
        rows: tensors times codecs.
        absent: peers that are not in it, and why.
        missing: what the pass did not save, of `WANTED`.
    """

    network: str
    training: Training
    data: str
    rows: tuple[CodecRow, ...]
    absent: tuple[Absent, ...]
    missing: tuple[str, ...]


# -- capture -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Tap:
    """A codec that also hands on a copy of what it encodes."""

    inner: Codec
    saved: SavedTensor
    sink: list[Captured]

    @property
    def id(self) -> str:
        return self.inner.id

    @property
    def preserves(self) -> frozenset[Need]:
        return self.inner.preserves

    @property
    def bound(self) -> ErrorBound | None:
        return self.inner.bound

    def accepts(self, spec: TensorSpec) -> str | None:
        return self.inner.accepts(spec)

    def declines(self, x: Tensor) -> str | None:
        return self.inner.declines(x)

    def encode(self, x: Tensor) -> Encoded:
        encoded = self.inner.encode(x)
        self.sink.append(Captured(self.saved, self.inner, x.clone()))
        return encoded

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        return self.inner.decode(encoded, out)

    def nbytes_bound(self, spec: TensorSpec) -> int:
        return self.inner.nbytes_bound(spec)


@dataclass(frozen=True, eq=False)
class Capture(Policy):
    """A policy that taps another one's codecs for the saved tensors whose keys are wanted, and encodes no other."""

    keys: frozenset[str]
    policy: Policy
    captured: list[Captured] = field(default_factory=list)

    def decide(self, saved: SavedTensor) -> Action:
        """What the other policy decides, tapped."""
        action = self.policy.decide(saved)
        if not isinstance(action, Stash) or saved.need is Need.SHAPE:
            return action
        if saved.key not in self.keys:
            return Keep()
        taps: list[Any] = [_Tap(codec, saved, self.captured) for codec in action.codecs]
        return Stash(taps, action.store)


def capture(work: Work, device: str, deadline: Deadline) -> tuple[list[Captured], Training, str]:
    """The wanted tensors of one forward pass after a short training, the training, and what the images show."""
    torch.manual_seed(SEED)
    model = networks.build(work.network).to(device)
    training = train(model, work.schedule, device, deadline)
    data, images, labels = image_batch(work.batch, work.size)
    policy = Capture(frozenset(WANTED), lossless(recompute=False))
    with Session(policy, model=model, min_nbytes=0):
        loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
    del loss
    order = list(WANTED)
    return sorted(policy.captured, key=lambda one: order.index(one.saved.key)), training, data


# -- measure -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copy:
    """Memory to memory: what no codec that reads and writes every byte can beat."""

    name: str = "copy"
    own: bool = False

    def encode(self, x: Tensor) -> Tensor:
        """Nothing: `decode` is the copy."""
        return x

    def nbytes(self, encoded: Tensor) -> int:
        """As many as before."""
        return encoded.nbytes

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        """Copy."""
        out.copy_(encoded)


def measure(work: Work, device: str, deadline: Deadline, rounds: int) -> CodecTable:
    """Captures tensors and measures every codec on them.

    Args:
        work: what to capture from.
        device: ``"cpu"`` or ``"cuda"``.
        deadline: rounds stop early to meet it.
        rounds: most rounds per tensor.
    """
    captured, training, data = capture(work, device, deadline.part(0.3))
    peers = codec_peers(device)
    present = [peer for peer in peers if not isinstance(peer, Absent)]
    rows: list[CodecRow] = []
    for index, one in enumerate(captured):
        effort = Effort(rounds, deadline.part(1 / (len(captured) - index)))
        rows += _measure_one(one, (Copy(), Own(one.codec), *present), effort)
    found = {WANTED[one.saved.key] for one in captured}
    return CodecTable(
        network=work.network,
        training=training,
        data=data,
        rows=tuple(rows),
        absent=tuple(peer for peer in peers if isinstance(peer, Absent)),
        missing=tuple(what for what in dict.fromkeys(WANTED.values()) if what not in found),
    )


def _measure_one(captured: Captured, codecs: Sequence[CodecPeer], effort: Effort) -> list[CodecRow]:
    out = torch.empty_like(captured.x)
    exact = {codec.name: is_exact(codec, captured, out) for codec in codecs}
    tasks = {codec.name: partial(_round, codec, captured.x, out) for codec in codecs}
    times = interleave(tasks, effort)
    return [_row(captured, codec, exact[codec.name], times[codec.name]) for codec in codecs]


def is_exact(codec: CodecPeer, captured: Captured, out: Tensor) -> bool:
    """Whether ``codec`` gives back every bit of the tensor that backward reads. Overwrites ``out``."""
    flat(out).view(torch.uint8).fill_(0xA5)
    codec.decode(codec.encode(captured.x), out)
    if isinstance(codec, Own) and isinstance(codec.codec, Bitmask):  # then ``out`` holds stand-ins, which pass alike
        once, twice = (codec.codec.encode(x).planes for x in (captured.x, out))
        return all(torch.equal(plane, twice[name]) for name, plane in once.items())
    return torch.equal(flat(captured.x).view(torch.uint8), flat(out).view(torch.uint8))


def _round(codec: CodecPeer, x: Tensor, out: Tensor) -> tuple[float, float, int]:
    """Seconds of encoding, seconds of decoding, encoded bytes."""
    encode_seconds, encoded = timed(partial(codec.encode, x), x.is_cuda)
    decode_seconds, _ = timed(partial(codec.decode, encoded, out), x.is_cuda)
    return encode_seconds, decode_seconds, codec.nbytes(encoded)


def timed(call: Callable[[], Any], cuda: bool) -> tuple[float, Any]:
    """Seconds of a call, on CUDA until the device has done it, and what it returned."""
    if cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = call()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started, result


def _row(captured: Captured, codec: CodecPeer, exact: bool, times: Sequence[tuple[float, float, int]]) -> CodecRow:
    x, saved = captured.x, captured.saved
    encode, decode = tuple(one[0] for one in times), tuple(one[1] for one in times)
    if isinstance(codec, Copy):
        encode = decode
    encoded_nbytes = times[-1][2]
    return CodecRow(
        key=saved.key,
        tensor=WANTED[saved.key],
        spec=str(saved.spec),
        need=saved.need.name,
        nbytes=x.nbytes,
        zero_share=1.0 - int(torch.count_nonzero(flat(x))) / x.numel(),
        codec=codec.name,
        own=codec.own,
        encoded_nbytes=encoded_nbytes,
        ratio=x.nbytes / encoded_nbytes,
        exact=exact,
        encode_gb_per_second=summarise([x.nbytes / seconds / 1e9 for seconds in encode]),
        decode_gb_per_second=summarise([x.nbytes / seconds / 1e9 for seconds in decode]),
        encode_seconds=encode,
        decode_seconds=decode,
    )


def show(result: CodecTable) -> str:
    """The table for people."""
    lines = [
        f"tensors of {result.network} ({result.training}), then one pass over {result.data},",
        "smoother than photographs, which favours LZ4 and zlib in the first layers",
    ]
    header = ("codec", "ratio", "encode GB/s", "decode GB/s", "exact", "rounds")
    for key in dict.fromkeys(row.key for row in result.rows):
        rows = [row for row in result.rows if row.key == key]
        one = rows[0]
        size = f"{one.nbytes / 1e6:.1f} MB, {one.zero_share:.0%} zeros, backward reads its {one.need}"
        lines += ["", f"{one.tensor}: {key}, {one.spec}, {size}", table(header, map(_line, rows))]
    lines += ["", *(f"{peer.name}: {peer.reason}" for peer in result.absent)]
    lines += [f"not saved in this pass: {what}" for what in result.missing]
    return "\n".join(lines).rstrip()


def _line(row: CodecRow) -> tuple[str, ...]:
    return (
        row.codec,
        f"{row.ratio:.2f}",
        "" if row.codec == "copy" else spread(row.encode_gb_per_second),
        spread(row.decode_gb_per_second),
        "yes" if row.exact else "NO",
        str(row.encode_gb_per_second.count),
    )

"""A tensor in slices of its batch, each encoded on its own, so that backward can decode one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from backstash.codecs import base
from backstash.codecs.base import Codec, Draft, Encoded, ErrorBound, Judged, ReadPlanes, like, require_accepted
from backstash.codecs.direct import Direct, Slices
from backstash.saved import Mask, Need, TensorSpec


@dataclass(frozen=True)
class Sliced:
    """Stores slices of the first dimension, each with the same codec.

    Preserves: what ``codec`` does.
    Layout: the planes of ``codec`` for each slice, named ``"<slice>.<plane>"``; slices are as equal as can be, the
        larger ones first.
    Bytes: the sum of what the slices take.
    Determinism: as ``codec``.

    Args:
        codec: of each slice.
        parts: how many slices; a smaller batch has one per sample.

    Raises:
        ValueError: there are fewer than two parts.

    Example:
        >>> from backstash.codecs import Zvc
        >>> codec = Sliced(Zvc(), 2)
        >>> x = torch.eye(4)
        >>> encoded = codec.encode(x)
        >>> torch.equal(codec.decode(encoded), x), codec.decode_part(encoded, 1).shape
        (True, torch.Size([2, 4]))
    """

    codec: Codec
    parts: int = 4

    id: ClassVar[str] = "sliced"

    def __post_init__(self) -> None:
        if self.parts < 2:
            raise ValueError(f"Sliced was asked for {self.parts} parts, but it takes 2 or more.")

    @property
    def preserves(self) -> frozenset[Need]:
        """The needs that ``codec`` preserves."""
        return self.codec.preserves

    @property
    def bound(self) -> ErrorBound | None:
        """The bound of ``codec``."""
        return self.codec.bound

    @property
    def label(self) -> str:
        """The label of ``codec`` and the number of slices."""
        return f"{base.label(self.codec)} in {self.parts} slices"

    def keeps(self, mask: Mask) -> bool:
        """Keeps the masks that ``codec`` keeps."""
        return base.keeps(self.codec, mask)

    def direct(self, form: type[Direct]) -> ReadPlanes | None:
        """Offers the slices."""
        return self._slices if form is Slices else None

    def _slices(self, encoded: Encoded) -> Slices:
        return Slices(self.ranges(encoded.spec), lambda number: self.decode_part(encoded, number))

    def accepts(self, spec: TensorSpec) -> str | None:
        """Accepts slices that ``codec`` accepts, where the batch is the outermost dimension in memory."""
        if not spec.shape or spec.shape[0] < 2 or spec.stride[0] * spec.shape[0] != spec.numel:
            return "its first dimension is no batch of slices that lie one after the other"
        return self.codec.accepts(_slice(spec, 0, 1))

    def declines(self, x: Tensor) -> str | None:
        """Declines where ``codec`` declines the whole tensor."""
        return self.codec.declines(x)

    def encode(self, x: Tensor) -> Encoded:
        """Encodes each slice."""
        spec = require_accepted(self, x)
        return self._joined(spec, [self.codec.encode(x[begin:end]) for begin, end in self.ranges(spec)])

    def draft(self, x: Tensor, known: Sequence[Any]) -> Draft:
        """Drafts each slice, by what is ``known`` of the slice with its number, or of the last one that there was."""
        spec, makes = require_accepted(self, x), base.drafting(self.codec)
        assert makes is not None
        last = len(known) - 1
        drafts = [
            makes.draft(x[begin:end], known[min(number, last)]) for number, (begin, end) in enumerate(self.ranges(spec))
        ]
        numbers = torch.cat([draft.numbers.reshape(-1) for draft in drafts])
        return Draft(self._joined(spec, [draft.encoded for draft in drafts]), numbers, partial(self._judge, drafts))

    def _judge(self, drafts: list[Draft], numbers: list[Any]) -> Judged:
        judged = []
        for draft in drafts:
            count = draft.numbers.numel()
            judged.append(draft.judge(numbers[:count]))
            numbers = numbers[count:]
        refusal = next((one.refusal for one in judged if one.refusal is not None), None)
        known = None if any(one.known is None for one in judged) else tuple(one.known for one in judged)
        return Judged(refusal, known, partial(self._cut, judged))

    def _cut(self, judged: list[Judged], encoded: Encoded) -> Encoded:
        parts = [self._part(encoded, number) for number in range(len(judged))]
        cut = [part if one.cut is None else one.cut(part) for one, part in zip(judged, parts, strict=True)]
        return self._joined(encoded.spec, cut)

    def known(self, encoded: Encoded) -> tuple[Any, ...] | None:
        """What each slice tells; None where ``codec`` makes no drafts, or not of these."""
        makes = base.drafting(self.codec)
        if makes is None:
            return None
        found = tuple(makes.known(self._part(encoded, number)) for number in range(len(self.ranges(encoded.spec))))
        return None if None in found else found

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """Decodes every slice."""
        out = like(encoded.spec, out)
        for number, (begin, end) in enumerate(self.ranges(encoded.spec)):
            self.codec.decode(self._part(encoded, number), out[begin:end])
        return out

    def decode_part(self, encoded: Encoded, number: int) -> Tensor:
        """Returns the slice with that number, in memory of its own."""
        return self.codec.decode(self._part(encoded, number))

    def nbytes_bound(self, spec: TensorSpec) -> int:
        """The sum of the slices' bounds."""
        return sum(self.codec.nbytes_bound(_slice(spec, begin, end)) for begin, end in self.ranges(spec))

    def ranges(self, spec: TensorSpec) -> list[tuple[int, int]]:
        """For each slice the first sample and the one behind the last."""
        batch = spec.shape[0]
        parts = min(self.parts, batch)
        edges = [number * (batch // parts) + min(number, batch % parts) for number in range(parts + 1)]
        return list(pairwise(edges))

    def _joined(self, spec: TensorSpec, parts: Sequence[Encoded]) -> Encoded:
        planes = {f"{number}.{name}": plane for number, one in enumerate(parts) for name, plane in one.planes.items()}
        meta = {f"{number}.{name}": value for number, one in enumerate(parts) for name, value in one.meta.items()}
        return Encoded(self.id, spec, planes, meta)

    def _part(self, encoded: Encoded, number: int) -> Encoded:
        prefix = f"{number}."
        begin, end = self.ranges(encoded.spec)[number]
        return Encoded(
            self.codec.id,
            _slice(encoded.spec, begin, end),
            {name.removeprefix(prefix): x for name, x in encoded.planes.items() if name.startswith(prefix)},
            {name.removeprefix(prefix): value for name, value in encoded.meta.items() if name.startswith(prefix)},
        )


def _slice(spec: TensorSpec, begin: int, end: int) -> TensorSpec:
    shape = (end - begin, *spec.shape[1:])
    nbytes = torch.Size(shape).numel() * spec.dtype.itemsize
    return TensorSpec(shape, spec.stride, spec.dtype, spec.device, nbytes)

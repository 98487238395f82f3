"""Zeros and signs are exact; another codec stores the other values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from backstash.codecs import base
from backstash.codecs.base import (
    Codec,
    Draft,
    Encoded,
    ErrorBound,
    Judged,
    asks_for_sign,
    check_planes,
    flat,
    like,
    no_room,
    require_accepted,
    room_for,
    trimmed,
)
from backstash.codecs.blockquant.codec import BlockQuant
from backstash.codecs.masks.codec import unpacked
from backstash.codecs.sample import sample
from backstash.ops import bytes_for, zvc_chunks
from backstash.ops.registration import ops
from backstash.saved import Mask, Need, TensorSpec, Test

_PREFIX = "values."


@dataclass(frozen=True)
class Signed:
    """Stores which elements are zero and which are negative in a bit each, and the others with a codec for values.

    So a codec that would round a small number to zero, or across it, serves a relu as well. Only what is not zero goes
    through it, as one row of neighbours; but where it takes images only, all of the tensor does.

    Preserves: SHAPE, VALUE - within the bound of ``values``, of which a share of a group's range becomes one of the
        tensor's. Zeros stay zero (-0.0 becomes 0.0), what is not zero does not become it and keeps its sign; infinities
        and NaNs stay what they are, or are refused, as by ``values``.
    Layout: plane ``mask`` uint8 [ceil(n / 8)], element ``i`` in memory order in bit ``i % 8`` of byte ``i // 8``, set
        where it is not zero; ``offsets`` int64 [ceil(n / 4096)], how many are not before each chunk of 4,096 elements;
        ``least`` [1] of the tensor's dtype, the smallest magnitude of what is not zero: what a value becomes that would
        be decoded to a smaller one, or to one of the other sign, so that it comes closer to the original. Where some
        are negative and some not, ``positive`` uint8, a bit for each element that ``values`` encodes, set where it is
        above zero. Then the planes of ``values``, their names behind ``values.``.
    Bytes: ceil(n / 8) + 8 * ceil(n / 4096) + itemsize + positive + values, the last two being these planes.
    Determinism: as ``values``.
    Source: COMET (PVLDB 15(4), 2022) rounds what is near zero to zero, JPEG-ACT (ISCA 2020) pushes a relu's zeros
        below it before the transform, to find them again. Ours keeps them apart, as Zvc does (cDMA, HPCA 2018), so that
        none is lost and none is added.

    Args:
        values: a codec for VALUE with an absolute bound, or one that is a share of a range.

    Raises:
        ValueError: ``values`` is no such codec.

    Example:
        >>> from backstash.codecs import Sz
        >>> x = torch.tensor([0.0, 0.02, -1.0, -1e-9] * 4096)
        >>> Sz(0.1).decode(Sz(0.1).encode(x))[:4].sign().tolist()
        [0.0, 0.0, -1.0, 0.0]
        >>> Signed(Sz(0.1)).decode(Signed(Sz(0.1)).encode(x))[:4].sign().tolist()
        [0.0, 1.0, -1.0, -1.0]
    """

    values: Codec = field(default_factory=BlockQuant)

    id: ClassVar[str] = "signed"
    preserves: ClassVar[frozenset[Need]] = frozenset({Need.SHAPE, Need.VALUE})

    def __post_init__(self) -> None:
        bound = getattr(self.values, "bound", None)
        if bound is None or bound.each is not None or not base.serves_function(self.values, None):
            raise ValueError(
                f"Signed was asked for values={self.values!r}, but it takes a codec such as Sz() or BlockQuant(), that "
                f"stores VALUE to within a bound which is not each element's own. For exact values, or a smaller "
                f"floating format, use Zvc()."
            )

    @property
    def label(self) -> str:
        """With the codec of the values: ``"signed sz+abs0.001"``."""
        return f"{self.id} {base.label(self.values)}"

    @property
    def bound(self) -> ErrorBound:
        """The bound of ``values`` without its groups, whose elements are not neighbours in the tensor."""
        assert self.values.bound is not None
        return replace(self.values.bound, group_size=0)

    def keeps(self, mask: Mask) -> bool:
        """Keeps tests against zero, except NONZERO, for which -0.0 is not zero."""
        return asks_for_sign(mask)

    def accepts(self, spec: TensorSpec) -> str | None:
        """Accepts what ``values`` accepts, in any dense layout."""
        return self.values.accepts(spec)

    def declines(self, x: Tensor) -> str | None:
        """Declines where ``values`` declines the non-zeros of a sample."""
        if x.numel() == 0:
            return "it is empty"
        if not self._gathers(TensorSpec.of(x)):
            return self.values.declines(x)
        if isinstance(self.values, BlockQuant):  # takes any number of values
            return None
        some = sample(flat(x))
        some = some[some != 0]
        return self.values.declines(some) if some.numel() else None

    def encode(self, x: Tensor) -> Encoded:
        """Gathers the non-zeros, finds their signs, and encodes them. On CUDA the host waits."""
        spec = require_accepted(self, x)
        mask, offsets, values = ops.zvc_encode(flat(x))
        low, high = _extremes(values)
        if not (low > 0 or high < 0) and bool((values == 0).any()):  # some are -0.0, which has a bit set
            mask, offsets, values = ops.zvc_encode(flat(x) + 0.0)
            low, high = _extremes(values)
        planes = {"mask": mask, "offsets": offsets}
        gathers, nonzeros, negative = self._gathers(spec), values.numel(), int(high < 0)
        if nonzeros and not (low > 0 or high < 0):  # there are both signs, or NaNs
            planes["positive"] = ops.bitmask_encode(values if gathers else flat(x), Test.GT.code, 0.0, 0.0)
            low = torch.stack([_least(part) for part in _parts(values)]).min()
        planes["least"] = (low if low > 0 else -high).reshape(1)
        encoded = self.values.encode(values if gathers else x)
        planes |= {_PREFIX + name: plane for name, plane in encoded.planes.items()}
        meta = {_PREFIX + name: value for name, value in encoded.meta.items()}
        return Encoded(self.id, spec, planes, {"nonzeros": nonzeros, "negative": negative, **meta})

    def draft(self, x: Tensor, known: _Known) -> Draft:
        """As ``encode``, with room for some more values than are ``known``, and signs as they are expected."""
        spec, values = require_accepted(self, x), self.values
        assert isinstance(values, BlockQuant)
        room = room_for(known.nonzeros, spec.numel)
        # A sum with 0.0 is 0.0 for -0.0, which has a bit set.
        mask, offsets, gathered, count = ops.zvc_encode_within(flat(x) + 0.0, room)
        # Behind the last value stands it again, so that it does not change the range of its group.
        at = torch.arange(room, device=x.device).minimum((count - 1).clamp(min=0))
        gathered = gathered[at]
        low, high = _extremes(gathered)
        planes = {"mask": mask, "offsets": offsets}
        if known.has_both:
            planes["positive"] = ops.bitmask_encode(gathered, Test.GT.code, 0.0, 0.0)
            planes["least"] = gathered.abs().amin(0, keepdim=True)
        else:
            planes["least"] = (-high if known.negative else low).reshape(1)
        inner = values.draft(gathered)
        planes |= {_PREFIX + name: plane for name, plane in inner.encoded.planes.items()}
        encoded = Encoded(self.id, spec, planes, {"nonzeros": room, "negative": int(known.negative)})
        numbers = torch.cat((count, inner.numbers, torch.stack((low > 0, high < 0)).long()))
        return Draft(encoded, numbers, partial(self._judge, spec, room, known))

    def _judge(self, spec: TensorSpec, room: int, known: _Known, numbers: list[int]) -> Judged:
        nonzeros, refused, all_positive, all_negative = numbers
        refusal = no_room(nonzeros, room)
        if refused or not nonzeros:
            refusal = refusal or "it has no values, or some that are infinite or NaN"
            return Judged(refusal, None)
        found = _Known(nonzeros, known.has_both or not (all_positive or all_negative), bool(all_negative))
        if not known.has_both and (found.has_both or found.negative != known.negative):
            found = found._replace(has_both=True)
            refusal = refusal or "its values have other signs than was expected"
        return Judged(refusal, found, partial(self._cut, nonzeros))

    def _cut(self, nonzeros: int, encoded: Encoded) -> Encoded:
        row = _row(encoded.spec, nonzeros)
        sizes = {_PREFIX + name: size for name, size in self.values.sizes(row).items()}  # type: ignore[attr-defined]
        if "positive" in encoded.planes:
            sizes["positive"] = bytes_for(nonzeros, 1)
        return replace(trimmed(encoded, sizes), meta={**encoded.meta, "nonzeros": nonzeros})

    def known(self, encoded: Encoded) -> _Known | None:
        """How many values it has, and their signs; None where no draft is made: of what is no row of integers."""
        nonzeros = int(encoded.meta["nonzeros"])  # type: ignore[arg-type]
        if not isinstance(self.values, BlockQuant) or not nonzeros:
            return None
        return _Known(nonzeros, "positive" in encoded.planes, bool(encoded.meta["negative"]))

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """Decodes the values, mends their signs, and puts them among the zeros; takes their memory beside ``out``.

        Raises:
            DamagedPlanesError: the planes do not fit together.
        """
        spec, planes = encoded.spec, encoded.planes
        gathers, nonzeros = self._gathers(spec), int(encoded.meta["nonzeros"])  # type: ignore[arg-type]
        stored = _row(spec, nonzeros) if gathers else spec
        expected = {"mask": bytes_for(spec.numel, 1), "offsets": zvc_chunks(spec.numel), "least": 1}
        if "positive" in planes:
            expected["positive"] = bytes_for(stored.numel, 1)
        check_planes(encoded, expected)
        out = like(spec, out)
        inner = {name.removeprefix(_PREFIX): x for name, x in planes.items() if name.startswith(_PREFIX)}
        meta = {name.removeprefix(_PREFIX): x for name, x in encoded.meta.items() if name.startswith(_PREFIX)}
        values = flat(self.values.decode(Encoded(self.values.id, stored, inner, meta)))
        least = planes["least"]
        if "positive" in planes:
            for part, positive in zip(_parts(values), _parts(unpacked(planes["positive"], values)), strict=True):
                part.copy_(torch.where(positive, part.maximum(least), part.minimum(-least)))
        elif encoded.meta["negative"]:
            torch.minimum(values, -least, out=values)
        else:
            torch.maximum(values, least, out=values)
        if gathers:
            ops.zvc_decode(planes["mask"], planes["offsets"], values, flat(out))
        else:
            torch.where(unpacked(planes["mask"], values), values, values.new_zeros(()), out=flat(out))
        return out

    def nbytes_bound(self, spec: TensorSpec) -> int:
        """The size of a tensor without zeros and with both signs."""
        bits = 2 * bytes_for(spec.numel, 1) + 8 * zvc_chunks(spec.numel)
        values = _row(spec, spec.numel) if self._gathers(spec) else spec
        return bits + spec.dtype.itemsize + self.values.nbytes_bound(values)

    def _gathers(self, spec: TensorSpec) -> bool:
        """Whether the non-zeros are encoded as a row, and not the tensor as it is."""
        return self.values.accepts(_row(spec, spec.numel)) is None


class _Known(NamedTuple):
    """How many values an encoding has, whether they have both signs, and whether all are negative."""

    nonzeros: int
    has_both: bool
    negative: bool


def _extremes(values: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value, NaN where one of them is NaN; zeros for an empty tensor."""
    return values.aminmax() if values.numel() else (values.sum(), values.sum())


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    """The parts of a row that are worked on one after the other, so that what is computed on the way takes little."""
    parts: tuple[Tensor, ...] = x.split(max(1 << 16, -(-x.numel() // 16))) if x.is_cpu else (x,)
    return parts


def _least(values: Tensor) -> Tensor:
    magnitudes = values.abs()
    return torch.where(magnitudes.isnan(), math.inf, magnitudes).min()


def _row(spec: TensorSpec, numel: int) -> TensorSpec:
    return TensorSpec((numel,), (1,), spec.dtype, spec.device, numel * spec.dtype.itemsize)

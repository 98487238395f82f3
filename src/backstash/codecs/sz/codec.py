"""Numbers to within a bound, in as few bits as they then need."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from backstash.arguments import check_number
from backstash.codecs.base import (
    Draft,
    Encoded,
    ErrorBound,
    Judged,
    check_saving,
    flat,
    like,
    no_room,
    refuses_singles,
    require_accepted,
    room_for,
    trimmed,
)
from backstash.codecs.numbers import deferred_to
from backstash.codecs.sample import sample
from backstash.codecs.sz import coding as sz
from backstash.codecs.sz.reference import sz_damage
from backstash.ops.registration import ops
from backstash.saved import Need, TensorSpec

_MAX = sys.float_info.max


class KeptModel:
    """The model of the last tensor of one place, for the tensors that the next steps save there.

    To survey a tensor and to make a table takes a millisecond, whatever the tensor's size; to encode a mebibyte takes
    less. The tensors of one place hardly change from step to step, and a table that is not the best one takes a few
    bits more and decodes to the same numbers. So the table is used again, also with another bound of about that size,
    until a tensor takes other bits than were expected: numbers that are 20 % larger take a quarter of a bit more each,
    and a table that was made for them would save a twentieth of a bit. Then the next tensor gets a table of its own,
    and one that takes more than 30 % more is encoded again at once.

    Used by one codec at a time: give each place its own.
    """

    def __init__(self) -> None:
        self._about: object = None
        self._error = 0.0
        self._model: sz.CodeModel | None = None
        self._bits = 0.0
        self._table: Tensor | None = None

    def get(self, about: object, error: float) -> sz.CodeModel | None:
        """Returns the model if it was kept for tensors that are equal in what ``about`` says, and for such a bound."""
        model = self._model
        if model is None or self._about != about or not self._error / _NEAR <= error <= self._error * _NEAR:
            return None
        return model if error == self._error else replace(model, step=sz.single(min(2 * error, _MAX)))

    def keep(self, about: object, error: float, model: sz.CodeModel, bits: float, table: Tensor | None = None) -> None:
        """Keeps a model, and the bits that an element took with it, and its table where that is on a device."""
        self._about, self._error, self._model, self._bits = about, error, model, bits
        self._table = table

    def table(self, model: sz.CodeModel, device: torch.device) -> Tensor:
        """Returns a kept model's table on a device, without a wait if it was there already."""
        if self._table is None or self._table.device != device:
            self._table = torch.from_numpy(model.table).to(device)
        return self._table

    def strays(self, error: float, bits: float) -> bool:
        """Whether a tensor takes so much more that it is better encoded again. Forgets a model that is off."""
        expected = max(self._bits + math.log2(self._error / error), 0.25 * self._bits)
        if abs(bits - expected) > max(0.05 * expected, min(0.25, 0.15 * expected)):
            self._model = None
        return bits > 1.3 * expected


_NEAR = 1.5
"""A model serves bounds that are larger or smaller by this factor at most."""


@dataclass(frozen=True)
class Sz:
    """Stores each element to within ``bound``: prequantised, predicted from its neighbours, entropy-coded.

    Each element becomes the nearest multiple of a step, twice the bound. Of these integers the neighbours along up to
    three of the innermost dimensions are subtracted (Lorenzo prediction), or none are: whichever takes the fewest bits
    on a sample of the tensor. What is left is coded by range coders (rANS), which take a symbol's entropy and not a
    whole number of bits: where four elements of five are zero, 0.32 bits for each of those.

    Preserves: SHAPE, VALUE - within ``bound``. What would break it once it is rounded to the dtype, NaNs and infinities
        among them, is stored as it is, every bit. What is at most half a step from zero becomes 0.0, so every 0.0 stays
        0.0 and -0.0 becomes it; not so with ``nonzero``.
    Layout: the tensor in memory order, in chunks of whole tiles (``coding.blocks``) of at most 65,536
        elements. Plane ``table`` int16: of each symbol the frequency out of 256, and how many codes it stands for
        (``coding``). ``index`` int64: a checksum of the table; then of each chunk where its parts end in the
        three other planes, and a checksum
        of these. ``stream`` int16: of each chunk the last states of 32 range coders, then the words they gave up; an
        element's code is in that of coder ``i % 32``. ``places`` int16 and ``values``, of the tensor's dtype: where in
        their chunk outliers are, and what they are. A chunk that would not become smaller has its elements in
        ``values``.
    Bytes: 2 * (words + symbols + places) + itemsize * values + 8 * (1 + 4 * chunks)
    Determinism: the same planes on every backend. With ``kept`` the tables depend on earlier tensors; what is decoded
        does not.
    Source: COMET (PVLDB 15(4), 2022), section 4, which uses cuSZ (PACT 2020): dual quantisation and Lorenzo prediction
        are theirs. They code with canonical Huffman codes, ours are interleaved range coders (Giesen, 2014); they store
        no exact outliers where the reconstruction is rounded, have no checksums, and always predict.

    Args:
        error: the largest error, with ``mode="rel"`` as a share of the difference between the largest and the smallest
            finite element.
        mode: ``"abs"`` or ``"rel"``.
        min_saving: the smallest share of the dense bytes worth a pass over them; declined below it.
        nonzero: multiples and a half of the step in place of multiples, for what has no zeros (codecs.Signed): then the
            numbers next to zero have a step of their own, and not half of one with those on its other side. Zeros
            become half a step.
        kept: the model of earlier tensors of the same place, which is used again as long as it fits. None: each tensor
            is surveyed. With ``mode="rel"`` it is not used, as each tensor has another step.

    Raises:
        ValueError: ``error`` is not a positive finite number, there is no such mode, or ``min_saving`` is no share.

    Example:
        >>> x = torch.tensor([0.0, 0.26, math.nan, -1.0] * 4096)
        >>> encoded = Sz(0.125).encode(x)
        >>> Sz(0.125).decode(encoded)[:4].tolist(), encoded.planes["values"].numel()
        ([0.0, 0.25, nan, -1.0], 4096)
    """

    error: float = 1e-3
    mode: Literal["abs", "rel"] = "abs"
    min_saving: float = 0.02
    nonzero: bool = False
    kept: KeptModel | None = field(default=None, compare=False, repr=False)

    id: ClassVar[str] = "sz"
    preserves: ClassVar[frozenset[Need]] = frozenset({Need.SHAPE, Need.VALUE})

    def __post_init__(self) -> None:
        check_number(self.error, "error", "Sz", 1e-3)
        if not 0.0 < self.error < math.inf:
            raise ValueError(
                f"Sz was asked for error={self.error}, but that is how far a decoded element may be from the original: "
                f"a positive finite number. For exact storage use zvc."
            )
        if self.mode not in ("abs", "rel"):
            raise ValueError(f"Sz was asked for mode={self.mode!r}, but there are 'abs' and 'rel'.")
        check_saving(self, self.min_saving)

    @property
    def label(self) -> str:
        """``"sz+abs0.001"`` and the like."""
        return f"{self.id}+{self.mode}{self.error:g}"

    @property
    def _offset(self) -> float:
        """The offset, in steps, that is added to the integers."""
        return 0.5 if self.nonzero else 0.0

    @property
    def bound(self) -> ErrorBound:
        """The bound that was asked for."""
        return ErrorBound(abs=self.error) if self.mode == "abs" else ErrorBound(rel=self.error)

    def accepts(self, spec: TensorSpec) -> str | None:
        """Accepts dense floating tensors of 16 or 32 bits."""
        return refuses_singles(spec)

    def declines(self, x: Tensor) -> str | None:
        """Declines where a sample would not become much smaller (see codecs.sample)."""
        if x.numel() == 0:
            return "it is empty"
        if self.kept is not None and self.kept.get(self._about(TensorSpec.of(x)), self.error) is not None:
            return None
        some = sample(flat(x))
        if self.mode == "abs" and some.dtype == torch.float32 and self._is_coarse(some):
            return None
        bits = self._model(some, [1, 1, 1, sz.CHUNK])[0].bits / (8 * some.nbytes)
        return None if 1.0 - bits >= self.min_saving else f"a sample of it takes {bits:.0%} of its bits"

    def encode(self, x: Tensor) -> Encoded:
        """A look at a sample, and a pass over ``x``; with ``mode="rel"`` one before, for the range.

        On CUDA the host waits for the range, for each survey, from which it makes the table, and for the planes' sizes.
        """
        spec = require_accepted(self, x)
        x, blocks = flat(x), _blocks(spec)
        kept = self.kept if self.mode == "abs" and spec.numel else None
        if kept is None:
            return self._encode(x, spec, blocks, *self._model(x, blocks))
        about = self._about(spec)
        model = kept.get(about, self.error)
        if model is not None:
            encoded = self._encode(x, spec, blocks, model, self.error)
            if not kept.strays(self.error, 8 * encoded.nbytes / spec.numel):
                return encoded
        model, error = self._model(x, blocks)
        encoded = self._encode(x, spec, blocks, model, error)
        kept.keep(about, self.error, model, 8 * encoded.nbytes / spec.numel)
        return encoded

    def draft(self, x: Tensor, known: tuple[tuple[int, ...], float]) -> Draft:
        """As ``encode``, with room for some more than an earlier tensor took. The host waits for surveys alone."""
        spec, kept = require_accepted(self, x), self.kept
        assert kept is not None
        x, blocks, about = flat(x), _blocks(spec), self._about(spec)
        model, error = kept.get(about, self.error), self.error
        is_kept = model is not None
        if model is None:
            model, error = self._model(x, blocks)
            host = torch.from_numpy(model.table).pin_memory()  # held until the numbers have arrived, which follow it
            table = host.to(x.device, non_blocking=True)
        else:
            host = table = kept.table(model, x.device)
        sizes, before = known
        more = max(0.0, math.log2(before / self.error)) * spec.numel / 16  # where the bound is halved, a bit each
        words, outliers, stored = sizes
        most = spec.nbytes // 2 + 64 * sz.chunks(spec.numel, blocks[3])
        rooms = [
            room_for(words + math.ceil(more), most),
            room_for(outliers, spec.numel),
            room_for(stored, spec.numel),
        ]
        parameters = model.base, model.low, model.axes
        *planes, numbers = ops.sz_encode_within(x, table, model.step, error, parameters, blocks, rooms, self._offset)
        stream, index, places, values = planes
        named = {"stream": stream, "table": table, "index": index, "places": places, "values": values}
        encoded = Encoded(self.id, spec, named, {"step": model.step, "parameters": parameters})

        def judge(found: list[int], host: Tensor = host) -> Judged:
            size = 2 * (found[0] + found[1] + table.numel()) + values.element_size() * found[2] + 8 * index.numel()
            bits = 8 * size / spec.numel
            if is_kept:
                kept.strays(self.error, bits)
            else:
                kept.keep(about, self.error, model, bits, table)
            lacking = (no_room(needed, room) for needed, room in zip(found, rooms, strict=True))
            refusal = next((reason for reason in lacking if reason is not None), None)
            trims = dict(zip(("stream", "places", "values"), found, strict=True))
            return Judged(refusal, (tuple(found), self.error), partial(trimmed, sizes=trims))

        return Draft(encoded, numbers, judge)

    def known(self, encoded: Encoded) -> tuple[tuple[int, ...], float] | None:
        """The sizes of the planes, with which bound; None without a model that is used again."""
        if self.kept is None or self.mode != "abs" or not encoded.spec.numel:
            return None
        return tuple(encoded.planes[name].numel() for name in ("stream", "places", "values")), self.error

    def _about(self, spec: TensorSpec) -> object:
        """What two tensors have in common for which one model is good."""
        neighbours = tuple(_blocks(spec)[:3]) if sum(size > 1 for size in spec.shape) > 1 else ()
        # Of a small dtype the step is chosen for one bound alone.
        return None if spec.dtype == torch.float32 else self.error, self.nonzero, spec.dtype, neighbours

    def _encode(self, x: Tensor, spec: TensorSpec, blocks: list[int], model: sz.CodeModel, error: float) -> Encoded:
        table = torch.from_numpy(model.table).to(x.device)
        parameters = model.base, model.low, model.axes
        stream, index, places, values = ops.sz_encode(x, table, model.step, error, parameters, blocks, self._offset)
        planes = {"stream": stream, "table": table, "index": index, "places": places, "values": values}
        return Encoded(self.id, spec, planes, {"step": model.step, "parameters": parameters})

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """Multiples of the step in the original dtype, and the outliers.

        On CUDA the host waits, to know of damage, unless somebody looks at that later (codecs.numbers.deferring).

        Raises:
            DamagedPlanesError: the planes do not fit together, or a checksum is another one.
        """
        out = like(encoded.spec, out)
        planes = [encoded.planes[name] for name in ("table", "stream", "index", "places", "values")]
        step, parameters = encoded.meta["step"], encoded.meta["parameters"]
        arguments = *planes, step, parameters, _blocks(encoded.spec), flat(out), self._offset  # type: ignore[misc]
        later = None if out.is_cpu else deferred_to()
        if later is None:
            ops.sz_decode(*arguments)
        else:
            later(ops.sz_decode_flagged(*arguments), sz_damage())
        return out

    def nbytes_bound(self, spec: TensorSpec) -> int:
        """The size where no chunk becomes smaller and every symbol occurs."""
        return spec.nbytes + 8 * (1 + 4 * sz.chunks(spec.numel, _blocks(spec)[3])) + 2 * (2 + sz.WINDOW)

    def _is_coarse(self, some: Tensor) -> bool:
        """Whether so few multiples of the step lie between the extremes that their numbers alone would be smaller."""
        low, high = torch.aminmax(some)
        steps = float(high - low) / (2 * self.error)
        return steps < sz.WINDOW // 4 and math.log2(steps + 2.0) + 1.0 < (1.0 - self.min_saving) * 8 * some.itemsize

    def _model(self, x: Tensor, blocks: list[int]) -> tuple[sz.CodeModel, float]:
        """How the elements of the flat tensor ``x`` are coded, and the largest error."""
        error, only = self.error, 1.0
        if self.mode == "rel":
            low, only = ops.sz_range(x).tolist()
            error = min(error * (only - low), _MAX)
        # Elements that are all the same are one step from zero. A float32 as the step is what decoders are fast with.
        steps = [sz.single(min(2 * error, _MAX) or abs(only) or 1.0)]
        if x.dtype != torch.float32:
            # Where the dtype's own steps are about as large, rounding to it breaks the bound for many multiples, but
            # for fewer of a number that has few digits. Measured on normal numbers in bfloat16, to within 0.5 % of the
            # range: 4.6 bits each with the step as it is, 3.8 with three digits of it.
            steps += [sz.truncated(steps[0], digits) for digits in range(1, 5)]
        models = [_surveyed(x, step, error, blocks, self._offset) for step in dict.fromkeys(steps)]
        return min(models, key=lambda model: model.bits), error


def _surveyed(x: Tensor, step: float, error: float, blocks: list[int], offset: float) -> sz.CodeModel:
    """The best model with this step: with as many low bits left out as pays."""
    best: sz.CodeModel | None = None
    for low in range(0, sz.MAX_LOW + 1, 2):
        counts = ops.sz_survey(x, step, error, low, blocks, offset).cpu().numpy().reshape(-1, sz.BINS)
        model = sz.model(counts.astype(np.int64, copy=False), step, low, 8 * x.element_size())
        if best is not None and model.bits > best.bits:  # the same, where all are escapes
            break
        best = model if best is None or model.bits < best.bits else best
        if model.bits < 7 * counts[0, :-1].sum():  # coarse: no low bits would be left out
            break
    assert best is not None
    return best


def _blocks(spec: TensorSpec) -> list[int]:
    dims = sorted((step, size) for size, step in zip(spec.shape, spec.stride, strict=True) if size > 1)
    return sz.blocks([size for _, size in dims])

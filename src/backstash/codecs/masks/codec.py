"""One bit per element: the outcome of a test (``Bitmask``), or which of two values it has (``Binary``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from backstash.codecs.base import (
    EXACT,
    Draft,
    Encoded,
    ErrorBound,
    Judged,
    ReadPlanes,
    check_planes,
    flat,
    like,
    refuses_floats,
    require_accepted,
)
from backstash.codecs.direct import Direct, Factors, MaskBits, Slopes
from backstash.codecs.sample import look, sample
from backstash.errors import CodecRefusedError
from backstash.ops import bits_of, bytes_for
from backstash.ops.registration import ops
from backstash.saved import Mask, Need, TensorSpec, Test

_RELU = Mask(Test.NOT_LE)


@dataclass(frozen=True)
class Bitmask:
    """Stores which side of a threshold each element is on.

    Preserves: SHAPE, SIGN - the outcome of ``mask.test``, NaN included.
    Layout: plane ``mask`` uint8 [ceil(n / 8)], element ``i`` in memory order in bit ``i % 8`` of byte ``i // 8``;
        with ``mask.ternary`` a second such plane ``negative``; with ``mask.nan`` a second such plane ``nan``, if there
        is a NaN at all.
    Bytes: ceil(n / 8), twice that if ternary or where NaN must stay NaN and there is one.
    Determinism: the same planes on every backend.
    Source: Gist (ISCA 2018), section 3.1, "Binarize"; ours takes the test from the backward formula, so that it is
        exact for NaN, and serves hardtanh, threshold, leaky_relu, clamp, shrinks and abs as well as relu.

    Args:
        mask: the test, its bounds, and the values that stand in for its two outcomes.

    Example:
        >>> codec = Bitmask(Mask(Test.NOT_LE))
        >>> codec.decode(codec.encode(torch.tensor([-1.0, 0.0, 2.0, float("nan")])))
        tensor([False, False,  True,  True])
    """

    mask: Mask = _RELU

    id: ClassVar[str] = "bitmask"
    preserves: ClassVar[frozenset[Need]] = frozenset({Need.SHAPE, Need.SIGN})
    bound: ClassVar[ErrorBound | None] = None

    def direct(self, form: type[Direct]) -> ReadPlanes | None:
        """Offers the bits, or the two numbers that they are decoded to; not beside a third value or a NaN."""
        return {MaskBits: self._bits, Slopes: self._slopes}.get(form)

    def _bits(self, encoded: Encoded) -> MaskBits | None:
        return MaskBits(encoded.planes["mask"]) if set(encoded.planes) == {"mask"} else None

    def _slopes(self, encoded: Encoded) -> Slopes | None:
        if set(encoded.planes) != {"mask"}:
            return None
        points = torch.tensor((self.mask.if_clear, self.mask.if_set), dtype=encoded.spec.dtype, device="cpu")
        return Slopes(encoded.planes["mask"], points)

    def accepts(self, spec: TensorSpec) -> str | None:
        """Accepts dense floating tensors of 16, 32 or 64 bits."""
        return refuses_floats(spec)

    def declines(self, x: Tensor) -> str | None:
        """Declines nothing."""
        return None

    def encode(self, x: Tensor) -> Encoded:
        """Tests each element, and packs the outcomes. On CUDA the host waits where NaN must stay NaN."""
        encoded = self._tested(x)
        if self.mask.nan:
            nan = self._nan(x)
            if nan.any():
                encoded = self._with(encoded, nan)
        return encoded

    @property
    def draft(self) -> Callable[[Tensor, bool], Draft] | None:
        """As ``encode`` without the wait, with a plane for NaN if the last tensor had one; None where nothing waits."""
        return self._draft if self.mask.nan else None

    def _draft(self, x: Tensor, known: bool) -> Draft:
        encoded, nan = self._tested(x), self._nan(x)
        return Draft(self._with(encoded, nan) if known else encoded, nan.any().reshape(1), partial(_judge, known))

    def known(self, encoded: Encoded) -> bool | None:
        """Whether there is a NaN; None where it makes no difference."""
        return "nan" in encoded.planes if self.mask.nan else None

    def _nan(self, x: Tensor) -> Tensor:
        found: Tensor = ops.bitmask_encode(flat(x), Test.NOT_LE.code, float("inf"), 0.0)
        return found

    def _with(self, encoded: Encoded, nan: Tensor) -> Encoded:
        return Encoded(self.id, encoded.spec, {**encoded.planes, "nan": nan})

    def _tested(self, x: Tensor) -> Encoded:
        """All planes but that of NaN."""
        spec = require_accepted(self, x)
        test = self.mask
        planes = {"mask": ops.bitmask_encode(flat(x), test.test.code, test.lo, test.hi)}
        if test.ternary:
            info = torch.finfo(x.dtype)
            below_zero = -info.smallest_normal * info.eps  # the negative number next to zero
            planes["negative"] = ops.bitmask_encode(flat(x), Test.CLOSED.code, float("-inf"), below_zero)
        return Encoded(self.id, spec, planes)

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """Fill a bool ``out`` with the outcomes, or one of the original dtype with their stand-ins.

        Without ``out``: a bool, or the original dtype where the sign has three values.

        A bool is a quarter of a float32, but backward kernels on CPU that are given one make a floating copy of it
        first: measured at 2.5 times the time of relu's backward. So a Session asks for floats there.
        """
        check_planes(encoded, dict.fromkeys(encoded.planes, bytes_for(encoded.spec.numel, 1)))
        out = like(encoded.spec, out, None if self.mask.ternary else torch.bool)
        is_test = self.mask.ternary or out.dtype == torch.bool
        if_set, if_clear = (1.0, 0.0) if is_test else (self.mask.if_set, self.mask.if_clear)
        ops.bitmask_decode(encoded.planes["mask"], flat(out), if_set, if_clear)
        if self.mask.ternary:
            flat(out).masked_fill_(unpacked(encoded.planes["negative"], out), -1.0)
        if "nan" in encoded.planes and out.dtype != torch.bool:
            flat(out).masked_fill_(unpacked(encoded.planes["nan"], out), float("nan"))
        return out

    def nbytes_bound(self, spec: TensorSpec) -> int:
        """One bit per element, or two where there is a third value or a NaN may be."""
        return bytes_for(spec.numel, 1) * (2 if self.mask.ternary or self.mask.nan else 1)


def unpacked(bits: Tensor, x: Tensor) -> Tensor:
    """Returns the bits as a flat bool for each element of ``x``, where ``x`` is."""
    out = torch.empty(x.numel(), dtype=torch.bool, device=x.device)
    ops.bitmask_decode(bits, out, 1.0, 0.0)
    return out


def _judge(has_plane: bool, numbers: list[bool]) -> Judged:
    """Whether a draft of Bitmask has a plane for NaN if there is one."""
    (has_nan,) = numbers
    return Judged("it has a NaN, which was not expected" if has_nan and not has_plane else None, bool(has_nan))


@dataclass(frozen=True)
class Binary:
    """Stores a tensor whose elements have only two different bit patterns: dropout's mask, an attention mask.

    Preserves: SHAPE, SIGN, INDEX, VALUE.
    Layout: plane ``mask`` uint8 [ceil(n / 8)] as in Bitmask, set where the element is ``pair[1]``; plane ``pair`` [2].
    Bytes: ceil(n / 8) + 2 * itemsize.
    Determinism: the same planes on every backend; ``pair`` is ordered by first occurrence in the sample.
    Source: Gist (ISCA 2018), section 3.1, packs masks; ours finds them by looking, whatever op made them.

    Example:
        >>> x = torch.tensor([0.0, 1.25, 1.25, 0.0]).repeat(64)
        >>> encoded = Binary().encode(x)
        >>> encoded.nbytes, torch.equal(Binary().decode(encoded), x)
        (40, True)
    """

    id: ClassVar[str] = "binary"
    preserves: ClassVar[frozenset[Need]] = EXACT
    bound: ClassVar[ErrorBound | None] = None

    def accepts(self, spec: TensorSpec) -> str | None:
        """Accepts dense floating tensors of 16, 32 or 64 bits that are not empty."""
        return refuses_floats(spec) or ("it is empty" if spec.numel == 0 else None)

    def declines(self, x: Tensor) -> str | None:
        """Declines where a sample shows other than two bit patterns.

        On CUDA always: looking makes the host wait, and masks are bool there already.
        """
        if x.device.type != "cpu":
            return "the host does not look at tensors on a GPU"
        patterns = look(flat(x))[2]
        if patterns == 2:
            return None
        return "a sample has more than two values" if patterns > 2 else "a sample has one value"

    def encode(self, x: Tensor) -> Encoded:
        """One bit per element.

        Raises:
            CodecRefusedError: the full pass found a third bit pattern.
        """
        spec = require_accepted(self, x)
        pair = _first_two(sample(flat(x)))
        mask, mismatches = ops.binary_encode(flat(x), pair)
        if int(mismatches):
            raise CodecRefusedError(
                f"codec 'binary' was asked to encode {spec} with two different values, got {int(mismatches)} elements "
                f"with another one. Use zvc, or Keep()."
            )
        return Encoded(self.id, spec, {"mask": mask, "pair": pair})

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """Returns every bit of the original."""
        check_planes(encoded, {"mask": bytes_for(encoded.spec.numel, 1), "pair": 2})
        out = like(encoded.spec, out)
        ops.binary_decode(encoded.planes["mask"], encoded.planes["pair"], flat(out))
        return out

    def direct(self, form: type[Direct]) -> ReadPlanes | None:
        """Offers the bits, which tell which of the two numbers each element is."""
        return _factors if form is Factors else None

    def nbytes_bound(self, spec: TensorSpec) -> int:
        """One bit per element and the two values."""
        return bytes_for(spec.numel, 1) + 2 * spec.dtype.itemsize


def _factors(encoded: Encoded) -> Factors:
    return Factors(encoded.planes["mask"], encoded.planes["pair"])


def _first_two(x: Tensor) -> Tensor:
    """The first element and the first that differs from it, [2]; the first one twice where all are equal."""
    bits = bits_of(x)
    other = int((bits != bits[0]).to(torch.uint8).argmax())
    return torch.stack((x[0], x[other]))

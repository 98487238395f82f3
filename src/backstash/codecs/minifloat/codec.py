"""Floating-point numbers in fewer bits: delayed precision reduction, and torch's own small formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from backstash.arguments import check_word
from backstash.codecs.base import Encoded, ErrorBound, check_planes, flat, like, refuses_singles, require_accepted
from backstash.codecs.minifloat.formats import FORMATS, LEAST_SCALE, SCALED, Format
from backstash.ops import groups
from backstash.ops.registration import ops
from backstash.saved import Need, TensorSpec

GROUP_SIZE = 256


@dataclass(frozen=True)
class Minifloat:
    """Stores each element as a number of a smaller floating-point format.

    Preserves: SHAPE, VALUE - within ``bound``: an element's own relative error, and where zero and the largest begin.
    Layout: plane ``codes``, element ``i`` in memory order: a sign bit above the exponent's bits above the mantissa's.

        ============= ============ ==== =========== ================ ====================== =====
        format        sign-exp-man bias largest     smallest normal  below it               plane
        ============= ============ ==== =========== ================ ====================== =====
        fp8           1-4-3        7    416         2**-6            zero                   uint8 [n]
        fp10          1-5-4        15   63,488      2**-14           zero                   int32 [ceil(n / 3)]
        fp16          1-5-10       15   65,504      2**-14           zero                   int16 [n]
        float8_e4m3fn 1-4-3        7    416         2**-6            subnormals             uint8 [n]
        float8_e5m2   1-5-2        15   57,344      2**-14           subnormals             uint8 [n]
        bfloat16      1-8-7        127  3.39e38     2**-126          subnormals             int16 [n]
        ============= ============ ==== =========== ================ ====================== =====

        A magnitude is rounded to the mantissa's bits, to nearest, ties to even. Whether it is below the smallest normal
        one is asked of the rounded magnitude: the quarter of a step just below is rounded up to it. What is below
        becomes zero and keeps its sign; -0.0 stays -0.0. What is finite and above the largest one becomes that. An
        infinity stays one, so that a loss scaler sees it: its code is the one after the largest number's. All bits set
        but the sign is NaN: it keeps its sign and loses its payload. fp8 and float8_e4m3fn use their highest exponent
        for numbers, but for these two codes. Three codes of fp10 share a little-endian word, the first
        one lowest, and its two top bits are 0.
        With ``group_size`` a second plane ``scales`` float32 [ceil(n / group_size)], of powers of two: that many
        neighbours in memory order were divided by the smallest one, but at least 2**-126, that makes their largest
        magnitude fit. Infinities and NaN do not count. What is above the largest number with as many mantissa bits
        counts as that.
    Bytes: word * ceil(n / fields) + 4 * groups, where an element of ``codes`` has ``word`` bytes and ``fields`` codes.
    Determinism: the same planes on every backend.
    Source: Gist (ISCA 2018), section 3.2, "Delayed Precision Reduction", for fp16, fp10, fp8; ours says what becomes of
        NaN and infinity, and keeps 416 rather than 240 in fp8. The others are torch's dtypes, rounded as torch converts
        to them, but clamped; where float8_e4m3fn has 448, there is infinity here. Groups with a scale each are as in
        microscaling, at 256 elements.

    Args:
        format: ``"fp8"``, ``"fp10"``, ``"fp16"``, ``"bfloat16"``, ``"float8_e4m3fn"`` or ``"float8_e5m2"``.
        group_size: elements that share a scale, a power of two from 16 to 4,096, for the two float8 formats; 0 for no
            scales; None for 256 where there may be scales and 0 elsewhere.

    Raises:
        ValueError: there is no such format, or it has no such groups.

    Example:
        >>> import torch
        >>> x = torch.tensor([0.1, -3.0, 1000.0, 0.001])
        >>> encoded = Minifloat("fp8").encode(x)
        >>> encoded.nbytes, Minifloat("fp8").decode(encoded).tolist()
        (4, [0.1015625, -3.0, 416.0, 0.0])
    """

    format: str = "fp8"
    group_size: int | None = None

    id: ClassVar[str] = "minifloat"
    preserves: ClassVar[frozenset[Need]] = frozenset({Need.SHAPE, Need.VALUE})

    def __post_init__(self) -> None:
        check_word(self.format, "format", "Minifloat", "fp16")
        if self.format not in FORMATS:
            raise ValueError(f"Minifloat was asked for format {self.format!r}, but there are {', '.join(FORMATS)}.")
        size = self.group_size
        if size is None:
            size = GROUP_SIZE if self.format in SCALED else 0
            object.__setattr__(self, "group_size", size)
        allowed = [0, *(2**power for power in range(4, 13))] if self.format in SCALED else [0]
        if size not in allowed:
            choices = f"the choices are {', '.join(map(str, allowed))}" if len(allowed) > 1 else "it has no scales"
            raise ValueError(
                f"Minifloat was asked for group_size={size} with format {self.format!r}, but {choices}. Leave it out "
                f"for what suits the format."
            )

    @property
    def label(self) -> str:
        """The name of the format."""
        return self.format

    @property
    def bound(self) -> ErrorBound:
        """Half a step of the mantissa; with scales, "tiny" depends on the group's largest magnitude."""
        form = self._form
        each = 2.0 ** -(form.mantissa + 1)
        if not self.group_size:
            return ErrorBound(each=each, tiny=form.smallest_normal, limit=form.largest)
        # A scale is less than twice the largest magnitude / form.largest.
        share = 2 * form.smallest_normal / form.largest
        return ErrorBound(each=each, tiny=form.smallest_normal * LEAST_SCALE, share=share, group_size=self.group_size)

    @property
    def repeats(self) -> bool:
        """Whether numbers of the format stay as they are (base.repeats): where nothing is scaled."""
        return not self.group_size

    def accepts(self, spec: TensorSpec) -> str | None:
        """Accepts dense floating tensors of 16 or 32 bits if the format has fewer."""
        refused = refuses_singles(spec)
        if refused is None and self._form.bits >= 8 * spec.dtype.itemsize:
            name = str(spec.dtype).removeprefix("torch.")
            return f"a number of {self.format} takes as many bits as one of {name}"
        return refused

    def declines(self, x: Tensor) -> str | None:
        """Declines nothing."""
        return None if x.numel() else "it is empty"

    def encode(self, x: Tensor) -> Encoded:
        """Rounds each element."""
        spec = require_accepted(self, x)
        if self.group_size:
            codes, scales = ops.minifloat_scaled_encode(flat(x), self.format, self.group_size)
            return Encoded(self.id, spec, {"codes": codes, "scales": scales})
        return Encoded(self.id, spec, {"codes": ops.minifloat_encode(flat(x), self.format, False)})

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """The rounded numbers, exactly, in the original dtype.

        Raises:
            DamagedPlanesError: a plane has another size.
        """
        planes, numel = encoded.planes, encoded.spec.numel
        expected = {"codes": self._form.words(numel)}
        if self.group_size:
            expected["scales"] = groups(numel, self.group_size)
        check_planes(encoded, expected)
        out = like(encoded.spec, out)
        if self.group_size:
            ops.minifloat_scaled_decode(planes["codes"], planes["scales"], self.format, self.group_size, flat(out))
        else:
            ops.minifloat_decode(planes["codes"], self.format, flat(out))
        return out

    def nbytes_bound(self, spec: TensorSpec) -> int:
        """The size, which does not depend on the data."""
        scales = 4 * groups(spec.numel, self.group_size) if self.group_size else 0
        return self.codes_nbytes(spec.numel) + scales

    @property
    def bits(self) -> float:
        """Bits that a code takes in its plane, with its share of a word's unused bits."""
        return 8 * self._form.dtype.itemsize / self._form.fields

    @property
    def fields(self) -> int:
        """Codes in an element of their plane."""
        return self._form.fields

    def words(self, numel: int) -> int:
        """Elements of the plane of the codes of that many elements."""
        return self._form.words(numel)

    def codes_nbytes(self, numel: int) -> int:
        """Bytes of the codes of that many elements."""
        return self._form.dtype.itemsize * self._form.words(numel)

    @property
    def _form(self) -> Format:
        return FORMATS[self.format]

"""Dense floating-point values: exponents in few bits, every other bit as it is."""

from __future__ import annotations

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
    check_planes,
    check_saving,
    flat,
    like,
    no_room,
    refuses_layout,
    require_accepted,
    room_for,
    trimmed,
)
from backstash.codecs.exponents.reference import EXPONENTS_BLOCK, EXPONENTS_LANES, exponents_blocks
from backstash.codecs.sample import sample
from backstash.ops import bytes_for, zvc_chunks
from backstash.ops.registration import ops
from backstash.saved import Need, TensorSpec

DTYPES = (torch.bfloat16, torch.float32)
"""Element types that have an exponent of 8 bits, of which few different ones are near each other."""

RUN = 32
"""Neighbours in a sample of a large tensor (codecs.sample): they are in one block."""


@dataclass(frozen=True)
class Exponents:
    """Stores the 8 bits of each exponent as a code of ``bits`` bits, and the sign and the fraction as they are.

    Neighbours in an activation have few different exponents: of a normal distribution 14 in a row hold all numbers but
    one in five thousand. It is for values that are dense: zeros take as much as any other number.

    Preserves: SHAPE, SIGN, INDEX, VALUE - every bit: -0.0, subnormals, infinities and NaN payloads.
    Layout: plane ``fractions`` uint8 [(itemsize - 1) * n], of float32 first the lower 16 bits of each element, then a
        byte per element, its sign above the upper 7 bits of its fraction; ``codes`` uint8 [ceil(n * bits / 8)], a
        little-endian bit stream; ``bases`` uint8 [ceil(n / 512)]; ``offsets`` int64 [ceil(n / 4096)], where each chunk
        of 4,096 elements begins in ``escapes``; ``escapes`` uint8 [number of escapes], in order.
        Code 0 is the exponent 0, of zeros and subnormals, in every block; a code from 1 to 2**bits - 2 is the exponent
        that is so much above the base of its block of 512; code 2**bits - 1 is an exponent that is no such one, and is
        an escape. How a base is chosen stands beside the kernel (codecs/exponents/reference.py); decoding does not ask.
    Bytes: (itemsize - 1) * n + ceil(n * bits / 8) + ceil(n / 512) + 8 * ceil(n / 4096) + escapes, where escapes are at
        most n: in the worst case 9 / 8 of the dense bytes of float32, and 5 / 4 of those of bfloat16, and a bit.
    Determinism: the same planes on every backend.
    Source: DFloat11 (NeurIPS 2025) stores the exponents of bfloat16 weights as Huffman codes; ours have a fixed width,
        so that every element is found at once and codes are made and read as fast as memory is.

    float16 is refused: its exponents have 5 bits, of which so little could be saved that a pass does not pay.

    Args:
        bits: of a code, 4 or 3. With 4 hardly anything is an escape; with 3 the window has 6 exponents, and about one
            of twenty normal numbers is one.
        min_saving: the smallest share of the dense bytes worth a pass over them; declined below it. At 0.09 the dense
            bytes are about 1.1 of the stored ones.

    Raises:
        ValueError: ``bits`` is neither, or ``min_saving`` is no share.

    Example:
        >>> x = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16(); x[7] = -0.0
        >>> encoded = Exponents().encode(x)
        >>> x.nbytes, encoded.nbytes - encoded.planes["escapes"].numel()
        (8192, 6160)
        >>> torch.equal(Exponents().decode(encoded).view(torch.int16), x.view(torch.int16))
        True
    """

    bits: int = 4
    min_saving: float = 0.09

    id: ClassVar[str] = "exponents"
    preserves: ClassVar[frozenset[Need]] = EXACT
    bound: ClassVar[ErrorBound | None] = None

    def __post_init__(self) -> None:
        if self.bits not in (3, 4):
            raise ValueError(f"Exponents asked for bits={self.bits!r}, but a code has 3 or 4.")
        check_saving(self, self.min_saving)

    def accepts(self, spec: TensorSpec) -> str | None:
        """Accepts dense tensors of float32 and bfloat16."""
        if spec.dtype not in DTYPES:
            return "it takes float32 and bfloat16 only, whose exponents have 8 bits"
        return refuses_layout(spec)

    def declines(self, x: Tensor) -> str | None:
        """Declines where exponents of a sample (see codecs.sample) are too far apart. On CUDA the host waits for it."""
        return "it is empty" if x.numel() == 0 else self.declines_sample(sample(flat(x)), x.numel())

    def declines_sample(self, looked: Tensor, numel: int) -> str | None:
        """As ``declines``, of a sample [elements] of a tensor of that many elements."""
        elements = looked.numel()
        if elements < numel:
            # Each run in a block of its own, as it is in the tensor, and in two lanes of it; zeros are no escapes.
            rows = EXPONENTS_BLOCK // EXPONENTS_LANES
            blocks = looked.new_zeros(elements // RUN, rows, EXPONENTS_LANES)
            blocks[:, :, : RUN // rows] = looked.view(-1, rows, RUN // rows)
            looked = blocks.view(-1)
        escapes = ops.exponents_encode(looked, self.bits)[-1].numel() / elements
        saving = (8 - self._bits_per_exponent(escapes)) / (8 * looked.element_size())
        return None if saving >= self.min_saving else f"{escapes:.0%} of a sample is out of its window of exponents"

    def _bits_per_exponent(self, escapes: float) -> float:
        return self.bits + 8 / EXPONENTS_BLOCK + 64 / 4096 + 8 * escapes

    def encode(self, x: Tensor) -> Encoded:
        """One pass over ``x``.

        On CPU escapes are put aside in it until their number is known, up to one in eight elements; if there are more,
        the others are looked for in another pass.
        """
        spec = require_accepted(self, x)
        return self._encoded(spec, ops.exponents_encode(flat(x), self.bits))

    def draft(self, x: Tensor, known: int) -> Draft:
        """As ``encode``, with room for some more escapes than the ``known`` number of them."""
        spec = require_accepted(self, x)
        room = room_for(known, spec.numel)
        *planes, count = ops.exponents_encode_within(flat(x), self.bits, room)
        return Draft(self._encoded(spec, planes), count, partial(self._judge, room))

    def _judge(self, room: int, numbers: list[int]) -> Judged:
        escapes = numbers[0]
        return Judged(no_room(escapes, room), escapes, partial(trimmed, sizes={"escapes": escapes}))

    def known(self, encoded: Encoded) -> int:
        """How many escapes it has."""
        return encoded.planes["escapes"].numel()

    def _encoded(self, spec: TensorSpec, planes: tuple[Tensor, ...] | list[Tensor]) -> Encoded:
        return Encoded(self.id, spec, dict(zip(PLANES, planes, strict=True)), {"bits": self.bits})

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """Every bit of the original.

        Raises:
            DamagedPlanesError: the planes do not fit together.
        """
        spec, planes = encoded.spec, encoded.planes
        n, bits = spec.numel, int(encoded.meta["bits"])  # type: ignore[arg-type]
        sizes = {
            "fractions": (spec.dtype.itemsize - 1) * n,
            "codes": bytes_for(n, bits),
            "bases": exponents_blocks(n),
            "offsets": zvc_chunks(n),
        }
        check_planes(encoded, sizes)
        out = like(spec, out)
        ops.exponents_decode(*(planes[name] for name in PLANES), bits, flat(out))
        return out

    def nbytes_bound(self, spec: TensorSpec) -> int:
        """The size where every exponent is an escape."""
        n = spec.numel
        return spec.nbytes + bytes_for(n, self.bits) + exponents_blocks(n) + 8 * zvc_chunks(n)


PLANES = ("fractions", "codes", "bases", "offsets", "escapes")
"""The planes, in the order in which the kernels return and take them."""

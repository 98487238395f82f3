"""Error-bounded compression at a width per block: multiples of a step, behind zero-value compression."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar

import torch
from torch import Tensor

from backstash.arguments import check_number
from backstash.codecs.base import (
    Draft,
    Encoded,
    ErrorBound,
    Judged,
    asks_for_sign,
    check_planes,
    flat,
    like,
    no_room,
    refuses_singles,
    require_accepted,
    room_for,
    trimmed,
)
from backstash.codecs.szp.reference import SZP_BLOCK
from backstash.ops import ZVC_CHUNK, bytes_for, zvc_chunks
from backstash.ops.registration import ops
from backstash.saved import Mask, Need, TensorSpec

MODES = ("abs", "rel")


@dataclass(frozen=True)
class Szp:
    """Stores where elements are not zero, and these as multiples of a step that keeps them within a bound.

    Preserves: SHAPE, VALUE - within ``bound``, in the original dtype, for every finite element. Zeros stay zero (-0.0
        becomes 0.0), what is not zero does not become it and keeps its sign; infinities and NaNs keep every bit.
    Layout: plane ``mask`` uint8 [ceil(n / 8)], element ``i`` in memory order in bit ``i % 8`` of byte ``i // 8``, set
        where it is not zero; ``offsets`` int64 [ceil(n / 4096)], where each chunk of 4,096 elements begins in
        ``words``; ``words`` int32; ``step`` float32 [1].
        A chunk's values, those of its elements that are not zero, are in blocks of 32, the last one filled up with
        zeros. The chunk begins with a byte per block, filled up to a word: in bits 0 to 5 the block's width, in bit 6
        whether it has negative values. Then come the blocks: ``width`` words, of which word ``j`` has bit ``j`` of
        value ``i`` in its bit ``i``, and where there are negative ones a word of signs. A value is a magnitude in
        steps, rounded to nearest, ties to even, and 0 stands for a quarter of a step; but at the width of the dtype it
        is the element's own bits. That is where one of the block would break the bound, or be infinite or NaN, or have
        2**23 steps, and where nothing is gained.
        For float32 a step is twice the bound less a share of 2**-8, which is for rounding; for the 16-bit dtypes it is
        the largest power of two that is not above twice the bound, so that multiples are numbers of the dtype.
    Bytes: ceil(n / 8) + 8 * ceil(n / 4096) + 4 * words + 4.
    Determinism: the same planes on every backend.
    Source: COMET (PVLDB 15(4), 2022) quantises with cuSZ and has to keep zeros zero; cuSZp (SC 2023) has
        fixed-width blocks in place of Huffman codes. Ours predicts nothing, since neighbours in an activation are
        hardly alike, and has zeros in a mask of their own; so values that are not zero never become it, and the tensor
        serves a relu's derivative as well.

    Args:
        error: the bound: the largest difference, above zero.
        mode: ``"abs"``, or ``"rel"``: ``error`` is a share of the tensor's range, the largest finite element less the
            smallest one, which takes another pass.

    Raises:
        ValueError: ``error`` is not a finite number above zero, or there is no such mode.

    Example:
        >>> x = torch.tensor([0.0, 0.3, -1.0, 1e-9, 100.0])
        >>> encoded = Szp(0.01).encode(x)
        >>> y = Szp(0.01).decode(encoded)
        >>> bool((y - x).abs().max() <= 0.01), y.sign().tolist()
        (True, [0.0, 1.0, -1.0, 1.0, 1.0])
        >>> Szp(0.01).encode(torch.linspace(0.1, 1, 4096)).nbytes
        3280
    """

    error: float = 1e-3
    mode: str = "abs"

    id: ClassVar[str] = "szp"
    preserves: ClassVar[frozenset[Need]] = frozenset({Need.SHAPE, Need.VALUE})

    def __post_init__(self) -> None:
        check_number(self.error, "error", "Szp", 1e-3)
        if not 0.0 < self.error < math.inf:
            raise ValueError(
                f"Szp was asked for error={self.error}, but a bound is a finite number above zero. Use an exact codec "
                f"such as Zvc() where nothing may change."
            )
        if self.mode not in MODES:
            raise ValueError(f"Szp was asked for mode={self.mode!r}, but there are {', '.join(map(repr, MODES))}.")

    @property
    def bound(self) -> ErrorBound:
        """The bound that was asked for."""
        return ErrorBound(abs=self.error) if self.mode == "abs" else ErrorBound(rel=self.error)

    def keeps(self, mask: Mask) -> bool:
        """Whether the mask's test, and whether an element is negative or NaN, comes out as for the original.

        Zero, the sign, infinities and NaN are kept, but no other number is: so for tests against zero, though not for
        NONZERO, to which -0.0 is not zero.
        """
        return asks_for_sign(mask)

    def accepts(self, spec: TensorSpec) -> str | None:
        """Accepts dense floating tensors of 16 or 32 bits."""
        return refuses_singles(spec)

    def declines(self, x: Tensor) -> str | None:
        """Declines only an empty tensor."""
        return None if x.numel() else "it is empty"

    def encode(self, x: Tensor) -> Encoded:
        """Two passes over ``x``: one finds the sizes, one writes; before them one for the range, in mode ``"rel"``."""
        spec = require_accepted(self, x)
        grid = self.grid(flat(x))
        mask, offsets, words = ops.szp_encode(flat(x), grid)
        return Encoded(self.id, spec, {"mask": mask, "offsets": offsets, "words": words, "step": grid[1:2].clone()})

    def draft(self, x: Tensor, known: tuple[int, float]) -> Draft:
        """As ``encode``, with room for some more words than were ``known`` to be enough with a bound."""
        spec = require_accepted(self, x)
        before, error = known
        # Where the bound is halved, an element takes a bit more.
        more = max(0.0, math.log2(error / self.error)) * spec.numel / SZP_BLOCK
        room = room_for(before + math.ceil(more), self._most_words(spec))
        grid = self.grid(flat(x))
        mask, offsets, words, count = ops.szp_encode_within(flat(x), grid, room)
        planes = {"mask": mask, "offsets": offsets, "words": words, "step": grid[1:2].clone()}
        return Draft(Encoded(self.id, spec, planes), count, partial(self._judge, room))

    def _judge(self, room: int, numbers: list[int]) -> Judged:
        words = numbers[0]
        return Judged(no_room(words, room), (words, self.error), partial(trimmed, sizes={"words": words}))

    def known(self, encoded: Encoded) -> tuple[int, float]:
        """How many words it has, with which bound."""
        return encoded.planes["words"].numel(), self.error

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """Every element within the bound.

        Raises:
            DamagedPlanesError: the planes do not fit together.
        """
        planes, numel = encoded.planes, encoded.spec.numel
        expected = {"mask": bytes_for(numel, 1), "offsets": zvc_chunks(numel), "step": 1}
        check_planes(encoded, expected)
        out = like(encoded.spec, out)
        ops.szp_decode(planes["mask"], planes["offsets"], planes["words"], planes["step"], flat(out))
        return out

    def nbytes_bound(self, spec: TensorSpec) -> int:
        """The size where no element is zero and no block becomes smaller."""
        return bytes_for(spec.numel, 1) + 8 * zvc_chunks(spec.numel) + 4 * self._most_words(spec) + 4

    def _most_words(self, spec: TensorSpec) -> int:
        whole, rest = divmod(spec.numel, ZVC_CHUNK)
        words = 0
        for chunks, size in ((whole, ZVC_CHUNK), (1, rest)):
            blocks = -(-size // SZP_BLOCK)
            words += chunks * (-(-blocks // 4) + blocks * 8 * spec.dtype.itemsize)
        return words

    def grid(self, x: Tensor) -> Tensor:
        """The inverse of the step, the step and the largest difference, float32 [3], for ``x`` [n]; without a wait."""
        if self.mode == "rel":
            low, high = ops.szp_range(x).double().unbind()
            return _grid(self.error * (high - low), x.dtype)
        if x.device.type == "cpu":
            return torch.tensor(_numbers(self.error, x.dtype), dtype=torch.float32, device="cpu")
        return _grid(torch.full((), self.error, dtype=torch.float64, device=x.device), x.dtype)


def _grid(bound: Tensor, dtype: torch.dtype) -> Tensor:
    """See :meth:`Szp.grid`; ``bound`` is float64 []."""
    bound = bound.clamp(max=2.0**125)  # the inverse, too, is a normal number of float32
    limit = bound.float()
    limit = torch.where(limit.double() > bound, limit.nextafter(torch.zeros_like(limit)), limit)
    if dtype == torch.float32:
        step = bound * (2 - 2.0**-7)
    else:
        step = torch.ldexp((bound > 0).double(), torch.frexp(bound).exponent)
    step = step.float()
    return torch.stack([step.double().reciprocal().float(), step, limit])


@lru_cache(maxsize=256)
def _numbers(error: float, dtype: torch.dtype) -> tuple[float, ...]:
    """:func:`_grid` on the CPU: a dozen small operations take as long as encoding 50,000 elements."""
    return tuple(_grid(torch.tensor(error, dtype=torch.float64, device="cpu"), dtype).tolist())

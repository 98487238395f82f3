"""Float32 numbers that were bfloat16 before, in half the bytes or less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
    certain,
    check_planes,
    flat,
    like,
    refuses_layout,
    require_accepted,
    taken,
)
from backstash.codecs.exponents import Exponents
from backstash.codecs.sample import sample
from backstash.ops.registration import ops
from backstash.saved import Need, TensorSpec

_PREFIX = "values."


@dataclass(frozen=True)
class Upcast:
    """Stores float32 numbers as the bfloat16 numbers that they were converted from.

    A norm of a bfloat16 network computes in float32, and so does much of what autocast leaves in float32: each saves a
    copy of its bfloat16 input in which the lower 16 bits of every element are zero.

    Preserves: SHAPE, SIGN, INDEX, VALUE - every bit: -0.0, subnormals, infinities and NaN payloads.
    Layout: plane ``upper`` bfloat16 [n], the upper 16 bits of each element in memory order. With ``values`` in its
        place the planes in which these encode that row, their names behind ``values.``.
    Bytes: values, which are 2 * n where they have no codec of their own.
    Determinism: the same planes on every backend.
    Source: the reverse of a conversion, which torch's ``rms_norm`` and autocast make (pytorch#188955); ours asks every
        element whether it was one.

    Args:
        values: the codec of the bfloat16 numbers; None for none.

    Raises:
        CodecRefusedError: on encode, an element has other bits than a bfloat16 number has.

    Example:
        >>> x = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16().float()
        >>> x.nbytes, Upcast().encode(x).nbytes, Upcast(Exponents()).encode(x).nbytes
        (16384, 8192, 6160)
        >>> torch.equal(Upcast().decode(Upcast().encode(x)), x)
        True
    """

    values: Exponents | None = None

    id: ClassVar[str] = "upcast"
    preserves: ClassVar[frozenset[Need]] = EXACT
    bound: ClassVar[ErrorBound | None] = None

    @property
    def label(self) -> str:
        """With the codec of the values: ``"upcast exponents"``."""
        return self.id if self.values is None else f"{self.id} {self.values.id}"

    def accepts(self, spec: TensorSpec) -> str | None:
        """Accepts dense tensors of float32."""
        if spec.dtype != torch.float32:
            return "it takes float32 only, in which bfloat16 numbers leave half of the bits zero"
        return refuses_layout(spec)

    def declines(self, x: Tensor) -> str | None:
        """Declines where a sample (see codecs.sample) has other numbers. On CUDA the host waits for it."""
        if x.numel() == 0:
            return "it is empty"
        upper, others = self._numbers(sample(flat(x)))
        count = int(others)
        if count:
            return f"{count / upper.numel():.0%} of a sample are {self._others}"
        return None if self.values is None else self.values.declines_sample(upper, x.numel())

    def encode(self, x: Tensor) -> Encoded:
        """One pass over ``x``, and with ``values`` theirs over half of its bytes. On CUDA the host waits."""
        return certain(self.draft(x, None))

    _others: ClassVar[str] = "no bfloat16 numbers"

    def _numbers(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The bfloat16 numbers of a row, and how many elements cannot be stored as such, int64 [1]."""
        upper, others = ops.upcast_encode(x)
        return upper, others

    def draft(self, x: Tensor, known: int | None) -> Draft:
        """As ``encode``, with what is ``known`` to ``values``; None has them encoded with a wait."""
        spec = require_accepted(self, x)
        upper, others = self._numbers(flat(x))
        if self.values is None:
            return Draft(Encoded(self.id, spec, {"upper": upper}), others, partial(self._judge, spec, None))
        if known is None:
            return Draft(self._around(spec, self.values.encode(upper)), others, partial(self._judge, spec, None))
        inner = self.values.draft(upper, known)
        return Draft(
            self._around(spec, inner.encoded),
            torch.cat((others, inner.numbers)),
            partial(self._judge, spec, inner.judge),
        )

    def _judge(self, spec: TensorSpec, judge: Callable[[list[int]], Judged] | None, numbers: list[int]) -> Judged:
        others, *rest = numbers
        refusal = None
        if others:
            refusal = (
                f"codec {self.id!r} was asked to encode {spec} as bfloat16, got {others} elements that are "
                f"{self._others}. Use Exponents(), or Keep()."
            )
        if judge is None or refusal is not None:
            return taken(refusal)
        inner = judge(rest)
        cut = inner.cut
        return inner._replace(
            cut=None if cut is None else lambda encoded: self._around(spec, cut(self._inner(encoded)))
        )

    def known(self, encoded: Encoded) -> int | bool:
        """What ``values`` know of theirs; True without them."""
        return True if self.values is None else self.values.known(self._inner(encoded))

    def _around(self, spec: TensorSpec, inner: Encoded) -> Encoded:
        """An encoding of the tensor, from that of its bfloat16 numbers."""
        return replace(inner, codec=self.id, spec=spec, planes={_PREFIX + name: x for name, x in inner.planes.items()})

    def _inner(self, encoded: Encoded) -> Encoded:
        assert self.values is not None
        planes = {name.removeprefix(_PREFIX): x for name, x in encoded.planes.items()}
        return Encoded(self.values.id, _row(encoded.spec), planes, encoded.meta)

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """Every bit of the original. With ``values`` it takes the bfloat16 numbers' memory beside ``out``.

        Raises:
            DamagedPlanesError: the planes do not fit together.
        """
        if self.values is not None:
            upper = self.values.decode(self._inner(encoded))
        else:
            check_planes(encoded, {"upper": encoded.spec.numel})
            upper = encoded.planes["upper"]
        out = like(encoded.spec, out)
        flat(out).copy_(upper)
        return out

    def nbytes_bound(self, spec: TensorSpec) -> int:
        """Half of the dense bytes, or the most that ``values`` make of these."""
        row = _row(spec)
        return row.nbytes if self.values is None else self.values.nbytes_bound(row)


def _row(spec: TensorSpec) -> TensorSpec:
    """The spec of the bfloat16 numbers of a tensor, in memory order."""
    return TensorSpec((spec.numel,), (1,), torch.bfloat16, spec.device, 2 * spec.numel)

"""No data: for formulas that read only sizes, strides and dtype."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from backstash.codecs.base import Encoded, ErrorBound, like, require_accepted
from backstash.saved import Need, TensorSpec


@dataclass(frozen=True)
class Shape:
    """Stores no data.

    Preserves: SHAPE, for every tensor.
    Layout: no planes.
    Bytes: 0.
    Determinism: decodes to zeros of the same shape, strides and dtype, on every backend.
    Source: Gist (ISCA 2018), section 3, drops the input of a max-pooling; ours covers every formula that reads
        a shape only (docs/understand/needs.md).

    Example:
        >>> encoded = Shape().encode(torch.ones(2, 3))
        >>> encoded.nbytes, Shape().decode(encoded).shape
        (0, torch.Size([2, 3]))
    """

    id: ClassVar[str] = "shape"
    preserves: ClassVar[frozenset[Need]] = frozenset({Need.SHAPE})
    bound: ClassVar[ErrorBound | None] = None

    def accepts(self, spec: TensorSpec) -> str | None:
        """Accepts everything."""
        return None

    def declines(self, x: Tensor) -> str | None:
        """Declines nothing."""
        return None

    def encode(self, x: Tensor) -> Encoded:
        """Forgets the data of ``x``."""
        return Encoded(self.id, require_accepted(self, x), {})

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """Returns zeros in the original layout, without memory of their own on the CPU (see stand_in)."""
        return stand_in(encoded.spec) if out is None else like(encoded.spec, out).zero_()

    def nbytes_bound(self, spec: TensorSpec) -> int:
        """No bytes."""
        return 0


def stand_in(spec: TensorSpec) -> Tensor:
    """A tensor with the layout of ``spec`` whose elements nobody will read.

    On CPU its memory is an untouched private mapping: the kernel backs reads with one shared page of zeros, so that it
    costs address space only, and nothing is allocated through torch. Elsewhere it is allocated, not filled.
    """
    span = 1 + sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))
    if spec.device.type != "cpu" or 0 in spec.shape:
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    flat = torch.frombuffer(_zero_pages(span * spec.dtype.itemsize), dtype=spec.dtype, count=span)
    return flat.as_strided(spec.shape, spec.stride)


_pages: mmap.mmap | None = None


def _zero_pages(nbytes: int) -> mmap.mmap:
    """An anonymous private mapping of at least ``nbytes``, shared by every stand-in and grown on demand."""
    global _pages
    if _pages is None or len(_pages) < nbytes:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        _pages = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=flags)
    return _pages

"""zlib at its fastest level, as numcodecs calls it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from backstash.codecs.base import flat
from bench.peers.base import Absent


@dataclass(frozen=True)
class Zlib:
    """The codec Zlib of the package numcodecs, on one core.

    Attributes:
        codec: the codec, at level 1.
    """

    codec: Any
    name: str = "numcodecs zlib-1"
    own: bool = False

    def encode(self, x: Tensor) -> bytes:
        """Compress."""
        packed: bytes = self.codec.encode(flat(x).numpy())
        return packed

    def nbytes(self, encoded: bytes) -> int:
        """Length of the stream."""
        return len(encoded)

    def decode(self, encoded: bytes, out: Tensor) -> None:
        """Decompress into ``out``."""
        self.codec.decode(encoded, out=flat(out).numpy())


def load_zlib() -> Zlib | Absent:
    """The peer, or that it is not installed."""
    try:
        return Zlib(importlib.import_module("numcodecs").Zlib(level=1))
    except ModuleNotFoundError:
        return Absent("numcodecs zlib", "not installed")

"""Blosc2: LZ4 behind a bit shuffle, on all cores."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from backstash.codecs.base import flat
from bench.peers.base import Absent


@dataclass(frozen=True)
class Blosc2:
    """The package blosc2 (python-blosc2).

    Attributes:
        module: the package.
        threads: threads it compresses and decompresses with.
    """

    module: ModuleType
    threads: int
    name: str = "blosc2 lz4+bitshuffle"
    own: bool = False

    def encode(self, x: Tensor) -> bytes:
        """Compress at level 5, its default."""
        blosc2 = self.module
        packed: bytes = blosc2.compress2(
            flat(x).numpy(),
            typesize=x.element_size(),
            codec=blosc2.Codec.LZ4,
            clevel=5,
            filters=[blosc2.Filter.BITSHUFFLE],
            nthreads=self.threads,
        )
        return packed

    def nbytes(self, encoded: bytes) -> int:
        """Length of the frame."""
        return len(encoded)

    def decode(self, encoded: bytes, out: Tensor) -> None:
        """Decompress into ``out``."""
        self.module.decompress2(encoded, dst=flat(out).numpy(), nthreads=self.threads)


def load_blosc2() -> Blosc2 | Absent:
    """The peer, or that it is not installed."""
    try:
        return Blosc2(importlib.import_module("blosc2"), torch.get_num_threads())
    except ModuleNotFoundError:
        return Absent("blosc2", "not installed")

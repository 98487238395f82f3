"""General compressors, on independent chunks of a tensor's bytes and on the CPU: deflate, zstd, lz4."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from backstash.codecs.base import EXACT, Encoded, check_saving, flat, like, refuses_layout, require_accepted
from backstash.codecs.sample import sample
from backstash.errors import DamagedPlanesError
from backstash.saved import Need, TensorSpec

CHUNK = 1 << 18
"""Bytes of a chunk: large enough to compress well, and small enough that every core has chunks."""

R = TypeVar("R")


@dataclass(frozen=True)
class _Chunked(ABC):
    """The part that the three share. As many threads work as torch uses: the libraries release Python's lock."""

    level: int = 1
    min_saving: float = 0.02

    id: ClassVar[str]
    package: ClassVar[str | None] = None
    preserves: ClassVar[frozenset[Need]] = EXACT
    bound: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_saving(self, self.min_saving)
        if not isinstance(self.level, int) or isinstance(self.level, bool):
            name = type(self).__name__
            raise TypeError(f"{name} was asked for level={self.level!r:.80}, but that is a whole number. Pass an int.")

    @abstractmethod
    def _compress(self, data: memoryview) -> bytes:
        """Returns a chunk compressed."""

    @abstractmethod
    def _decompress(self, data: memoryview, nbytes: int) -> bytes | None:
        """Returns the chunk of ``nbytes``; None where ``data`` is damaged."""

    def accepts(self, spec: TensorSpec) -> str | None:
        """Accepts dense tensors on the CPU, of any dtype."""
        if self.package is not None and find_spec(self.package) is None:
            return f"the package {self.package} is not installed (pip install 'backstash[disk]')"
        if spec.device.type != "cpu":
            return f"it compresses on the CPU, and this is on {spec.device}"
        return refuses_layout(spec)

    def declines(self, x: Tensor) -> str | None:
        """Declines where a sample does not become small enough (see codecs.sample)."""
        looked = _bytes(sample(flat(x)))
        if looked.nbytes == 0:
            return "it is empty"
        ratio = len(self._compress(looked)) / looked.nbytes
        return None if 1.0 - ratio >= self.min_saving else f"a sample takes {ratio:.0%} of its bytes"

    def encode(self, x: Tensor) -> Encoded:
        """Compress each chunk."""
        spec = require_accepted(self, x)
        data = _bytes(flat(x))
        parts = _each(lambda at: self._compress(data[at : at + CHUNK]), range(0, data.nbytes, CHUNK))
        stream = torch.empty(sum(map(len, parts)), dtype=torch.uint8)
        ends = torch.tensor([len(part) for part in parts], dtype=torch.int64).cumsum(0)
        into = _bytes(stream)
        for part, end in zip(parts, ends.tolist(), strict=True):
            into[end - len(part) : end] = part
        return Encoded(self.id, spec, {"stream": stream, "ends": ends})

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        """Every bit of the original.

        Raises:
            DamagedPlanesError: a plane is not what was encoded, as far as the format can tell.
        """
        stream, ends = encoded.planes["stream"], encoded.planes["ends"].tolist()
        edges = [0, *ends]
        chunks = -(-encoded.spec.nbytes // CHUNK)
        if len(ends) != chunks or edges != sorted(edges) or edges[-1] != stream.numel():
            raise DamagedPlanesError(
                f"codec {self.id!r} was asked to decode {encoded.spec}, got {len(ends)} chunks and {stream.numel()} "
                f"bytes that do not fit together. The stash was overwritten or cut short; compute the step again."
            )
        out = like(encoded.spec, out)
        data, into = _bytes(stream), _bytes(flat(out))

        def restore(chunk: int) -> None:
            to = into[chunk * CHUNK : (chunk + 1) * CHUNK]
            restored = self._decompress(data[edges[chunk] : edges[chunk + 1]], to.nbytes)
            if restored is None or len(restored) != to.nbytes:
                raise DamagedPlanesError(
                    f"codec {self.id!r} was asked to decode {encoded.spec}, got damage in chunk {chunk} of {chunks}. "
                    f"The stash was overwritten or cut short; compute the step again."
                )
            to[:] = restored

        _each(restore, range(chunks))
        return out

    def nbytes_bound(self, spec: TensorSpec) -> int:
        """Data that cannot be compressed grow by less than a 128th and 64 bytes per chunk."""
        return spec.nbytes + spec.nbytes // 128 + (64 + 8) * -(-spec.nbytes // CHUNK)


@dataclass(frozen=True)
class Deflate(_Chunked):
    """Compresses with zlib, which every Python has.

    Preserves: SHAPE, SIGN, INDEX, VALUE - every bit.
    Layout: plane ``stream`` uint8, the zlib streams of the chunks of 262,144 bytes of the tensor's memory, one after
        the other; ``ends`` int64 [ceil(n * itemsize / 262144)], where each of them ends.
    Bytes: stream + 8 * ceil(n * itemsize / 262144).
    Determinism: the same planes for the same version of zlib; whatever version decodes.
    Source: cDMA (HPCA 2018), section 5, "zlib"; ours has independent chunks, so that all cores work at once.

    Args:
        level: 1 (fast) to 9 (small).
        min_saving: the smallest share of the dense bytes worth it, judged on a sample; declined below it.

    Raises:
        ValueError: ``level`` is no level, or ``min_saving`` no share.

    Example:
        >>> x = torch.zeros(1000)
        >>> encoded = Deflate().encode(x)
        >>> encoded.nbytes < 50, torch.equal(Deflate().decode(encoded), x)
        (True, True)
    """

    id: ClassVar[str] = "deflate"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.level <= 9:
            raise ValueError(f"Deflate asked for level={self.level}, but levels are 1 (fast) to 9 (small).")

    def _compress(self, data: memoryview) -> bytes:
        return zlib.compress(data, self.level)

    def _decompress(self, data: memoryview, nbytes: int) -> bytes | None:
        stream = zlib.decompressobj()
        try:
            restored = stream.decompress(data, nbytes + 1)  # damaged data may ask for any size
        except zlib.error:
            return None
        return restored if stream.eof and not stream.unused_data else None


@dataclass(frozen=True)
class Zstd(_Chunked):
    """Compresses with Zstandard: ``pip install 'backstash[disk]'``.

    Preserves: SHAPE, SIGN, INDEX, VALUE - every bit.
    Layout: plane ``stream`` uint8, the Zstandard frames, each with a checksum, of the chunks of 262,144 bytes of the
        tensor's memory, one after the other; ``ends`` int64 [ceil(n * itemsize / 262144)], where each of them ends.
    Bytes: stream + 8 * ceil(n * itemsize / 262144).
    Determinism: the same planes for the same version of the library; whatever version decodes.
    Source: RFC 8878; ours has independent chunks, so that all cores work at once.

    Args:
        level: 1 (fast) to 22 (small); below 0 faster still.
        min_saving: the smallest share of the dense bytes worth it, judged on a sample; declined below it.

    Raises:
        ValueError: ``level`` is no level, or ``min_saving`` no share.

    Example:
        >>> Zstd(level=3)
        Zstd(level=3, min_saving=0.02)
    """

    id: ClassVar[str] = "zstd"
    package: ClassVar[str] = "zstandard"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -100 <= self.level <= 22:
            raise ValueError(f"Zstd asked for level={self.level}, but levels are -100 (fast) to 22 (small).")

    def _compress(self, data: memoryview) -> bytes:
        compressor = import_module(self.package).ZstdCompressor(level=self.level, write_checksum=True)
        return bytes(compressor.compress(data))

    def _decompress(self, data: memoryview, nbytes: int) -> bytes | None:
        library = import_module(self.package)
        try:
            if library.frame_content_size(data) != nbytes:  # damaged data may ask for any size
                return None
            return bytes(library.ZstdDecompressor().decompress(data, allow_extra_data=False))
        except library.ZstdError:
            return None


@dataclass(frozen=True)
class Lz4(_Chunked):
    """Compresses with LZ4, the fastest of the three: ``pip install 'backstash[disk]'``.

    Preserves: SHAPE, SIGN, INDEX, VALUE - every bit.
    Layout: plane ``stream`` uint8, the LZ4 blocks of the chunks of 262,144 bytes of the tensor's memory, one after the
        other; ``ends`` int64 [ceil(n * itemsize / 262144)], where each of them ends.
    Bytes: stream + 8 * ceil(n * itemsize / 262144).
    Determinism: the same planes for the same version of the library; whatever version decodes.
    Source: the LZ4 block format; ours has independent chunks, so that all cores work at once. A block has no checksum:
        what is changed inside one may decode to something else.

    Args:
        level: 1 (small) to 100 (fast): LZ4's acceleration.
        min_saving: the smallest share of the dense bytes worth it, judged on a sample; declined below it.

    Raises:
        ValueError: ``level`` is no level, or ``min_saving`` no share.

    Example:
        >>> Lz4()
        Lz4(level=1, min_saving=0.02)
    """

    id: ClassVar[str] = "lz4"
    package: ClassVar[str] = "lz4"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.level <= 100:
            raise ValueError(f"Lz4 asked for level={self.level}, but levels are 1 (small) to 100 (fast).")

    def _compress(self, data: memoryview) -> bytes:
        block = import_module("lz4.block")
        return bytes(block.compress(data, mode="fast", acceleration=self.level, store_size=False))

    def _decompress(self, data: memoryview, nbytes: int) -> bytes | None:
        block = import_module("lz4.block")
        try:
            return bytes(block.decompress(data, uncompressed_size=nbytes))
        except block.LZ4BlockError:
            return None


def _bytes(x: Tensor) -> memoryview:
    data: Any = x.view(torch.uint8).numpy().data
    return memoryview(data)


def _each(work: Callable[[int], R], items: Iterable[int]) -> list[R]:
    """``work`` of every item, on as many threads as torch uses. Each call starts its own: none outlives a fork."""
    items = list(items)
    threads = min(torch.get_num_threads(), len(items))
    if threads < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))

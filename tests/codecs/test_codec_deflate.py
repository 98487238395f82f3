"""Deflate, zstd and lz4: their layout, what they refuse, and that damage is found."""

from __future__ import annotations

import zlib
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec

import codec_strategies as tensors
import pytest
import torch
from hypothesis import given
from torch import Tensor

from backstash.codecs import Deflate, Encoded, Lz4, Zstd
from backstash.codecs.base import Codec
from backstash.codecs.deflate import CHUNK
from backstash.errors import CodecRefusedError, DamagedPlanesError
from backstash.saved import TensorSpec
from backstash.testing import equal_bits

ALL = [
    Deflate(),
    pytest.param(Zstd(), marks=pytest.mark.skipif(find_spec("zstandard") is None, reason="pip install zstandard")),
    pytest.param(Lz4(), marks=pytest.mark.skipif(find_spec("lz4") is None, reason="pip install lz4")),
]
every = pytest.mark.parametrize("codec", ALL, ids=["deflate", "zstd", "lz4"])


def large(dtype: torch.dtype = torch.float32, chunks: float = 3.3) -> Tensor:
    return torch.relu(torch.randn(int(chunks * CHUNK) // 4, generator=torch.Generator().manual_seed(0))).to(dtype)


@every
def test_every_bit_comes_back_from_several_chunks(codec: Codec) -> None:
    for x in (large(), large(torch.bfloat16), large().reshape(4, -1).t()):
        encoded = codec.encode(x)
        assert equal_bits(codec.decode(encoded), x)
        assert encoded.nbytes <= codec.nbytes_bound(encoded.spec)
    noise = torch.randint(256, (CHUNK * 2 + 5,), dtype=torch.uint8)
    assert codec.encode(noise).nbytes <= codec.nbytes_bound(TensorSpec.of(noise))


@given(tensors.floats())
def test_deflate_is_zlib(x: Tensor) -> None:
    planes = Deflate(6).encode(x).planes
    memory = x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
    chunks = [zlib.compress(memory[at : at + CHUNK], 6) for at in range(0, len(memory), CHUNK)]
    assert planes["stream"].numpy().tobytes() == b"".join(chunks)
    assert planes["ends"].tolist() == [sum(map(len, chunks[: i + 1])) for i in range(len(chunks))]


@every
def test_threads_change_nothing(codec: Codec) -> None:
    x, before = large(), torch.get_num_threads()
    alone = []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            alone.append(codec.encode(x))
            assert equal_bits(codec.decode(alone[0]), x)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(alone[0].planes[name], alone[1].planes[name]) for name in ("stream", "ends"))


@every
def test_damaged_chunks_are_found(codec: Codec) -> None:
    encoded = codec.encode(large())
    stream, ends = encoded.planes["stream"], encoded.planes["ends"]
    longer = torch.cat([stream, stream[-1:]])
    shifted = ends.clone()
    shifted[1] -= 1
    swapped = ends.flip(0)
    far = ends.clone()
    far[0] = 2**62
    for planes in (
        {"stream": longer},
        {"stream": stream[:-1]},
        {"stream": longer, "ends": torch.cat([ends[:-1], ends[-1:] + 1])},
        {"ends": shifted},
        {"ends": swapped},
        {"ends": far},
        {"ends": -ends},
        {"ends": ends[:-1]},
        {"stream": torch.zeros_like(stream)},
        {"stream": stream.flip(0)},
    ):
        with pytest.raises(DamagedPlanesError, match=rf"codec '{codec.id}' was asked to decode float32"):
            codec.decode(_with(encoded, **planes))


@every
def test_another_length_is_damage(codec: Codec) -> None:
    shorter, longer = codec.encode(torch.zeros(1000)), codec.encode(torch.zeros(1001))
    for one, other in ((shorter, longer), (longer, shorter)):
        with pytest.raises(DamagedPlanesError, match="got damage in chunk 0 of 1"):
            codec.decode(replace(one, spec=other.spec))


@pytest.mark.parametrize("codec", ALL[:2], ids=["deflate", "zstd"])
def test_a_flipped_byte_is_found(codec: Codec) -> None:
    encoded = codec.encode(large())
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        stream = encoded.planes["stream"].clone()
        stream[torch.randint(2, stream.numel(), (1,), generator=generator)] ^= 64
        with suppress(DamagedPlanesError):  # or a bit that means nothing
            assert equal_bits(codec.decode(_with(encoded, stream=stream)), large())


def test_garbage_never_crashes_lz4() -> None:
    pytest.importorskip("lz4")
    encoded = Lz4().encode(large())
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        stream = torch.randint(256, encoded.planes["stream"].shape, dtype=torch.uint8, generator=generator)
        with pytest.raises(DamagedPlanesError):
            Lz4().decode(_with(encoded, stream=stream))


@every
def test_declines_what_does_not_get_smaller(codec: Codec) -> None:
    noise = torch.randint(256, (100_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert (codec.declines(noise) or "").startswith("a sample takes 10")
    assert codec.declines(torch.zeros(100_000)) is None
    assert codec.declines(torch.empty(0)) == "it is empty"


@pytest.mark.parametrize("kind", [Deflate, Zstd, Lz4])
def test_parameters(kind: type[Deflate | Zstd | Lz4]) -> None:
    with pytest.raises(ValueError, match="but it is a share"):
        kind(min_saving=1.0)
    with pytest.raises(ValueError, match=rf"{kind.__name__} asked for level=1000, but levels are"):
        kind(level=1000)


@pytest.mark.parametrize("kind", [Zstd, Lz4])
def test_a_missing_package_is_a_refusal_that_says_so(kind: type[Zstd | Lz4], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "package", "no_such_package")
    with pytest.raises(CodecRefusedError, match=r"no_such_package is not installed \(pip install 'backstash\[disk"):
        kind().encode(torch.zeros(8))


def _with(encoded: Encoded, **planes: Tensor) -> Encoded:
    return Encoded(encoded.codec, encoded.spec, {**encoded.planes, **planes}, encoded.meta)

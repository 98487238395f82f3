from __future__ import annotations

import math

import codec_strategies as tensors
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backstash.codecs import Narrow
from backstash.errors import CodecRefusedError
from backstash.saved import PoolWindow, TensorSpec
from backstash.testing import equal_bits

OUTSIDE = r"indices outside their window\. Use Narrow\(\) without a window\."


def bits_for(positions: int) -> int:
    return max(1, math.ceil(math.log2(positions)))


@given(tensors.integers())
def test_every_bit_comes_back_or_the_range_is_refused(x: Tensor) -> None:
    span = int(x.max()) - int(x.min()) if x.numel() else 0
    if span >= 2**32:
        with pytest.raises(CodecRefusedError, match=r"at most 32 bits, got a range that needs \d+\. Use Keep"):
            Narrow().encode(x)
        return
    encoded = Narrow().encode(x)
    assert equal_bits(Narrow().decode(encoded), x)
    assert encoded.meta["bits"] == (1 if x.dtype == torch.bool else max(1, span.bit_length()))


@given(tensors.integers())
def test_declines_what_gains_nothing(x: Tensor) -> None:
    reason = Narrow().declines(x)
    if x.numel() == 0:
        assert reason == "it is empty"
    elif reason is None:
        assert Narrow().encode(x).nbytes <= x.numel() * x.element_size()
    else:
        assert (int(x.max()) - int(x.min())).bit_length() >= min(8 * x.element_size(), 33)


def test_a_range_beyond_32_bits_is_declined_before_it_is_refused() -> None:
    x = torch.tensor([0, 2**32])
    assert Narrow().declines(x) == "its range needs 33 of 64 bits"
    assert Narrow().declines(torch.tensor([0, 2**32 - 1])) is None


@given(st.integers(1, 32), st.integers(0, 40), tensors.SEEDS)
def test_layout(bits: int, n: int, seed: int) -> None:
    x = torch.randint(0, 2**bits, (n,), generator=torch.Generator().manual_seed(seed))
    x = torch.cat([x, torch.tensor([0, 2**bits - 1])])
    encoded = Narrow().encode(x - 5)
    assert encoded.meta == {"bits": bits, "base": -5}
    stream = np.unpackbits(encoded.planes["packed"].numpy(), bitorder="little")
    fields = stream[: len(x) * bits].reshape(len(x), bits) @ (1 << np.arange(bits, dtype=np.int64))
    assert fields.tolist() == x.tolist()
    assert not stream[len(x) * bits :].any()


@given(tensors.pooled())
def test_windows(case: tuple[PoolWindow, Tensor]) -> None:
    window, indices = case
    codec = Narrow(window)
    assert codec.accepts(TensorSpec.of(indices)) is None
    if not tensors.inside(window, indices):
        with pytest.raises(CodecRefusedError, match=OUTSIDE):
            codec.encode(indices)
        return
    encoded = codec.encode(indices)
    assert encoded.meta == {"bits": bits_for(math.prod(window.kernel))}
    decoded = codec.decode(encoded)
    assert decoded.stride() == indices.stride()
    assert equal_bits(decoded, indices)


@given(tensors.pooled(), st.data())
def test_an_index_outside_its_window_is_refused(case: tuple[PoolWindow, Tensor], data: st.DataObject) -> None:
    window, indices = case
    inside = math.prod(window.input_size)
    wrong = st.one_of(st.integers(-2, inside + 2), st.integers(-(2**63), 2**63 - 1))
    indices = indices.clone()
    flat = indices.as_strided((indices.numel(),), (1,))
    flat[data.draw(st.integers(0, indices.numel() - 1))] = data.draw(wrong)
    if tensors.inside(window, indices):
        assert equal_bits(Narrow(window).decode(Narrow(window).encode(indices)), indices)
        return
    with pytest.raises(CodecRefusedError, match=OUTSIDE):
        Narrow(window).encode(indices)


@pytest.mark.parametrize(("kernel", "bits"), [((2, 2), 2), ((3, 3), 4), ((2,), 1), ((1, 1), 1), ((3, 3, 3), 5)])
def test_bits_of_a_window(kernel: tuple[int, ...], bits: int) -> None:
    ones, zeros = (1,) * len(kernel), (0,) * len(kernel)
    window = PoolWindow((8,) * len(kernel), kernel, kernel, zeros, ones)
    spec = TensorSpec.of(torch.empty(1, 1, *(8 // size for size in kernel), dtype=torch.int64))
    assert Narrow(window).nbytes_bound(spec) == math.ceil(spec.numel * bits / 8)


def test_windows_take_row_major_spatial_int64_only() -> None:
    x = torch.randn(2, 3, 4, 6)
    _, indices = F.max_pool2d(x, 2, return_indices=True)
    codec = Narrow(PoolWindow((4, 6), (2, 2), (2, 2), (0, 0), (1, 1)))
    for other in (indices.transpose(-1, -2), indices.int(), indices.permute(2, 3, 0, 1), indices[..., :2]):
        with pytest.raises(CodecRefusedError):
            codec.encode(other)


def test_channels_last_is_walked_as_it_lies() -> None:
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    _, indices = F.max_pool2d(x, 2, return_indices=True)
    assert indices.is_contiguous(memory_format=torch.channels_last)
    codec = Narrow(PoolWindow((8, 8), (2, 2), (2, 2), (0, 0), (1, 1)))
    decoded = codec.decode(codec.encode(indices))
    assert decoded.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(decoded, indices)


@pytest.mark.parametrize("dtype", tensors.INTEGERS)
def test_extremes(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    for x in (torch.tensor([info.min, info.min + 1], dtype=dtype), torch.tensor([info.max - 3, info.max], dtype=dtype)):
        assert equal_bits(Narrow().decode(Narrow().encode(x)), x)

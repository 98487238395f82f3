"""Kernels that the interpreter calls by itself: planes and bits as the codecs make them, and what is refused."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from backstash.codecs import Binary, Bitmask, Narrow
from backstash.codecs.base import Codec, Encoded, flat
from backstash.codecs.direct import Factors, MaskBits, WindowOffsets
from backstash.ops import backends
from backstash.replay.kernels import kernel_of
from backstash.replay.program import PlaneKernel
from backstash.saved import Mask, PoolWindow, TensorSpec, Test
from backstash.testing import equal_bits
from tests.codecs import codec_strategies as tensors
from tests.replay.twins import STEPS, Twin, copy_of

if backends.name("cpu") != "native":
    pytest.skip("the kernels in C++ do not serve", allow_module_level=True)

THREADS = st.sampled_from([1, 2])


ENCODE = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int
)
DECODE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int)


def encoded_by(kernel: PlaneKernel, x: Tensor, threads: int) -> Encoded | None:
    """What the kernel makes of a tensor, behind which it writes nothing; None where it refuses."""
    memory = torch.full((kernel.nbytes + 64,), 0xA5, dtype=torch.uint8)
    refused = ENCODE(kernel.encode)(flat(x).data_ptr(), x.numel(), kernel.how, memory.data_ptr(), threads)
    assert (memory[kernel.nbytes :] == 0xA5).all()
    return None if refused else kernel.encoded(memory[: kernel.nbytes].clone())


def decoded_by(kernel: PlaneKernel, planes: Tensor, spec: TensorSpec, dtype: torch.dtype, threads: int) -> Tensor:
    out = torch.empty_strided(spec.shape, spec.stride, dtype=dtype)
    flat(out).view(torch.uint8).fill_(0xA5)
    DECODE(kernel.decode)(planes.data_ptr(), spec.numel, kernel.how, out.data_ptr(), threads)
    return out


def check(codec: Codec, x: Tensor, dtype: torch.dtype, threads: int, form: Any) -> None:
    """The kernel's planes are the codec's, it decodes them alike, and readers of planes find theirs."""
    spec = TensorSpec.of(x)
    kernel = kernel_of(codec, spec, dtype)
    assert kernel is not None
    expected, found = codec.encode(x), encoded_by(kernel, x, threads)
    assert found is not None and found.nbytes == expected.nbytes == kernel.nbytes
    assert (found.spec, found.codec, found.meta) == (expected.spec, expected.codec, expected.meta)
    assert set(found.planes) == set(expected.planes)
    assert isinstance(codec, Binary) or all(
        equal_bits(found.planes[name], expected.planes[name]) for name in found.planes
    )
    memory = torch.cat([found.planes[name].view(torch.uint8) for name in sorted(found.planes, reverse=True)])
    whole = codec.decode(expected, torch.empty_strided(spec.shape, spec.stride, dtype=dtype))
    assert equal_bits(decoded_by(kernel, memory, spec, dtype, threads), whole)
    assert equal_bits(codec.decode(found, torch.empty_strided(spec.shape, spec.stride, dtype=dtype)), whole)
    read = codec.direct(form)  # type: ignore[attr-defined]
    assert read is not None and isinstance(read(found), form)


@given(tensors.floats(), st.sampled_from(Test), st.floats(-2, 2), st.booleans(), st.booleans(), THREADS)
def test_masks(x: Tensor, test: Test, bound: float, nan: bool, as_bools: bool, threads: int) -> None:
    assume(x.numel())
    codec = Bitmask(Mask(test, -abs(bound), abs(bound), if_set=bound, if_clear=-0.0, nan=nan and test != Test.NONZERO))
    dtype = torch.bool if as_bools else x.dtype
    if codec.mask.nan and x.isnan().any():
        kernel = kernel_of(codec, TensorSpec.of(x), dtype)
        assert kernel is not None and encoded_by(kernel, x, threads) is None
    else:
        check(codec, x, dtype, threads, MaskBits)


@given(tensors.pooled(), THREADS)
def test_positions_in_windows(pooled: tuple[PoolWindow, Tensor], threads: int) -> None:
    window, indices = pooled
    codec, spec = Narrow(window), TensorSpec.of(indices)
    assume(codec.accepts(spec) is None and codec.declines(indices) is None)
    if tensors.inside(window, indices):
        check(codec, indices, torch.int64, threads, WindowOffsets)
    else:
        kernel = kernel_of(codec, spec, torch.int64)
        assert kernel is not None and encoded_by(kernel, indices, threads) is None


@given(st.integers(1, 10_000), tensors.SEEDS, THREADS)
def test_bools(n: int, seed: int, threads: int) -> None:
    x = torch.rand(n, generator=torch.Generator().manual_seed(seed)) < 0.3
    check(Narrow(), x, torch.bool, threads, MaskBits)


@given(st.integers(2, 10_000), st.sampled_from(tensors.FLOATS), tensors.SEEDS, THREADS)
def test_two_values(n: int, dtype: torch.dtype, seed: int, threads: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    pair = torch.randint(-(2**15), 2**15, (2, dtype.itemsize // 2), dtype=torch.int16, generator=draws).view(dtype)
    x = pair[torch.randint(2, (n,), generator=draws)].view(n)
    spec = TensorSpec.of(x)
    kernel = kernel_of(Binary(), spec, dtype)
    assert kernel is not None
    bits = x.view(tensors.BITS[dtype.itemsize])
    if (bits == bits[0]).all():
        assert encoded_by(kernel, x, threads) is None, "there is no pair"
        return
    found = encoded_by(kernel, x, threads)
    assert found is not None and equal_bits(Binary().decode(found), x)
    if Binary().declines(x) is None:
        check(Binary(), x, dtype, threads, Factors)
    bits[torch.randint(n, (1,), generator=draws)] ^= 0x55
    assert (encoded_by(kernel, x, threads) is None) == (bits.unique().numel() != 2)


def test_a_nan_whose_outcome_depends_on_its_position_has_its_plane_on_the_long_way() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU6(), nn.Conv2d(8, 8, 3), nn.Softshrink(0.125), nn.Conv2d(8, 8, 3))
    twin = Twin(model.append(Squared()), min_nbytes=256)
    x = torch.randn(4, 3, 20, 20)
    twin.settle(x)
    script = twin.passes.script
    assert script is not None
    masks = [value for value in script.values if type(value.codec) is Bitmask]
    assert len(masks) == 2 and all(value.kernel is not None for value in masks)
    with_nan = x.clone()
    with_nan[1, 2, 7, 9] = float("nan")
    held = []
    for batch in (x, with_nan):
        twin.step(batch)
        rows = [row for row in twin.session.report().rows if row.codec and row.codec.startswith("bitmask")]
        held.append(sum(row.stash_nbytes for row in rows))
    assert twin.session._is_replayed and held[1] == 2 * held[0], held


class Squared(nn.Module):
    """What a step minimises."""

    def forward(self, x: Tensor) -> Tensor:
        """The mean square."""
        return x.square().mean()


class Kinds(nn.Module):
    """One value of each kind, whose readers take planes or decode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.drop, self.values = 0.25, (0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        """Windows in two layouts and of two sizes, a mask, bools, factors of two values."""
        x = F.max_pool2d(torch.relu(self.first(x)), 2)
        y = self.second(x).to(memory_format=torch.channels_last)
        y = F.dropout(F.max_pool2d(y, 3, 1, 1), self.drop)
        y = F.max_pool1d(torch.where(torch.sin(y) > 0, y, -2 * y).flatten(2), 5, 2)
        low, high = self.values
        return (y * torch.where(torch.rand(y.shape) < 0.5, low, high)).square().mean()


def test_each_kind_is_encoded_as_on_the_long_way() -> None:
    """With the same bytes; what the kernels refuse is decided there."""
    torch.manual_seed(0)
    model, x = Kinds(), torch.randn(4, 3, 40, 40)
    options = {"policy": "lossless_stored", "min_nbytes": 256}
    replayed, reference = Twin(model, **options), Twin(copy_of(model), **options)
    reference.session._replaying = reference.session._forward.replaying = None
    replayed.settle(x)
    for _ in range(STEPS):
        reference.step(x)
    script = replayed.passes.script
    assert script is not None
    found = [value for value in script.values if value.kernel is not None]
    codecs = {
        type(value.codec).__name__ + " with windows" * (getattr(value.codec, "window", None) is not None)
        for value in found
    }
    assert codecs == {"Bitmask", "Binary", "Narrow", "Narrow with windows"}, script
    for drop, values in ((0.25, (0.5, 2.0)), (0.5, (3.0, 1.0)), (0.1, (0.5, 1.0)), (0.1, (1.0, 1.0))):
        rows = []
        for twin in (replayed, reference):
            twin.change(lambda model, of=(drop, values): vars(model).update(drop=of[0], values=of[1]))
            twin.step(x)
            twin.step(x)
            rows.append([(row.key, row.codec, row.stash_nbytes) for row in twin.session.report().rows])
        assert rows[0] == rows[1]
    assert replayed.session._is_replayed

"""The fast ways of sz's C++ kernels give the reference's planes, byte for byte.

They take chunks in pairs, make codes in single precision where that is sure to be right, and look up small tables in
registers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from backstash.codecs.sz import coding as sz
from backstash.errors import DamagedPlanesError
from backstash.ops.backends import kernels
from backstash.ops.cpu import library

pytestmark = pytest.mark.skipif(not library.available(), reason="the native kernels are not built")

reference = kernels("reference")
BLOCKS = [32, 128, 256, 512]
"""Elements of a row, a plane, a tile and a chunk."""

LENGTHS = [512 * 2, 512 * 5 + 77, 512 * 3 + 31, 512 + 32, 480, 33, 31]


def noise(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n))


def near_the_middle(n: int) -> Tensor:
    """Numbers that lie in the middle between two multiples of 0.5, or next to it, some of them far from zero."""
    middle = (torch.randint(-900, 900, (n,), generator=torch.Generator().manual_seed(n)) + 0.5) * 0.5
    bits = middle.view(torch.int32)
    return (bits + torch.arange(n, dtype=torch.int32) % 9 - 4).view(torch.float32)


def strange(n: int) -> Tensor:
    x = noise(n)
    x[::61] = torch.nan
    x[7::97] = torch.inf
    x[11::53] = 1e30
    x[13::59] = -1e-42
    x[17::29] = -0.0
    return x


def one_chunk_that_stays_dense(n: int) -> Tensor:
    x = noise(n)
    x[512:1024] *= 1e12
    return x


CONTENTS: dict[str, Callable[[int], Tensor]] = {
    "noise": noise,
    "near_the_middle": near_the_middle,
    "strange": strange,
    "one_chunk_that_stays_dense": one_chunk_that_stays_dense,
}


def compare(x: Tensor, bound: float, low: int, axes: int, offset: float, step: float | None = None) -> int:
    """Compares both directions with the reference's. Returns the number of symbols."""
    step = 2 * bound if step is None else step
    counts = reference.sz_survey(x, step, bound, low, BLOCKS, offset).view(-1, sz.BINS).numpy()
    row = sz.AXES.index(axes)
    model = sz.model(counts[row : row + 1].astype(np.int64), step, low, 8 * x.element_size())
    table = torch.from_numpy(model.table)
    parameters = [model.base, low, axes], BLOCKS
    wanted = reference.sz_encode(x, table, step, bound, *parameters, offset)
    got = kernels("native").sz_encode(x, table, step, bound, *parameters, offset)
    for mine, expected in zip(got, wanted, strict=True):
        assert mine.dtype == expected.dtype
        assert torch.equal(mine.view(torch.uint8), expected.view(torch.uint8))
    decoded, expected = (torch.full_like(x, 3.0) for _ in range(2))
    kernels("native").sz_decode(table, *wanted, step, *parameters, decoded, offset)
    reference.sz_decode(table, *wanted, step, *parameters, expected, offset)
    assert torch.equal(decoded.view(torch.uint8), expected.view(torch.uint8))
    return len(model.table)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("n", LENGTHS)
def test_lengths_and_contents(content: str, n: int) -> None:
    x = CONTENTS[content](n)
    for offset in (0.0, 0.5):
        compare(x, 0.25, 0, 0, offset)
        compare(x, 0.25, 2, 3, offset)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("axes", sz.AXES)
def test_small_dtypes_and_axes(axes: int, dtype: torch.dtype) -> None:
    compare(strange(512 * 5 + 77).to(dtype), 0.1, 0, axes, 0.0)
    compare(noise(512 * 5 + 77), 0.1, 0, axes, 0.5)


def test_tables_of_every_size() -> None:
    sizes = [compare(noise(512 * 4 + 100) * 10, bound, low, 0, 0.0) for bound in BOUNDS for low in (0, 2)]
    assert min(sizes) <= 16 < max(sizes) <= sz.SYMBOLS


BOUNDS = (4.0, 1.0, 0.5, 0.3, 0.2, 0.15, 0.1, 0.05, 0.02)


@pytest.mark.parametrize("spread", [0.1, 0.7, 3.0, 20.0, 150.0, 600.0, 4000.0])
def test_buckets_lie_where_registers_look_for_them(spread: float) -> None:
    """Each bucket begins with a multiple of its size; small ones are near zero, and as few as a table may have."""
    x = torch.cat([noise(20000) * spread, torch.tensor([1000.0, -1000.0, 130.0])])
    counts = reference.sz_survey(x, 1.0, 0.5, 0, BLOCKS).view(-1, sz.BINS).numpy().astype(np.int64)
    model = sz.model(counts, 1.0, 0, 32)
    frequencies, widths = model.table & ((1 << sz.WIDTH_SHIFT) - 1), model.table >> sz.WIDTH_SHIFT
    sizes = 1 << widths[2:].astype(np.int64)
    begins = model.base + sizes.cumsum() - sizes
    assert frequencies.sum() == 1 << sz.PRECISION and frequencies[1] > 0
    assert 2 <= len(model.table) <= sz.SYMBOLS and widths.max() <= sz.MAX_WIDTH and not widths[:2].any()
    assert not (begins % sizes).any()
    near = (begins >= -sz.NEAR) & (begins < sz.NEAR)
    assert (near | (widths[2:] >= sz.FAR_WIDTH)).all()
    assert begins[0] >= -sz.WINDOW // 2 and begins[-1] + sizes[-1] <= sz.WINDOW // 2


def test_the_bits_of_a_model_are_what_is_taken() -> None:
    x = noise(1 << 15)
    for step in (0.01, 0.1, 1.0):
        counts = reference.sz_survey(x, step, step / 2, 0, BLOCKS).view(-1, sz.BINS).numpy().astype(np.int64)
        model = sz.model(counts[:1], step, 0, 32)
        shares = x.div(step).round().unique(return_counts=True)[1].double() / x.numel()
        entropy = float(-(shares * shares.log2()).sum())
        stream, *_ = kernels("native").sz_encode(
            x, torch.from_numpy(model.table), step, step / 2, [model.base, 0, 0], [1, 1, 1, sz.CHUNK]
        )
        taken = 16 * (len(stream) - 2 * sz.LANES)
        assert taken == pytest.approx(model.bits, rel=0.01)
        assert model.bits < 1.01 * entropy * x.numel() + 300


def test_a_bucket_that_registers_would_not_find_is_refused() -> None:
    for table, base in (([100, 56, 50 | 1 << 9, 50], 1), ([100, 56, 50, 50], 200), ([100, 56, 50 | 2 << 9, 50], -256)):
        with pytest.raises(ValueError, match="Make them with"):
            kernels("native").sz_encode(
                noise(100), torch.tensor(table, dtype=torch.int16), 0.5, 0.25, [base, 0, 0], BLOCKS
            )


@pytest.mark.parametrize("step", [0.5, 0.49, 0.6])
def test_a_step_that_is_not_twice_the_bound(step: float) -> None:
    """With a larger step many elements are outliers; with a smaller one none is near the bound."""
    compare(near_the_middle(512 * 3), 0.25, 0, 0, 0.0, step)
    compare(noise(512 * 3), 0.25, 0, 0, 0.5, step)


def test_tiny_and_huge_steps() -> None:
    for scale in (1e-37, 1e-33, 1e-20, 1e20, 1e34):
        compare(noise(512 * 2 + 40) * scale, 0.1 * scale, 0, 0, 0.0)


def test_damage_in_either_chunk_of_a_pair_is_found() -> None:
    x = noise(512 * 4)
    counts = reference.sz_survey(x, 0.2, 0.1, 0, BLOCKS).view(-1, sz.BINS).numpy()
    model = sz.model(counts[:1].astype(np.int64), 0.2, 0, 32)
    table = torch.from_numpy(model.table)
    stream, index, places, values = reference.sz_encode(x, table, 0.2, 0.1, [model.base, 0, 0], BLOCKS)
    for place in range(0, len(stream), 97):
        damaged = stream.clone()
        damaged[place] ^= 0x40
        with pytest.raises(DamagedPlanesError):
            kernels("native").sz_decode(
                table, damaged, index, places, values, 0.2, [model.base, 0, 0], BLOCKS, torch.empty_like(x)
            )

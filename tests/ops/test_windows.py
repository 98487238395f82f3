"""Positions in pooling windows: equal bytes from the reference, C++ and Triton; ATen's gradients."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from native_checks import SETTINGS, cpu, generator, isas_and, native_test, poisoned, reference, same
from torch import Tensor
from triton_checks import SHORT_TAILS, expected, filled, launchers, on_device, triton_test

from backstash.errors import DamagedPlanesError
from backstash.ops.cpu import library
from backstash.ops.layout import bytes_for

WINDOW = (1, [4, 4], [2, 2], [2, 2], [2, 2], [0, 0], [1, 1])


def examples(n: int, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of this family's kernels for ``n`` elements."""
    indices = torch.tensor([0, 2, 13, 10]).repeat(n // 4)
    packed, grad = reference.window_encode(indices, *WINDOW)[0], (torch.arange(n) % 3).to(dtype)
    return {
        "window_encode": (indices, *WINDOW),
        "window_decode": (packed, *WINDOW, torch.empty_like(indices)),
        "window_scatter": (packed, *WINDOW, grad, torch.empty(4 * n, dtype=dtype)),
    }


def check_window(indices: Tensor, inner: int, geometry: tuple[list[int], ...], offset: int = 0) -> int:
    packed, bad = cpu.window_encode(indices, inner, *geometry)
    expected, expected_bad = reference.window_encode(indices, inner, *geometry)
    assert same(bad, expected_bad) and same(packed, expected)
    out, untouched = poisoned(indices.numel(), torch.int64, offset)
    again = torch.empty_like(indices)
    cpu.window_decode(packed, inner, *geometry, out)
    reference.window_decode(packed, inner, *geometry, again)
    assert same(out, again) and untouched()
    assert int(bad) > 0 or same(out, indices)
    return int(bad)


@st.composite
def poolings(draw: st.DrawFn) -> tuple[list[int], ...]:
    """input, output, kernel, stride, padding and dilation, as torch allows them, windows wider than the input too."""
    fields: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, 3))):
        kernel, stride, dilation = (draw(st.integers(1, 5)) for _ in range(3))
        padding = draw(st.integers(0, kernel // 2))
        reach = (kernel - 1) * dilation + 1
        size = draw(st.integers(max(1, reach - 2 * padding), reach + 12))
        fields.append((size, (size + 2 * padding - reach) // stride + 1, kernel, stride, padding, dilation))
    return tuple(list(field) for field in zip(*fields, strict=True))


def every_window_meets_the_input(geometry: tuple[list[int], ...]) -> bool:
    """Whether no window lies in the padding alone, around the input: of such a one torch's index is no position."""
    return all(
        any(0 <= o * stride - padding + j * dilation < size for j in range(kernel))
        for size, outputs, kernel, stride, padding, dilation in zip(*geometry, strict=True)
        for o in range(outputs)
    )


@native_test
@SETTINGS
@given(geometry=poolings(), inner=st.integers(1, 5), outer=st.integers(1, 4), seed=st.integers(0, 99))
def test_window(geometry: tuple[list[int], ...], inner: int, outer: int, seed: int) -> None:
    input_size, output_size, kernel, stride, padding, dilation = geometry
    pool = {1: torch.max_pool1d_with_indices, 2: torch.ops.aten.max_pool2d_with_indices}.get(len(kernel))
    pool = pool or torch.ops.aten.max_pool3d_with_indices
    x = torch.rand(outer, inner, *input_size, generator=generator(seed))
    _, indices = pool(x, kernel, stride, padding, dilation, False)
    assert list(indices.shape[2:]) == output_size
    garbage = torch.randint(-9, math.prod(input_size) + 9, (indices.numel(),), generator=generator(seed))
    garbage[::7] *= 1 << 40
    regular = every_window_meets_the_input(geometry)
    before = library.isa()
    for name in library.ISAS:
        library.set_isa(name)
        assert check_window(indices.flatten(), 1, geometry) == 0 or not regular
        assert check_window(indices.movedim(1, -1).flatten(), inner, geometry, offset=1) == 0 or not regular
        check_window(garbage, inner, geometry)
        check_window(garbage[1:], 1, geometry)
    library.set_isa(before)


@native_test
@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize(("isa", "kernel", "inner"), isas_and([3, 2], [7, 1]), indirect=["isa"])
def test_window_blocks(kernel: int, inner: int, threads: int, isa: str) -> None:
    """Larger than the blocks that kernels work in (1024 and 65536 elements), so that the walk starts in the middle."""
    x = torch.rand(3, inner, 113, 97, generator=generator(kernel)).repeat(1, 1, 2, 1)
    args = [kernel, kernel], [2, 2], [kernel // 2] * 2, [1, 1]
    _, indices = torch.ops.aten.max_pool2d_with_indices(x, *args)
    geometry = ([226, 97], list(indices.shape[2:]), *args)
    assert check_window(indices.flatten(), 1, geometry) == 0
    assert check_window(indices.movedim(1, -1).flatten(), inner, geometry) == 0
    tall = indices.flatten().repeat(8)[: (1 << 16) + 1030]
    assert check_window(tall, 1, geometry) == 0


@native_test
def test_window_wider_than_the_input(isa: str) -> None:
    """Two positions of such a window are at the same distance from its origin in the flat input."""
    for sides in itertools.product((2, 5), repeat=3):
        x = torch.rand(5, 4, *sides, generator=generator())
        args = [3] * 3, [1] * 3, [1] * 3, [1] * 3
        _, indices = torch.ops.aten.max_pool3d_with_indices(x, *args)
        assert check_window(indices.flatten(), 1, (list(sides), list(indices.shape[2:]), *args)) == 0


@native_test
def test_window_more_positions_than_are_tabulated(isa: str) -> None:
    x = torch.rand(2, 3, 100, 80, generator=generator())
    args = [90, 70], [1, 1], [0, 0], [1, 1]
    _, indices = torch.ops.aten.max_pool2d_with_indices(x, *args)
    assert check_window(indices.flatten(), 1, ([100, 80], [11, 11], *args)) == 0


@native_test
@pytest.mark.parametrize("wrong", [-1, 1])
def test_fields_of_another_size_are_refused(wrong: int) -> None:
    packed = torch.zeros(bytes_for(999, 3) + wrong, dtype=torch.uint8)
    with pytest.raises(DamagedPlanesError, match="'packed'"):
        cpu.narrow_decode(packed, 3, 0, torch.empty(999, dtype=torch.int64))
    packed = torch.zeros(50 + wrong, dtype=torch.uint8)
    with pytest.raises(DamagedPlanesError, match="'packed'"):
        cpu.window_decode(packed, 1, [40], [20], [4], [2], [1], [1], torch.empty(200, dtype=torch.int64))


POOLINGS = {
    "halved": ((4, 3, 12, 10), 2, 2, 0, 1),
    "overlapping": ((3, 5, 13, 11), 3, 2, 1, 1),
    "every position": ((2, 3, 9, 9), 3, 1, 1, 1),
    "dilated": ((2, 4, 15, 14), 3, 2, 1, 2),
    "wide": ((1, 2, 40, 37), 9, 5, 4, 1),
    "gaps": ((2, 3, 20, 20), 2, 5, 0, 1),
}


@native_test
@pytest.mark.parametrize(("isa", "name", "dtype"), isas_and(POOLINGS, [torch.float32, torch.float64]), indirect=["isa"])
def test_window_scatter(name: str, dtype: torch.dtype, isa: str) -> None:
    """The bits of ATen's backward, which adds up in the same order."""
    shape, kernel, stride, padding, dilation = POOLINGS[name]
    for layout, threads in itertools.product((torch.contiguous_format, torch.channels_last), (1, 2)):
        torch.set_num_threads(threads)
        x = torch.randn(shape, generator=generator(), dtype=dtype).to(memory_format=layout)
        y, indices = torch.nn.functional.max_pool2d(x, kernel, stride, padding, dilation, return_indices=True)
        inner = 1 if layout is torch.contiguous_format else shape[1]
        sizes = (list(shape[2:]), list(y.shape[2:]), *([size] * 2 for size in (kernel, stride, padding, dilation)))
        packed, outside = cpu.window_encode(indices.as_strided((indices.numel(),), (1,)), inner, *sizes)
        assert not outside, (layout, threads)
        grad = torch.randn(y.shape, generator=generator(1), dtype=dtype).to(memory_format=layout)
        grad[grad.abs() < 0.1] = -0.0
        expected = torch.ops.aten.max_pool2d_with_indices_backward(
            grad, x, [kernel] * 2, [stride] * 2, [padding] * 2, [dilation] * 2, False, indices
        )
        out, intact = poisoned(x.numel(), dtype)
        flat_grad, again = grad.as_strided((grad.numel(),), (1,)), torch.empty_like(out)
        cpu.window_scatter(packed, inner, *sizes, flat_grad, out)
        assert same(out, expected.as_strided((x.numel(),), (1,))), (layout, threads)
        reference.window_scatter(packed, inner, *sizes, flat_grad, again)
        assert same(again, out), (layout, threads)
        assert intact(), (layout, threads)


@native_test
def test_window_scatter_of_damaged_codes_stays_inside(isa: str) -> None:
    sizes = ([5, 7], [3, 4], [3, 3], [2, 2], [1, 1], [1, 1])
    grad = torch.ones(2 * 3 * 4)
    for seed in range(50):
        packed = torch.randint(0, 256, (bytes_for(grad.numel(), 4),), dtype=torch.uint8, generator=generator(seed))
        out, intact = poisoned(2 * 5 * 7, torch.float32)
        cpu.window_scatter(packed, 1, *sizes, grad, out)
        assert intact()
    for ops in (cpu, reference):
        with pytest.raises(DamagedPlanesError, match="'packed'"):
            ops.window_scatter(packed[1:], 1, *sizes, grad, out)
    halves, again = torch.empty(2, out.numel(), dtype=torch.float16)
    cpu.window_scatter(packed, 1, *sizes, grad.half(), halves)
    reference.window_scatter(packed, 1, *sizes, grad.half(), again)
    assert same(halves, again)


def pool(shape: list[int], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    """The indices of a real max-pool, ties and NaN included."""
    x = torch.randint(-2, 3, shape).float()
    x[torch.rand(shape) < 0.02] = math.nan
    max_pool = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[len(kernel)]
    return max_pool(x, kernel, stride, padding, dilation, ceil_mode=True, return_indices=True)[1]


def check_window_on_triton(indices: Tensor, *geometry: Any) -> int:
    """Compare both directions with the reference; returns how many indices are in no window."""
    packed, strays = launchers.window_encode(on_device(indices), *geometry)
    packed_expected, strays_expected = reference.window_encode(indices, *geometry)
    assert torch.equal(packed.cpu(), packed_expected)
    assert torch.equal(strays.cpu(), strays_expected)
    n = indices.numel()
    got = filled(n, torch.int64, launchers.window_decode, packed_expected, *geometry)
    assert torch.equal(got, expected(n, torch.int64, reference.window_decode, packed_expected, *geometry))
    if not strays_expected:
        assert torch.equal(got, indices)
    return int(strays_expected)


WINDOWS = [
    ([2, 3, 41], [2], [2], [0], [1]),
    ([2, 2, 700], [7], [3], [3], [2]),
    ([2, 3, 20, 17], [2, 2], [2, 2], [0, 0], [1, 1]),
    ([2, 5, 19, 33], [3, 3], [2, 2], [1, 1], [1, 1]),
    ([1, 2, 19, 33], [3, 2], [1, 2], [1, 0], [3, 2]),
    ([1, 1, 9, 9], [1, 1], [1, 1], [0, 0], [1, 1]),
    ([1, 2, 40, 40], [16, 17], [5, 4], [8, 8], [1, 1]),
    ([2, 2, 8, 10, 12], [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1]),
    ([1, 3, 7, 10, 9], [3, 3, 3], [1, 2, 3], [1, 1, 0], [1, 2, 1]),
]


def check_scatter_on_triton(dtype: torch.dtype, indices: Tensor, inner: int, *sizes: list[int]) -> None:
    packed, _ = reference.window_encode(indices, inner, *sizes)
    grad = torch.randn(indices.numel(), dtype=dtype)
    grad[grad.abs() < 0.1] = -0.0
    n = indices.numel() // math.prod(sizes[1]) * math.prod(sizes[0])
    arguments = packed, inner, *sizes, grad
    got = filled(n, dtype, launchers.window_scatter, *arguments)
    assert same(got, expected(n, dtype, reference.window_scatter, *arguments))


@triton_test
@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_window_on_triton(case: tuple[list[int], ...]) -> None:
    shape, *windows = case
    indices = pool(shape, *windows)
    input_size, output_size = shape[2:], list(indices.shape[2:])
    contiguous = indices.reshape(-1).clone()
    assert not check_window_on_triton(contiguous, 1, input_size, output_size, *windows)
    channels_last = indices.movedim(1, -1).reshape(-1).clone()
    assert not check_window_on_triton(channels_last, shape[1], input_size, output_size, *windows)
    for dtype in (torch.float32, torch.float64):
        check_scatter_on_triton(dtype, contiguous, 1, input_size, output_size, *windows)
        check_scatter_on_triton(dtype, channels_last, shape[1], input_size, output_size, *windows)
    strange = contiguous.clone()
    where = torch.rand(strange.shape) < 0.3
    strange[where] += torch.randint(-40, 40, (int(where.sum()),))
    strange[::11] = torch.tensor([-1, 2**31, 2**32 + 1, -(2**32), 2**62])[torch.arange(len(strange[::11])) % 5]
    assert check_window_on_triton(strange, 1, input_size, output_size, *windows)
    for n in SHORT_TAILS:
        check_window_on_triton(contiguous[:n].clone(), 1, input_size, output_size, *windows)


@triton_test
def test_window_of_more_elements_than_32_bits_count_on_triton() -> None:
    n = 3000
    pairs = torch.arange(n) * 2 + torch.randint(2, (n,))
    assert not check_window_on_triton(pairs, 1, [2**31], [2**30], [2], [2], [0], [1])
    rows = torch.randint(3, (n,)) * 2**30  # the last one begins at 2**31
    assert not check_window_on_triton(rows + pairs, 1, [3, 2**30], [1, 2**29], [3, 2], [3, 2], [0, 0], [1, 1])

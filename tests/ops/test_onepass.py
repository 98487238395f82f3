"""Norms, curves and dropout in one pass: equal bits from the reference and C++, and those of torch's own functions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from native_checks import SMALL_FLOATS, contents, cpu, generator, isas_and, native_test, poisoned, reference, same
from torch import Tensor

from backstash.codecs.base import flat
from backstash.errors import DamagedPlanesError
from backstash.ops.layout import Activation, ComputedCurve, NormOrder, images
from backstash.ops.onepass.reference import CODES, error_function, exponential
from backstash.remake import onepass

NAN = {torch.float32: 0, torch.float16: 0, torch.bfloat16: 0xFFFF}
"""Bits of a NaN that ATen's vectors round."""

LENGTHS = (*range(1, 35), 63, 64, 65, 1023, 1024, 1025, 2999, 3000)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=generator(seed)) * 3 + 1).to(dtype)


def silu_table(dtype: torch.dtype) -> Tensor:
    return F.silu(torch.arange(CODES, dtype=torch.int32).to(torch.int16).view(dtype)).view(torch.int16)


def examples(n: int, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of this family's kernels for ``n`` elements; there are none of float64."""
    dtype = torch.float32 if dtype is torch.float64 else dtype
    x, vector = numbers(n, dtype=dtype), numbers(4).abs()
    rows, pictures = x.view(-1, 4), x.view(-1, 4, 1, 1)
    statistic = numbers(n // 4).abs()
    channels = (pictures, vector, vector, vector)
    no_table = (None, None, 0, 0, NAN[dtype])
    return {
        "row_norm": (rows, None, statistic, statistic, vector, vector, 0, NAN[dtype], torch.empty_like(rows)),
        "grouped_norm": (
            pictures,
            statistic,
            statistic,
            vector,
            vector,
            1,
            1,
            *no_table,
            torch.empty_like(pictures),
            None,
        ),
        "channel_norm": (
            *channels,
            None,
            pictures.clone(),
            1,
            0.0,
            6.0,
            n // 4,
            1,
            NAN[dtype],
            torch.empty_like(pictures),
        ),
        "gated": (x, x.clone(), *no_table, 0, torch.empty_like(x), None),
        "curve": (x, 1, *no_table, torch.empty_like(x)),
        "dropout_bits": (x, torch.full((-(-n // 8),), 0x5A, dtype=torch.uint8), 2.0, NAN[dtype], torch.empty_like(x)),
    }


def both(kernel: str, *given: Any, outs: int = 1, numel: int, dtype: torch.dtype) -> list[Tensor]:
    """The outputs of C++ between canaries, which have to be those of the reference."""
    found: list[Tensor] = []
    for offset in (0, 1):
        made, around = zip(*(poisoned(numel, dtype, offset) for _ in range(outs)), strict=True)
        expected = [torch.empty(numel, dtype=dtype) for _ in range(outs)]
        shaped = [[out.view(shape_of(kernel, given)) for out in each] for each in (made, expected)]
        getattr(cpu, kernel)(*given, *shaped[0])
        getattr(reference, kernel)(*given, *shaped[1])
        assert all(same(out, other) for out, other in zip(made, expected, strict=True)), (kernel, numel, dtype)
        assert all(untouched() for untouched in around)
        found = list(made)
    return found


def shape_of(kernel: str, given: tuple[Any, ...]) -> torch.Size:
    shape: torch.Size = given[0].shape
    return shape


@native_test
@pytest.mark.parametrize("dtype", SMALL_FLOATS)
@pytest.mark.parametrize(("isa", "order"), isas_and(NormOrder), indirect=["isa"])
def test_norms_of_rows(isa: str, order: NormOrder, dtype: torch.dtype) -> None:
    for width in (1, 7, 8, 9, 31, 33, 64, 1024, 1027):
        x, residual = (numbers(3, width, seed=i, dtype=dtype) for i in (1, 2))
        mean, rstd = numbers(3, seed=3), numbers(3, seed=4).abs()
        for weight_dtype in {dtype, torch.float32}:
            weight, bias = (numbers(width, seed=i, dtype=weight_dtype) for i in (5, 6))
            for given in (
                (x, None, mean, rstd, weight, bias),
                (x, residual, mean, rstd, weight, None),
                (x, residual, None, rstd, weight, None),
                (x, None, None, rstd, None, None),
            ):
                both("row_norm", *given, order, NAN[dtype], numel=3 * width, dtype=dtype)
        if dtype is torch.float32:  # a layer norm that autocast rounds
            for smaller in SMALL_FLOATS[1:]:
                given = (x, None, mean, rstd, None, None)
                both("row_norm", *given, order, NAN[smaller], numel=3 * width, dtype=smaller)


@native_test
def test_norms_of_odd_numbers() -> None:
    for dtype in SMALL_FLOATS:
        x = contents(4 * 64, dtype, density=0.9).view(4, 64)
        mean, rstd = torch.tensor([0.0, -0.0, math.inf, 1.0]), torch.tensor([1.0, 3e38, 1.0, math.nan])
        for order in NormOrder:
            cpu_made, expected = torch.empty_like(x), torch.empty_like(x)
            for ops, out in ((cpu, cpu_made), (reference, expected)):
                ops.row_norm(x, None, mean, rstd, None, None, order, 0x7FC0 if dtype is torch.bfloat16 else 0x7E00, out)
            is_nan = expected.isnan()  # which NaN a float32 sum of two returns is the processor's business
            assert torch.equal(cpu_made.isnan(), is_nan)
            assert same(cpu_made.where(~is_nan, 0.0), expected.where(~is_nan, 0.0))


@native_test
@pytest.mark.parametrize("width", [5, 37, 64, 768])
def test_a_layer_norm_has_the_bits_of_torch(width: int) -> None:
    x, weight, bias = numbers(20, width), numbers(width, seed=1), numbers(width, seed=2)
    for given in ((weight, bias), (None, None)):
        expected, mean, rstd = torch.native_layer_norm(x, (width,), *given, 1e-5)
        statistics = mean.flatten(), rstd.flatten()
        found = {order: torch.empty_like(x) for order in NormOrder}
        for order, out in found.items():
            zeros = torch.zeros(width) if given[1] is None else given[1]  # ATen adds a zero where there is no bias
            cpu.row_norm(x, None, *statistics, given[0], zeros, order, 0, out)
        assert any(same(out, expected) for out in found.values())


@native_test
@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_the_order_of_a_layer_norm_is_found_out(dtype: torch.dtype) -> None:
    """Numbers of 16 bits hide the order in all but rare elements. Where none is found, there is none of ours."""
    found = onepass.order_of(torch.device("cpu"), dtype, torch.float32)
    width, rows = 768, 2000
    x = numbers(rows, width, dtype=dtype) + torch.arange(rows).view(rows, 1).sin().mul(20).to(dtype)
    weight, bias = numbers(width, seed=1), numbers(width, seed=2)
    expected, mean, rstd = torch.native_layer_norm(x, (width,), weight, bias, 1e-5)
    fitting = []
    for order in NormOrder:
        result = torch.empty_like(x)
        cpu.row_norm(x, None, mean.flatten(), rstd.flatten(), weight, bias, order, NAN[dtype], result)
        fitting += [order.name] if same(result, expected) else []
    assert fitting == ([found] if found else [])


ROUNDS_OTHERWISE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
"""Whether torch rounds a float32 group norm in channels_last in another order than the kernel."""


@native_test
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_group_norm_has_the_bits_of_torch(layout: torch.memory_format) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = numbers(3, 8, 9, 7, dtype=dtype).contiguous(memory_format=layout)
        weight, bias = numbers(8, seed=1), numbers(8, seed=2)
        expected, mean, rstd = torch.native_group_norm(x, weight, bias, 3, 8, 63, 2, 1e-5)
        if mean.dtype is torch.float32:
            out, normed = torch.empty_like(x), torch.empty_like(x)
            table = silu_table(dtype) if dtype is torch.bfloat16 else None
            given = (x, mean, rstd, weight, bias, 2, ComputedCurve.SILU, table, None, 0, 0, NAN[dtype])
            cpu.grouped_norm(*given, out, normed)
            if ROUNDS_OTHERWISE and dtype is torch.float32 and layout is torch.channels_last:
                continue  # left to torch's calls: see tests/gradients/test_one_pass.py
            assert same(flat(normed), flat(expected.contiguous(memory_format=layout)))
            if table is not None:
                assert same(flat(out), flat(F.silu(expected).contiguous(memory_format=layout)))


@native_test
@pytest.mark.parametrize("dtype", SMALL_FLOATS)
@pytest.mark.parametrize(("isa", "curve"), isas_and(ComputedCurve), indirect=["isa"])
def test_norms_of_groups(isa: str, curve: ComputedCurve, dtype: torch.dtype) -> None:
    for shape in ((2, 4, 3, 5), (1, 6, 1, 1), (3, 2, 33, 32), (2, 1030, 2, 1)):
        for layout in (torch.contiguous_format, torch.channels_last):
            x = numbers(*shape, dtype=dtype).contiguous(memory_format=layout)
            statistics = numbers(shape[0], 2, seed=1), numbers(shape[0], 2, seed=2).abs()
            for weight_dtype in {dtype, torch.float32}:
                weight, bias = (numbers(shape[1], seed=i, dtype=weight_dtype) for i in (3, 4))
                made = [torch.empty_like(x) for _ in range(4)]
                given = (x, *statistics, weight, bias, 2, curve, None, None, 0, 0, NAN[dtype])
                cpu.grouped_norm(*given, *made[:2])
                reference.grouped_norm(*given, *made[2:])
                assert same(flat(made[0]), flat(made[2])) and same(flat(made[1]), flat(made[3])), shape


@native_test
@pytest.mark.parametrize("dtype", SMALL_FLOATS)
@pytest.mark.parametrize(("isa", "activation"), isas_and(Activation), indirect=["isa"])
def test_norms_of_channels(isa: str, activation: Activation, dtype: torch.dtype) -> None:
    for shape in ((2, 4, 3, 5), (1, 6, 1, 1), (3, 2, 33, 32), (2, 1030, 2, 1)):
        for layout in (torch.contiguous_format, torch.channels_last):
            x, residual = (numbers(*shape, seed=i, dtype=dtype).contiguous(memory_format=layout) for i in (0, 1))
            mean, invstd, weight, bias = (numbers(shape[1], seed=i) for i in range(2, 6))
            sizes = images(x)
            assert sizes is not None
            for given in ((weight, bias, residual), (None, None, None)):
                made, expected = torch.empty_like(x), torch.empty_like(x)
                for ops, out in ((cpu, made), (reference, expected)):
                    ops.channel_norm(x, mean, invstd.abs(), *given, activation, 0.1, 2.0, *sizes, NAN[dtype], out)
                assert same(flat(made), flat(expected)), shape


@native_test
@pytest.mark.parametrize("dtype", SMALL_FLOATS)
@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"], indirect=True)
def test_curves_gates_and_dropout_at_every_length(isa: str, dtype: torch.dtype) -> None:
    check_curves_gates_and_dropout(dtype)
    x = numbers(9, dtype=dtype)
    with pytest.raises(DamagedPlanesError):
        cpu.dropout_bits(x, torch.zeros(4, dtype=torch.uint8), 1.25, 0, torch.empty_like(x))


def check_curves_gates_and_dropout(dtype: torch.dtype, has_tails: bool = True) -> None:
    """Where there are no tails, as on a GPU, every element is computed alike."""
    tables = None if dtype is torch.float32 else silu_table(dtype)
    for n in LENGTHS:
        x, up = numbers(n, dtype=dtype), numbers(n, seed=1, dtype=dtype)
        both("curve", x, ComputedCurve(n % len(ComputedCurve)), None, None, 0, 0, NAN[dtype], numel=n, dtype=dtype)
        both("gated", x, up, None, None, 0, 0, NAN[dtype], 0, outs=2, numel=n, dtype=dtype)
        if tables is not None:
            chunk, step = ((n, 16), (-(-n // 3), 32), (n, 0))[n % 3]
            table = (tables, tables.flip(0) if has_tails else tables, chunk, step, NAN[dtype])
            both("curve", x, 0, *table, numel=n, dtype=dtype)
            both("gated", x, up, *table, 0x7FC0 if has_tails else NAN[dtype], outs=2, numel=n, dtype=dtype)
        mask = torch.randint(256, (-(-n // 8),), dtype=torch.uint8, generator=generator(n))
        both("dropout_bits", x, mask, 1.25, NAN[dtype], numel=n, dtype=dtype)


@native_test
def test_dropout_is_a_product_with_the_mask() -> None:
    x = numbers(1000)
    noise = torch.empty(1000).bernoulli_(0.7, generator=generator(1)).div_(0.7)
    bits = (noise != 0).view(-1, 8).long() @ (1 << torch.arange(8))
    out = torch.empty_like(x)
    cpu.dropout_bits(x, bits.to(torch.uint8), float(noise.max()), 0, out)
    assert same(out, x * noise)


@native_test
def test_computed_curves_are_the_same_at_special_numbers() -> None:
    x = contents(4096, torch.float32, density=0.9)
    x = torch.cat([x, torch.linspace(-110, 110, 3001), torch.linspace(-8, 8, 3001)])
    for curve in ComputedCurve:
        made, expected = torch.empty_like(x), torch.empty_like(x)
        cpu.curve(x, curve, None, None, 0, 0, 0, made)
        reference.curve(x, curve, None, None, 0, 0, 0, expected)
        is_nan = expected.isnan()
        assert torch.equal(made.isnan(), is_nan) and same(made[~is_nan], expected[~is_nan])


def test_computed_functions_are_near() -> None:
    x = torch.linspace(-87, 88, 20_001)
    exact = x.double().exp()
    assert bool(((exponential(x).double() - exact).abs() <= exact * 1.2e-7).all())
    assert float((error_function(x / 16) - torch.erf(x / 16)).abs().max()) < 1e-6
    assert exponential(torch.tensor([math.inf, -math.inf, 0.0, 101.0])).tolist() == [math.inf, 0.0, 1.0, math.inf]

"""Batch norm: equal bits from the reference and C++. ``tests/gradients/test_backward_norms.py`` compares with ATen."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from native_checks import cpu, generator, isas_and, native_test, reference, same
from torch import Tensor
from triton_checks import DEVICE, bits, launchers, triton_test

from backstash.errors import DamagedPlanesError
from backstash.ops.layout import Activation, Rounding, images
from backstash.ops.norms.reference import fused

SHAPES = [(3, 5, 7, 9), (2, 8, 3, 1), (4, 3, 16, 16), (6, 4), (2, 3, 29), (1, 16, 2, 3, 5)]

NOTHING = (Activation.NONE, 0.0, 0.0)
RELU = (Activation.CLAMP, 0.0, math.inf)
ACTIVATIONS: dict[str, tuple[tuple[Activation, float, float], Callable[[Tensor], Tensor]]] = {
    "none": (NOTHING, lambda y: y),
    "relu": (RELU, torch.relu),
    "relu6": ((Activation.CLAMP, 0.0, 6.0), F.relu6),
    "hardtanh": ((Activation.CLAMP, -1.5, 2.5), lambda y: F.hardtanh(y, -1.5, 2.5)),
    "leaky_relu": ((Activation.LEAKY_RELU, 0.3, 0.0), lambda y: F.leaky_relu(y, 0.3)),
}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed)) * torch.rand(*shape, generator=generator(seed + 1)).exp2()


def examples(n: int, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of this family's kernels for ``n`` elements; these take float32 alone."""
    x, vector = numbers(n // 4, 4, 1), numbers(4).abs()
    out = torch.empty_like(x)
    return {
        "affine": (x, vector, vector, vector, None, x.clone(), Activation.CLAMP, 0.0, 1.0, n // 4, 1, out),
        "batch_norm_channels": (x, x.clone(), vector, vector, None, torch.empty_like(x)),
        "batch_norm_pixels": (x, x.clone(), vector, vector, None, vector, vector, torch.empty_like(x)),
    }


def test_a_fused_product_is_rounded_once() -> None:
    a, b = numbers(20_000), numbers(20_000, seed=5)
    # Sums that nearly cancel, ties, and addends that only decide how a tie is rounded.
    c = torch.cat([-(a * b)[:8000], (a * b)[8000:12_000] * 2.0**-24, numbers(8000, seed=9) * 2.0**-30])
    got = fused(a, b, c)
    for towards in (-math.inf, math.inf):
        other = got.nextafter(torch.tensor(towards))
        for i in range(0, 20_000, 37):  # compared as exact fractions: no other float32 is nearer
            x, y, z, here, there = (Fraction(float(tensor[i])) for tensor in (a, b, c, got, other))
            assert abs(here - (x * y + z)) <= abs(there - (x * y + z)), i


@native_test
@pytest.mark.parametrize(("isa", "shape"), isas_and(SHAPES), indirect=["isa"])
def test_affine(shape: tuple[int, ...], isa: str) -> None:
    mean, invstd, weight, bias = (numbers(shape[1], seed=i) for i in range(4))
    for layout in (torch.contiguous_format, torch.channels_last) if len(shape) == 4 else (torch.contiguous_format,):
        x, residual = (numbers(*shape, seed=i).contiguous(memory_format=layout) for i in (7, 8))
        for given in ((weight, bias, residual, *RELU), (None, None, None, *RELU), (weight, None, None, *NOTHING)):
            out, again = torch.empty_like(x), torch.empty_like(x)
            for ops, to in ((cpu, out), (reference, again)):
                ops.affine(x, mean, invstd.abs(), *given, *images(x), to)
            assert same(out.flatten(), again.flatten()), layout


@native_test
@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"], indirect=True)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_affine_has_the_bits_of_torchs_activation(name: str, isa: str) -> None:
    activation, function = ACTIVATIONS[name]
    x = numbers(3, 4, 5, 7, seed=3) * 4
    # Bounds, both zeros, NaN and infinities pass unchanged through a batch norm that multiplies by 1 and adds 0.
    x.view(-1)[:12] = torch.tensor([0.0, -0.0, 6.0, -1.5, 2.5, -3.0, math.nan, math.inf, -math.inf, 3.0, 1e-40, -1e-40])
    ones, zeros = torch.ones(4), torch.zeros(4)
    for residual in (None, numbers(3, 4, 5, 7, seed=4)):
        for ops in (cpu, reference):
            out, plain = torch.empty_like(x), torch.empty_like(x)
            ops.affine(x, zeros, ones, None, -zeros, residual, *NOTHING, *images(x), plain)
            ops.affine(x, zeros, ones, None, -zeros, residual, *activation, *images(x), out)
            assert same(out.flatten(), function(plain).flatten()), ops


@native_test
@pytest.mark.parametrize(("isa", "shape"), isas_and([*SHAPES, (2, 3, 56, 56), (40, 48, 7, 7)]), indirect=["isa"])
def test_affine_with_a_mask_is_a_pass_of_its_own(shape: tuple[int, ...], isa: str) -> None:
    mean, invstd, weight, bias = (numbers(shape[1], seed=i) for i in range(4))
    mask = torch.randint(256, (-(-math.prod(shape) // 8),), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    for layout in (torch.contiguous_format, torch.channels_last) if len(shape) == 4 else (torch.contiguous_format,):
        x, residual = (numbers(*shape, seed=i).contiguous(memory_format=layout) for i in (7, 8))
        residual[:1].mul_(math.nan)
        for given in ((weight, bias, residual, *RELU), (None, None, None, *NOTHING)):
            plain, got, again = (torch.empty_like(x) for _ in range(3))
            cpu.affine(x, mean, invstd.abs(), *given, *images(x), plain)
            elements = plain.as_strided((plain.numel(),), (1,))
            reference.mask_select(elements.clamp(min=2.0**-126), mask, elements)
            for ops, to in ((cpu, got), (reference, again)):
                ops.affine(x, mean, invstd.abs(), *given, *images(x), to, mask)
                assert same(to.flatten(), plain.flatten()), (layout, ops)


@native_test
def test_affine_with_a_mask_of_another_size_is_refused() -> None:
    x, ones = torch.zeros(2, 3, 4, 4), torch.ones(3)
    for ops in (cpu, reference):
        with pytest.raises(DamagedPlanesError):
            mask = torch.zeros(11, dtype=torch.uint8)
            ops.affine(x, ones, ones, None, None, None, *NOTHING, *images(x), torch.empty_like(x), mask)


@native_test
def test_other_roundings_and_what_is_picked() -> None:
    x, (mean, invstd, weight, bias) = numbers(3, 5, 7, 9, seed=7), (numbers(5, seed=i) for i in range(4))
    found = []
    for rounding in Rounding:
        given = x, mean, invstd.abs(), weight, bias, None, *RELU, *images(x)
        outs, picks = [torch.empty_like(x) for _ in range(2)], [torch.empty(64) for _ in range(2)]
        for ops, out, picked in zip((cpu, reference), outs, picks, strict=True):
            ops.affine(*given, out, None, rounding, picked, 2, 14)
            assert same(picked, out.flatten()[2 : 2 + 64 * 14 : 14].clone())
        assert same(outs[0].flatten(), outs[1].flatten())
        normed, sums = torch.empty_like(x), [torch.empty_like(x) for _ in range(3)]
        reference.affine(x, bias, weight.abs(), mean, None, None, *NOTHING, *images(x), normed, None, rounding)
        reference.affine(*given[:5], normed, *given[6:], sums[0], None, rounding)
        for ops, out in ((cpu, sums[1]), (reference, sums[2])):
            ops.affine(*given[:5], x, *given[6:], out, None, rounding, None, 0, 1, bias, weight.abs(), mean, None)
            assert same(out.flatten(), sums[0].flatten())
        scale, mean_of = (invstd.abs() * weight).view(-1, 1, 1), mean.view(-1, 1, 1)
        torch.testing.assert_close(outs[0], torch.relu((x - mean_of) * scale + bias.view(-1, 1, 1)))
        found.append(outs[0])
    assert not any(torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])  # else they are not needed


@triton_test
@pytest.mark.parametrize("rounding", Rounding)
def test_affine_on_triton(rounding: Rounding) -> None:
    if DEVICE == "cpu" and not _interprets_fma():
        pytest.skip("Triton's interpreter rounds a multiplication and an addition in one twice")
    check_affine(launchers, DEVICE, rounding)


def _interprets_fma() -> bool:
    """Whether Triton's interpreter rounds a multiplication and an addition in one as a GPU does: once."""
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    return "rounds once" in inspect.getsource(builder.create_fma)


def check_affine(kernels: Any, device: str, rounding: Rounding) -> None:
    """Compares a device's kernel with the reference: odd numbers, masks, residuals, second norms, what is picked."""
    channels_last = ((3, 5, 7, 9), (2, 16, 3, 3), (2, 8, 4, 4))
    layouts = [(shape, torch.contiguous_format) for shape in (*SHAPES, *channels_last)]
    for shape, layout in [*layouts, *((shape, torch.channels_last) for shape in channels_last)]:
        x, residual = (numbers(*shape, seed=i).contiguous(memory_format=layout) for i in (7, 8))
        x.as_strided((3,), (1,))[:] = torch.tensor([-0.0, math.inf, 1e-40])
        residual[:1, :1] = 1e-40
        mean, invstd, weight, bias = (numbers(shape[1], seed=i) for i in range(4))
        mask = torch.randint(256, (-(-x.numel() // 8),), dtype=torch.uint8)
        for given, of_mask in (
            ((weight, bias, residual, *RELU), None),
            ((weight, bias, residual, *RELU), mask),
            ((None, None, None, *NOTHING), mask),
            ((weight, None, None, *ACTIVATIONS["relu6"][0]), None),
            ((None, bias, residual, *ACTIVATIONS["leaky_relu"][0]), None),
        ):
            of_residual = (bias, invstd.abs(), weight, None) if of_mask is None and given[2] is not None else ()
            step = max(1, x.numel() // 64)
            picks = min(64, -(-(x.numel() - step + 1) // step))
            results = []
            for ops, where in ((kernels, device), (reference, "cpu")):
                arguments = x, mean, invstd.abs(), *given
                moved = [each.to(where) if isinstance(each, Tensor) else each for each in arguments]
                out, picked = torch.empty_like(moved[0]), torch.empty(picks, device=where)
                plane = None if of_mask is None else of_mask.to(where)
                second = [None if each is None else each.to(where) for each in of_residual]
                ops.affine(*moved, *images(x), out, plane, rounding, picked, step - 1, step, *second)
                results.append((out.cpu(), picked.cpu()))
                again = torch.empty_like(out)
                ops.affine(*moved, *images(x), again, plane, rounding, None, 0, 1, *second)
                assert torch.equal(bits(again), bits(out))
            (out, picked), (expected, of_reference) = results
            assert out.stride() == expected.stride() and torch.equal(bits(out), bits(expected)), (shape, layout)
            assert torch.equal(bits(picked), bits(of_reference))


@triton_test
def test_affine_on_triton_refuses_a_mask_of_another_size() -> None:
    check_mask_of_another_size(launchers, DEVICE)


def check_mask_of_another_size(kernels: Any, device: str) -> None:
    """A mask that does not fit is refused before anything is launched."""
    x, ones = torch.zeros(2, 3, 4, 4, device=device), torch.ones(3, device=device)
    with pytest.raises(DamagedPlanesError):
        mask = torch.zeros(11, dtype=torch.uint8, device=device)
        kernels.affine(x, ones, ones, None, None, None, *NOTHING, *images(x), torch.empty_like(x), mask)


@native_test
@pytest.mark.parametrize(("isa", "shape"), isas_and(SHAPES), indirect=["isa"])
def test_batch_norm_channels(shape: tuple[int, ...], isa: str) -> None:
    mean, invstd, weight = (numbers(shape[1], seed=i) for i in range(3))
    for scale in (None, weight):
        grad, x = numbers(*shape, seed=7), numbers(*shape, seed=8)
        results = []
        for ops in (cpu, reference):
            out = grad.clone()
            results.append((out.flatten(), *ops.batch_norm_channels(out, x, mean, invstd, scale, out)))
        assert all(same(a, b) for a, b in zip(results[0][:3], results[1][:3], strict=True))
        assert results[0][3] == results[1][3] == 0


@native_test
def test_channels_whose_sums_are_not_finite_are_left() -> None:
    grad, x, mean, invstd = numbers(2, 5, 9), numbers(2, 5, 9, seed=3), numbers(5), numbers(5).abs()
    grad[0, 1, 3], x[1, 4, 2] = math.inf, math.nan
    outs = []
    for ops in (cpu, reference):
        out = torch.full_like(x, 7.0)
        weight_grad, _, left = ops.batch_norm_channels(grad, x, mean, invstd, None, out)
        assert left == 2
        assert weight_grad.isnan().tolist() == [False, True, False, False, True]
        assert (out[:, [1, 4]] == 7).all()
        outs.append(out[:, [0, 2, 3]].flatten())
    assert same(*outs)


@native_test
@pytest.mark.parametrize(("isa", "shape"), isas_and([shape for shape in SHAPES if len(shape) == 4]), indirect=["isa"])
def test_batch_norm_pixels(shape: tuple[int, ...], isa: str) -> None:
    mean, invstd, weight, k, grad_mean = (numbers(shape[1], seed=i) for i in range(5))
    for scale in (None, weight):
        grad, x = (numbers(*shape, seed=i).contiguous(memory_format=torch.channels_last) for i in (7, 8))
        out, again = torch.empty_like(x), torch.empty_like(x)
        for ops, to in ((cpu, out), (reference, again)):
            ops.batch_norm_pixels(grad, x, mean, invstd, scale, k, grad_mean, to)
        assert same(out.flatten(), again.flatten())

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from backstash.codecs import FewBit
from backstash.codecs.base import SINGLES
from backstash.codecs.fewbit.codec import ACTIVATIONS, BITS, grid
from backstash.codecs.fewbit.table import TABLE
from backstash.errors import CodecRefusedError, DamagedPlanesError
from backstash.formulas import FORMULAS, requirement_of
from backstash.saved import TensorSpec
from studies import fewbit_table

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "elu": F.elu,
    "elu_": lambda x: F.elu(x * 1, inplace=True),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
}
EACH = [pytest.param(function, bits, id=f"{function}{bits}") for function in ACTIVATIONS for bits in BITS]
DOC = Path(__file__).parents[2] / "docs" / "papers" / "fewbit.md"


def gradient(function: str, x: Tensor, codec: FewBit | None = None) -> Tensor:
    """What torch's own backward makes of a gradient of ones, of what it saved, or of what ``codec`` makes of that."""

    def through(saved: Tensor) -> Tensor:
        return saved if codec is None else codec.decode(codec.encode(saved))

    x = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach(), through):
        y = FUNCTIONS[function](x)
    return torch.autograd.grad(y, x, torch.ones_like(y))[0].double()


def normal(n: int, dtype: torch.dtype) -> Tensor:
    """The n quantiles of the standard normal distribution."""
    return torch.special.ndtri((torch.arange(n, dtype=torch.float64) + 0.5) / n).to(dtype)


@pytest.mark.parametrize(("function", "bits"), EACH)
def test_gradient_error_is_the_stated_one(function: str, bits: int) -> None:
    codec, x = FewBit(function, bits), normal(200_001, torch.float32)
    error = gradient(function, x, codec) - gradient(function, x)
    stated = codec.derivative_error
    assert float(error.square().mean().sqrt()) == pytest.approx(stated.rms, rel=0.002)
    far = torch.linspace(-30, 30, 200_001)
    assert float((gradient(function, far, codec) - gradient(function, far)).abs().max()) <= stated.max + 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("function", "bits"), EACH)
def test_gradient_error_of_16_bits(function: str, bits: int, dtype: torch.dtype) -> None:
    """The stand-in is rounded, and so is torch's gradient: together by less than two units in the last place of 1."""
    codec, x = FewBit(function, bits), normal(50_001, dtype)
    rms = float((gradient(function, x, codec) - gradient(function, x)).square().mean().sqrt())
    assert abs(rms - codec.derivative_error.rms) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize(("function", "bits"), EACH)
def test_stand_ins_have_the_best_constant_as_their_derivative(function: str, bits: int) -> None:
    thresholds, values = (torch.tensor(numbers, dtype=torch.float64) for numbers in TABLE[function, bits])
    activation, (x, shares) = ACTIVATIONS[function], grid(fewbit_table.CELLS)
    saved = activation.saved(x)
    codes, slope = torch.bucketize(saved, thresholds), activation.slope(saved)
    for code in range(2**bits):
        inside = codes == code
        best = float((slope * shares)[inside].sum() / shares[inside].sum())
        assert float(activation.slope(values[code])) == pytest.approx(best, abs=1e-4)
        assert float(saved[inside].min()) <= float(values[code]) <= float(saved[inside].max())


@pytest.mark.parametrize("function", ["gelu", "elu", "tanh"])
def test_the_table_is_what_the_generator_makes(function: str) -> None:
    """As good, that is: two cuts of an even function are equally good, and rounding may prefer either."""
    made = fewbit_table.intervals(function)
    assert set(made) == set(BITS)
    activation, (x, shares) = ACTIVATIONS[function], grid(fewbit_table.CELLS)
    saved = activation.saved(x)
    for bits, intervals in made.items():
        errors = []
        for thresholds, values in (intervals, TABLE[function, bits]):
            assert (len(thresholds), len(values)) == (2**bits - 1, 2**bits)
            codes = torch.bucketize(saved, torch.tensor(thresholds, dtype=torch.float64))
            stand_ins = torch.tensor(values, dtype=torch.float64)[codes]
            error = activation.slope(stand_ins) - activation.slope(saved)
            errors.append(float((error.square() * shares).sum()))
        assert errors[0] == pytest.approx(errors[1], rel=1e-6)


def test_cuts_are_the_best_ones() -> None:
    slope = torch.tensor([0.0, 0.1, 1.0, 1.1, 0.0, 0.0, 3.0], dtype=torch.float64)
    cuts = list(fewbit_table.cut(slope, torch.ones_like(slope), 5))
    assert cuts[1] == [0, 6, 7]
    assert cuts[3] == [0, 2, 4, 6, 7]
    assert [len(one) for one in cuts] == [2, 3, 4, 5, 6]


def test_tables_are_complete_and_rise() -> None:
    assert set(TABLE) == {(function, bits) for function in ACTIVATIONS for bits in BITS}
    for (function, bits), (thresholds, values) in TABLE.items():
        assert len(thresholds) == 2**bits - 1
        assert len(values) == 2**bits
        for numbers in (thresholds, values):
            assert list(numbers) == sorted(numbers), (function, bits)
            assert torch.tensor(numbers).tolist() == pytest.approx(list(numbers), rel=1e-7)


@pytest.mark.parametrize("dtype", SINGLES)
@pytest.mark.parametrize("bits", BITS)
def test_layout(bits: int, dtype: torch.dtype) -> None:
    thresholds, values = TABLE["silu", bits]
    for n in (0, 1, 7, 8, 9, 1025):
        x = normal(n, dtype)[torch.randperm(n)]
        encoded = FewBit("silu", bits).encode(x)
        stream = np.unpackbits(encoded.planes["packed"].numpy(), bitorder="little")
        fields = stream[: n * bits].reshape(n, bits) @ (1 << np.arange(bits, dtype=np.int64))
        expected = [sum(number > threshold for threshold in thresholds) for number in x.tolist()]
        assert fields.tolist() == expected
        assert not stream[n * bits :].any()
        decoded = FewBit("silu", bits).decode(encoded)
        assert decoded.dtype == dtype
        assert torch.equal(decoded, torch.tensor(values, dtype=dtype)[torch.tensor(expected, dtype=torch.int64)])


@pytest.mark.parametrize("dtype", SINGLES)
@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_refused(number: float, dtype: torch.dtype) -> None:
    x = torch.zeros(5000, dtype=dtype)
    x[[17, 4999]] = number
    with pytest.raises(CodecRefusedError, match=r"derivative of gelu, got 2 infinite or NaN elements\. Use Keep\(\)\."):
        FewBit("gelu").encode(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex64])
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(CodecRefusedError, match=rf"{str(dtype)[6:]} \[4\], but it takes float32, bfloat16 and float16"):
        FewBit("gelu").encode(torch.zeros(4, dtype=dtype))


def test_unknown_functions_and_bits() -> None:
    with pytest.raises(ValueError, match=r"'relu6', but there are tables for gelu, .*softplus\. Choose"):
        FewBit("relu6")
    for bits in (0, 5, 2.5):
        with pytest.raises(ValueError, match=r"asked for .* bits, but the choices are 1, 2, 3 and 4\."):
            FewBit("gelu", bits)  # type: ignore[arg-type]


def functions_of(y: Tensor) -> set[str | None]:
    """The functions that the table of formulas finds in what the node of ``y`` saved."""
    node = y.grad_fn
    roles = [name.removeprefix("_raw_saved_") for name in dir(node) if name.startswith("_raw_saved_")]
    spec = TensorSpec.of(y)
    return {requirement_of(node, role, spec, {role: spec}).function for role in roles}


@pytest.mark.parametrize("function", ACTIVATIONS)
def test_serves_the_node_that_torch_makes(function: str) -> None:
    codec = FewBit(function)
    assert codec.serves == functions_of(FUNCTIONS[function](torch.randn(3, requires_grad=True)))
    assert codec.label == f"{function}3"


@pytest.mark.parametrize(
    "other",
    [
        F.selu,
        lambda x: F.elu(x, alpha=0.5),
        lambda x: F.softplus(x, beta=2),
        lambda x: F.softplus(x, threshold=5),
        lambda x: x * x,
    ],
)
def test_nodes_with_other_scalars_are_not_served(other: Callable[[Tensor], Tensor]) -> None:
    assert functions_of(other(torch.randn(3, requires_grad=True))) == {None}


def test_the_table_of_formulas_and_the_codec_know_the_same_functions() -> None:
    assert {name for formula in FORMULAS.values() for name in formula.functions} == set(ACTIVATIONS)


@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_plane_of_another_size_is_damage(wrong: int) -> None:
    encoded = FewBit("gelu").encode(torch.zeros(999))
    encoded.planes["packed"].resize_(375 + wrong)  # type: ignore[attr-defined]
    with pytest.raises(DamagedPlanesError, match=r"plane 'packed' has 375 elements, got 37[46]\. "):
        FewBit("gelu").decode(encoded)


def test_the_document_has_the_numbers() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", DOC.read_text(), re.MULTILINE))
    assert set(rows) == set(ACTIVATIONS)
    for function, row in rows.items():
        errors = [FewBit(function, bits).derivative_error for bits in BITS]
        assert [cell.strip() for cell in row.split("|")] == [f"{one.rms:.4f} ({one.max:.2f})" for one in errors]

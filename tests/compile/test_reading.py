"""Every row of the tables of what a backward operator reads: adversarial values for all that the row leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from backstash.compile.forms.codecs import Sides
from backstash.compile.graph.emit import run_now
from backstash.compile.graph.reading import LIKE, SIZES
from backstash.formulas import FORMULAS, OPERATORS, function_of
from backstash.saved import Mask, Need

_aten = torch.ops.aten
ODD = [0.0, -0.0, 1e-40, -1e-40, 0.5, -0.5, 3.0, -3.0, 6.0, 1e30, -1e30, float("inf"), -float("inf"), float("nan")]

SIGNS = {entry: formula for entry, formula in OPERATORS.items() if formula.need is Need.SIGN}
SHAPES = {entry for entry, formula in OPERATORS.items() if formula.need is Need.SHAPE} | {
    (name, "self") for name in LIKE | SIZES
}

Operator = tuple[Callable[..., Tensor], dict[str, Any]]

SIGN_CASES: dict[str, list[Operator]] = {
    "aten::threshold_backward": [
        (lambda g, x: _aten.threshold_backward(g, x, 0), {"threshold": 0}),
        (lambda g, x: _aten.threshold_backward(g, x, 0.5), {"threshold": 0.5}),
    ],
    "aten::leaky_relu_backward": [(lambda g, x: _aten.leaky_relu_backward(g, x, 0.1, False), {})],
    "aten::hardtanh_backward": [
        (lambda g, x: _aten.hardtanh_backward(g, x, 0.0, 6.0), {"min_val": 0.0, "max_val": 6.0}),
        (lambda g, x: _aten.hardtanh_backward(g, x, -1.0, 0.5), {"min_val": -1.0, "max_val": 0.5}),
    ],
    "aten::hardsigmoid_backward": [(lambda g, x: _aten.hardsigmoid_backward(g, x), {})],
    "aten::hardshrink_backward": [(lambda g, x: _aten.hardshrink_backward(g, x, 0.5), {"lambd": 0.5})],
    "aten::softshrink_backward": [(lambda g, x: _aten.softshrink_backward(g, x, 0.5), {"lambd": 0.5})],
    "aten::sgn": [(lambda g, x: g * _aten.sgn(x), {})],
    "aten::sign": [(lambda g, x: g * _aten.sign(x), {})],
}


def mask_of(entry: tuple[str, str], arguments: dict[str, Any]) -> Mask:
    build = SIGNS[entry].mask
    assert build is not None
    mask = build(arguments.__getitem__)
    assert mask is not None
    return mask


def same_bits(one: Tensor, other: Tensor) -> bool:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    nan = one.isnan() & other.isnan()
    return bool((nan | (one.view(whole) == other.view(whole))).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("entry", sorted(SIGNS), ids=str)
def test_an_operator_that_reads_a_side_gets_the_same_from_stand_ins(entry: tuple[str, str], dtype: torch.dtype) -> None:
    x = torch.tensor(ODD * 37, dtype=dtype)  # more than one vector and a tail
    gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for operator, arguments in SIGN_CASES[entry[0]]:
        form = Sides(mask_of(entry, arguments))
        stand_ins = form.decode(run_now, form.encode(run_now, x), x)
        assert same_bits(operator(gradient, stand_ins), operator(gradient, x))


def pooled(dims: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(2, 3, *([8] * dims), generator=torch.Generator().manual_seed(dims))
    found, indices = getattr(_aten, f"max_pool{dims}d_with_indices")(x, [2] * dims, [2] * dims)
    return x, torch.ones_like(found), indices


def shape_cases() -> dict[str, tuple[Tensor, Callable[[Tensor], Any]]]:
    """For each operator a tensor that it reads the shape of, and the call with another tensor in its place."""
    cases: dict[str, tuple[Tensor, Callable[[Tensor], Any]]] = {}
    for dims in (2, 3):
        x, gradient, indices = pooled(dims)
        two, call = [2] * dims, getattr(_aten, f"max_pool{dims}d_with_indices_backward")
        cases[f"aten::max_pool{dims}d_with_indices_backward"] = (
            x,
            lambda y, call=call, g=gradient, i=indices, t=two, d=dims: call(g, y, t, t, [0] * d, [1] * d, False, i),
        )
        _, indices = getattr(_aten, f"adaptive_max_pool{dims}d")(x, two)
        few = torch.ones(2, 3, *two)
        call = getattr(_aten, f"adaptive_max_pool{dims}d_backward")
        cases[f"aten::adaptive_max_pool{dims}d_backward"] = (x, lambda y, c=call, g=few, i=indices: c(g, y, i))
        samples = torch.rand(2, 3, dims)
        _, indices = getattr(_aten, f"fractional_max_pool{dims}d")(x, two, [4] * dims, samples)
        many = torch.ones(2, 3, *([4] * dims))
        call = getattr(_aten, f"fractional_max_pool{dims}d_backward")
        cases[f"aten::fractional_max_pool{dims}d_backward"] = (
            x,
            lambda y, c=call, g=many, i=indices, t=two, d=dims: c(g, y, t, [4] * d, i),
        )
        call = getattr(_aten, f"avg_pool{dims}d_backward")
        cases[f"aten::avg_pool{dims}d_backward"] = (
            x,
            lambda y, c=call, g=gradient, t=two, d=dims: c(g, y, t, t, [0] * d, False, True, None),
        )
        call = getattr(_aten, f"_adaptive_avg_pool{dims}d_backward")
        cases[f"aten::_adaptive_avg_pool{dims}d_backward"] = (x, lambda y, c=call, g=few: c(g, y))
    for dims in (1, 2, 3):
        x = torch.randn(2, 3, *([6] * dims))
        wide = torch.ones(2, 3, *([8] * dims))
        for kind in ("reflection", "replication"):
            call = getattr(_aten, f"{kind}_pad{dims}d_backward")
            cases[f"aten::{kind}_pad{dims}d_backward"] = (x, lambda y, c=call, g=wide, d=dims: c(g, y, [1] * (2 * d)))
    x, target = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 0])
    weight = torch.tensor(5.0)
    cases["aten::nll_loss_backward"] = (
        x,
        lambda y: _aten.nll_loss_backward(torch.tensor(1.0), y, target, None, 1, -100, weight),
    )
    image, labels = torch.randn(2, 4, 3, 3), torch.randint(0, 4, (2, 3, 3))
    cases["aten::nll_loss2d_backward"] = (
        image,
        lambda y: _aten.nll_loss2d_backward(torch.tensor(1.0), y, labels, None, 1, -100, torch.tensor(18.0)),
    )
    x = torch.randn(3, 5)
    cases |= {
        "aten::zeros_like": (x, _aten.zeros_like),
        "aten::ones_like": (x, _aten.ones_like),
        "aten::full_like": (x, lambda y: _aten.full_like(y, 2.0)),
        "aten::new_zeros": (x, lambda y: _aten.new_zeros(y, [2])),
        "aten::new_ones": (x, lambda y: _aten.new_ones(y, [2])),
        "aten::new_full": (x, lambda y: _aten.new_full(y, [2], 3.0)),
        "aten::sym_size": (x, lambda y: _aten.sym_size(y, 1)),
        "aten::sym_stride": (x, lambda y: _aten.sym_stride(y, 0)),
        "aten::sym_numel": (x, _aten.sym_numel),
        "aten::sym_storage_offset": (x, _aten.sym_storage_offset),
    }
    for name in ("empty_like", "new_empty", "new_empty_strided"):  # whose results nobody may read
        cases[f"aten::{name}"] = (x, lambda y: 0)
    return cases


def test_every_row_of_shapes_has_a_case() -> None:
    assert {(name, "self") for name in shape_cases()} == SHAPES
    assert {name for name, _ in SIGNS} == set(SIGN_CASES)


@pytest.mark.parametrize("name", sorted(name for name, _ in SHAPES))
def test_an_operator_that_reads_a_shape_gets_the_same_from_any_values(name: str) -> None:
    x, call = shape_cases()[name]
    for poison in (float("nan"), float("inf"), -1e30):
        expected, found = call(x), call(torch.full_like(x, poison))
        assert torch.equal(expected, found) if isinstance(expected, Tensor) else expected == found


def test_rows_that_name_the_same_operator_read_the_same() -> None:
    for formula in FORMULAS.values():
        for entry in formula.operators:
            served = OPERATORS[entry]
            assert (served.need, served.mask, served.effect) == (formula.need, formula.mask, formula.effect)


def test_every_operator_that_a_row_names_has_that_argument() -> None:
    for name, argument in OPERATORS:
        packet = getattr(_aten, name.removeprefix("aten::"))
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        assert any(argument == each.name for overload in overloads for each in overload._schema.arguments), name


@pytest.mark.parametrize(
    ("entry", "arguments", "function"),
    [
        (("aten::gelu_backward", "self"), {"approximate": "none"}, "gelu"),
        (("aten::gelu_backward", "self"), {"approximate": "tanh"}, "gelu_tanh"),
        (("aten::silu_backward", "self"), {}, "silu"),
        (("aten::tanh_backward", "output"), {}, "tanh"),
        (("aten::sigmoid_backward", "output"), {}, "sigmoid"),
        (("aten::softplus_backward", "self"), {"beta": 1, "threshold": 20}, "softplus"),
        (("aten::softplus_backward", "self"), {"beta": 2, "threshold": 20}, None),
        # Two rows name it, of which one reads the result: from the argument alone it is not known which.
        (("aten::elu_backward", "self_or_result"), {"alpha": 1, "scale": 1, "input_scale": 1}, None),
    ],
)
def test_the_function_of_an_operator(entry: tuple[str, str], arguments: dict[str, Any], function: str | None) -> None:
    assert function_of(OPERATORS[entry], arguments.__getitem__) == function

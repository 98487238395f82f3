"""The part of each saved tensor that backward formulas read: a table from (autograd node, saved name) to Need.

The names are torch's own: the node ``MaxPool2DWithIndicesBackward0`` has the op ``MaxPool2DWithIndices``, and its
``_saved_result1`` has the role ``result1``. tests/gradients/test_needs.py proves every row: it gives the formula what
the row allows, and adversarial values for all the rest. The page on needs in docs/ shows the derivative of each row. A
saved tensor that is not in the table needs its VALUE.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from backstash import effects
from backstash.saved import Effect, Mask, Need, PoolWindow, TensorSpec, Test
from backstash.torch_internals import clamp_passes_bounds

MaskBuilder = Callable[[Any], Mask | None]
WindowBuilder = Callable[[Any, TensorSpec, TensorSpec], PoolWindow | None]


@dataclass(frozen=True, slots=True)
class NeedRow:
    """One row of the table.

    Args:
        need: how much the formula reads.
        formula: the derivative, as torch's derivatives.yaml states it.
        mask: for SIGN: builds the Mask from the node's saved scalars, or returns None if the row does not hold.
        window: for INDEX: builds the PoolWindow from the node, the input's spec and the indices' spec.
    """

    need: Need
    formula: str
    mask: MaskBuilder | None = None
    window: WindowBuilder | None = None


@dataclass(frozen=True, slots=True)
class Requirement:
    """A row applied to one saved tensor. All attributes are those of SavedTensor."""

    need: Need
    mask: Mask | None = None
    window: PoolWindow | None = None
    function: str | None = None
    effect: Effect = Effect.UNKNOWN
    row: int = 0


VALUE = Requirement(Need.VALUE)

_NODE = re.compile(r"(.+?)Backward\d*$")


def op_of(node: Any) -> str:
    """The op of an autograd node: ``"Relu"`` for ``ReluBackward0``."""
    return _op_of_name(type(node).__name__)


@cache
def _op_of_name(name: str) -> str:
    match = _NODE.match(name)
    return match.group(1) if match else name


def requirement_of(
    node: Any, role: str, spec: TensorSpec, specs: Mapping[str, TensorSpec], op: str | None = None
) -> Requirement:
    """How much the backward formula of ``node`` reads of the tensor that it saved as ``role``.

    Args:
        node: the autograd node.
        role: the node's name for the tensor.
        spec: the tensor's spec.
        specs: the specs of all tensors that the node saved, by role.
        op: the node's op, if the caller knows it.
    """
    if op is None:
        op = op_of(node)
    row = TABLE.get((op, role))
    if row is None:
        functions = FUNCTIONS.get((op, role))
        function = None if functions is None else _function(functions, node)
        effect, values = effects.of(node, op, role, spec)
        return Requirement(Need.VALUE, function=function, effect=effect, row=values)
    try:
        return _apply(row, node, spec, specs)
    except AttributeError:  # this torch version's node does not save the scalar that the row reads
        return VALUE


def _apply(row: NeedRow, node: Any, spec: TensorSpec, specs: Mapping[str, TensorSpec]) -> Requirement:
    if row.mask is not None:
        mask = row.mask(node) if spec.dtype.is_floating_point else None
        return Requirement(Need.SIGN, mask) if mask is not None and mask.fits(spec.dtype) else VALUE
    if row.window is not None and "self" in specs:
        return Requirement(Need.INDEX, window=row.window(node, specs["self"], spec))
    return Requirement(row.need)


def _scalar(value: Any, default: float) -> float | None:
    """A saved scalar, or ``default`` if it is absent. None for a tensor, which another overload of the op saves."""
    if value is None:
        return default
    return float(value) if isinstance(value, (int, float)) else None


def _relu(node: Any) -> Mask | None:
    return Mask(Test.NOT_LE, 0.0)


def _threshold(node: Any) -> Mask | None:
    threshold = float(node._saved_threshold)
    return Mask(Test.NOT_LE, threshold, if_set=math.inf, if_clear=threshold) if threshold < math.inf else None


def _leaky_relu(node: Any) -> Mask | None:
    return Mask(Test.GT, 0.0)


def _hardtanh(node: Any) -> Mask | None:
    low, high = float(node._saved_min_val), float(node._saved_max_val)
    middle = low / 2 + high / 2
    return Mask(Test.NOT_OUTSIDE, low, high, if_set=middle, if_clear=low, nan=True) if low < middle < high else None


def _hardsigmoid(node: Any) -> Mask | None:
    return Mask(Test.INSIDE, -3.0, 3.0, if_set=0.0, if_clear=3.0)


def _shrink(node: Any) -> Mask | None:
    edge = float(node._saved_lambd)
    return Mask(Test.CLOSED, -edge, edge, if_set=0.0, if_clear=math.inf, nan=True) if 0.0 <= edge < math.inf else None


def _closed(low: float | None, high: float | None) -> Mask | None:
    """The mask of ``low <= x <= high``, with a stand-in for each outcome; None if no value has one of the outcomes."""
    if low is None or high is None or not low <= high:
        return None
    inside = low if math.isfinite(low) else high if math.isfinite(high) else None
    return None if inside is None else Mask(Test.CLOSED, low, high, if_set=inside, if_clear=math.nan)


def _open(low: float | None, high: float | None) -> Mask | None:
    """The mask of ``low < x < high``, where an infinite bound is outside as well; otherwise like :func:`_closed`."""
    if low is None or high is None or not low < high:
        return None
    if math.isfinite(low) and math.isfinite(high):
        inside = low / 2 + high / 2
    else:  # the stand-in only has to be on the right side of the finite bound, and a number of small dtypes
        inside = low + abs(low) + 1.0 if math.isfinite(low) else high - abs(high) - 1.0 if math.isfinite(high) else 0.0
    return Mask(Test.INSIDE, low, high, if_set=inside, if_clear=math.nan) if low < inside < high else None


def _above(low: float | None) -> Mask | None:
    if low is None or not math.isfinite(low):
        return None
    return Mask(Test.GT, low, if_set=math.inf, if_clear=math.nan)


def _clamp(node: Any) -> Mask | None:
    if clamp_passes_bounds:
        return _closed(_scalar(node._saved_min, -math.inf), _scalar(node._saved_max, math.inf))
    if node._saved_max is None:
        return _clamp_min(node)
    # No test of a mask is "below a bound", -inf included.
    return None if node._saved_min is None else _open(_scalar(node._saved_min, 0.0), _scalar(node._saved_max, 0.0))


def _clamp_min(node: Any) -> Mask | None:
    low = _scalar(node._saved_min, -math.inf)
    return _closed(low, math.inf) if clamp_passes_bounds else _above(low)


def _clamp_max(node: Any) -> Mask | None:
    return _closed(-math.inf, _scalar(node._saved_max, math.inf)) if clamp_passes_bounds else None


def _abs(node: Any) -> Mask | None:
    return Mask(Test.GT, 0.0, ternary=True)


def _nan_to_num(node: Any) -> Mask | None:
    return Mask(Test.INSIDE, -math.inf, math.inf, if_set=0.0, if_clear=math.inf)


def _nansum(node: Any) -> Mask | None:
    return Mask(Test.CLOSED, -math.inf, math.inf, if_set=0.0, if_clear=math.nan)


def _window(node: Any, source: TensorSpec, indices: TensorSpec) -> PoolWindow | None:
    dims = len(node._saved_kernel_size)

    def each(sizes: tuple[int, ...], default: tuple[int, ...]) -> tuple[int, ...]:
        sizes = tuple(sizes) or default
        return sizes * dims if len(sizes) == 1 else sizes

    kernel = each(node._saved_kernel_size, ())
    return PoolWindow(
        input_size=source.shape[-dims:],
        kernel=kernel,
        stride=each(node._saved_stride, kernel),
        padding=each(node._saved_padding, (0,)),
        dilation=each(node._saved_dilation, (1,)),
    )


def _shape_rows() -> dict[tuple[str, str], NeedRow]:
    pool = "{}_backward(grad, self, ...): zeros of self's sizes, then a scatter of grad"
    formulas = {
        **{f"MaxPool{d}DWithIndices": pool.format(f"max_pool{d}d_with_indices") for d in (2, 3)},
        **{f"AvgPool{d}D": pool.format(f"avg_pool{d}d") for d in (2, 3)},
        **{f"AdaptiveAvgPool{d}D": pool.format(f"_adaptive_avg_pool{d}d") for d in (2, 3)},
        **{f"AdaptiveMaxPool{d}D": pool.format(f"adaptive_max_pool{d}d") for d in (2, 3)},
        **{f"FractionalMaxPool{d}D": pool.format(f"fractional_max_pool{d}d") for d in (2, 3)},
        **{f"ReflectionPad{d}D": pool.format(f"reflection_pad{d}d") for d in (1, 2, 3)},
        **{f"ReplicationPad{d}D": pool.format(f"replication_pad{d}d") for d in (1, 2, 3)},
        "Gather": "gather_backward(grad, self, dim, index, sparse_grad): zeros of self's sizes, then scatter_add",
        "MaskedSelect": "masked_select_backward(grad, self, mask): zeros like self, then masked_scatter",
        "Take": "take_backward(grad, self, index): zeros like self, then put",
        "Cummax": "cummaxmin_backward(grad, self, indices, dim): zeros of self's sizes, then scatter_add",
        "Cummin": "cummaxmin_backward(grad, self, indices, dim): zeros of self's sizes, then scatter_add",
        "NllLoss": "nll_loss_backward(grad, self, target, ...): zeros of self's sizes, filled by target",
        "NllLoss2D": "nll_loss2d_backward(grad, self, target, ...): zeros of self's sizes, filled by target",
    }
    return {(op, "self"): NeedRow(Need.SHAPE, formula) for op, formula in formulas.items()}


def _sign_rows() -> dict[tuple[str, str], NeedRow]:
    rows: list[tuple[str, tuple[str, ...], str, MaskBuilder]] = [
        ("Relu", ("result",), "threshold_backward(grad, result, 0): not (result <= 0)", _relu),
        ("Threshold", ("self",), "threshold_backward(grad, self, threshold): not (self <= t)", _threshold),
        ("LeakyRelu", ("self", "result"), "leaky_relu_backward(grad, self, slope): self > 0", _leaky_relu),
        (
            "Hardtanh",
            ("self",),
            "hardtanh_backward(grad, self, a, b): not (self <= a or self >= b)",
            _hardtanh,
        ),
        ("Hardsigmoid", ("self",), "hardsigmoid_backward(grad, self): -3 < self < 3", _hardsigmoid),
        ("Hardshrink", ("self",), "hardshrink_backward(grad, self, l): not (-l <= self <= l)", _shrink),
        ("Softshrink", ("self",), "softshrink_backward(grad, self, l): not (-l <= self <= l)", _shrink),
        ("Clamp", ("self",), "clamp_backward(grad, self, a, b): a <= self <= b", _clamp),
        ("ClampMin", ("self",), "where(self >= min, grad, 0)", _clamp_min),
        ("ClampMax", ("self",), "where(self <= max, grad, 0)", _clamp_max),
        ("Abs", ("self",), "grad * self.sgn()", _abs),
        ("NanToNum", ("self",), "grad * isfinite(self)", _nan_to_num),
        ("Nansum", ("self",), "nansum_backward(grad, self, dim, keepdim): not isnan(self)", _nansum),
    ]
    return {(op, role): NeedRow(Need.SIGN, text, mask=mask) for op, roles, text, mask in rows for role in roles}


def _index_rows() -> dict[tuple[str, str], NeedRow]:
    pooled = "the positions that grad is scattered to"
    rows = {(f"MaxPool{d}DWithIndices", "result1"): NeedRow(Need.INDEX, pooled, window=_window) for d in (2, 3)}
    plain = {
        **{(f"AdaptiveMaxPool{d}D", "result1"): pooled for d in (2, 3)},
        **{(f"FractionalMaxPool{d}D", "result1"): pooled for d in (2, 3)},
        **{(f"MaxUnpool{d}D", "indices"): "the positions that grad is gathered from" for d in (2, 3)},
        ("Embedding", "indices"): "embedding_backward(grad, indices, ...): rows that grad is added to",
        ("IndexSelect", "index"): "index_select_backward(grad, sizes, dim, index): rows that grad is added to",
        ("Gather", "index"): "gather_backward(grad, self, dim, index): where grad is added",
        ("NllLoss", "target"): "nll_loss_backward(grad, self, target, ...): where the gradient stands",
        ("NllLoss2D", "target"): "nll_loss2d_backward(grad, self, target, ...): where the gradient stands",
        ("Sort", "indices"): "value_selecting_reduction_backward(grad, dim, indices, ...)",
        ("Topk", "indices"): "value_selecting_reduction_backward(grad, dim, indices, ...)",
    }
    return rows | {key: NeedRow(Need.INDEX, formula) for key, formula in plain.items()}


def _function(functions: Mapping[str, Mapping[str, Any]], node: Any) -> str | None:
    """The name of the function that the node differentiates, found by the scalars that the node saved, or None."""
    for name, scalars in functions.items():
        if all(getattr(node, f"_saved_{scalar}", None) == value for scalar, value in scalars.items()):
            return name
    return None


_ELU = {"alpha": 1.0, "scale": 1.0, "input_scale": 1.0}

FUNCTIONS: dict[tuple[str, str], dict[str, dict[str, Any]]] = {
    ("Gelu", "self"): {"gelu": {"approximate": "none"}, "gelu_tanh": {"approximate": "tanh"}},
    ("Silu", "self"): {"silu": {}},
    ("Elu", "self"): {"elu": _ELU},
    ("Elu", "result"): {"elu_": _ELU},
    ("Tanh", "result"): {"tanh": {}},
    ("Sigmoid", "result"): {"sigmoid": {}},
    ("Softplus", "self"): {"softplus": {"beta": 1.0, "threshold": 20.0}},
}
"""Values that backward reads for the derivative of one function only: the function's name, and its node's scalars."""


TABLE: dict[tuple[str, str], NeedRow] = _shape_rows() | _sign_rows() | _index_rows()
"""The whole table, by (op, role)."""

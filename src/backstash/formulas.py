"""The table of backward formulas: what each one reads of a saved tensor, and what may be done with that.

The names are torch's own: the node ``MaxPool2DWithIndicesBackward0`` has the op ``MaxPool2DWithIndices``, and its
``_saved_result1`` has the role ``result1``. A compiled graph has no nodes, but operators such as
``aten::max_pool2d_with_indices_backward``, which read the same; a row names them, so one table serves both.

A tensor that is not in the table needs its VALUE, and must not be rounded. tests/gradients/test_needs.py proves every
row that reads less: it gives the formula what the row allows, and adversarial values for all the rest.
tests/compile/test_reading.py does the same with the operators. The page on needs in docs/ shows these rows.

Note: [what may be rounded]
    A policy that rounds values has to know what an error does. A weight's gradient is a sum over thousands of rounded
    numbers, whose errors cancel. LINEAR is a value that the formula multiplies by something that does not depend on
    it. The result of a softmax and the input of a norm occur twice in their formulas, once inside a mean over the
    row. The product of their errors is of the order of one element's share of the row, and is neglected. NORMALISED
    is a value of which backward reads ``(value - mean) / deviation`` with exact statistics. Its error counts in units
    of the deviation, so the range of another row must not set its bound. A factor that is broadcast is UNKNOWN: one
    rounded number would be in every term of a sum, so that its error would not cancel, and such a factor takes few
    bytes. In the backward pass of a fused attention, ``P * (grad @ value.T - sum(grad * result))``, P is an
    exponential of queries and keys, and the two terms of the difference are nearly equal. So query, key, value and
    result are SENSITIVE. A value without an effect may be the scale of a norm, the logarithm of a sum, or a divisor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from backstash.codecs.direct import Direct, Factors, MaskBits, Slices, Slopes, WindowOffsets
from backstash.saved import Effect, Mask, Need, PoolWindow, ReadProduct, TensorSpec, Test
from backstash.torch_internals import clamp_passes_bounds

Scalars = Callable[[str], Any]
"""Returns a scalar that a node has saved, or that an operator was called with, by its name.

Raises AttributeError if this version of torch has none of that name.
"""

MaskRule = Callable[[Scalars], Mask | None]
"""Builds the mask of what backward reads; None if the row does not hold for these scalars."""

EffectRule = Callable[[Any, TensorSpec], tuple[Effect, int]]
"""Returns the effect of an error in a value, and its row as in SavedTensor, from the node and the value's spec."""


@dataclass(frozen=True, slots=True)
class Formula:
    """What the backward formula of one op does with one saved tensor.

    Attributes:
        op, role: the autograd node's name without its suffix, and the node's name for the tensor.
        need: how much the formula reads.
        derivative: the formula, as torch's derivatives.yaml states it, where it reads less than the VALUE.
        mask: for SIGN: builds the mask. A tensor that has none needs its VALUE.
        has_window: for INDEX: whether the indices point into windows, whose geometry the node has saved.
        functions: for VALUE: the functions of which it reads the derivative only, as codecs.FewBit names them, each
            with the scalars by which it is recognised.
        effect: how a small error in the value changes the gradients, as far as the op alone tells.
        effect_rule: tells it where it depends on the node, or where more than the fastest dimension shares a scale.
        operators: what reads the tensor in a compiled graph: operators, and their names for the tensor.
        claimed_as: the form of codecs.direct in which a kernel of ``redeem/`` reads the value, or Tensor if it reads
            the whole; None if there is no such kernel.
        factor: where backward reads the tensor for nothing but one product with the gradient, the node's name for what
            the tensor was multiplied by; else empty.
        side: the tensor's place in the product of the forward pass, where there is a ``factor``.
    """

    op: str
    role: str
    need: Need = Need.VALUE
    derivative: str = ""
    mask: MaskRule | None = None
    has_window: bool = False
    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    effect: Effect = Effect.UNKNOWN
    effect_rule: EffectRule | None = None
    operators: tuple[tuple[str, str], ...] = ()
    claimed_as: type[Direct] | type[Tensor] | None = None
    factor: str = ""
    side: Literal["left", "right"] = "left"


@dataclass(frozen=True, slots=True)
class Requirement:
    """A row applied to one saved tensor. All attributes are those of SavedTensor."""

    need: Need
    mask: Mask | None = None
    window: PoolWindow | None = None
    function: str | None = None
    effect: Effect = Effect.UNKNOWN
    row: int = 0
    product: ReadProduct | None = None


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
    formula = FORMULAS.get((op_of(node) if op is None else op, role))
    if formula is None:
        return VALUE

    def scalars(name: str) -> Any:
        return getattr(node, f"_saved_{name}")

    if formula.need is Need.VALUE:
        effect, row = _effect(formula, node, spec)
        product = _product(formula, scalars, specs)
        return Requirement(Need.VALUE, function=function_of(formula, scalars), effect=effect, row=row, product=product)
    try:
        if formula.need is Need.SIGN:
            mask = mask_of_formula(formula, scalars, spec.dtype)
            return VALUE if mask is None else Requirement(Need.SIGN, mask)
        window = _window(scalars, specs["self"], spec) if formula.has_window and "self" in specs else None
        return Requirement(formula.need, window=window)
    except AttributeError:  # this torch version's node does not save the scalar that the row reads
        return VALUE


def mask_of_formula(formula: Formula, scalars: Scalars, dtype: torch.dtype) -> Mask | None:
    """The bits that a formula reads of a tensor of that dtype; None if they are not known."""
    mask = formula.mask(scalars) if formula.mask is not None and dtype.is_floating_point else None
    return mask if mask is not None and mask.fits(dtype) else None


def function_of(formula: Formula, scalars: Scalars) -> str | None:
    """The function of which a formula reads the derivative only, found by its scalars; None if it reads more."""
    for name, expected in formula.functions.items():
        try:
            if all(scalars(scalar) == value for scalar, value in expected.items()):
                return name
        except AttributeError:  # as in requirement_of
            continue
    return None


def _product(formula: Formula, scalars: Scalars, specs: Mapping[str, TensorSpec]) -> ReadProduct | None:
    """Returns the product in which a formula reads the value; None if it reads more of it, or the sizes are not known.

    A node keeps the sizes of its matrices, or, of batches of them, what it has saved of the other factor.
    """
    if not formula.factor:
        return None
    index = -1 if formula.side == "left" else -2
    try:
        other = specs.get(formula.factor)
        sizes = scalars(f"{formula.factor}_sym_sizes") if other is None else other.shape
        return ReadProduct(formula.side, int(sizes[index]))
    except (AttributeError, IndexError, RuntimeError):  # as in requirement_of; a size that is only known as a symbol
        return None


def _effect(formula: Formula, node: Any, spec: TensorSpec) -> tuple[Effect, int]:
    """How an error in a saved value changes the gradients, and how many neighbours in memory share their scale."""
    if formula.effect_rule is None:
        return formula.effect, 0 if formula.effect is Effect.UNKNOWN else _fastest(spec)
    try:
        return formula.effect_rule(node, spec)
    except (AttributeError, IndexError):  # this torch version's node does not save what the rule reads
        return Effect.UNKNOWN, 0


def _scalar(value: Any, default: float) -> float | None:
    """A saved scalar, or ``default`` if it is absent. None for a tensor, which another overload of the op saves."""
    if value is None:
        return default
    return float(value) if isinstance(value, (int, float)) else None


def _relu(scalars: Scalars) -> Mask | None:
    return Mask(Test.NOT_LE, 0.0)


def _threshold(scalars: Scalars) -> Mask | None:
    threshold = scalars("threshold")
    if not isinstance(threshold, (int, float)) or not threshold < math.inf:
        return None
    return Mask(Test.NOT_LE, float(threshold), if_set=math.inf, if_clear=float(threshold))


def _leaky_relu(scalars: Scalars) -> Mask | None:
    return Mask(Test.GT, 0.0)


def _hardtanh(scalars: Scalars) -> Mask | None:
    low, high = float(scalars("min_val")), float(scalars("max_val"))
    middle = low / 2 + high / 2
    return Mask(Test.NOT_OUTSIDE, low, high, if_set=middle, if_clear=low, nan=True) if low < middle < high else None


def _hardsigmoid(scalars: Scalars) -> Mask | None:
    return Mask(Test.INSIDE, -3.0, 3.0, if_set=0.0, if_clear=3.0)


def _shrink(scalars: Scalars) -> Mask | None:
    edge = float(scalars("lambd"))
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


def _clamp(scalars: Scalars) -> Mask | None:
    if clamp_passes_bounds:
        return _closed(_scalar(scalars("min"), -math.inf), _scalar(scalars("max"), math.inf))
    if scalars("max") is None:
        return _clamp_min(scalars)
    # No test of a mask is "below a bound", -inf included.
    return None if scalars("min") is None else _open(_scalar(scalars("min"), 0.0), _scalar(scalars("max"), 0.0))


def _clamp_min(scalars: Scalars) -> Mask | None:
    low = _scalar(scalars("min"), -math.inf)
    return _closed(low, math.inf) if clamp_passes_bounds else _above(low)


def _clamp_max(scalars: Scalars) -> Mask | None:
    return _closed(-math.inf, _scalar(scalars("max"), math.inf)) if clamp_passes_bounds else None


def _abs(scalars: Scalars) -> Mask | None:
    return Mask(Test.GT, 0.0, ternary=True)


def _nan_to_num(scalars: Scalars) -> Mask | None:
    return Mask(Test.INSIDE, -math.inf, math.inf, if_set=0.0, if_clear=math.inf)


def _nansum(scalars: Scalars) -> Mask | None:
    return Mask(Test.CLOSED, -math.inf, math.inf, if_set=0.0, if_clear=math.nan)


def _window(scalars: Scalars, source: TensorSpec, indices: TensorSpec) -> PoolWindow | None:
    dims = len(scalars("kernel_size"))

    def each(sizes: tuple[int, ...], default: tuple[int, ...]) -> tuple[int, ...]:
        sizes = tuple(sizes) or default
        return sizes * dims if len(sizes) == 1 else sizes

    kernel = each(scalars("kernel_size"), ())
    return PoolWindow(
        input_size=source.shape[-dims:],
        kernel=kernel,
        stride=each(scalars("stride"), kernel),
        padding=each(scalars("padding"), (0,)),
        dilation=each(scalars("dilation"), (1,)),
    )


def neighbours(spec: TensorSpec, dims: tuple[int, ...]) -> int:
    """The length of the longest run in memory whose elements differ in their positions in ``dims`` only."""
    length = 1
    for stride, dim in sorted((stride, dim) for dim, stride in enumerate(spec.stride) if spec.shape[dim] != 1):
        if dim not in dims or stride != length:
            break
        length *= spec.shape[dim]
    return length


def _factor(node: Any, spec: TensorSpec) -> tuple[Effect, int]:
    """An operand of a product or a quotient is LINEAR if it is as large as the result, and so is not broadcast."""
    result = math.prod(node._input_metadata[0].shape)
    return (Effect.LINEAR, _fastest(spec)) if spec.numel == result else (Effect.UNKNOWN, 0)


def _power(node: Any, spec: TensorSpec) -> tuple[Effect, int]:
    """The base of a square is NORMALISED: most squares begin a norm or a variance. Other powers may have a pole."""
    exponent = node._saved_exponent
    if isinstance(exponent, Tensor):  # an overload whose exponent is a tensor
        return Effect.UNKNOWN, 0
    if exponent == 2:
        return Effect.NORMALISED, neighbours(spec, (len(spec.shape) - 1,))
    return (Effect.SENSITIVE, _fastest(spec)) if exponent == 3 else (Effect.UNKNOWN, 0)


def _channels(node: Any, spec: TensorSpec) -> tuple[Effect, int]:
    """The input of a batch norm. Neighbours in memory of the same channel share its statistics."""
    return Effect.NORMALISED, neighbours(spec, tuple(range(2, len(spec.shape))))


def _layers(node: Any, spec: TensorSpec) -> tuple[Effect, int]:
    """The input of a layer norm or a fused RMS norm. All features of one position share their statistics."""
    dims = len(spec.shape)
    return Effect.NORMALISED, neighbours(spec, tuple(range(dims - len(node._saved_normalized_shape), dims)))


def _groups(node: Any, spec: TensorSpec) -> tuple[Effect, int]:
    """The input of a group norm. The channels of a group share their statistics if they are neighbours in memory."""
    image = neighbours(spec, tuple(range(2, len(spec.shape))))
    group = spec.shape[1] // node._saved_group * math.prod(spec.shape[2:])
    return Effect.NORMALISED, group if image == math.prod(spec.shape[2:]) else image


def _fastest(spec: TensorSpec) -> int:
    """The size of the dimension whose stride is 1."""
    return next((size for size, stride in zip(spec.shape, spec.stride, strict=True) if stride == 1 and size != 1), 0)


def _aten(operator: str, *arguments: str) -> tuple[tuple[str, str], ...]:
    """An operator of a compiled graph, with its names for the tensor."""
    return tuple((f"aten::{operator}", argument) for argument in arguments)


def _shapes() -> Iterator[Formula]:
    """What backward only makes a tensor of the same shape for."""
    pool = "{}(grad, self, ...): zeros of self's sizes, then a scatter of grad"
    named = {
        **{f"MaxPool{d}DWithIndices": f"max_pool{d}d_with_indices_backward" for d in (2, 3)},
        **{f"AvgPool{d}D": f"avg_pool{d}d_backward" for d in (2, 3)},
        **{f"AdaptiveAvgPool{d}D": f"_adaptive_avg_pool{d}d_backward" for d in (2, 3)},
        **{f"AdaptiveMaxPool{d}D": f"adaptive_max_pool{d}d_backward" for d in (2, 3)},
        **{f"FractionalMaxPool{d}D": f"fractional_max_pool{d}d_backward" for d in (2, 3)},
        **{f"ReflectionPad{d}D": f"reflection_pad{d}d_backward" for d in (1, 2, 3)},
        **{f"ReplicationPad{d}D": f"replication_pad{d}d_backward" for d in (1, 2, 3)},
    }
    for op, operator in named.items():
        yield Formula(op, "self", Need.SHAPE, pool.format(operator), operators=_aten(operator, "self"))
    for op, operator in (("NllLoss", "nll_loss_backward"), ("NllLoss2D", "nll_loss2d_backward")):
        derivative = f"{operator}(grad, self, target, ...): zeros of self's sizes, filled by target"
        yield Formula(op, "self", Need.SHAPE, derivative, operators=_aten(operator, "self"))
    for op, derivative in {
        "Gather": "gather_backward(grad, self, dim, index, sparse_grad): zeros of self's sizes, then scatter_add",
        "MaskedSelect": "masked_select_backward(grad, self, mask): zeros like self, then masked_scatter",
        "Take": "take_backward(grad, self, index): zeros like self, then put",
        "Cummax": "cummaxmin_backward(grad, self, indices, dim): zeros of self's sizes, then scatter_add",
        "Cummin": "cummaxmin_backward(grad, self, indices, dim): zeros of self's sizes, then scatter_add",
    }.items():
        yield Formula(op, "self", Need.SHAPE, derivative)


def _signs() -> Iterator[Formula]:
    """What backward compares with a threshold. A compiled relu's backward is a threshold's."""

    def sign(op: str, role: str, derivative: str, mask: MaskRule, **others: Any) -> Formula:
        return Formula(op, role, Need.SIGN, derivative, mask, **others)

    yield sign("Relu", "result", "threshold_backward(grad, result, 0): not (result <= 0)", _relu, claimed_as=MaskBits)
    yield sign(
        "Threshold",
        "self",
        "threshold_backward(grad, self, threshold): not (self <= t)",
        _threshold,
        operators=_aten("threshold_backward", "self"),
        claimed_as=MaskBits,
    )
    for role in ("self", "result"):
        yield sign(
            "LeakyRelu",
            role,
            "leaky_relu_backward(grad, self, slope): self > 0",
            _leaky_relu,
            operators=_aten("leaky_relu_backward", "self"),
            claimed_as=Slopes,
        )
    yield sign(
        "Hardtanh",
        "self",
        "hardtanh_backward(grad, self, a, b): not (self <= a or self >= b)",
        _hardtanh,
        operators=_aten("hardtanh_backward", "self"),
        claimed_as=MaskBits,
    )
    yield sign(
        "Hardsigmoid",
        "self",
        "hardsigmoid_backward(grad, self): -3 < self < 3",
        _hardsigmoid,
        operators=_aten("hardsigmoid_backward", "self"),
        claimed_as=Tensor,
    )
    for op, operator in (("Hardshrink", "hardshrink_backward"), ("Softshrink", "softshrink_backward")):
        derivative = f"{operator}(grad, self, l): not (-l <= self <= l)"
        yield sign(op, "self", derivative, _shrink, operators=_aten(operator, "self"))
    yield sign("Clamp", "self", "clamp_backward(grad, self, a, b): a <= self <= b", _clamp)
    yield sign("ClampMin", "self", "where(self >= min, grad, 0)", _clamp_min)
    yield sign("ClampMax", "self", "where(self <= max, grad, 0)", _clamp_max)
    yield sign("Abs", "self", "grad * self.sgn()", _abs, operators=(*_aten("sgn", "self"), *_aten("sign", "self")))
    yield sign("NanToNum", "self", "grad * isfinite(self)", _nan_to_num)
    yield sign("Nansum", "self", "nansum_backward(grad, self, dim, keepdim): not isnan(self)", _nansum)


def _indices() -> Iterator[Formula]:
    """Integers that say where a gradient belongs."""
    pooled = "the positions that grad is scattered to"
    yield Formula("MaxPool2DWithIndices", "result1", Need.INDEX, pooled, has_window=True, claimed_as=WindowOffsets)
    yield Formula("MaxPool3DWithIndices", "result1", Need.INDEX, pooled, has_window=True)
    for d in (2, 3):
        yield Formula(f"AdaptiveMaxPool{d}D", "result1", Need.INDEX, pooled)
        yield Formula(f"FractionalMaxPool{d}D", "result1", Need.INDEX, pooled)
        yield Formula(f"MaxUnpool{d}D", "indices", Need.INDEX, "the positions that grad is gathered from")
    for op, role, derivative in (
        ("Embedding", "indices", "embedding_backward(grad, indices, ...): rows that grad is added to"),
        ("IndexSelect", "index", "index_select_backward(grad, sizes, dim, index): rows that grad is added to"),
        ("Gather", "index", "gather_backward(grad, self, dim, index): where grad is added"),
        ("NllLoss", "target", "nll_loss_backward(grad, self, target, ...): where the gradient stands"),
        ("NllLoss2D", "target", "nll_loss2d_backward(grad, self, target, ...): where the gradient stands"),
        ("Sort", "indices", "value_selecting_reduction_backward(grad, dim, indices, ...)"),
        ("Topk", "indices", "value_selecting_reduction_backward(grad, dim, indices, ...)"),
    ):
        yield Formula(op, role, Need.INDEX, derivative)


def _products() -> Iterator[Formula]:
    """What a gradient is multiplied with."""

    def linear(op: str, role: str, *operators: tuple[str, str], **known: Any) -> Formula:
        return Formula(op, role, effect=Effect.LINEAR, operators=operators, **known)

    yield linear("Convolution", "input", *_aten("convolution_backward", "input"), claimed_as=Slices)
    yield linear("Linear", "input")
    yield linear("Addmm", "mat1", *_aten("addmm", "mat1"), claimed_as=Tensor, factor="mat2")
    yield linear("Addmm", "mat2", *_aten("addmm", "mat2"), factor="mat1", side="right")
    yield linear("Mm", "self", *_aten("mm", "self"), claimed_as=Tensor, factor="mat2")
    yield linear("Mm", "mat2", *_aten("mm", "mat2"), factor="self", side="right")
    yield linear("Bmm", "self", *_aten("bmm", "self"), factor="mat2")
    yield linear("Bmm", "mat2", *_aten("bmm", "mat2"), factor="self", side="right")
    for op in ("Baddbmm", "Addbmm"):
        yield linear(op, "batch1")
        yield linear(op, "batch2")
    yield linear("Softmax", "result", *_aten("_softmax_backward_data", "output"), claimed_as=Tensor)
    yield linear("SafeSoftmax", "result")
    yield Formula("LogSoftmax", "result", claimed_as=Tensor)
    yield Formula("NativeDropout", "result1", claimed_as=MaskBits)
    yield Formula("Mul", "self", effect_rule=_factor, claimed_as=Factors)
    yield Formula("Mul", "other", effect_rule=_factor, claimed_as=Factors)
    yield Formula("Div", "self", effect_rule=_factor)
    yield Formula("Addcmul", "tensor1", effect_rule=_factor)
    yield Formula("Addcmul", "tensor2", effect_rule=_factor)
    yield Formula("Pow", "self", effect_rule=_power)


_ELU = {"alpha": 1.0, "scale": 1.0, "input_scale": 1.0}


def _curves() -> Iterator[Formula]:
    """What backward takes a function's derivative of."""

    def curve(op: str, role: str, operator: str, argument: str, functions: Any = None) -> Formula:
        formula = Formula(op, role, effect=Effect.SENSITIVE, operators=_aten(operator, argument))
        return formula if functions is None else replace(formula, functions=functions, claimed_as=Slopes)

    gelu = {"gelu": {"approximate": "none"}, "gelu_tanh": {"approximate": "tanh"}}
    softplus = {"softplus": {"beta": 1.0, "threshold": 20.0}}
    yield curve("Gelu", "self", "gelu_backward", "self", gelu)
    yield curve("Silu", "self", "silu_backward", "self", {"silu": {}})
    yield curve("Elu", "self", "elu_backward", "self_or_result", {"elu": _ELU})
    yield curve("Elu", "result", "elu_backward", "self_or_result", {"elu_": _ELU})
    yield curve("Tanh", "result", "tanh_backward", "output", {"tanh": {}})
    yield curve("Sigmoid", "result", "sigmoid_backward", "output", {"sigmoid": {}})
    yield curve("Softplus", "self", "softplus_backward", "self", softplus)
    yield curve("LogSigmoid", "self", "log_sigmoid_backward", "self")
    yield curve("Mish", "self", "mish_backward", "self")
    yield curve("Hardswish", "self", "hardswish_backward", "self")
    for kind in ("FlashAttentionForCpu", "FlashAttention", "EfficientAttention", "CudnnAttention"):
        for role in ("query", "key", "value", "output"):  # a backward pass that computes the softmax again
            yield Formula(f"ScaledDotProduct{kind}", role, effect=Effect.SENSITIVE)


def _norms() -> Iterator[Formula]:
    """The inputs of norms, of which backward reads the deviations from a mean."""

    def norm(op: str, rule: EffectRule, operator: str = "", claimed_as: Any = None) -> Formula:
        operators, effect = _aten(operator, "input") if operator else (), Effect.NORMALISED
        return Formula(op, "input", effect=effect, effect_rule=rule, operators=operators, claimed_as=claimed_as)

    yield norm("NativeBatchNorm", _channels, "native_batch_norm_backward", Tensor)
    yield norm("CudnnBatchNorm", _channels)
    yield norm("MiopenBatchNorm", _channels)
    yield norm("NativeLayerNorm", _layers, "native_layer_norm_backward", Tensor)
    yield norm("FusedRmsNorm", _layers, "_fused_rms_norm_backward")
    yield norm("NativeGroupNorm", _groups, "native_group_norm_backward", Tensor)


FORMULAS: dict[tuple[str, str], Formula] = {
    (formula.op, formula.role): formula
    for rows in (_shapes(), _signs(), _indices(), _products(), _curves(), _norms())
    for formula in rows
}
"""The whole table, by (op, role)."""


def _by_operator() -> dict[tuple[str, str], Formula]:
    """The rows by the operators that they name.

    Two rows may name the same one, if they read the same. Then the function whose derivative it reads is not known.
    """
    found: dict[tuple[str, str], Formula] = {}
    for formula in FORMULAS.values():
        for entry in formula.operators:
            found[entry] = replace(formula, functions={}) if entry in found else formula
    return found


OPERATORS: dict[tuple[str, str], Formula] = _by_operator()
"""The rows that compiled graphs have, by the operator and its name for the tensor."""

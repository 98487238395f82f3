"""The change of the gradients by an error in a saved value: a table from (autograd node, saved name) to Effect.

A policy that rounds values has to know the effect. A weight's gradient is a sum over thousands of rounded numbers,
whose errors cancel. The backward pass of an attention puts its saved queries and keys through an exponential, where
errors do not cancel. A value that is not in the table may be the scale of a norm, the logarithm of a sum, or a divisor,
and should not be rounded.

Note: [what may be rounded]
    LINEAR is a value that the formula multiplies by something that does not depend on it. The result of a softmax and
    the input of a norm occur twice in their formulas, once inside a mean over the row. The product of their errors is
    of the order of one element's share of the row, and is neglected. NORMALISED is a value of which backward reads
    ``(value - mean) / deviation`` with exact statistics. Its error counts in units of the deviation, so the range of
    another row must not set its bound. A factor that is broadcast is UNKNOWN: one rounded number would be in every term
    of a sum, so that its error would not cancel, and such a factor takes few bytes. In the backward pass of a fused
    attention, ``P * (grad @ value.T - sum(grad * result))``, P is an exponential of queries and keys, and the two terms
    of the difference are nearly equal. So query, key, value and result are SENSITIVE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from backstash.saved import Effect, TensorSpec

EffectRule = Callable[[Any, TensorSpec], tuple[Effect, int]]


def of(node: Any, op: str, role: str, spec: TensorSpec) -> tuple[Effect, int]:
    """How an error in a saved value changes the gradients, and how many neighbours in memory share their scale.

    Args:
        node: the autograd node that saved the value.
        op: the node's name.
        role: the node's name for the value.
        spec: the value's spec.

    Returns:
        The effect and the row length in elements, as in SavedTensor.
    """
    kind = EFFECTS.get((op, role))
    if kind is None:
        return Effect.UNKNOWN, 0
    try:
        return kind(node, spec)
    except (AttributeError, IndexError):  # this torch version's node does not save what the kind reads
        return Effect.UNKNOWN, 0


def neighbours(spec: TensorSpec, dims: tuple[int, ...]) -> int:
    """The length of the longest run in memory whose elements differ in their positions in ``dims`` only."""
    length = 1
    for stride, dim in sorted((stride, dim) for dim, stride in enumerate(spec.stride) if spec.shape[dim] != 1):
        if dim not in dims or stride != length:
            break
        length *= spec.shape[dim]
    return length


def _linear(node: Any, spec: TensorSpec) -> tuple[Effect, int]:
    return Effect.LINEAR, _fastest(spec)


def _sensitive(node: Any, spec: TensorSpec) -> tuple[Effect, int]:
    return Effect.SENSITIVE, _fastest(spec)


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


def _rows() -> dict[tuple[str, str], EffectRule]:
    linear = {
        "Convolution": ("input",),
        "Addmm": ("mat1", "mat2"),
        "Mm": ("self", "mat2"),
        "Bmm": ("self", "mat2"),
        "Baddbmm": ("batch1", "batch2"),
        "Addbmm": ("batch1", "batch2"),
        "Linear": ("input",),
        "Softmax": ("result",),
        "SafeSoftmax": ("result",),
    }
    sensitive = {
        **dict.fromkeys(ATTENTIONS, ("query", "key", "value", "output")),
        "Gelu": ("self",),
        "Silu": ("self",),
        "Elu": ("self", "result"),
        "Tanh": ("result",),
        "Sigmoid": ("result",),
        "Softplus": ("self",),
        "LogSigmoid": ("self",),
        "Mish": ("self",),
        "Hardswish": ("self",),
    }
    factors = {"Mul": ("self", "other"), "Div": ("self",), "Addcmul": ("tensor1", "tensor2")}
    norms = {
        **dict.fromkeys(("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"), _channels),
        **dict.fromkeys(("NativeLayerNorm", "FusedRmsNorm"), _layers),
        "NativeGroupNorm": _groups,
    }
    tables: tuple[tuple[Mapping[str, tuple[str, ...]], EffectRule], ...] = (
        (linear, _linear),
        (sensitive, _sensitive),
        (factors, _factor),
        ({"Pow": ("self",)}, _power),
    )
    rows = {(op, role): kind for table, kind in tables for op, roles in table.items() for role in roles}
    return rows | {(op, "input"): kind for op, kind in norms.items()}


ATTENTIONS = (
    "ScaledDotProductFlashAttentionForCpu",
    "ScaledDotProductFlashAttention",
    "ScaledDotProductEfficientAttention",
    "ScaledDotProductCudnnAttention",
)
"""Attentions whose backward pass computes the softmax again."""

EFFECTS: dict[tuple[str, str], EffectRule] = _rows()
"""The whole table, by (op, role)."""

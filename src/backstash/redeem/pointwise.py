"""Pointwise formulas: the gradient is zeroed by mask bits, or ATen's own kernel writes over it.

A relu, threshold or hardtanh reads the mask's bits, and nothing is decoded. Where the value itself is read, ATen
computes, and writes over the gradient if nobody else holds it. Formulas that read codes are in :mod:`factors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from backstash.codecs.base import flat, is_dense
from backstash.codecs.direct import MaskBits
from backstash.ops.backends import serving
from backstash.proofs import proofs
from backstash.redeem.claims import Claim, redeems

_aten = torch.ops.aten

SELECTED = (torch.float32, torch.float64, torch.float16)
"""Element types for which zeroing leaves a NaN in the gradient as it is.

Of bfloat16 ATen's vectors change its bits on a CPU. What an accelerator does is found out.
"""


def same_order(grad: Tensor, x: Tensor) -> bool:
    """Whether element i in memory is the same element of both."""
    return grad.shape == x.shape and grad.stride() == x.stride() and is_dense(tuple(x.shape), x.stride())


@redeems(_aten.threshold_backward.default)
@redeems(_aten.hardtanh_backward.default)
def masked(
    claim: Claim, aten: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool
) -> Tensor:
    """The gradient, zeroed where a bit is clear."""
    grad, stashed = args[0], claim.stashed
    is_selected = grad.dtype in SELECTED or (grad.dtype is torch.bfloat16 and _leaves_nan(grad.device))
    mask = stashed.direct(MaskBits) if is_selected and same_order(grad, claim) else None
    if mask is not None:
        out = grad if alone else torch.empty_like(grad)
        given = flat(grad)
        serving(grad.device.type).mask_select(given, mask.bits, given if alone else flat(out))
        stashed.release()
        return out
    return written(claim, aten, args, kwargs, alone)


def _leaves_nan(device: torch.device) -> bool:
    """Whether a relu's backward on an accelerator leaves the bits of each NaN of a bfloat16 gradient."""

    def prove() -> bool:
        patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device=device).to(torch.int16)
        found = _aten.threshold_backward(
            patterns.view(torch.bfloat16), torch.ones_like(patterns.view(torch.bfloat16)), 0
        )
        return torch.equal(found.view(torch.int16), patterns)

    return device.type != "cpu" and proofs.ask("bits of NaN", (torch.bfloat16,), prove, device_type=device.type)


@redeems(_aten._softmax_backward_data.default)
@redeems(_aten._log_softmax_backward_data.default)
def softmax_backward(
    claim: Claim, aten: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool
) -> Tensor:
    """As :func:`written`; ATen may write over the gradient only along the last dimension."""
    grad, _, dim, dtype = args
    return written(claim, aten, args, kwargs, alone and dim in (-1, grad.dim() - 1) and dtype is grad.dtype)


_OUT: dict[Callable[..., Tensor], Any] = {
    getattr(_aten, op).default: getattr(getattr(_aten, op), overload)
    for overload, ops in {
        "out": "_softmax_backward_data _log_softmax_backward_data",
        "grad_input": "threshold_backward hardtanh_backward leaky_relu_backward gelu_backward silu_backward "
        "elu_backward tanh_backward sigmoid_backward softplus_backward hardsigmoid_backward",
    }.items()
    for op in ops.split()
}
"""Of each op the overload that writes into memory that it is given."""


def written(
    claim: Claim, aten: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool
) -> Tensor:
    """ATen's gradient, in the incoming gradient's memory if nobody else holds that."""
    grad, whole = args[0], claim.whole()
    given = with_whole(whole, claim, args)
    if alone and same_order(grad, whole) and grad.dtype is whole.dtype:
        overload = _OUT[aten]
        result: Tensor = overload(*given, **kwargs, **{overload._schema.arguments[-1].name: grad})
    else:
        result = aten(*given, **kwargs)
    del whole, given
    claim.stashed.release()
    return result


redeems(_aten.hardsigmoid_backward.default, call="silu")(written)


def with_whole(whole: Tensor, claim: Claim, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with a tensor in the claim's place."""
    return tuple(whole if arg is claim else arg for arg in args)

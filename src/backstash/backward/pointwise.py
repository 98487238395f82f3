"""Pointwise formulas: the gradient is zeroed by bits, multiplied code by code, or written over by ATen's own kernel.

A relu, threshold or hardtanh reads the mask's bits; where the gradient is multiplied by one of a few factors (dropout's
noise, or what few-bit codes stand for) it is multiplied by the factor of each code. Nothing is decoded. Where the
value itself is read, ATen computes, and writes over the gradient if nobody else holds it.

Note: [factors]
    The gradient of a product is a product, so a claim for a factor (dropout's noise) is asked for ``aten::mul``. The
    node of a product with two factors that need gradients multiplies one gradient twice: that one is not overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from backstash.backward.claims import Claim, redeems
from backstash.codecs.base import flat, is_dense
from backstash.codecs.bitmask import Binary, Bitmask
from backstash.codecs.fewbit import FewBit
from backstash.ops import cpu
from backstash.torch_internals import running_node

_aten = torch.ops.aten

SELECTED = (torch.float32, torch.float64, torch.float16)
"""Where zeroing leaves a NaN in the gradient as it is: for bfloat16 ATen's vectors give it other bits."""

SCALED = (torch.float32, torch.float64)
"""Where a product is one multiplication."""

_PRODUCT = "MulBackward0"


def same_order(grad: Tensor, x: Tensor) -> bool:
    """Whether element i in memory is the same element of both."""
    return grad.shape == x.shape and grad.stride() == x.stride() and is_dense(tuple(x.shape), x.stride())


# -- zeroed by bits --------------------------------------------------------------------------------------------------


@redeems(_aten.threshold_backward.default)
@redeems(_aten.hardtanh_backward.default)
def masked(claim: Claim, aten: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool) -> Tensor:
    """The gradient, zeroed where a bit is clear."""
    grad, stashed = args[0], claim.stashed
    known = stashed.encoded()
    if known is not None and grad.dtype in SELECTED and same_order(grad, claim):
        codec, encoded = known
        if isinstance(codec, Bitmask) and set(encoded.planes) == {"mask"}:  # no plane of NaNs or of a third value
            out = grad if alone else torch.empty_like(grad)
            if cpu.mask_select(flat(grad), encoded.planes["mask"], flat(out)):
                stashed.release()
                return out
    return written(claim, aten, args, kwargs, alone)


# -- multiplied code by code -----------------------------------------------------------------------------------------


@redeems(_aten.leaky_relu_backward.default)
@redeems(_aten.gelu_backward.default)
@redeems(_aten.silu_backward.default, call="silu")
@redeems(_aten.elu_backward.default, position=5)
@redeems(_aten.tanh_backward.default)
@redeems(_aten.sigmoid_backward.default)
@redeems(_aten.softplus_backward.default)
def coded(claim: Claim, aten: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool) -> Tensor:
    """The gradient times the derivative at what each code stands for, where the derivative depends on the code alone.

    It is rounded as ATen rounds the derivative and then the product. Where ATen multiplies in another order (silu,
    sigmoid), few-bit codes differ from decoding first by that rounding; the bits of leaky_relu do not.
    """
    grad, stashed = args[0], claim.stashed
    alike = grad.dtype is claim.dtype and grad.dtype in SCALED and same_order(grad, claim)
    known = stashed.encoded() if alike else None
    if known is not None:
        codec, encoded = known
        packed = encoded.planes.get("packed" if isinstance(codec, FewBit) else "mask")
        if packed is not None and isinstance(codec, (FewBit, Bitmask)):
            at = torch.tensor(codec.stand_ins, dtype=grad.dtype, device="cpu")
            derivatives = aten(torch.ones_like(at), *_with(at, claim, args)[1:], **kwargs)
            out = scaled(grad, packed, derivatives, alone)
            if out is not None:
                stashed.release()
                return out
    return written(claim, aten, args, kwargs, alone)


@redeems(_aten.mul.Tensor, call="product")
def multiplied(claim: Claim, aten: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool) -> Tensor:
    """The gradient of a product with a stored factor (Note: [factors])."""
    grad, stashed = args[0], claim.stashed
    node = running_node()
    if alone:
        only = node is not None and sum(following is not None for following, _ in node.next_functions) == 1
        alone = only and type(node).__name__ == _PRODUCT
    known = stashed.encoded()
    alike = grad.dtype is claim.dtype and same_order(grad, claim)
    if known is not None and isinstance(known[0], Binary) and alike:
        out = scaled(grad, known[1].planes["mask"], known[1].planes["pair"], alone)
        if out is not None:
            stashed.release()
            return out
    whole = stashed.whole()
    return torch.mul(grad, whole, out=grad) if alone and alike else torch.mul(grad, whole)


def scaled(grad: Tensor, packed: Tensor, table: Tensor, alone: bool) -> Tensor | None:
    """The gradient times what each code stands for; None where the bits might not be those of ATen's product."""
    if grad.dtype not in SCALED or table.isnan().any():  # of two NaN either may stay
        return None
    out = grad if alone else torch.empty_like(grad)
    if not alone:
        cpu.advise_huge(out)
    return out if cpu.scale_by_codes(flat(grad), packed, table, flat(out)) else None


# -- written over ----------------------------------------------------------------------------------------------------


@redeems(_aten._softmax_backward_data.default)
@redeems(_aten._log_softmax_backward_data.default)
def softmax_backward(claim: Claim, aten: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool) -> Tensor:
    """As :func:`written`; ATen may write over the gradient only along the last dimension."""
    grad, _, dim, dtype = args
    return written(claim, aten, args, kwargs, alone and dim in (-1, grad.dim() - 1) and dtype is grad.dtype)


_OUT = {
    getattr(_aten, op).default: getattr(getattr(_aten, op), overload)
    for overload, ops in {
        "out": "_softmax_backward_data _log_softmax_backward_data",
        "grad_input": "threshold_backward hardtanh_backward leaky_relu_backward gelu_backward silu_backward "
        "elu_backward tanh_backward sigmoid_backward softplus_backward hardsigmoid_backward",
    }.items()
    for op in ops.split()
}
"""The overloads that write into memory that they are given."""


def written(claim: Claim, aten: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool) -> Tensor:
    """ATen's gradient, in the incoming gradient's memory if nobody else holds that."""
    grad, whole = args[0], claim.whole()
    given = _with(whole, claim, args)
    if alone and same_order(grad, whole) and grad.dtype is whole.dtype:
        overload = _OUT[aten]
        made: Tensor = overload(*given, **kwargs, **{overload._schema.arguments[-1].name: grad})
    else:
        made = aten(*given, **kwargs)
    del whole, given
    claim.stashed.release()
    return made


redeems(_aten.hardsigmoid_backward.default, call="silu")(written)


def _with(x: Tensor, claim: Claim, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with ``x`` in the claim's place."""
    return tuple(x if arg is claim else arg for arg in args)

"""The gradient is multiplied by the number that each element's code stands for; nothing is decoded.

The codes are those of dropout, which have two values, and of few-bit codecs, which store at which of a few
points an activation's derivative is taken.

Note: [factors]
    The gradient of a product is a product, so a claim for a factor (dropout's noise) is asked for ``aten::mul``. The
    node of a product with two factors that need gradients multiplies one gradient twice: it is not overwritten there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from backstash import graphs
from backstash.codecs.base import flat
from backstash.codecs.direct import Factors, MaskBits, Slopes
from backstash.ops.backends import advise_huge, serving
from backstash.redeem.claims import Claim, redeems
from backstash.redeem.pointwise import same_order, with_whole, written
from backstash.torch_internals import running_node

_aten = torch.ops.aten

SCALED = (torch.float32, torch.float64)
"""Element types whose product is one multiplication in ATen."""

_PRODUCT = "MulBackward0"


@redeems(_aten.leaky_relu_backward.default)
@redeems(_aten.gelu_backward.default)
@redeems(_aten.silu_backward.default, call="silu")
@redeems(_aten.elu_backward.default, position=5)
@redeems(_aten.tanh_backward.default)
@redeems(_aten.sigmoid_backward.default)
@redeems(_aten.softplus_backward.default)
def times_slopes(
    claim: Claim, aten: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool
) -> Tensor:
    """The gradient times the derivative at each code's point.

    The derivative is rounded first and then the product, as in ATen. Where ATen multiplies in another order (silu,
    sigmoid), few-bit codes differ from decoding first by that rounding; the bits of leaky_relu do not.
    """
    grad, stashed = args[0], claim.stashed
    alike = grad.dtype is claim.dtype and grad.dtype in SCALED and same_order(grad, claim)
    slopes = stashed.direct(Slopes) if alike else None
    if slopes is not None:
        points = slopes.points if grad.is_cpu else _points_on(grad.device, slopes.points)
        given = with_whole(points, claim, args)[1:]
        derivatives = aten(torch.ones_like(points), *given, **kwargs)
        out = scaled(grad, slopes.packed, derivatives, alone)
        if out is not None:
            stashed.release()
            return out
    return written(claim, aten, args, kwargs, alone)


def _points_on(device: torch.device, points: Tensor) -> Tensor:
    """The points on an accelerator, whose own functions are taken there. The host does not wait: nothing is copied."""
    key = device, points.dtype, tuple(points.tolist())
    known = _points.get(key)
    if known is None:
        known = torch.stack([torch.full((), point, dtype=points.dtype, device=device) for point in key[2]])
        if graphs.capture() is None:  # else they are there in replays alone
            _points[key] = known
    return known


_points: dict[tuple[torch.device, torch.dtype, tuple[float, ...]], Tensor] = {}


@redeems(_aten.mul.Tensor, call="product")
def times_factors(
    claim: Claim, aten: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool
) -> Tensor:
    """The gradient of a product with a stored factor (Note: [factors])."""
    grad, stashed = args[0], claim.stashed
    if alone:
        node = running_node()
        only = node is not None and sum(following is not None for following, _ in node.next_functions) == 1
        alone = only and type(node).__name__ == _PRODUCT
    alike = grad.dtype is claim.dtype and same_order(grad, claim)
    factors = stashed.direct(Factors) if alike else None
    if factors is not None:
        out = scaled(grad, factors.packed, factors.values, alone)
        if out is not None:
            stashed.release()
            return out
    whole = stashed.whole()
    return torch.mul(grad, whole, out=grad) if alone and alike else torch.mul(grad, whole)


@redeems(_aten.native_dropout_backward.default, call=None)
def dropped(
    claim: Claim, aten: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool
) -> Tensor:
    """The gradient of a dropout that has saved a bool for each element: times the scale where it is set, else zero."""
    grad, _, scale = args
    stashed = claim.stashed
    kept = stashed.direct(MaskBits) if grad.dtype in SCALED and same_order(grad, claim) else None
    if kept is not None:
        factors = torch.tensor((0.0, scale), dtype=grad.dtype, device="cpu")
        out = scaled(grad, kept.bits, factors if grad.is_cpu else _points_on(grad.device, factors), alone=False)
        if out is not None:
            stashed.release()
            return out
    whole = stashed.whole()
    result = aten(grad, whole, scale, **kwargs)
    del whole
    stashed.release()
    return result


def scaled(grad: Tensor, packed: Tensor, table: Tensor, alone: bool) -> Tensor | None:
    """The gradient times what each code stands for; None where the bits might not be those of ATen's product."""
    if grad.dtype not in SCALED or (table.is_cpu and table.isnan().any()):
        return None  # of two NaNs either may stay; on an accelerator a product has one NaN
    out = grad if alone else torch.empty_like(grad)
    if not alone and out.is_cpu:
        advise_huge(out)
    serving(grad.device.type).scale_by_codes(flat(grad), packed, table, flat(out))
    return out

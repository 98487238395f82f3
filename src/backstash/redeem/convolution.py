"""A convolution's backward: the weight's gradient, then the input is freed, then the input's gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from backstash.codecs.direct import Slices
from backstash.codecs.shape import stand_in
from backstash.redeem.claims import Claim, Gradients, redeems


@redeems(torch.ops.aten.convolution_backward.default)
def convolution_backward(
    claim: Claim, aten: Callable[..., Gradients], args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool
) -> Gradients:
    """Gradients of input, weight and bias."""
    grad, _, weight, bias, *geometry, (of_input, of_weight, of_bias) = args
    stashed = claim.stashed
    weight_grad = bias_grad = input_grad = None
    sizes = stand_in(claim.spec)  # the input's gradient depends on no more of the input than its sizes
    slices = stashed.direct(Slices) if of_weight else None
    if slices is not None:
        return _by_slices(aten, slices, grad, sizes, weight, bias, geometry, of_input, of_bias)
    if of_weight:
        whole = stashed.whole()
        _, weight_grad, bias_grad = aten(grad, whole, weight, bias, *geometry, [False, True, of_bias])
        del whole
        stashed.release()
    elif of_bias:
        _, _, bias_grad = aten(grad, sizes, weight, bias, *geometry, [False, False, True])
    if of_input:
        input_grad, _, _ = aten(grad, sizes, weight, bias, *geometry, [True, False, False])
    if alone:
        stashed.adopt(grad)
    return input_grad, weight_grad, bias_grad


def _by_slices(
    aten: Callable[..., Gradients],
    slices: Slices,
    grad: Tensor,
    sizes: Tensor,
    weight: Tensor,
    bias: object,
    geometry: list[object],
    of_input: bool,
    of_bias: bool,
) -> Gradients:
    """A slice of the batch at a time; the slices' gradients of weight and bias are added up.

    In channels_last the library makes no reordered copies, so the input's gradient is computed at once.
    """
    weight_grad = bias_grad = input_grad = None
    at_once = grad.dim() == 4 and grad.is_contiguous(memory_format=torch.channels_last) and not grad.is_contiguous()
    for number, (begin, end) in enumerate(slices.ranges):
        part, decoded = grad[begin:end], slices.decode(number)
        _, more, more_bias = aten(part, decoded, weight, bias, *geometry, [False, True, of_bias])
        del decoded
        weight_grad = more if weight_grad is None or more is None else weight_grad.add_(more)
        bias_grad = more_bias if bias_grad is None or more_bias is None else bias_grad.add_(more_bias)
        if of_input and not at_once:
            part_grad, _, _ = aten(part, sizes[begin:end], weight, bias, *geometry, [True, False, False])
            assert part_grad is not None
            if input_grad is None:
                input_grad = torch.empty(sizes.shape, dtype=part_grad.dtype, device=part_grad.device)
            input_grad[begin:end] = part_grad
    if of_input and at_once:
        input_grad, _, _ = aten(grad, sizes, weight, bias, *geometry, [True, False, False])
    return input_grad, weight_grad, bias_grad

"""Max pooling's backward: adds the gradient up where the stored window offsets say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from backstash.codecs.base import flat
from backstash.codecs.direct import WindowOffsets
from backstash.ops.backends import advise_huge, serving
from backstash.redeem.claims import Claim, redeems
from backstash.redeem.pointwise import same_order

SCATTERED = (torch.float32, torch.float64)
"""The dtypes in which the stored offsets give ATen's bits: in others ATen adds in float32 for some layouts."""


@redeems(torch.ops.aten.max_pool2d_with_indices_backward.default, position=7, call=None)
def max_pool2d_with_indices_backward(
    claim: Claim, aten: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool
) -> Tensor:
    """The input's gradient."""
    grad, x, *geometry, indices = args
    stashed = claim.stashed
    offsets = stashed.direct(WindowOffsets) if grad.dtype in SCATTERED and same_order(grad, indices) else None
    if offsets is not None:
        channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
        if x.is_contiguous() if offsets.geometry[0] == 1 else channels_last:
            stashed.release()  # frees decode buffers for a gradient that is larger than these
            out = torch.empty_strided(x.shape, x.stride(), dtype=grad.dtype, device="cpu")
            advise_huge(out)
            serving("cpu").window_scatter(offsets.packed, *offsets.geometry, flat(grad), flat(out))
            return out
    whole = stashed.whole()
    result = aten(grad, x, *geometry, whole)
    del whole
    stashed.release()
    return result

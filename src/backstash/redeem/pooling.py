"""Max pooling's backward: adds the gradient up where the stored window offsets say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from backstash.codecs.base import flat
from backstash.codecs.direct import WindowOffsets
from backstash.codecs.narrow.codec import Narrow
from backstash.ops.backends import advise_huge, serving
from backstash.ops.bits import bits_of
from backstash.proofs import proofs
from backstash.redeem.claims import Claim, redeems
from backstash.redeem.pointwise import same_order
from backstash.saved import PoolWindow

SCATTERED = (torch.float32, torch.float64)
"""The dtypes in which the stored offsets give ATen's bits: in others ATen adds in float32 for some layouts. On an
accelerator they may not in these either, which is found out."""


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
        is_laid_out = x.is_contiguous() if offsets.geometry[0] == 1 else channels_last
        if is_laid_out and (x.is_cpu or _adds_up_alike(grad, offsets.geometry[3:], channels_last)):
            stashed.release()  # frees decode buffers for a gradient that is larger than these
            out = torch.empty_strided(x.shape, x.stride(), dtype=grad.dtype, device=x.device)
            if out.is_cpu:
                advise_huge(out)
            serving(x.device.type).window_scatter(offsets.packed, *offsets.geometry, flat(grad), flat(out))
            return out
    whole = stashed.whole()
    result = aten(grad, x, *geometry, whole)
    del whole
    stashed.release()
    return result


def _adds_up_alike(grad: Tensor, ways: Sequence[Sequence[int]], channels_last: bool) -> bool:
    """Whether an accelerator adds gradients up in the order of the stored offsets: it is found out on a small image.

    Args:
        grad: of the pooling's output.
        ways: kernel, stride, padding and dilation of the pooling.
        channels_last: whether the channels of a pixel are neighbours in memory.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def prove() -> bool:
        height, width = (3 * step + apart * (side - 1) + 2 for side, step, _, apart in zip(*ways, strict=True))
        numbers = torch.arange(2 * 3 * height * width, device=grad.device, dtype=grad.dtype)
        x = numbers.mul(7.0).remainder(5.0).view(2, 3, height, width).contiguous(memory_format=layout)
        pooled, indices = torch.ops.aten.max_pool2d_with_indices(x, *ways)
        example = torch.arange(pooled.numel(), device=grad.device, dtype=grad.dtype).sin().view(pooled.shape)
        example = example.contiguous(memory_format=layout)
        codec = Narrow(PoolWindow((height, width), *map(tuple, ways)))
        read = codec.direct(WindowOffsets)
        assert read is not None
        offsets = read(codec.encode(indices))
        assert isinstance(offsets, WindowOffsets)
        out = torch.empty_like(x)
        serving(grad.device.type).window_scatter(offsets.packed, *offsets.geometry, flat(example), flat(out))
        expected = torch.ops.aten.max_pool2d_with_indices_backward(example, x, *ways, False, indices)
        return torch.equal(bits_of(flat(out)), bits_of(flat(expected)))

    facts = grad.dtype, *map(tuple, ways), channels_last
    return proofs.ask("sums of windows", facts, prove, device_type=grad.device.type)

"""Norms' backward kernels that can write the input's gradient over the output's.

ATen has no form of them that writes into memory given to it. So:

* A batch norm with the batch's statistics is computed by kernels of our own, to ATen's bits, and faster.
* A layer norm and a group norm are computed by ATen, some rows or images at a time, whose gradients do not depend on
  the others. The gradients of weight and bias are computed first, from the whole.

Note: [proven norms]
    The order in which ATen adds up, which of its products are rounded, and whether a part of the rows has the bits of
    the whole are nowhere documented. So each is compared, bit for bit, on a small example of the same layout before it
    is used for the first time (:mod:`backstash.proofs`). Where it differs, ATen's kernel allocates a gradient as ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from backstash.ops.backends import advise_huge, has_own_kernel, serving
from backstash.ops.bits import bits_of
from backstash.ops.layout import images, per_channel
from backstash.ops.norms import reference as _kernels  # noqa: F401  # which enter the table of kernels
from backstash.proofs import proofs
from backstash.redeem.claims import Claim, Gradients, redeems

Aten = Callable[..., Gradients]

_CHUNK = 1 << 20
"""Bytes of the rows whose gradient is computed at a time: it stays in a cache until it is copied."""

_LARGE = 4 << 20
"""Bytes from which a gradient is computed in parts: that takes about twice the time of ATen's one pass, and a smaller
gradient is no peak."""

_EXAMPLE = 1 << 10
"""Elements of an example, at least: numbers that are rounded otherwise differ in a few of a hundred elements."""

_LANES = 8
"""Channels that ATen's kernel for channels last takes at a time; it treats the remaining ones otherwise."""


# -- batch norm --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _BatchNorm:
    """What a batch norm's node has saved, and ATen's kernel for it."""

    aten: Aten
    x: Tensor
    weight: Tensor | None
    mean: Tensor
    invstd: Tensor
    eps: float

    def run(self, grad: Tensor, mask: list[bool]) -> Gradients:
        """ATen's gradients."""
        return self.aten(grad, self.x, self.weight, None, None, self.mean, self.invstd, True, self.eps, mask)

    def of(self, channels: Tensor) -> _BatchNorm:
        """The same for these channels alone."""
        x, weight = self.x[:, channels].contiguous(), None if self.weight is None else self.weight[channels]
        return replace(self, x=x, weight=weight, mean=self.mean[channels], invstd=self.invstd[channels])


_Kernel = Callable[[_BatchNorm, Tensor, Tensor, list[bool]], Gradients]


def batch_norm(
    aten: Aten,
    over: bool,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    invstd: Tensor | None,
    train: bool,
    eps: float,
    mask: list[bool],
) -> Gradients | None:
    """Gradients of input, weight and bias, as ``aten::native_batch_norm_backward``.

    Args:
        aten: that op.
        over: whether the input's gradient is to be in the memory of ``grad``.
        grad, x: [N, C, ...].
        weight, mean, invstd: [C].
        mask: which of the three gradients are asked for.

    Returns:
        None, with ``grad`` untouched, where the kernels here do not take these tensors.
    """
    if (
        not (train and mask[0] and has_own_kernel("batch_norm_channels", grad.device.type))
        or mean is None
        or invstd is None
    ):
        return None
    shape, stride = tuple(x.shape), x.stride()
    if grad.dtype is not torch.float32 or grad.shape != shape or grad.stride() != stride:
        return None
    if x.dtype is not torch.float32 or not grad.is_cpu or not per_channel(shape[1], weight, mean, invstd):
        return None
    chosen = _kernel_of(shape, stride, over)
    if chosen is None:
        return None
    kernel, example = chosen
    has_weight = weight is not None
    facts = (kernel.__name__, example, has_weight)
    if not proofs.ask("batch norm", facts, lambda: _matches_batch_norm(aten, kernel, example, has_weight)):
        return None
    out = grad
    if not over:
        advise_huge(out := torch.empty_like(grad))
    return kernel(_BatchNorm(aten, x, weight, mean, invstd, eps), grad, out, mask)


@lru_cache(maxsize=4096)
def _kernel_of(shape: tuple[int, ...], stride: tuple[int, ...], over: bool) -> tuple[_Kernel, tuple[int, ...]] | None:
    """Returns the kernel here for float32 images of that layout, and the shape of an example; None where there is none.

    Args:
        shape, stride: of the images, [N, C, ...].
        over: whether the input's gradient is to be in the memory of the output's.
    """
    x, channels = torch.empty_strided(shape, stride, device="meta"), shape[1]
    _, inner = (images(x) or (0, 0)) if x.numel() else (0, 0)
    if inner > 1 and stride[1] == inner:
        return _by_channel, (3, max(8, _EXAMPLE // inner), inner)
    if inner == 1 and len(shape) == 4 and over and channels % _LANES == 0:
        pixels = (1, 1) if x.is_contiguous() else (5, 3)  # one pixel is contiguous and channels last at once
        return _by_pixel, (max(2, _EXAMPLE // channels), channels, *pixels)
    return None


def _by_channel(norm: _BatchNorm, grad: Tensor, out: Tensor, mask: list[bool]) -> Gradients:
    """Contiguous images: the kernel here adds up and writes a channel while it is in the cache."""
    channels = serving(grad.device.type).batch_norm_channels
    weight_grad, bias_grad, left = channels(grad, norm.x, norm.mean, norm.invstd, norm.weight, out)
    if left:  # channels with infinities and NaNs: ATen decides which of them comes out
        channels = weight_grad.isnan().nonzero().flatten()
        gradients: Any = norm.of(channels).run(grad[:, channels].contiguous(), [True, True, True])
        out[:, channels], weight_grad[channels], bias_grad[channels] = gradients
    return out, weight_grad if mask[1] else None, bias_grad if mask[2] else None


def _by_pixel(norm: _BatchNorm, grad: Tensor, out: Tensor, mask: list[bool]) -> Gradients:
    """Channels last: ATen adds up, as the order depends on its threads, and the kernel here writes. No faster."""
    invstd = norm.invstd
    # The weight's gradient is the sum times invstd, so with ones it is the sum.
    _, dot, sums = replace(norm, invstd=torch.ones_like(invstd)).run(grad, [False, True, True])
    assert dot is not None and sums is not None
    count = grad.numel() // grad.shape[1]
    k, grad_mean = dot * invstd * invstd / count, sums / count
    if not bool((k + grad_mean).isfinite().all()):
        return norm.run(grad, mask)
    serving(grad.device.type).batch_norm_pixels(grad, norm.x, norm.mean, invstd, norm.weight, k, grad_mean, out)
    return out, dot * invstd if mask[1] else None, sums if mask[2] else None


def _matches_batch_norm(aten: Aten, kernel: _Kernel, shape: tuple[int, ...], has_weight: bool) -> bool:
    """Whether the kernel gives ATen's bits on an example of that shape."""
    layout = torch.channels_last if kernel is _by_pixel else torch.contiguous_format
    x, grad = (_example(shape, phase).contiguous(memory_format=layout) for phase in (0.0, 1.0))
    mean, invstd, weight = (_example(shape[1:2], phase).abs() for phase in (2.0, 3.0, 4.0))
    norm, every = _BatchNorm(aten, x, weight if has_weight else None, mean, invstd, 1e-5), [True, True, True]
    expected = norm.run(grad, every)
    return _are_equal(expected, kernel(norm, grad, grad, every))


# -- layer norm and group norm -----------------------------------------------------------------------------------------


def layer_norm(
    aten: Aten,
    over: bool,
    grad: Tensor,
    x: Tensor,
    shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: list[bool],
) -> Gradients | None:
    """As :func:`batch_norm`, for ``aten::native_layer_norm_backward``; None unless it is ``over`` the gradient."""
    width = math.prod(shape)
    rows = x.numel() // width if width else 0
    if not over or not _has_rows(grad, x, mean, rstd) or mean.numel() != rows or rstd.numel() != rows:
        return None
    ones = (1,) * len(shape)
    given = grad.view(rows, *shape), x.view(rows, *shape), mean.view(rows, *ones), rstd.view(rows, *ones)

    def part(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, mask: list[bool]) -> Gradients:
        return aten(grad, x, shape, mean, rstd, weight, bias, mask)

    gradients = _in_parts("layer norm", part, given, mask, (*shape, weight is None, bias is None))
    return None if gradients is None else (grad, *gradients)


def group_norm(
    aten: Aten,
    over: bool,
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    images: int,
    channels: int,
    pixels: int,
    groups: int,
    mask: list[bool],
) -> Gradients | None:
    """As :func:`batch_norm`, for ``aten::native_group_norm_backward``; None unless it is ``over`` the gradient."""
    if not over or not _has_rows(grad, x, mean, rstd) or mean.shape != (images, groups):
        return None

    def part(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, mask: list[bool]) -> Gradients:
        return aten(grad, x, mean, rstd, weight, x.shape[0], channels, pixels, groups, mask)

    gradients = _in_parts("group norm", part, (grad, x, mean, rstd), mask, (*x.shape[1:], groups, weight is None))
    return None if gradients is None else (grad, *gradients)


def _has_rows(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> bool:
    """Whether a part of the rows of these tensors is a contiguous part of each."""
    if x.numel() == 0 or grad.shape != x.shape or grad.dtype is not x.dtype:
        return False
    return all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in (grad, x, mean, rstd))


def _in_parts(
    name: str,
    part: Callable[..., Gradients],
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    mask: list[bool],
    facts: tuple[Hashable, ...],
) -> tuple[Tensor | None, Tensor | None] | None:
    """Writes the input's gradient over the output's, part by part.

    Args:
        name: of the norm.
        part: computes the gradients of a part of the rows.
        given: the output's gradient, the input, mean and reciprocal standard deviation, each with the same rows.
        mask: which of the three gradients are asked for.
        facts: what the gradients' bits depend on beside the rows.

    Returns:
        The gradients of weight and bias; None, with nothing written, where the parts' bits are not those of the whole
        or the tensors are small.
    """
    x = given[1]
    rows = x.shape[0]
    step = max(1, _CHUNK // (x[0].numel() * x.element_size()))
    if not mask[0] or x.nbytes < _LARGE or step >= rows:
        return None

    def run(given: tuple[Tensor, ...], step: int) -> tuple[Tensor | None, Tensor | None]:
        weight_grad = bias_grad = None
        if mask[1] or mask[2]:
            _, weight_grad, bias_grad = part(*given, [False, mask[1], mask[2]])
        for begin in range(0, given[0].shape[0], step):
            few = [tensor[begin : begin + step] for tensor in given]
            few_grad = part(*few, [True, False, False])[0]
            assert few_grad is not None
            few[0].copy_(few_grad)
        return weight_grad, bias_grad

    def prove() -> bool:
        example = tuple(
            _example((min(rows, 6), *tensor.shape[1:]), phase).to(tensor.dtype) for phase, tensor in enumerate(given)
        )
        expected = part(*example, mask)
        got = run(example, 2)
        return _are_equal(expected, (example[0], *got))

    every_fact = (*facts, min(rows, 6), x.dtype, given[2].dtype, *mask)
    return run(given, step) if proofs.ask(name, every_fact, prove) else None


def _example(shape: tuple[int, ...], phase: float) -> Tensor:
    """Numbers of every size and sign, the same ones each time, and none of torch's random ones."""
    numbers = torch.empty(math.prod(shape), dtype=torch.float32, device="cpu")
    for begin, piece in enumerate(numbers.split(4096)):  # a budget has no room for several times as many float64
        steps = torch.arange(4096 * begin, 4096 * begin + len(piece), dtype=torch.float64, device="cpu")
        piece.copy_((steps * (1.7 + phase)).sin() * (steps * 0.37 + phase).cos().exp2())
    return numbers.reshape(shape)


def _are_equal(expected: Gradients, got: Gradients) -> bool:
    """Whether the same gradients are there, with the same bits."""
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(bits_of(a), bits_of(b)))
        for a, b in zip(expected, got, strict=True)
    )


# -- claims ------------------------------------------------------------------------------------------------------------


@redeems(torch.ops.aten.native_batch_norm_backward.default)
def native_batch_norm_backward(
    claim: Claim, aten: Aten, args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool
) -> Gradients:
    """A batch norm's gradients, by the kernels here where they take its tensors."""
    return _run(batch_norm, claim, aten, args, alone)


@redeems(torch.ops.aten.native_layer_norm_backward.default)
def native_layer_norm_backward(
    claim: Claim, aten: Aten, args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool
) -> Gradients:
    """A layer norm's gradients, written over the incoming gradient if nobody else holds that."""
    return _run(layer_norm, claim, aten, args, alone)


@redeems(torch.ops.aten.native_group_norm_backward.default, call="group_norm")
def native_group_norm_backward(
    claim: Claim, aten: Aten, args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool
) -> Gradients:
    """A group norm's gradients, written over the incoming gradient if nobody else holds that."""
    return _run(group_norm, claim, aten, args, alone)


def _run(
    norm: Callable[..., Gradients | None], claim: Claim, aten: Aten, args: tuple[Any, ...], alone: bool
) -> Gradients:
    grad, _, *rest = args
    whole = claim.whole()
    gradients = norm(aten, alone, grad, whole, *rest) or aten(grad, whole, *rest)
    del whole
    claim.stashed.release()
    return gradients

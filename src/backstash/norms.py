"""Norms' backward kernels that can write the input's gradient over the output's.

ATen has no form of them that writes into memory given to it, so:

* a batch norm with the batch's statistics is computed by kernels of our own, to ATen's bits, and faster;
* a layer norm and a group norm are computed by ATen, some rows or images at a time, whose gradients do not depend on
  the others; weight's and bias's first, and at once.

Note: [proven norms]
    The order in which ATen adds up, which of its products are rounded, and whether a part of the rows has the bits of
    the whole are nowhere documented. So each is compared, bit for bit, on a small example of the same layout before it
    is used for the first time; where it differs, ATen's kernel makes a gradient of its own as ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from backstash.ops import cpu
from backstash.ops.reference import bits_of

Aten = Callable[..., Any]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

_CHUNK = 1 << 20
"""Bytes of the rows whose gradient is computed at a time: it stays in a cache until it is copied."""

_LARGE = 4 << 20
"""Bytes from which a gradient is computed in parts: that takes about twice the time of ATen's one pass, and below, it
is no peak."""

_EXAMPLE = 1 << 10
"""Elements for a proof, a multiple of: what is rounded otherwise differs in a few of a hundred."""

_LANES = 8
"""Channels that ATen's kernel for channels last takes at a time; it treats what is left over otherwise."""

_SERIAL_BELOW = 1 << 16
"""Elements below which waking a second thread costs more than it saves."""

_proven: dict[Hashable, bool] = {}


# -- batch norm --------------------------------------------------------------------------------------------------------


def batch_norm(
    aten: Aten,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
    mask: list[bool],
    over: bool,
) -> Gradients | None:
    """Gradients of input, weight and bias; ``over``: the first one in the memory of ``grad``.

    Returns:
        None, with ``grad`` untouched, where the kernels here do not take these tensors.
    """
    if not cpu.available():
        return None
    channels = x.shape[1] if x.dim() > 1 else 0
    vectors = [one for one in (weight, mean, invstd) if one is not None]
    if not channels or not x.numel() or grad.shape != x.shape or grad.stride() != x.stride():
        return None
    if any(one.dtype is not torch.float32 or one.device.type != "cpu" for one in (grad, x, *vectors)):
        return None
    if any(one.shape != (channels,) or not one.is_contiguous() for one in vectors):
        return None
    inner = math.prod(x.shape[2:])
    by_channel = x.is_contiguous() and inner > 1
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if not by_channel and (channels_last is None or not x.is_contiguous(memory_format=channels_last)):
        return None
    if not by_channel and (not over or channels % _LANES):  # no faster than ATen's, or other bits than its last ones
        return None
    kernel = _by_channel if by_channel else _by_pixel
    example = (3, max(8, _EXAMPLE // inner), inner) if by_channel else (2, channels, 5, max(3, _EXAMPLE // channels))
    if not _is_proven((kernel, example[1:], weight is None), lambda: _proof(aten, kernel, example, weight is None)):
        return None
    out = grad
    if not over:
        cpu.advise_huge(out := torch.empty_like(grad))
    return kernel(aten, grad, x, weight, mean, invstd, eps, mask, out)


def _by_channel(
    aten: Aten,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
    mask: list[bool],
    out: Tensor,
) -> Gradients:
    """Contiguous images: the kernel here adds up and writes a channel while it is in the cache."""
    weight_grad, bias_grad, left = cpu.batch_norm_channels(grad, x, mean, invstd, weight, out, _threads(x))
    if left:  # infinities and NaNs: which of them comes out is ATen's to say
        some = weight_grad.isnan().nonzero().flatten()
        part = [None if one is None else one[some] for one in (weight, None, None, mean, invstd)]
        made = aten(grad[:, some].contiguous(), x[:, some].contiguous(), *part, True, eps, [True, True, True])
        out[:, some], weight_grad[some], bias_grad[some] = made
    return out, weight_grad if mask[1] else None, bias_grad if mask[2] else None


def _by_pixel(
    aten: Aten,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
    mask: list[bool],
    out: Tensor,
) -> Gradients:
    """Channels last: ATen adds up, as the order depends on its threads, and the kernel here writes."""
    one = torch.ones_like(invstd)  # what ATen multiplies the sum with for the weight's gradient
    _, dot, sums = aten(grad, x, weight, None, None, mean, one, True, eps, [False, True, True])
    count = x.numel() // x.shape[1]
    k, grad_mean = dot * invstd * invstd / count, sums / count
    if not bool((k + grad_mean).isfinite().all()):
        return aten(grad, x, weight, None, None, mean, invstd, True, eps, mask)  # type: ignore[no-any-return]
    cpu.batch_norm_pixels(grad, x, mean, invstd, weight, k, grad_mean, out, _threads(x))
    return out, dot * invstd if mask[1] else None, sums if mask[2] else None


def _proof(aten: Aten, kernel: Callable[..., Gradients], shape: tuple[int, ...], bare: bool) -> bool:
    """Whether the kernel makes ATen's bits of an example; ``bare``: without a weight."""
    layout = torch.channels_last if kernel is _by_pixel else torch.contiguous_format
    x, grad = (_example(shape, phase).contiguous(memory_format=layout) for phase in (0.0, 1.0))
    mean, invstd, weight = (_example(shape[1:2], phase).abs() for phase in (2.0, 3.0, 4.0))
    given = x, None if bare else weight
    every = [True, True, True]
    expected = aten(grad, *given, None, None, mean, invstd, True, 1e-5, every)
    return _same(expected, kernel(aten, grad, *given, mean, invstd, 1e-5, every, grad))


def _threads(x: Tensor) -> int:
    return 1 if x.numel() < _SERIAL_BELOW else torch.get_num_threads()


# -- layer norm and group norm -----------------------------------------------------------------------------------------


def layer_norm(
    aten: Aten,
    grad: Tensor,
    x: Tensor,
    shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: list[bool],
) -> Gradients | None:
    """Gradients of input, weight and bias, the first one in the memory of ``grad``; None as in :func:`batch_norm`."""
    width = math.prod(shape)
    rows = x.numel() // width if width else 0
    if not _takes(grad, x, mean, rstd) or mean.numel() != rows or rstd.numel() != rows:
        return None
    one = (1,) * len(shape)
    given = grad.view(rows, *shape), x.view(rows, *shape), mean.view(rows, *one), rstd.view(rows, *one)

    def some(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, mask: list[bool]) -> Gradients:
        made: Gradients = aten(grad, x, shape, mean, rstd, weight, bias, mask)
        return made

    made = _in_parts(some, given, mask, ("layer_norm", *shape, weight is None, bias is None))
    return None if made is None else (grad, *made[1:])


def group_norm(
    aten: Aten,
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    sizes: tuple[int, int, int],
    groups: int,
    mask: list[bool],
) -> Gradients | None:
    """Gradients of input, weight and bias, the first one in the memory of ``grad``; None as in :func:`batch_norm`.

    Args:
        sizes: images, channels, pixels of one.
    """
    images, channels, pixels = sizes
    if not _takes(grad, x, mean, rstd) or mean.shape != (images, groups):
        return None

    def some(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, mask: list[bool]) -> Gradients:
        made: Gradients = aten(grad, x, mean, rstd, weight, x.shape[0], channels, pixels, groups, mask)
        return made

    return _in_parts(some, (grad, x, mean, rstd), mask, ("group_norm", *x.shape[1:], groups, weight is None))


def _takes(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> bool:
    """Whether rows of these are parts of their own."""
    if x.numel() == 0 or grad.shape != x.shape or grad.dtype is not x.dtype:
        return False
    return all(one.is_contiguous() and one.device.type == "cpu" for one in (grad, x, mean, rstd))


def _in_parts(
    some: Callable[..., Gradients],
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    mask: list[bool],
    facts: tuple[Hashable, ...],
) -> Gradients | None:
    """The gradients of weight and bias, then the input's written over the first of ``given``, part by part."""
    x = given[1]
    rows = x.shape[0]
    step = max(1, _CHUNK // (x[0].numel() * x.element_size()))
    if x.nbytes < _LARGE or step >= rows:
        return None
    facts = (*facts, x.dtype, given[2].dtype, torch.get_num_threads())

    def run(given: tuple[Tensor, ...], step: int, mask: list[bool]) -> Gradients:
        weight_grad = bias_grad = None
        if mask[1] or mask[2]:
            _, weight_grad, bias_grad = some(*given, [False, mask[1], mask[2]])
        for begin in range(0, given[0].shape[0], step):
            part = [one[begin : begin + step] for one in given]
            made: Any = some(*part, [True, False, False])[0]
            part[0].copy_(made)
        return given[0], weight_grad, bias_grad

    def proof() -> bool:
        few = [_example((min(rows, 6), *one.shape[1:]), phase).to(one.dtype) for phase, one in enumerate(given)]
        expected = some(*few, mask)
        return _same(expected, run(tuple(few), 2, mask))

    if not _is_proven((facts, *mask), proof):
        return None
    return run(given, step, mask)


# -- proofs ------------------------------------------------------------------------------------------------------------


def _is_proven(facts: Hashable, proof: Callable[[], bool]) -> bool:
    """Whether that was found to repeat ATen's bits (Note: [proven norms])."""
    if facts not in _proven:
        _proven[facts] = proof()
    return _proven[facts]


def _example(shape: tuple[int, ...], phase: float) -> Tensor:
    """Numbers of every size and sign, the same ones each time, and none of torch's random ones."""
    steps = torch.arange(math.prod(shape), dtype=torch.float64, device="cpu")
    return ((steps * (1.7 + phase)).sin() * (steps * 0.37 + phase).cos().exp2()).float().reshape(shape)


def _same(expected: Gradients, got: Gradients) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(bits_of(a), bits_of(b)))
        for a, b in zip(expected, got, strict=True)
    )

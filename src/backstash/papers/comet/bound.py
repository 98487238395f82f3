"""The error model: what an error in a layer's stored input does to the layer's weight gradient, and the reverse.

A weight's gradient is a sum over the samples and positions. For a convolution it is

    dW[c, i, k] = sum over n, p of dY[n, c, p] * x[n, i, stride * p - padding + dilation * k]

and for a linear layer the same with a single position. If ``x`` is stored to within a bound ``b``, the errors of its
elements are nearly independent and uniform in [-b, b], each with variance b**2 / 3. Therefore the error of dW[c, i, k]
has mean zero, is normal if many terms are added, and has the variance

    b**2 / 3 * sum of dY[n, c, p]**2 over those n, p that read an element with an error.

A term reads no error if its position is in the padding (``coverage``), or if the element is zero, because codecs for
this purpose keep zeros. If zeros are spread evenly, a share R of the other terms reads an error. This leaves

    sigma_c = b / sqrt(3) * sqrt(R * coverage) * ||dY_c||

with the 2-norm over all samples and positions of channel c. Groups, strides and dilation are contained in it. Nothing
else in backward has an error: dX and the bias's gradient do not read ``x``, so the errors of layers do not add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor


def channel_norms(grad: Tensor, dim: int = 1) -> Tensor:
    """Returns the 2-norm of each output channel of ``grad``, float32 ``[channels]``.

    Args:
        grad: the gradient of the layer's output: ``[N, C, *spatial]`` or ``[*, C]``.
        dim: the dimension of channels: 1 for a convolution, -1 for a linear layer.
    """
    others = [other for other in range(grad.dim()) if other != dim % grad.dim()]
    return torch.linalg.vector_norm(grad, dim=others, dtype=torch.float32) if others else grad.float().abs()


def coverage(
    input_size: Sequence[int],
    output_size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool = False,
) -> float:
    """Returns the share of (output position, kernel tap) pairs that read the input and not the padding.

    Args:
        input_size, output_size, kernel, stride, padding, dilation: one entry per spatial dimension each.
        transposed: whether the convolution is transposed. Many of its pairs read nothing, as its strides leave gaps.
    """
    dims = zip(input_size, output_size, kernel, stride, padding, dilation, strict=True)
    return math.prod(_coverage(*dim, transposed) for dim in dims)


@lru_cache(maxsize=1024)
def _coverage(
    read: int, written: int, kernel: int, stride: int, padding: int, dilation: int, transposed: bool
) -> float:
    steps, room = (read, written) if transposed else (written, read)
    places = torch.arange(steps, device="cpu")[:, None] * stride - padding
    places = places + torch.arange(kernel, device="cpu") * dilation
    return int(((places >= 0) & (places < room)).sum()) / (kernel * written) if written else 0.0


def predicted_sigma(bound: float, norms: Tensor, share: float = 1.0) -> Tensor:
    """Returns the standard deviation of the weight gradient's error for each output channel, ``[channels]``.

    Args:
        bound: the bound of the stored input's absolute error.
        norms: the norms of the output's gradient, ``[channels]`` (:func:`channel_norms`).
        share: the share of terms that read an element with an error: the input's share of elements that are not zero,
            times the :func:`coverage`.

    Raises:
        ValueError: the bound is negative or not finite, or the share is not from 0 to 1.

    Example:
        >>> predicted_sigma(0.3, torch.tensor([1.0, 2.0]), share=0.75)
        tensor([0.1500, 0.3000])
    """
    if not 0.0 <= bound < math.inf:
        raise ValueError(f"predicted_sigma was asked for bound={bound}, but a bound is a finite number, 0 or more.")
    _require_share(share)
    return norms * (bound * math.sqrt(share / 3))


def bound_for(sigma: float, norms: Tensor, share: float = 1.0, channels: Literal["rms", "each"] = "rms") -> float:
    """Returns the bound with which a weight gradient's error has the wanted standard deviation.

    Args:
        norms, share: as for :func:`predicted_sigma`.
        channels: what the deviation is measured over. ``"rms"``: over all elements of the weight gradient, so that the
            error of the loudest channel is larger and that of quiet channels is smaller, each in proportion to its own
            gradient. ``"each"``: over each channel by itself, so that the smallest of the channels' bounds is returned.

    Returns:
        The bound, or infinity if the output's gradient is zero, because no error comes through then.

    Raises:
        ValueError: ``sigma`` is not a finite number above zero, a norm is not finite, the share is not from 0 to 1, or
            ``channels`` is another word.

    Example:
        >>> round(bound_for(0.15, torch.tensor([1.0, 1.0]), share=0.75), 6)
        0.3
    """
    if not 0.0 < sigma < math.inf:
        raise ValueError(
            f"bound_for was asked for sigma={sigma}, but a standard deviation is a finite number above zero. Store the "
            f"tensor exactly where its gradient may not be off."
        )
    if channels not in ("rms", "each"):
        raise ValueError(f"bound_for was asked for channels={channels!r}, but there are 'rms' and 'each'.")
    _require_share(share)
    energy = norms.double().square()
    loudest = float((energy.mean() if channels == "rms" else energy.max()).sqrt()) if norms.numel() else 0.0
    if not math.isfinite(loudest):
        raise ValueError(
            f"bound_for was given norms of which some are {loudest}, but it needs finite ones. Leave out steps whose "
            f"gradients overflow."
        )
    return bound_of(sigma, loudest, share)


def bound_of(sigma: float, loudest: float, share: float = 1.0) -> float:
    """Returns the bound with which a weight gradient's error has the deviation ``sigma``.

    Args:
        loudest: the root mean square of the norms, or the largest of them.
        share: as for :func:`bound_for`.
    """
    scale = math.sqrt(share) * loudest
    return math.sqrt(3.0) * sigma / scale if scale > 0.0 else math.inf


def comet_bound(sigma: float, loss_gradient: float, batch: int, nonzero: float, a: float = 0.32) -> float:
    """Returns COMET's own bound, for comparison: ``sigma / (a * loss_gradient * sqrt(batch * nonzero))``.

    The published equation has four hazards. Each changes the bound several times over:

    * The paper introduces R as the sparsity ratio; it is the share of elements that are *not* zero.
    * The paper calls L the average gradient at the layer's output, but derives it from the *maximum* of each sample.
      With mean magnitudes the bound is far too large.
    * Sigma is a hundredth of the momentum, which has to be a mean of *magnitudes*.
    * The constant ``a`` was measured, and absorbs everything else. It does not depend on the size of the image, though
      that decides how many terms a weight's gradient has. :func:`bound_for` needs no such constant.

    Args:
        loss_gradient: mean over the samples of the largest magnitude in the output's gradient.
        nonzero: the input's share of elements that are not zero.

    Raises:
        ValueError: an argument is not a finite number above zero.

    Source: COMET (PVLDB 15(4), 2022), equation 3.
    """
    if not all(0.0 < number < math.inf for number in (sigma, loss_gradient, batch, nonzero, a)):
        raise ValueError(
            f"comet_bound was asked for sigma={sigma}, loss_gradient={loss_gradient}, batch={batch}, "
            f"nonzero={nonzero} and a={a}, but it divides by them: finite numbers above zero."
        )
    return sigma / (a * loss_gradient * math.sqrt(batch * nonzero))


def _require_share(share: float) -> None:
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"a share of {share} was given for the terms that read an error, but a share is from 0 to 1.")

"""The kinds of layers whose inputs COMET bounds: how their autograd nodes save the input, and their error models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from backstash.papers.comet.bound import channel_norms, coverage
from backstash.policies.base import op_of

LAYERS: dict[str, frozenset[tuple[str, str]]] = {
    "conv": frozenset({("Convolution", "input")}),
    "linear": frozenset({("Addmm", "mat1"), ("Mm", "self")}),
    "norm": frozenset({("NativeBatchNorm", "input"), ("CudnnBatchNorm", "input")}),
}
"""For each kind of layer, the autograd nodes that compute it and the role in which they save its input."""

WEIGHTS = {"Convolution": 1, "Addmm": 2, "Mm": 1, "NativeBatchNorm": 1, "CudnnBatchNorm": 1}
"""The position of the layer's weight among its node's inputs."""

_SAMPLED = 8, 64, 4, 4, 4
"""The elements of each dimension that a :func:`pattern` has at most."""

_ENOUGH = 8192
"""Elements of a channel that tell its share of zeros, its mean and its spread to about 1 %."""

_dispatch: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Linear:
    """The facts that a collecting step needs of a layer. This class is for a linear layer, the others inherit from it.

    A weight of a linear layer reads each sample once.

    Attributes:
        shares: the input's share of elements that are not zero, ``[channels]``.
    """

    shape: tuple[int, ...]
    shares: Tensor

    @property
    def share(self) -> Tensor:
        """The share of elements that are not zero, over all channels."""
        return self.shares.mean()

    def spread(self, x: Tensor) -> Tensor:
        """Returns how large the numbers are that the codec has to tell apart: the root mean square of non-zeros."""
        x = thinned(x)
        norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float32)
        return norm / (self.share * max(x.numel(), 1)).clamp(min=1).sqrt()

    def energy(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Returns 3 / bound**2 times the variance of the weight gradient's error, ``[output channels]``."""
        return channel_norms(grad, -1).square() * self.share

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Returns the weight gradient as the node computes it; only the layout of ``weight`` is read."""
        return x.T @ grad

    def coarsest(self, sigma: float, input_grad: Tensor | None, weight_grad: Tensor, weight: Tensor) -> Tensor | None:
        """Returns the bound with which the error of the input's gradient is the share ``sigma`` of it.

        Returns:
            The bound, or None if that gradient does not depend on the stored input.
        """
        return None


@dataclass(frozen=True, slots=True)
class Convolution(Linear):
    """A convolution. Some of a weight's taps fall into the padding."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def energy(self, grad: Tensor, weight: Tensor) -> Tensor:
        """As for Linear, with the :func:`backstash.papers.comet.bound.coverage`."""
        spatial = self.shape[2:], grad.shape[2:], weight.shape[2:]
        covered = coverage(*spatial, self.stride, self.padding, self.dilation, self.transposed)
        return channel_norms(grad).square() * (self.share * covered)

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """As for Linear."""
        where = self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups
        gradient: Tensor = _dispatch.convolution_backward(grad, x, weight, None, *where, [False, True, False])[1]
        return gradient


@dataclass(frozen=True, slots=True)
class BatchNorm(Linear):
    """A batch norm. An error in the stored input reaches the input's gradient as well.

    The weight's gradient is the sum of dY * (x - mean) * scale, and the input's gradient is

        weight * scale * (dY - mean of dY - (x - mean) * scale * weight's gradient / n)

    Of this only the last term reads ``x``. Mean and scale are stored apart, and exact.

    Attributes:
        mean: mean of each channel.
        scale: one over the standard deviation of each channel, as the node has it.
    """

    mean: Tensor
    scale: Tensor

    def spread(self, x: Tensor) -> Tensor:
        """Returns the standard deviation within channels."""
        return self.scale.square().reciprocal().mean().sqrt()

    def energy(self, grad: Tensor, weight: Tensor) -> Tensor:
        """As for Linear; the errors count in normalised numbers."""
        return (channel_norms(grad) * self.scale).square()

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """As for Linear, apart from rounding."""
        channels = [1, -1, *[1] * (x.dim() - 2)]
        normalised = (x.float() - self.mean.view(channels)) * self.scale.view(channels)
        return (normalised * grad).sum([0, *range(2, x.dim())])

    def coarsest(self, sigma: float, input_grad: Tensor | None, weight_grad: Tensor, weight: Tensor) -> Tensor | None:
        """As for Linear, by the last term above: errors are independent, each with the deviation bound / sqrt(3)."""
        if input_grad is None:
            return None
        count = input_grad.numel() / weight.numel()
        slope = torch.linalg.vector_norm(weight * self.scale.square() * weight_grad, dtype=torch.float32)
        wanted = sigma * torch.linalg.vector_norm(input_grad, dtype=torch.float32)
        limit: Tensor = wanted * (math.sqrt(3 * count) / slope)
        return limit


def thinned(x: Tensor) -> Tensor:
    """Returns ``x`` [N, C, ...] with ``_ENOUGH`` elements of each channel or a few more, or ``x`` if it is no larger.

    The pixels come from all rows and all columns. They are never an even number of pixels apart, because a transposed
    convolution may leave every other pixel zero.
    """
    pixels = math.prod(x.shape[2:])
    step = x.shape[0] * pixels // _ENOUGH
    if x.dim() < 3 or step < 2:
        return x
    while math.gcd(step, 2 * x.shape[-1]) > 1:
        step -= 1
    return x.flatten(2)[..., ::step]


def layer_of(node: Any, x: Tensor, exact: bool = True) -> Linear:
    """Returns the facts of the layer whose autograd node saved ``x`` as its input.

    Args:
        exact: whether a weight gradient will be computed with a batch norm's statistics. Else they are estimated.
    """
    op, shape = op_of(node), tuple(x.shape)
    whole, x = x, thinned(x)
    others = [dim for dim in range(x.dim()) if dim != 1]
    shares = x.count_nonzero(others) / max(x.numel() // max(x.shape[1], 1), 1)
    if op == "Convolution":
        return Convolution(
            shape,
            shares,
            tuple(node._saved_stride),
            tuple(node._saved_padding),
            tuple(node._saved_dilation),
            node._saved_transposed,
            tuple(node._saved_output_padding),
            node._saved_groups,
        )
    if "BatchNorm" in op:
        eps = node._saved_epsilon if op == "CudnnBatchNorm" else node._saved_eps
        read = whole if exact else x
        variance, mean = torch.var_mean(read.float(), [0, *range(2, read.dim())], correction=0)
        return BatchNorm(shape, shares, mean, (variance + eps).rsqrt())
    return Linear(shape, shares)


def weight_of(node: Any) -> nn.Parameter | None:
    """Returns the layer's weight, or None unless the weight's gradient goes to a parameter and nowhere else."""
    known: nn.Parameter | None = getattr(node, "parameter", None)
    if known is not None:  # of a compiled graph, where no autograd nodes follow
        return known
    following, _ = node.next_functions[WEIGHTS[op_of(node)]]
    while following is not None and type(following).__name__ in ("TBackward0", "ToCopyBackward0"):
        following, _ = following.next_functions[0]
    return following.variable if type(following).__name__ == "AccumulateGrad" else None


def uses_running_statistics(node: Any) -> bool:
    """Whether the node is a batch norm's in evaluation mode."""
    return not getattr(node, "_saved_training", True)


def pattern(x: Tensor) -> Tensor:
    """Returns which elements are not zero, of a sample that has the same positions in every tensor of a shape: bool."""
    steps = (-(-size // most) for size, most in zip(x.shape, _SAMPLED, strict=False))
    return x.detach()[tuple(slice(None, None, max(step, 1)) for step in steps)] != 0


def share_of(both: float, count: float) -> float:
    """Returns the share from the counts of :func:`overlapping`; 1 if the value is zero everywhere."""
    return both / count if count else 1.0


def overlapping(source: Tensor, read: Tensor) -> tuple[Tensor, Tensor] | None:
    """Counts the non-zero elements of a value that are not zero in one of its sources either, and all of them.

    A residual sum behind a relu has the errors of the sum before it, but only where that one's relu let them through.
    Zeros of two such values coincide more often than chance would have it, so the shares of both do not tell this.

    Returns:
        The two counts; None if the shapes differ, so that positions cannot be compared.
    """
    if source.shape != read.shape:
        return None
    return (source & read).count_nonzero(), read.count_nonzero()


def mean_gain(gain: Tensor, shares: Tensor) -> Tensor:
    """Returns the root mean square of a gain over the elements that are not zero.

    Args:
        gain: by channel, or a single number.
        shares: the share of elements that are not zero, by channel.
    """
    square = gain.square()
    if square.numel() != shares.numel():  # the reader sees the value through another view
        return square.mean().sqrt()
    return ((square * shares).sum() / shares.sum().clamp(min=torch.finfo(shares.dtype).tiny)).sqrt()

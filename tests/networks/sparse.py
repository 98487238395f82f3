"""Networks whose activations are mostly zero: squared relus, and neurons that spike."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


class SquaredReLU(nn.Module):
    """The square of what a relu leaves (So et al., Primer, arXiv:2109.08668)."""

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise."""
        squares: Tensor = torch.relu(x).square()
        return squares


class _Spike(torch.autograd.Function):
    """One where the input is above zero; its gradient is that of a fast sigmoid (Zenke and Ganguli, 2018)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        slope: Tensor = 1 / (1 + 10 * x.abs()).square()
        return grads[0] * slope


class Spiking(nn.Module):
    """Neurons that leak and fire: a potential that decays, and is reset where it crosses the threshold.

    Args:
        decay: share of the potential that a time step leaves.
        threshold: from which a neuron fires.
    """

    def __init__(self, decay: float = 0.5, threshold: float = 1.0) -> None:
        super().__init__()
        self.decay, self.threshold = decay, threshold

    def forward(self, currents: Tensor) -> Tensor:
        """Spikes [T, N, ...] of currents [T, N, ...]."""
        potential, spikes = torch.zeros_like(currents[0]), []
        for current in currents:
            potential = self.decay * potential + current
            spikes.append(_Spike.apply(potential - self.threshold))
            potential = potential * (1 - spikes[-1].detach())
        return torch.stack(spikes)


class SpikingNetwork(nn.Module):
    """Three convolutions and a classifier, each behind neurons that spike, over a few time steps.

    Args:
        num_classes, in_channels: as of the other networks.
        times: how many time steps.
        threshold: of the neurons.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 1, times: int = 4, threshold: float = 1.0) -> None:
        super().__init__()
        self.times = times
        channels = (in_channels, 32, 64, 64)
        self.convolutions = nn.ModuleList(
            nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after))
            for before, after in pairwise(channels)
        )
        self.neurons = nn.ModuleList(Spiking(threshold=threshold) for _ in range(3))
        self.pool = nn.AvgPool2d(2)
        self.head = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, classes] of images [N, C, H, W]: the mean over the time steps."""
        x = images.expand(self.times, *images.shape)
        for convolution, neurons in zip(self.convolutions, self.neurons, strict=True):
            y = self.pool(convolution(x.flatten(0, 1)))
            x = neurons(y.view(self.times, -1, *y.shape[1:]))
        logits: Tensor = self.head(x.mean(0).mean([2, 3]))
        return logits


def squared_relu_network(num_classes: int = 10, in_channels: int = 1) -> nn.Module:
    """Five convolutions in the manner of VGG, with batch norms and squared relus."""
    layers: list[nn.Module] = []
    before = in_channels
    for after, pools in ((32, False), (32, True), (64, False), (64, True), (128, False)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), SquaredReLU()]
        layers += [nn.MaxPool2d(2)] * pools
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, num_classes))

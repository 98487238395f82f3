"""DenseNet-121: Huang et al., Densely connected convolutional networks, arXiv:1608.06993, table 1."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from tests.networks.initialisation import initialise, kaiming_fan_in_normal

GROWTH = 32
"""Channels that each layer adds."""

BOTTLENECK = 4
"""The 1x1 convolution of a layer has this many times as many channels as the layer adds."""


class DenseLayer(nn.Module):
    """Computes new channels from all the features before it: norm, ReLU, 1x1, norm, ReLU, 3x3."""

    def __init__(self, in_channels: int) -> None:
        """Takes the sum of the channels of all the features before it."""
        super().__init__()
        width = BOTTLENECK * GROWTH
        self.layers = nn.Sequential(
            nn.BatchNorm2d(in_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(in_channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, GROWTH, 3, padding=1, bias=False),
        )

    def forward(self, features: list[Tensor]) -> Tensor:
        """Maps a list of [N, C_i, H, W] to [N, GROWTH, H, W]."""
        new: Tensor = self.layers(torch.cat(features, dim=1))
        return new


class DenseBlock(nn.Module):
    """Layers of which each reads the block's input and the outputs of all layers before it."""

    def __init__(self, in_channels: int, layers: int) -> None:
        """Takes the channels of the input and the number of layers."""
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(in_channels + number * GROWTH) for number in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Maps [N, in_channels, H, W] to [N, in_channels + layers * GROWTH, H, W]."""
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, dim=1)


def densenet121(num_classes: int = 1000, in_channels: int = 3) -> nn.Sequential:
    """Builds DenseNet-121 with growth 32, whose layers concatenate their inputs as torchvision's do.

    Maps images [N, in_channels, H, W], H and W at least 29 (published: 224), to logits
    [N, num_classes]. 7,978,856 parameters at 1000 classes and 3 channels.

    Args:
        num_classes: Number of logits.
        in_channels: Channels of an image.

    Returns:
        The network, initialised as torchvision does.
    """
    channels = 2 * GROWTH
    features: list[nn.Module] = [
        nn.Conv2d(in_channels, channels, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    for number, layers in enumerate((6, 12, 24, 16)):
        if number:
            features.append(_transition(channels))
            channels //= 2
        features.append(DenseBlock(channels, layers))
        channels += layers * GROWTH
    features += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
    classifier = nn.Linear(channels, num_classes)
    network = nn.Sequential(
        OrderedDict(
            features=nn.Sequential(*features),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            classifier=classifier,
        )
    )
    initialise(network, convolution=kaiming_fan_in_normal)
    nn.init.zeros_(classifier.bias)
    return network


def _transition(channels: int) -> nn.Sequential:
    """Maps [N, channels, H, W] to [N, channels / 2, H / 2, W / 2], sizes rounded down."""
    return nn.Sequential(
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels, channels // 2, 1, bias=False),
        nn.AvgPool2d(2, stride=2),
    )

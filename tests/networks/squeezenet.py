"""SqueezeNet 1.0 and 1.1: Iandola et al., arXiv:1602.07360; 1.1 is from the authors' repository."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import torch
from torch import Tensor, nn

from tests.networks.initialisation import initialise, kaiming_fan_in


class Fire(nn.Module):
    """Squeezes with 1x1 convolutions, then expands with 1x1 and 3x3 ones side by side."""

    def __init__(self, in_channels: int, squeeze: int, expand: int) -> None:
        """Builds the module.

        Args:
            in_channels: Channels of the input.
            squeeze: Channels after the squeezing convolution.
            expand: Channels of each of the two expanding convolutions.
        """
        super().__init__()
        self.squeeze = nn.Sequential(nn.Conv2d(in_channels, squeeze, 1), nn.ReLU(inplace=True))
        self.expand1x1 = nn.Sequential(nn.Conv2d(squeeze, expand, 1), nn.ReLU(inplace=True))
        self.expand3x3 = nn.Sequential(nn.Conv2d(squeeze, expand, 3, padding=1), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        """Maps [N, in_channels, H, W] to [N, 2 * expand, H, W]."""
        squeezed = self.squeeze(x)
        return torch.cat([self.expand1x1(squeezed), self.expand3x3(squeezed)], dim=1)


def squeezenet1_0(num_classes: int = 1000, in_channels: int = 3) -> nn.Sequential:
    """Builds SqueezeNet 1.0, the one in the paper.

    Maps images [N, in_channels, H, W], H and W at least 21 (published: 224), to logits
    [N, num_classes]. 1,248,424 parameters at 1000 classes and 3 channels.

    Args:
        num_classes: Number of logits.
        in_channels: Channels of an image.

    Returns:
        The network, initialised as torchvision does.
    """
    features = nn.Sequential(
        nn.Conv2d(in_channels, 96, 7, stride=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        Fire(96, 16, 64),
        Fire(128, 16, 64),
        Fire(128, 32, 128),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        Fire(256, 32, 128),
        Fire(256, 48, 192),
        Fire(384, 48, 192),
        Fire(384, 64, 256),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        Fire(512, 64, 256),
    )
    return _squeezenet(features, num_classes)


def squeezenet1_1(num_classes: int = 1000, in_channels: int = 3) -> nn.Sequential:
    """Builds SqueezeNet 1.1, which computes 2.4 times less than 1.0.

    Maps images [N, in_channels, H, W], H and W at least 17 (published: 224), to logits
    [N, num_classes]. 1,235,496 parameters at 1000 classes and 3 channels.

    Args:
        num_classes: Number of logits.
        in_channels: Channels of an image.

    Returns:
        The network, initialised as torchvision does.
    """
    features = nn.Sequential(
        nn.Conv2d(in_channels, 64, 3, stride=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        Fire(64, 16, 64),
        Fire(128, 16, 64),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        Fire(128, 32, 128),
        Fire(256, 32, 128),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        Fire(256, 48, 192),
        Fire(384, 48, 192),
        Fire(384, 64, 256),
        Fire(512, 64, 256),
    )
    return _squeezenet(features, num_classes)


def _squeezenet(features: nn.Sequential, num_classes: int) -> nn.Sequential:
    """Puts the classifying convolution and the average over the image behind [N, 512, H, W] features."""
    classifier = nn.Conv2d(512, num_classes, 1)
    network = nn.Sequential(
        OrderedDict(
            features=features,
            dropout=nn.Dropout(),
            classifier=classifier,
            relu=nn.ReLU(inplace=True),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
        )
    )
    initialise(features, convolution=kaiming_fan_in)
    initialise(classifier, convolution=partial(nn.init.normal_, std=0.01))
    return network

"""MobileNetV2: Sandler et al., Inverted residuals and linear bottlenecks, arXiv:1801.04381, table 2."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

from torch import Tensor, nn

from tests.networks.initialisation import initialise, kaiming_fan_out

STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Of each stage: the expansion, the channels, the number of blocks and the stride of the first block."""


class InvertedResidual(nn.Module):
    """Expands with a 1x1 convolution, filters each channel with a 3x3 one, and projects with a linear 1x1 one."""

    def __init__(self, in_channels: int, channels: int, stride: int, expansion: int) -> None:
        """Builds the block.

        Args:
            in_channels: Channels of the input.
            channels: Channels of the output.
            stride: Stride of the 3x3 convolution.
            expansion: The 3x3 convolution has this many times as many channels as the input; with 1, the
                block has no expanding convolution.
        """
        super().__init__()
        width = expansion * in_channels
        expanding = [] if expansion == 1 else [_convolution(in_channels, width, 1)]
        self.layers = nn.Sequential(
            *expanding,
            _convolution(width, width, 3, stride=stride, groups=width),
            nn.Conv2d(width, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.has_shortcut = stride == 1 and in_channels == channels

    def forward(self, x: Tensor) -> Tensor:
        """Maps [N, in_channels, H, W] to [N, channels, H / stride, W / stride], sizes rounded up."""
        out: Tensor = self.layers(x)
        return x + out if self.has_shortcut else out


def mobilenet_v2(num_classes: int = 1000, in_channels: int = 3) -> nn.Sequential:
    """Builds MobileNetV2 of width 1.

    Maps images [N, in_channels, H, W] (published: 224) to logits [N, num_classes]. 3,504,872 parameters
    at 1000 classes and 3 channels.

    Args:
        num_classes: Number of logits.
        in_channels: Channels of an image.

    Returns:
        The network, initialised as torchvision does.
    """
    channels = 32
    features: list[nn.Module] = [_convolution(in_channels, channels, 3, stride=2)]
    for expansion, width, blocks, stride in STAGES:
        for number in range(blocks):
            features.append(InvertedResidual(channels, width, 1 if number else stride, expansion))
            channels = width
    features.append(_convolution(channels, 1280, 1))
    network = nn.Sequential(
        OrderedDict(
            features=nn.Sequential(*features),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            dropout=nn.Dropout(0.2),
            classifier=nn.Linear(1280, num_classes),
        )
    )
    initialise(network, convolution=kaiming_fan_out, linear=partial(nn.init.normal_, std=0.01))
    return network


def _convolution(in_channels: int, channels: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A padded convolution without a bias, its batch norm and a ReLU that ends at 6."""
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, size, stride, padding=size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU6(inplace=True),
    )

"""VGG without batch normalisation: Simonyan and Zisserman, ICLR 2015, arXiv:1409.1556."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from torch import nn

from tests.networks.initialisation import initialise, kaiming_fan_out


def vgg16(num_classes: int = 1000, in_channels: int = 3) -> nn.Sequential:
    """Builds VGG16, configuration D of the paper.

    Maps images [N, in_channels, H, W], H and W at least 32 (published: 224), to logits
    [N, num_classes]. 138,357,544 parameters at 1000 classes and 3 channels.

    Args:
        num_classes: Number of logits.
        in_channels: Channels of an image.

    Returns:
        The network, with Kaiming initialisation.
    """
    stages = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
    return _vgg(stages, pooled_size=7, hidden=4096, num_classes=num_classes, in_channels=in_channels)


def vgg_small(num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """Builds a VGG with six convolutions, for images of 28x28 or 32x32.

    Maps images [N, in_channels, H, W], H and W at least 8 (meant for: 32), to logits
    [N, num_classes]. 3,510,858 parameters at 10 classes and 3 channels. It is not in the paper.

    Args:
        num_classes: Number of logits.
        in_channels: Channels of an image.

    Returns:
        The network, with Kaiming initialisation.
    """
    stages = ((64, 64), (128, 128), (256, 256))
    return _vgg(stages, pooled_size=4, hidden=512, num_classes=num_classes, in_channels=in_channels)


def _vgg(
    stages: Sequence[Sequence[int]], *, pooled_size: int, hidden: int, num_classes: int, in_channels: int
) -> nn.Sequential:
    """Stages of 3x3 convolutions, each ended by a 2x2 pooling, then three linear layers."""
    features = nn.Sequential()
    channels = in_channels
    for stage in stages:
        for width in stage:
            features.extend([nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)])
            channels = width
        features.append(nn.MaxPool2d(2))
    classifier = nn.Sequential(
        nn.Linear(channels * pooled_size * pooled_size, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(hidden, num_classes),
    )
    pool = nn.AdaptiveAvgPool2d(pooled_size)
    network = nn.Sequential(OrderedDict(features=features, pool=pool, flatten=nn.Flatten(), classifier=classifier))
    initialise(network, convolution=kaiming_fan_out, linear=partial(nn.init.normal_, std=0.01))
    return network

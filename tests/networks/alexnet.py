"""AlexNet in one tower: Krizhevsky, "One weird trick for parallelizing CNNs", arXiv:1404.5997."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def alexnet(num_classes: int = 1000, in_channels: int = 3) -> nn.Sequential:
    """Builds the one-tower AlexNet, without local response normalisation, as torchvision has it.

    Maps images [N, in_channels, H, W], H and W at least 63 (published: 224), to logits
    [N, num_classes]. 61,100,840 parameters at 1000 classes and 3 channels.

    Args:
        num_classes: Number of logits.
        in_channels: Channels of an image.

    Returns:
        The network, with PyTorch's default initialisation.
    """
    features = nn.Sequential(
        nn.Conv2d(in_channels, 64, 11, stride=4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
    )
    classifier = nn.Sequential(
        nn.Dropout(),
        nn.Linear(256 * 6 * 6, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Linear(4096, num_classes),
    )
    return nn.Sequential(
        OrderedDict(features=features, pool=nn.AdaptiveAvgPool2d(6), flatten=nn.Flatten(), classifier=classifier)
    )

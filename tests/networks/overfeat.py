"""OverFeat, the fast model: Sermanet et al., "OverFeat", ICLR 2014, arXiv:1312.6229, table 1."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def overfeat(num_classes: int = 1000, in_channels: int = 3) -> nn.Sequential:
    """Builds the fast model of OverFeat.

    Maps images [N, in_channels, H, W], H and W at least 71 (published: 231), to logits
    [N, num_classes]. At 231 the last feature map is [N, 1024, 6, 6], as published, and the adaptive
    pooling passes it on unchanged; at other sizes, 224 among them, it brings the map to 6x6.

    145,920,872 parameters at 1000 classes and 3 channels, with biases: 15,987,584 in the five
    convolutions (34,944 + 614,656 + 1,180,160 + 4,719,616 + 9,438,208) and 129,933,288 in the three
    linear layers (113,249,280 + 12,587,008 + 4,097,000). The paper gives 145 million in its table 4.

    Args:
        num_classes: Number of logits.
        in_channels: Channels of an image.

    Returns:
        The network, with PyTorch's default initialisation.
    """
    features = nn.Sequential(
        nn.Conv2d(in_channels, 96, 11, stride=4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(96, 256, 5),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(256, 512, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(512, 1024, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(1024, 1024, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
    )
    classifier = nn.Sequential(
        nn.Dropout(),
        nn.Linear(1024 * 6 * 6, 3072),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(3072, 4096),
        nn.ReLU(inplace=True),
        nn.Linear(4096, num_classes),
    )
    return nn.Sequential(
        OrderedDict(features=features, pool=nn.AdaptiveAvgPool2d(6), flatten=nn.Flatten(), classifier=classifier)
    )

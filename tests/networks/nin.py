"""Network in Network: Lin, Chen and Yan, ICLR 2014, arXiv:1312.4400, in its ImageNet form."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from tests.networks.initialisation import initialise, kaiming_fan_in


def nin(num_classes: int = 1000, in_channels: int = 3) -> nn.Sequential:
    """Builds Network in Network for ImageNet, with the layer sizes of the authors' Caffe model.

    Maps images [N, in_channels, H, W], H and W at least 67 (published: 224), to logits
    [N, num_classes]. 7,595,176 parameters at 1000 classes and 3 channels; the authors publish no
    count but a weight file of 29 MB, which is 7.6 million float32 values.

    Args:
        num_classes: Number of logits.
        in_channels: Channels of an image.

    Returns:
        The network, with Kaiming initialisation: PyTorch's default shrinks the activations by more
        than half in each of the twelve convolutions, and no batch normalisation restores them.
    """
    network = nn.Sequential(
        OrderedDict(
            mlpconv1=_mlpconv(in_channels, (96, 96, 96), kernel=11, stride=4),
            pool1=nn.MaxPool2d(3, stride=2),
            mlpconv2=_mlpconv(96, (256, 256, 256), kernel=5, padding=2),
            pool2=nn.MaxPool2d(3, stride=2),
            mlpconv3=_mlpconv(256, (384, 384, 384), kernel=3, padding=1),
            pool3=nn.MaxPool2d(3, stride=2),
            dropout=nn.Dropout(),
            mlpconv4=_mlpconv(384, (1024, 1024, num_classes), kernel=3, padding=1),
            pool4=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
        )
    )
    initialise(network, convolution=kaiming_fan_in)
    return network


def _mlpconv(
    in_channels: int, widths: tuple[int, int, int], kernel: int, stride: int = 1, padding: int = 0
) -> nn.Sequential:
    """A convolution and two 1x1 ones, each with a ReLU: [N, in_channels, H, W] to [N, widths[2], H', W']."""
    first, second, third = widths
    return nn.Sequential(
        nn.Conv2d(in_channels, first, kernel, stride=stride, padding=padding),
        nn.ReLU(inplace=True),
        nn.Conv2d(first, second, 1),
        nn.ReLU(inplace=True),
        nn.Conv2d(second, third, 1),
        nn.ReLU(inplace=True),
    )

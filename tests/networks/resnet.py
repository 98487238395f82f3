"""ResNet for ImageNet and for CIFAR: He et al., CVPR 2016, arXiv:1512.03385, tables 1 and 6; and Wide ResNet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from tests.networks.initialisation import initialise, kaiming_fan_out

BlockName = Literal["basic", "bottleneck"]


class Residual(nn.Module):
    """Adds a shortcut to a stack of layers and puts a ReLU behind the sum."""

    def __init__(self, layers: nn.Sequential, shortcut: nn.Module) -> None:
        """Joins the two paths.

        Args:
            layers: The path that learns, [N, C, H, W] to [N, C', H', W'].
            shortcut: The other path, with the same shapes; `nn.Identity` where they do not change.
        """
        super().__init__()
        self.layers = layers
        self.shortcut = shortcut
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [N, C, H, W] to [N, C', H', W']."""
        out: Tensor = self.layers(x)
        out += self.shortcut(x)
        out = self.relu(out)
        return out


class Preactivated(nn.Module):
    """A block of Wide ResNet: norm, ReLU and convolution, twice, and the sum with what goes around them."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        """Takes the channels of the input and the output, and the stride of the first convolution."""
        super().__init__()
        self.first = nn.Sequential(nn.BatchNorm2d(in_channels), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
        )
        self.projection = None
        if stride != 1 or in_channels != width:
            self.projection = nn.Conv2d(in_channels, width, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [N, in_channels, H, W] to [N, width, H / stride, W / stride]."""
        active = self.first(x)
        out: Tensor = self.layers(active)
        out += x if self.projection is None else self.projection(active)
        return out


class PaddedShortcut(nn.Module):
    """The paper's option A: takes every second pixel and adds channels of zeros, without parameters."""

    def __init__(self, added: int) -> None:
        """Takes the number of channels to add."""
        super().__init__()
        self.added = added

    def forward(self, x: Tensor) -> Tensor:
        """Maps [N, C, H, W] to [N, C + added, H / 2, W / 2], sizes rounded up."""
        return functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.added))


def resnet(
    blocks: Sequence[int] = (3, 4, 6, 3),
    block: BlockName = "bottleneck",
    num_classes: int = 1000,
    in_channels: int = 3,
    width: int = 64,
) -> nn.Sequential:
    """Builds a ResNet for ImageNet, its stride on the 3x3 convolutions as torchvision has it.

    Maps images [N, in_channels, H, W] (published: 224) to logits [N, num_classes]. Each stage is one
    flat `nn.Sequential`, so a network of any depth builds and runs without recursion over its blocks.

    ===========  ================  ===========  ===========
    network      blocks            block        parameters
    ===========  ================  ===========  ===========
    ResNet-18    (2, 2, 2, 2)      basic         11,689,512
    ResNet-34    (3, 4, 6, 3)      basic         21,797,672
    ResNet-50    (3, 4, 6, 3)      bottleneck    25,557,032
    ResNet-101   (3, 4, 23, 3)     bottleneck    44,549,160
    ResNet-152   (3, 8, 36, 3)     bottleneck    60,192,808
    ResNet-1517  (3, 83, 416, 3)   bottleneck   505,727,528
    ===========  ================  ===========  ===========

    Args:
        blocks: Number of blocks in each stage. The stages are 1, 2, 4, ... times as wide as ``width``.
        block: "basic", of two 3x3 convolutions, or "bottleneck", of a 1x1, a 3x3 and a 1x1.
        num_classes: Number of logits.
        in_channels: Channels of an image.
        width: Channels of the stem and of the first stage; published: 64.

    Returns:
        The network, with Kaiming initialisation.

    Raises:
        ValueError: No block of that name.
    """
    if block not in ("basic", "bottleneck"):
        raise ValueError(f"the block {block!r} was asked for; there is no such block; use 'basic' or 'bottleneck'")
    stem = nn.Sequential(
        nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    )
    stages = nn.Sequential()
    channels = width
    for index, count in enumerate(blocks):
        stage = nn.Sequential()
        for position in range(count):
            stride = 2 if position == 0 and index > 0 else 1
            layers, out_channels = _layers(block, channels, width << index, stride)
            stage.append(Residual(layers, _projection(channels, out_channels, stride)))
            channels = out_channels
        stages.append(stage)
    return _resnet(stem, stages, channels, num_classes)


def _blocks_per_stage(depth: int, others: int) -> int:
    """The n of a network of 6n layers and ``others``."""
    count, rest = divmod(depth - others, 6)
    if rest or count < 1:
        nearest = 6 * max(count, 1) + others
        raise ValueError(f"a depth of {depth} was asked for; it is not 6n + {others}; use, for instance, {nearest}")
    return count


def resnet_cifar(depth: int, num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """Builds the ResNet of 6n + 2 layers that the paper trains on CIFAR-10.

    Maps images [N, in_channels, H, W] (published: 32) to logits [N, num_classes]. Its three stages are
    16, 32 and 64 channels wide and n basic blocks long. Parameters at 10 classes and 3 channels:
    269,722 at depth 20, 853,018 at 56, 1,727,962 at 110 and 19,421,274 at 1202.

    Args:
        depth: Number of layers with weights: 8, 14, 20, ...
        num_classes: Number of logits.
        in_channels: Channels of an image.

    Returns:
        The network, with Kaiming initialisation.

    Raises:
        ValueError: `depth` is not 6n + 2 with n at least 1.
    """
    count = _blocks_per_stage(depth, 2)
    widths = (16, 32, 64)
    stem = nn.Sequential(*_convolution(in_channels, widths[0], 3), nn.ReLU(inplace=True))
    stages = nn.Sequential()
    for before, width in pairwise((widths[0], *widths)):
        changes = before != width
        first, _ = _layers("basic", before, width, stride=2 if changes else 1)
        stage = nn.Sequential(Residual(first, PaddedShortcut(width - before) if changes else nn.Identity()))
        for _ in range(1, count):
            layers, _ = _layers("basic", width, width, stride=1)
            stage.append(Residual(layers, nn.Identity()))
        stages.append(stage)
    return _resnet(stem, stages, widths[-1], num_classes)


def wide_resnet(depth: int = 28, widening: int = 10, num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """Builds a Wide ResNet of 6n + 4 layers: Zagoruyko and Komodakis, BMVC 2016, arXiv:1605.07146, without dropout.

    Maps images [N, in_channels, H, W] (published: 32) to logits [N, num_classes]. WRN-28-10 has 36,479,194 parameters
    at 10 classes and 3 channels.

    Args:
        depth: Number of layers with weights: 10, 16, 22, 28, ...
        widening: How many times as wide as 16, 32 and 64 channels the stages are.
        num_classes: Number of logits.
        in_channels: Channels of an image.

    Returns:
        The network, with Kaiming initialisation.

    Raises:
        ValueError: `depth` is not 6n + 4 with n at least 1.
    """
    count = _blocks_per_stage(depth, 4)
    stages = nn.Sequential()
    channels = 16
    for index in range(3):
        width = (16 << index) * widening
        stage = nn.Sequential()
        for position in range(count):
            stage.append(Preactivated(channels, width, 2 if position == 0 and index > 0 else 1))
            channels = width
        stages.append(stage)
    stages.append(nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True)))
    return _resnet(nn.Sequential(nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)), stages, channels, num_classes)


def _resnet(stem: nn.Sequential, stages: nn.Sequential, channels: int, num_classes: int) -> nn.Sequential:
    """Puts the average over the image and the linear layer behind [N, channels, H, W] features."""
    network = nn.Sequential(
        OrderedDict(
            stem=stem,
            stages=stages,
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            classifier=nn.Linear(channels, num_classes),
        )
    )
    initialise(network, convolution=kaiming_fan_out)
    return network


def _layers(block: BlockName, in_channels: int, width: int, stride: int) -> tuple[nn.Sequential, int]:
    """The path of a block that learns, and the number of its output channels."""
    if block == "basic":
        layers = nn.Sequential(
            *_convolution(in_channels, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3),
        )
        return layers, width
    layers = nn.Sequential(
        *_convolution(in_channels, width, 1),
        nn.ReLU(inplace=True),
        *_convolution(width, width, 3, stride),
        nn.ReLU(inplace=True),
        *_convolution(width, 4 * width, 1),
    )
    return layers, 4 * width


def _projection(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """The paper's option B: a 1x1 convolution where the shape changes, the identity elsewhere."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(*_convolution(in_channels, out_channels, 1, stride))


def _convolution(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """A convolution and its batch normalisation."""
    convolution = nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(out_channels)

"""GoogLeNet, which is Inception v1: Szegedy et al., CVPR 2015, arXiv:1409.4842, table 1."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from tests.networks.initialisation import initialise, kaiming_fan_in


@dataclass(frozen=True)
class Variant:
    """What differs between GoogLeNet as published and as torchvision has it.

    Attributes:
        batch_norm: Whether batch normalisation stands between each convolution and its ReLU.
        wide_kernel: Kernel of the branch that the paper calls 5x5.
        last_pool: Kernel of the pooling before inception 5a.
        dropout: Share of the features dropped before the last linear layer.
    """

    batch_norm: bool
    wide_kernel: int
    last_pool: int
    dropout: float

    def convolution(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> list[nn.Module]:
        """Layers from a convolution to its ReLU: [N, in_channels, H, W] to [N, out_channels, H', W']."""
        convolution = nn.Conv2d(
            in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=not self.batch_norm
        )
        norm = [nn.BatchNorm2d(out_channels, eps=1e-3)] if self.batch_norm else []
        return [convolution, *norm, nn.ReLU(inplace=True)]

    def response_norm(self) -> list[nn.Module]:
        """The paper's local response normalisation, where batch normalisation does not replace it."""
        return [] if self.batch_norm else [nn.LocalResponseNorm(5)]


PAPER = Variant(batch_norm=False, wide_kernel=5, last_pool=3, dropout=0.4)
TORCHVISION = Variant(batch_norm=True, wide_kernel=3, last_pool=2, dropout=0.2)


class Inception(nn.Module):
    """Four branches over the same input, joined along the channels."""

    def __init__(
        self,
        variant: Variant,
        in_channels: int,
        ch1x1: int,
        ch3x3: tuple[int, int],
        ch5x5: tuple[int, int],
        pooled: int,
    ) -> None:
        """Builds the module.

        Args:
            variant: The GoogLeNet it belongs to.
            in_channels: Channels of the input.
            ch1x1: Channels of the 1x1 branch.
            ch3x3: Channels of the 3x3 branch, after its reduction and at its end.
            ch5x5: Channels of the 5x5 branch, after its reduction and at its end.
            pooled: Channels of the branch that pools first.
        """
        super().__init__()
        convolution = variant.convolution
        self.branch1 = nn.Sequential(*convolution(in_channels, ch1x1, 1))
        self.branch2 = nn.Sequential(*convolution(in_channels, ch3x3[0], 1), *convolution(*ch3x3, 3))
        self.branch3 = nn.Sequential(*convolution(in_channels, ch5x5[0], 1), *convolution(*ch5x5, variant.wide_kernel))
        self.branch4 = nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1, ceil_mode=True), *convolution(in_channels, pooled, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps [N, in_channels, H, W] to [N, ch1x1 + ch3x3[1] + ch5x5[1] + pooled, H, W]."""
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], dim=1)


class GoogLeNet(nn.Module):
    """GoogLeNet, with the auxiliary classifiers where asked for."""

    def __init__(self, variant: Variant, num_classes: int, in_channels: int, auxiliary_heads: bool) -> None:
        """Builds the network.

        Args:
            variant: `PAPER` or `TORCHVISION`.
            num_classes: Number of logits.
            in_channels: Channels of an image.
            auxiliary_heads: Whether the two auxiliary classifiers are there.
        """
        super().__init__()
        block = partial(Inception, variant)
        self.until_4a = nn.Sequential(
            *variant.convolution(in_channels, 64, 7, stride=2),
            nn.MaxPool2d(3, stride=2, ceil_mode=True),
            *variant.response_norm(),
            *variant.convolution(64, 64, 1),
            *variant.convolution(64, 192, 3),
            *variant.response_norm(),
            nn.MaxPool2d(3, stride=2, ceil_mode=True),
            block(192, 64, (96, 128), (16, 32), 32),
            block(256, 128, (128, 192), (32, 96), 64),
            nn.MaxPool2d(3, stride=2, ceil_mode=True),
            block(480, 192, (96, 208), (16, 48), 64),
        )
        self.until_4d = nn.Sequential(
            block(512, 160, (112, 224), (24, 64), 64),
            block(512, 128, (128, 256), (24, 64), 64),
            block(512, 112, (144, 288), (32, 64), 64),
        )
        self.until_5b = nn.Sequential(
            block(528, 256, (160, 320), (32, 128), 128),
            nn.MaxPool2d(variant.last_pool, stride=2, ceil_mode=True),
            block(832, 256, (160, 320), (32, 128), 128),
            block(832, 384, (192, 384), (48, 128), 128),
        )
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(variant.dropout), nn.Linear(1024, num_classes)
        )
        self.heads = nn.ModuleList(
            _auxiliary_head(variant, channels, num_classes) for channels in (512, 528) if auxiliary_heads
        )

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Maps images [N, in_channels, H, W] to logits [N, num_classes].

        While training with auxiliary heads the answer is three such tensors: the logits, and those of
        the heads behind inception 4a and 4d.
        """
        after_4a = self.until_4a(images)
        after_4d = self.until_4d(after_4a)
        logits: Tensor = self.classifier(self.until_5b(after_4d))
        if not (self.training and self.heads):
            return logits
        head_4a, head_4d = self.heads
        return logits, head_4a(after_4a), head_4d(after_4d)


def googlenet(
    num_classes: int = 1000, in_channels: int = 3, batch_norm: bool = False, auxiliary_heads: bool = False
) -> GoogLeNet:
    """Builds GoogLeNet.

    Maps images [N, in_channels, H, W], H and W at least 31 (published: 224), to logits
    [N, num_classes]. Parameters at 1000 classes and 3 channels, without and with the auxiliary heads:

    * `batch_norm=False`, the paper's: 6,998,552 and 13,378,280. The paper says about 7 million.
    * `batch_norm=True`, torchvision's: 6,624,904 and 13,004,888. Fewer, since torchvision's 5x5
      branches hold 3x3 convolutions.

    Args:
        num_classes: Number of logits.
        in_channels: Channels of an image.
        batch_norm: Whether to build torchvision's variant instead of the paper's.
        auxiliary_heads: Whether to add the two auxiliary classifiers; see `GoogLeNet.forward`.

    Returns:
        The network, initialised as torchvision does where it has batch normalisation. Without it that
        start would fade out over 22 layers, so it is Kaiming's; the paper states none.
    """
    network = GoogLeNet(TORCHVISION if batch_norm else PAPER, num_classes, in_channels, auxiliary_heads)
    if batch_norm:
        truncated_normal = partial(nn.init.trunc_normal_, std=0.01)
        initialise(network, convolution=truncated_normal, linear=truncated_normal)
    else:
        initialise(network, convolution=kaiming_fan_in)
    return network


def _auxiliary_head(variant: Variant, in_channels: int, num_classes: int) -> nn.Sequential:
    """An auxiliary classifier: [N, in_channels, H, W] to logits [N, num_classes]."""
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(4),
        *variant.convolution(in_channels, 128, 1),
        nn.Flatten(),
        nn.Linear(128 * 4 * 4, 1024),
        nn.ReLU(inplace=True),
        nn.Dropout(0.7),
        nn.Linear(1024, num_classes),
    )

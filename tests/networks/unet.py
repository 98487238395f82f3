"""U-Net: Ronneberger, Fischer and Brox, arXiv:1505.04597, half as wide, with padded convolutions and batch norm.

It is not in `NETWORKS`, because its logits are one for each pixel.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DoubleConvolution(nn.Module):
    """Two convolutions, each with batch norm and a relu in place."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs))
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x), inplace=True)), inplace=True)


class UNet(nn.Module):
    """Maps images [N, 3, H, W] to logits [N, classes, H, W]; H and W are multiples of ``2 ** (levels - 1)``.

    Args:
        classes: logits of each pixel.
        width: channels of the finest level; each coarser level has twice as many as the one before.
        levels: how many levels there are.
    """

    def __init__(self, classes: int = 4, width: int = 32, levels: int = 5) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.down = nn.ModuleList([DoubleConvolution(a, b) for a, b in zip([3, *widths], widths, strict=False)])
        pairs = list(pairwise(reversed(widths)))
        self.widen = nn.ModuleList([nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs])
        self.up = nn.ModuleList([DoubleConvolution(2 * b, b) for _, b in pairs])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        beside: list[Tensor] = []
        for number, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if number else x)
            beside.append(x)
        for widen, block, skip in zip(self.widen, self.up, reversed(beside[:-1]), strict=True):
            x = block(torch.cat([skip, widen(x)], dim=1))
        logits: Tensor = self.head(x)
        return logits

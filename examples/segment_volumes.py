"""Segments balls in noisy volumes with a U-Net in three dimensions, in a plain loop.

Volumes are where activations outgrow everything else. The data are made here. The one line that adds backstash is
``bs.wrap(model)``: whenever the loop calls the model to train it, the call runs under a Session.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

import backstash as bs
from backstash.integrations.loop import session_of
from backstash.stash.ledger import Report


def block(channels: int, width: int) -> nn.Sequential:
    """Two convolutions with batch norm and relu."""
    return nn.Sequential(
        *(nn.Conv3d(channels, width, 3, padding=1, bias=False), nn.BatchNorm3d(width), nn.ReLU()),
        *(nn.Conv3d(width, width, 3, padding=1, bias=False), nn.BatchNorm3d(width), nn.ReLU()),
    )


class UNet(nn.Module):
    """A U-Net of three levels for volumes of one channel.

    Args:
        width: channels of the first level; each further level has twice as many.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down1, self.down2 = block(1, width), block(width, 2 * width)
        self.bottom = block(2 * width, 4 * width)
        self.up2, self.up1 = block(6 * width, 2 * width), block(3 * width, width)
        self.pool = nn.MaxPool3d(2)
        self.enlarge = nn.Upsample(scale_factor=2, mode="nearest")
        self.head = nn.Conv3d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [N, 1, D, H, W] to scores of the same shape."""
        first = self.down1(x)
        second = self.down2(self.pool(first))
        y = self.bottom(self.pool(second))
        y = self.up2(torch.cat([second, self.enlarge(y)], 1))
        y = self.up1(torch.cat([first, self.enlarge(y)], 1))
        scores: Tensor = self.head(y)
        return scores


def volumes(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Noise [N, 1, size, size, size] with a ball in it, and where the ball is, as zeros and ones."""
    axes = torch.linspace(-1, 1, size)
    grid = torch.stack(torch.meshgrid(axes, axes, axes, indexing="ij"))
    centre, radius = torch.rand(count, 3, 1, 1, 1) - 0.5, 0.2 + 0.3 * torch.rand(count, 1, 1, 1)
    inside = ((grid - centre).square().sum(1) < radius**2).float().unsqueeze(1)
    return inside + torch.randn_like(inside), inside


def main(arguments: Sequence[str] | None = None) -> Report | None:
    """Trains for ``--steps`` batches; returns the report of the last step, or None with ``--plain``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="without backstash")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--size", type=int, default=48, help="voxels along an edge, a multiple of 4")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = UNet(options.width).to(device, memory_format=torch.channels_last_3d)
    if not options.plain:
        bs.wrap(model)  # <- this is all
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, options.steps + 1):
        x, y = (part.to(device) for part in volumes(options.batch, options.size))
        optimizer.zero_grad()
        loss = functional.binary_cross_entropy_with_logits(model(x), y)
        loss.backward()
        optimizer.step()
        if step % max(1, options.steps // 5) == 0:
            print(f"step {step:4}  loss {loss.item():.4f}")

    model.eval()
    with torch.no_grad():
        x, y = (part.to(device) for part in volumes(options.batch, options.size))
        found = model(x) > 0
    overlap = 2 * (found * y).sum() / (found.sum() + y.sum())
    print(f"overlap with the balls of unseen volumes (Dice): {overlap:.1%}")
    if options.plain:
        return None
    report = session_of(model).report()
    print(report)
    return report


if __name__ == "__main__":
    main()

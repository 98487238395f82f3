"""Trains a spiking network: neurons that say 0 or 1 in each of several time steps, with a surrogate gradient.

Every time step's activations are held until backward, and many of them are spikes: floats that are 0 or 1. Exact codecs
store such a value in one bit. The one line that adds backstash is ``bs.wrap(model)``. The images are those of
``train_images.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from train_images import enlarge, load

import backstash as bs
from backstash.integrations.loop import session_of
from backstash.stash.ledger import Report

DECAY = 0.5
"""Share of a neuron's potential that is left a time step later."""

STEEPNESS = 4.0
"""Of the surrogate: how fast its derivative falls with the distance from the threshold."""


class Spike(torch.autograd.Function):
    """1 above the threshold of 1, else 0; backward takes the derivative of a fast sigmoid instead (Zenke, Ganguli)."""

    @staticmethod
    def forward(ctx: Any, potential: Tensor) -> Tensor:
        """Maps potentials to zeros and ones."""
        ctx.save_for_backward(potential)
        return (potential > 1).to(potential.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The gradient times the surrogate's derivative."""
        (potential,) = ctx.saved_tensors
        surrogate: Tensor = gradient / (1 + STEEPNESS * (potential - 1).abs()).square()
        return surrogate


class Neurons(nn.Module):
    """Leaky integrate-and-fire neurons. Their potential leaks, and falls by 1 when they spike."""

    def forward(self, current: Tensor, potential: Tensor | None) -> tuple[Tensor, Tensor]:
        """One time step: returns the spikes and the potential that is left."""
        potential = current if potential is None else DECAY * potential + current
        spikes: Tensor = Spike.apply(potential)  # type: ignore[no-untyped-call]
        return spikes, potential - spikes.detach()


class SpikingNetwork(nn.Module):
    """Three convolutions of spiking neurons and a classifier that reads the mean of its spikes.

    Args:
        width: channels of the first convolution; the others have twice and four times as many.
        times: number of time steps.
    """

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        widths = [1, width, 2 * width, 4 * width]
        self.convolutions = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b)) for a, b in pairwise(widths)
        )
        self.neurons = nn.ModuleList(Neurons() for _ in self.convolutions)
        self.pool = nn.MaxPool2d(2)  # the largest of four spikes is a spike
        self.head = nn.Linear(widths[-1], 10)
        self.times = times

    def forward(self, images: Tensor) -> Tensor:
        """Maps [N, 1, H, W] to scores [N, 10]."""
        potentials: list[Tensor | None] = [None] * len(self.convolutions)
        scores = images.new_zeros(len(images), 10)
        for _ in range(self.times):
            x = images
            for at, (convolution, neurons) in enumerate(zip(self.convolutions, self.neurons, strict=True)):
                x, potentials[at] = neurons(convolution(x), potentials[at])
                x = self.pool(x)
            scores = scores + self.head(x.mean((2, 3)))
        return scores / self.times


def main(arguments: Sequence[str] | None = None) -> Report | None:
    """Trains for ``--steps`` batches; returns the report of the last step, or None with ``--plain``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="without backstash")
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST's files")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--times", type=int, default=8, help="time steps")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name, (images, labels), (unseen, truth) = load(options.data)
    model = SpikingNetwork(options.width, options.times).to(device, memory_format=torch.channels_last)
    if not options.plain:
        bs.wrap(model)  # <- this is all
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    print(f"{name}, batches of {options.batch}, {options.times} time steps")
    for step in range(1, options.steps + 1):
        chosen = torch.randint(len(images), (options.batch,))
        x, y = enlarge(images[chosen], options.image_size).to(device), labels[chosen].to(device)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if step % max(1, options.steps // 5) == 0:
            print(f"step {step:4}  loss {loss.item():.4f}")

    model.eval()
    with torch.no_grad():
        found = model(enlarge(unseen[:256], options.image_size).to(device)).argmax(1).cpu()
    print(f"accuracy on {len(found)} unseen images: {(found == truth[:256]).float().mean():.1%}")
    if options.plain:
        return None
    report = session_of(model).report()
    print(report)
    return report


if __name__ == "__main__":
    main()

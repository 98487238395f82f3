"""A residual network, trained in half of the memory that it takes by itself.

Profiles a step, plans for a budget, and trains some steps both ways. It prints plain PyTorch's peak, the budget, the
peak that was predicted and the one that was reached, the time of a step, and whether all weights have the same bits.
"""

from __future__ import annotations

import argparse
import copy
import time
from contextlib import nullcontext
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstash as bs


class Block(nn.Module):
    """Two convolutions with batch norms, and a sum with what goes around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps [N, C, H, W] to [N, C, H, W]."""
        return F.relu(self.layers(x) + x, inplace=True)


def network(channels: int, blocks: int) -> nn.Module:
    """A stem, the blocks, and a classifier of 10 classes."""
    stem = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return nn.Sequential(stem, *(Block(channels) for _ in range(blocks)), head)


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]], policy: bs.Policy | None) -> float:
    """Trains a step on each batch and returns the median of their seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session = nullcontext() if policy is None else bs.Session(policy, model=model)
    times = []
    for x, y in batches:
        started = time.perf_counter()
        optimizer.zero_grad()
        with session:
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - started)
    return median(times[1:])  # the first step proves what it will rely on


def main() -> None:
    """Prints a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="50%", help="such as 2GiB, or a share of plain's peak (default: 50%%)")
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5)
    asked = parser.parse_args()
    torch.manual_seed(0)
    model = network(asked.channels, asked.blocks)
    batches = [(torch.randn(asked.batch, 3, 32, 32), torch.randint(10, (asked.batch,))) for _ in range(asked.steps)]
    x, y = batches[0]

    def step() -> None:
        F.cross_entropy(model(x), y).backward()

    profile = bs.profile(step, model)
    plan = bs.plan(profile, asked.budget)
    again = copy.deepcopy(model)
    plain_seconds = train(model, batches, None)
    seconds = train(again, batches, plan)
    same = all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    mib = 1 << 20

    def planned_step() -> None:
        with bs.Session(plan, model=model):
            loss = F.cross_entropy(model(x), y)
        loss.backward()

    reached = bs.measure(planned_step)
    print(f"plain PyTorch's peak   {profile.plain_peak_nbytes / mib:8.1f} MiB above what is held before the step")
    print(f"budget                 {plan.budget / mib:8.1f} MiB")
    print(f"predicted peak         {plan.peak_nbytes / mib:8.1f} MiB")
    print(f"reached peak           {reached.peak_nbytes / mib:8.1f} MiB")
    if reached.resident_nbytes is not None:
        print(f"resident peak          {reached.resident_nbytes / mib:8.1f} MiB above what is resident before the step")
    print(f"step                   {1e3 * seconds:8.0f} ms, plain {1e3 * plain_seconds:.0f} ms")
    print(f"all weights and statistics after {asked.steps} steps are {'equal, bit for bit' if same else 'DIFFERENT'}")
    raise SystemExit(not same)


if __name__ == "__main__":
    main()

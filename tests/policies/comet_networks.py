"""Small networks, and how tests train them on scikit-learn's digits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash import Session

sklearn_datasets = pytest.importorskip("sklearn.datasets")


def digits() -> tuple[Tensor, Tensor]:
    bunch = sklearn_datasets.load_digits()
    return torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16 - 0.3, torch.tensor(bunch.target)


def network() -> nn.Sequential:
    """Returns a network whose convolutions read images, a relu's result and a pooling's result."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def batches(steps: int, size: int = 64) -> Iterator[tuple[Tensor, Tensor]]:
    images, labels = digits()
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randperm(len(images), generator=generator)[:size]
        yield images[chosen], labels[chosen]


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, policy: Any, steps: int) -> tuple[list[float], Session]:
    session, losses = Session(policy, model=model, min_nbytes=0), []
    for x, y in batches(steps):
        optimizer.zero_grad()
        with session:
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, session


def convolutions(session: Session) -> dict[str, str]:
    """Returns the codec of each convolution's input, by the convolution's name."""
    rows = session.report().rows
    return {row.key.split("/")[0]: row.codec for row in rows for key in [row.key, *row.shared_by] if ":input" in key}


def normalised() -> nn.Sequential:
    """Returns a network in which a convolution reads a relu's result, and a batch norm reads the convolution's."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


class Residual(nn.Module):
    """A residual network: a relu reads a batch norm's result, or its sum with the block's input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.Linear(16, 10)
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.stem(x)))
        for number in (0, 2):
            y = F.relu(self.norms[number + 1](self.convs[number](x)))
            x = F.relu(self.norms[number + 2](self.convs[number + 1](y)) + x)
        logits: Tensor = self.head(x.mean([2, 3]))
        return logits

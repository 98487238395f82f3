"""Models and training steps for tests of values that are moved to other stores."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash import Session


class Block(nn.Module):
    """Two convolutions and a residual connection around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.second(F.relu(self.first(x)))))


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), Block(8), Block(8))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(8 * 7 * 7, 5))

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(x)), torch.arange(len(x)) % 5)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)))
        self.gelu = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", norm_first=True)
        self.head = nn.Linear(16, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(len(x), -1, 16)
        x = self.gelu(self.blocks(x * 2))
        return F.cross_entropy(self.head(x).flatten(0, 1), torch.arange(x.shape[0] * x.shape[1]) % 7)


def trained(make: Callable[[], nn.Module], session: Session | None, steps: int = 3) -> list[Tensor | None]:
    """Returns the gradients of each step, and the parameters after the last step."""
    torch.manual_seed(3)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found: list[Tensor | None] = []
    for step in range(steps):
        x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        with session or nullcontext():
            loss = model(x)
        loss.backward()
        found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return found + [p.detach().clone() for p in model.parameters()]


def chain(width: int = 64, depth: int = 8) -> nn.Sequential:
    layers = (layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh()))
    return nn.Sequential(*layers)


def step(session: Session, model: nn.Module, x: Tensor) -> None:
    with session:
        loss = model(x).sum()
    loss.backward()

"""A short training on real images, after which zeros are where training puts them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from bench.cases import SEED, image_batch
from bench.rounds import Deadline


@dataclass(frozen=True)
class Schedule:
    """How long and on what to train.

    Attributes:
        steps: most steps.
        batch: images per step.
        size: their height and width.
        learning_rate: of SGD with momentum 0.9, gradients clipped to norm 1.
    """

    steps: int
    batch: int
    size: int
    learning_rate: float = 0.01


@dataclass(frozen=True)
class Training:
    """What a training did.

    Attributes:
        data: the images.
        schedule: what was asked for.
        steps: steps done.
        first_loss, last_loss: losses of the first and the last step; None without steps.
    """

    data: str
    schedule: Schedule
    steps: int
    first_loss: float | None
    last_loss: float | None

    def __str__(self) -> str:
        if self.first_loss is None or self.last_loss is None:
            return "not trained"
        return (
            f"{self.steps} steps of {self.schedule.batch} images ({self.data}), "
            f"loss {self.first_loss:.2f} to {self.last_loss:.2f}"
        )


def train(model: nn.Module, schedule: Schedule, device: str, deadline: Deadline | None = None) -> Training:
    """Trains a network in place with plain PyTorch.

    Args:
        model: maps images [N, 3, size, size] to logits [N, classes]; on ``device``.
        schedule: how long; stops earlier at the deadline, after at least one step.
        device: ``"cpu"`` or ``"cuda"``.
        deadline: when to stop; None for never.
    """
    torch.manual_seed(SEED)
    optimizer = torch.optim.SGD(model.parameters(), schedule.learning_rate, momentum=0.9)
    losses: list[float] = []
    data = ""
    for step in range(schedule.steps):
        if step and deadline is not None and deadline.left() < 0:
            break
        data, images, labels = image_batch(schedule.batch, schedule.size, start=step * schedule.batch)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
        torch.autograd.backward([loss])
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    model.zero_grad()
    ends = (losses[0], losses[-1]) if losses else (None, None)
    return Training(data, schedule, len(losses), *ends)

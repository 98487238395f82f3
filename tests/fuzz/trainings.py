"""Trains small networks whose steps change at random, with and without Sessions: ``python -m tests.fuzz.trainings``.

The programs of ``python -m tests.fuzz`` are sequences of tensor functions. Here are modules, of which a Session keeps
what it has learned by their paths and replays it: convolutions with batch norms, attention, a recurrent cell, gated
layers. Between two steps one thing or another changes: the branch that runs, the number or the size of the images,
the dtype, autocast, hooks, what is frozen, the layers themselves, training or evaluation, the order of forward and
backward passes, whether the Session is left between them. Sessions of the same model share what they have learned: a
training has one Session, or a new one in each step, or several that take turns. The
losses, the gradients, the buffers and the weights have to have the same bits as without any Session.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstash import Session
from tests.gradients.gradient_checks import Remake

POLICIES = ("lossless", "lossless", "lossless_stored", "keep", "remake")
ACTIVATIONS = (nn.ReLU, nn.Sigmoid, nn.Tanh, nn.GELU, nn.SiLU, nn.Softplus, nn.LeakyReLU, nn.ReLU6, nn.Hardswish)
CHANGES = (
    "nothing",
    "nothing",
    "branch",
    "batch",
    "size",
    "dtype",
    "autocast",
    "weight hook",
    "value hook",
    "module hook",
    "no hooks",
    "freeze",
    "activation",
    "block",
    "mode",
    "passes",
    "around",
    "policy",
)
"""What may change between two steps."""

PASSES = ("Aa", "Aa", "AaBb", "ABab", "ABba", "ABaCbc", "ABCabc", "ABbCca", "ABb")
"""Orders of a step's passes: a forward pass is a capital letter, and its backward pass, if any, a small one."""


class Gated(nn.Module):
    """A product of two tensors that both need a gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.value, self.gate = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, C, H, W] to such images."""
        return self.value(x) * self.gate(x).sigmoid()


class Attention(nn.Module):
    """Attention among the pixels of an image, after a layer norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, C, H, W] to such images."""
        words = x.flatten(2).transpose(1, 2)
        query, key, value = self.inner(self.norm(words)).chunk(3, dim=-1)
        words = words + self.outer(F.scaled_dot_product_attention(query, key, value))
        return words.transpose(1, 2).reshape(x.shape)


class Recurrent(nn.Module):
    """A cell that walks along the columns of an image; its first call differs from the others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, C, H, W] to such images."""
        state = None
        for column in x.mean(2).unbind(2)[:3]:
            state = self.cell(column, state)
        assert state is not None
        return x + state[:, :, None, None]


class Parts(nn.Module):
    """Functions of parts of what a layer makes, which do not begin where that does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(width, 2 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, C, H, W] to such images."""
        halves = self.layer(x).unflatten(1, (2, -1)).transpose(0, 1).contiguous()
        gate, value = halves
        return F.relu(value) * gate.sigmoid() + F.leaky_relu(halves[1:] + 0.5)[0]


BLOCKS: tuple[Callable[[int], nn.Module], ...] = (
    Gated,
    Attention,
    Recurrent,
    Parts,
    lambda width: nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
    lambda width: nn.Sequential(nn.Conv2d(width, width, 1), nn.GroupNorm(2, width), nn.Dropout(0.2)),
    lambda width: nn.Sequential(nn.Conv2d(width, width, 1), nn.MaxPool2d(3, 1, 1), nn.SiLU()),
)


class Network(nn.Module):
    """Blocks and activations, of which every second one is left out in a branch."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList([draw.choice(BLOCKS)(8) for _ in range(3)])
        self.activations = nn.ModuleList([draw.choice(ACTIVATIONS)() for _ in range(3)])
        self.head = nn.Linear(8, 5)
        self.branch = self.watches_value = False

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, 3, H, W] to logits [N, 5]."""
        y = self.first(x)
        for number, (block, activation) in enumerate(zip(self.blocks, self.activations, strict=True)):
            if self.branch and number == 1:
                y = torch.cat([y[:, :4], y[:, 4:].abs() + y[:, :4]], dim=1)
                continue
            y = activation(block(y)) + y * 0.5
            if self.watches_value and y.requires_grad:
                y.register_hook(lambda gradient: gradient * 1.5)
        logits: Tensor = self.head(y.mean((2, 3)))
        return logits


class Training:
    """A training whose steps differ at random; equal seeds make equal trainings.

    Attributes:
        changed: what has changed before each step, for messages.
        policy: of the Session that the next step is to run under.
    """

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.model = Network(self.draw)
        self.batch, self.size, self.autocast, self.dtype = 2, 6, False, torch.float32
        self.passes, self.is_around = "Aa", False
        self.hooks: list[Any] = []
        self.policy = self.draw.choice(POLICIES)
        self.changed: list[str] = []

    def change(self) -> None:
        """Changes one thing, or nothing."""
        draw, model = self.draw, self.model
        change = draw.choice(CHANGES)
        self.changed.append(change)
        if change == "branch":
            model.branch = not model.branch
        elif change == "batch":
            self.batch = draw.choice([2, 3])
        elif change == "size":
            self.size = draw.choice([5, 6])
        elif change == "dtype":
            self.dtype = torch.float64 if self.dtype is torch.float32 else torch.float32
            model.to(self.dtype)
        elif change == "autocast":
            self.autocast = not self.autocast
        elif change == "weight hook":
            trained = [each for each in model.parameters() if each.requires_grad]
            self.hooks.append(draw.choice(trained).register_hook(lambda gradient: gradient * 2))
        elif change == "value hook":
            model.watches_value = not model.watches_value
        elif change == "module hook":
            block = draw.choice(list(model.blocks))
            self.hooks.append(block.register_forward_hook(lambda module, args, output: output * 1.25))
        elif change == "no hooks":
            while self.hooks:
                self.hooks.pop().remove()
        elif change == "freeze":
            layer = draw.choice([*model.blocks, model.first])
            layer.requires_grad_(not next(layer.parameters()).requires_grad)
        elif change == "activation":
            model.activations[draw.randrange(3)] = draw.choice(ACTIVATIONS)()
        elif change == "block":
            model.blocks[draw.randrange(3)] = draw.choice(BLOCKS)(8).to(self.dtype).train(model.training)
        elif change == "mode":
            model.train(not model.training)
        elif change == "passes":
            self.passes = draw.choice(PASSES)
        elif change == "around":
            self.is_around = not self.is_around
        elif change == "policy":
            self.policy = draw.choice(POLICIES)

    def step(self, open_session: Callable[[str], AbstractContextManager[object]]) -> list[Tensor | None]:
        """Runs a step on random images; returns the losses, the gradients, and what the model's state is afterwards."""
        model = self.model
        model.zero_grad()
        cast = self.autocast and self.dtype is torch.float32
        losses: dict[str, Tensor] = {}
        with open_session(self.policy) if self.is_around else nullcontext():
            for each in self.passes:
                if each.islower():
                    losses[each.upper()].backward()
                    continue
                x = torch.randn(self.batch, 3, self.size, self.size, dtype=self.dtype)
                labels = torch.randint(5, (self.batch,))
                opened = nullcontext() if self.is_around else open_session(self.policy)
                with opened, torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
                    losses[each] = F.cross_entropy(model(x).to(self.dtype), labels)
        gradients = [None if each.grad is None else each.grad.clone() for each in model.parameters()]
        with torch.no_grad():
            for each in model.parameters():
                if each.grad is not None:
                    each.sub_(each.grad, alpha=0.05)
        return [
            *(loss.detach() for loss in losses.values()),
            *gradients,
            *[each.clone() for each in model.state_dict().values()],
        ]


class Sessions:
    """Opens a training's Sessions: one for each policy, a new one for each step, or two that take turns."""

    def __init__(self, seed: int, model: nn.Module) -> None:
        self._kind = ("same", "fresh", "turns")[seed % 3]
        # The smallest size decides how much is looked at: everything, what a Session chooses, or some of it.
        self._min_nbytes = (0, 0, None, 512)[seed // 3 % 4]
        self._given = model if seed % 2 else None
        self._open: dict[tuple[str, int], Session] = {}
        self._step = 0

    def __call__(self, policy: str) -> Session:
        """The Session for the next step."""
        self._step += 1
        number = {"same": 0, "fresh": self._step, "turns": self._step % 2}[self._kind]
        session = self._open.get((policy, number))
        if session is None:
            asked = Remake() if policy == "remake" else policy
            session = Session(asked, model=self._given, min_nbytes=self._min_nbytes)
            if self._kind != "fresh":
                self._open[policy, number] = session
        return session


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype is other.dtype and one.shape == other.shape and bool(_bits(one).equal(_bits(other)))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def difference(seed: int, steps: int = 14) -> str:
    """Runs a training both ways; returns where they first differ, or "" if they have the same bits."""
    plain, under_session = Training(seed), Training(seed)
    sessions = Sessions(seed, under_session.model)
    numbers = random.Random(seed)
    for step in range(steps):
        state = numbers.randrange(1 << 30)
        results = []
        for training in (plain, under_session):
            torch.manual_seed(state)
            if step:
                training.change()
            torch.manual_seed(state + 1)
            results.append(training.step((lambda policy: nullcontext()) if training is plain else sessions))
        if not all(_equal(one, other) for one, other in zip(*results, strict=True)):
            return f"seed {seed}: step {step} has other bits, after {', '.join(plain.changed) or 'no change'}"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs trainings until the time is up; returns 0 if all had the same bits, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.trainings", description=__doc__)
    parser.add_argument("--trainings", type=int, default=1000, help="how many to run at most (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first training (default: %(default)s)")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    end, number, failures = time.monotonic() + 60 * asked.minutes, 0, []
    while number < asked.trainings and time.monotonic() < end:
        failure = difference(asked.seed + number)
        number += 1
        if failure:
            failures.append(failure)
            print(failure, flush=True)
    print(f"{number} trainings from seed {asked.seed} on, {len(failures)} with other bits")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
